"""A call on the ranks, as their parent sees it: who has answered, who failed; Ctrl-C meanwhile."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minipar.ranks.worker import Failure


class Job:
    """One call in progress on the ranks: who has not answered, who failed, what came back."""

    def __init__(self, number: int, waiting: set[int], limit: float | None) -> None:
        self.number, self.waiting, self.limit = number, waiting, limit
        self.asked = len(waiting)
        self.results: dict[int, bytes] = {}  # pickled
        self.failures: dict[int, Failure] = {}
        self.dead: list[int] = []
        self.killed: set[int] = set()
        self.left: set[int] = set()  # ranks that are not in our process group any more
        self.stopped = False
        self.deadline = math.inf
        self.interrupted: BaseException | None = None

    def failed(self, rank: int, failure: Failure) -> None:
        """Note a failure, unless it is only a consequence of another.

        A rank may answer late, since it took long to put its own failure into words.
        """
        self.waiting.discard(rank)
        if not failure.stopped and not (failure.broken and (self.stopped or self.dead)):
            self.failures[rank] = failure

    def died(self, rank: int, size: int, exitcode: int) -> None:
        """Note that a process has ended; that outranks the errors of those who missed it."""
        self.waiting.discard(rank)
        self.dead.append(rank)
        if self.stopped and self.failures:
            return  # we killed it ourselves
        how = (
            f"signal {-exitcode} ({signal_name(-exitcode)})" if exitcode < 0 else f"exit {exitcode}"
        )
        message = f"the process ended by {how}"
        if exitcode == -signal.SIGABRT:
            message += (
                "; gloo ends it where ranks call different collectives, or with other sizes: all "
                "ranks must make the same calls in the same order, and run a model that fsdp or "
                "tensor parallelism has cut alike, in evaluation too"
            )
        for other, failure in list(self.failures.items()):
            if failure.broken:
                del self.failures[other]
        self.failures[rank] = Failure(f"rank {rank} of {size}", "Died", message, message, exitcode)

    @property
    def all_alike(self) -> bool:
        """All ranks failed, with one and the same kind of error: they are still in step."""
        failures = self.failures.values()
        kinds = {failure.kind for failure in failures}
        broken = any(failure.broken for failure in failures)
        return len(failures) == self.asked and len(kinds) == 1 and not broken


class Interrupts:
    """Ctrl-C while ranks are supervised: obeyed at once where we only wait, else a little later.

    There is no recovery from a message that was cut in two, or from a half-mended group.
    """

    def __init__(self) -> None:
        self._allowed, self._noted, self._usual = False, None, None

    def __enter__(self) -> "Interrupts":
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(signal.getsignal(signal.SIGINT)):
            self._usual = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)
            self.check()

    def _on_signal(self, *args: Any) -> None:
        self._noted = args
        if self._allowed:
            self.check()

    def check(self) -> None:
        """Raise the interrupt that came meanwhile, if any."""
        args, self._noted = self._noted, None
        if args is not None:
            self._usual(*args)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Interrupts in the body are raised at once."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
