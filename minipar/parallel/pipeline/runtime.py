"""Pipeline parallelism: each rank has some layers, and a schedule orders the actions of each rank.

Idea.   Cut the model into stages and the batch into microbatches. A schedule (`schedules.py`) lists
        the actions of each rank in order. This file runs them, one method per kind of action.
Math.   None of its own. Stage s computes x_s = f_s(x_(s-1)) forward. Backward it computes, from the
        gradient of x_s, the gradients of x_(s-1) and of its weights. Microbatches add up.
Shapes. Tokens and targets [B, T] of each microbatch are on all ranks of the axis. Between stages
        [B, T, D]. A parameter exists on the ranks of its stage only: a shard along `pp`.
Comms.  Per microbatch and pair of neighbouring stages on different ranks: B·T·D elements forward
        and as many backward. All ranks together 2 M (S-1) B·T·D per step, less where neighbours
        share a rank, and the loss, one number. Embeddings tied across two ranks: V·D more from each
        of the two. A schedule with two copies of the model (dualpipe): all gradients, once.
Memory. 1/p of parameters, gradients and optimizer state; activations as `checks.peak_live` counts.
Costs you. The bubble; microbatches, which are small; layers that can be cut evenly.
Source. Huang et al. 2019 (1811.06965), Narayanan et al. 2021 (2104.04473); others by schedule.
In torch: `torch.distributed.pipelining`.
Proved by tests/parallel/test_pipeline.py and tests/law/test_pipeline.py.

Use::

    schedule = schedules.make("1f1b", p=4, m=8)
    pipeline = apply(model, mesh.pp, schedule)          # now `model` has the layers of this rank
    data = ddp.apply(model, mesh.dp, average=False)     # after the split: for its layers
    train_step(model, [data, pipeline], ...)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minipar.comm import collectives
from minipar.comm.mesh import Axis
from minipar.model.llama import Llama, beside, loss_of
from minipar.observe import timeline
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import mark
from minipar.parallel.base.strategy import Strategy, device_of
from minipar.parallel.pipeline import split_backward, stages
from minipar.parallel.pipeline.actions import Action, Schedule, slots
from minipar.parallel.pipeline.checks import validate
from minipar.parallel.pipeline.messages import Mail, forward_only
from minipar.parallel.pipeline.pairs import side_by_side
from minipar.parallel.pipeline.simulate import SPAN_KIND, lower
from minipar.parallel.pipeline.split_backward import Job, put_off


def apply(
    model: Llama,
    axis: Axis,
    schedule: Schedule,
    *,
    cut: Sequence[int] | None = None,
    token_shards: int = 1,
    paired: bool = False,
) -> "Pipeline":
    """Keep on each rank of `axis` only the layers of its stages, in place; names stay.

    The weights come from rank 0 of the axis.

    Args:
        schedule: for as many ranks as the axis has, and the microbatches of a step. `lower` removes
            its messages and places new ones.
        cut: layers per part of the model, such as (3, 4, 4, 3). By default, a cut that balances
            estimated FLOPs.
        token_shards: ranks of sequence parallelism, which cut activations between layers.
        paired: run a forward beside a backward, where the schedule has them in a row: each runs
            while the all-to-alls of the other travel, see `pairs`.

    Raises `ValueError` for a schedule that cannot be run (`checks.validate` names the action) or is
    for other ranks, and for a cut that does not fit.
    """
    validate(schedule)
    schedule = lower(schedule, paired)
    if schedule.num_ranks != axis.size:
        raise ValueError(f"{schedule.name} has p={schedule.num_ranks}, but {axis.name}={axis.size}")
    cut = tuple(cut or stages.balance(stages.estimate_costs(model.config), schedule.num_stages))
    stages.check_cut(cut, schedule.num_stages, model.config.num_layers)
    replicate(model, axis)
    neighbours = {pair for pair in pairwise(schedule.rank_of) if pair[0] != pair[1]}
    collectives.connect(axis, device_of(model), neighbours)
    pipeline = Pipeline(model, axis, schedule, cut)
    pipeline.token_shards, pipeline.paired = token_shards, paired
    return pipeline


Microbatch = tuple[Tensor, ...]
"""Tokens and targets [B, T], then what `Llama.forward` takes besides, such as positions."""
Method = Callable[[Action, Tensor | None], Tensor | None]
"""Does an action: takes the tensor that was received, returns the tensor to be sent."""


@dataclass(eq=False)
class Step:
    """The work of one rank on the microbatches of one step: a method per kind of action.

    Each method takes the tensor that its action needs (None at the ends of the model) and returns
    the tensor for the next stage. From F until its backward starts, `live` holds the input of a
    stage and the node where backward begins. If the output needs no gradient, `live` holds nothing.
    The output is not kept.
    """

    pipeline: "Pipeline"
    microbatches: Sequence[Microbatch]
    strategies: Sequence[Strategy] = ()  # that synchronise gradients within a stage
    weigh: Callable[[Tensor], Tensor] = lambda loss: loss
    autocast: Callable[[], AbstractContextManager] = nullcontext

    def __post_init__(self) -> None:
        device = self.microbatches[0][0].device
        self.total = torch.zeros((), dtype=torch.float64, device=device)  # of the losses
        self.live: dict[tuple[int, int], tuple[Tensor | None, object]] = {}
        self.owed: dict[tuple[int, int], list[Job]] = {}  # weight gradients, from I to W

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        """F: x [B, T, D], or None and tokens, -> hidden states [B, T, D], or the loss."""
        module = self.pipeline.stages[action.stage]
        tokens, targets, *context = self.microbatches[action.microbatch]
        context = beside(self.pipeline.model, targets, context)
        with self.autocast():
            out = module(tokens if x is None else x.requires_grad_(), *context)
            if module.lm_head is not None:
                loss = loss_of(self.pipeline.model)(out, targets)
                self.total.add_(loss.detach())
                out = self.weigh(loss)
        if out.requires_grad:
            self.live[action.stage, action.microbatch] = x, get_gradient_edge(out)
        return out.detach()

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """B: gradient of the output (None: the loss) -> gradient of the input (None: tokens)."""
        x, root = self.live.pop((action.stage, action.microbatch), (None, None))
        with self._synchronise_last(action):
            if root is not None:
                torch.autograd.backward(root, gradient)
        return None if x is None else x.grad

    def backward_input(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """I: as `backward`, but gradients of weights wait for `backward_weight`."""
        x, root = self.live.pop((action.stage, action.microbatch), (None, None))
        jobs = self.owed[action.stage, action.microbatch] = []
        if root is None:
            return None
        weights = [p for p in self.pipeline.stages[action.stage].parameters() if p.requires_grad]
        inputs = weights if x is None else [x, *weights]
        with self._synchronise_last(action), put_off(jobs):
            grads = torch.autograd.grad(root, inputs, gradient, allow_unused=True)
        found = dict(zip(inputs, grads, strict=True))
        dx = found.pop(x, None)
        # These gradients are of norms and other layers, whose backward is not split.
        jobs += [(weight, lambda g=g: g) for weight, g in found.items() if g is not None]
        return dx

    def backward_weight(self, action: Action, _: None) -> None:
        """W: compute the gradients of weights that `backward_input` left."""
        with self._synchronise_last(action):
            split_backward.do(self.owed.pop((action.stage, action.microbatch)))

    @contextmanager
    def _synchronise_last(self, action: Action) -> Iterator[None]:
        """Make strategies synchronise gradients in the body only in the stage's last backward.

        After the body they free gathered weights, because another stage comes next.
        """
        last = self.pipeline.last_gradient[action.stage]
        with ExitStack() as stack:
            if action.microbatch != last.microbatch:
                for strategy in self.strategies:
                    stack.enter_context(strategy.no_sync())
            yield
        for strategy in self.strategies:
            strategy.release()


class Pipeline(Strategy):
    """A model cut into stages, and the schedule by which the stages work; made by `apply`.

    Apply tensor parallelism before it and data parallelism after it. In a list of strategies it
    comes last, because it collects the whole model.
    """

    token_shards, paired = 1, False
    dtype: torch.dtype | None = None  # of activations that stages send; None: as parameters
    _adding: collectives.Pending | None = None  # the sum of the losses, in flight

    def __init__(self, model: Llama, axis: Axis, schedule: Schedule, cut: tuple[int, ...]) -> None:
        super().__init__(model, axis)
        self.schedule, self.config = schedule, model.config
        if schedule.splits_backward:
            split_backward.enable(model)
        self.names = list(model.state_dict(keep_vars=True))
        parts = [stages.part_of(model, cut, part) for part in range(len(cut))]
        self.weights = stages.homes_of(parts, schedule)
        own = {stage: schedule.part(stage) for stage in schedule.stages_on(axis.rank)}
        self.stages: dict[int, Llama] = {stage: parts[part] for stage, part in own.items()}
        self.last_gradient = {stage: schedule.last_gradient(stage) for stage in own}
        stages.keep_only(model, cut, own.values())
        self.twins, self.shard_axes = self._mark_parameters(), (axis,)

    def _mark_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Mark parameters as shards for the gradient norm; return those that several ranks have."""
        twins = {}
        found = dict(self.model.named_parameters(remove_duplicate=False))
        for weight in self.weights:
            for p in {found[name] for name in weight.names if name in found}:  # one or none
                mark(p, self.axis, copy=self.axis.rank != weight.ranks[0])
                if p.requires_grad and (len(weight.ranks) > 1 or len(weight.names) > 1):
                    twins[p] = weight.ranks
                    p.comes_last = True  # data parallelism gets the sum at the end of the pipeline
        return twins

    # ------------------------------------------------------------------ one step
    def run(
        self,
        model: nn.Module,
        strategies: Sequence[Strategy],
        microbatches: Sequence[Microbatch],
        *,
        weigh: Callable[[Tensor], Tensor] = lambda loss: loss,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Run forward and backward of all microbatches, in place of `step.forward_backward`.

        All ranks of the axis load the same microbatches. Gradients add up in ``p.grad``. The other
        `strategies` synchronise the gradients of a stage during its last backward, while other
        stages still compute. Returns the sum of the losses, float64, equal on all ranks of the
        axis; it is complete after `finish_backward`.

        Raises `ValueError` for another number of microbatches than the schedule is for.
        """
        name, m = self.schedule.name, self.schedule.num_microbatches
        if len(microbatches) != m:
            raise ValueError(f"{len(microbatches)} microbatches, but the schedule {name} has m={m}")
        step = Step(self, microbatches, strategies, weigh, autocast)
        methods = {"F": step.forward, "B": step.backward}
        methods |= {"I": step.backward_input, "W": step.backward_weight}
        with self._twins_apart():
            self._play(self.schedule, microbatches, methods)
        self._adding = collectives.all_reduce(step.total, self.axis, out=step.total, async_op=True)
        return step.total

    def _play(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        methods: Mapping[str, Method],
    ) -> None:
        """Do the list of this rank, one action after the other, by the method of its kind."""
        buffer = lambda i: self.buffer(microbatches[i][0])  # noqa: E731
        mail = Mail(self.axis, schedule, buffer, self.device)
        messages = {"RF": mail.receive, "RB": mail.receive, "SF": mail.send, "SB": mail.send}
        for slot in slots(schedule.actions[self.axis.rank], self.paired):
            if not slot[0].computes:
                messages[slot[0].kind](slot[0])
                continue
            jobs = [partial(_compute, methods[a.kind], a, mail.take(a)) for a in slot]
            results = side_by_side(*jobs) if len(slot) == 2 else [jobs.pop()()]
            for action, result in zip(slot, results, strict=True):
                mail.put(action, result)
        mail.close()

    def buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty message for a microbatch: [B, T, D], or this rank's shard of T."""
        shape = len(tokens), tokens.shape[1] // self.token_shards, self.config.hidden_size
        dtype = self.dtype or next(self.model.parameters()).dtype
        return torch.empty(shape, dtype=dtype, device=self.device)

    @contextmanager
    def _twins_apart(self) -> Iterator[None]:
        """In the body, put stand-ins in the place of parameters that other ranks also have.

        The gradient of a stand-in is a part of a sum. Data parallelism must not send this part; its
        hooks are on the parameter. At the end the parameter gets the sum, as by one backward.
        """
        stand_ins = {p: nn.Parameter(p.detach()) for p in self.twins}
        for p, stand_in in stand_ins.items():
            stand_in.grad_dtype = p.grad_dtype
        try:
            self._swap(stand_ins)
            yield
        finally:
            self._swap({stand_in: p for p, stand_in in stand_ins.items()})
        self._add_twins(stand_ins)

    def _swap(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for module in self.model.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = new.get(p, p)

    def _add_twins(self, stand_ins: dict[nn.Parameter, nn.Parameter]) -> None:
        """Exchange gradients of `stand_ins`: all get the same sum, added up in the same order."""
        me, parts = self.axis.rank, {}  # for each parameter: gradients of its ranks, in rank order
        for p, stand_in in stand_ins.items():
            grad = stand_in.grad
            own = torch.zeros_like(p, dtype=p.grad_dtype) if grad is None else grad
            ranks = self.twins[p]
            parts[p] = {rank: own if rank == me else torch.empty_like(own) for rank in ranks}
        others = [(part, rank) for part in parts.values() for rank in part if rank != me]
        if others:
            sends = [(part[me], rank) for part, rank in others]
            collectives.exchange(sends, [(part[r], r) for part, r in others], self.axis)
        for p, part in parts.items():
            torch.autograd.backward(p, sum(part.values()))

    def finish_backward(self) -> None:
        if self._adding is not None:
            self._adding.wait()
            self._adding = None

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Sum the losses of any number of microbatches, in float64, equal on all ranks.

        Ranks work on different microbatches at the same time, and send activations only.
        """
        step = Step(self, microbatches)
        schedule = forward_only(self.schedule, len(microbatches))
        self._play(schedule, microbatches, {"F": step.forward})
        return collectives.all_reduce(step.total, self.axis)

    # ------------------------------------------------------------------ the whole model
    @torch.no_grad()
    def join(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Collect the tensors of all stages; None where the first rank of a weight has none.

        A tied weight appears under all of its names.
        """
        facts = {n: (t.shape, t.dtype) for n, t in tensors.items() if t is not None}
        known = collectives.all_gather_object(facts, self.axis)
        found: dict[str, Tensor | None] = dict.fromkeys(self.names)
        for weight in self.weights:
            home = weight.ranks[0]
            given = [name for name in weight.names if name in known[home]]
            if given:
                shape, dtype = known[home][given[0]]
                value = torch.empty(shape, dtype=dtype, device=self.device)
                if self.axis.rank == home:
                    value.copy_(tensors[given[0]])
                collectives.broadcast(value, self.axis, home, out=value)
                found |= dict.fromkeys(weight.names, value)
        return found

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in self.model.state_dict(keep_vars=True)}


def _compute(method: Method, action: Action, given: Tensor | None) -> Tensor | None:
    with timeline.span(SPAN_KIND[action.kind], str(action)):
        return method(action, given)
