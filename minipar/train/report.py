"""The report at the end of a run; the recorder and the profiler of its steps."""

import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minipar.comm import clock
from minipar.comm.mesh import Mesh
from minipar.model.hf import write_json
from minipar.observe import timeline
from minipar.observe.spans import clipped
from minipar.observe.timeline import Timeline


@dataclass
class Report:
    """The report at the end of a run."""

    folder: str
    data: str
    num_parameters: int
    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float
    tokens_per_second: float
    mfu: float  # model FLOPs utilisation: the share of the peak below
    peak: str  # the source of the peak
    step_seconds: float  # median
    sent_bytes: int  # by the first rank, in the step of timeline.json; so are these two:
    communication_seconds: float
    hidden_fraction: float | None  # of these seconds; None without communication
    peak_memory: list[int]  # bytes, per rank
    sample: str = ""  # a prompt of 32 tokens and what the model wrote; or why there is none

    def write(self, folder: Path) -> None:
        """Write report.json, and sample.txt."""
        (folder / "sample.txt").write_text(f"{self.sample}\n", encoding="utf-8")
        write_json(folder / "report.json", asdict(self))


class StepRecorder:
    """Records the last `count` steps of `num_steps`; one recording goes over all of them."""

    def __init__(self, model: nn.Module | None, num_steps: int, count: int) -> None:
        self.model, self.num_steps, self.count = model, num_steps, min(count, num_steps)
        self.done = 0
        self.recorded = Timeline()
        self.steps: list[tuple[float, float]] = []  # start and end of each recorded step
        self.recording = ExitStack()  # for a `with` around all steps

    @property
    def is_on(self) -> bool:
        """True if the step that was done last was recorded."""
        return self.done > self.num_steps - self.count

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step; every step of the run needs this, recorded or not."""
        self.done += 1
        if self.is_on and not self.steps:
            self.recorded = self.recording.enter_context(timeline.record(self.model))
        start = clock.now()
        yield
        if self.is_on:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # so that the kernels of a step run between its times
            self.steps.append((start, clock.now()))
        if self.done == self.num_steps:
            self.recording.close()

    def typical(self, mesh: Mesh) -> Timeline:
        """Return the recorded step in the middle, with the spans of all ranks; a collective."""
        if not self.steps:
            return Timeline()
        here, (start, end) = self.recorded.ranks, self.steps[len(self.steps) // 2]
        step = clipped(self.recorded, dict.fromkeys(here, start), dict.fromkeys(here, end))
        return Timeline(step).gather(mesh.world).shifted()


def profiler(folder: Path, rank: int) -> torch.profiler.profile:
    """Return a profiler of steps 3 to 5, for a `with` around all steps; call `step` after each.

    It writes trace_rank0.json (open it at https://ui.perfetto.dev, or with `minipar overlap`), and
    on a GPU memory_rank0.pickle (open it at https://pytorch.org/memory_viz).
    """
    folder.mkdir(exist_ok=True)
    if torch.cuda.is_initialized():
        torch.cuda.memory._record_memory_history()

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json"))
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)


PROFILED_STEPS = 5
"""Steps after which the profiler has ended."""


def figures(lines: Sequence[dict[str, Any]], step: Timeline) -> dict[str, float | None]:
    """Return what a `Report` says of the metrics of all steps, and of the timeline of one."""
    timed = [line for line in lines if not line.get("recorded")] or lines  # a recorder takes time
    seconds = [line["seconds"] for line in timed]
    rows = [row for row in step.overlap() if row.rank == 0]
    communication = sum(row.total for row in rows)
    return {
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "tokens_per_second": sum(line["tokens"] for line in timed) / sum(seconds),
        "step_seconds": statistics.median(seconds),
        "sent_bytes": sum(row.num_bytes for row in rows),
        "communication_seconds": communication,
        "hidden_fraction": sum(r.hidden for r in rows) / communication if communication else None,
    }


def peak_memory(device: torch.device) -> int:
    """Return the bytes at the highest point: allocated on a GPU, or resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kB
