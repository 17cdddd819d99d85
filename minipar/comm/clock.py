"""The clock of this rank: that of the machine, unless an emulated device installs its own."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

device: Any = None
"""The clock of an emulated device: its methods are the functions below, and its `slowdown` is the
seconds that one declared second takes."""


def now() -> float:
    """Return seconds on the scale of `time.monotonic`."""
    return time.monotonic() if device is None else device.now()


def reach(end: float) -> None:
    """Move a device's clock on to `end`: this rank has waited for something that ended then."""
    if device is not None:
        device.reach(end)


def beside(start: float) -> AbstractContextManager:
    """Give this thread a clock of its own in the body, which begins at `start`."""
    return nullcontext() if device is None else device.beside(start)


def paused() -> AbstractContextManager:
    """Compute in the body without taking time of a device."""
    return nullcontext() if device is None else device.paused()


def recording() -> AbstractContextManager:
    """Enclose a recording, at whose end a device's clock has come true."""
    return nullcontext() if device is None else device.recording()
