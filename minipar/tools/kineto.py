"""One trace that `torch.profiler` (Kineto) wrote, read as spans of each device.

`tools.traces.from_profiler` says how each event is read.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from typing import Any

import torch

from minipar.comm.collectives import wire_bytes
from minipar.observe.spans import Interval, Span, subtract, union
from minipar.text import printable
from minipar.tools.kernels import verb_of

Event = dict[str, Any]

_LONG = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
_SHORT = "send", "recv", "reduce", "scatter", "gather", "barrier"  # which are in those, too
# As Kineto, NCCL's kernels and gloo spell them, without punctuation -> as we do.
_VERBS = {v.replace("_", ""): v for v in _LONG} | {"sendrecv": "exchange"} | {v: v for v in _SHORT}
HOST = "python_function", "cpu_op", "user_annotation"
"""Categories of the host's work; not of launches, which have no duration here."""
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step"
_WAITS = re.compile(r"c10d::|_c10d_functional|gloo:|record_param_comms|nccl:")
_ROUNDING = 20e-6
"""Seconds by which kernels of one stream overlap in good traces."""


def usable(events: list[Any]) -> list[Event]:
    """Return the events that take time, and the launches of kernels.

    Raises `ValueError` for the format of torch before 1.13, and for a file of several processes.
    """
    usual = {"args": {}, "dur": 0, "tid": None, "cat": ""}
    good = [usual | event for event in events if event.get("ph") == "X"]
    if any(event["cat"] in ("Kernel", "Operator") for event in good):
        raise ValueError("its categories are those of torch before 1.13, which are not read")
    # Apart, as CUDA may count processes of a container otherwise than the profiler.
    for is_of_one in (lambda event: event["cat"] == "cpu_op", _is_launch):
        if len(pids := {event.get("pid") for event in good if is_of_one(event)}) > 1:
            raise ValueError(f"{len(pids)} processes are in it; give one file per rank")
    return [event for event in good if _is_launch(event) or event["dur"] > 0]


def _is_launch(event: Event) -> bool:
    return event["cat"].endswith(("_runtime", "_driver")) and "correlation" in event["args"]


def whole(value: Any, otherwise: int | None = 0) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else otherwise


def about(document: Event) -> Event:
    return document.get("distributedInfo") or {}


def seconds(event: Event) -> Interval:
    start = float(event["ts"])
    return 1e-6 * start, 1e-6 * (start + float(event["dur"]))


# ---------------------------------------------------------------------- calls in calls
Threads = dict[Any, list[Event]]


def nested(events: list[Event]) -> Threads:
    """Return the host's calls by thread, in order; each is told of the call "around" it."""
    threads: Threads = defaultdict(list)
    work = [event for event in events if event["cat"] in HOST]
    for event in sorted(work, key=lambda event: (event["ts"], -event["dur"])):
        ours = threads[event["tid"]]
        outer = ours[-1] if ours else None
        while outer and outer["ts"] + outer["dur"] <= event["ts"]:
            outer = outer["around"]
        event["around"] = outer
        ours.append(event)
    return threads


def around(event: Event, threads: Threads) -> list[Event]:
    """Return the calls of its thread in the midst of which `event` begins, the outermost first."""
    ours, found = threads.get(event["tid"], []), []
    i = bisect_right(ours, event["ts"], key=lambda call: call["ts"])
    call = ours[i - 1] if i else None
    while call:
        if call["ts"] + call["dur"] >= event["ts"]:
            found.append(call)
        call = call["around"]
    return found[::-1]


# ---------------------------------------------------------------------- a GPU
def gpu_spans(events: list[Event]) -> dict[Any, list[Span]]:
    """Return the spans of each device."""
    threads = nested(events)
    launches = {event["args"]["correlation"]: event for event in events if _is_launch(event)}
    devices: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = event["args"]
            launch = launches.get(args.get("correlation"))
            span = _gpu_span(event, None if launch is None else around(launch, threads))
            span.meta |= {} if launch is None else {"launched": seconds(launch)[0]}
            span.meta["stream"] = args.get("stream", event["tid"])
            devices[args.get("device")].append(span)
    return devices


def _gpu_span(event: Event, asked: list[Event] | None) -> Span:
    """Return the span of a kernel or a copy; `asked`: the host's calls that launched it."""
    args, name, is_kernel = event["args"], printable(event["name"]), event["cat"] == "kernel"
    verb = verb_of(name) if event["cat"] != "gpu_memset" else None
    ends = {args.get("fromDevice"), args.get("toDevice")}
    if not is_kernel and None not in ends and len(ends) == 2:
        verb = "peer_copy"
    # Torch's launches for a collective are part of it, but for copies and its own kernels.
    said = [call["args"] for call in asked or () if call["name"] == "record_param_comms"]
    within = is_kernel and said and "at::native" not in name
    if verb is not None or "Collective name" in args or within:
        known = {**said[-1], **args} if said else args
        span = _collective(event | {"args": known}, verb)
        span.num_bytes = span.num_bytes or whole(args.get("bytes"))
        span.meta["site"] = _site(asked or [])
        return span
    kind = "copy" if not is_kernel else "compute" if asked is None else _phase(asked)
    return Span(kind, name, 0, *seconds(event))


def _phase(asked: list[Event]) -> str:
    names = [event["name"] for event in asked]
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


_NOT_MINE = re.compile(
    r"(torch|site-packages|dist-packages|threading|<frozen)\b.*\(\d+\)|<built-in|nn\.Module"
)


def _site(asked: list[Event]) -> str:
    """Return where a collective was called: the job's own line, else the operators around it."""
    lines = [e["name"] for e in asked if e["cat"] == "python_function"]
    own = [line for line in lines if not _NOT_MINE.search(line)]
    names = [e["name"].removeprefix(_BACKWARD + ": ") for e in asked]
    names = [name for name in names if not (name in lines or _WAITS.match(name))]
    names = [name for name in names if not name.startswith("ProfilerStep")]
    return printable(own[-1] if own else " > ".join(names[-2:]) or "not recorded")


def _collective(event: Event, verb: str | None) -> Span:
    """Return a kernel that communicates; NCCL's args have its group and the size of its message."""
    args = event["args"]
    name = verb or _verb(printable(args.get("Collective name") or event["name"]))
    group = args.get("Process Group Description")
    group = args.get("Process Group Name") if group in (None, "", "undefined") else group
    items = max(whole(args.get("In msg nelems")), whole(args.get("Out msg nelems")))
    dtype = getattr(torch, str(args.get("dtype", "")).lower(), None)
    num_bytes = items * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)  # byte, char
    size = whole(args.get("Group size"))
    if name != "exchange":
        known = size > 1 and name in _VERBS.values()
        num_bytes = wire_bytes(name, num_bytes, size) if known else 0
    seq = args.get("Seq")
    meta = {"group": str(args.get("Process Group Ranks", ""))}
    meta["seq"] = seq if isinstance(seq, int) else None
    return Span("comm", name, 0, *seconds(event), _axis_name(group or ""), num_bytes, meta)


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
    threads = nested(events)
    if len(calls) == len(comm):  # gloo works in threads of its own, in the order of the calls
        for span, call in zip(spans, calls, strict=True):
            span.meta["site"] = _site(around(call, threads))
    for ours in threads.values():
        spans += _computing(ours)
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
            spans += [Span(_phase([event]), name, 0, *piece) for piece in pieces]
    return spans
