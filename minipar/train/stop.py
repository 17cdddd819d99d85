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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from minipar.comm.launch import RankError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 1.0


class StopRequest:
    """Whether this process was asked to stop, in the body of a `with`.

    A thread other than the main one cannot listen to signals: no signal is heard there.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    @property
    def came(self) -> bool:
        """Whether a signal has come."""
        return self.since is not None

    def __enter__(self) -> "StopRequest":
        self._before = _listen(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.since is None:
            self.since = now
        elif now - self.since > ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def pass_on(pids: Sequence[int]) -> Iterator[None]:
    """In a launcher: while the body runs, its ranks, `pids`, get the signal that it gets.

    A second signal raises `SystemExit` here, with the exit code of a process that it has ended. So
    does the first where it has ended the ranks: they had not begun to train, and saved nothing.
    """
    since: float | None = None
    passed: int | None = None

    def handle(number: int, _: object) -> None:
        nonlocal since, passed
        now = time.monotonic()
        if since is None:
            since, passed = now, number
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif now - since > ECHO_SECONDS:
            raise SystemExit(128 + number)

    before = _listen(handle)
    try:
        yield
    except RankError as error:
        if passed and all(f.exitcode == -passed for f in error.failures.values()):
            raise SystemExit(128 + passed) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(handle: Callable[[int, object], None]) -> dict[int, object]:
    """Handle the signals; return what did before. Only the main thread of a process can."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handle) for number in SIGNALS}
