"""The traces of `torch.profiler` (Kineto), of any number of ranks, read as one timeline.

`kineto` turns one trace into spans; `from_profiler` says how each event is read.
"""

import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    """One device of one file: its spans and steps."""

    file: Path
    document: Event
    spans: list[Span]
    steps: list[Step]
    rank: int = -1

    @property
    def host(self) -> str:
        return printable(self.document.get("host_name", self.file))

    def move(self, by: float) -> None:
        """Move all spans and steps by so many seconds."""
        self.spans = moved(self.spans, by)
        self.steps = [(name, start + by, end + by) for name, start, end in self.steps]


def from_profiler(paths: str | Path | Iterable[str | Path]) -> Timeline:
    """Read chrome traces of `torch.profiler` (Kineto), plain or gzipped, one file per rank.

    `paths` is a file, a folder, or several files. The rank is what a file says
    (`distributedInfo`), else the number in its name, else its place. Each further device of a file
    is a rank of its own.

    With GPU kernels: communication = those that `kernels.KERNELS` names or the profiler calls a
    collective, in their args or by a `record_param_comms` around the launch, and copies from
    GPU to GPU; compute = every other kernel; other memcpys and memset are of kind copy. Without:
    communication = what gloo timed (else the `c10d` calls); compute = outermost operators less
    blocking calls. `axis` is the description of the process group, `num_bytes` 0 where the trace
    does not tell, ``meta["step"]`` the step that launched a call.

    Clocks: files of one host share one. Others are aligned at the ends of common collectives:
    the nth all-reduce of a group ends on all of its ranks together (median over n).

    The result starts at 0 s; its `notes` say what was cut, moved or guessed. Raises `ValueError`
    for a file that is not a trace, holds no work, or lacks the GPU of its job; for two of one rank,
    and for none.
    """
    files = _trace_files(paths)
    notes: list[str] = []
    found = [_read(file, notes) for file in files]
    traces = [devices[0] for devices in found]
    ranks = _trace_ranks(traces)
    for trace in (trace for devices in found for trace in devices[1:]):
        ranks.append(1 + max(ranks))
        notes.append(f"rank {ranks[-1]} is a further device of {printable(trace.file)}")
        traces.append(trace)
    bases = [whole(trace.document.get("baseTimeNanoseconds")) for trace in traces]
    for trace, rank, base in zip(traces, ranks, bases, strict=True):
        trace.rank = rank
        for span in trace.spans:
            span.rank = rank
        trace.move(1e-9 * (base - min(bases)))  # of integers: floats lack the digits
    if len({trace.host for trace in traces}) > 1 or len(set(bases)) > 1:
        notes.append(_align(traces))
    spans = [span for trace in traces for span in trace.spans]
    alike = sorted({s.name for s in spans if s.kind != "comm" and looks_like_communication(s.name)})
    if alike:
        what = "these names look like communication and were counted as computing"
        notes.append(f"{what}: {_some([name[:60] for name in alike], 5)}")
    first = min(span.start for span in spans)
    for trace in traces:
        trace.move(-first)
    result = Timeline((span for trace in traces for span in trace.spans), notes=notes)
    result.steps = {trace.rank: trace.steps for trace in traces}
    return result


# ---------------------------------------------------------------------- files and ranks
def _trace_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if len(files) == 1 and (folder := files[0]).is_dir():
        files = [f for f in sorted(folder.iterdir()) if f.name.endswith((".json", ".json.gz"))]
        if not files:
            raise ValueError(f"no .json or .json.gz in the folder {folder}")
    if missing := [str(file) for file in files if not file.exists()]:
        raise ValueError(f"no such trace: {', '.join(missing)}")
    return files


def _trace_ranks(traces: Sequence[_Trace]) -> list[int]:
    """Return ranks by what works for every file: distributedInfo, the name, the order.

    Torch's own name, HOST_PID.TIME.pt.trace.json, tells a process: two of one are two cycles.
    """
    files = [trace.file for trace in traces]
    said = [whole(about(trace.document).get("rank"), None) for trace in traces]
    found = [re.search(r"(?:rank|worker)\D?(\d+)", file.name) for file in files]
    named = [match and int(match[1]) for match in found]
    processes = [re.sub(r"\.\d+(?=\.pt\.trace\.json)", "", file.name) for file in files]
    order = [[*dict.fromkeys(processes)].index(process) for process in processes]
    ranks = next(numbers for numbers in (said, named, order) if None not in numbers)
    for i, rank in enumerate(ranks):
        if (first := ranks.index(rank)) != i:
            both = f"{files[first]} and {files[i]} are both of rank {rank}"
            raise ValueError(f"{both}; give one file per rank")
    return ranks


def _read(file: Path, notes: list[str]) -> list[_Trace]:
    """Return a trace for each device of the file, the busiest first."""
    document = read_json(file)
    try:
        good = usable(document.pop("traceEvents"))
        if any(event["cat"] == "kernel" for event in good):
            devices = kineto.gpu_spans(good)
            for spans in devices.values():
                notes += [f"{printable(file)}: {note}" for note in kineto.cut_short(spans)]
        else:
            devices = {0: kineto.cpu_spans(good, document)}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what torch.profiler writes: {error!r:.150}") from None
    except ValueError as error:
        raise ValueError(f"{file} is a trace, but {error}") from None
    # A device that only copies has no rank of its own.
    working = [spans for spans in devices.values() if any(s.kind != "copy" for s in spans)]
    if not working:
        raise ValueError(f"{file} is a trace, but holds no operator and no kernel")
    working.sort(key=lambda spans: sum(span.duration for span in spans), reverse=True)
    return [_Trace(file, document, spans, _steps(good, spans)) for spans in working]


# ---------------------------------------------------------------------- clocks and steps
def _align(traces: list[_Trace]) -> str:
    """Move the clocks of traces so that common collectives end together, and say by how much.

    Ranks whose clocks cannot be aligned keep theirs; nothing is told of who waits for them.
    """
    shared = matched((span for trace in traces for span in trace.spans), _ROOTED)
    offsets, apart = {traces[0].rank: 0.0}, [0.0]
    placed = list(offsets)
    for known in placed:  # which grows: group by group, as far as groups connect
        gaps: dict[int, list[float]] = defaultdict(list)
        for spans in shared.values():
            for rank in spans.keys() - offsets.keys() if known in spans else ():
                gaps[rank].append(spans[known].end - spans[rank].end)
        for rank, those in sorted(gaps.items()):
            gap = statistics.median(those)
            offsets[rank] = offsets[known] + gap
            apart += [abs(other - gap) for other in those]
            placed.append(rank)
    told = []
    for trace in traces:
        if trace.rank in offsets:
            trace.move(offsets[trace.rank])
            told.append(f"rank {trace.rank} ({trace.host}) {1e3 * offsets[trace.rank]:+.3f} ms")
        else:
            for span in trace.spans:
                span.meta["clock"] = trace.host
    if len(told) == 1:
        return "clocks that may differ, and no common collective to align them by"
    left = len(traces) - len(told)
    said = f"clocks moved: {_some(told[1:], 8)}, so that common collectives end together; they do "
    said += f"within {1e3 * statistics.median(apart):.3f} ms (median)"
    return said + f"; {left} ranks share no collective with rank {traces[0].rank}" * bool(left)


def _some(words: list[str], most: int) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def matched(spans: Iterable[Span], but: Sequence[str] = ()) -> dict[Any, dict[int, Span]]:
    """Return collectives by group, verb and number: the span of each rank.

    Neither messages nor the verbs of `but` are collectives that begin or end together.
    """
    count: dict[Any, int] = defaultdict(int)
    found: dict[Any, dict[int, Span]] = defaultdict(dict)
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "comm" and span.name not in (*_MESSAGES, *but):
            group = span.axis, span.meta.get("group"), span.meta.get("clock")
            count[span.rank, group] += 1
            number = span.meta.get("seq")
            number = (count[span.rank, group],) if number is None else number
            found[group, span.name, number][span.rank] = span
    counts: dict[Any, set[int]] = defaultdict(set)
    for (_, group), calls in count.items():
        counts[group].add(calls)
    # Where one rank recorded more than another, the nth of both need not be the same call.
    return {key: s for key, s in found.items() if type(key[2]) is int or len(counts[key[0]]) == 1}


def _steps(events: list[Event], spans: list[Span]) -> list[Step]:
    """Return the ProfilerStep#N of the host, each from its first span on until the next one's.

    Each span is told the step that launched it; without a launch, the step in which it begins.
    """
    host = (e for e in events if e["cat"] in HOST)  # the profiler repeats them for the GPU
    marks = sorted({(*seconds(e), e["name"]) for e in host if e["name"].startswith("ProfilerStep")})
    inside: list[list[Span]] = [[] for _ in marks]
    for span in spans:
        at = span.meta.get("launched", span.start)
        i = bisect_right(marks, at, key=lambda mark: mark[0]) - 1
        if i >= 0 and at < marks[-1][1]:
            span.meta["step"] = printable(marks[i][2])
            inside[i].append(span)
    inside = [mine for mine in inside if mine]
    starts = [min(span.start for span in mine) for mine in inside]
    ends = [max(span.end for span in mine) for mine in inside]
    steps = zip(inside, starts, ends, starts[1:] + ends[-1:], strict=True)
    return [(mine[0].meta["step"], start, max(end, after)) for mine, start, end, after in steps]
