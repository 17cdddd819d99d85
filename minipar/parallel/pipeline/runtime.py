"""Pipeline parallelism: ranks hold layers of their own and pass activations on, by any schedule.

Idea.   Cut the model into stages and the batch into microbatches. A schedule (`schedules.py`) says
        what each rank does in which order; this file does it.
Math.   None of its own: stage s computes x_s = f_s(x_(s-1)) forward and, from the gradient of x_s,
        those of x_(s-1) and of its weights backward. Gradients of microbatches add up.
Shapes. Tokens and targets [B, T] of each microbatch are on all ranks of the axis. Between stages
        [B, T, D]. A parameter exists on the ranks of its stage only: a piece along `pp`.
Comms.  Per microbatch and pair of neighbouring stages on different ranks: B·T·D elements forward
        and as many backward. All ranks together 2 M (S-1) B·T·D per step, less where neighbours
        share a rank, and the loss, one number. Embeddings tied across two ranks: V·D more from each
        of the two. A schedule with two copies of the model (dualpipe): all gradients, once. At the
        start, the whole model from rank 0 to all.
Memory. 1/p of parameters, gradients and optimizer state; activations as `checks.peak_live` counts.
Costs you. The bubble; microbatches, which are small; layers that can be cut evenly.
Source. Huang et al. 2019 (1811.06965), Narayanan et al. 2021 (2104.04473); others by schedule.
In torch: `torch.distributed.pipelining`.
Proved by tests/parallel/test_pipeline.py and tests/parity/test_pipeline.py.

Use::

    schedule = schedules.make("1f1b", p=4, m=8)
    pipeline = apply(model, mesh.pp, schedule)          # now `model` has the layers of this rank
    data = ddp.apply(model, mesh.dp, average=False)     # after the split: it sees what is left
    train_step(model, [data, pipeline], ...)
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from minipar.comm.collectives import (
    Pending,
    all_gather_object,
    all_reduce,
    broadcast,
    connect,
    exchange,
)
from minipar.comm.mesh import Axis
from minipar.model.llama import Llama, LlamaConfig, beside, loss_of
from minipar.observe import timeline
from minipar.parallel.base.replicate import broadcast_all, replicate
from minipar.parallel.base.shards import mark
from minipar.parallel.base.strategy import Strategy, device_of
from minipar.parallel.pipeline.actions import Action, Schedule, slots
from minipar.parallel.pipeline.checks import validate
from minipar.parallel.pipeline.messages import AHEAD, Mail, around, forward_only
from minipar.parallel.pipeline.pairs import side_by_side
from minipar.parallel.pipeline.schedules import check_pairs
from minipar.parallel.pipeline.simulate import SPAN_KIND, lower
from minipar.parallel.pipeline.split_backward import PutOff, enable
from minipar.parallel.pipeline.stages import (
    Stage,
    balance,
    check_cut,
    estimate_costs,
    homes_of,
    keep_only,
    layers_of,
    part_of,
)


def apply(
    model: Llama,
    axis: Axis,
    schedule: Schedule,
    *,
    cut: Sequence[int] | None = None,
    token_shards: int = 1,
    paired: bool = False,
) -> "Pipeline":
    """Leave on each rank of `axis` the layers of its stages, in place; names stay.

    The weights are those that rank 0 of the axis has now.

    Args:
        schedule: for as many ranks as the axis has, and the microbatches of a step.
        cut: layers per part of the model, such as (3, 4, 4, 3). By default, so that estimated FLOPs
            are balanced.
        token_shards: into how many pieces activations are cut along the tokens between layers: the
            ranks of sequence parallelism.
        paired: where the schedule has a forward beside a backward, each runs while the all-to-alls
            of the other travel: see `pairs`.

    Raises `ValueError` for a schedule that cannot be run (`checks.validate` names the action), has
    no pairs and should, or is for other ranks, for a cut that does not fit, for a model that is no
    plain Llama, and where ranks were given different schedules or cuts.
    """
    if not isinstance(getattr(model, "config", None), LlamaConfig) or "forward" in vars(model):
        raise ValueError(
            f"a pipeline cuts a Llama by its names, with the forward it was born with, not this "
            f"{type(model).__name__}"
        )
    if axis.size > 1 and getattr(model, "loss_chunk", 0):
        raise ValueError(
            f"loss_chunk={model.loss_chunk} is of a model that computes its loss itself, and here "
            f"the last stage does; set it to 0"
        )
    validate(schedule)
    if paired:
        check_pairs(schedule)
    if paired or not schedule.is_lowered:
        schedule = lower(schedule, paired)
    if schedule.num_ranks != axis.size:
        raise ValueError(
            f"{schedule.name} is for {schedule.num_ranks} ranks, but {axis.name}={axis.size}; "
            f"make it with p={axis.size}"
        )
    if cut is None:
        cut = balance(estimate_costs(model.config), schedule.num_stages)
    else:
        cut = check_cut(cut, schedule.num_stages, model.config.num_layers)
    # Ranks that follow different plans would wait for each other.
    plans = all_gather_object((schedule.as_text(), cut), axis)
    other = next((r for r, plan in enumerate(plans) if plan != plans[0]), None)
    if other is not None:
        raise ValueError(f"ranks 0 and {other} of {axis.name} have different schedules or cuts")
    replicate(model, axis)
    connect(axis, device_of(model), schedule.pairs)
    return Pipeline(model, axis, schedule, cut, token_shards, paired)


PAIRED_FSDP = (
    "fsdp frees weights after each backward, and in a pair the forward beside it may need those of "
    "the embedding or the head"
)


class Pipeline(Strategy):
    """A model cut into stages, and a schedule by which they work.

    Tensor parallelism is applied to `model` before it, data parallelism after it. In a list of
    strategies it comes last, because it collects the whole model; where another one keeps weights
    in pieces, ``pipeline.full_state_dict(other.full_state_dict())``.
    """

    def __init__(
        self,
        model: Llama,
        axis: Axis,
        schedule: Schedule,
        cut: tuple[int, ...],
        token_shards: int = 1,
        paired: bool = False,
    ) -> None:
        super().__init__(model, axis)
        self.schedule, self.cut, self.config = schedule, cut, model.config
        self.token_shards, self.paired = token_shards, paired
        row = schedule.actions[axis.rank]
        self.last_gradient = {s: schedule.last_gradient(s) for s in schedule.stages_on(axis.rank)}
        self.put_off = PutOff()
        if any(action.kind == "W" for action in row):
            enable(model, self.put_off)
        self.stages = {}
        for stage in self.last_gradient:
            part = schedule.part(stage)
            module = part_of(model, layers_of(cut, part), part == 0, part == len(cut) - 1)
            self.stages[stage] = Stage(module, self.put_off)
        self.names = list(model.state_dict(keep_vars=True))
        self.weights = homes_of(model, schedule, cut)
        keep_only(model, {schedule.part(stage) for stage in self.stages}, cut)
        self._shares = any(len(weight.ranks) > 1 for weight in self.weights)
        self.twins, self.shard_axes = self._mark_parameters(), (axis,)
        self._adding: Pending | None = None
        self._agreed = False  # on the shapes of microbatches
        self.dtype: torch.dtype | None = None  # of what stages send; None: that of parameters

    def _mark_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Tell the gradient norm what is where; return what several stages have, by rank."""
        twins = {}
        found = dict(self.model.named_parameters(remove_duplicate=False))
        for weight in self.weights:
            p = next((found[name] for name in weight.names if name in found), None)
            if p is None or self.axis.size == 1:
                continue
            mark(p, self.axis, copy=self.axis.rank != weight.ranks[0])
            if p.requires_grad and (len(weight.ranks) > 1 or len(weight.names) > 1):
                twins[p] = weight.ranks
        return twins

    # ------------------------------------------------------------------ one step
    def run(
        self,
        model: nn.Module,
        strategies: Sequence[Strategy],
        microbatches: Sequence[tuple[Tensor, ...]],
        *,
        weigh: Callable[[Tensor], Tensor] = lambda loss: loss,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Forward and backward of all microbatches: in place of `step.forward_backward`.

        Gradients add up in ``p.grad``. The other `strategies` synchronise those of a stage during
        its last backward and no earlier one, while stages that are not as far still compute.
        Returns the sum of the losses, float64, equal on all ranks of the axis; it is complete after
        `finish_backward`.

        Raises `ValueError` for another number of microbatches than the schedule is for, for shapes
        that differ between ranks (looked at once), and for fsdp where it would go wrong.
        """
        if len(microbatches) != self.schedule.num_microbatches:
            raise ValueError(
                f"{len(microbatches)} microbatches, but the schedule {self.schedule.name} is for "
                f"{self.schedule.num_microbatches}; make another, or cut the batch so"
            )
        self._check_pieces()
        self._agree([tuple(tokens.shape) for tokens, *_ in microbatches])
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0][0].device)
        self.put_off.clear()
        for stage in self.stages.values():
            stage.reset()

        def work(action: Action, given: Tensor | None) -> Tensor | None:
            stage, i = self.stages[action.stage], action.microbatch
            inputs, targets, *context = microbatches[i]

            def finish(logits: Tensor) -> Tensor:
                loss = loss_of(model)(logits, targets)
                total.add_(loss.detach())
                return weigh(loss)

            if action.kind == "F":
                x = inputs if stage.first else given
                context = beside(model, targets, context)
                return stage.forward(i, x, context, autocast, finish)
            if action.kind == "W":
                return stage.weight_gradient(i)
            backward = stage.backward if action.kind == "B" else stage.input_gradient
            gradient = backward(i, given)
            for strategy in strategies:
                strategy.release()
            return gradient

        def guarded(action: Action, given: Tensor | None) -> Tensor | None:
            is_last = action.microbatch == self.last_gradient[action.stage].microbatch
            with ExitStack() as stack:
                if action.kind != "F" and not is_last:
                    for strategy in strategies:
                        stack.enter_context(strategy.no_sync())
                return work(action, given)

        with self._twins_apart():
            self._play(self.schedule, microbatches, guarded)
        assert not self.put_off.waiting, f"the schedule left {self.put_off.waiting} undone"
        self._adding = all_reduce(total, self.axis, out=total, async_op=True)
        return total

    def _check_pieces(self) -> None:
        """Refuse what would go wrong unnoticed: pieces of sums that are not of all ranks."""
        is_flat = any(getattr(p, "is_flat", False) for p in self.model.parameters())
        if is_flat and self.paired:
            raise ValueError(f"{PAIRED_FSDP}; use zero or ddp, or paired=False")
        if is_flat and self._shares:
            raise ValueError(
                f"fsdp reduces the gradients of one rank of {self.axis.name} at a time, but here "
                f"several have the same weights, to be summed before; use zero or ddp, or a model "
                f"whose embeddings are not tied and any schedule but dualpipe"
            )

    def _agree(self, shapes: list[tuple[int, ...]]) -> None:
        """Once: do all ranks expect messages of the shapes that others will send?"""
        if self._agreed:
            return
        for rank, others in enumerate(all_gather_object(shapes, self.axis)):
            if others != shapes:
                raise ValueError(
                    f"rank {rank} of {self.axis.name} has microbatches of shapes {others}, rank "
                    f"{self.axis.rank} of {shapes}; all ranks of a pipeline load the same batch"
                )
        self._agreed = True

    def _play(
        self,
        schedule: Schedule,
        microbatches: Sequence[tuple[Tensor, ...]],
        work: Callable[[Action, Tensor | None], Tensor | None],
    ) -> None:
        """Do what `schedule` has for this rank: `work(action, what it was handed)` and messages."""
        row = schedule.actions[self.axis.rank]
        dtype, device = self.dtype or next(self.model.parameters()).dtype, self.device

        def buffer(message: Action) -> Tensor:
            batch, seq_len = microbatches[message.microbatch][0].shape  # the same on all ranks
            shape = batch, seq_len // self.token_shards, self.config.hidden_size
            return torch.empty(shape, dtype=dtype, device=device)

        # NCCL runs the messages of two ranks one after the other, so that none may overtake; and
        # as it is asynchronous to this list, its turn is early enough.
        ahead = AHEAD if device.type == "cpu" else 0
        mail = Mail(self.axis, schedule, row, buffer, ahead)

        def prepare(action: Action) -> Callable[[], Tensor | None]:
            stage, (before, _) = self.stages[action.stage], around(action)
            given = mail.take(before) if before and not stage.ends(before) else None

            def do() -> Tensor | None:
                with timeline.span(SPAN_KIND[action.kind], str(action)):
                    return work(action, given)

            return do

        for slot in slots(row, self.paired):
            if not slot[0].computes:
                mail.turn(slot[0])
                continue
            jobs = [prepare(action) for action in slot]
            made = side_by_side(*jobs) if len(jobs) > 1 else [jobs.pop()()]
            for action, tensor in zip(slot, made, strict=True):
                stage, (_, after) = self.stages[action.stage], around(action)
                if after and not stage.ends(after):
                    mail.put(after, tensor)
        mail.close()

    @contextmanager
    def _twins_apart(self) -> Iterator[None]:
        """In the body, parameters that other ranks have as well are replaced by stand-ins.

        What a stand-in gathers is a part of a sum, which nothing else may take for a gradient: data
        parallelism would send it. The parameter gets the sum at the end, as from one backward.
        """
        here = set(self.model.parameters())  # fsdp has others in the place of some
        stand_ins = {p: nn.Parameter(p.detach()) for p in self.twins if p in here}
        for p, stand_in in stand_ins.items():
            stand_in.grad_dtype = p.grad_dtype
        places = [
            (module._parameters, name, p)
            for module in self.model.modules()
            for name, p in module._parameters.items()
            if p is not None and p in stand_ins
        ]
        try:
            for parameters, name, p in places:
                parameters[name] = stand_ins[p]
            yield
        finally:
            for parameters, name, p in places:
                parameters[name] = p
        self._add_twins(stand_ins)

    def _add_twins(self, stand_ins: dict[nn.Parameter, nn.Parameter]) -> None:
        """Exchange gradients of `stand_ins`: all get the same sum, added up in the same order."""
        own, theirs, sends, receives = [], [], [], []
        for p, stand_in in stand_ins.items():
            grad = stand_in.grad
            own.append(torch.zeros_like(p, dtype=p.grad_dtype) if grad is None else grad)
            others = (rank for rank in self.twins[p] if rank != self.axis.rank)
            theirs.append({rank: torch.empty_like(own[-1]) for rank in others})
            sends += [(own[-1], rank) for rank in theirs[-1]]
            receives += [(buffer, rank) for rank, buffer in theirs[-1].items()]
        if receives:
            exchange(sends, receives, self.axis)
        for p, grad, others in zip(stand_ins, own, theirs, strict=True):
            every = {self.axis.rank: grad, **others}
            torch.autograd.backward(p, sum(every[rank] for rank in sorted(every)))

    def finish_backward(self) -> None:
        if self._adding is not None:
            self._adding.wait()
            self._adding = None

    # ------------------------------------------------------------------ forward only
    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, T] -> logits [B, T, V] on all ranks of the axis, as a whole model would.

        So `evaluate` and `generate` take a pipeline in place of a model. One microbatch, hence one
        rank at a time; for many, see `evaluate`.
        """
        found = self._forward([(tokens, positions, mask)])
        last = self.schedule.rank_of[self.schedule.num_stages - 1]
        if self.axis.rank == last:
            logits = found[0]
        else:
            dtype = self.dtype or next(self.model.parameters()).dtype
            logits = torch.empty(
                (*tokens.shape, self.config.vocab_size), dtype=dtype, device=tokens.device
            )
        return broadcast(logits, self.axis, src=last)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Sum of the losses of any number of microbatches, float64, equal on all ranks.

        Ranks work on different microbatches at the same time, and send activations only.
        """
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0][0].device)
        inputs = [(tokens, *context) for tokens, _, *context in microbatches]
        for i, logits in self._forward(inputs).items():
            total += loss_of(self.model)(logits, microbatches[i][1])
        return all_reduce(total, self.axis)

    def _forward(self, microbatches: Sequence[tuple[Tensor | None, ...]]) -> dict[int, Tensor]:
        """Outputs of the last stage by microbatch, on its rank; {} elsewhere."""
        outputs = {}

        def work(action: Action, given: Tensor | None) -> Tensor:
            tokens, *context = microbatches[action.microbatch]
            stage = self.stages[action.stage]
            out = stage.module(tokens if stage.first else given, *context)
            if stage.last:
                outputs[action.microbatch] = out
            return out

        self._play(forward_only(self.schedule, len(microbatches)), microbatches, work)
        return outputs

    # ------------------------------------------------------------------ the whole model
    @torch.no_grad()
    def join(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Collect what each rank has by the names of its parameters: on all ranks, for all names.

        Their gradients, say, or an entry of the optimizer's state; None where no rank has any, or
        the rank that counts has None. A tied weight has all of its names. A collective.
        """
        facts = {n: (t.shape, t.dtype) for n, t in tensors.items() if t is not None}
        known = all_gather_object(facts, self.axis)
        found: dict[str, Tensor | None] = {}
        of_rank: dict[int, list[Tensor]] = defaultdict(list)
        for weight in self.weights:
            home = weight.ranks[0]
            name = next((name for name in weight.names if name in known[home]), None)
            if name is None:
                found |= dict.fromkeys(weight.names)
                continue
            if self.axis.rank == home:
                value = tensors[name].detach().to(self.device, copy=True)
            else:
                shape, dtype = known[home][name]
                value = torch.empty(shape, dtype=dtype, device=self.device)
            of_rank[home].append(value)
            found |= dict.fromkeys(weight.names, value)
        for home, values in of_rank.items():
            broadcast_all(values, self.axis, src=home)
        return {name: found[name] for name in self.names}

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take what is of this rank's stages out of what `join` returned."""
        return {name: tensors[name] for name in self.model.state_dict(keep_vars=True)}

    def full_state_dict(self, own: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """As of the serial model, on all ranks. `own`: whole weights of this rank's layers, from a
        strategy that keeps them in pieces."""
        return self.join(self.model.state_dict(keep_vars=True) if own is None else own)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the weights of this rank's stages."""
        self.model.load_state_dict(self.own(state))
