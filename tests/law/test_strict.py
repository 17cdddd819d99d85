"""No race: all strategies hold on a link that is as unforgiving as a GPU, and slips are caught.

A sample; with MINIPAR_TESTS_STRICT=1 all tests of this folder run there, as in `make test-all`.
"""

import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest

from minipar.comm import calls
from minipar.comm.background import Background
from minipar.emulate import strict
from minipar.observe import timeline
from minipar.parallel.plan import Plan
from minipar.ranks.launch import RankError
from tests.law import models
from tests.law.harness import Outcome, Task, attach_plan, parallel
from tests.law.table import attach_compressed, attach_on_host

PLANS = {
    "ddp": Plan(dp=4),
    "zero1": Plan(dp=4, zero=1),
    "zero2": Plan(dp=4, zero=2, microbatches=3),
    "fsdp": Plan(dp=4, zero=3),
    "tensor": Plan(tp=4, sequence_parallel=True, tp_overlap=True),
    "ring": Plan(cp=4),
    "ulysses": Plan(cp=4, context="ulysses"),
    "pipeline": Plan(pp=4, microbatches=4),
}


def task_of(plan: Plan) -> Task:
    build = partial(models.llama, vocab_size=64, num_layers=4)
    if plan.cp > 1:
        build = partial(build, num_heads=4, num_kv_heads=4)
    return Task(build, num_sequences=5, steps=2, microbatches=plan.microbatches)


def train(plan: Plan, slip: Callable, attach: Callable | None = None) -> Outcome:
    run = partial(parallel, task_of(plan), plan.mesh_sizes())
    with slip(), strict.watching():  # losses, norms and weights say enough
        return run(attach or partial(attach_plan, plan=plan), gradients=lambda model: {})


# ---------------------------------------------------------------------- slips
def called_by_a_strategy() -> bool:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_globals["__name__"].startswith("minipar.parallel."):
        frame = frame.f_back
    return frame is not None


def wait_left_out(beside: bool = False) -> mock._patch:
    """The third wait of a strategy returns at once, with a buffer in which nothing is yet.

    For a collective, or for work `beside`, in a thread that waits for collectives of its own: which
    of the two waits first hangs on how fast the threads are.
    """
    usual, seen = calls.Pending.wait, itertools.count(1)

    def wait(pending):
        counts = pending.work is not None and isinstance(pending.work, Background) == beside
        counts = counts and timeline.active() is not None  # in a step; `apply` has waits, too
        if counts and called_by_a_strategy() and next(seen) == 3:
            pending.work = None
        return usual(pending)

    return mock.patch.object(calls.Pending, "wait", wait)


on_host = partial(train, attach=attach_on_host)
compressed = partial(train, attach=partial(attach_compressed, codec="verbatim"))
slip_beside = partial(wait_left_out, True)
SLIPS = [  # name, what runs, what goes wrong in it, the call that is to be named
    ("ddp", train, PLANS["ddp"], wait_left_out, "all_reduce at parallel/ddp.py"),
    ("zero1", train, PLANS["zero1"], wait_left_out, "reduce_scatter at base/shards.py"),
    ("zero2", train, PLANS["zero2"], wait_left_out, "reduce_scatter at base/shards.py"),
    ("fsdp", train, PLANS["fsdp"], wait_left_out, "all_gather at parallel/fsdp.py"),
    ("tensor overlap", train, PLANS["tensor"], wait_left_out, "recv at parallel/overlap.py"),
    ("ring", train, PLANS["ring"], wait_left_out, "recv at parallel/context.py"),
    ("ulysses", train, PLANS["ulysses"], wait_left_out, "all_to_all at parallel/ulysses.py"),
    ("pipeline", train, PLANS["pipeline"], wait_left_out, r"\w+ at pipeline/messages.py"),
    ("compression", compressed, PLANS["ddp"], wait_left_out, r"all_\w+ at parallel/compression.py"),
    ("beside", compressed, PLANS["ddp"], slip_beside, "compression at parallel/compression.py"),
    ("on the host", on_host, PLANS["ddp"], wait_left_out, "all_gather at parallel/fsdp"),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("run, what, slip, call", [pytest.param(*s[1:], id=s[0]) for s in SLIPS])
def test_a_slip_is_caught(ranks, run, what, slip, call):
    """By a message that names the collective, the line that called it, and the tensor."""
    pool = ranks(4, "link")
    with pytest.raises(RankError) as caught:
        pool.run(run, what, slip)
    pool.close()  # some ranks may have launched more than others
    says = rf"{call}.*:\d+((, |: its tensor of )(float64|uint8) \(\d|$)"
    for failure in caught.value.failures.values():
        assert failure.kind == "Race" and re.search(says, failure.message), failure.message
