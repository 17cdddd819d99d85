"""Data parallelism equals one device: every version, on 2, 3 and 4 ranks, for any module."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.parallel import ddp
from minipar.train.data import share
from tests.parity.harness import Outcome, Task, assert_parity, parallel, reference
from tests.parity.tasks import TASKS

IN_LARGE = ["llama", "accumulating", "uneven", "foreign", "sometimes used", "idle ranks"]


def attach(model, mesh, version, bucket_mb=0.004):
    # Buckets small enough that even these models fill several.
    return [ddp.apply(model, mesh.dp, version=version, bucket_mb=bucket_mb, average=False)]


def train(ranks, size: int, task: Task, **options) -> list[Outcome]:
    mute = options.pop("mute", False)
    return ranks(size).run(parallel, task, {"dp": size}, partial(attach, **options), mute=mute)


def _forward(task: Task, size: int, version: str) -> tuple[Tensor, Tensor]:
    """This rank's logits before and after data parallelism, on a seed of its own."""
    mesh = Mesh(dp=size)
    model = task.build(mesh.rank).double()
    [(inputs, _)] = task.microbatches_of(0, mesh.rank, size)
    before = model(inputs).detach()
    attach(model, mesh, version)
    return before, model(inputs).detach()


@pytest.mark.parametrize("version", ddp.VERSIONS)
def test_forward_equals_one_device(ranks, version):
    """Mutant: ranks that keep the weights they were born with."""
    task = TASKS["llama"]
    expected = task.build(0).double()(task.batch(0)[0])
    for rank, (before, after) in enumerate(ranks(3).run(_forward, task, 3, version)):
        mine = share(expected, rank, 3)  # [B/n, T, V]
        assert torch.allclose(after, mine, rtol=1e-10, atol=1e-12)
        assert torch.allclose(before, mine) == (rank == 0)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("version", ddp.VERSIONS)
def test_equals_one_device(ranks, version, name):
    for outcome in train(ranks, 2, TASKS[name], version=version):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", IN_LARGE)
def test_equals_one_device_on_more_ranks(ranks, size, name):
    for outcome in train(ranks, size, TASKS[name], version="overlapped"):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.parametrize("version", ddp.VERSIONS)
def test_without_communication_parity_is_violated(ranks, version):
    """The mutant: what the harness compares must notice that no gradient was reduced."""
    for outcome in train(ranks, 2, TASKS["llama"], version=version, mute=True):
        with pytest.raises(AssertionError, match="gradient of step 0"):
            assert_parity(outcome, reference(TASKS["llama"]))
        ours, theirs = outcome.gradients[0], reference(TASKS["llama"]).gradients[0]
        assert not any(torch.allclose(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sends_what_the_docstring_says(ranks, size):
    task = replace(TASKS["llama"], steps=3)  # the second is for tuning
    model = task.build(0).double()
    params = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in params) + len(params)
    for version in ddp.VERSIONS:
        for outcome in train(ranks, size, task, version=version):
            # The trainer itself reduces two numbers of 8 bytes: tokens and loss.
            expected = 2 * (size - 1) / size * (gradients + 16)
            assert outcome.sent == {"dp": pytest.approx(expected, abs=50)}  # each call rounds down
