"""Traces of many ranks: which files, read side by side, on one clock; and the steps in them.

`kineto` turns one trace into spans; `from_profiler` says what is read how.
"""

import glob
import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from minipar.observe.spans import Span, moved, read_json
from minipar.observe.timeline import Timeline
from minipar.text import printable
from minipar.tools.kernels import looks_like_communication
from minipar.tools.kineto import (
    HOST,
    about,
    base_time,
    seconds,
    spans_of,
    usable,
    whole,
)

Step = tuple[str, float, float]  # "ProfilerStep#7", and from when until when, in seconds
_Read = tuple[dict[str, Any], list[Span], list[Step], list[str]]


def from_profiler(
    paths: str | Path | Iterable[str | Path],
    label: str = "",
    progress: Callable[..., Iterable] | None = None,
) -> Timeline:
    """Read chrome traces of `torch.profiler` (Kineto), plain or gzipped, one file per rank.

    `paths` is a file, a folder, a glob such as "traces/rank*.json.gz", or several files. The
    rank is what a file says (`distributedInfo`), else the number in its name, else its place.

    With GPU kernels: communication = those that `kernels.KERNELS` names or the profiler calls a
    collective, in their args or by a `record_param_comms` around the launch, and copies from
    GPU to GPU; compute = every other kernel, its kind by where it was launched; other memcpys
    and memset are of kind copy. Without: communication =
    what gloo timed (else the `c10d` calls); compute = outermost operators less blocking calls.
    What is neither backward nor optimizer is called forward. `axis` is the description of the
    process group; `num_bytes` follows from the message size where the trace has it, else 0.

    Clocks: files of one host share one. Others are aligned at the ends of common collectives:
    the nth collective of a group ends on all of its ranks together (median over n).

    The result starts at 0 s; its `notes` count malformed events, which are skipped, say how far
    clocks were moved, and name kernels that only look like communication. `progress`, `tqdm`
    for one, is told of the files. Raises ValueError for a file that is no trace or holds
    no work, for two of one rank, and for none.
    """
    spans, notes, steps = read(paths, progress)
    found = Timeline(spans, label, notes)
    result, by = found.shifted(), found.start
    result.steps = {r: [(n, a - by, b - by) for n, a, b in steps[r]] for r in steps}
    return result


def read(
    paths: str | Path | Iterable[str | Path], progress: Callable[..., Iterable] | None = None
) -> tuple[list[Span], list[str], dict[int, list[Step]]]:
    """Return the spans of all ranks in these traces, on one clock; notes; and steps by rank.

    `progress` is `tqdm` or takes what it takes. Raises `ValueError` as `from_profiler`.
    """
    files = _trace_files(paths)
    each = progress(files) if progress else files
    documents, timelines, steps, noted = zip(*map(_read, each), strict=True)
    notes = list(chain.from_iterable(noted))
    bases = [base_time(document) for document in documents]
    starts = [1e-9 * (base - min(bases)) for base in bases]  # of integers: floats lack the digits
    ranks = _trace_ranks(files, documents)
    for rank, spans in zip(ranks, timelines, strict=True):
        for span in spans:
            span.rank = rank
    timelines = list(map(moved, timelines, starts))
    hosts = [printable(d.get("host_name", f)) for d, f in zip(documents, files, strict=True)]
    offsets = {}
    if len(set(hosts)) > 1 or len(set(bases)) > 1:
        offsets, within = _offsets(timelines)
        told = [f"rank {ranks[i]} ({hosts[i]}) {1e3 * by:+.3f} ms" for i, by in offsets.items()]
        some = ", ".join(told[1:9]) + (f" and {len(told) - 9} more" if len(told) > 9 else "")
        notes.append(
            f"clocks moved: {some}, so that common collectives end together; they do within "
            f"{1e3 * within:.3f} ms (median)"
            if some
            else "clocks of several hosts, and no common collective to align them by"
        )
    by_rank = {}
    for i, rank in enumerate(ranks):
        by = offsets.get(i, 0.0)
        timelines[i] = moved(timelines[i], by)
        by += starts[i]
        by_rank[rank] = [(name, start + by, end + by) for name, start, end in steps[i]]
    spans = list(chain.from_iterable(timelines))
    alike = {s.name for s in spans if s.kind != "comm" and looks_like_communication(s.name)}
    if alike:
        some = ", ".join(name[:60] for name in sorted(alike)[:5])
        more = f" and {len(alike) - 5} more" if len(alike) > 5 else ""
        notes.append(
            f"these names look like communication and were counted as computing: {some}{more}"
        )
    return spans, notes, by_rank


def _read(file: Path) -> _Read:
    document = read_json(file)
    events = document.pop("traceEvents")
    good, bad = usable(events)
    spans = spans_of(good, document)
    if not spans:
        said = f"; {bad} of its {len(events)} events are malformed" if bad else ""
        raise ValueError(f"{file} is a trace, but holds no operator and no kernel{said}")
    noted = f"{printable(file)}: skipped {bad} of {len(events)} events, which are malformed"
    return document, spans, _steps(good, spans), [noted] if bad else []


def _steps(events: list[dict[str, Any]], spans: list[Span]) -> list[Step]:
    """The ProfilerStep#N of the host; one that launched kernels lasts from the first of them on."""
    told = (e for e in events if e.get("cat") in HOST)  # the profiler repeats them for the GPU
    said = sorted({(*seconds(e), e["name"]) for e in told if e["name"].startswith("ProfilerStep")})
    begun = sorted((s.meta["launched"], s.start, s.end) for s in spans if "launched" in s.meta)
    marks, steps = [launched for launched, _, _ in begun], []
    for start, end, name in said:
        mine = begun[bisect_left(marks, start) : bisect_left(marks, end)]
        if mine or not begun:
            first = min((s for _, s, _ in mine), default=start)
            last = max((e for _, _, e in mine), default=end)
            steps.append((printable(name), first, last))
    # A step lasts until the next begins: what trails behind belongs to it.
    ends = [max(step[1], after[1]) for step, after in zip(steps, steps[1:], strict=False)]
    ends += [step[2] for step in steps[-1:]]
    return [(n, start, end) for (n, start, _), end in zip(steps, ends, strict=True) if start < end]


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


def _trace_ranks(files: list[Path], documents: list[dict[str, Any]]) -> list[int]:
    """Ranks by the first way that works for every file: distributedInfo, the name, the order."""
    said = [whole(about(document).get("rank"), -1) for document in documents]
    named = [
        re.search(r"(?:rank|worker)\D?(\d+)", file.name) or re.fullmatch(r"\D*(\d+)\D*", file.name)
        for file in files
    ]
    if -1 not in said:
        ranks = said
    elif None not in named:
        ranks = [int(match[1]) for match in named]
    else:
        ranks = list(range(len(files)))
    for i, rank in enumerate(ranks):
        if rank in ranks[:i]:
            first = files[ranks.index(rank)]
            raise ValueError(
                f"{first} and {files[i]} are both of rank {rank}; give one file per rank"
            )
    return ranks


def _offsets(timelines: list[list[Span]]) -> tuple[dict[int, float], float]:
    """Seconds by which to move each list of spans, so that common collectives end together.

    And by how much the ends still differ then, in the median. Without a common one: left out.
    """
    ends = [{key: span.end for key, span in matched(spans).items()} for spans in timelines]
    offsets, rest = {0: 0.0}, [0.0]
    waiting, found = set(range(1, len(timelines))), True
    while waiting and found:  # group by group, as far as groups connect
        found = False
        for i, j in ((i, j) for i in sorted(waiting) for j in offsets):
            shared = ends[i].keys() & ends[j].keys()
            if shared:
                gap = statistics.median(ends[j][key] - ends[i][key] for key in shared)
                rest += [abs(ends[j][key] - ends[i][key] - gap) for key in shared]
                offsets[i], found = offsets[j] + gap, True
                waiting.remove(i)
                break
    return offsets, statistics.median(rest)


def matched(spans: Iterable[Span]) -> dict[Any, Span]:
    """The collectives of one rank by group and number; a message between two ranks is none."""
    count: dict[Any, int] = defaultdict(int)
    found = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "comm" and span.name not in ("send", "recv", "exchange", "peer_copy"):
            group = (span.axis, span.meta.get("group"))
            count[group] += 1
            seq = span.meta.get("seq")
            found[group, count[group] if seq is None else seq] = span
    return found
