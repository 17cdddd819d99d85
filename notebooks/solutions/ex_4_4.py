"""The outer step of DiLoCo.

Each rank has trained alone for a while. How far it went from where all began is its outer gradient;
the average of these over the ranks is a direction in which all agree to go, with Nesterov momentum.
Source: Douillard et al. 2023 (2311.08105), algorithm 1.
"""

import torch

from minipar.comm.collectives import all_gather, all_reduce, wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 20
GOOD = "the right point after every round on all ranks, momentum included, one all-reduce each"
PRAISE = "One all-reduce in a hundred steps is all that DiLoCo needs of a link."
SIZES = (4, 3)

ROUNDS, LENGTH = 3, 24
LR, MOMENTUM = 0.7, 0.9


def given(size, random):
    """A common start [N], and for each rank and round the way that it walks alone, [N]."""
    start = torch.randn(LENGTH, generator=random, dtype=torch.float64)
    shape = size, ROUNDS, LENGTH
    ways = torch.randn(shape, generator=random, dtype=torch.float64)
    return [(start, list(mine)) for mine in ways]


def run(answer, axis, start, ways):
    outer, velocity, seen = start.clone(), torch.zeros_like(start), []
    for way in ways:
        own = outer + way  # what some inner steps have made of it
        out = answer(outer.clone(), own, velocity.clone(), LR, MOMENTUM, axis)
        if not isinstance(out, tuple) or len(out) != 2:
            raise CheckFailed("return (outer, velocity), two tensors")
        outer, velocity = out
        seen.append(outer)
    return seen


def check_result(case: Case) -> None:
    outer = case.given[0][0].clone()
    velocity = torch.zeros_like(outer)
    points = []
    for step in range(ROUNDS):
        gradient = -torch.stack([ways[step] for _, ways in case.given]).mean(0)
        velocity = MOMENTUM * velocity + gradient
        outer = outer - LR * (gradient + MOMENTUM * velocity)
        points.append(outer)
    case.expect_close([points] * case.size, "the point after round")


def check_traffic(case: Case) -> None:
    num_bytes = wire_bytes("all_reduce", 8 * LENGTH, case.size)
    for rank in range(case.size):
        case.expect_sent(rank, [Sent("all_reduce", num_bytes)] * ROUNDS)


def solution(outer, own, velocity, lr, momentum, axis):
    gradient = all_reduce(outer - own, axis, "avg")
    velocity = momentum * velocity + gradient
    return outer - lr * (gradient + momentum * velocity), velocity


@fails(
    "result",
    "Each rank steps along its own way: nothing was sent.",
)
def wrong_sends_nothing(outer, own, velocity, lr, momentum, axis):
    gradient = outer - own
    velocity = momentum * velocity + gradient
    return outer - lr * (gradient + momentum * velocity), velocity


@fails(
    "result",
    "The step goes the wrong way: the gradient is outer - own.",
)
def wrong_uphill(outer, own, velocity, lr, momentum, axis):
    """A gradient points away from where the ranks went."""
    gradient = all_reduce(own - outer, axis, "avg")
    velocity = momentum * velocity + gradient
    return outer - lr * (gradient + momentum * velocity), velocity


@fails(
    "result",
    "Plain momentum: Nesterov steps along gradient + momentum * the new velocity.",
)
def wrong_plain_momentum(outer, own, velocity, lr, momentum, axis):
    """Heavy ball, where Nesterov looks one step ahead."""
    velocity = momentum * velocity + all_reduce(outer - own, axis, "avg")
    return outer - lr * velocity, velocity


@fails(
    "result",
    "The ranks' ways are summed: take their average.",
)
def wrong_sums(outer, own, velocity, lr, momentum, axis):
    gradient = all_reduce(outer - own, axis)
    velocity = momentum * velocity + gradient
    return outer - lr * (gradient + momentum * velocity), velocity


@fails(
    "result",
    "The step starts from own, where ranks differ: start from outer.",
)
def wrong_starts_from_its_own(outer, own, velocity, lr, momentum, axis):
    gradient = all_reduce(outer - own, axis, "avg")
    velocity = momentum * velocity + gradient
    return own - lr * (gradient + momentum * velocity), velocity


@fails(
    "traffic",
    "All ways are gathered, then averaged: an all-reduce sends less.",
)
def wrong_gathers_everybody(outer, own, velocity, lr, momentum, axis):
    gradient = all_gather(outer - own, axis).view(axis.size, -1).mean(0)
    velocity = momentum * velocity + gradient
    return outer - lr * (gradient + momentum * velocity), velocity


@fails(
    "result",
    "The next round starts from the old velocity: return the new one.",
)
def wrong_returns_the_old_velocity(outer, own, velocity, lr, momentum, axis):
    outer, _ = solution(outer, own, velocity, lr, momentum, axis)
    return outer, velocity


@fails(
    "result",
    "The average was not used: all_reduce returns it.",
)
def wrong_drops_the_average(outer, own, velocity, lr, momentum, axis):
    gradient = outer - own
    all_reduce(gradient, axis, "avg")
    velocity = momentum * velocity + gradient
    return outer - lr * (gradient + momentum * velocity), velocity
