"""One trace that `torch.profiler` (Kineto) wrote, read as spans of each device.

`tools.traces.from_profiler` says how each event is read.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minipar.observe.spans import Interval, Span, subtract, union
from minipar.text import FOREIGN, printable
from minipar.tools.kernels import verb_of

_LONG = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
_SHORT = "send", "recv", "reduce", "scatter", "gather", "barrier"  # which are in those, too
# As Kineto, NCCL's kernels and gloo spell them, without punctuation -> as we do.
_VERBS = {v.replace("_", ""): v for v in _LONG} | {"sendrecv": "exchange"} | {v: v for v in _SHORT}
_HOST = "python_function", "cpu_op", "user_annotation"
_GPU = "kernel", "gpu_memcpy", "gpu_memset"
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step"
_WAITS = re.compile(r"c10d::|_c10d_functional|gloo:|record_param_comms|nccl:")
_ROUNDING = 20e-6
"""Seconds by which kernels of one stream overlap in good traces."""


@dataclass(slots=True)
class Event:
    """Work of the host or of a GPU, or the "launch" of a kernel; times in seconds."""

    cat: str
    name: str
    pid: Any
    tid: Any
    start: float
    end: float
    args: dict[str, Any]
    step: str = ""  # in which it begins, as "ProfilerStep#7"; a kernel: in which it was launched
    around: Sequence["Event"] = ()  # the calls of its thread that it is in, the outermost first

    def span(self, kind: str, name: str, axis: str = "") -> Span:
        meta = {"step": self.step} if self.step else {}
        meta |= {"site": _site(self.around)} if kind == "comm" else {}
        return Span(kind, name, 0, self.start, self.end, axis, meta=meta)


def read(document: dict[str, Any]) -> tuple[list[list[Span]], list[str], dict[str, Interval]]:
    """Return the spans of each device, the busiest first; notes; start and end of steps by name.

    A note says how many kernels were cut. Times are in seconds.

    Raises `ValueError` for a trace that lacks the GPU of its job, and as `_events` does.
    """
    events, info = _events(document["traceEvents"]), document.get("distributedInfo") or {}
    steps = {e.step: (e.start, e.end) for e in events if e.name == e.step != ""}
    if not any(event.cat == "kernel" for event in events):
        return [_talking(events, info, is_on_cpu=True) + _computing(events)], [], steps
    devices, notes = _gpu_spans(events)
    # A device that only copies has no rank of its own.
    devices = [spans for spans in devices if any(span.kind != "copy" for span in spans)]
    devices.sort(key=lambda spans: sum(span.duration for span in spans), reverse=True)
    devices[0] += _talking(events, info, is_on_cpu=False)
    return devices, notes, steps


def _events(listed: list[Any]) -> list[Event]:
    """Return the events that take time and the launches of kernels, in order of their start.

    Raises `ValueError` for a file of several processes, and for a time that is no number.
    """
    usual = {"args": {}, "dur": 0, "pid": None, "tid": None, "cat": ""}
    found = []
    for event in (usual | event for event in listed if event.get("ph") == "X"):
        cat, args = event["cat"], event["args"]
        if cat.endswith(("_runtime", "_driver")) and "correlation" in args:
            cat = "launch"
        if cat in ("launch", *_HOST, *_GPU):
            at, length = float(event["ts"]), float(event["dur"])
            if not math.isfinite(at + length):
                raise ValueError(f"an event of it begins at {at} us and takes {length} us")
            if length > 0 or cat == "launch":
                times = 1e-6 * at, 1e-6 * (at + length)
                found.append(Event(cat, event["name"], event["pid"], event["tid"], *times, args))
    # Checked one by one: in a container CUDA may number processes unlike the profiler.
    for cat in "cpu_op", "launch":
        if len(pids := {event.pid for event in found if event.cat == cat}) > 1:
            raise ValueError(f"{len(pids)} processes are in it; give one file per rank")
    found.sort(key=lambda event: (event.start, -event.end))
    step, running = "", defaultdict(list)
    for event in found:
        if event.cat not in _GPU:  # a stream may have the number of a thread
            event.around = [call for call in running[event.tid] if call.end > event.start]
        if event.cat in _HOST:
            running[event.tid] = [*event.around, event]
            step = printable(event.name) if event.name.startswith("ProfilerStep") else step
        event.step = step
    return found


# ---------------------------------------------------------------------- a GPU
def _gpu_spans(events: list[Event]) -> tuple[list[list[Span]], list[str]]:
    """Return the spans of each device, and how many were cut.

    A stream runs one kernel after the other: a kernel is cut where the next one begins.
    """
    launches = {event.args["correlation"]: event for event in events if event.cat == "launch"}
    devices, latest, over = defaultdict(list), {}, []
    for event in (event for event in events if event.cat in _GPU):
        launch = launches.get(event.args.get("correlation"), event)
        event.step, event.around = launch.step, launch.around
        span, device = _gpu_span(event), event.args.get("device")
        devices[device].append(span)
        stream = device, event.args.get("stream", event.tid)
        before, latest[stream] = latest.get(stream, span), span
        if before.start < span.start < before.end - _ROUNDING:
            over.append(before.end - span.start)
            before.end = span.start
    told = "kernels that run on past the start of the next of their stream are cut there"
    notes = [f"{told}: {len(over)}, by up to {1e6 * max(over):,.0f} us"] if over else []
    return list(devices.values()), notes


def _gpu_span(event: Event) -> Span:
    args, name, is_kernel = event.args, printable(event.name), event.cat == "kernel"
    verb, ends = verb_of(name), {args.get("fromDevice"), args.get("toDevice")}
    if not is_kernel and None not in ends and len(ends) == 2:
        verb = "peer_copy"
    # A collective has the kernels that its call launches directly, not the kernels of aten::copy_.
    said = [call.args for call in event.around if call.name == "record_param_comms"]
    caller = [call.name for call in event.around if call.cat == "cpu_op"][-1:]
    within = caller == ["record_param_comms"] and (is_kernel or "DtoD" in name)
    if verb is None and "Collective name" not in args and not within:
        return event.span(_phase(event.around) if is_kernel else "copy", name)
    known = {**said[-1], **args} if said else args
    verb = verb or _verb(known.get("Collective name") or name)
    axis = _axis(known.get("Process Group Description"), known.get("Process Group Name"))
    span = event.span("comm", verb, axis)
    span.meta["group"] = str(known.get("Process Group Ranks", ""))
    span.meta["seq"] = known["Seq"] if isinstance(known.get("Seq"), int) else None
    return span


def _phase(calls: Sequence[Event]) -> str:
    """Return the kind of computing that `calls` asked for; "compute" if they are not known."""
    if any(call.name.startswith(_OPTIMIZER) for call in calls):
        return "optimizer"
    is_backward = any(call.name.startswith(_BACKWARD) for call in calls)
    return "backward" if is_backward else "forward" if calls else "compute"


def _site(asked: Sequence[Event]) -> str:
    """Return the job's own line that called a collective, as a profiler with stacks records it."""
    lines = [call.name for call in asked if call.cat == "python_function"]
    own = [line for line in lines if not FOREIGN.search(line)]
    return printable(own[-1] if own else "not recorded")


def _verb(name: str) -> str:
    """Return all_reduce for "allreduce", "gloo:all_reduce", "ncclDevKernel_AllReduce_Sum_RING"."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((verb for spelled, verb in _VERBS.items() if spelled in letters), printable(name))


def _axis(*names: Any) -> str:
    """Return tp for "mesh_tp", as torch calls the group of an axis, and world for "default_pg".

    The first of `names` that says something counts. Return "" if none does: any group is possible.
    """
    group = next((printable(name) for name in names if name not in (None, "", "undefined")), "")
    return "world" if group in ("0", "default_pg") else group.removeprefix("mesh_")


def whole(value: Any, otherwise: int | None = 0) -> int | None:
    """Return `value` if it is a rank or a time in nanoseconds."""
    return value if type(value) is int and 0 <= value < 2**63 else otherwise


# ---------------------------------------------------------------------- a CPU
def _talking(events: list[Event], info: dict[str, Any], is_on_cpu: bool) -> list[Span]:
    """Return what the host itself sends; `info`: what the trace says of the job."""
    comm = [event for event in events if event.name.startswith("gloo:")]
    calls = [event for event in events if event.name.startswith("c10d::")]
    backend = str(info.get("backend", ""))
    is_elsewhere = "ccl" in backend and ("gloo" not in backend or len(calls) > len(comm))
    is_elsewhere = is_elsewhere or any(re.match(r"[a-z]+ccl:", event.name) for event in events)
    if is_elsewhere and is_on_cpu:
        why = f"it lacks the GPU of its job (backend {printable(backend) or 'nccl'})"
        raise ValueError(f"{why}: profile with ProfilerActivity.CUDA; other devices are not known")
    groups = info.get("pg_config") or [{}]
    # gloo does not name the group: it is known only where all groups have the same ranks
    is_one = len({str(group.get("ranks")) for group in groups}) == 1
    axis = _axis(groups[0].get("pg_desc")) if is_one else "gloo"
    comm = comm or calls * is_on_cpu
    if len(calls) == len(comm):  # gloo works in threads of its own, in the order of the calls
        for event, call in zip(comm, calls, strict=True):
            event.around, event.step = call.around, call.step
    return [event.span("comm", _verb(event.name), axis) for event in comm]


def _is_work(event: Event) -> bool:
    is_work = event.cat == "cpu_op" or event.name.startswith(_OPTIMIZER)
    return is_work and not _WAITS.match(event.name)


def _computing(events: list[Event]) -> list[Span]:
    """Return the outermost operators of each thread, and its optimizer's steps.

    A call that blocks inside of an operator is not computing: it is cut out.
    """
    waits, spans = defaultdict(list), []
    for event in events:
        if _WAITS.match(event.name):
            waits[event.tid].append((event.start, event.end))
    waits = {tid: union(times) for tid, times in waits.items()}
    for event in events:
        if _is_work(event) and not any(map(_is_work, event.around)):
            name = printable(event.name).removeprefix(_BACKWARD + ": ")
            name = name.removeprefix(_OPTIMIZER + "#").removesuffix(".step")
            span = event.span(_phase([event]), name)
            pieces = subtract([(event.start, event.end)], waits.get(event.tid, []))
            spans += [replace(span, start=start, end=end) for start, end in pieces]
    return spans
