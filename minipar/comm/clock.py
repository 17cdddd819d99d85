"""The clock of this rank: the machine's clock, unless an emulated device installs its own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

device: Any = None
"""An emulated device: its clock stands `at` a time, and one of its seconds takes `slowdown` seconds
of the machine. A thread may have a clock of its own, which stands at `beside.at`."""
is_paused = False


def now() -> float:
    """Return seconds on the scale of `time.monotonic`."""
    return time.monotonic() if device is None else getattr(device.beside, "at", device.at)


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


def reach(end: float) -> None:
    """Move a device's clock on to `end`: this rank has waited until then."""
    if device is not None:
        clock_of = device.beside if hasattr(device.beside, "at") else device
        clock_of.at = max(clock_of.at, end)


def beside(start: float) -> None:
    """Give this thread a clock of its own, from `start` on: its compute takes no time."""
    if device is not None:
        device.beside.at = start


@contextmanager
def paused() -> Iterator[None]:
    """Compute in the body without using time of a device; bytes count as they are.

    Use it to set up, warm up and check, on all ranks that communicate in it.
    """
    global is_paused
    before, is_paused = is_paused, True
    try:
        yield
    finally:
        is_paused = before


@contextmanager
def recording() -> Iterator[None]:
    """Begin the body at the machine's time; at its end, sleep until the device's time."""
    if device is not None:
        device.at = max(device.at, time.monotonic())
    yield
    catch_up()


def catch_up() -> None:
    """Sleep until the machine's clock has reached the device's."""
    while (ahead := now() - time.monotonic()) > 0:
        time.sleep(ahead)
