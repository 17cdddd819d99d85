"""The loss by tokens: a mean over all targets, whoever has them. Trap 10, and packing."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.model import llama
from minipar.model.llama import token_loss
from minipar.train.balance import pack, packed_batch, rank_loads
from minipar.train.data import IGNORE, share
from minipar.train.step import Microbatch, train_step
from tests.law import models
from tests.law.harness import (
    Outcome,
    Task,
    assert_parity,
    make_optimizer,
    parallel,
    reference,
    serial,
)
from tests.law.table import Silent, Uneven, attach_context, attach_ddp, cut_sequences


@dataclass(frozen=True)
class Full(Uneven):
    """Every row has all of its targets."""

    def batch(self, step: int) -> Microbatch:
        inputs, targets = super().batch(step)
        return inputs, torch.where(targets == IGNORE, inputs, targets)


def _mean_of_means(task: Uneven) -> Outcome:
    """Each microbatch divides by its own tokens, each rank by its microbatches, then the mean."""
    size = len(task.shares)
    mine = task.shares[torch.distributed.get_rank()]
    num_tokens = int((task.batch(0)[1] != IGNORE).sum())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        mean = token_loss(logits, targets) / (targets != IGNORE).sum().clamp(min=1)
        return mean / mine / size * num_tokens  # train_step divides by the last

    with mock.patch.object(llama, "loss_of", lambda model: loss):
        return parallel(task, {"dp": size}, attach_ddp)


def test_trap_10_a_mean_of_means_is_another_training(ranks):
    """It agrees where all ranks have the same number of tokens, and with uneven shares it does not.

    That it agrees somewhere shows that it is the mutant it claims to be, and no mere wrong factor.
    """
    builds = partial(models.llama, num_layers=1)
    even = Full(builds, num_sequences=8, shares=(2, 2), steps=1)
    uneven = [
        Full(builds, shares=(3, 2), steps=1),  # uneven in microbatches
        Uneven(builds, shares=(3, 2), steps=1),  # and in tokens
    ]
    for outcome in ranks(2).run(_mean_of_means, even):
        assert_parity(outcome, serial(even))
    for task in uneven:
        for outcome in ranks(2).run(_mean_of_means, task):
            with pytest.raises(AssertionError, match="loss of step 0"):
                assert_parity(outcome, serial(task))


SILENT = Silent(models.llama, seq_len=24, microbatches=3)
PLAIN = Task(models.llama, seq_len=24, microbatches=3)


def _counted(own: Task, data_axes: tuple[str, ...]) -> tuple:
    """Sizes of a step, as every rank reports them; microbatches of very uneven length."""
    mesh = Mesh(dp=2, cp=2)
    model = own.build(mesh.rank).double()
    strategies = attach_context(model, mesh, "plain ring")
    whole = own.microbatches_of(0, mesh.dp.rank, mesh.dp.size)
    batches = [cut_sequences(microbatch, mesh, "plain ring") for microbatch in whole]
    num_own = sum((targets != IGNORE).sum().item() for _, targets in batches)
    optimizer, axis = make_optimizer(model), mesh.joint(*data_axes)
    result = train_step(model, strategies, optimizer, batches, axis)
    return num_own, result.num_tokens.item(), result.loss.item(), result.grad_norm.item()


def test_trap_10_tokens_are_counted_once_over_dp_and_cp(ranks):
    """dp=2, cp=2, three uneven microbatches, and two ranks without any target: no nan, no mean of
    means, and no token counted by all ranks of cp. Mutant: dp alone as the axis of the data."""
    expected = reference(dataclasses.replace(SILENT, microbatches=1))
    found = ranks(4).run(_counted, SILENT, ("dp", "cp"))
    assert [num_own for num_own, *_ in found[1::2]] == [0, 0]  # the second half of all sequences
    assert sum(num_own for num_own, *_ in found) == expected.num_tokens[0]
    for _, num_tokens, loss, norm in found:
        assert num_tokens == expected.num_tokens[0]
        assert loss == pytest.approx(expected.losses[0], rel=1e-10)
        assert norm == pytest.approx(expected.norms[0], rel=1e-10)
    whole = reference(dataclasses.replace(PLAIN, microbatches=1))
    for _, num_tokens, _, norm in ranks(4).run(_counted, PLAIN, ("dp",)):
        assert num_tokens < whole.num_tokens[0]
        assert norm > 1.1 * whole.norms[0]


# ---------------------------------------------------------------------- packed documents
LENGTHS = [12, 1, 7, 3, 3, 9, 5, 2, 8, 4, 6, 1, 10]


@dataclass(frozen=True)
class Packed(Task):
    """Documents of 1 to 12 targets: a row each on one device, packed into rows on several."""

    seq_len: int = 12
    masked: bool = True

    def documents(self, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randint(self.vocab_size, (n + 1,), generator=generator) for n in LENGTHS]

    def microbatches_of(self, step: int, rank: int, size: int) -> list[Microbatch]:
        documents = self.documents(step)
        if size == 1:
            return [(d[None, :-1], d[None, 1:]) for d in documents]
        rows = pack(LENGTHS, self.seq_len, multiple_of=size)
        loads = rank_loads(LENGTHS, rows, size)
        assert sum(loads) == sum(LENGTHS) and max(loads) < 1.2 * min(loads)
        mine = share(torch.arange(len(rows)), rank, size).tolist()
        batch = packed_batch(documents, [rows[i] for i in mine], self.seq_len)
        return [batch if self.masked else batch[:2]]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_packed_rows_equal_a_row_per_document(ranks, size):
    """Mutant: without the mask, documents read their neighbours."""
    packed, mixed = Packed(models.llama), Packed(models.llama, masked=False, steps=1)
    expected = serial(packed)
    assert expected.num_tokens == [sum(LENGTHS)] * 3
    for outcome in ranks(size).run(parallel, packed, {"dp": size}, attach_ddp):
        assert_parity(outcome, expected)
    for outcome in ranks(size).run(parallel, mixed, {"dp": size}, attach_ddp):
        assert abs(outcome.losses[0] / expected.losses[0] - 1) > 1e-6
