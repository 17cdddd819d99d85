"""The work of a rank in a step, in its order: recorded from the real code, at any size.

Idea.   On the meta device tensors have shapes and no values, and torch's "fake" process group says
        of every collective that it is done. So one process runs the training step of any rank of
        any mesh: `compose.apply`, `train_step`, clipping and optimizer are the real ones, and
        their operations are recorded. No strategy is modelled a second time.
Trace.  A list of segments, each a list of events in their order: see `tracer.py`.
Repeats. Microbatches in the middle of a step are alike, so one of them is traced and repeated. In a
        pipeline, ranks with as many layers are alike, too: one of them computes. The others follow
        their own rows of the schedule with its segments; the real `Mail` sends their messages.
        Other ranks of dp, cp and tp do the same as the first.
Steps.  A later step is recorded, not the first: the first learns orders (ddp, fsdp), and a step may
        wait for what the step before it has sent (zero).

Limits: an optimizer is one pass over its bytes, as a fused one is. Elementwise operations are not
fused, but for norms. Loaders, checkpoints and what Python does between operations take no part.
"""

import copy
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from minipar.parallel.pipeline import stages
from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule
from minipar.parallel.pipeline.runtime import Pipeline
from minipar.parallel.pipeline.simulate import SPAN_KIND
from minipar.parallel.plan import Plan
from minipar.sim.tracer import Event, Memory, Segment, Tracer
from minipar.train.optim import make_optimizer
from minipar.train.precision import Precision
from minipar.train.step import forward_backward, train_step

DISTINCT = 4
"""Microbatches that may differ: the first two, one that may be repeated, and the last."""
Programs = dict[int, list[Segment]]  # by place on pp


# ---------------------------------------------------------------------- what is found
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
        now, highest = Counter(self.held), Counter(self.held)
        most = total = now.total()
        for event in self.events():
            if type(event) is Memory and event.holding.category:
                now[event.holding.category] += event.num_bytes
                total += event.num_bytes
                if total > most:
                    most, highest = total, now.copy()
        return dict(highest)


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


# ---------------------------------------------------------------------- from a rank to its program
def trace(
    config: LlamaConfig,
    plan: Plan,
    *,
    sequences: int = 1,
    seq_len: int,
    bucket_mb: float | None = None,
) -> Traces:
    """Trace a training step of a Llama under `plan`; weights are float32, as `minipar train` does.

    Args:
        sequences: of a microbatch, on every rank of dp; `seq_len` tokens each, before cp cuts them.
        bucket_mb: capacity of a bucket of gradients, as in `compose.apply`.

    Raises `ValueError` for a plan that does not work, and in a process that is a rank of a group.
    """
    plan.check(config)
    if plan.dispatch == "paired":
        use = "take dispatch=overlapped, which cannot be faster"
        raise ValueError(f"plan {plan}: dispatch=paired runs two actions at once; {use}")
    alike: dict[Any, list[int]] = defaultdict(list)
    for place, kind in enumerate(_kinds(config, plan)):
        alike[kind].append(place)
    found: dict[int, Trace] = {}
    sizes = plan.mesh_sizes()
    for places in alike.values():
        first = rank_at(dict.fromkeys(sizes, 0) | {"pp": places[0]}, sizes)
        with pretend(plan, first) as mesh, operations.fused_norms():
            actor = Actor(config, plan, mesh, sequences, seq_len, bucket_mb=bucket_mb)
            found |= _record(actor, places, Tracer())
            del actor
    return Traces(plan, dict(sorted(found.items())))


def _kinds(config: LlamaConfig, plan: Plan) -> list[Any]:
    """Return a key for each place on pp; keys are equal where ranks hold and do the same."""
    if plan.pp == 1:
        return [None]
    schedule = plan.make_schedule()
    if schedule.copies > 1:  # each rank exchanges gradients with its own partner
        return [*range(plan.pp)]
    cut = stages.balance(stages.estimate_costs(config), schedule.num_stages)

    def of(place: int, stage: int) -> tuple:
        part, last = schedule.part(stage), schedule.last_gradient(stage)
        kinds = sorted({a.kind for a in schedule.actions[place] if a.stage == stage})
        return cut[part], part == 0, part == len(cut) - 1, *kinds, last and last.kind

    return [tuple(of(p, stage) for stage in schedule.stages_on(p)) for p in range(plan.pp)]


def _record(actor: Actor, places: Sequence[int], tracer: Tracer) -> dict[int, Trace]:
    """Return the steps of ranks that are alike; `actor` is the first of them."""
    play = _play_all if actor.strategy.parts.pipeline is None else _play_pipeline
    # The first step shows ZeRO 2 in which order the stages of a rank have their last backward.
    learned = DISTINCT if actor.plan.zero == 2 and actor.plan.pp > 1 else 1
    taps.append(tracer)
    gc.freeze()  # the collection below then looks only at later objects, which is fast
    try:
        with tracer:
            play(actor, tracer, places[:1], learned)
            if tracer.unawaited:
                play(actor, tracer, places[:1], learned)  # again, now that orders are known
        tracer.segments.clear()
        gc.collect()  # the cycles that hooks make
        with tracer.watching(actor.model, actor.strategy.optimizer):
            held = tracer.held()
            programs = play(actor, tracer, places, DISTINCT)
            tracer.look_at(actor.model, actor.strategy.optimizer)
    finally:
        gc.unfreeze()
        taps.remove(tracer)
    return {place: Trace(tuple(program), held) for place, program in programs.items()}


def _play_all(actor: Actor, tracer: Tracer, places: Sequence[int], distinct: int) -> Programs:
    """Play a step without a pipeline; the third of four microbatches stands for all others."""
    count, done = actor.plan.microbatches, [tracer.begin_segment("before")]

    def run(model: nn.Module, *args: Any, **options: Any) -> Tensor:
        begin = lambda *_: done.append(tracer.begin_segment("microbatch"))  # noqa: E731
        hook = model.register_forward_pre_hook(begin, prepend=True)
        total = forward_backward(model, *args, **options)
        hook.remove()
        done.append(tracer.begin_segment("after"))
        return total

    actor.strategy.run = run
    actor.step(min(count, distinct))
    repeated = [done[3]] * (count - distinct) if count > distinct == DISTINCT else []
    return {place: [*done[:3], *repeated, *done[3:]] for place in places}


def _play_pipeline(actor: Actor, tracer: Tracer, places: Sequence[int], distinct: int) -> Programs:
    """Play a step of a pipeline: all ranks follow their rows, and the first computes a little."""
    pipeline, schedule = actor.strategy.parts.pipeline, actor.strategy.parts.pipeline.schedule
    done: dict[Any, Segment] = {}

    def follow(place: int, methods: Mapping[str, Any], distinct: int = DISTINCT) -> list[Any]:
        """Return the step of a rank: its own messages, and keys of `done` for what it computes."""
        twin, own = copy.copy(pipeline), schedule.stages_on(place)
        twin.axis = replace(pipeline.axis, rank=place)
        roles = [_roles(schedule, stage, distinct) for stage in own]
        program, waiting = ["before", tracer.begin_segment("messages 0")], {}

        def act(action: Action, given: Tensor | None) -> Tensor | None:
            at = own.index(action.stage)
            role = roles[at].get(action.microbatch)
            key = at, action.kind, DISTINCT - 2 if role is None else role
            if methods and role is not None:
                done[key] = tracer.begin_segment(f"{at}{action.kind}")
                frame = tracer.recorder.open(SPAN_KIND[action.kind], str(action))
                like = None if given is None else torch.empty_like(given)
                tracer.label("", like, methods[action.kind](action, like))
                tracer.recorder.close(frame)
            program.extend([key, tracer.begin_segment(f"messages {len(program)}")])
            if action.kind == "F":
                waiting[action.stage, action.microbatch] = given  # until its backward
            else:
                waiting.pop((action.stage, action.microbatch), None)
            # Buffers that an action receives and hands over count as messages, once.
            return pipeline.buffer(actor.microbatch[0]) if schedule.makes(action) else None

        batch = [actor.microbatch] * actor.plan.microbatches
        Pipeline._play(twin, schedule, batch, dict.fromkeys(COMPUTE, act))
        return [*program, "after"]

    def play(_: Schedule, __: Sequence[Any], methods: Mapping[str, Any]) -> None:
        programs[places[0]] = follow(places[0], methods, distinct)
        done["after"] = tracer.begin_segment("after")

    def computed(key: Any) -> Segment:
        """Return what was computed in the place of `key`, perhaps for another microbatch."""
        if key not in done:
            roles = (role for *start, role in done if start == [*key[:2]])
            key = *key[:2], min(roles, key=lambda role: (role == DISTINCT, -role))
        return done[key]

    programs: dict[int, list[Any]] = {}
    done["before"] = tracer.begin_segment("before")
    pipeline._play = play
    try:
        actor.step()
    finally:
        del pipeline._play
    if distinct < DISTINCT:
        return {}
    programs |= {place: follow(place, {}) for place in places[1:]}
    return {
        place: [at if type(at) is Segment else computed(at) for at in program]
        for place, program in programs.items()
    }


def _roles(schedule: Schedule, stage: int, distinct: int) -> dict[int, int]:
    """Return the microbatches of a stage that are computed, and their numbers up to `DISTINCT`."""
    row = schedule.actions[schedule.rank_of[stage]]
    last = schedule.last_gradient(stage)
    if last is None:  # more stages than microbatches
        return {}
    order = [a.microbatch for a in row if a.stage == stage and a.kind == "F"]
    backward = {a.microbatch: a.kind for a in row if a.stage == stage and a.kind in "BI"}
    others = [microbatch for microbatch in order if microbatch != last.microbatch]
    few = others[: distinct - 1]
    for kind in {*backward.values()} - {backward[m] for m in few}:
        few += [m for m in others if backward[m] == kind][:1]
    return {m: i for i, m in enumerate(few)} | {last.microbatch: DISTINCT}
