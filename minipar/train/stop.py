"""A graceful stop: SIGTERM or SIGUSR1 asks a run to save after the step that it is in, and to end.

Schedulers warn before they kill: Slurm sends SIGTERM, and with `--signal=USR1@120` SIGUSR1 two
minutes before the time is up. Any rank may get it, one or all, and at different moments. So a rank
only notes it; after each step all ranks agree, and stop after the same one. A second signal ends
the process at once.

Signals come in flocks: Slurm signals every process of a job, and a launcher passes on to its ranks
what it gets. What comes within a second of the first is an echo of it.

Under torchrun: it passes SIGTERM on, kills the ranks that have not ended 30 seconds later, and ends
with an exit code that is not 0. SIGUSR1 ends it, unless it is started with
`--signals-to-handle SIGTERM,SIGUSR1`.

Cost: one all-reduce of 24 bytes per step, where the ranks have just met to add up the loss.
Proved by: tests/train/test_stop.py, tests/test_cli.py.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from minipar.ranks.launch import RankError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 1.0


class StopRequest:
    """Whether this process was asked to stop, in the body of a `with`.

    A thread other than the main one cannot listen to signals: no signal is heard there.
    """

    def __init__(self) -> None:
        self.since: float | None = None  # when the first signal came, by the clock
        self.number = 0  # of that signal

    @property
    def came(self) -> bool:
        """Whether a signal has come."""
        return self.since is not None

    def __enter__(self) -> "StopRequest":
        is_main = threading.current_thread() is threading.main_thread()
        self._before = {n: signal.signal(n, self._note) for n in SIGNALS if is_main}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.since is None:
            self.since, self.number = now, number
            self._first(number)
        elif now - self.since > ECHO_SECONDS:
            self._second(number)

    def _first(self, number: int) -> None:
        """A rank only notes it."""

    def _second(self, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _PassedOn(StopRequest):
    """In a launcher, whose ranks are `pids`."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__()
        self.pids = pids

    def _first(self, number: int) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _second(self, number: int) -> None:
        raise SystemExit(128 + number)


@contextmanager
def pass_on(pids: Sequence[int]) -> Iterator[None]:
    """In a launcher: while the body runs, its ranks, `pids`, get the signal that it gets.

    A second signal raises `SystemExit` here, with the exit code of a process that it has ended. So
    does the first where it has ended the ranks: they had not begun to train, and saved nothing.
    """
    with _PassedOn(pids) as request:
        try:
            yield
        except RankError as error:
            ended = all(f.exitcode == -request.number for f in error.failures.values())
            if request.came and ended:
                raise SystemExit(128 + request.number) from None
            raise
