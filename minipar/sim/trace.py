"""The work of a rank in a step, in its order: recorded from the real code, at any size.

Idea.   On the meta device tensors have shapes and no values, and torch's "fake" process group says
        of every collective that it is done. So one process runs the training step of any rank of
        any mesh: `compose.apply`, `train_step`, clipping and optimizer are the real ones, and
        what passes by is written down. No strategy is modelled a second time.
Trace.  A list of segments, each a list of events in their order: see `tracer.py`.
Repeats. In a pipeline microbatches in the middle of a step are alike, so one of them is computed,
        and the others repeat it. Of each place on the pipeline one rank runs: the other ranks of
        its dp, cp and tp do the same.
Steps.  One that others have gone before is recorded: the first learns orders (ddp, fsdp), and what
        one step sends may be awaited in the next (zero).

Limits: an optimizer is one pass over its bytes, as a fused one is. Elementwise operations are not
fused, but for norms. Loaders, checkpoints and what Python does between operations take no part.
"""

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minipar.comm.calls import taps
from minipar.comm.mesh import Mesh, rank_at
from minipar.emulate import operations
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule
from minipar.parallel.pipeline.runtime import Pipeline
from minipar.parallel.pipeline.simulate import SPAN_KIND
from minipar.parallel.plan import Plan
from minipar.sim.tracer import Event, Memory, Segment, Tracer
from minipar.train.optim import make_optimizer
from minipar.train.precision import Precision
from minipar.train.step import forward_backward, train_step

# ---------------------------------------------------------------------- what is found
DISTINCT = 3
"""Microbatches of a stage that may differ at the start of a step; later ones repeat the last."""


@dataclass(frozen=True)
class Trace:
    """The step of one rank: segments, some of them several times, and what it holds before."""

    segments: tuple[Segment, ...]
    held: dict[str, int]  # bytes by category, between two steps

    def events(self) -> Iterator[Event]:
        """Yield all events of the step."""
        for segment in self.segments:
            yield from segment.events

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category when the rank holds the most."""
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
    """The steps of a plan: one rank for each place on the pipeline."""

    plan: Plan
    ranks: dict[int, Trace]  # by place on pp

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category when the fullest rank is at its fullest."""
        peaks = [trace.at_peak() for trace in self.ranks.values()]
        return max(peaks, key=lambda held: sum(held.values()))


# ---------------------------------------------------------------------- the rank that is played
@contextmanager
def pretend(plan: Plan, rank: int = 0) -> Iterator[Mesh]:
    """Play one rank of a group of all ranks of `plan`; no other rank exists.

    Raises `ValueError` in a process that is a rank, as torch does.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake", too

    label, hook = Mesh.label, sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_ranks)
    try:
        yield Mesh(**plan.mesh_sizes())
    finally:
        dist.destroy_process_group()
        Mesh.label, sys.excepthook = label, hook


class Actor:
    """A model under a plan, ready to step; on meta, the model of a rank without values."""

    def __init__(
        self,
        config: LlamaConfig,
        plan: Plan,
        mesh: Mesh,
        sequences: int,
        seq_len: int,
        device: str = "meta",
        bucket_mb: float | None = None,
    ) -> None:
        with torch.device(device):
            self.model = Llama(config)
        make = partial(make_optimizer, lr=1e-4, weight_decay=0.1)
        self.strategy = compose.apply(self.model, mesh, plan, make, bucket_mb=bucket_mb)
        self.precision = Precision(plan.autocast, device)
        tokens = torch.zeros(sequences, seq_len, dtype=torch.int64, device=device)
        self.microbatch = self.strategy.shard((tokens, tokens))
        self.plan = plan

    def step(self, microbatches: int = 0) -> None:
        """Run one training step, of as many microbatches as the plan says."""
        train_step(
            self.model,
            [self.strategy],
            self.strategy.optimizer,
            [self.microbatch] * (microbatches or self.plan.microbatches),
            self.strategy.axis,
            max_norm=1.0,
            precision=self.precision,
        )


# ---------------------------------------------------------------------- from a rank to its trace
def trace(
    config: LlamaConfig,
    plan: Plan,
    *,
    sequences: int = 1,
    seq_len: int,
    on_cpu: bool = False,
    bucket_mb: float | None = None,
) -> Traces:
    """Trace a training step of a Llama under `plan`; weights are float32, as `minipar train` does.

    Args:
        sequences: of a microbatch, on every rank of dp; `seq_len` tokens each, before cp cuts them.
        on_cpu: norms are spelled out, as torch does there; on a GPU each is one operation.
        bucket_mb: capacity of a bucket of gradients, as in `compose.apply`.

    Raises `ValueError` for a plan that does not work, and in a process that is a rank of a group.
    """
    plan.check(config)
    if plan.dispatch == "paired":
        raise ValueError(
            f"plan {plan}: a trace replays the actions of a rank one by one, but dispatch=paired "
            f"runs two at once; take dispatch=overlapped, which cannot be faster"
        )
    found: dict[int, Trace] = {}
    sizes = plan.mesh_sizes()
    for place in range(plan.pp):
        norms = nullcontext() if on_cpu else operations.fused_norms()
        rank = rank_at(dict.fromkeys(sizes, 0) | {"pp": place}, sizes)
        with pretend(plan, rank) as mesh, norms:
            actor = Actor(config, plan, mesh, sequences, seq_len, bucket_mb=bucket_mb)
            found[place] = _record(actor, Tracer())
            del actor
    return Traces(plan, found)


def _record(actor: Actor, tracer: Tracer) -> Trace:
    """Return the step of one rank, after one or two in which strategies learn their orders."""
    taps.append(tracer)
    gc.freeze()  # the collection below then looks only at later objects, which is fast
    try:
        with tracer:
            _play(actor, tracer, is_first=True)
            if tracer.unawaited:
                _play(actor, tracer, is_first=True)  # what they are when orders are known
        gc.collect()  # the cycles that hooks make
        with tracer.watching(actor.model, actor.strategy.optimizer):
            held = tracer.held()
            _play(actor, tracer)
            tracer.look_at(actor.model, actor.strategy.optimizer)
    finally:
        gc.unfreeze()
        taps.remove(tracer)
    tracer.close()
    return Trace(tuple(tracer.segments), held)


def _play(actor: Actor, tracer: Tracer, is_first: bool = False) -> None:
    """Run a step; `tracer.segments` then has all of it. A first step may compute less."""
    pipeline = actor.strategy.parts.pipeline
    tracer.segments.clear()
    tracer.begin_segment("before")

    def begin(*_: Any) -> None:
        tracer.begin_segment("microbatch")

    def run(model: nn.Module, *given: Any, **options: Any) -> Tensor:
        hook = model.register_forward_pre_hook(begin, prepend=True)
        total = forward_backward(model, *given, **options)
        hook.remove()
        tracer.begin_segment("after")
        return total

    if pipeline is None:
        actor.strategy.run = run
        actor.step(1 if is_first else 0)
        return
    pipeline._play = partial(_play_pipeline, actor, tracer, is_first)
    actor.step()


def _play_pipeline(
    actor: Actor,
    tracer: Tracer,
    few: bool,
    schedule: Schedule,
    microbatches: Sequence[Any],
    methods: Mapping,
) -> None:
    """Do the list of a rank, in the place of `Pipeline._play`: compute some, repeat the others.

    All messages are empty buffers, as many as on a real rank.
    """
    pipeline = actor.strategy.parts.pipeline
    last = pipeline.last_gradient
    computed = {
        stage: {action and action.microbatch} if few else _distinct(schedule, stage)
        for stage, action in last.items()
    }
    done: dict[tuple[int, str], Segment] = {}
    inputs: dict[tuple[int, int], Tensor | None] = {}  # of stages, until their backward

    def act(action: Action, given: Tensor | None) -> Tensor | None:
        stage, kind, i = action.stage, action.kind, action.microbatch
        if i in computed[stage]:
            segment = tracer.begin_segment(f"{stage}{kind}")
            received = None if given is None else torch.empty_like(given)
            with tracer.recorder.span(SPAN_KIND[kind], str(action)):
                made = methods[kind](action, received)
            tracer.label("", received, made)  # counted where they are handed over
            if i != last[stage].microbatch:
                done[stage, kind] = segment
        elif not few:
            tracer.segments.append(done[stage, kind])
        tracer.begin_segment(f"messages {len(tracer.segments)}")
        if kind == "F":
            inputs[stage, i] = given
        else:
            inputs.pop((stage, i), None)
        return pipeline.buffer(actor.microbatch[0]) if schedule.makes(action) else None

    tracer.begin_segment("messages")
    Pipeline._play(pipeline, schedule, microbatches, dict.fromkeys(COMPUTE, act))
    tracer.begin_segment("after")


def _distinct(schedule: Schedule, stage: int) -> set[int]:
    """Return the microbatches of a stage that may differ from others, which repeat the latest.

    They are the first three, the first with each kind of backward, and the last to have one.
    """
    last = schedule.last_gradient(stage)
    if last is None:  # more stages than microbatches
        return set()
    row = [a for a in schedule.actions[schedule.rank_of[stage]] if a.stage == stage]
    others = [a for a in row if a.microbatch != last.microbatch]
    few = {a.microbatch for a in [a for a in others if a.kind == "F"][:DISTINCT]}
    firsts = {a.kind: a.microbatch for a in reversed(others)}
    return few | {*firsts.values(), last.microbatch}
