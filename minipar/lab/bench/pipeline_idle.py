"""`minipar bench idle`: how idle are the ranks of a pipeline? Measured beside simulated.

Stages sleep instead of computing. A sleeping stage keeps no processor busy, so two cores stand in
for any number of ranks. All else is real: the runtime, autograd, both halves of a backward, and
messages over an emulated link. A message travels for 10 ms, a sixth of a forward. The difference to
the simulation is the waiting that the runtime adds to schedule and link.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab.bench import race
from minipar.model.llama import Llama, LlamaConfig
from minipar.observe import timeline
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline import runtime
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.pipeline.simulate import Costs, bubble, simulate
from minipar.parallel.pipeline.split_backward import PutOff

SECONDS = 0.06  # of F, of I and of W, of a rank's whole share of the model
LINK = link.parse("1gbe*100")
TOKENS, WIDTH = 96, 16
MESSAGE = link.seconds("send", 4 * TOKENS * WIDTH, 2, LINK) - LINK.latency  # on the wire


@dataclass(frozen=True)
class IdleConfig:
    """Compare the idle time of every pipeline schedule with its simulation."""

    ranks: int = 4
    """Number of ranks; an even number, which DualPipe needs."""
    microbatches: int = 8
    """Microbatches per step, at least two for each rank."""
    json: str = ""
    """Also write the rows to this file."""


def run(config: IdleConfig) -> list[dict[str, Any]]:
    """Play every schedule three times, print the table of medians; return a row for each."""
    rows = []
    with race.pool(config.ranks, "none") as ranks:
        for name in SCHEDULES:
            schedule = make(name, config.ranks, config.microbatches)
            shares = []
            for _ in range(3):
                spans = ranks.run(_sleep, schedule, SECONDS)[0]
                measured = Timeline(spans).shifted()
                # The simulation is told how long sleeping took: waiting is what is compared.
                simulated = simulate(schedule, costs_of(schedule, measured))
                shares.append((idle_share(measured), idle_share(simulated)))
            measured, simulated = sorted(shares)[1]
            rows.append(
                {
                    "bench": "idle",
                    "link": LINK.label,
                    "ranks": config.ranks,
                    "schedule": name,
                    "microbatches": config.microbatches,
                    "simulated": simulated,
                    "measured": measured,
                }
            )
    columns = {"schedule": "{schedule}", "idle: simulated": "{simulated:.1%}"}
    print(race.table(rows, columns | {"measured": "{measured:.1%}"}))
    race.save(rows, config.json)
    return rows


def idle_share(timeline: Timeline) -> float:
    """Return the share of the time that ranks wait, over all ranks, from first start to last end.

    A `bubble` of b times the work is a share of b / (1 + b).
    """
    idle = bubble(timeline)
    return idle / (1 + idle)


def costs_of(schedule: Schedule, measured: Timeline) -> Costs:
    """Return the mean seconds of F, I and W, by part of the model; half of a B is I, half is W."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in (span for span in measured if span.kind != "comm"):
        action = Action.parse(span.name)
        halves = "IW" if action.kind == "B" else action.kind
        for kind in halves:
            seconds[kind, schedule.part(action.stage)].append(span.duration / len(halves))
    parts = range(schedule.num_stages)
    means = ([statistics.mean(seconds[kind, part]) for part in parts] for kind in "FIW")
    return Costs(*means, message=MESSAGE, latency=LINK.latency)


# ---------------------------------------------------------------------- on the ranks
class Sleeper(nn.Module):
    """A block that sleeps: F, I and W take `seconds` each, a whole backward I and W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds, self.put_off = 0.0, PutOff()

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """Sleep, then return x."""
        return _Sleep.apply(x, self.weight, self)

    def sleep(self) -> Tensor:
        """Sleep as long as F, I or W takes; return a gradient of the weight."""
        time.sleep(self.seconds)
        return torch.zeros(1)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, sleeper: Sleeper) -> Tensor:
        ctx.weight, ctx.sleeper = weight, sleeper
        sleeper.sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.sleeper.sleep()
        return dy, ctx.sleeper.put_off.take(ctx.weight, ctx.sleeper.sleep), None


def _sleep(schedule: Schedule, seconds: float) -> list[Span]:
    """Return spans of F, B, I, W and messages of all ranks; called on every rank."""
    mesh, stages = Mesh(pp=schedule.num_ranks), schedule.num_stages
    model = Llama(LlamaConfig(64, WIDTH, 24, num_layers=stages, num_heads=4, num_kv_heads=2))
    model.model.layers = nn.ModuleList(Sleeper() for _ in range(stages))
    pipeline = runtime.apply(model, mesh.pp, schedule, cut=(1,) * stages)
    sleepers = [module for module in model.modules() if isinstance(module, Sleeper)]
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    before = link.current()
    link.use(LINK)
    for share in (0.0, 1.0):  # in the first step, ranks agree on shapes
        for sleeper in sleepers:
            sleeper.seconds = share * seconds * schedule.num_ranks / stages
            sleeper.put_off = pipeline.put_off
        barrier(mesh.world)
        with timeline.record() as recorded:
            pipeline.run(model, [pipeline], [(tokens, tokens)] * schedule.num_microbatches)
            pipeline.finish_backward()
    link.use(before)
    return [span for span in recorded.gather(mesh.world) if span.name[0].isdigit()]
