"""The clock of this rank. An emulated device installs its own, which only its work moves on."""

import time
from contextlib import AbstractContextManager, nullcontext


class Clock:
    """The time of the machine; an emulated device overrides every method."""

    slowdown = 1.0
    """Seconds of this clock for each second of the declared device."""
    is_emulated = False

    def now(self) -> float:
        return time.monotonic()

    def reach(self, end: float) -> None:
        """Move the clock on to `end`: this rank has waited for something that ended then."""

    def paused(self) -> AbstractContextManager:
        """Compute in the body without taking time of the device."""
        return nullcontext()

    def beside(self, start: float) -> AbstractContextManager:
        """Give this thread a clock of its own in the body, which begins at `start`."""
        return nullcontext()

    def recording(self) -> AbstractContextManager:
        """Enclose a recording: spans of the body are read on this clock."""
        return nullcontext()


_clock = MACHINE = Clock()


def install(clock: Clock) -> None:
    """Read the time from `clock` from now on."""
    global _clock
    _clock = clock


def current() -> Clock:
    return _clock


def now() -> float:
    """Return the seconds on this rank's clock, which starts with that of the machine."""
    return _clock.now()


def reach(end: float) -> None:
    _clock.reach(end)


def beside(start: float) -> AbstractContextManager:
    return _clock.beside(start)


def paused() -> AbstractContextManager:
    return _clock.paused()
