"""Offloaded training equals training on one device: with zero and with fsdp."""

from functools import partial

import pytest

from minipar.comm.hostcopy import HostCopy
from minipar.parallel import fsdp, offload
from tests.parity.harness import assert_parity, parallel, reference
from tests.parity.tasks import TASKS, attach_zero


def attach_fsdp(model, mesh, **options):
    """Weights, gradients and optimizer state in shards, and these on the host."""
    strategy = fsdp.apply(model, mesh.dp, average=False, **options)
    offload.shards_on_host(strategy, HostCopy())
    return [strategy]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "accumulating", "foreign", "recomputing"])
def test_shards_of_fsdp_on_the_host_equal_one_device(ranks, size, name):
    for outcome in ranks(size).run(parallel, TASKS[name], {"dp": size}, attach_fsdp):
        assert_parity(outcome, reference(TASKS[name]))


def attach_zero_on_host(model, mesh, stage):
    """The inner optimizer, which steps on shards, does so on the host."""
    strategies = attach_zero(model, mesh, stage)
    offload.step_on_host(model.zero.optimizer.inner, HostCopy())
    return strategies


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["llama", pytest.param("foreign", marks=pytest.mark.slow)])
def test_shards_of_zero_on_the_host_equal_one_device(ranks, stage, name):
    attach = partial(attach_zero_on_host, stage=stage)
    for outcome in ranks(2).run(parallel, TASKS[name], {"dp": 2}, attach):
        assert_parity(outcome, reference(TASKS[name]))
        assert outcome.sent["host"] > 0
