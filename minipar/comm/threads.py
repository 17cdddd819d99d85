"""Which thread runs when: what the threads that compute and those that carry bytes need of Linux.

gloo has threads of its own: some write messages, and one reads them, which asks for a connection
again and again while another writes on it. By Linux's rule that who was woken runs first, a message
that arrives puts the reader in the place of the writer, on whose core it then asks in vain until
its time slice is over: some milliseconds, in which many small messages could have travelled. Where
ranks need all cores this is not rare but the rule. Threads of the policy SCHED_BATCH take no core
from another by being woken. (sched(7) of Linux; gloo's `Pair::handleEvents`.)

Other systems than Linux are left as they are.
Proved by: tests/comm/test_threads.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def patient() -> Iterator[None]:
    """Threads that are started in the body wait for a core, as what gloo starts should.

    The calling thread is afterwards as it was. Nothing changes where it had another policy than the
    usual one, or where the system forbids it to choose.
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


def usable_cores() -> int:
    """Return the number of cores that this process, and what it starts, may run on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return usable or os.cpu_count() or 1


def keep_to_a_core(rank: int, size: int) -> None:
    """Where ranks need all cores of a Linux machine, let this one stay on its own.

    The system wakes who waits for a message on the core of its sender, which goes on computing:
    then two ranks share a core for a while, and none can tell for how long.
    """
    if hasattr(os, "sched_setaffinity") and size == usable_cores():
        core = sorted(os.sched_getaffinity(0))[rank]
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), {core})
