"""The traces of `torch.profiler` (Kineto), of any number of ranks, read as one timeline.

`kineto` turns one trace into spans; `from_profiler` says how each event is read.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from minipar.observe.spans import Interval, Span, moved, read_json
from minipar.observe.timeline import Timeline
from minipar.text import printable
from minipar.tools import kineto
from minipar.tools.kernels import looks_like_communication


@dataclass
class _Trace:
    """One device of one file: its spans; its rank, as far as it is known, and its clock."""

    file: Path
    rank: int | None
    host: str
    base: int  # nanoseconds from which its times count
    spans: list[Span]
    steps: dict[str, Interval]  # as the profiler's annotations tell them


def from_profiler(paths: str | Path | Iterable[str | Path]) -> Timeline:
    """Read chrome traces of `torch.profiler` (Kineto), plain or gzipped, one file per rank.

    `paths`: files, or folders of them. The rank is what a file says (`distributedInfo`), else the
    number in its name, else its place. Each further device of a file is a rank of its own.

    Communication = what gloo timed; kernels that `kernels.KERNELS` names or the profiler calls a
    collective, in their args or by a `record_param_comms` around the launch; copies from GPU to
    GPU. Compute = every other kernel; other memcpys and memset are of kind copy. Without kernels,
    compute = outermost operators less blocking calls. `axis` is the description of the process
    group, ``meta["step"]`` the step that launched a call. Bytes are not read.

    Clocks: files of one host share one, which starts at 0 s with the first span there.

    The `notes` of the result say what was cut or guessed. Raises `ValueError` for a file that is
    not a trace, holds no work, or lacks the GPU of its job; for two of one rank, and for none.
    """
    notes: list[str] = []
    found = [_read(file, notes) for file in _trace_files(paths)]
    traces = [devices[0] for devices in found]
    notes += _number(traces)
    for further in (trace for devices in found for trace in devices[1:]):
        further.rank = 1 + max(trace.rank for trace in traces)
        notes.append(f"rank {further.rank} is a further device of {printable(further.file)}")
        traces.append(further)
    first, begins = min(trace.base for trace in traces), defaultdict(list)
    for trace in traces:
        for span in trace.spans:
            by = 1e-9 * (trace.base - first)  # of integers: floats lack the digits
            span.start, span.end, span.rank = span.start + by, span.end + by, trace.rank
            begins[trace.host].append(span.start)
    spans = [s for trace in traces for s in moved(trace.spans, -min(begins[trace.host]))]
    for host in begins:
        files = [trace.spans for trace in traces if trace.host == host]
        latest = max(min(span.start for span in own) for own in files)
        if latest > min(max(span.end for span in own) for own in files):
            notes.append(f"files of {host} share no moment: are they of one run?")
    if len(begins) > 1:
        notes.append(f"{len(begins)} hosts: the time of each counts from its first span")
    told = {(span.rank, span.meta["step"]) for span in spans if "step" in span.meta}
    if min(Counter(step for _, step in told).values(), default=len(traces)) < len(traces):
        notes.append("steps that not all ranks recorded are not compared")
    alike = sorted({s.name for s in spans if s.kind != "comm" and looks_like_communication(s.name)})
    if alike:
        what = "these names look like communication and were counted as computing"
        notes.append(f"{what}: {shorten(', '.join(name[:60] for name in alike), 300)}")
    steps = {}
    for trace in traces:
        by = 1e-9 * (trace.base - first) - min(begins[trace.host])
        steps[trace.rank] = {n: (start + by, end + by) for n, (start, end) in trace.steps.items()}
    return Timeline(spans, notes=notes, annotated=steps)


# ---------------------------------------------------------------------- files and ranks
def _trace_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        inside = [*path.glob("*.json"), *path.glob("*.json.gz")] if path.is_dir() else [path]
        files += sorted(inside)
    if not files:
        raise ValueError(f"no .json or .json.gz in {paths}; minipar overlap trace-rank0.json ...")
    return files


def _read(file: Path, notes: list[str]) -> list[_Trace]:
    """Return a trace for each device of the file."""
    document = read_json(file)
    try:
        devices, told, steps = kineto.read(document)
        rank = kineto.whole((document.get("distributedInfo") or {}).get("rank"), None)
    except (AttributeError, KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{file} is not what torch.profiler writes: {error!r:.150}") from None
    except ValueError as error:
        raise ValueError(f"{file} is a trace, but {error}") from None
    notes += [f"{printable(file)}: {note}" for note in told]
    if not any(devices):
        raise ValueError(f"{file} is a trace, but holds no operator and no kernel")
    base = kineto.whole(document.get("baseTimeNanoseconds"))
    host = printable(document.get("host_name", file))
    return [_Trace(file, rank, host, base, spans, steps) for spans in devices]


def _number(traces: Sequence[_Trace]) -> list[str]:
    """Number ranks by what every file has: distributedInfo, a name, the order; return a guess.

    Torch's own name, HOST_PID.TIME.pt.trace.json, has the process: two files of one are two cycles.
    """
    names = [trace.file.name for trace in traces]
    said = [trace.rank for trace in traces]
    found = [re.search(r"(?i:rank|worker)\D?(\d+)", name) for name in names]
    named = [match and int(match[1]) for match in found]
    processes = [re.sub(r"\.\d+(?=\.pt\.trace\.json)", "", str(trace.file)) for trace in traces]
    order = [[*dict.fromkeys(processes)].index(process) for process in processes]
    ranks = next(numbers for numbers in (said, named, order) if None not in numbers)
    for i, (trace, rank) in enumerate(zip(traces, ranks, strict=True)):
        trace.rank = rank
        if (first := ranks.index(rank)) != i:
            both = f"{traces[first].file} and {trace.file} are both of rank {rank}"
            raise ValueError(f"{both}; give one file per rank")
    is_guess = ranks is order and len(ranks) > 1
    return ["no file tells its rank: they are numbered in the order given"] if is_guess else []
