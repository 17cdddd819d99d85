"""An all-reduce in eight bits, with a scale per block.

A scale for all numbers lets one outlier round everything else to zero. A scale for each block costs
4 bytes more per block, and an outlier silences its own block only. Codes of different ranks have
different scales, so they cannot be added on the way: every rank gathers all codes and all scales,
decodes, and adds in float32.
Source: Alistarh et al. 1610.02132; Dettmers et al. 2110.02861, section 2.1 (blocks).
"""

import torch

from minipar.comm.collectives import all_gather, all_reduce
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "easy", 20
GOOD = "an error of at most half a step per number, and at most 9 bits of traffic for each"
PRAISE = "That is what int8 compression sends. What is missing is only the residue."
SIZES = (4, 2)

BLOCKS, BLOCK = 12, 64


def given(size, random):
    """For each rank a vector [N] whose blocks differ by orders of magnitude; one block is zero."""
    vectors = torch.randn(size, BLOCKS, BLOCK, generator=random)
    powers = torch.randint(-4, 4, (size, BLOCKS, 1), generator=random)
    vectors *= 10.0**powers
    vectors[:, int(torch.randint(BLOCKS, (), generator=random))] = 0
    return [(vector.flatten(), BLOCK) for vector in vectors]


def check_result(case: Case) -> None:
    vectors = torch.stack([vector for vector, _ in case.given]).double()
    truth = vectors.sum(0)
    steps = vectors.view(case.size, BLOCKS, BLOCK).abs().amax(2) / 127  # of each rank and block
    allowed = 0.501 * steps.sum(0).repeat_interleave(BLOCK) + 1e-6 * vectors.abs().sum(0)
    for rank, got in enumerate(case.results):
        if not isinstance(got, torch.Tensor) or got.shape != truth.shape:
            what = list(got.shape) if isinstance(got, torch.Tensor) else repr(got)
            raise CheckFailed(f"rank {rank}: expected a tensor {list(truth.shape)}, got {what}")
        if not got.isfinite().all():
            raise CheckFailed(f"rank {rank}: there are numbers that are not finite; a block is 0")
        error = (got.double() - truth).abs() - allowed
        if (error > 0).any():
            at = int(error.argmax())
            raise CheckFailed(
                f"rank {rank}: the sum at {at} should be {truth[at].item():.6g}, got "
                f"{got[at].item():.6g}; half a step of each rank allows {allowed[at].item():.2g}"
            )


def check_agreement(case: Case) -> None:
    for rank, got in enumerate(case.results):
        if not torch.equal(got, case.results[0]):
            raise CheckFailed(f"rank {rank} has another result than rank 0: models would drift")


def check_traffic(case: Case) -> None:
    """One code per number and one float32 per block to each other rank; nothing else."""
    allowed = (case.size - 1) * BLOCKS * (BLOCK + 4)
    for rank, sent in enumerate(case.sent):
        total = sum(one.num_bytes for one in sent)
        if total != allowed:
            calls = "; ".join(str(one) for one in sent) or "nothing"
            raise CheckFailed(
                f"rank {rank} of {case.size} sent {total:,} bytes ({calls}); expected {allowed:,}:"
                f" a byte per number and 4 per block, to each of the others"
            )


def solution(vector, block, axis):
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    all_codes = all_gather(codes, axis).view(axis.size, *codes.shape)
    all_scales = all_gather(scale, axis).view(axis.size, *scale.shape)
    return (all_codes * all_scales).sum(0).flatten()


@fails(
    "result",
    "Each rank multiplied its own vector: nothing was sent.",
)
def wrong_keeps_to_itself(vector, block, axis):
    return vector * axis.size


@fails(
    "result",
    "One scale for the whole vector: each block needs its own.",
)
def wrong_one_scale_for_all(vector, block, axis):
    scale = vector.abs().max() / 127
    codes = (vector / scale).round().to(torch.int8)
    codes = all_gather(codes, axis).view(axis.size, -1)
    return (codes * all_gather(scale, axis)[:, None]).sum(0)


@fails(
    "result",
    "Codes were added as int8, which overflows: decode, then add.",
)
def wrong_adds_codes(vector, block, axis):
    """Even with a scale that all share, a sum of four int8 is no int8."""
    blocks = vector.view(-1, block)
    scale = all_reduce(blocks.abs().amax(1, keepdim=True) / 127, axis, "max")
    codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    every = all_gather(codes, axis).view(axis.size, *codes.shape)
    return (every.sum(0, dtype=torch.int8) * scale).flatten()


@fails(
    "result",
    "Codes are cut off: round() before .to(torch.int8).",
)
def wrong_cuts_instead_of_rounding(vector, block, axis):
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-38)).to(torch.int8)
    every = all_gather(codes, axis).view(axis.size, *codes.shape)
    return (every * all_gather(scale, axis).view(axis.size, *scale.shape)).sum(0).flatten()


@fails(
    "agreement",
    "Each rank adds its own vector unrounded, so the ranks get different sums.",
)
def wrong_spares_its_own_rounding(vector, block, axis):
    """Better for one rank, but every rank then has a sum, and a model, of its own."""
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    every = all_gather(codes, axis).view(axis.size, *codes.shape)
    values = every * all_gather(scale, axis).view(axis.size, *scale.shape)
    values[axis.rank] = blocks
    return values.sum(0).flatten()


@fails(
    "traffic",
    "Decoded numbers travel, 4 bytes each: send codes and scales.",
)
def wrong_decodes_before_sending(vector, block, axis):
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return all_reduce(((blocks / scale.clamp(min=1e-38)).round() * scale).flatten(), axis)


@fails(
    "traffic",
    "A scale for each number: one per block is enough.",
)
def wrong_a_scale_per_number(vector, block, axis):
    scale = vector.abs() / 127
    codes = (vector / scale.clamp(min=1e-38)).round().to(torch.int8)
    every = all_gather(codes, axis).view(axis.size, -1)
    return (every * all_gather(scale, axis).view(axis.size, -1)).sum(0)


@fails(
    "result",
    "The average of the ranks, where their sum is asked for.",
)
def wrong_averages(vector, block, axis):
    return solution(vector, block, axis) / axis.size


@fails(
    "result",
    "Codes of all ranks are decoded with this rank's scales: gather the scales, too.",
)
def wrong_decodes_with_its_own_scales(vector, block, axis):
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    return (all_gather(codes, axis).view(axis.size, *codes.shape) * scale).sum(0).flatten()


@fails(
    "result",
    "Codes were added as int8, which overflows: decode, then add.",
)
def wrong_all_reduces_codes(vector, block, axis):
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    return (all_reduce(codes, axis) * scale).flatten()


@fails(
    "result",
    "128 is no int8, and becomes -128: divide the largest by 127.",
)
def wrong_divides_by_128(vector, block, axis):
    blocks = vector.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 128
    codes = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    every = all_gather(codes, axis).view(axis.size, *codes.shape)
    return (every * all_gather(scale, axis).view(axis.size, *scale.shape)).sum(0).flatten()
