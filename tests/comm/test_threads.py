"""What gloo starts waits for a core; what computes does not."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minipar.comm.mesh import make_group
from minipar.comm.threads import patient
from minipar.ranks.launch import Ranks


def can_choose() -> bool:
    """Whether threads may choose their policy here."""
    with patient():
        return hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH


pytestmark = pytest.mark.skipif(not can_choose(), reason="this system lets no thread choose")


def look() -> tuple[set[int], int]:
    """The policies of this rank's threads of gloo, and that of its main thread."""
    for group in (dist.group.WORLD, make_group("another", [0, 1])):
        dist.all_reduce(torch.ones(1), group=group)
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if (thread / "comm").read_text(encoding="utf-8") == "gloo_tcp_loop\n":
                found.add(os.sched_getscheduler(int(thread.name)))
    return found, os.sched_getscheduler(os.getpid())


@pytest.mark.parametrize("backend", ["gloo", "link"])
def test_threads_of_gloo_are_patient_and_the_one_that_computes_is_not(backend):
    """Mutants: the groups of a mesh as usual; ranks that stay patient."""
    with Ranks(2, backend=backend) as ranks:
        for found, main in ranks.run(look):
            assert found == {os.SCHED_BATCH}
            assert main == os.SCHED_OTHER
