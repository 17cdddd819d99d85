"""The report at the end of a run, and the notes that it needs."""

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
    """The report at the end of a run; None where there is nothing to report.

    Communication is the reporting rank's, in the steps since the run was last resumed; it
    is scaled up from the recorded steps.
    """

    folder: str
    data: str
    num_parameters: int
    first_step: int  # steps done before, by the run that this one resumed
    steps: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float
    tokens_per_second: float | None
    mfu: float | None  # model FLOPs utilisation: the share of the peak below
    peak: str  # the most that the ranks could do, and the source of this number
    step_seconds: float | None  # median
    sent_bytes: float
    communication_seconds: float
    hidden_fraction: float | None  # None without communication
    peak_memory: list[int]  # bytes, per rank
    prompt: str = ""  # of the sample
    sample: str = ""  # or why there is none

    def write(self, folder: Path) -> None:
        """Write report.json, and sample.txt."""
        text = f"Prompt:\n{self.prompt}\n\nThe model goes on:\n{self.sample}\n"
        text = text if self.prompt else f"{self.sample}\n" if self.sample else ""
        (folder / "sample.txt").write_text(text, encoding="utf-8")
        write_json(folder / "report.json", asdict(self))


class StepRecorder:
    """Records the timeline of the last `count` steps of `num_steps`, which stand for all.

    One recording goes over all of them, so a communication that one step launches and the next one
    waits for is whole. It counts for the step that launches it.
    """

    def __init__(self, model: nn.Module | None, num_steps: int, count: int) -> None:
        self.model, self.num_steps, self.count = model, num_steps, min(count, num_steps)
        self.done = 0
        self.recorded = Timeline()
        self.steps: list[tuple[float, float]] = []  # start and end of each recorded step
        self._recording = ExitStack()

    @property
    def is_on(self) -> bool:
        """True if the step that was done last was recorded."""
        return self.done > self.num_steps - self.count

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step, all of them."""
        self.done += 1
        if self.is_on and not self.steps:
            self.recorded = self._recording.enter_context(timeline.record(self.model))
        start = clock.now()
        yield
        if self.is_on:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # so that the kernels of a step run between its times
            self.steps.append((start, clock.now()))
        if self.done == self.num_steps:
            self.close()

    def close(self) -> None:
        """End the recording."""
        self._recording.close()

    def communication(self) -> tuple[float, float, float | None]:
        """Return (bytes sent, seconds, fraction of the seconds that is hidden) of all steps."""
        inside = (
            span
            for span in self.recorded
            if any(start <= span.start < end for start, end in self.steps)
        )
        rows = Timeline(inside).overlap()
        scale = self.num_steps / max(len(self.steps), 1)
        seconds = sum(row.total for row in rows)
        hidden = sum(row.hidden for row in rows) / seconds if seconds else None
        return scale * sum(row.num_bytes for row in rows), scale * seconds, hidden

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


def training_figures(lines: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the figures of a `Report` that follow from `lines`, the metrics of its steps."""
    if not lines:
        return dict.fromkeys(("first_loss", "last_loss", "tokens_per_second", "step_seconds"))
    timed = [line for line in lines if not line.get("recorded")] or lines  # a recorder takes time
    seconds = [line["seconds"] for line in timed]
    return {
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "tokens_per_second": sum(line["tokens"] for line in timed) / sum(seconds),
        "step_seconds": statistics.median(seconds),
    }


def peak_memory(device: torch.device) -> int:
    """Return the bytes at the highest point: allocated on a GPU, or resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kB
