"""A graceful stop: SIGTERM or SIGUSR1 asks a run to save after the step that it is in, and to end.

Slurm sends SIGTERM before it kills a job, or SIGUSR1 with `--signal=USR1@120`. One rank or all may
get the signal, at different moments. So a rank only notes the signal. After each step all ranks
agree, and stop after the same step. A second signal ends the process at once. One signal often
arrives several times: Slurm signals every process of a job, and a launcher passes its signals on to
its ranks. A repeat within a second is ignored.

torchrun passes SIGTERM on, kills the ranks that have not ended 30 seconds later, and ends with an
exit code that is not 0. SIGUSR1 ends torchrun, unless it is started with `--signals-to-handle
SIGTERM,SIGUSR1`.

Cost: one all-reduce of 16 bytes per step, just after the all-reduce of the loss.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 1.0


class StopRequest:
    """Notes in the body of a `with` whether this process was asked to stop.

    In a launcher, `pids` are its ranks, to which the first signal is passed on. A thread other than
    the main one hears no signals.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self.pids = pids
        self.since: float | None = None  # when the first signal came, by the clock

    @property
    def came(self) -> bool:
        """True if a signal has come."""
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
            self.since = now
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif now - self.since > ECHO_SECONDS:
            if self.pids:
                raise SystemExit(128 + number)  # the launcher ends its ranks
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
