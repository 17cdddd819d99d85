"""Scheduling of threads on Linux: the threads of gloo wait for a core instead of taking one.

Some of gloo's threads write messages, and one reads them. The woken reader preempts the writer, and
asks in vain for a connection on which the writer still works, until its time slice of some
milliseconds is over. Where ranks need all cores, this is the rule. A thread of the policy
SCHED_BATCH preempts nobody when it is woken. (sched(7) of Linux; gloo's `Pair::handleEvents`.)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def patient() -> Iterator[None]:
    """Start threads in the body that preempt nobody, such as gloo's.

    Afterwards the calling thread has its policy back. Nothing changes on other systems than Linux,
    where somebody has chosen a policy, or where the system forbids to choose.
    """
    usual = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
    if usual:
        _choose(os.SCHED_BATCH)
    try:
        yield
    finally:
        if usual:
            _choose(os.SCHED_OTHER)


def _choose(policy: int) -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
