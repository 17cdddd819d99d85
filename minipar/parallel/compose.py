"""All strategies together: `apply` puts what a `Plan` names on a model, in the right order.

Idea.   Every strategy works along an axis of its own and leaves names and values of parameters as
        they are. So they stack, if each is applied to what the one before it left, and if every
        gradient is summed over every axis along which ranks compute a part of it.
Order.  See `apply`: experts, tensor and sequence, context, pipeline, data. Backward goes the other
        way: data (ddp, zero or fsdp) first, then what tensor parallelism has yet to add up.
Sums.   Which axes a gradient is summed over, by what a rank has computed of it:

          axis      what ranks have         the gradient of a parameter is summed
          dp, cp    other tokens            over both at once, for every parameter
          ep        other tokens, experts   as over dp, but for experts: each is on one rank of ep
          tp        other heads, words      for norms under sequence parallelism, which see T/n
                                            tokens, and keys and values that several ranks share
          pp        other layers            for what two stages have: tied embeddings, or all
                                            parameters where a schedule has two copies of the model

        `Plan.explain` prints this for each parameter, with bytes.
Whole.  Weights, gradients and the state of the optimizer have one shape: that of a parameter. What
        puts weights together puts all of them together: along dp and cp, then ep, tp, pp.
Refused before any process starts, with the nearest plan that works: see plan.py.
Source. Narayanan et al. 2021 (arXiv 2104.04473), section 3; Grattafiori et al. 2024, "The Llama 3
        Herd of Models" (arXiv 2407.21783), section 3.3.2, for the order of the axes.
In torch: `torchtitan`, `parallelize.py` of each model.
Proved by tests/parallel/test_compose.py and, over all meshes of 4 and 8 ranks,
tests/law/test_plans.py.

Use::

    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,microbatches=4")
    plan.check(model.config)
    composed = apply(model, Mesh(**plan.mesh_sizes()), plan, make_optimizer)
    batch = [composed.shard(microbatch) for microbatch in batch]
    train_step(model, [composed], composed.optimizer, batch, composed.axis)
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import AXES, Axis, Mesh, is_nccl
from minipar.comm.values import to_host
from minipar.model.llama import IGNORE_INDEX, Llama
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import context, ddp, expert, fsdp, tensor, ulysses, zero
from minipar.parallel.base import masters
from minipar.parallel.base.optimizer_state import pack, unpack
from minipar.parallel.base.shards import Region
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.compression.feedback import COMPRESSORS, Compressed
from minipar.parallel.pipeline import runtime
from minipar.parallel.plan import Plan

Microbatch = tuple[Tensor, ...]  # inputs [B, T], targets [B, T]; positions and mask if any
MakeOptimizer = Callable[..., torch.optim.Optimizer]  # (model, make=class) -> optimizer
WORKING_DTYPES = {"bf16": torch.bfloat16}
"""By `Plan.precision`: of weights that compute, where others, their masters, learn; of all other
precisions, weights stay as they are, and autocast casts for matrix products."""


def apply(
    model: Llama,
    mesh: Mesh,
    plan: Plan,
    make_optimizer: MakeOptimizer,
    *,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ddp_version: ddp.Version = "overlapped",
    bucket_mb: float | None = None,
    reduce: ddp.Reduce | None = None,
    reduce_dtype: torch.dtype | None = None,
    init: Callable[[str], Tensor] | None = None,
) -> "Composed":
    """Put all that `plan` asks for on `model`, in place; the weights are those of rank 0.

    Args:
        mesh: with the sizes of the plan, its axes in any order.
        make_optimizer: called as ``make_optimizer(model, make=...)`` when the parameters are what
            they will stay; hands them, in the order of the model, to `make`, which is
            `optimizer_class`, or does its work in pieces (ZeRO 1 and 2).
        ddp_version, bucket_mb, reduce: as in `ddp.apply`; buckets are those of ZeRO, too.
        reduce_dtype: as in `fsdp.apply`.
        init: for a model on the "meta" device, under ZeRO 3: returns the first value of a weight,
            whole, by its serial name. Called for one after the other, so that no rank ever has all.

    Raises `ValueError` on every rank, before the first collective, for a plan that does not work or
    another mesh.
    """
    plan.check(model.config)
    sizes = {axis: mesh[axis].size for axis in AXES}
    if any(size != getattr(plan, axis, 1) for axis, size in sizes.items()):
        raise ValueError(f"plan {plan} is for the mesh {plan.mesh_sizes()}, not {mesh.sizes}")
    if plan.compression != "none" and mesh.size > mesh.dp.size and is_nccl():
        raise ValueError(
            f"compression={plan.compression} launches its calls from a thread, and NCCL would meet "
            f"them in another order on each rank among those of {plan}: use dp={mesh.size} alone, "
            f"or the backend gloo"
        )
    data_axis = mesh.joint(*plan.data_axes)
    checkpoint_activations(model, plan.checkpointing)
    parts = Parts()

    # 1. Experts: while all ranks still have whole ones. Ranks of ep hold other tokens, as those of
    #    dp do; over cp and tp, experts may be apart as well. What the balance counts is known here.
    if model.config.has_experts:
        cut = ("cp", "tp") if plan.sequence_parallel else ("cp",)  # over these, sequences are
        over = plan.expert_axes
        parts.expert = expert.apply(
            model,
            mesh.joint(*over),
            copies=mesh.joint(*(name for name in plan.data_axes if name not in over)),
            dispatch=plan.dispatch,
            nodes=plan.expert_nodes,
            batch=mesh.joint(*dict.fromkeys((*plan.data_axes, *cut))),
            pieces=mesh.joint(*cut),
        )
    # 2. Tensor: cuts matrices by their names and shapes, so before data parallelism flattens
    #    them; and before the pipeline, whose stages then are parts of a model that is cut already.
    if plan.tp > 1:
        parts.tensor = tensor.apply(
            model,
            mesh.tp,
            sequence=plan.sequence_parallel,
            overlap=plan.tp_overlap,
            experts=plan.expert_tensor_parallel,
        )
    # 3. Context: wraps attention as it is now, with the heads of this rank; on the whole model,
    #    because every stage of a pipeline has to know positions.
    if plan.cp > 1:
        if plan.context == "ulysses":
            parts.context = ulysses.apply(model, mesh.cp)
        else:
            parts.context = context.apply(model, mesh.cp, exchange=plan.context)
    # 4. Pipeline: keeps the layers of this rank. From here on, parameters are those that stay.
    if plan.pp > 1:
        parts.pipeline = runtime.apply(
            model,
            mesh.pp,
            plan.make_schedule(),
            token_shards=plan.tp if plan.sequence_parallel else 1,
            paired=plan.dispatch == "paired",
        )
        _check_all_train(model, mesh.pp)
    # 5. Data last: it sums gradients of the parameters that are left, and may cut them once more.
    #    Ranks of cp hold other tokens, as those of dp do: to gradients, both are one axis.
    #    Only now are weights cast, so that masters begin with all digits.
    dtype = WORKING_DTYPES.get(plan.precision)
    if parts.pipeline is not None:
        parts.pipeline.dtype = dtype  # of what stages send
    if plan.zero == 3:
        if plan.precision == "fp16" and plan.pp == 1:  # its stages would send the dtype of shards
            dtype = torch.float16
        parts.data = fsdp.apply(
            model,
            data_axis,
            compute_dtype=dtype,
            # Gradients are summed up in float32 all the same, unless told otherwise.
            reduce_dtype=reduce_dtype or (torch.float32 if dtype else None),
            average=False,
            init=None if init is None else lambda name, _: parts.own_piece(name, init(name)),
        )
        optimizer = make_optimizer(model, make=optimizer_class)  # of the pieces
    elif plan.zero:
        sharded = partial(
            zero.ShardedOptimizer,
            optimizer_class=optimizer_class,
            axis=data_axis,
            bucket_mb=bucket_mb,
        )
        optimizer = make_optimizer(model, make=sharded)
        parts.data = zero.apply(
            model,
            data_axis,
            optimizer=optimizer,
            stage=plan.zero,
            average=False,
            working_dtype=dtype,
        )
        if plan.zero == 1 and plan.pp > 1:  # the stage before waits for the end of this backward
            parts.data.most_in_flight = len(parts.data.buckets)
    else:
        if plan.compression != "none":
            parts.compressed = Compressed(COMPRESSORS[plan.compression]())
        parts.data = ddp.apply(
            model,
            data_axis,
            version=ddp_version,
            bucket_mb=bucket_mb,
            average=False,
            reduce=parts.compressed or reduce,
        )
        optimizer = make_optimizer(model, make=optimizer_class)
        if dtype is not None:
            masters.keep(model, optimizer, dtype)
    return Composed(model, mesh, data_axis, plan, parts, optimizer)


def _check_all_train(model: Llama, axis: Axis) -> None:
    """Raise `ValueError` on all ranks where one of the pipeline has nothing to train."""
    trains = all_gather_object(any(p.requires_grad for p in model.parameters()), axis)
    if any(trains) and not all(trains):
        frozen = ", ".join(str(rank) for rank, some in enumerate(trains) if not some)
        raise ValueError(
            f"all that rank {frozen} along {axis.name}={axis.size} has of the model is frozen, and "
            f"there is no gradient to share; use fewer ranks there, or unfreeze some of it"
        )


@dataclass
class Parts:
    """The strategies of a plan; None where an axis has one rank."""

    data: Strategy | None = None
    expert: "expert.ExpertParallel | None" = None
    tensor: "tensor.TensorParallel | None" = None
    context: Strategy | None = None
    pipeline: runtime.Pipeline | None = None
    compressed: Compressed | None = None

    def own_piece(self, name: str, whole: Any) -> Any:
        """Of a weight, or of an entry of its state: cut as the weight is, unless it is a number."""
        own = {name: whole}
        for part in (self.expert, self.tensor):
            if part is not None and isinstance(whole, Tensor) and whole.ndim:
                own = part.own(own)
        return own[name]

    def region(self, name: str, shape: tuple[int, ...]) -> Region:
        """Return what of a weight of `shape` is this rank's, before the data axis cuts it."""
        spans = list(Region.whole(shape).spans)
        if self.expert is not None and name in self.expert.names:
            own = self.expert.names[name]
            spans[0] = ((own.start, own.stop),)
        if self.tensor is not None and name in self.tensor.pieces:
            pieces = self.tensor.pieces[name]
            spans[pieces.dim] = pieces.ranges(shape[pieces.dim], self.tensor.axis.rank)
        return Region(shape, tuple(spans))


class Composed(Strategy):
    """Several strategies that look like one; made by `apply`.

    `optimizer` steps the parameters of this rank. `axis` is that of the data, over which tokens are
    counted; `shard_axes` those over which gradients are cut. `run`, of a pipeline, takes the place
    of forward and backward; None means one microbatch after the other.
    """

    def __init__(
        self,
        model: Llama,
        mesh: Mesh,
        data_axis: Axis,
        plan: Plan,
        parts: Parts,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(model, data_axis)
        self.mesh, self.plan, self.parts, self.optimizer = mesh, plan, parts, optimizer
        self.rows = parts.data.rows
        if parts.pipeline is not None:
            self.run, self.evaluate = parts.pipeline.run, parts.pipeline.evaluate
        # In the order in which they finish a backward: what tensor parallelism adds up must not be
        # on its way elsewhere.
        every = (parts.data, parts.expert, parts.tensor, parts.context, parts.pipeline)
        self.strategies = tuple(strategy for strategy in every if strategy is not None)
        for strategy in self.strategies:
            strategy.device = self.device  # a model that was on "meta" is somewhere only now
        cut = [mesh.pp, *([data_axis] if plan.zero else []), mesh.tp]
        if parts.expert is not None:
            cut += [parts.expert.axis, *([parts.expert.copies] if plan.zero else [])]
        self.shard_axes = tuple(dict.fromkeys(axis for axis in cut if axis.size > 1))
        with torch.device("meta"):
            serial = Llama(model.config)
        self.shapes = {name: tuple(p.shape) for name, p in serial.state_dict().items()}
        self.names = self._serial_names([name for name, _ in serial.named_parameters()])

    # ------------------------------------------------------------------ one step
    def finish_backward(self) -> None:
        for strategy in self.strategies:
            strategy.finish_backward()
        self.note_reduced()

    def check_finished(self, what: str) -> None:
        self.parts.data.check_finished(what)

    def with_gradients(self) -> Iterable[nn.Parameter]:
        return self.parts.data.with_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As of every strategy: for every microbatch but the last."""
        with ExitStack() as stack:
            for strategy in self.strategies:
                stack.enter_context(strategy.no_sync())
            yield

    def shard(self, microbatch: Microbatch) -> Microbatch:
        """Cut this rank's tokens out of (inputs, targets) [B, T] of whole sequences.

        Where tokens are cut, sequences are padded first, to a length that all of cp and tp divide,
        with tokens that no other looks at and that have no target; and positions [T/n] come third.
        Raises `ValueError` for a microbatch with more in it that would have to be padded, and, on
        every rank, for sequences that are too long for the model.
        """
        plan = self.plan
        if len(microbatch) == 2:
            self.model.config.check_length(microbatch[0].shape[1])
        if plan.cp == 1 and not plan.sequence_parallel:
            return microbatch
        inputs, targets, *rest = microbatch
        chunks = plan.cp * (1 if plan.context == "ulysses" else 2) if plan.cp > 1 else 1
        multiple = chunks * (plan.tp if plan.sequence_parallel else 1)
        missing = -inputs.shape[1] % multiple
        if missing:
            if rest:
                raise ValueError(
                    f"plan {plan} needs sequences of a multiple of {multiple} tokens, not "
                    f"{inputs.shape[1]}; with positions or a mask, pad them to "
                    f"{inputs.shape[1] + missing} yourself"
                )
            inputs = F.pad(inputs, (0, missing))
            targets = F.pad(targets, (0, missing), value=IGNORE_INDEX)
        if not rest:
            rest = [torch.arange(inputs.shape[1], device=inputs.device)]
        whole = (inputs, targets, *rest)
        if plan.cp == 1:
            return whole
        if plan.context == "ulysses":
            return ulysses.shard_batch(whole, self.mesh.cp)
        return context.shard_batch(whole, self.mesh.cp)

    # ------------------------------------------------------------------ whole tensors, out and in
    def join(self, own: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Put together what ranks of tp and pp have by the names of their parameters; a collective.

        Weights, gradients, moments: whatever has the shape of a parameter before `axis` cuts it.
        """
        if self.parts.expert is not None:
            own = self.parts.expert.join(own)
        if self.parts.tensor is not None:
            own = self.parts.tensor.join(own)
        return dict(own) if self.parts.pipeline is None else self.parts.pipeline.join(own)

    def own(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `join`: what this rank of tp and pp has."""
        if self.parts.pipeline is not None:
            whole = self.parts.pipeline.own(whole)
        if self.parts.expert is not None:
            whole = self.parts.expert.own(whole)
        return dict(whole) if self.parts.tensor is None else self.parts.tensor.own(whole)

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.join(self.parts.data.full_state_dict())

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self.join(self.parts.data.full_gradients())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expert.check_whole(state, self.shapes)
        self.parts.data.load_full_state_dict(self.own(state))

    def full_optimizer_state(self) -> dict[str, Any]:
        """The state of the optimizer as one device would have it, on the CPU, on all ranks.

        What a serial optimizer, or one under any other plan, can load. A collective.
        """
        state = self.parts.data.full_optimizer_state(self.optimizer)
        own = unpack(state, self._own_names())
        tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by entry, then by name
        numbers: dict[str, dict[str, Any]] = defaultdict(dict)  # such as counts of steps
        for name, entries in own.items():
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.ndim:
                    tensors[key][name] = value
                else:
                    numbers[self.serial_name(name)][key] = value
        whole: dict[str, dict[str, Any]] = defaultdict(dict)
        told = all_gather_object((list(tensors), dict(numbers)), self.mesh.pp)
        for _, theirs in told[::-1]:  # the first counts
            for name, entries in theirs.items():
                whole[name] |= entries
        for key in sorted({key for keys, _ in told for key in keys}):
            for name, value in self.join(tensors[key]).items():
                if value is not None:
                    whole[name][key] = to_host(value)
        return pack(whole, self.names, state["param_groups"])

    def load_full_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take this rank's part of what `full_optimizer_state` returned, under whichever plan.

        Paired by name. Raises `ValueError` for the state of other parameters.
        """
        whole, part, own_names = unpack(state, self.names), {}, self._own_names()
        for name in itertools.chain(*own_names):
            if entries := whole.get(self.serial_name(name)):
                part[name] = {key: self._own_entry(name, value) for key, value in entries.items()}
        own_state = pack(part, own_names, state["param_groups"])
        self.parts.data.load_full_optimizer_state(self.optimizer, own_state)

    def _own_entry(self, name: str, value: Any) -> Any:
        """Of an entry of the state: this rank's piece, or what will read a part of that."""
        shape = self.shapes[self.serial_name(name)]
        if callable(value) and value.shape == shape:
            return lambda flat: value(self.parts.region(name, shape)._replace(flat=flat))
        return self.parts.own_piece(name, value() if callable(value) else value)

    def _own_names(self) -> list[list[str]]:
        """What this rank's parameters are called, by the groups of the optimizer."""
        return [list(group) for group in self.parts.data.members(self.optimizer)]

    def serial_name(self, name: str) -> str:
        """A tied head, which may be alone on its stage, is the embedding in the serial model."""
        tied = name == "lm_head.weight" and self.model.config.tie_embeddings
        return "model.embed_tokens.weight" if tied else name

    def _serial_names(self, order: list[str]) -> list[list[str]]:
        """What those of all ranks are called in the serial model; a collective along pp."""
        told = all_gather_object(self._own_names(), self.mesh.pp)
        if len(set(map(len, told))) > 1:
            raise ValueError(
                f"the optimizers of ranks along pp have {[*map(len, told)]} groups of parameters, "
                f"and as many on each are paired by their order; let make_optimizer keep groups "
                f"that are empty on a stage"
            )
        groups = zip(*told, strict=True)
        found = [set(map(self.serial_name, itertools.chain(*group))) for group in groups]
        return [[name for name in order if name in names] for names in found]
