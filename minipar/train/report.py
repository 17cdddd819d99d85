"""What a run tells at its end, and what it notes down meanwhile to be able to."""

import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minipar.comm import timeline
from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.comm.timeline import Timeline


@dataclass
class Report:
    """What a run tells at its end; None where there is nothing to tell.

    Communication is that of the rank that reports, in the steps since the run was last resumed; it
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
    step_seconds: float | None  # median
    sent_bytes: float
    communication_seconds: float
    hidden_fraction: float | None  # None without communication
    peak_memory: list[int]  # bytes, per rank
    sample: str


class StepRecorder:
    """Records the timelines of a few of the steps from `first` to before `last`: of one at least.

    One step of every `every` is recorded, and the recorded ones stand for all.
    """

    def __init__(self, model: nn.Module, first: int, last: int, every: int) -> None:
        self.model, self.num_steps = model, last - first
        self.every = max(1, min(every, self.num_steps))
        self.recorded: list[Timeline] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the body, if it is the turn of step `number`."""
        if number % self.every != self.every // 2:
            yield
            return
        with timeline.record(self.model) as recorded:
            yield
        self.recorded.append(recorded)

    def communication(self) -> tuple[float, float, float | None]:
        """Return (bytes sent, seconds, fraction of the seconds that is hidden) of all steps."""
        rows = [row for step in self.recorded for row in step.overlap()]
        share = self.num_steps / max(len(self.recorded), 1)
        total = sum(row.total for row in rows)
        hidden = sum(row.hidden for row in rows) / total if total else None
        return sum(row.num_bytes for row in rows) * share, total * share, hidden

    def typical(self, mesh: Mesh) -> Timeline:
        """Return a step of median length, with the spans of all ranks; a collective."""
        if not self.recorded:
            return Timeline()
        durations = [step.duration for step in self.recorded]
        middle = durations.index(statistics.median_low(durations))
        # Ranks differ in what is typical, but must show the same step: rank 0 chooses.
        middle = all_gather_object(middle, mesh.world)[0]
        return self.recorded[middle].gather(mesh.world).shifted()


def training_figures(lines: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the figures of a `Report` that follow from `lines`, the metrics of its steps."""
    if not lines:
        return dict.fromkeys(("first_loss", "last_loss", "tokens_per_second", "step_seconds"))
    seconds = [line["seconds"] for line in lines]
    return {
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "tokens_per_second": sum(line["tokens"] for line in lines) / sum(seconds),
        "step_seconds": statistics.median(seconds),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point: allocated on a GPU, or resident of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kB
