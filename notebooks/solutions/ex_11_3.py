"""Diagnose: a loss that looks fine, and experts whose gradients are ep times too large.

An expert has seen the tokens of all ranks of ep when its backward is over; what is left to sum are
the ranks that have copies of it. The mean, however, is over all ranks that have tokens.
Source: pytorch/pytorch#160285.
"""

import torch
import torch.distributed as dist

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, Sent, fails

LEVEL, MINUTES = "medium", 20
GOOD = "the mean over all ranks' tokens, for one all-reduce over the ranks with copies"
PRAISE = "Adam would have hidden this: it divides a constant factor away."
MESH = {"dp": 3, "ep": 2}

LENGTH = 6


def given(size, random):
    """For each rank: the gradient of its experts, summed over the tokens of the ranks of ep."""
    draws = torch.randn(size, LENGTH, generator=random, dtype=torch.float64)
    return [(draws[rank].clone(),) for rank in range(size)]


def check_result(case: Case) -> None:
    grads = torch.stack([gradient for (gradient,) in case.given])  # rank = 2 dp + ep
    mean = grads.view(*MESH.values(), LENGTH).sum(0) / case.size
    case.expect_close([mean[rank % 2] for rank in range(case.size)], "the gradient")


def check_traffic(case: Case) -> None:
    one = Sent("all_reduce", wire_bytes("all_reduce", 8 * LENGTH, MESH["dp"]))
    for rank in range(case.size):
        case.expect_sent(rank, [one])


def solution(gradient, dp, ep):
    dist.all_reduce(gradient, group=dp.group)
    return gradient / (dp.size * ep.size)


@fails(
    "result",
    "Exactly ep times too large: divide by the ranks of ep as well.",
)
def wrong_averages_over_its_copies(gradient, dp, ep):
    """The mean that data parallelism takes by itself: ep times too large."""
    dist.all_reduce(gradient, group=dp.group)
    return gradient / dp.size


@fails(
    "result",
    "The mean has another size: divide by the number of all ranks, dp.size * ep.size.",
)
def wrong_takes_a_square_mesh_for_granted(gradient, dp, ep):
    dist.all_reduce(gradient, group=dp.group)
    return gradient / ep.size**2


@fails(
    "result",
    "Summed over ep as well: other experts' gradients are mixed in.",
)
def wrong_sums_over_all_ranks(gradient, dp, ep):
    """The group of the dense layers: gradients of different experts are mixed."""
    dist.all_reduce(gradient, group=dp.group)
    dist.all_reduce(gradient, group=ep.group)
    return gradient / (dp.size * ep.size)


@fails(
    "result",
    "Nothing was summed: copies along dp have seen other tokens.",
)
def wrong_sums_nothing(gradient, dp, ep):
    return gradient / (dp.size * ep.size)


@fails(
    "result",
    "Summed, and not divided: the mean is over the tokens of all ranks, dp.size * ep.size.",
)
def wrong_divides_nothing(gradient, dp, ep):
    dist.all_reduce(gradient, group=dp.group)
    return gradient


@fails(
    "result",
    "Summed over ep, whose ranks hold other experts: the copies are along dp.",
)
def wrong_sums_over_ep(gradient, dp, ep):
    dist.all_reduce(gradient, group=ep.group)
    return gradient / (dp.size * ep.size)
