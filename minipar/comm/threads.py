"""Scheduling of threads on Linux: gloo's threads wait for a free core and preempt no other thread.

Some of gloo's threads write messages, and one reads them. When the reader wakes up, it preempts a
writer. It then polls a connection that this writer still uses, for a time slice of some
milliseconds. This happens often when the ranks use all cores. A thread of the policy SCHED_BATCH
preempts no thread when it wakes up. (sched(7) of Linux; gloo's `Pair::handleEvents`.)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def patient() -> Iterator[None]:
    """Give threads that start in the body, such as gloo's, the policy SCHED_BATCH.

    Afterwards the calling thread has the usual policy. Nothing changes on systems other than
    Linux, or if the system forbids the change.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
