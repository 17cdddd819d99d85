"""The clock of this rank: the machine's clock, unless an emulated device installs its own."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

device: Any = None
"""The clock of an emulated device, with the methods below. One of its seconds takes `slowdown`
seconds of the machine."""


def now() -> float:
    """Return seconds on the scale of `time.monotonic`."""
    return time.monotonic() if device is None else device.now()


def stamp(on: torch.device) -> Any:
    """Return a time stamp for `between`; on a GPU, an event after all work launched so far."""
    if on.type != "cuda":
        return now()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Return the seconds from one stamp to another; on a GPU, wait for `end`."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronise(device: torch.device) -> None:
    """Wait until `device` has finished all work launched so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reach(end: float) -> None:
    """Move a device's clock on to `end`: this rank has waited until then."""
    if device is not None:
        device.reach(end)


def beside(start: float) -> AbstractContextManager:
    """Give this thread a clock of its own in the body, starting at `start`."""
    return nullcontext() if device is None else device.beside(start)


def paused() -> AbstractContextManager:
    """Compute in the body without using time of a device."""
    return nullcontext() if device is None else device.paused()


def recording() -> AbstractContextManager:
    """Record in the body; at its end, wait until the machine's clock has reached the device's."""
    return nullcontext() if device is None else device.recording()
