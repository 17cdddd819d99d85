"""Ranks with different numbers of microbatches, or packed rows: the same training."""

from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from minipar.model import llama
from minipar.model.llama import token_loss
from minipar.parallel import ddp
from minipar.train.balance import pack, packed_batch, rank_loads
from minipar.train.data import IGNORE, share
from minipar.train.step import Microbatch
from tests.parity import models
from tests.parity.harness import Outcome, Task, assert_parity, parallel, serial


@dataclass(frozen=True)
class Uneven(Task):
    """Rank r has ``shares[r]`` microbatches of two rows each; some have none. They take turns:

    in the next step, each rank has the share of the rank after it.
    """

    num_sequences: int = 10
    shares: tuple[int, ...] = ()
    full: bool = False  # every row has all of its targets

    def batch(self, step: int) -> Microbatch:
        inputs, targets = super().batch(step)
        return inputs, torch.where(targets == IGNORE, inputs, targets) if self.full else targets

    def microbatches_of(self, step: int, rank: int, size: int) -> list[Microbatch]:
        pairs = list(zip(*(t.split(2) for t in self.batch(step)), strict=True))
        shares = self.shares if size > 1 else (len(pairs),)
        assert len(shares) == size and sum(shares) == len(pairs)
        shares = [shares[(r + step) % size] for r in range(size)]
        start = sum(shares[:rank])
        return pairs[start : start + shares[rank]]


def attach(model, mesh, version):
    return [ddp.apply(model, mesh.dp, version=version, bucket_mb=0.004, average=False)]


@cache
def reference(build) -> Outcome:
    return serial(Uneven(build))


def train(ranks, task: Task, size: int, version="overlapped", **options) -> list[Outcome]:
    return ranks(size).run(
        parallel, task, {"dp": size}, partial(attach, version=version), **options
    )


@pytest.mark.mostly_slow
@pytest.mark.parametrize("version", ddp.VERSIONS)
@pytest.mark.parametrize("shares", [(4, 1), (5, 0), (0, 5)], ids=str)
def test_uneven_shares_equal_one_device(ranks, shares, version):
    """Also where a rank has nothing to do, be it the one whose first backward sets the order.

    Mutants: a rank that sends after every microbatch, or one that without any sends nothing.
    """
    for outcome in train(ranks, Uneven(models.llama, shares=shares), 2, version):
        assert_parity(outcome, reference(models.llama))


@pytest.mark.parametrize(
    "shares, build",
    models.crossed(
        [(2, 0, 3), (0, 4, 1), (1, 0, 3, 1), (0, 0, 5, 0)],
        [models.llama, models.recomputing_llama, models.Foreign],
    ),
)
@pytest.mark.slow
def test_uneven_shares_equal_one_device_on_more_ranks(ranks, shares, build):
    for outcome in train(ranks, Uneven(build, shares=shares), len(shares)):
        assert_parity(outcome, reference(build))


def test_without_communication_parity_is_violated(ranks):
    """The mutant that every proof here must notice."""
    for outcome in train(ranks, Uneven(models.llama, shares=(4, 1)), 2, mute=True):
        with pytest.raises(AssertionError, match="gradient of step 0"):
            assert_parity(outcome, reference(models.llama))


# ---------------------------------------------------------------------- the mutant: mean of means
def _mean_of_means(task: Uneven) -> Outcome:
    """Each microbatch divides by its own tokens, each rank by its microbatches, then the mean."""
    size = len(task.shares)
    mine = task.shares[torch.distributed.get_rank()]
    num_tokens = int((task.batch(0)[1] != IGNORE).sum())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        mean = token_loss(logits, targets) / (targets != IGNORE).sum().clamp(min=1)
        return mean / mine / size * num_tokens  # train_step divides by the last

    with mock.patch.object(llama, "loss_of", lambda model: loss):
        return parallel(task, {"dp": size}, partial(attach, version="overlapped"))


def test_trap_10_a_mean_of_means_is_another_training(ranks):
    """It agrees where all ranks have the same number of tokens, and with uneven shares it does not.

    That it agrees somewhere shows that it is the mutant it claims to be, and no mere wrong factor.
    """
    builds = partial(models.llama, num_layers=1)
    even = Uneven(builds, full=True, num_sequences=8, shares=(2, 2), steps=1)
    uneven = [
        Uneven(builds, full=True, shares=(3, 2), steps=1),  # uneven in microbatches
        Uneven(builds, shares=(3, 2), steps=1),  # and in tokens
    ]
    for outcome in ranks(2).run(_mean_of_means, even):
        assert_parity(outcome, serial(even))
    for task in uneven:
        for outcome in ranks(2).run(_mean_of_means, task):
            with pytest.raises(AssertionError, match="loss of step 0"):
                assert_parity(outcome, serial(task))


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
    expected = serial(Packed(models.llama))
    assert expected.num_tokens == [sum(LENGTHS)] * 3
    for outcome in train(ranks, Packed(models.llama), size):
        assert_parity(outcome, expected)
    for outcome in train(ranks, Packed(models.llama, masked=False, steps=1), size):
        assert abs(outcome.losses[0] / expected.losses[0] - 1) > 1e-6
