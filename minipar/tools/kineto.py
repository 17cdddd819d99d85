"""The traces that `torch.profiler` (Kineto) writes, read as spans.

`tools.traces.from_profiler` says what is read how.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from minipar.comm.collectives import wire_bytes
from minipar.observe.spans import Interval, Span, subtract, union
from minipar.text import printable
from minipar.tools.kernels import verb_of

_LONG = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
_SHORT = "send", "recv", "reduce", "scatter", "gather", "barrier"  # which are in those, too
# As Kineto, NCCL's kernels and gloo spell them, without punctuation -> as we do.
_VERBS = {v.replace("_", ""): v for v in _LONG} | {"sendrecv": "exchange"} | {v: v for v in _SHORT}
_ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "complexfloat", "uint64"), 8),
    **dict.fromkeys(("float", "int", "uint32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "bool"), 1),  # and all of float8
}
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step"
_WAITS = re.compile(r"c10d::|_c10d_functional|gloo:|record_param_comms|nccl:")


def _is_launch(event: dict[str, Any]) -> bool:
    cat, args = event.get("cat", ""), event.get("args", {})
    return cat.endswith(("_runtime", "_driver")) and "correlation" in args


def _number(event: dict[str, Any]) -> int:
    """Return the number that a kernel shares with its launch; -1 if it has none."""
    return whole(event.get("args", {}).get("correlation"), -1)


def usable(events: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the events that take time, and how many others are malformed."""
    good, bad = [], 0
    for event in events:
        if isinstance(event, dict) and event.get("ph") != "X" and isinstance(event.get("ph"), str):
            continue  # names, counters, arrows and marks
        if not (
            isinstance(event, dict)
            and event.get("ph") == "X"
            and isinstance(event.get("name"), str)
            and isinstance(event.get("cat", ""), str)
            and isinstance(event.get("args", {}), dict)
            and isinstance(event.get("tid"), str | int | None)
            and _is_number(event.get("ts"))
            and _is_number(event.get("dur", 0))
            and event.get("dur", 0) >= 0
        ):
            bad += 1
        elif _is_launch(event) or event["ts"] + event.get("dur", 0) > event["ts"]:
            good.append(event)
    return good, bad


def _is_number(value: Any) -> bool:
    """True if `value` is a time: a finite number. Microseconds since 1970 are 2e15."""
    return type(value) in (int, float) and -1e17 < value < 1e17


def spans_of(events: list[dict[str, Any]], document: dict[str, Any]) -> list[Span]:
    """The spans of one trace, of rank 0, in seconds after the base time of the trace."""
    if any(event.get("cat") == "kernel" for event in events):
        return _gpu_spans(events)
    groups = about(document).get("pg_config")
    only = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
    # gloo does not say which group: known only where there is but one
    axis = only.get("pg_desc", "") if isinstance(only, dict) else "gloo" if groups else ""
    return _cpu_spans(events, _axis_name(axis))


def about(document: dict[str, Any]) -> dict[str, Any]:
    info = document.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def seconds(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return 1e-6 * start, 1e-6 * (start + float(event["dur"]))


def _gpu_spans(events: list[dict[str, Any]]) -> list[Span]:
    context = _host_context(events)
    launches = {  # correlation id -> the runtime or driver call that launched the kernel
        _number(e): e for e in events if _is_launch(e)
    }
    gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    began = {}
    for event in gpu:
        if launch := launches.get(_number(event)):
            began[id(event)] = launch.get("tid"), float(launch["ts"])
    inside, spans = _enclosing(events, set(began.values())), []
    for event in gpu:
        cat, args, name = event.get("cat"), event.get("args", {}), printable(event["name"])
        verb = verb_of(name) if cat != "gpu_memset" else None
        start, end = seconds(event)
        at = began.get(id(event))
        meta = {"launched": 1e-6 * at[1]} if at else {}
        around = inside.get(at, ())
        # What torch launches for a collective is part of it, but for copies and its own kernels.
        said = next((e for e in reversed(around) if e["name"] == "record_param_comms"), None)
        within = said if cat == "kernel" and "at::native" not in name else None
        devices = args.get("fromDevice"), args.get("toDevice")
        if cat == "gpu_memcpy" and None not in devices and devices[0] != devices[1]:
            verb = "peer_copy"
        if verb is not None or (cat == "kernel" and "Collective name" in args) or within:
            known = {**(said or {}).get("args", {}), **args}
            span = _collective(event | {"args": known}, verb)
            span.num_bytes = span.num_bytes or whole(args.get("bytes"))
            span.meta |= meta | {"site": _site(around)}
            spans.append(span)
        elif cat != "kernel":
            spans.append(Span("copy", name, 0, start, end, meta=meta))
        else:
            kind = context(*at) if at else "compute"
            spans.append(Span(kind, name, 0, start, end, meta=meta))
    return spans


HOST = "python_function", "cpu_op", "user_annotation"
"""What the host was doing; not a launch, which has no duration here."""
_NOT_MINE = re.compile(
    r"(torch|site-packages|dist-packages|threading|<frozen)\b.*\(\d+\)|<built-in|nn\.Module"
)
_NO_PLACE = re.compile(r"ProfilerStep|c10d::|_c10d_functional|record_param_comms|nccl:|gloo:")


def _enclosing(events: list[dict[str, Any]], at: set[tuple]) -> dict[tuple, tuple[dict, ...]]:
    """(thread, microseconds) -> what the host was in the midst of there, the outermost first."""
    moments, threads, result = defaultdict(list), defaultdict(list), {}
    for thread, moment in at:
        moments[thread].append(moment)
    for event in events:
        if event.get("cat") in HOST and event.get("tid") in moments:
            threads[event.get("tid")].append(event)
    for thread, wanted in moments.items():
        ours = threads[thread]
        ours.sort(key=lambda e: e["dur"], reverse=True)  # twice, for tuples would take memory
        ours.sort(key=lambda e: e["ts"])
        stack, i = [], 0
        for moment in sorted(wanted):
            while i < len(ours) and ours[i]["ts"] <= moment:
                while stack and stack[-1]["ts"] + stack[-1]["dur"] <= ours[i]["ts"]:
                    stack.pop()
                stack.append(ours[i])
                i += 1
            while stack and stack[-1]["ts"] + stack[-1]["dur"] < moment:
                stack.pop()
            result[thread, moment] = tuple(stack[-40:])
    return result


def _site(around: tuple[dict[str, Any], ...]) -> str:
    """Where a collective was called: the job's own line, else the operators around it."""
    lines = [e["name"] for e in around if e.get("cat") == "python_function"]
    own = [line for line in lines if not _NOT_MINE.search(line)]
    names = [e["name"].removeprefix(_BACKWARD + ": ") for e in around]
    names = [name for name in names if not _NO_PLACE.match(name) and name not in lines]
    return printable(own[-1] if own else " > ".join(names[-2:]) or "not recorded")


def _host_context(events: list[dict[str, Any]]) -> Callable[[Any, float], str]:
    """(thread, microseconds) -> what the host was doing: optimizer, backward or forward."""
    ranges: dict[tuple[Any, str], list[Interval]] = defaultdict(list)
    for event in events:
        name = event["name"]
        kind = "optimizer" if name.startswith(_OPTIMIZER) else "backward"
        if name.startswith((_OPTIMIZER, _BACKWARD)) and event.get("cat") in HOST:
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


def _collective(event: dict[str, Any], verb: str | None) -> Span:
    """A kernel that communicates; newer Kineto writes group and message size into NCCL's args."""
    args = event.get("args", {})
    name = verb or _verb(printable(args.get("Collective name") or event["name"]))
    axis = _axis_name(args.get("Process Group Description") or args.get("Process Group Name") or "")
    items = max(whole(args.get("In msg nelems")), whole(args.get("Out msg nelems")))
    tensor = items * _ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 1)
    size = whole(args.get("Group size"))
    known = size > 1 and name in _VERBS.values()
    num_bytes = tensor if name == "exchange" else wire_bytes(name, tensor, size) if known else 0
    seq = args.get("Seq")
    meta = {"group": str(args.get("Process Group Ranks", ""))}
    meta["seq"] = seq if isinstance(seq, int) else None
    return Span("comm", name, 0, *seconds(event), axis, num_bytes, meta)


def whole(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else otherwise


def _verb(name: str) -> str:
    """all_reduce for "allreduce", "gloo:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING"."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((verb for spelled, verb in _VERBS.items() if spelled in letters), name)


def _axis_name(group: Any) -> str:
    """torch calls the group of a mesh axis "mesh_tp", and the one of all ranks "default_pg".

    Empty where the trace does not say which group it is: that may be any.
    """
    group = printable(group)
    return "world" if group in ("0", "default_pg") else group.removeprefix("mesh_")


def _cpu_spans(events: list[dict[str, Any]], axis: str) -> list[Span]:
    comm = [e for e in events if e["name"].startswith("gloo:")]
    calls = sorted((e for e in events if e["name"].startswith("c10d::")), key=lambda e: e["ts"])
    comm = sorted(comm or calls, key=lambda e: e["ts"])
    spans = [Span("comm", _verb(printable(e["name"])), 0, *seconds(e), axis) for e in comm]
    if len(calls) == len(comm):  # gloo works in threads of its own, in the order of the calls
        places = [(e.get("tid"), float(e["ts"])) for e in calls]
        inside = _enclosing(events, set(places))
        for span, place in zip(spans, places, strict=True):
            span.meta["site"] = _site(inside[place])
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event.get("tid")].append(event)
    for ours in threads.values():
        ours.sort(key=lambda e: (e["ts"], -e["dur"]))
        # A call that blocks inside of an operator is no computing: it is cut out.
        waits = union(seconds(e) for e in ours if _WAITS.match(e["name"]))
        done = float("-inf")
        for event in ours:
            start, end = seconds(event)
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
                spans.append(Span(kind, name, 0, *piece))
    return spans


def base_time(document: dict[str, Any]) -> int:
    return whole(document.get("baseTimeNanoseconds"))
