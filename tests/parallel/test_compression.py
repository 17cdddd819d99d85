"""Compression: what is sent, what is kept back, and how many bytes go.

That sums are right when nothing is left out is proved by tests/law/test_law.py.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis, Mesh
from minipar.observe import timeline
from minipar.parallel import ddp
from minipar.parallel.compression import Compressed, Int8, PowerSGD, Sign, TopK
from tests.on_ranks import on_ranks
from tests.parallel.layers import random

pytestmark = pytest.mark.trains
CODECS = [Int8, Sign, TopK]


def there_and_back(codec, rows: Tensor) -> Tensor:
    return codec.decompress(codec.compress(rows), rows.shape[1], rows.dtype)


# ---------------------------------------------------------------------- codecs
def test_int8_is_off_by_half_a_step_at_most():
    """Mutants: truncating; 128 steps; a scale of another block."""
    rows = random(3, 1000) * torch.tensor([[1e-6], [1.0], [1e6]])
    error = (there_and_back(Int8(block=100), rows) - rows).unflatten(1, (10, 100)).abs()
    step = rows.unflatten(1, (10, 100)).abs().amax(-1, keepdim=True) / 127
    ratio = error / step
    assert ratio.max() <= 0.5 + 1e-4
    assert ratio.max() > 0.49 and ratio.mean() > 0.2  # all steps are used, nothing goes unrounded


def test_sign_is_the_mean_magnitude():
    rows = random(2, 203)
    found = there_and_back(Sign(block=rows.shape[1]), rows)
    mean = rows.abs().mean(1, keepdim=True)
    torch.testing.assert_close(found, rows.sign() * mean, rtol=1e-6, atol=0)


def test_top_k_is_the_largest_and_exact():
    rows = random(3, 1001)
    found = there_and_back(TopK(0.05), rows)
    for row, original in zip(found, rows, strict=True):
        kept = row != 0
        assert kept.sum() == 51  # rounded up
        assert torch.equal(row[kept], original[kept])
        assert original[kept].abs().min() >= original[~kept].abs().max()


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("length", [1, 7, 255, 256, 257, 1000])
def test_any_length_zeros_and_each_row_by_itself(make, length):
    """Mutants: a block or a byte that is cut wrongly; rows whose bytes are interleaved."""
    codec = make()
    rows = random(3, length, dtype=torch.float32)
    rows[1] = 0
    wire = codec.compress(rows)
    assert wire.dtype == torch.uint8
    whole = codec.decompress(wire, length, torch.float32)
    for i in range(3):
        assert torch.equal(codec.decompress(wire[i : i + 1], length, torch.float32)[0], whole[i])
    assert (whole[1] == 0).all()
    assert (whole[0] * rows[0] >= 0).all() and (whole[0] != 0).any()


# ---------------------------------------------------------------------- sums over ranks
SHAPES = (64, 96), (7,), (96, 64), (9, 10)
NUMEL = sum(math.prod(shape) for shape in SHAPES)
SMALL = (32, 40), (7,), (40, 32), (9, 10)


def _bucket(make, dtype=torch.float64, shapes=SHAPES):
    reduce = Compressed(make())
    return ddp.Bucket([nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes], reduce), reduce


def _reduce(bucket, axis: Axis, op: str, gradients: Tensor) -> Tensor:
    pieces = gradients.split([p.numel() for p in bucket.parameters])
    for p, piece in zip(bucket.parameters, pieces, strict=True):
        p.grad = piece.view_as(p).clone()
    bucket.launch(axis, op)
    bucket.finish()
    return torch.cat([p.grad.flatten() for p in bucket.parameters])


@pytest.mark.slow
@pytest.mark.mostly_slow
@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks("size")
def test_sent_plus_residue_is_the_truth(size):
    """Mutants: the second rounding's error dropped; a residue of the gradient alone; a weight on
    the sum alone; ranks that add in different orders."""
    mesh, numel = Mesh(dp=size), sum(math.prod(shape) for shape in SMALL)
    for make in (*CODECS, PowerSGD):
        for op, weight in {"sum": 1, "avg": 1 / size}.items():
            bucket, reduce = _bucket(make, shapes=SMALL)
            before = torch.zeros(numel, dtype=torch.float64)
            for step in range(2):
                every = [random(numel, seed=10 * step + rank) for rank in range(size)]
                got = _reduce(bucket, mesh.dp, op, every[mesh.rank])
                results, residues = zip(
                    *all_gather_object((got, reduce.residues[bucket]), mesh.dp),
                    strict=True,
                )
                assert all(torch.equal(got, other) for other in results), make  # bit for bit
                truth = weight * sum(every) + before
                error = (got + sum(residues) - truth).abs().max()
                assert error <= 1e-12 * truth.abs().max(), (make, op, step, error)
                left = (got - truth).norm() / truth.norm()
                assert 1e-5 < left < 2, (make, left)  # something was left out, not everything
                before = sum(residues)


def _sent(make, size):
    mesh = Mesh(dp=size)
    bucket, _ = _bucket(make, torch.float32)
    gradients = random(NUMEL, seed=mesh.rank, dtype=torch.float32)
    with timeline.record() as recorded:
        _reduce(bucket, mesh.dp, "avg", gradients)
    return recorded.bytes_by_axis()["dp"]


LARGE = 160 * 2  # rows and columns of the two matrices worth a PowerSGD of rank 4
REST = 7 + 90


PAYLOADS = {  # bytes of a compressed vector, and their share of those in float32
    Int8: ((1 + 4 / 256) * NUMEL, 0.26),
    Sign: ((1 / 8 + 4 / 256) * NUMEL, 0.036),
    TopK: (0.01 * 8 * NUMEL, 0.021),
    PowerSGD: (4 * (4 * LARGE + REST), 0.12),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", PAYLOADS)
def test_bytes_follow_the_formula(ranks, size, make):
    """Mutants: int8 sent as int32; a gather on more than two ranks; scales that nobody counts."""
    payload, at_most = PAYLOADS[make]
    factor = size - 1 if make is TopK else 2 * (size - 1) / size
    for sent in ranks(size).run(_sent, make, size):
        assert sent == pytest.approx(factor * payload, rel=0.02)  # a block begun counts
        assert sent <= 1.005 * at_most * factor * 4 * NUMEL


@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_an_overflow_shows_on_all_ranks_and_spoils_one_step(size):
    """Mutants: a residue or a warm start that keeps the nan; a cast that hides it."""
    mesh = Mesh(dp=size)
    for make in PAYLOADS:
        bucket, _ = _bucket(make, torch.float32)
        for step in range(3):
            gradients = random(NUMEL, seed=10 * step + mesh.rank, dtype=torch.float32)
            if step == 1 and mesh.rank == 1:
                gradients[1234] = math.inf
            found = _reduce(bucket, mesh.dp, "avg", gradients)
            every = all_gather_object(found.isfinite().all().item(), mesh.dp)
            assert every == [step != 1] * size, (make, step, every)
