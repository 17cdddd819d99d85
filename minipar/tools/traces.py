"""The traces of `torch.profiler` (Kineto), of any number of ranks, read as one timeline.

`kineto` turns one trace into spans; `from_profiler` says how each event is read.
"""

import glob
import re
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from minipar.observe.spans import Span, moved, read_json
from minipar.observe.timeline import Timeline
from minipar.text import printable
from minipar.tools import kineto
from minipar.tools.kernels import looks_like_communication
from minipar.tools.kineto import HOST, Event, about, seconds, usable, whole

_MESSAGES = "send", "recv", "exchange", "peer_copy"
_ROOTED = "broadcast", "reduce", "gather", "scatter"  # which end earlier on some ranks

Step = tuple[str, float, float]  # "ProfilerStep#7", and from when until when, in seconds


@dataclass
class _Trace:
    """One device of one file: its spans, steps, and sentences on oddities."""

    file: Path
    document: Event
    spans: list[Span]
    steps: list[Step]
    notes: list[str] = field(default_factory=list)
    rank: int = -1

    @property
    def host(self) -> str:
        return printable(self.document.get("host_name", self.file))

    def move(self, by: float) -> None:
        """Move all spans and steps by so many seconds."""
        self.spans = moved(self.spans, by)
        self.steps = [(name, start + by, end + by) for name, start, end in self.steps]


def from_profiler(
    paths: str | Path | Iterable[str | Path],
    label: str = "",
    progress: Callable[..., Iterable] | None = None,
) -> Timeline:
    """Read chrome traces of `torch.profiler` (Kineto), plain or gzipped, one file per rank.

    `paths` is a file, a folder, a glob such as "traces/rank*.json.gz", or several files. The
    rank is what a file says (`distributedInfo`), else the number in its name, else its place. Each
    further device of a file is a rank of its own.

    With GPU kernels: communication = those that `kernels.KERNELS` names or the profiler calls a
    collective, in their args or by a `record_param_comms` around the launch, and copies from
    GPU to GPU; compute = every other kernel, its kind by where it was launched; other memcpys
    and memset are of kind copy. Without: communication = what gloo timed (else the `c10d` calls);
    compute = outermost operators less blocking calls. What is neither backward nor optimizer is
    called forward. `axis` is the description of the process group; `num_bytes` follows from the
    message size where the trace has it, else 0; ``meta["step"]`` is the step that launched a call.

    Clocks: files of one host share one. Others are aligned at the ends of common collectives:
    the nth all-reduce of a group ends on all of its ranks together (median over n).

    The result starts at 0 s; its `notes` say what was skipped, cut, moved or guessed. `progress`,
    `tqdm` for one, is told of the files. Raises `ValueError` for a file that is not a trace, holds
    no work, or lacks the GPU of its job; for two of one rank, and for none.
    """
    files = _trace_files(paths)
    found = [_read(file) for file in (progress(files) if progress else files)]
    ranks = _trace_ranks(files, [devices[0].document for devices in found])
    notes = [note for devices in found for note in devices[0].notes]
    others = [trace for devices in found for trace in devices[1:]]
    traces = [devices[0] for devices in found] + others
    more = range(max(ranks) + 1, max(ranks) + 1 + len(others))
    for trace, rank in zip(traces, [*ranks, *more], strict=True):
        trace.rank = rank
        for span in trace.spans:
            span.rank = rank
    notes += [f"rank {t.rank} is a further device of {printable(t.file)}" for t in others]
    bases = [whole(trace.document.get("baseTimeNanoseconds")) for trace in traces]
    for trace, base in zip(traces, bases, strict=True):
        trace.move(1e-9 * (base - min(bases)))  # of integers: floats lack the digits
    if len({trace.host for trace in traces}) > 1 or len(set(bases)) > 1:
        notes.append(_align(traces))
    spans = list(chain.from_iterable(trace.spans for trace in traces))
    alike = sorted({s.name for s in spans if s.kind != "comm" and looks_like_communication(s.name)})
    if alike:
        what = "these names look like communication and were counted as computing"
        notes.append(f"{what}: {_some([name[:60] for name in alike], 5)}")
    found = Timeline(spans, label, notes)
    result, by = found.shifted(), found.start
    result.steps = {t.rank: [(n, a - by, b - by) for n, a, b in t.steps] for t in traces}
    return result


# ---------------------------------------------------------------------- files and ranks
def _trace_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    where = paths
    if not isinstance(paths, str | Path):
        files = [Path(path) for path in paths]
    elif (path := Path(paths)).is_dir():
        files = [f for f in sorted(path.iterdir()) if f.name.endswith((".json", ".json.gz"))]
        where = f"no .json or .json.gz in the folder {path}"
    else:
        files = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(str(path)))]
    missing = [str(file) for file in files if not file.exists()]
    if missing or not files:
        raise ValueError(f"no such trace: {', '.join(missing) or where}")
    return files


def _trace_ranks(files: Sequence[Path], documents: Sequence[Event]) -> list[int]:
    """Return ranks by what works for every file: distributedInfo, the name, the order.

    Torch's own name, HOST_PID.TIME.pt.trace.json, tells a process: two of one are two cycles.
    """
    said = [whole(about(document).get("rank"), -1) for document in documents]
    named = [
        re.search(r"(?:rank|worker)\D?(\d+)", file.name) or re.fullmatch(r"\D*(\d+)\D*", file.name)
        for file in files
    ]
    processes = [re.sub(r"\.\d+(?=\.pt\.trace\.json)", "", file.name) for file in files]
    if -1 not in said:
        ranks = said
    elif None not in named:
        ranks = [int(match[1]) for match in named]
    else:
        ranks = [list(dict.fromkeys(processes)).index(process) for process in processes]
    for i, rank in enumerate(ranks):
        if rank in ranks[:i]:
            first = files[ranks.index(rank)]
            raise ValueError(
                f"{first} and {files[i]} are both of rank {rank}; give one file per rank"
            )
    return ranks


def _read(file: Path) -> list[_Trace]:
    """Return a trace for each device of the file, the busiest first."""
    document = read_json(file)
    notes: list[str] = []
    try:
        good = usable(document.pop("traceEvents"))
        if any(event["cat"] == "kernel" for event in good):
            devices = kineto.gpu_spans(good)
            for spans in devices.values():
                notes += [f"{printable(file)}: {note}" for note in kineto.cut_short(spans)]
        else:
            devices = {0: kineto.cpu_spans(good, document, file)}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what torch.profiler writes: {error!r:.150}") from None
    if not any(devices.values()):
        raise ValueError(f"{file} is a trace, but holds no operator and no kernel")

    def busy(spans: list[Span]) -> float:
        return sum(span.duration for span in spans if span.kind != "copy")

    ordered = sorted(filter(None, devices.values()), key=busy, reverse=True)
    working = [spans for spans in ordered if busy(spans)] or ordered[:1]
    working[0] += chain.from_iterable(spans for spans in ordered if not busy(spans))
    return [_Trace(file, document, spans, _steps(good, spans), notes) for spans in working]


# ---------------------------------------------------------------------- clocks and steps
def _align(traces: list[_Trace]) -> str:
    """Move the clocks of traces so that common collectives end together, and say by how much.

    Ranks whose clocks cannot be aligned keep theirs; nothing is told of who waits for them.
    """
    ends = [{key: span.end for key, span in matched(t.spans, _ROOTED).items()} for t in traces]
    offsets, rest = {0: 0.0}, [0.0]
    waiting, found = set(range(1, len(traces))), True
    while waiting and found:  # group by group, as far as groups connect
        found = False
        for i, j in ((i, j) for i in sorted(waiting) for j in offsets):
            if shared := ends[i].keys() & ends[j].keys():
                gap = statistics.median(ends[j][key] - ends[i][key] for key in shared)
                rest += [abs(ends[j][key] - ends[i][key] - gap) for key in shared]
                offsets[i], found = offsets[j] + gap, True
                waiting.remove(i)
                break
    told = []
    for i, by in offsets.items():
        traces[i].move(by)
        told.append(f"rank {traces[i].rank} ({traces[i].host}) {1e3 * by:+.3f} ms")
    for i in waiting:
        for span in traces[i].spans:
            span.meta["clock"] = traces[i].host
    if len(offsets) == 1:
        return "clocks of several hosts, and no common collective to align them by"
    left = f"; {len(waiting)} ranks share no collective with rank {traces[0].rank}" * bool(waiting)
    return (
        f"clocks moved: {_some(told[1:], 8)}, so that common collectives end together; they do "
        f"within {1e3 * statistics.median(rest):.3f} ms (median){left}"
    )


def _some(words: list[str], most: int) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def matched(spans: Iterable[Span], but: Sequence[str] = ()) -> dict[Any, Span]:
    """Return the collectives of one rank by group, verb and number; neither messages nor `but`."""
    count: dict[Any, int] = defaultdict(int)
    found = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "comm" and span.name not in (*_MESSAGES, *but):
            group = span.axis, span.meta.get("group"), span.meta.get("clock")
            count[group] += 1
            seq = span.meta.get("seq")
            found[group, span.name, count[group] if seq is None else seq] = span
    return found


def _steps(events: list[Event], spans: list[Span]) -> list[Step]:
    """Return the ProfilerStep#N of the host; one that launched kernels lasts from the first on.

    Each span is told the step that launched it; without a launch, the step in which it begins.
    """
    host = (e for e in events if e["cat"] in HOST)  # the profiler repeats them for the GPU
    said = sorted((*seconds(e), e["name"]) for e in host if e["name"].startswith("ProfilerStep"))
    begun = sorted((s.meta["launched"], s.start, s.end) for s in spans if "launched" in s.meta)
    marks, steps = [launched for launched, _, _ in begun], []
    for start, end, name in dict.fromkeys(said):
        mine = begun[bisect_left(marks, start) : bisect_left(marks, end)]
        if mine or not begun:
            first = min((s for _, s, _ in mine), default=start)
            last = max((e for _, _, e in mine), default=end)
            steps.append((printable(name), first, last, start, end))
    # A step lasts until the next begins: what trails behind belongs to it.
    ends = [max(step[2], after[1]) for step, after in zip(steps, steps[1:], strict=False)]
    ends += [step[2] for step in steps[-1:]]
    found = [(step[0], step[1], end) for step, end in zip(steps, ends, strict=True)]
    found = [step for step in found if step[1] < step[2]]
    launched = [(name, start, end) for name, _, _, start, end in steps]
    for span in spans:
        at = span.meta.get("launched")
        windows, at = (found, span.start) if at is None else (launched, at)
        i = bisect_right(windows, at, key=lambda window: window[1]) - 1
        if i >= 0 and at < windows[i][2]:
            span.meta["step"] = windows[i][0]
    return found
