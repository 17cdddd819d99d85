"""All strategies together: a `Plan` says which, `apply` puts them on a model in the right order.

Idea.   Every strategy works along an axis of its own and leaves names and values of parameters as
        they are. So they stack, if each is applied to what the one before it left, and if every
        gradient is summed over every axis along which ranks compute a part of it.
Order.  See `apply`: tensor and sequence, context, pipeline, data. Backward goes the other way: data
        (ddp, zero or fsdp) first, then what tensor parallelism has yet to add up.
Sums.   Which axes a gradient is summed over, by what a rank has computed of it:

          axis      what ranks have         the gradient of a parameter is summed
          dp, cp    other tokens            over both at once, for every parameter
          tp        other heads, words      for norms under sequence parallelism, which see T/n
                                            tokens, and keys and values that several ranks share
          pp        other layers            for what two stages have: tied embeddings, or all
                                            parameters where a schedule has two copies of the model

        `Plan.explain` prints this for each parameter, with bytes.
Whole.  Weights, gradients and the state of the optimizer have one shape: that of a parameter. What
        puts weights together puts all of them together: along dp and cp, then tp, then pp.
Refused before any process starts, with the nearest plan that works: see `Plan.problem`.
Source. Narayanan et al. 2021 (arXiv 2104.04473), section 3; Grattafiori et al. 2024, "The Llama 3
        Herd of Models" (arXiv 2407.21783), section 3.3.2, for the order of the axes.
In torch: `torchtitan`, `parallelize.py` of each model.
Proved by tests/parallel/test_compose.py and, over all meshes of 4 and 8 ranks,
tests/parity/test_compose.py.

Use::

    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,microbatches=4")
    plan.check(model.config)
    composed = apply(model, Mesh(**plan.mesh_sizes()), plan, make_optimizer)
    batch = [composed.shard(microbatch) for microbatch in batch]
    train_step(model, [composed], composed.optimizer, batch, composed.axis,
               shard_axes=composed.shard_axes, run=composed.run or forward_backward)
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import AXES, Axis, Mesh
from minipar.model.llama import IGNORE_INDEX, Llama, LlamaConfig, loss_of
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import context, ddp, fsdp, tensor, ulysses, zero
from minipar.parallel.compression import COMPRESSORS, Compressed
from minipar.parallel.pipeline import runtime, schedules, simulate, stages
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.strategy import Strategy

Microbatch = tuple[Tensor, ...]  # inputs [B, T], targets [B, T]; positions and mask if any
MESH = ("pp", "dp", "cp", "tp")  # from the axis that needs the least of a link to the one in a node
COMPUTE_DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
EACH_NUMBER_ALONE = ("none", "fp16", "bf16")
"""Compression that rounds a number without a look at its neighbours in the bucket."""


# ---------------------------------------------------------------------- 1. the plan
@dataclass(frozen=True)
class Plan:
    """How a Llama is trained on several ranks: the size of each axis, and what happens along it."""

    dp: int = 1
    """Ranks with sequences of their own."""
    tp: int = 1
    """Ranks among which every matrix is cut."""
    pp: int = 1
    """Ranks with layers of their own."""
    cp: int = 1
    """Ranks among which every sequence is cut."""
    zero: Literal[0, 1, 2, 3] = 0
    """Cut over dp and cp: nothing (ddp), optimizer state, also gradients, also weights (fsdp)."""
    sequence_parallel: bool = False
    """Over tp, cut norms and residual stream along the tokens."""
    tp_overlap: bool = False
    """Over tp, send pieces of products while others are computed."""
    context: Literal["ring", "gather", "ulysses"] = "ring"
    """Over cp, how attention sees all tokens."""
    schedule: str = "1f1b"
    """Over pp, who runs forward and backward of which microbatch when: see `schedules.py`."""
    stages_per_rank: int = 0
    """Over pp, of schedules that leave it open; 0: as many as the schedule has."""
    microbatches: int = 1
    """Per step, of every rank of dp."""
    compression: str = "none"
    """Over dp and cp, how gradients are sent: see `compression.py`."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Of matrix products."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in backward."""

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read "dp=2, tp=2, zero=1, sequence_parallel"; raise `ValueError` where it is not that."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = part.partition("=")
            name = name.replace("-", "_")
            if name not in kinds or name in values:
                raise ValueError(f"plan {text!r}: {part!r} is not one of {', '.join(kinds)}, once")
            if kinds[name] is bool and value.lower() in ("", "true", "false"):
                values[name] = value.lower() != "false"
            elif kinds[name] is int and value.isdecimal():
                values[name] = int(value)
            elif kinds[name] is str and equals:
                values[name] = value
            else:
                like = {bool: "true", int: "2", str: getattr(cls, name)}[kinds[name]]
                raise ValueError(f"plan {text!r}: cannot read {part!r}; try {name}={like}")
        return cls(**values)

    def __str__(self) -> str:
        """What `parse` reads: all that is not as usual."""
        given = {n: v for n, v in asdict(self).items() if v != getattr(Plan, n)} or {"dp": 1}
        return ",".join(
            name if value is True else f"{name}={value}" for name, value in given.items()
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(getattr(self, axis) for axis in MESH)

    def mesh_sizes(self) -> dict[str, int]:
        """Return the axes of a `Mesh` with more than one rank; those of tp are neighbours."""
        sizes = {axis: getattr(self, axis) for axis in MESH if getattr(self, axis) != 1}
        return sizes or {"dp": 1}

    def make_schedule(self) -> Schedule:
        """The schedule of the pipeline. Raises `ValueError` where there is none."""
        return _schedule(self.schedule, self.pp, self.microbatches, self.stages_per_rank or None)

    # ------------------------------------------------------------------ what cannot be
    def check(self, config: LlamaConfig) -> None:
        """Raise `ValueError` unless a Llama of this shape can be trained so: why not, and how."""
        problem = self.problem(config)
        if problem is not None:
            raise ValueError(
                f"plan {self}: {problem}. The nearest plan that works is {self.nearest(config)}"
            )

    def problem(self, config: LlamaConfig) -> str | None:
        """Say which rule is broken, with its numbers; None if all is well."""
        try:
            return next(self._problems(config), None)
        except ValueError as error:  # of a part that knows its own limits
            return str(error)

    def _problems(self, config: LlamaConfig) -> Iterator[str]:
        for name in (*MESH, "microbatches"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} must be 1 or more"
        for field in fields(self):
            allowed, value = get_args(field.type), getattr(self, field.name)
            if allowed and value not in allowed:
                yield f"{field.name}={value} is not one of {', '.join(map(str, allowed))}"
        if self.compression not in ("none", *COMPRESSORS):
            yield f"compression={self.compression} is not one of none, {', '.join(COMPRESSORS)}"
        yield from self._problems_of_axes(config)
        yield from self._problems_of_gradients(config)

    def _problems_of_axes(self, config: LlamaConfig) -> Iterator[str]:
        """Each axis for itself."""
        tensor.check_sizes(config, self.tp)
        if self.sequence_parallel and self.tp == 1:
            yield "sequence_parallel cuts what tensor parallelism leaves whole; tp=1 cuts nothing"
        if self.tp_overlap and not self.sequence_parallel:
            yield "tp_overlap interleaves the collectives of sequence_parallel; set both"
        if self.context != "ring" and self.cp == 1:
            yield f"context={self.context} says how ranks of cp share keys, and there is one: cp=1"
        if self.context == "ulysses" and config.num_heads // self.tp % self.cp:
            yield (
                f"ulysses hands whole heads around: cp={self.cp} does not divide the "
                f"num_heads={config.num_heads} / tp={self.tp} of a rank"
            )
        if self.pp == 1:
            if self.schedule != "1f1b" or self.stages_per_rank:
                yield f"schedule={self.schedule} is for a pipeline of several ranks, and pp=1"
            return
        num_stages = self.make_schedule().num_stages
        if num_stages > config.num_layers:
            yield (
                f"schedule={self.schedule} on pp={self.pp} cuts the model into {num_stages} "
                f"stages, each with a layer, and there are num_layers={config.num_layers}"
            )

    def _problems_of_gradients(self, config: LlamaConfig) -> Iterator[str]:
        """What does not go together, because a gradient would be wrong without a word."""
        is_tp_sum = self.sequence_parallel or self.tp > config.num_kv_heads
        if self.zero and is_tp_sum and config.vocab_size % self.tp:
            yield (
                f"zero={self.zero} cuts all parameters of a rank in a row, and tensor parallelism "
                f"adds up gradients piece by piece; but with vocab_size={config.vocab_size}, which "
                f"tp={self.tp} does not divide, pieces begin elsewhere on every rank; pad the "
                f"vocabulary to {-(-config.vocab_size // self.tp) * self.tp} words"
            )
        shares = self._shares(config)
        if self.zero == 3 and shares:
            yield (
                f"zero=3 reduces the gradients of one rank of pp at a time, but with "
                f"schedule={self.schedule}, tie_embeddings={config.tie_embeddings} the same "
                f"weights are on several, to be summed before"
            )
        if self.compression == "none":
            return
        if self.zero:
            yield (
                f"compression={self.compression} is for the buckets of ddp, and zero={self.zero} "
                f"has others"
            )
        if self.compression not in EACH_NUMBER_ALONE and (self.tp > 1 or shares):
            where = f"tp={self.tp}" if self.tp > 1 else f"pp={self.pp}"
            yield (
                f"compression={self.compression} rounds a number by its neighbours in a bucket; "
                f"ranks of {where} hold copies of the same parameters beside different ones, and "
                f"copies would drift apart"
            )
        if self.precision == "fp16" and COMPRESSORS[self.compression]().feedback:
            yield (
                f"compression={self.compression} adds to a step what the last one left out, and "
                f"precision=fp16 scales the two by factors that differ"
            )

    def _shares(self, config: LlamaConfig) -> bool:
        """Whether several ranks of the pipeline hold the same parameter."""
        if self.pp == 1:
            return False
        schedule = self.make_schedule()
        ends = schedule.rank_of[0], schedule.rank_of[schedule.num_stages - 1]
        return schedule.copies > 1 or (config.tie_embeddings and ends[0] != ends[1])

    def nearest(self, config: LlamaConfig) -> "Plan":
        """The plan for as many ranks that works and changes the least; options before axes."""
        changes = []
        for field in fields(self):
            if field.name in MESH:
                continue
            own = getattr(self, field.name)
            values = get_args(field.type) or (field.default,)
            if field.name == "schedule":
                values = tuple(schedules.SCHEDULES)
            if isinstance(own, int):
                values = sorted(values, key=lambda value, own=own: abs(value - own))
            changes.append([{field.name: value} for value in values if value != own])
        changes.append(sorted(meshes(max(1, self.num_ranks)), key=self._distance))
        for count in range(1, 4):
            for kinds in itertools.combinations(changes, count):
                for chosen in itertools.product(*kinds):
                    plan = replace(self, **{k: v for change in chosen for k, v in change.items()})
                    if plan.problem(config) is None:
                        return plan
        return Plan(dp=max(1, self.num_ranks))

    def _distance(self, sizes: Mapping[str, int]) -> tuple[float, int]:
        """How far a mesh is from ours; of two that are as far, more of dp is nearer."""
        ratios = (n / max(1, getattr(self, axis)) for axis, n in sizes.items())
        return round(sum(abs(math.log(ratio)) for ratio in ratios), 6), -sizes["dp"]

    # ------------------------------------------------------------------ what comes of it
    def explain(self, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> "Explanation":
        """Say of every parameter who has which part of it, and where its gradient travels.

        Computed by the very code that cuts a model, on tensors without data. Raises `ValueError`
        for a plan that does not work.
        """
        self.check(config)
        return Explanation(self, tuple(_rows(self, config, dtype)))


def meshes(num_ranks: int) -> Iterator[dict[str, int]]:
    """Every way to spread `num_ranks` over pp, dp, cp and tp."""

    def spread(left: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for size in (n for n in range(1, left + 1) if left % n == 0):
            for rest in spread(left // size, axes[1:]):
                yield {axes[0]: size, **rest}

    return spread(num_ranks, MESH)


@cache
def _schedule(name: str, p: int, m: int, v: int | None) -> Schedule:
    return schedules.make(name, p, m, v)


# ---------------------------------------------------------------------- 2. in the right order
MakeOptimizer = Callable[..., torch.optim.Optimizer]  # (model, make=class) -> optimizer


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
) -> "Composed":
    """Put all that `plan` asks for on `model`, in place; the weights are those of rank 0.

    Args:
        mesh: with the sizes of the plan, its axes in any order.
        make_optimizer: called as ``make_optimizer(model, make=...)`` when the parameters are what
            they will stay; hands them, in the order of the model, to `make`, which is
            `optimizer_class`, or does its work in pieces (ZeRO 1 and 2).
        ddp_version, bucket_mb, reduce: as in `ddp.apply`; buckets are those of ZeRO, too.
        reduce_dtype: as in `fsdp.apply`.

    Raises `ValueError` on every rank, before the first collective, for a plan that does not work or
    another mesh.
    """
    plan.check(model.config)
    sizes = {axis: mesh[axis].size for axis in AXES}
    if any(size != getattr(plan, axis, 1) for axis, size in sizes.items()):
        raise ValueError(f"plan {plan} is for the mesh {plan.mesh_sizes()}, not {mesh.sizes}")
    data_axis = mesh.joint("dp", "cp") if plan.cp > 1 else mesh.dp
    checkpoint_activations(model, plan.checkpointing)
    parts = Parts()

    # 1. Tensor: cuts matrices by their names and shapes, so before anybody has flattened them; and
    #    before the pipeline, whose stages then are parts of a model that is cut already.
    if plan.tp > 1:
        parts.tensor = tensor.apply(
            model, mesh.tp, sequence=plan.sequence_parallel, overlap=plan.tp_overlap
        )
    # 2. Context: wraps attention as it is now, with the heads of this rank; on the whole model,
    #    because every stage of a pipeline has to know positions.
    if plan.cp > 1:
        if plan.context == "ulysses":
            parts.context = ulysses.apply(model, mesh.cp)
        else:
            parts.context = context.apply(model, mesh.cp, exchange=plan.context)
    # 3. Pipeline: keeps the layers of this rank. From here on, parameters are those that stay.
    if plan.pp > 1:
        parts.pipeline = runtime.apply(
            model,
            mesh.pp,
            plan.make_schedule(),
            token_shards=plan.tp if plan.sequence_parallel else 1,
        )
    # 4. Data last: it sums gradients of the parameters that are left, and may cut them once more.
    #    Ranks of cp hold other tokens, as those of dp do: to gradients, both are one axis.
    if plan.zero == 3:
        dtype = COMPUTE_DTYPES[plan.precision] if plan.pp == 1 else None  # stages send their dtype
        parts.data = fsdp.apply(
            model,
            data_axis,
            compute_dtype=dtype,
            # Gradients are summed up in float32 all the same, unless told otherwise.
            reduce_dtype=reduce_dtype or (torch.float32 if dtype else None),
            average=False,
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
            model, data_axis, optimizer=optimizer, stage=plan.zero, average=False
        )
        if parts.tensor is not None:
            parts.tensor.holder = optimizer.pieces.get
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
    return Composed(model, mesh, data_axis, plan, parts, optimizer)


@dataclass
class Parts:
    """The strategies of a plan; None where an axis has one rank."""

    data: Strategy | None = None
    tensor: "tensor.TensorParallel | None" = None
    context: Strategy | None = None
    pipeline: runtime.Pipeline | None = None
    compressed: Compressed | None = None


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
        self.run = None if parts.pipeline is None else parts.pipeline.run
        # In the order in which they finish a backward: what tensor parallelism adds up must not be
        # on its way elsewhere.
        every = (parts.data, parts.tensor, parts.context, parts.pipeline)
        self.strategies = tuple(strategy for strategy in every if strategy is not None)
        cut = {"pp": mesh.pp, "data": data_axis, "tp": mesh.tp}
        if not plan.zero:
            del cut["data"]
        self.shard_axes = tuple(axis for axis in cut.values() if axis.size > 1)
        with torch.device("meta"):
            serial = Llama(model.config)
        self.shapes = {name: tuple(p.shape) for name, p in serial.state_dict().items()}
        self.groups = self._groups([name for name, _ in serial.named_parameters()])

    # ------------------------------------------------------------------ one step
    def finish_backward(self) -> None:
        for strategy in self.strategies:
            strategy.finish_backward()

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
        Raises `ValueError` for a microbatch with more in it that would have to be padded.
        """
        plan = self.plan
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

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Sum of the losses of what `shard` returned, of this rank of `axis`: float64."""
        if self.parts.pipeline is not None:
            return self.parts.pipeline.evaluate(microbatches)
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0][0].device)
        for inputs, targets, *rest in microbatches:
            total += loss_of(self.model)(self.model(inputs, *rest), targets)
        return total

    # ------------------------------------------------------------------ whole tensors, out and in
    def join(self, own: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Put together what ranks of tp and pp have by the names of their parameters; a collective.

        Weights, gradients, moments: whatever has the shape of a parameter before `axis` cuts it.
        """
        if self.parts.tensor is not None:
            own = self.parts.tensor.join(own)
        return dict(own) if self.parts.pipeline is None else self.parts.pipeline.join(own)

    def own(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `join`: what this rank of tp and pp has."""
        if self.parts.pipeline is not None:
            whole = self.parts.pipeline.own(whole)
        return dict(whole) if self.parts.tensor is None else self.parts.tensor.own(whole)

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.join(self.parts.data.full_state_dict())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.parts.data.load_full_state_dict(self.own(state))

    def full_optimizer_state(self) -> dict[str, Any]:
        """The state of the optimizer as one device would have it, on the CPU, on all ranks.

        What a serial optimizer, or one under any other plan, can load. A collective.
        """
        data, optimizer = self.parts.data, self.optimizer
        if isinstance(data, fsdp.FullySharded):
            state = data.full_optimizer_state(optimizer)
        else:
            state = optimizer.state_dict()
        numbers = dict(enumerate(itertools.chain(*self._own_groups())))
        own = {numbers[i]: entries for i, entries in state["state"].items()}
        keys = sorted({key for entries in own.values() for key in entries})
        whole: dict[str, dict[str, Any]] = {}
        for key in sorted(set(itertools.chain(*all_gather_object(keys, self.mesh.pp)))):
            entries = {name: values[key] for name, values in own.items() if key in values}
            joined = self._join_entry(entries)
            for name, value in joined.items():
                if value is not None:
                    value = value.cpu() if isinstance(value, Tensor) else value
                    whole.setdefault(name, {})[key] = value
        order = {name: i for i, name in enumerate(itertools.chain(*self.groups))}
        groups = [
            {**group, "params": [order[name] for name in names]}
            for group, names in zip(state["param_groups"], self.groups, strict=True)
        ]
        return {"state": {order[n]: whole[n] for n in order if n in whole}, "param_groups": groups}

    def _join_entry(self, entries: dict[str, Any]) -> dict[str, Any]:
        """One entry of the state, by the names of this rank's parameters -> of all."""
        tensors = {n: v for n, v in entries.items() if isinstance(v, Tensor) and v.ndim}
        numbers = {n: v for n, v in entries.items() if n not in tensors}  # such as counts of steps
        joined = self.join(tensors)
        for theirs in all_gather_object(numbers, self.mesh.pp)[::-1]:  # the first counts
            joined |= {self._serial_name(name): value for name, value in theirs.items()}
        return joined

    def load_full_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take this rank's part of what `full_optimizer_state` returned, under whichever plan.

        Raises `ValueError` for the state of other parameters.
        """
        theirs = [len(group["params"]) for group in state["param_groups"]]
        if theirs != [len(names) for names in self.groups]:
            raise ValueError(
                f"the state has groups of {theirs} parameters, and here are "
                f"{[len(names) for names in self.groups]}"
            )
        numbers = dict(zip(itertools.chain(*self.groups), _numbers(state), strict=True))
        groups, part, first = [], {}, 0
        for i, name in enumerate(itertools.chain(*self._own_groups())):
            entries = state["state"].get(numbers[self._serial_name(name)])
            if entries:
                part[i] = {key: self._own_piece(name, value) for key, value in entries.items()}
        for group, names in zip(state["param_groups"], self._own_groups(), strict=True):
            groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        own_state = {"state": part, "param_groups": groups}
        if isinstance(self.parts.data, fsdp.FullySharded):
            self.parts.data.load_full_optimizer_state(self.optimizer, own_state)
        else:
            self.optimizer.load_state_dict(own_state)

    def _own_piece(self, name: str, whole: Any) -> Any:
        """Of an entry of the state: cut as the parameter is, unless it is a number."""
        if self.parts.tensor is None or not isinstance(whole, Tensor) or not whole.ndim:
            return whole
        return self.parts.tensor.own({name: whole})[name]

    # Names of parameters, of this rank and of the serial model
    def _own_groups(self) -> list[list[str]]:
        """Names by the groups of the optimizer, as this rank's parameters are called."""
        found = {id(p): name for name, p in self.model.named_parameters()}
        if isinstance(self.optimizer, zero.ShardedOptimizer):
            members = self.optimizer.wholes
        else:
            members = [group["params"] for group in self.optimizer.param_groups]
        return [[found[id(p)] for p in group] for group in members]

    def _serial_name(self, name: str) -> str:
        """A tied head, which may be alone on its stage, is the embedding in the serial model."""
        tied = name == "lm_head.weight" and self.model.config.tie_embeddings
        return "model.embed_tokens.weight" if tied else name

    def _groups(self, order: list[str]) -> list[list[str]]:
        """Names by the groups of the serial optimizer; a collective along pp."""
        groups: list[set[str]] = []
        for own in all_gather_object(self._own_groups(), self.mesh.pp):
            groups = groups or [set() for _ in own]
            for names, more in zip(groups, own, strict=True):
                names.update(map(self._serial_name, more))
        return [[name for name in order if name in names] for names in groups]


def _numbers(state: dict[str, Any]) -> list[int]:
    return [i for group in state["param_groups"] for i in group["params"]]


# ---------------------------------------------------------------------- 3. what comes of it
@dataclass(frozen=True)
class Row:
    """One parameter: what a rank has of it, and where its gradient travels."""

    name: str
    full_shape: tuple[int, ...]
    shape: tuple[int, ...]  # on the first rank of tp, before dp and cp cut it
    stage_ranks: tuple[int, ...]  # the ranks of pp that have it
    cut_over: tuple[str, ...]  # axes over which the weight is cut, or of whose ranks few have it
    summed: dict[str, str]  # axis -> the collective that adds up its gradient there
    sent: dict[str, int]  # axis -> bytes of its gradient that a rank sends per step
    num_bytes: dict[str, int]  # "weights", "gradients", "optimizer": on a rank between two steps


@dataclass(frozen=True)
class Explanation:
    """What `Plan.explain` found; prints as a table, in which layers that are alike are one line."""

    plan: Plan
    rows: tuple[Row, ...]

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and sizes."""
        return self.plan.mesh_sizes()

    def bytes_on(self, stage_rank: int = 0) -> dict[str, int]:
        """Weights, gradients and optimizer state that the ranks of a place on pp hold."""
        rows = [row for row in self.rows if stage_rank in row.stage_ranks]
        return {kind: sum(row.num_bytes[kind] for row in rows) for kind in _STATE}

    def sent_by(self, stage_rank: int = 0) -> dict[str, int]:
        """Bytes of gradients along each axis that the ranks of a place on pp send per step."""
        rows = [row for row in self.rows if stage_rank in row.stage_ranks]
        axes = dict.fromkeys(axis for row in rows for axis in row.sent)
        return {axis: sum(row.sent.get(axis, 0) for row in rows) for axis in axes}

    def __str__(self) -> str:
        header = ("parameter", "shape", "on a rank", "pp", "cut over", "summed over", "bytes sent")
        alike: dict[tuple[str, ...], list[str]] = {}  # what layers have in common -> their numbers
        for row in self.rows:
            before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", row.name).groups()
            shapes = ("x".join(map(str, shape)) for shape in (row.full_shape, row.shape))
            summed = [f"{axis} ({verb})" for axis, verb in row.summed.items()]
            sent = [f"{axis} {num_bytes:,}" for axis, num_bytes in row.sent.items()]
            cells = (map(str, row.stage_ranks), row.cut_over, summed, sent)
            cells = (before, after, *shapes, *(", ".join(cell) or "-" for cell in cells))
            alike.setdefault(cells, []).append(number)
        lines = [header]
        for (before, after, *cells), numbers in alike.items():
            lines.append((f"{before}{_runs(numbers)}{after}", *cells))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return "\n".join([f"{self.plan}: {self.plan.num_ranks} ranks, {sizes}", *table])


def _runs(numbers: list[str]) -> str:
    """ "0", "1", "2", "5" -> "0-2,5"."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


_STATE = ("weights", "gradients", "optimizer")


def _rows(plan: Plan, config: LlamaConfig, dtype: torch.dtype) -> Iterator[Row]:
    found: dict[str, Row] = {}
    for stage_rank in range(plan.pp):
        with torch.device("meta"):
            model = Llama(config).to(dtype)
        parts = _cut_without_values(model, plan, stage_rank)
        for name, p in model.named_parameters():
            if config.tie_embeddings and name == "lm_head.weight":
                name = "model.embed_tokens.weight"
            row = _row(plan, parts, name, p)
            if name not in found:
                found[name] = row
    with torch.device("meta"):
        order = [name for name, _ in Llama(config).named_parameters()]
    yield from (found[name] for name in order)


def _cut_without_values(model: Llama, plan: Plan, stage_rank: int) -> Parts:
    """Tensor and pipeline parallelism on a model on "meta", as on one of the ranks."""
    parts = Parts()
    if plan.tp > 1:
        axis = Axis("tp", 0, plan.tp, tuple(range(plan.tp)))
        border = tensor.Border(axis, plan.sequence_parallel)
        parts.tensor = tensor.TensorParallel(model, border, plan.tp_overlap, 0.0)
    if plan.pp > 1:
        axis = Axis("pp", stage_rank, plan.pp, tuple(range(plan.pp)))
        schedule = simulate.lower(plan.make_schedule())
        cut = stages.balance(stages.estimate_costs(model.config), schedule.num_stages)
        parts.pipeline = runtime.Pipeline(model, axis, schedule, cut)
    return parts


def _row(plan: Plan, parts: Parts, name: str, p: nn.Parameter) -> Row:
    n, t, num_bytes = plan.dp * plan.cp, plan.tp, p.nbytes
    data = "dp+cp" if plan.dp > 1 and plan.cp > 1 else "cp" if plan.cp > 1 else "dp"
    cut = [axis.name for axis in getattr(p, "shard_axes", ())]
    stage_ranks = (0,)
    if parts.pipeline is not None:
        stage_ranks = parts.pipeline.twins.get(p, (parts.pipeline.axis.rank,))
    summed, sent = {}, {}
    if n > 1:
        # ZeRO 2 and 3 reduce every microbatch: they keep no whole gradients.
        times = plan.microbatches if plan.zero > 1 else 1 if plan.zero else 2
        summed[data] = "reduce-scatter" if plan.zero else "all-reduce"
        sent[data] = times * num_bytes * (n - 1) // n
        if plan.zero == 3:
            cut.append(data)
    if parts.tensor is not None and name in (*parts.tensor.whole, *parts.tensor.shared):
        rows = parts.tensor.num_kv_heads if name in parts.tensor.shared else 1
        summed["tp"] = "all-reduce"
        sent["tp"] = 2 * rows * num_bytes * (t - 1) // t // (n if plan.zero else 1)
    if len(stage_ranks) > 1:
        summed["pp"] = "exchange"
        sent["pp"] = num_bytes * (len(stage_ranks) - 1)
    parts_of = {"weights": 3, "gradients": 2, "optimizer": 1}
    state = {
        kind: num_bytes * (2 if kind == "optimizer" else 1) // (n if plan.zero >= stage else 1)
        for kind, stage in parts_of.items()
    }
    full = tuple(getattr(p, "full_shape", p.shape))
    return Row(name, full, tuple(p.shape), stage_ranks, tuple(cut), summed, sent, state)
