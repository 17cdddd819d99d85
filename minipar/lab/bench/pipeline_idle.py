"""How idle are the ranks of a pipeline? Measured beside simulated, with stages that sleep.

A stage that sleeps takes as long as it is told and keeps no processor busy, so two cores stand in
for any number of ranks. All else is real: the runtime, autograd, both halves of a backward, and
messages over an emulated link, slow enough for them to matter: each travels for 10 ms, a sixth of
a forward. So what is measured is whether the runtime adds any waiting of its own to what schedule
and link make inevitable.
"""

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab import draw
from minipar.lab.bench import race
from minipar.lab.draw import pipeline as draw_pipeline
from minipar.model.llama import Llama, LlamaConfig
from minipar.observe import timeline
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline import runtime
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.pipeline.simulate import Costs, bubble, simulate
from minipar.parallel.pipeline.split_backward import PutOff
from minipar.ranks.launch import Ranks

COLUMNS: race.Columns = (  # shares of the time of all ranks, first start to last end
    ("schedule", "{schedule}"),
    ("idle: simulated", "{simulated:.1%}"),
    ("measured", "{measured:.1%}"),
    ("difference in points", "{difference_in_points:+.1f}"),
)
SECONDS = 0.06  # of F, of I and of W, of a rank's whole share of the model
LINK = link.parse("1gbe*100")
TOKENS, WIDTH = 96, 16
MESSAGE = link.seconds("send", 4 * TOKENS * WIDTH, 2, LINK) - LINK.latency  # on the wire


class Sleeper(nn.Module):
    """In place of a block: F, I and W take `seconds` each, a whole backward the sum of I and W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds, self.put_off = 0.0, PutOff()

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """x, late."""
        return _Sleep.apply(x, self.weight, self)

    def weight_gradient(self) -> Tensor:
        """W: nothing, late."""
        time.sleep(self.seconds)
        return torch.zeros(1)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, sleeper: Sleeper) -> Tensor:
        ctx.weight, ctx.sleeper = weight, sleeper
        time.sleep(sleeper.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sleeper = ctx.sleeper
        time.sleep(sleeper.seconds)
        return dy, sleeper.put_off.take(ctx.weight, sleeper.weight_gradient), None


# ---------------------------------------------------------------------- one run
def run(ranks: Ranks, schedule: Schedule, seconds: float = SECONDS) -> tuple[Timeline, Timeline]:
    """One step by `schedule`: (simulated, measured).

    `ranks` are as many as the schedule has, on the backend "link". The simulator is told how long
    sleeping took on average, since what is compared is waiting, and what a message costs.
    """
    spans = ranks.run(_sleep, schedule, seconds)[0]
    measured = Timeline(spans, f"measured, {LINK.label}").shifted()
    return simulate(schedule, costs_of(schedule, measured)), measured


def idle_share(timeline: Timeline) -> float:
    """The part of the time that ranks wait, over all ranks, from the first start to the last end.

    A `bubble` of b times the work is a share of b / (1 + b).
    """
    idle = bubble(timeline)
    return idle / (1 + idle)


def costs_of(schedule: Schedule, measured: Timeline) -> Costs:
    """What F, I and W took on average, by part of the model. A whole backward counts as half I and
    half W."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in measured:
        if span.kind == "comm":
            continue
        action = Action.parse(span.name)
        halves = "IW" if action.kind == "B" else action.kind
        for kind in halves:
            seconds[kind, schedule.part(action.stage)].append(span.duration / len(halves))
    parts = range(schedule.num_stages)
    means = ([statistics.mean(seconds[kind, part]) for part in parts] for kind in "FIW")
    return Costs(*means, message=MESSAGE, latency=LINK.latency)


def picture(schedule: Schedule, simulated: Timeline, measured: Timeline) -> Figure:
    """Predicted above measured, on one time axis in milliseconds."""
    panels = {
        f"{schedule.name}, simulated": (schedule, simulated),
        f"{schedule.name}, measured": (schedule, measured),
    }
    return draw_pipeline.compare(panels, unit="ms")


# ---------------------------------------------------------------------- on the ranks
def _sleep(schedule: Schedule, seconds: float) -> list[Span]:
    """Spans of F, B, I, W and messages of all ranks; called on every rank."""
    mesh, stages = Mesh(pp=schedule.num_ranks), schedule.num_stages
    model = Llama(LlamaConfig(64, WIDTH, 24, num_layers=stages, num_heads=4, num_kv_heads=2))
    model.model.layers = nn.ModuleList(Sleeper() for _ in range(stages))
    pipeline = runtime.apply(model, mesh.pp, schedule, cut=(1,) * stages)
    sleepers = [module for module in model.modules() if isinstance(module, Sleeper)]
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    before = link.current()
    link.use(LINK)
    for share in (0.0, 1.0):  # in their first step, ranks agree on shapes
        for sleeper in sleepers:
            sleeper.seconds = share * seconds * schedule.num_ranks / stages
            sleeper.put_off = pipeline.put_off
        barrier(mesh.world)
        with timeline.record() as recorded:
            pipeline.run(model, [pipeline], [(tokens, tokens)] * schedule.num_microbatches)
            pipeline.finish_backward()
    link.use(before)
    return [span for span in recorded.gather(mesh.world) if span.name[0].isdigit()]


# ---------------------------------------------------------------------- every schedule there is
def measure(
    num_ranks: int, num_microbatches: int, runs: int, folder: str = ""
) -> list[dict[str, Any]]:
    """Run every schedule `runs` times, of which the one in the middle counts: a row for each.

    Pictures, predicted above measured, go into `folder` if there is one.
    """
    rows = []
    if folder:
        Path(folder).mkdir(exist_ok=True)
    with race.pool(num_ranks, "none") as ranks:
        for name in SCHEDULES:
            schedule = make(name, num_ranks, num_microbatches)
            pairs = [run(ranks, schedule) for _ in range(runs)]
            pairs.sort(key=lambda pair: idle_share(pair[1]))
            simulated, measured = pairs[(runs - 1) // 2]
            rows.append(
                {
                    "bench": "pipeline, idle",
                    "link": LINK.label,
                    "ranks": num_ranks,
                    "microbatches": num_microbatches,
                    "runs": runs,
                    "schedule": name,
                    "simulated": idle_share(simulated),
                    "measured": idle_share(measured),
                    "difference_in_points": 100 * (idle_share(measured) - idle_share(simulated)),
                }
            )
            if folder:
                draw.save(picture(schedule, simulated, measured), Path(folder) / f"{name}.png")
    return rows
