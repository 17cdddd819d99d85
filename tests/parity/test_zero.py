"""ZeRO equals one device: both stages, on 2, 3 and 4 ranks, for any module and accumulation."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.observe import timeline
from minipar.train.data import share
from minipar.train.step import train_step
from tests.parity import models
from tests.parity.harness import Outcome, assert_parity, parallel, reference
from tests.parity.tasks import TASKS, attach_zero

STAGES = [1, 2]
IN_LARGE = ["llama", "accumulating", "uneven", "foreign", "sometimes used", "idle ranks"]


def train(ranks, size: int, name: str, mute: bool = False, **options) -> list[Outcome]:
    return ranks(size).run(
        parallel,
        TASKS[name],
        {"dp": size},
        partial(attach_zero, **options),
        mute=mute,
    )


def _forward(name: str, size: int, stage: int) -> tuple[Tensor, Tensor]:
    """This rank's logits before and after, on a seed of its own."""
    mesh, task = Mesh(dp=size), TASKS[name]
    model = task.build(mesh.rank).double()
    [(inputs, _)] = task.microbatches_of(0, mesh.rank, size)
    before = model(inputs).detach()
    attach_zero(model, mesh, stage)
    return before, model(inputs).detach()


@cache
def _logits(name: str) -> Tensor:
    return TASKS[name].build(0).double()(TASKS[name].batch(0)[0]).detach()


@pytest.mark.parametrize("stage", STAGES)
def test_forward_equals_one_device(ranks, stage):
    """Mutant: ranks that keep the weights they were born with; buckets that mix up weights."""
    for rank, (before, after) in enumerate(ranks(3).run(_forward, "llama", 3, stage)):
        mine = share(_logits("llama"), rank, 3)  # [B/n, T, V]
        assert torch.allclose(after, mine, rtol=1e-10, atol=1e-12)
        assert torch.allclose(before, mine) == (rank == 0)


FAST = ["llama", "sometimes used"]
AT_TWO = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", AT_TWO)
@pytest.mark.parametrize("stage", STAGES)
def test_equals_one_device(ranks, stage, name):
    """Mutants: a slice cut wrongly; a step before the last bucket has arrived; the norm of one
    rank's pieces only; decay of parameters without gradients; tied weights in two buckets."""
    for outcome in train(ranks, 2, name, stage=stage):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name, stage", models.crossed(IN_LARGE, list(STAGES), every=2))
def test_equals_one_device_on_more_ranks(ranks, stage, size, name):
    for outcome in train(ranks, size, name, stage=stage):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.parametrize("stage", STAGES)
def test_without_communication_parity_is_violated(ranks, stage):
    """The mutant: what the harness compares must notice that no gradient was reduced."""
    for outcome in train(ranks, 2, "llama", stage=stage, mute=True):
        with pytest.raises(AssertionError, match="gradient of step 0"):
            assert_parity(outcome, reference(TASKS["llama"]))
        ours, theirs = outcome.gradients[0], reference(TASKS["llama"]).gradients[0]
        assert not any(torch.allclose(ours[name], theirs[name]) for name in theirs)


def _bytes_of_a_step(name: str, size: int, stage: int) -> int:
    """Sent by the second step, weights that arrive after it included."""
    mesh, task = Mesh(dp=size), TASKS[name]
    model = task.build(0).double()
    strategies = attach_zero(model, mesh, stage)
    optimizer = strategies[0].optimizer
    for step in range(2):
        with timeline.record() as recorded:
            batch = task.microbatches_of(step, mesh.rank, size)
            train_step(model, strategies, optimizer, batch, mesh.dp)
            optimizer.synchronize()
    return recorded.bytes_by_axis()["dp"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_sends_what_the_docstring_says(ranks, size, stage):
    """2 (n-1)/n P, as much as data parallelism; stage 2 reduces each microbatch.

    Mutants: gradients all-reduced (3 P); weights broadcast.
    """
    for name, m in {"llama": 1, "accumulating": 2}.items():
        params = list(TASKS[name].build(0).double().parameters())
        num_bytes = sum(p.nbytes for p in params)
        m = m if stage == 2 else 1
        # The trainer itself reduces two numbers of 8 bytes, and 2 more for the norm.
        small = 2 * (size - 1) / size * (len(params) + 4 * 8)
        expected = (size - 1) / size * (m + 1) * num_bytes + small
        for found in ranks(size).run(_bytes_of_a_step, name, size, stage):
            # Slices are padded to one length: up to n-1 numbers of 8 bytes for each bucket.
            padding = 12 * 8 * (size - 1) * (m + 1)
            assert expected - 60 <= found <= expected + padding < 1.1 * expected
