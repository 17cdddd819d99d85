"""One trace that `torch.profiler` (Kineto) wrote, read as spans of each device.

`tools.traces.from_profiler` says how each event is read.
"""

import re
from collections import defaultdict
from functools import lru_cache
from typing import Any

from minipar.comm.collectives import wire_bytes
from minipar.observe.spans import Interval, Span, subtract, union
from minipar.text import printable
from minipar.tools.kernels import verb_of

Event = dict[str, Any]

_LONG = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
_SHORT = "send", "recv", "reduce", "scatter", "gather", "barrier"  # which are in those, too
# As Kineto, NCCL's kernels and gloo spell them, without punctuation -> as we do.
_VERBS = {v.replace("_", ""): v for v in _LONG} | {"sendrecv": "exchange"} | {v: v for v in _SHORT}
_ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "complexfloat", "uint64"), 8),
    **dict.fromkeys(("float", "int", "uint32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "uint16"), 2),
}  # 1 for all others: byte, char, bool, and all of float8
HOST = "python_function", "cpu_op", "user_annotation"
"""Categories of the host's work; not of launches, which have no duration here."""
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step"
_WAITS = re.compile(r"c10d::|_c10d_functional|gloo:|record_param_comms|nccl:")
_ROUNDING = 20e-6
"""Seconds by which kernels of one stream overlap in good traces."""


def usable(events: list[Any]) -> list[Event]:
    """Return the events that take time, and the launches of kernels.

    Raises `ValueError` for the format of torch before 1.13.
    """
    good = []
    for event in events:
        if event.get("ph") != "X":
            continue  # names, counters, arrows and marks
        event = {"args": {}, "dur": 0, "tid": None, "cat": ""} | event
        if event["cat"] in ("Kernel", "Operator"):
            raise ValueError("its categories are those of torch before 1.13, which are not read")
        if _is_launch(event) or event["dur"] > 0:
            good.append(event)
    return good


def _is_launch(event: Event) -> bool:
    return event["cat"].endswith(("_runtime", "_driver")) and "correlation" in event["args"]


def whole(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else otherwise


def about(document: Event) -> Event:
    return document.get("distributedInfo") or {}


def seconds(event: Event) -> Interval:
    start = float(event["ts"])
    return 1e-6 * start, 1e-6 * (start + float(event["dur"]))


# ---------------------------------------------------------------------- a GPU
def gpu_spans(events: list[Event]) -> dict[Any, list[Span]]:
    """Return the spans of each device."""
    launches = {  # correlation id -> thread and time of the call that launched the kernel
        event["args"]["correlation"]: (event["tid"], float(event["ts"]))
        for event in events
        if _is_launch(event)
    }
    gpu = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    begun = [launches.get(event["args"].get("correlation")) for event in gpu]
    inside = _enclosing(events, {*begun} - {None})
    devices: dict[Any, list[Span]] = defaultdict(list)
    for event, at in zip(gpu, begun, strict=True):
        args, name, around = event["args"], printable(event["name"]), inside.get(at, ())
        is_kernel = event["cat"] == "kernel"
        verb = verb_of(name) if event["cat"] != "gpu_memset" else None
        ends = {args.get("fromDevice"), args.get("toDevice")}
        if not is_kernel and None not in ends and len(ends) == 2:
            verb = "peer_copy"
        # Torch's launches for a collective are part of it, but for copies and its own kernels.
        said = next((e for e in reversed(around) if e["name"] == "record_param_comms"), None)
        within = is_kernel and said and "at::native" not in name
        if verb is not None or "Collective name" in args or within:
            known = {**(said["args"] if said else {}), **args}
            span = _collective(event | {"args": known}, verb)
            span.num_bytes = span.num_bytes or whole(args.get("bytes"))
            span.meta["site"] = _site(around)
        else:
            kind = "copy" if not is_kernel else _phase(around) if at else "compute"
            span = Span(kind, name, 0, *seconds(event))
        span.meta |= {"launched": 1e-6 * at[1]} if at else {}
        span.meta["stream"] = args.get("stream", event["tid"])
        devices[args.get("device")].append(span)
    return devices


def _phase(around: tuple[Event, ...]) -> str:
    names = [event["name"] for event in around]
    if any(name.startswith(_OPTIMIZER) for name in names):
        return "optimizer"
    return "backward" if any(name.startswith(_BACKWARD) for name in names) else "forward"


def cut_short(spans: list[Span]) -> list[str]:
    """End kernels where the next of their stream begins: a stream runs one after the other."""
    streams: dict[Any, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        streams[span.meta.pop("stream", "")].append(span)
    over = []
    for ours in streams.values():
        for span, after in zip(ours, ours[1:], strict=False):
            if span.start < after.start < span.end - _ROUNDING:
                over.append(span.end - after.start)
                span.end = after.start
    told = "kernels that run on past the start of the next of their stream are cut there"
    return [f"{told}: {len(over)}, by up to {1e6 * max(over):,.0f} us"] if over else []


def _enclosing(events: list[Event], at: set[tuple]) -> dict[tuple, tuple[Event, ...]]:
    """Return the host's calls in the midst of which each (thread, microseconds) was, in order."""
    moments, threads, result = defaultdict(list), defaultdict(list), {}
    for thread, moment in at:
        moments[thread].append(moment)
    for event in events:
        if event["cat"] in HOST and event["tid"] in moments:
            threads[event["tid"]].append(event)
    for thread, wanted in moments.items():
        ours = sorted(threads[thread], key=lambda event: (event["ts"], -event["dur"]))
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


_NOT_MINE = re.compile(
    r"(torch|site-packages|dist-packages|threading|<frozen)\b.*\(\d+\)|<built-in|nn\.Module"
)
_NO_PLACE = re.compile(r"ProfilerStep|c10d::|_c10d_functional|record_param_comms|nccl:|gloo:")


def _site(around: tuple[Event, ...]) -> str:
    """Return where a collective was called: the job's own line, else the operators around it."""
    lines = [e["name"] for e in around if e["cat"] == "python_function"]
    own = [line for line in lines if not _NOT_MINE.search(line)]
    names = [e["name"].removeprefix(_BACKWARD + ": ") for e in around]
    names = [name for name in names if not _NO_PLACE.match(name) and name not in lines]
    return printable(own[-1] if own else " > ".join(names[-2:]) or "not recorded")


def _collective(event: Event, verb: str | None) -> Span:
    """Return a kernel that communicates; NCCL's args have its group and the size of its message."""
    args = event["args"]
    name = verb or _verb(printable(args.get("Collective name") or event["name"]))
    group = args.get("Process Group Description")
    group = args.get("Process Group Name") if group in (None, "", "undefined") else group
    items = max(whole(args.get("In msg nelems")), whole(args.get("Out msg nelems")))
    num_bytes = items * _ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 1)
    size = whole(args.get("Group size"))
    if name != "exchange":
        known = size > 1 and name in _VERBS.values()
        num_bytes = wire_bytes(name, num_bytes, size) if known else 0
    seq = args.get("Seq")
    meta = {"group": str(args.get("Process Group Ranks", ""))}
    meta["seq"] = seq if isinstance(seq, int) else None
    return Span("comm", name, 0, *seconds(event), _axis_name(group or ""), num_bytes, meta)


@lru_cache(10_000)
def _verb(name: str) -> str:
    """Return all_reduce for "allreduce", "gloo:all_reduce", "ncclDevKernel_AllReduce_Sum_RING"."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((verb for spelled, verb in _VERBS.items() if spelled in letters), name)


def _axis_name(group: Any) -> str:
    """Return tp for "mesh_tp", as torch calls the group of an axis, and world for "default_pg".

    Empty where the trace does not say which group it is: that may be any.
    """
    group = printable(group)
    return "world" if group in ("0", "default_pg") else group.removeprefix("mesh_")


# ---------------------------------------------------------------------- a CPU
def cpu_spans(events: list[Event], document: Event) -> list[Span]:
    """Return the spans of a job on CPUs. Raises `ValueError` where its GPU is not in the trace."""
    comm = sorted((e for e in events if e["name"].startswith("gloo:")), key=lambda e: e["ts"])
    calls = sorted((e for e in events if e["name"].startswith("c10d::")), key=lambda e: e["ts"])
    backend = str(about(document).get("backend", ""))
    is_elsewhere = "ccl" in backend and ("gloo" not in backend or len(calls) > len(comm))
    if is_elsewhere or any(re.match(r"[a-z]+ccl:", event["name"]) for event in events):
        raise ValueError(
            f"it lacks the GPU of its job (backend {printable(backend) or 'nccl'}): it has no "
            f"kernel, and the host's times are not the times of its collectives; profile with "
            f"ProfilerActivity.CUDA (other devices are not known here)"
        )
    groups = about(document).get("pg_config") or [{}]
    # gloo does not say which group: known only where there is but one
    axis = _axis_name(groups[0].get("pg_desc", "")) if len(groups) == 1 else "gloo"
    comm = comm or calls
    spans = [Span("comm", _verb(printable(e["name"])), 0, *seconds(e), axis) for e in comm]
    if len(calls) == len(comm):  # gloo works in threads of its own, in the order of the calls
        places = [(e["tid"], float(e["ts"])) for e in calls]
        inside = _enclosing(events, set(places))
        for span, place in zip(spans, places, strict=True):
            span.meta["site"] = _site(inside[place])
    threads = defaultdict(list)
    for event in events:
        if event["cat"] in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    for ours in threads.values():
        spans += _computing(sorted(ours, key=lambda e: (e["ts"], -e["dur"])))
    return spans


def _computing(ours: list[Event]) -> list[Span]:
    """Return the outermost operators of a thread, and its optimizer's steps.

    A call that blocks inside of an operator is not computing: it is cut out.
    """
    spans, done = [], float("-inf")
    waits = union(seconds(event) for event in ours if _WAITS.match(event["name"]))
    for event in ours:
        start, end = seconds(event)
        is_work = event["cat"] == "cpu_op" or event["name"].startswith(_OPTIMIZER)
        if start >= done and is_work and not _WAITS.match(event["name"]):
            done = end
            name = printable(event["name"]).removeprefix(_BACKWARD + ": ")
            name = name.removeprefix(_OPTIMIZER + "#").removesuffix(".step")
            pieces = subtract([(start, end)], waits)
            spans += [Span(_phase((event,)), name, 0, *piece) for piece in pieces]
    return spans
