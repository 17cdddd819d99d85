"""The traces that `torch.profiler` (Kineto) writes, read as spans; and the profiler, for GPUs.

`Timeline.from_profiler` says what is read how.
"""

import glob
import re
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from minipar.comm.kernels import looks_like_communication, verb_of
from minipar.comm.spans import (
    Interval,
    Span,
    is_number,
    moved,
    printable,
    read_json,
    subtract,
    union,
    wire_bytes,
)

_VERBS = {  # as Kineto, NCCL's kernels and gloo spell them, without punctuation -> as we do
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "exchange",
    "send": "send",
    "recv": "recv",
    "reduce": "reduce",
    "scatter": "scatter",
    "gather": "gather",
    "barrier": "barrier",
}
_ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "complexfloat", "uint64"), 8),
    **dict.fromkeys(("float", "int", "uint32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "bool"), 1),  # and all of float8
}
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step"
_WAITS = re.compile(r"c10d::|_c10d_functional|gloo:|record_param_comms|nccl:")


def read(paths: str | Path | Iterable[str | Path]) -> tuple[list[Span], list[str]]:
    """Return the spans of all ranks in these traces, on one clock, and what a reader has to know.

    Raises `ValueError` as `Timeline.from_profiler` says.
    """
    files = _trace_files(paths)
    documents, timelines, notes = [], [], []
    for file in files:
        document = read_json(file, keep=_thinned)
        events = document.pop("traceEvents")
        good, bad = _usable(events)
        if bad:
            notes.append(f"{file}: skipped {bad} of {len(events)} events, which are malformed")
        spans = _profiler_spans(good, document)
        if not spans:
            said = f"; {bad} of its {len(events)} events are malformed" if bad else ""
            raise ValueError(f"{file} is a trace, but holds no operator and no kernel{said}")
        documents.append(document)
        timelines.append(spans)
    base = min(map(_base_time, documents))  # an integer: floats lack the digits
    ranks = _trace_ranks(files, documents)
    for i, (rank, document) in enumerate(zip(ranks, documents, strict=True)):
        for span in timelines[i]:
            span.rank = rank
        timelines[i] = moved(timelines[i], 1e-9 * (_base_time(document) - base))
    hosts = {
        str(document.get("host_name", file))
        for file, document in zip(files, documents, strict=True)
    }
    if len(hosts) > 1 or len({_base_time(document) for document in documents}) > 1:
        timelines = _aligned(timelines)
    spans = [span for spans in timelines for span in spans]
    alike = {s.name for s in spans if s.kind != "comm" and looks_like_communication(s.name)}
    if alike:
        some = ", ".join(name[:60] for name in sorted(alike)[:5])
        more = f" and {len(alike) - 5} more" if len(alike) > 5 else ""
        notes.append(
            f"these names look like communication and were counted as computing: {some}{more}"
        )
    return spans, notes


_KEPT = frozenset(
    ("traceEvents", "distributedInfo", "rank", "pg_config", "pg_desc", "host_name")
    + ("baseTimeNanoseconds", "ph", "cat", "name", "tid", "ts", "dur", "args", "correlation")
    + ("Collective name", "Process Group Name", "Process Group Description", "Group size")
    + ("Process Group Ranks", "In msg nelems", "Out msg nelems", "dtype", "Seq")
)
_DULL = {"ph": "none"}  # one for all, so that what is thrown away takes no memory


def _thinned(object: dict[str, Any]) -> dict[str, Any]:
    """What of a JSON object is read: shapes, stacks and events that take no time are the bulk."""
    if object.get("ph", "X") != "X" and isinstance(object["ph"], str):
        return _DULL
    kept = {key: object[key] for key in object.keys() & _KEPT}
    for key in ("name", "cat"):  # a few names stand in a hundred thousand events
        if type(kept.get(key)) is str:
            kept[key] = sys.intern(kept[key])
    return kept


def _usable(events: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """The events that take time, and how many others are not what the format says."""
    good, bad = [], 0
    for event in events:
        if event is _DULL:
            continue
        if not (
            isinstance(event, dict)
            and event.get("ph") == "X"
            and isinstance(event.get("name"), str)
            and isinstance(event.get("cat", ""), str)
            and isinstance(event.get("args", {}), dict)
            and isinstance(event.get("tid"), str | int | None)
            and is_number(event.get("ts"))
            and is_number(event.get("dur", 0))
            and event.get("dur", 0) >= 0
        ):
            bad += 1
        elif event["ts"] + event.get("dur", 0) > event["ts"]:
            good.append(event)
    return good, bad


def _profiler_spans(events: list[dict[str, Any]], document: dict[str, Any]) -> list[Span]:
    """The spans of one trace, of rank 0, in seconds after the base time of the trace."""
    if any(event.get("cat") == "kernel" for event in events):
        return _gpu_spans(events)
    groups = _about(document).get("pg_config")
    only = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
    # gloo does not say which group: known only where there is but one
    axis = only.get("pg_desc", "") if isinstance(only, dict) else "gloo" if groups else ""
    return _cpu_spans(events, _axis_name(axis))


def _about(document: dict[str, Any]) -> dict[str, Any]:
    info = document.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _seconds(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return 1e-6 * start, 1e-6 * (start + float(event["dur"]))


def _gpu_spans(events: list[dict[str, Any]], rank: int = 0) -> list[Span]:
    context = _host_context(events)
    launches = {  # correlation id -> the runtime or driver call that launched the kernel
        _whole(e["args"].get("correlation")): e
        for e in events
        if e.get("cat", "").endswith(("_runtime", "_driver")) and "correlation" in e.get("args", {})
    }
    spans = []
    for event in events:
        cat, args, name = event.get("cat"), event.get("args", {}), printable(event["name"])
        verb = verb_of(name) if cat in ("kernel", "gpu_memcpy") else None
        if verb is not None or (cat == "kernel" and "Collective name" in args):
            spans.append(_collective(event, rank, verb))
        elif cat in ("gpu_memcpy", "gpu_memset"):
            spans.append(Span("copy", name, rank, *_seconds(event)))
        elif cat == "kernel":
            launch = launches.get(_whole(args.get("correlation"), -1))
            kind = context(launch.get("tid"), float(launch["ts"])) if launch else "compute"
            meta = {"launched": 1e-6 * float(launch["ts"])} if launch else {}
            spans.append(Span(kind, name, rank, *_seconds(event), meta=meta))
    return spans


def _host_context(events: list[dict[str, Any]]) -> Callable[[Any, float], str]:
    """(thread, microseconds) -> what the host was doing: optimizer, backward or forward."""
    ranges: dict[tuple[Any, str], list[Interval]] = defaultdict(list)
    for event in events:
        name = event["name"]
        kind = "optimizer" if name.startswith(_OPTIMIZER) else "backward"
        if kind == "optimizer" or name.startswith(_BACKWARD):
            start = float(event["ts"])
            ranges[event.get("tid"), kind].append((start, start + float(event["dur"])))
    merged = {key: union(intervals) for key, intervals in ranges.items()}

    def context(thread: Any, moment: float) -> str:
        for kind in ("optimizer", "backward"):
            intervals = merged.get((thread, kind), [])
            i = bisect_right(intervals, (moment, float("inf"))) - 1
            if i >= 0 and moment <= intervals[i][1]:
                return kind
        return "forward"

    return context


def _collective(event: dict[str, Any], rank: int, verb: str | None) -> Span:
    """A kernel that communicates; newer Kineto writes group and message size into NCCL's args."""
    args = event.get("args", {})
    name = verb or _verb(printable(args.get("Collective name") or event["name"]))
    axis = _axis_name(args.get("Process Group Description") or args.get("Process Group Name") or "")
    items = max(_whole(args.get("In msg nelems")), _whole(args.get("Out msg nelems")))
    whole = items * _ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 1)
    size = _whole(args.get("Group size"))
    known = size > 1 and name in _VERBS.values()
    num_bytes = whole if name == "exchange" else wire_bytes(name, whole, size) if known else 0
    seq = args.get("Seq")
    meta = {"group": str(args.get("Process Group Ranks", ""))}
    meta["seq"] = seq if isinstance(seq, int) else None
    return Span("comm", name, rank, *_seconds(event), axis, num_bytes, meta)


def _whole(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else otherwise


def _verb(name: str) -> str:
    """all_reduce for "allreduce", "gloo:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING"."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((verb for spelled, verb in _VERBS.items() if spelled in letters), name)


def _axis_name(group: Any) -> str:
    """torch calls the group of a mesh axis "mesh_tp", and the one of all ranks "default_pg"."""
    group = printable(group)
    return "world" if group in ("", "0", "default_pg") else group.removeprefix("mesh_")


def _cpu_spans(events: list[dict[str, Any]], axis: str, rank: int = 0) -> list[Span]:
    comm = [e for e in events if e["name"].startswith("gloo:")]
    comm = comm or [e for e in events if e["name"].startswith("c10d::")]
    spans = [Span("comm", _verb(printable(e["name"])), rank, *_seconds(e), axis) for e in comm]
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event.get("tid")].append(event)
    for ours in threads.values():
        ours.sort(key=lambda e: (e["ts"], -e["dur"]))
        # A call that blocks inside of an operator is no computing: it is cut out.
        waits = union(_seconds(e) for e in ours if _WAITS.match(e["name"]))
        done = float("-inf")
        for event in ours:
            start, end = _seconds(event)
            annotation = event["cat"] == "user_annotation"
            optimizer = event["name"].startswith(_OPTIMIZER)
            if start < done or _WAITS.match(event["name"]) or (annotation and not optimizer):
                continue
            done = end
            backward = event["name"].startswith(_BACKWARD)
            kind = "optimizer" if optimizer else "backward" if backward else "forward"
            name = printable(event["name"]).removeprefix(_BACKWARD + ": ")
            name = name.removeprefix(_OPTIMIZER + "#").removesuffix(".step")
            for piece in subtract([(start, end)], waits):
                spans.append(Span(kind, name, rank, *piece))
    return spans


def _trace_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    folder_given = isinstance(paths, str | Path) and Path(paths).is_dir()
    if isinstance(paths, str | Path):
        folder = Path(paths)
        if folder_given:
            files = [f for f in sorted(folder.iterdir()) if f.name.endswith((".json", ".json.gz"))]
        else:
            files = (
                [folder] if folder.exists() else [Path(p) for p in sorted(glob.glob(str(paths)))]
            )
    else:
        files = [Path(path) for path in paths]
    missing = [str(file) for file in files if not file.exists()]
    if missing or not files:
        where = f"no .json or .json.gz in the folder {paths}" if folder_given else paths
        raise ValueError(f"no such trace: {', '.join(missing) or where}")
    return files


def _trace_ranks(files: list[Path], documents: list[dict[str, Any]]) -> list[int]:
    """Ranks by the first way that works for every file: distributedInfo, the name, the order."""
    said = [_whole(_about(document).get("rank"), -1) for document in documents]
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


def _base_time(document: dict[str, Any]) -> int:
    return _whole(document.get("baseTimeNanoseconds"))


def _aligned(timelines: list[list[Span]]) -> list[list[Span]]:
    """Move each list of spans so that the collectives it shares with the others end together."""
    ends = [_collective_ends(spans) for spans in timelines]
    offsets = {0: 0.0}
    waiting, found = set(range(1, len(timelines))), True
    while waiting and found:  # group by group, as far as groups connect
        found = False
        for i, j in ((i, j) for i in sorted(waiting) for j in offsets):
            shared = ends[i].keys() & ends[j].keys()
            if shared:
                gap = statistics.median(ends[j][key] - ends[i][key] for key in shared)
                offsets[i], found = offsets[j] + gap, True
                waiting.remove(i)
                break
    return [moved(spans, offsets.get(i, 0.0)) for i, spans in enumerate(timelines)]


def _collective_ends(spans: list[Span]) -> dict[Any, float]:
    """When each collective ended, by group and number; messages end on their two ranks only."""
    count: dict[Any, int] = defaultdict(int)
    ends = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "comm" and span.name not in ("send", "recv", "exchange", "peer_copy"):
            group = (span.axis, span.meta.get("group"))
            count[group] += 1
            ends[group, span.meta.get("seq") or count[group]] = span.end
    return ends


def start_profiler() -> torch.profiler.profile | None:
    """A running profiler where work may go to a GPU, else None."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


def with_kernels(profiler: torch.profiler.profile, host: list[Span], rank: int) -> list[Span]:
    """The kernels that the profiler saw, named by the host's spans that launched them.

    Bytes and axes come from our own ledger where it has as many entries as there are NCCL kernels.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        document = read_json(f"{folder}/trace.json", keep=_thinned)
    # Kineto reads the wall clock, we the monotonic one: what parts them now parted them then.
    to_monotonic = 1e-9 * (_base_time(document) - time.time_ns() + time.monotonic_ns())
    spans = _gpu_spans(_usable(document["traceEvents"])[0], rank)
    if not any(span.kind != "copy" for span in spans):
        return host  # a model on the CPU of a machine with a GPU
    ours = sorted((s for s in host if s.kind != "comm"), key=lambda span: span.start)
    starts = [span.start for span in ours]
    ledger = sorted((s for s in host if s.kind == "comm"), key=lambda span: span.start)
    kernels = sorted((s for s in spans if s.kind == "comm"), key=lambda span: span.start)
    if len(ledger) == len(kernels):
        for kernel, entry in zip(kernels, ledger, strict=True):
            kernel.name, kernel.axis, kernel.num_bytes = entry.name, entry.axis, entry.num_bytes
    for span in spans:
        launched = span.meta.pop("launched", None)
        if launched is not None:
            i = bisect_right(starts, launched + to_monotonic) - 1
            if i >= 0 and launched + to_monotonic <= ours[i].end:
                span.meta["kernel"] = span.name
                span.kind, span.name = ours[i].kind, ours[i].name
        span.start, span.end = span.start + to_monotonic, span.end + to_monotonic
    # Where ranks share a GPU, gloo talks for them, and the host has seen it all.
    return spans if kernels else spans + ledger
