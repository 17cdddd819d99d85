"""The clock of this rank: that of the machine, unless an emulated device installs its own."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

device: Any = None
"""The clock of an emulated device. Its methods are those below; one of its seconds takes `slowdown`
seconds."""


def now() -> float:
    """Return seconds on the scale of `time.monotonic`."""
    return time.monotonic() if device is None else device.now()


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
