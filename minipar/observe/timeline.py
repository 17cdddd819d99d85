"""The timeline: when each rank computed, communicated or waited; how much communication was hidden.

Idea:   A training step is a set of spans (rank, kind, start, end). Communication that runs while
        the same rank computes is hidden and costs nothing; the rest is exposed and adds time.
Record: `with record(model) as timeline:` around any step. Hooks mark forward and backward of each
        block and every optimizer; each verb of `collectives.py` reports itself with its bytes.
        On a GPU `torch.profiler` times the kernels (`observe/gpu.py`).
Clock:  Seconds of `time.monotonic()`, one clock for all processes of a machine. `Timeline.gather`
        aligns the clocks of several machines at a barrier.
Files:  `save` and `load`. `tools.traces.from_profiler` reads the traces that `torch.profiler` wrote
        in any training.
"""

import json
import math
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from minipar.comm import calls, clock
from minipar.comm.collectives import all_gather_object
from minipar.observe import gpu
from minipar.observe.recorder import Recorder, hook_model, hook_optimizers
from minipar.observe.spans import NOT_COMPUTE, Interval, Span, covered, intersect, measure, moved
from minipar.text import aligned


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of one rank along one axis, in seconds: `total = hidden + exposed`."""

    rank: int
    axis: str
    total: float
    hidden: float
    exposed: float
    num_bytes: int
    count: int


@dataclass(eq=False, repr=False)
class Timeline:
    """Spans of any number of ranks, in order of their start. `label` says where they come from.

    For spans from files of other tools, `notes` say which facts are missing or guessed. `annotated`
    has the start and the end of steps by rank and name, as a profiler was told.
    """

    spans: Iterable[Span] = ()
    label: str = ""
    notes: Iterable[str] = ()
    annotated: Mapping[int, Mapping[str, Interval]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = sorted(self.spans, key=lambda span: (span.start, span.rank, span.end))
        self.notes = tuple(self.notes)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have spans, sorted."""
        return sorted({span.rank for span in self.spans})

    @property
    def start(self) -> float:
        """Return the start of the first span in seconds."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        """Return the end of the last span in seconds."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def duration(self) -> float:
        """Return the seconds from the first start to the last end, over all ranks."""
        return self.end - self.start

    @property
    def steps(self) -> dict[int, list[tuple[str, float, float]]]:
        """Return by rank the name, start and end of each step that a profiler was told of.

        A step ends when its last span ends, or when the next step begins, whichever is later. It
        begins with its first span, or as annotated: a rank may wait for data before this span. On a
        GPU that is behind its host, it begins when the step before has ended.
        """
        found: dict[int, dict[str, list[float]]] = defaultdict(dict)
        for span in self.spans:
            if name := span.meta.get("step"):
                times = found[span.rank].setdefault(name, [span.start, span.end])
                times[1] = max(times[1], span.end)
        for rank, steps in found.items():
            told, before = self.annotated.get(rank, {}), -math.inf
            for name, times in steps.items():
                begin, end = told.get(name, times)
                times[0], before = min(times[0], max(begin, before)), times[1]
            for times, after in pairwise([*steps.values(), [end]]):
                times[1] = max(times[1], after[0])
        return {r: [(name, *times) for name, times in found[r].items()] for r in sorted(found)}

    def shifted(self) -> "Timeline":
        """Return the same spans, moved so that the first one starts at 0 seconds."""
        by, told = -self.start, self.annotated.items()
        steps = {r: {n: (a + by, b + by) for n, (a, b) in own.items()} for r, own in told}
        return Timeline(moved(self.spans, by), self.label, self.notes, steps)

    def select(self, **wanted: Any) -> "Timeline":
        """Return the spans with these values of `kind`, `rank`, `axis` or `name`."""
        keep = (s for s in self.spans if all(getattr(s, k) == v for k, v in wanted.items()))
        return Timeline(keep, self.label)

    def overlap(self) -> list[Overlap]:
        """Return total, hidden and exposed communication per rank and axis.

        The total is the length of the *union* of the spans: if two collectives are in flight along
        one axis for 1 s, this second counts once. Hidden is the time in which the rank computes.
        """
        comm: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.kind == "comm":
                comm[span.rank, span.axis].append(span)
        busy, rows = self.busy(), []
        for (rank, axis), spans in sorted(comm.items()):
            talking = covered(spans)
            total, hidden = measure(talking), measure(intersect(talking, busy[rank]))
            num_bytes = sum(span.num_bytes for span in spans)
            rows.append(Overlap(rank, axis, total, hidden, total - hidden, num_bytes, len(spans)))
        return rows

    @property
    def hidden_fraction(self) -> float:
        """Return hidden / total communication, over all ranks and with axes united; nan if none."""
        united = (replace(s, axis="") if s.kind == "comm" else s for s in self.spans)
        rows = Timeline(united).overlap()
        total = sum(row.total for row in rows)
        return sum(row.hidden for row in rows) / total if total else float("nan")

    def bytes_by_axis(self) -> dict[str, int]:
        """Return the bytes sent along each axis, summed over the ranks."""
        result: dict[str, int] = defaultdict(int)
        for row in self.overlap():
            result[row.axis] += row.num_bytes
        return dict(sorted(result.items()))

    def busy(self) -> dict[int, list[Interval]]:
        """Return when each rank computes: disjoint intervals in order."""
        computing: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for span in self.spans:
            if span.kind not in NOT_COMPUTE:
                computing[span.rank].append(span)
        return {rank: covered(spans) for rank, spans in computing.items()}

    def table(self) -> str:
        """Return `overlap()` as a table in plain text, in milliseconds and megabytes."""
        head = "rank", "axis", "calls", "MB sent", "total ms", "hidden ms", "exposed ms", "hidden"
        rows = [head]
        for o in self.overlap():
            times = (f"{1e3 * t:.1f}" for t in (o.total, o.hidden, o.exposed))
            part = f"{o.hidden / o.total:.0%}" if o.total else "-"
            sent = f"{o.num_bytes / 1e6:.2f}" if o.num_bytes else "-"
            rows.append((str(o.rank), o.axis or "not recorded", str(o.count), sent, *times, part))
        return "\n".join(aligned(rows, left=0))

    def __str__(self) -> str:
        title = f"{1e3 * self.duration:.1f} ms, {len(self.ranks)} ranks, {len(self.spans)} spans"
        if self.label:
            title += f" ({self.label})"
        hidden = "no communication"
        if any(span.kind == "comm" for span in self.spans):
            hidden = f"{self.hidden_fraction:.0%} of communication hidden\n{self.table()}"
        return "\n".join([f"{title}, {hidden}", *(f"note: {note}" for note in self.notes)])

    def gather(self, axis: Any) -> "Timeline":
        """Return the spans of all ranks along `axis` (an `Axis`), on every rank. A collective.

        All ranks read their clocks right after a first gather. These times count as equal.
        """
        all_gather_object(None, axis)
        every = all_gather_object((platform.node(), time.monotonic(), self.spans), axis)
        clocks = {host: now for host, now, _ in reversed(every)}  # by host: its first rank's
        here = clocks[every[0][0]]
        shifted = (moved(spans, here - clocks[host]) for host, _, spans in every)
        return Timeline((span for spans in shifted for span in spans), self.label)

    def save(self, path: str | Path) -> Path:
        """Write a file for `load`, and for `minipar overlap`."""
        document = {"minipar": 2, "label": self.label, "spans": [asdict(s) for s in self.spans]}
        path = Path(path)
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> "Timeline":
        """Read a file of `save`, exactly. Raises ValueError for any other file."""
        try:
            document = json.loads(Path(path).read_bytes())
            return Timeline((Span(**span) for span in document["spans"]), document["label"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "for traces of torch.profiler use tools.traces.from_profiler"
            raise ValueError(f"{path} was not written by Timeline.save; {hint}") from error


# ---------------------------------------------------------------------- recording
def active() -> Recorder | None:
    """Return the recorder of this process, or None when nothing is recorded."""
    return next((tap for tap in calls.taps if isinstance(tap, Recorder)), None)


def span(kind: str, name: str) -> AbstractContextManager:
    """Record the body as compute: ``with span("compute", "loss"):``; without a recorder, nothing.

    `record(model)` already records the backward of the blocks. The backward of the loss is in no
    block: ``with span("backward", "backward"): loss.backward()`` records both.
    """
    recorder = active()
    return nullcontext() if recorder is None else recorder.span(kind, name)


@contextmanager
def record(model: nn.Module | None = None, label: str = "") -> Iterator[Timeline]:
    """Record this rank's work in the body; the yielded Timeline is filled when the body ends.

    Communication and optimizers are always recorded. With `model`, `record` also records forward
    and backward of the blocks (see `recorder.blocks`), and the work between blocks. A recomputed
    block counts as backward. The span of a collective in flight ends with the body. On a GPU,
    torch's profiler runs as well, and `record` waits for this collective.
    Raises RuntimeError when this process is recording already.
    """
    if active() is not None:
        raise RuntimeError("this process is recording already; end that `with record()` first")
    recorder, timeline = Recorder(), Timeline(label=label)
    profiler, device = gpu.start_profiler(), clock.device
    try:
        with clock.recording(), ExitStack() as stack:
            hook_optimizers(recorder, stack)
            if model is not None:
                hook_model(recorder, model, stack)
            calls.taps.append(recorder)
            stack.callback(calls.taps.remove, recorder)
            stack.callback(recorder.finish, profiler is not None)
            if device is not None:
                # An emulated clock moves only for compute and waits. All other compute is this.
                stack.enter_context(recorder.span("compute", "step"))
            yield timeline
    finally:
        slowdown, spans = getattr(device, "slowdown", 1.0), recorder.spans
        spans = [replace(s, start=s.start / slowdown, end=s.end / slowdown) for s in spans]
        if profiler is not None:
            spans = gpu.with_kernels(profiler, spans, recorder.rank)
        timeline.spans = Timeline(spans).spans
