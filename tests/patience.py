"""How long a test may wait: as long as on a quiet machine, times how busy this one is."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil


def busy() -> float:
    """How many processes wanted each core in the last minute; 1 where they were fewer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def stolen() -> float:
    """For how many seconds other virtual machines have had these cores; 0 where nothing says so."""
    return getattr(psutil.cpu_times(), "steal", 0.0)


class Looks:
    """At a test of seconds, several: how large a share of the cores was stolen in each."""

    MUCH = 0.01
    """Where more was stolen, what a test says of seconds is nothing that the code has done."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """The body is a look."""
        start, before = time.monotonic(), stolen()
        try:
            yield
        finally:
            cores = (time.monotonic() - start) * (os.cpu_count() or 1)
            self.shares.append((stolen() - before) / cores)

    @property
    def say_nothing(self) -> bool:
        """Whether much was stolen in every look."""
        return min(self.shares) > self.MUCH


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The body is to end in so many seconds of a quiet machine."""
    start = time.monotonic()
    yield
    took, may = time.monotonic() - start, seconds * busy()
    assert took < may, f"took {took:.2f} s, not {may:.2f} s"


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until `condition` holds, but no longer than for so many seconds of a quiet machine."""
    limit = time.monotonic() + seconds * busy()
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)


def carriers(name: str, value: str) -> list[psutil.Process]:
    """Living processes whose environment has this variable, children of whomever."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and is_alive(process.pid):
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to ask for its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
