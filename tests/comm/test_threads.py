"""What gloo starts waits for a core; what computes does not."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minipar.comm.mesh import make_group
from minipar.ranks.launch import Ranks


def can_choose() -> bool:
    """Whether threads have the usual policy here, and may choose another."""
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        was_chosen = os.sched_getscheduler(0) == os.SCHED_BATCH
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return was_chosen
    return False


pytestmark = pytest.mark.skipif(not can_choose(), reason="this system lets no thread choose")


def look() -> tuple[dict[str, set[int]], int]:
    """The policies of this rank's threads, by the names of these, and that of its main thread."""
    for group in (dist.group.WORLD, make_group("another", [0, 1])):
        dist.all_reduce(torch.ones(1), group=group)
    found: dict[str, set[int]] = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            name = (thread / "comm").read_text(encoding="utf-8").strip()
            found.setdefault(name, set()).add(os.sched_getscheduler(int(thread.name)))
    return found, os.sched_getscheduler(os.getpid())


@pytest.mark.parametrize("backend", ["gloo", "link"])
def test_threads_of_gloo_are_patient_and_the_one_that_computes_is_not(backend):
    """Mutants: the groups of a mesh as usual; ranks that stay patient."""
    with Ranks(2, backend=backend) as ranks:
        for found, main in ranks.run(look):
            assert found["gloo_tcp_loop"] == {os.SCHED_BATCH}
            assert main == os.SCHED_OTHER
