"""How long a test may wait: as long as on a quiet machine, times how busy this one is."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def busy() -> float:
    """How many processes wanted each core in the last minute; 1 where they were fewer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The body is to end in so many seconds of a quiet machine."""
    start = time.monotonic()
    yield
    took, may = time.monotonic() - start, seconds * busy()
    assert took < may, f"took {took:.2f} s, not {may:.2f} s"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to ask for its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
