"""What a run tells at its end, and what it notes down meanwhile to be able to."""

import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object, all_reduce
from minipar.comm.mesh import Mesh
from minipar.model.hf import write_json
from minipar.model.llama import LlamaConfig
from minipar.model.moe import mixtures
from minipar.observe import timeline
from minipar.observe.recorder import Recorder
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline

MOST_PICTURES = 32  # timelines of steps that are kept, of which one is shown at the end


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
    mfu: float | None  # model FLOPs utilisation: the share of the peak below
    peak: str  # what the ranks could do at most, and where that number is from
    save_seconds: float  # that training has waited for checkpoints
    step_seconds: float | None  # median
    sent_bytes: float
    communication_seconds: float
    hidden_fraction: float | None  # None without communication
    experts: dict[str, Any]  # of the last step: `expert_figures`, if there are experts
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
    """Records the timelines of some of the steps from `first` to before `last`: of one at least.

    One step of every `every` is recorded, and the recorded ones stand for all. Where only one step
    of `period` talks, whole periods are: one of every `every`.

    A communication belongs to the step in which it ends. Where it `crosses_steps`, the step before
    is recorded, too, and what it leaves in flight shows where it is hidden, or waited for.
    """

    def __init__(
        self,
        model: nn.Module | None,
        first: int,
        last: int,
        every: int,
        crosses_steps: bool = False,
        period: int = 1,
    ) -> None:
        self.model, self.num_steps = model, last - first
        # A GPU's kernels are seen only if they end while they are recorded: see `step`.
        self.looks_back = crosses_steps and not torch.cuda.is_initialized()
        self.crosses_steps = crosses_steps
        # The first step has none before it, whose communication would stand for that of others.
        is_typical = not crosses_steps or every == 1 or self.num_steps <= 1
        self.choice = range(first if is_typical else first + 1, last)
        self.period = period
        self.every = max(1, min(every, math.ceil(len(self.choice) / period)))
        self.recorded: dict[int, Timeline] = {}  # those worth a picture, by the number of the step
        self.latest: int | None = None  # the last step that a recorder has disturbed
        self.num_recorded = self.most_bytes = 0
        self.before: tuple[Recorder, int] | None = None  # of the last step, and its finished spans
        self.num_bytes = self.seconds = self.hidden_seconds = 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the body, if it is the turn of step `number`."""
        is_next = self.looks_back and self._is_chosen(number + 1)
        if not self._is_chosen(number) and not is_next:
            yield
            return
        self.latest, start = number, time.monotonic()
        with timeline.record(self.model) as recorded:
            recorder = timeline.active()
            yield
            if self.crosses_steps and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # so what would cross is exposed, in a recorded step
        late = self._late(start)
        self.before = (recorder, len(recorded.spans)) if self.looks_back else None
        if self._is_chosen(number):
            recorded.spans = Timeline([*late, *recorded.spans]).spans
            self._take(number, recorded)

    def _is_chosen(self, number: int) -> bool:
        turn = number // self.period % self.every
        return number in self.choice and turn == self.every // 2

    def _late(self, start: float) -> list[Span]:
        """What the last step left in flight and has arrived since: its part after `start`."""
        if self.before is None:
            return []
        recorder, num_finished = self.before
        return [
            replace(span, start=max(span.start, start), end=max(span.end, start))
            for span in recorder.spans[num_finished:]
        ]

    def _take(self, number: int, recorded: Timeline) -> None:
        rows = recorded.overlap()
        num_bytes = sum(row.num_bytes for row in rows)
        self.num_recorded += 1
        self.num_bytes += num_bytes
        self.seconds += sum(row.total for row in rows)
        self.hidden_seconds += sum(row.hidden for row in rows)
        self.most_bytes = max(self.most_bytes, num_bytes)
        if 2 * num_bytes >= self.most_bytes:  # where few steps talk, the others would only fill up
            self.recorded[number] = recorded
            if len(self.recorded) > MOST_PICTURES:
                del self.recorded[next(iter(self.recorded))]  # the oldest; the sums have it

    def figures(self, number: int) -> dict[str, float]:
        """Return what belongs into the metrics of step `number`, the last: nothing, unless a
        recorder ran; and how much was hidden, if its timeline is kept.
        """
        if number != self.latest:
            return {}
        rows = self.recorded[number].overlap() if number in self.recorded else []
        seconds = sum(row.total for row in rows)
        hidden = {"hidden_fraction": sum(row.hidden for row in rows) / seconds} if seconds else {}
        return {"recorded": True, **hidden}

    def communication(self) -> tuple[float, float, float | None]:
        """Return (bytes sent, seconds, fraction of the seconds that is hidden) of all steps."""
        share = self.num_steps / max(self.num_recorded, 1)
        hidden = self.hidden_seconds / self.seconds if self.seconds else None
        return self.num_bytes * share, self.seconds * share, hidden

    def typical(self, mesh: Mesh) -> Timeline:
        """Return a step of median length, with the spans of all ranks; a collective.

        Where some steps send far more than others, it is one of these.
        """
        # Ranks differ in what is typical, but must show the same step: rank 0 chooses.
        chosen = all_gather_object(self._median(), mesh.world)[0]
        if chosen is None:
            return Timeline()
        return self.recorded.get(chosen, Timeline()).gather(mesh.world).shifted()

    def _median(self) -> int | None:
        sent = {n: sum(span.num_bytes for span in step) for n, step in self.recorded.items()}
        talkative = [n for n in self.recorded if 2 * sent[n] >= self.most_bytes]
        if not talkative:
            return None
        middle = statistics.median_low(self.recorded[n].duration for n in talkative)
        return next(n for n in talkative if self.recorded[n].duration == middle)


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


def mixture_names(config: LlamaConfig) -> list[str]:
    """The names of the mixtures of a whole model, from the bottom up."""
    layers = range(config.num_layers if config.moe else 0)
    return [f"model.layers.{layer}.mlp" for layer in layers if config.moe.is_sparse(layer)]


def expert_slots(model: nn.Module, mesh: Mesh, device: torch.device) -> dict[str, Tensor]:
    """What `expert_figures` is made of: nothing where `model` has no experts. A collective.

    slots: [mixtures of the whole model, E + 1] int64 on `device`, how many slots of this step chose
    each expert, and last how many of these were dropped. Padding counts nowhere. No value is read.
    """
    if not (names := mixture_names(model.config)):
        return {}
    shape = len(names), model.config.moe.num_experts + 1
    slots = torch.zeros(shape, dtype=torch.int64, device=device)
    found = dict(mixtures(model))  # on a stage of a pipeline: its own
    for name, moe in found.items():
        slots[names.index(name), :-1] = moe.gate.counts
        slots[names.index(name), -1] = moe.num_dropped
    for moe in list(found.values())[:1]:
        slots = moe.gate.sum_counts(slots)
    return {"slots": all_reduce(slots, mesh.pp)}


def expert_figures(slots: list[list[int]], config: LlamaConfig) -> dict[str, Any]:
    """What metrics tell of experts, from the numbers of `expert_slots`.

    expert_load: slots that chose the busiest expert over the mean, in the layer where that is most;
    dropped_slots, over all layers; tokens_per_expert, by the names of mixtures.
    """
    kept = [row[:-1] for row in slots]
    return {
        "expert_load": max(max(row) * len(row) / max(sum(row), 1) for row in kept),
        "dropped_slots": sum(row[-1] for row in slots),
        "tokens_per_expert": dict(zip(mixture_names(config), kept, strict=True)),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point: allocated on a GPU, or resident of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kB
