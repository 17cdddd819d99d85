"""Compression that leaves nothing out equals one device: sums, buckets, accumulation, any module.

What each compressor leaves out is the matter of tests/parallel/test_compression.py.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from minipar.parallel import ddp
from minipar.parallel.compression.codecs import Codec, Int8, TopK
from minipar.parallel.compression.feedback import Compressed
from minipar.parallel.compression.linear import PowerSGD, RandomK
from tests.parity.harness import assert_parity, parallel, reference
from tests.parity.tasks import TASKS


@dataclass
class Verbatim(Codec):
    """Sends the bytes of the numbers themselves: what is left is how sums are made of them."""

    def compress(self, rows: Tensor) -> Tensor:
        return rows.contiguous().view(torch.uint8)

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return wire.contiguous().view(dtype)


LOSSLESS = {
    "verbatim": Verbatim,
    "top-k": partial(TopK, fraction=1.0),
    "random-k": partial(RandomK, fraction=1.0),
    "powersgd": partial(PowerSGD, rank=64),  # where no matrix is large enough to shrink
}
CASES = [(2, "llama"), (2, "sometimes used")]
CASES += [(3, name) for name in ("accumulating", "uneven", "foreign", "sometimes used")]


def attach(model, mesh, make, version="overlapped"):
    reduce = Compressed(make())
    options = dict(bucket_mb=0.004, average=False, reduce=reduce)
    return [ddp.apply(model, mesh.dp, version=version, **options)]


def train(ranks, size: int, name: str, make, mute: bool = False, **options):
    plug = partial(attach, make=make, **options)
    return ranks(size).run(parallel, TASKS[name], {"dp": size}, plug, mute=mute)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("size", "name"), CASES)
def test_equals_one_device(ranks, size, name):
    """Mutants: chunks joined in a wrong order; a lost residue; users that are compressed."""
    for outcome in train(ranks, size, name, Verbatim):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSLESS)
def test_every_kind_of_sum_equals_one_device(ranks, kind):
    for outcome in train(ranks, 4, "llama", LOSSLESS[kind]):
        assert_parity(outcome, reference(TASKS["llama"]))


def test_bucketed_equals_one_device(ranks):
    for outcome in train(ranks, 3, "llama", Verbatim, version="bucketed"):
        assert_parity(outcome, reference(TASKS["llama"]))


@pytest.mark.parametrize("make", [Verbatim, Int8])
def test_parity_notices_what_is_missing(ranks, make):
    """The mutants: nothing sent, and something left out."""
    for outcome in train(ranks, 2, "llama", make, mute=make is Verbatim):
        with pytest.raises(AssertionError, match="gradient of step 0"):
            assert_parity(outcome, reference(TASKS["llama"]))
