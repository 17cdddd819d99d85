"""No race: all strategies hold on a link that is as unforgiving as a GPU, and slips are caught.

A sample; with MINIPAR_TESTS_STRICT=1 all tests of this folder run there, as in `make test-all`.
"""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

from minipar.comm import collectives, strict
from minipar.comm.hostcopy import HostCopy
from minipar.comm.launch import RankError
from minipar.comm.mesh import Mesh
from minipar.parallel import compose, ddp, fsdp, offload
from minipar.parallel.compression.feedback import COMPRESSORS
from minipar.parallel.plan import Plan
from tests.parity import models
from tests.parity.harness import Outcome, Task, assert_parity, make_optimizer, parallel, serial

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


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_no_strategy_has_a_race(ranks, name):
    plan = PLANS[name]
    expected = serial(task_of(plan))
    expected.gradients = [{}, {}]
    for found in ranks(4, "link").run(train, plan):
        assert_parity(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [m if m == "int8" else pytest.param(m, marks=pytest.mark.slow) for m in COMPRESSORS]
)
def test_compression_has_no_race(ranks, method):
    """What is sent is less, and arrives late; it is not the gradient of one device."""
    for found in ranks(4, "link").run(train, Plan(dp=4, compression=method)):
        assert all(map(math.isfinite, found.losses + found.norms))


def attach_offloaded(model, mesh: Mesh, how: str) -> list:
    copies = HostCopy(pcie="none")
    if how == "shards":
        strategy = fsdp.apply(model, mesh.dp, average=False)
        offload.shards_on_host(strategy, copies)
        return [strategy]
    inside = ddp.apply(model, mesh.dp, bucket_mb=0.004, average=False)
    return [offload.apply(model, mesh.dp, inside=inside, copies=copies)]


def train_offloaded(how: str, slip: Callable = contextlib.nullcontext) -> Outcome:
    with slip(), strict.watching():
        attach = partial(attach_offloaded, how=how)
        return parallel(task_of(PLANS["ddp"]), {"dp": 4}, attach, gradients=lambda model: {})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["after ddp", "shards"])
def test_offload_has_no_race(ranks, how):
    """Gradients leave for the host when they have arrived; weights are sent when they are back."""
    expected = serial(task_of(PLANS["ddp"]))
    expected.gradients = [{}, {}]
    for found in ranks(4, "link").run(train_offloaded, how):
        assert_parity(found, expected)


# ---------------------------------------------------------------------- slips
def called_by_a_strategy() -> bool:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_globals["__name__"].startswith("minipar.parallel."):
        frame = frame.f_back
    return frame is not None


def wait_left_out() -> mock._patch:
    """The third wait of a strategy returns at once, with a buffer in which nothing is yet."""
    usual, seen = collectives.Pending.wait, itertools.count(1)

    def wait(pending):
        if pending._work is not None and called_by_a_strategy() and next(seen) == 3:
            return pending._result
        return usual(pending)

    return mock.patch.object(collectives.Pending, "wait", wait)


def buffer_reused(verb: str) -> mock._patch:
    """A strategy writes into what it has handed over, right after the call."""
    usual = getattr(dist, verb)

    def call(*args, **options):
        work = usual(*args, **options)
        if called_by_a_strategy():
            args[0].zero_()
        return work

    return mock.patch.object(dist, verb, call)


SLIPS = [
    *((name, wait_left_out) for name in ("ddp", "zero1", "zero2", "fsdp")),
    *((name, wait_left_out) for name in ("tensor", "ring", "ulysses", "pipeline")),
    ("ddp", partial(buffer_reused, "all_reduce")),
    ("fsdp", partial(buffer_reused, "all_gather_single")),
    ("zero2", partial(buffer_reused, "all_to_all_single")),
    ("pipeline", partial(buffer_reused, "isend")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "run, what, slip",
    [
        (train, Plan(dp=4, compression="int8"), wait_left_out),
        (train, Plan(dp=4, compression="int8"), partial(buffer_reused, "all_to_all_single")),
        (train_offloaded, "after ddp", wait_left_out),
        (train_offloaded, "shards", wait_left_out),
    ],
)
def test_a_slip_beside_plans_is_caught(ranks, run, what, slip):
    assert_caught(ranks, run, what, slip)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name, slip", SLIPS)
def test_a_slip_is_caught(ranks, name, slip):
    assert_caught(ranks, train, PLANS[name], slip)


def assert_caught(ranks, run: Callable, what: Plan | str, slip: Callable) -> None:
    try:
        found = ranks(4, "link").run(run, what, slip)
    except RankError:
        return
    assert any(math.isnan(x) for outcome in found for x in outcome.losses + outcome.norms)
