"""The kernels of this rank's GPU: torch.profiler times them, the recorder's spans name them.

A GPU runs a kernel later than Python launches it. So `timeline.record` runs torch.profiler beside
the recorder. A kernel gets the name of the recorder's span in which the host launched it. NCCL's
kernels get the names, axes and bytes of the recorder's comm spans, in the order of launches.
"""

import tempfile
import time
from bisect import bisect_right
from typing import Any

import torch

from minipar.observe.spans import Span, read_json


def start_profiler() -> torch.profiler.profile | None:
    """Start and return a profiler if this process uses CUDA; else return None."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    torch.cuda.synchronize()
    # Without acc_events, torch warns of lost events, although there is one cycle only.
    profiler = torch.profiler.profile(acc_events=True)
    profiler.start()
    return profiler


def with_kernels(profiler: torch.profiler.profile, host: list[Span], rank: int) -> list[Span]:
    """Return the kernels that the profiler saw, with the names of the `host` spans around them.

    Axes and bytes come from the ledger (the comm spans of `host`) if it has as many entries as NCCL
    has kernels. With copies alone the model was on the CPU: return `host`.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        document = read_json(f"{folder}/trace.json")
    # Kineto reads the wall clock, the recorder the monotonic one. Their difference is constant.
    base = document.get("baseTimeNanoseconds", 0)
    to_monotonic = 1e-9 * (base - time.time_ns() + time.monotonic_ns())
    launched = _kernels(document["traceEvents"], rank, to_monotonic)
    kernels = [kernel for _, kernel in launched]
    if all(kernel.kind == "copy" for kernel in kernels):
        return host
    work = [span for span in host if span.kind != "comm"]
    starts = [span.start for span in work]
    for at, kernel in launched:
        i = bisect_right(starts, at) - 1
        if kernel.kind == "compute" and i >= 0 and at <= work[i].end:
            kernel.kind, kernel.name = work[i].kind, work[i].name
    comm = [kernel for kernel in kernels if kernel.kind == "comm"]
    ledger = [span for span in host if span.kind == "comm"]
    if len(comm) == len(ledger):
        for kernel, entry in zip(comm, ledger, strict=True):
            kernel.name, kernel.axis, kernel.num_bytes = entry.name, entry.axis, entry.num_bytes
    # Ranks that share a GPU communicate over gloo: the host's ledger has the times.
    return kernels if comm else kernels + ledger


def _kernels(
    events: list[dict[str, Any]], rank: int, to_monotonic: float
) -> list[tuple[float, Span]]:
    """Return (launch time, kernel), in the order in which the host launched the kernels.

    The GPU may run the kernels of two communicators in another order.
    """
    launches = {
        event.get("args", {}).get("correlation"): 1e-6 * event["ts"] + to_monotonic
        for event in events
        if event.get("cat", "").endswith(("_runtime", "_driver"))
    }
    found = []
    for event in events:
        cat, name, args = event.get("cat"), event["name"], event.get("args", {})
        if cat not in ("kernel", "gpu_memcpy", "gpu_memset") or not event["dur"]:
            continue
        kind = "copy" if cat != "kernel" else "comm" if name.startswith("nccl") else "compute"
        start = 1e-6 * event["ts"] + to_monotonic
        kernel = Span(kind, name, rank, start, start + 1e-6 * event["dur"])
        if kind == "comm":
            kernel.axis = args.get("Process Group Description", "").removeprefix("mesh_")
        found.append((launches.get(args.get("correlation"), start), kernel))
    return sorted(found, key=lambda pair: pair[0])
