"""What a rank does in a step, in which order: recorded from the real code, at any size.

Idea.   On the meta device tensors have shapes and no values, and torch's "fake" process group says
        of every collective that it is done. So one process runs the training step of any rank of
        any mesh: `compose.apply`, `train_step`, clipping and optimizer are those of a real run, and
        what passes by is written down. No strategy is modelled a second time.
Trace.  A list of segments, each a list of events in their order:

          Compute     a product, an attention, or an operation that moves bytes: FLOPs, bytes
          Launch      a collective or message begins: verb, axis, bytes that this rank sends
          Wait        this rank needs the result of a launch
          Memory      bytes that come (or, negative, go), by category

Repeats. Microbatches in the middle of a step are alike, so one of them is traced and repeated. Of a
        pipeline, ranks with as many layers are alike, too: one of them runs, and the others follow
        their own rows of the schedule with what it did, while `Mail`, the real one, sends messages.
        Other ranks of dp, cp and tp do as their first does.
Steps.  One that others have gone before is recorded: the first learns orders (ddp, fsdp), and what
        one step sends may be awaited in the next (zero).

Limits: an optimizer is one pass over its bytes, as a fused one is. Elementwise operations are not
fused. Loaders, checkpoints and what Python does between operations take no part.
"""

import copy
import gc
import itertools
import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipar.comm import collectives, memory
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.recorder import Recorder, hook_model, hook_optimizers, in_backward
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.pipeline import stages
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.runtime import Pipeline
from minipar.parallel.pipeline.simulate import SPAN_KIND
from minipar.parallel.plan import Plan
from minipar.train.optim import make_optimizer
from minipar.train.precision import Precision
from minipar.train.step import forward_backward, train_step


# ---------------------------------------------------------------------- what is recorded
class Compute(NamedTuple):
    """One operation of `kind` forward, backward, weight_gradient, optimizer or compute."""

    kind: str
    name: str  # the block that it is of
    op: str
    work: str  # "product", "attention", or "bytes": what its time depends on
    shape: tuple[
        int, ...
    ]  # product: batch, m, n, k; attention: batch, heads, queries, keys, K, causal
    dtype: str
    flops: int
    num_bytes: int  # read and written


class Launch(NamedTuple):
    """A call along `axis`, on which `num_bytes` leave this rank; `peers` are ranks along it."""

    verb: str
    axis: str
    size: int
    num_bytes: int
    peers: tuple[int, ...] = ()


class Wait(NamedTuple):
    """For the `index`-th launch of the latest segment called `family`; "": of this very segment."""

    family: str
    index: int


class Memory(NamedTuple):
    """Bytes that are allocated, or freed where negative."""

    category: str
    num_bytes: int


Event = Compute | Launch | Wait | Memory


@dataclass(eq=False)
class Segment:
    """A stretch of a step that may be repeated, such as the forward of a microbatch."""

    family: str
    events: list[Event] = field(default_factory=list)
    num_launches: int = 0


@dataclass(frozen=True)
class Trace:
    """The step of one rank: segments, some of them several times, and what it holds before."""

    rank: int
    segments: tuple[Segment, ...]
    held: dict[str, int]  # bytes by category, between two steps

    def events(self) -> Iterator[Event]:
        """All events of the step."""
        for segment in self.segments:
            yield from segment.events

    @property
    def flops(self) -> int:
        """FLOPs of products and attention, with what is computed again."""
        return sum(e.flops for e in self.events() if type(e) is Compute)

    def sent(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by axis."""
        totals: dict[str, int] = defaultdict(int)
        for event in self.events():
            if type(event) is Launch:
                totals[event.axis] += event.num_bytes
        return dict(totals)

    def at_peak(self) -> dict[str, int]:
        """Bytes by category when the rank holds the most."""
        now, highest, total = dict(self.held), dict(self.held), sum(self.held.values())
        most = total
        for event in self.events():
            if type(event) is Memory:
                now[event.category] = now.get(event.category, 0) + event.num_bytes
                total += event.num_bytes
                if total > most:
                    most, highest = total, dict(now)
        return highest


@dataclass(frozen=True)
class Traces:
    """Of a plan: the step of each distinct rank, the first of each place on the pipeline."""

    config: LlamaConfig
    plan: Plan
    tokens: int  # of a step, of all ranks
    ranks: dict[int, Trace]  # by place on pp


# ---------------------------------------------------------------------- the recorder
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "set_"}
_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm"}


@dataclass(eq=False, slots=True)
class _Holding:
    """One storage, for as long as it lives: it counts as what it turns out to be."""

    num_bytes: int
    category: str = "activations"


class Tracer(TorchDispatchMode):
    """Writes down every operation, collective and storage that passes by, into `segment`."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()  # knows which block is at work, and in which phase
        self.segments: list[Segment] = []
        self.segment = self.begin("before")
        self.launches: dict[int, tuple[Segment, int]] = {}  # by number: where, the how-manieth
        self.unawaited: set[int] = set()
        self.holdings: weakref.WeakKeyDictionary[torch.UntypedStorage, _Holding]
        self.holdings = weakref.WeakKeyDictionary()
        self.known: dict[Any, _Known] = {}
        self.stepped = 0  # bytes that the optimizer will read and write
        self.is_counting = False  # memory

    def begin(self, family: str) -> Segment:
        """What follows belongs to a new segment."""
        self.segment = Segment(family)
        self.segments.append(self.segment)
        return self.segment

    # operations
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "c10d" or _is_view(op):
            return op(*args, **kwargs)
        key = op, _key(args), _key(tuple(kwargs.items()))
        if known := self.known.get(key):
            result = known.again(args, kwargs)
        else:
            result = op(*args, **kwargs)
            known = self.known[key] = _Known(op, result, args, kwargs)
        frame, work = self.recorder.running(), known.work
        kind, where = (frame.kind or "compute", frame.name) if frame else ("compute", "step")
        if kind == "backward" and torch.is_grad_enabled() and in_backward():
            where += " (recompute)"
        for t in _on_meta(result) if known.is_new else ():
            holding = self.hold(t.untyped_storage())
            if kind == "optimizer":  # a fused one holds nothing in between
                holding.category = ""
        if work is not None and kind == "optimizer":
            work, self.stepped = ("step", "bytes", (), work[3], 0, self.stepped), 0
        if work is not None and work[-1]:
            self.segment.events.append(Compute(kind, where, *work))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each operation, which nothing here needs

    # collectives
    def launched(
        self, number: int, verb: str, axis: Axis, num_bytes: int, peers: Sequence[int], result: Any
    ) -> None:
        self.unawaited.add(number)
        self.launches[number] = self.segment, self.segment.num_launches
        self.segment.num_launches += 1
        self.segment.events.append(Launch(verb, axis.name, axis.size, num_bytes, tuple(peers)))

    def waited(self, number: int) -> None:
        self.unawaited.discard(number)
        segment, index = self.launches.get(number, (None, 0))
        if segment is not None:
            family = "" if segment is self.segment else segment.family
            self.segment.events.append(Wait(family, index))

    # memory
    def hold(self, storage: torch.UntypedStorage) -> _Holding:
        """Count a storage from now until its last owner lets go."""
        holding = self.holdings.get(storage)
        if holding is None:
            holding = self.holdings[storage] = _Holding(0)
            weakref.finalize(storage, self._resized, holding, 0)
        self._resized(holding, storage.nbytes())
        return holding

    def _resized(self, holding: _Holding, num_bytes: int) -> None:
        more, holding.num_bytes = num_bytes - holding.num_bytes, num_bytes
        if more and self.is_counting:
            self.segment.events.append((holding, more))  # what it is for is known at the end

    def label(self, category: str, *tensors: Tensor | None) -> None:
        """Say what tensors are for; of "" nothing is told."""
        for tensor in _on_meta(tensors):
            self.hold(tensor.untyped_storage()).category = category

    def tag(self, storage: torch.UntypedStorage, word: memory.Tag) -> None:
        """Take what the code itself says."""
        self.hold(storage).category = word.category

    def held(self) -> dict[str, int]:
        """Bytes by category, now."""
        totals: dict[str, int] = defaultdict(int)
        for holding in self.holdings.values():
            totals[holding.category] += holding.num_bytes
        return dict(totals)

    @contextmanager
    def watching(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Record all of the body; what there is at its start is told by `held`."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self.hold(storage)
            return storage

        with ExitStack() as stack:
            undo = [*hook_model(self.recorder, model), *hook_optimizers(self.recorder)]
            with torch._C.DisableTorchFunctionSubclass():  # of weights that are on their way
                for p in filter(lambda p: p.requires_grad, model.parameters()):
                    arrives = p.register_hook(lambda grad: self.label("gradients", grad))
                    added = p.register_post_accumulate_grad_hook(
                        lambda p: self.label("gradients", p.grad)
                    )
                    undo += [arrives.remove, added.remove]
            for function in undo:
                stack.callback(function)
            torch.UntypedStorage.resize_ = resize_
            stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
            memory.watchers.append(self.tag)
            stack.callback(memory.watchers.remove, self.tag)
            stack.enter_context(self)
            self.look_at(model, optimizer)
            self.is_counting = True
            yield
            self.is_counting = False

    def look_at(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Say what weights, gradients and the state of `optimizer` are."""
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        with torch._C.DisableTorchFunctionSubclass():
            for p in (*model.parameters(), *stepped):
                self.label("parameters", p, *getattr(p, "homes", ()))
                self.label("gradients", p.grad)
        state = _on_meta([list(entries.values()) for entries in optimizer.state.values()])
        self.label("optimizer", *state)
        state_bytes = sum(t.nbytes for t in state)
        # Reads weights, gradients and state; writes weights and state.
        self.stepped = 3 * sum(p.nbytes for p in stepped) + 2 * state_bytes

    def close(self) -> None:
        """Now that it is known what memory was for, let the events tell."""
        for segment in self.segments:
            segment.events = [
                Memory(e[0].category, e[1]) if type(e[0]) is _Holding else e
                for e in segment.events
                if type(e[0]) is not _Holding or e[0].category
            ]


def _on_meta(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_meta]


def _key(value: Any) -> Any:
    """What the shape of a result depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


class _Known:
    """An operation on tensors of such shapes: its result, and what it costs.

    `again` makes as empty a result without asking torch, which takes ten times as long.
    """

    def __init__(self, op: Any, result: Any, args: Any, kwargs: Any) -> None:
        self.op, given, made = op, _on_meta((args, kwargs)), _on_meta(result)
        self.is_new = bool(made) and not any(t is g for t in made for g in given)
        self.is_first = bool(made) and bool(args) and result is args[0]
        self.is_one = isinstance(result, Tensor)
        self.parts = [
            (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t
            for t in ([result] if self.is_one else result if self.is_new else [])
        ]
        if not made and op._schema.is_mutable:
            made = _on_meta(args[:1])
        has_work = made and op._opname not in _FREE
        causal = any(arg is True for arg in args)
        self.work = _work(op._opname, given, made, causal) if has_work else None

    def again(self, args: Any, kwargs: Any) -> Any:
        """A result like that of the first call."""
        if self.is_first:
            return args[0]
        if not self.is_new:
            return self.op(*args, **kwargs)
        made = [
            torch.empty_strided(*part[:2], dtype=part[2], device="meta")
            if isinstance(part, tuple)
            else part
            for part in self.parts
        ]
        return made[0] if self.is_one else tuple(made)


def _work(name: str, given: list[Tensor], made: list[Tensor], causal: bool) -> tuple:
    """The last six entries of a `Compute`."""
    work, shape, flops, a = "bytes", (), 0, made[0]
    if name in _PRODUCTS:
        a, b = given[-2:]
        work, shape = (
            "product",
            (math.prod(a.shape[:-2]), *a.shape[-2:-1], b.shape[-1], a.shape[-1]),
        )
        flops = 2 * math.prod(shape)
    elif name.startswith("_scaled_dot_product_"):
        backward = "backward" in name
        a, k = given[1:3] if backward else given[:2]
        work, shape = "attention", (*a.shape[:-1], k.shape[-2], a.shape[-1], int(causal))
        flops = (10 if backward else 4) * a.numel() * k.shape[-2] // (1 + causal)
    num_bytes = sum(t.nbytes for t in (*given, *made))
    dtype = str(a.dtype).removeprefix("torch.")
    return name, work, tuple(shape), dtype, flops, num_bytes


@cache
def _is_view(op: Any) -> bool:
    returns = [value.alias_info for value in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


# ---------------------------------------------------------------------- the rank that is played
@contextmanager
def pretend(plan: Plan, rank: int = 0) -> Iterator[Mesh]:
    """Be one rank of a group with all ranks of `plan`, of which no other exists.

    Raises `ValueError` in a process that is a rank already.
    """
    if dist.is_initialized():
        raise ValueError(
            "a trace plays a rank of a group that does not exist, and this process is a rank of "
            "one that does; trace in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake", too

    label, hook = Mesh.label, sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_ranks)
    try:
        yield Mesh(**plan.mesh_sizes())
    finally:
        dist.destroy_process_group()
        Mesh.label, sys.excepthook = label, hook


class Actor:
    """A rank without values: a model on meta under all that `plan` says, ready to step."""

    def __init__(
        self, config: LlamaConfig, plan: Plan, mesh: Mesh, sequences: int, seq_len: int
    ) -> None:
        with torch.device("meta"):
            self.model = Llama(config)
        make = partial(make_optimizer, lr=1e-4, weight_decay=0.1)
        self.strategy = compose.apply(self.model, mesh, plan, make)
        self.precision = Precision(plan.precision, "meta")
        tokens = torch.empty(sequences, seq_len, dtype=torch.int64, device="meta")
        self.microbatch = self.strategy.shard((tokens, tokens))
        self.plan = plan

    def step(self, run: Callable[..., Tensor] | None = None, microbatches: int = 0) -> None:
        """One training step, of as many microbatches as the plan says."""
        strategy = self.strategy
        train_step(
            self.model,
            [strategy],
            strategy.optimizer,
            [self.microbatch] * (microbatches or self.plan.microbatches),
            strategy.axis,
            max_norm=1.0,
            shard_axes=strategy.shard_axes,
            precision=self.precision,
            run=run or strategy.run or forward_backward,
        )


# ---------------------------------------------------------------------- from a rank to its program
def trace(config: LlamaConfig, plan: Plan, *, sequences: int = 1, seq_len: int) -> Traces:
    """Trace a training step of a Llama under `plan`; weights are float32, as `minipar train` does.

    Args:
        sequences: of a microbatch, on every rank of dp; `seq_len` tokens each, before cp cuts them.

    Raises `ValueError` for a plan that does not work, and in a process that is a rank of a group.
    """
    plan.check(config)
    if sequences < 1 or not 1 <= seq_len <= config.max_seq_len:
        raise ValueError(
            f"sequences={sequences}, seq_len={seq_len}: use 1 or more, and 1 to the "
            f"{config.max_seq_len} tokens that the model can see"
        )
    alike: dict[Any, list[int]] = defaultdict(list)
    for place in range(plan.pp):
        alike[_kind_of(config, plan, place)].append(place)
    ranks: dict[int, Trace] = {}
    for places in alike.values():
        with pretend(plan, places[0] * (plan.num_ranks // plan.pp)) as mesh:
            actor = Actor(config, plan, mesh, sequences, seq_len)
            ranks |= _record(actor, places)
            del actor
    tokens = plan.dp * plan.microbatches * sequences * seq_len
    return Traces(config, plan, tokens, dict(sorted(ranks.items())))


def _kind_of(config: LlamaConfig, plan: Plan, place: int) -> Any:
    """What the rank of a place on pp has of the model: those that have as much do the same."""
    if plan.pp == 1:
        return None
    schedule = plan.make_schedule()
    cut = stages.balance(stages.estimate_costs(config), schedule.num_stages)
    parts = [schedule.part(stage) for stage in schedule.stages_on(place)]
    return tuple((cut[part], part == 0, part == len(cut) - 1) for part in parts)


def _record(actor: Actor, places: Sequence[int]) -> dict[int, Trace]:
    """The steps of ranks that are alike, of which `actor` is the first."""
    tracer = Tracer()
    play = _play_all if actor.strategy.parts.pipeline is None else _play_pipeline
    collectives.observers.append(tracer)
    try:
        with tracer:
            play(actor, tracer, places[:1], 1)
            if tracer.unawaited:
                play(actor, tracer, places[:1], 1)  # what they are when orders are known
        tracer.segments.clear()
        gc.collect()  # hooks make cycles
        with tracer.watching(actor.model, actor.strategy.optimizer):
            held = tracer.held()
            programs = play(actor, tracer, places, DISTINCT)
            tracer.look_at(actor.model, actor.strategy.optimizer)
    finally:
        collectives.observers.remove(tracer)
    tracer.close()
    return {place: Trace(place, tuple(program), held) for place, program in programs.items()}


DISTINCT = 4
"""Microbatches that may differ: the first two, one that may be repeated, and the last."""


Programs = dict[int, list[Segment]]  # by place


def _play_all(actor: Actor, tracer: Tracer, places: Sequence[int], distinct: int) -> Programs:
    """A step without a pipeline: the third of four microbatches, as often as there are."""
    count, done = actor.plan.microbatches, [tracer.begin("before")]

    def run(model: nn.Module, *args: Any, **options: Any) -> Tensor:
        def begin(*_: Any) -> None:
            done.append(tracer.begin("microbatch"))

        hook = model.register_forward_pre_hook(begin, prepend=True)
        total = forward_backward(model, *args, **options)
        hook.remove()
        done.append(tracer.begin("after"))
        return total

    actor.step(run, min(count, distinct))
    repeated = [done[3]] * (count - distinct) if count > distinct == DISTINCT else []
    return {place: [*done[:3], *repeated, *done[3:]] for place in places}


def _play_pipeline(actor: Actor, tracer: Tracer, places: Sequence[int], distinct: int) -> Programs:
    """A step of a pipeline: few microbatches are computed, and then all ranks follow their rows."""
    pipeline, schedule = actor.strategy.parts.pipeline, actor.strategy.parts.pipeline.schedule
    own, done = schedule.stages_on(places[0]), {}
    roles = [_roles(schedule, stage, distinct) for stage in own]
    x = actor.microbatch[0]
    shape = (len(x), x.shape[1] // pipeline.token_shards, pipeline.config.hidden_size)
    dtype = next(actor.model.parameters()).dtype

    def hidden() -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def makes(action: Action) -> bool:
        stage = pipeline.stages[action.stage]
        return action.kind != "W" and not (stage.last if action.kind == "F" else stage.first)

    def play(lowered: Schedule, microbatches: Sequence[Any], work: Callable) -> None:
        def few(action: Action, given: Tensor | None) -> Tensor | None:
            at = own.index(action.stage)
            role = roles[at].get(action.microbatch)
            if role is None:
                return hidden() if makes(action) else None
            segment = done[at, action.kind, role] = tracer.begin(f"{at}{action.kind}")
            frame = tracer.recorder.open(SPAN_KIND[action.kind], str(action))
            made = work(action, given)
            tracer.recorder.close(frame)
            tracer.label("", given, made)  # counted where they are handed over
            tracer.begin("messages")
            return made

        tracer.begin("messages")
        Pipeline._play(pipeline, lowered, microbatches, few)
        done["after"] = tracer.begin("after")

    done["before"] = tracer.begin("before")
    pipeline._play = play
    try:
        actor.step()
    finally:
        del pipeline._play

    def follow(place: int) -> list[Segment]:
        """What another rank does: its messages are sent, its computing is that of this one."""
        twin, theirs = copy.copy(pipeline), schedule.stages_on(place)
        twin.axis = replace(pipeline.axis, rank=place)
        twin.stages = dict(zip(theirs, pipeline.stages.values(), strict=True))
        roles = [_roles(schedule, stage, DISTINCT) for stage in theirs]
        program, waiting = [done["before"]], {}

        def again(action: Action, given: Tensor | None) -> Tensor | None:
            at, key = theirs.index(action.stage), (action.stage, action.microbatch)
            role = roles[at].get(action.microbatch, DISTINCT - 2)
            program.append(done[at, action.kind, role])
            program.append(tracer.begin(f"messages {len(program)}"))
            if action.kind == "F":
                waiting[key] = given  # until its backward
            else:
                waiting.pop(key, None)
            return hidden() if makes(replace(action, stage=own[at])) else None

        program.append(tracer.begin("messages 0"))
        Pipeline._play(twin, schedule, [actor.microbatch] * actor.plan.microbatches, again)
        return [*program, done["after"]]

    return {place: follow(place) for place in places} if distinct == DISTINCT else {}


def _roles(schedule: Schedule, stage: int, distinct: int) -> dict[int, int]:
    """The microbatches of a stage that are computed, and their numbers up to `DISTINCT`."""
    row = schedule.actions[schedule.rank_of[stage]]
    order = [a.microbatch for a in row if a.stage == stage and a.kind == "F"]
    last = schedule.last_gradient(stage).microbatch
    others = [microbatch for microbatch in order if microbatch != last]
    return {m: i for i, m in enumerate(others[: distinct - 1])} | {last: DISTINCT}
