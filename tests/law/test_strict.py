"""No race: all strategies hold on a link that is as unforgiving as a GPU, and slips are caught.

A sample; with MINIPAR_TESTS_STRICT=1 all tests of this folder run there, as in `make test-all`.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest

from minipar.comm import calls
from minipar.comm.background import Background
from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Mesh
from minipar.emulate import strict
from minipar.observe import timeline
from minipar.parallel import compose, fsdp, offload
from minipar.parallel.plan import Plan
from minipar.ranks.launch import RankError
from tests.law import models
from tests.law.harness import Outcome, Task, make_optimizer, parallel

PLANS = {
    "ddp": Plan(dp=4),
    "zero1": Plan(dp=4, zero=1),
    "zero2": Plan(dp=4, zero=2, microbatches=3),
    "fsdp": Plan(dp=4, zero=3),
    "tensor": Plan(tp=4, sequence_parallel=True, tp_overlap=True),
    "ring": Plan(cp=4),
    "ulysses": Plan(cp=4, context="ulysses"),
    "pipeline": Plan(pp=4, microbatches=4),
    "zb": Plan(pp=2, dp=2, zero=1, microbatches=4, schedule="zb_h1"),
    "all": Plan(pp=2, tp=2, sequence_parallel=True, microbatches=2),
}


def task_of(plan: Plan) -> Task:
    build = partial(models.llama, vocab_size=64, num_layers=4)
    if plan.cp > 1:
        build = partial(build, num_heads=4, num_kv_heads=4)
    return Task(build, num_sequences=5, steps=2, microbatches=plan.microbatches)


def attach(model, mesh: Mesh, plan: Plan) -> list:
    model.composed = compose.apply(model, mesh, plan, make_optimizer, bucket_mb=0.004)
    return [model.composed]


def train(plan: Plan, slip: Callable = contextlib.nullcontext) -> Outcome:
    run = partial(parallel, task_of(plan), plan.mesh_sizes(), partial(attach, plan=plan))
    with slip(), strict.watching():  # losses, norms and weights say enough
        return run(gradients=lambda model: {})


def attach_offloaded(model, mesh: Mesh) -> list:
    strategy = fsdp.apply(model, mesh.dp, average=False)
    offload.shards_on_host(strategy, HostCopy())
    return [strategy]


def train_offloaded(plan: Plan, slip: Callable = contextlib.nullcontext) -> Outcome:
    with slip(), strict.watching():
        axes, found = {"dp": plan.dp}, lambda model: {}
        return parallel(task_of(plan), axes, attach_offloaded, gradients=found)


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


def buffer_reused(verb: str) -> mock._patch:
    """A strategy writes into what it has handed over, right after the call."""
    usual = calls.Pending.__init__

    def handed_over(pending, work, result, *more):
        usual(pending, work, result, *more)
        inner = getattr(work, "_work", work)  # the ledger is told of its end
        if getattr(inner, "verb", "") == verb and called_by_a_strategy():
            result.detach().zero_()

    return mock.patch.object(calls.Pending, "__init__", handed_over)


INT8 = Plan(dp=4, compression="int8")
SLIPS = [  # name, what runs, what goes wrong in it, the call that is to be named
    ("ddp", train, PLANS["ddp"], wait_left_out, "all_reduce at parallel/ddp.py"),
    ("zero1", train, PLANS["zero1"], wait_left_out, r"\w+ at parallel/zero.py"),
    ("zero2", train, PLANS["zero2"], wait_left_out, r"\w+ at parallel/zero.py"),
    ("fsdp", train, PLANS["fsdp"], wait_left_out, "all_gather at parallel/fsdp.py"),
    ("tensor overlap", train, PLANS["tensor"], wait_left_out, "recv at parallel/overlap.py"),
    ("ring", train, PLANS["ring"], wait_left_out, "recv at parallel/context.py"),
    ("ulysses", train, PLANS["ulysses"], wait_left_out, "all_to_all at parallel/ulysses.py"),
    ("pipeline", train, PLANS["pipeline"], wait_left_out, r"\w+ at pipeline/messages.py"),
    ("compression", train, INT8, wait_left_out, r"all_\w+ at compression/\w+.py"),
    ("beside", train, INT8, partial(wait_left_out, True), "compression at compression/feedback.py"),
    (
        "shards on the host",
        train_offloaded,
        PLANS["ddp"],
        wait_left_out,
        "all_gather at parallel/fsdp",
    ),
    *(
        (f"{name} reuses", train, plan, partial(buffer_reused, verb), f"{verb} at {place}")
        for name, plan, verb, place in (
            ("ddp", PLANS["ddp"], "all_reduce", "parallel/ddp.py"),
            ("zero2", PLANS["zero2"], "reduce_scatter", "parallel/zero.py"),
            ("fsdp", PLANS["fsdp"], "all_gather", r"(parallel/fsdp|base/shards).py"),
            ("pipeline", PLANS["pipeline"], "send", "pipeline/messages.py"),
            ("compression", INT8, "all_to_all", "compression/codecs.py"),
        )
    ),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("run, what, slip, call", [pytest.param(*s[1:], id=s[0]) for s in SLIPS])
def test_a_slip_is_caught(ranks, run, what, slip, call):
    """By a message that names the collective, the line that called it, and the tensor."""
    pool = ranks(4, "link")
    with pytest.raises(RankError) as caught:
        pool.run(run, what, slip)
    pool.restart()  # some ranks may have launched more than others
    says = rf"{call}.*:\d+((, |: its tensor of )(float64|uint8) \(\d|$)"
    for failure in caught.value.failures.values():
        assert failure.kind == "Race" and re.search(says, failure.message), failure.message
