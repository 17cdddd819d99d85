"""Stochastic rounding: bf16 weights that still learn, alike on all ranks.

Rounded to the nearest, an update of less than half a step of bf16 is lost, and lost again at the
next step. Rounded up with a probability equal to the part of the step that it fills, it is right on
average. Replicas must throw the same dice, or they drift apart; a shared seed does it, for free.
Source: Gupta et al. 1502.02551, section 3.
"""

import torch

from minipar.comm.collectives import broadcast
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "one of the two neighbours in bf16, right on average, the same on all ranks, nothing sent"
PRAISE = "No master weights: 2 bytes per parameter in place of 4, at the price of some noise."
SIZES = (2,)

ROWS, COPIES = 8, 4096
LOW = 0xFFFF  # the half of a float32's bits that bf16 leaves out


def given(size, random):
    """Weights [8, 4096], all equal in a row; updates as well; one seed for all ranks."""
    sign = torch.randint(2, (ROWS, 1), generator=random) * 2.0 - 1
    weight = (sign * 10 ** (4 * torch.rand(ROWS, 1, generator=random) - 2)).bfloat16()
    gap = _up(weight.float()) - weight.float()
    part = 0.02 + 0.96 * torch.rand(ROWS, 1, generator=random)
    part[0] = 0.0  # what is a number of bf16 stays as it is
    part[1] = 0.1  # nearest would never move it
    part[2] = -part[2]  # towards zero
    part[3] += 2.0  # beyond the next number
    update = (part * gap).expand(ROWS, COPIES).contiguous()
    seed = int(torch.randint(1 << 30, (), generator=random))
    return [(weight.expand(ROWS, COPIES).contiguous(), update, seed)] * size


def run(answer, axis, weight, update, seed):
    torch.manual_seed(seed + 1 + axis.rank)  # other dice on every rank, unless one asks for more
    return answer(weight.clone(), update.clone(), seed, axis)


def _down(x):
    """The neighbour in bf16 towards zero, of a float32."""
    return (x.view(torch.int32) & ~LOW).view(torch.float32)


def _up(x):
    """The neighbour away from zero; of a number of bf16, the next one."""
    return ((x.view(torch.int32) & ~LOW) + LOW + 1).view(torch.float32)


def check_neighbours(case: Case) -> None:
    for rank, (got, (weight, update, _)) in enumerate(zip(case.results, case.given, strict=True)):
        if not isinstance(got, torch.Tensor) or got.dtype != torch.bfloat16:
            what = got.dtype if isinstance(got, torch.Tensor) else repr(got)
            raise CheckFailed(f"rank {rank}: expected a tensor of torch.bfloat16, got {what}")
        exact = weight.float() + update
        low, high = _down(exact), torch.where(exact == _down(exact), exact, _up(exact))
        stray = (got.float() != low) & (got.float() != high)
        if stray.any():
            at = tuple(stray.nonzero()[0].tolist())
            raise CheckFailed(
                f"rank {rank}: {exact[at].item():.8g} lies between {low[at].item():.8g} and "
                f"{high[at].item():.8g}, but became {got[at].item():.8g}"
            )


def check_mean(case: Case) -> None:
    weight, update, _ = case.given[0]
    exact = (weight.float() + update)[:, 0].double()
    gap = (_up(exact.float()) - _down(exact.float())).abs().double()
    for rank, got in enumerate(case.results):
        off = (got.double().mean(1) - exact).abs() / gap  # in steps of bf16
        worst = int(off.argmax())
        if off[worst] > 6 * 0.5 / COPIES**0.5:  # six standard deviations of fair dice
            raise CheckFailed(
                f"rank {rank}: {COPIES} copies of {exact[worst].item():.8g} have the mean "
                f"{got[worst].double().mean().item():.8g}, {off[worst].item():.2f} steps away"
            )


def check_agreement(case: Case) -> None:
    for rank, got in enumerate(case.results):
        apart = int((got != case.results[0]).sum())
        if apart:
            raise CheckFailed(f"{apart} weights of rank {rank} are not those of rank 0")


def check_traffic(case: Case) -> None:
    for rank in range(case.size):
        case.expect_sent(rank, [])


def solution(weight, update, seed, axis):
    dice = torch.Generator().manual_seed(seed)
    exact = (weight.float() + update).view(torch.int32)
    noise = torch.randint(1 << 16, exact.shape, generator=dice, dtype=torch.int32)
    # The lower half of the bits is how far it is to the next number: a carry goes there.
    return ((exact + noise) & ~0xFFFF).view(torch.float32).bfloat16()


def _with_own_dice(weight, update):
    exact = (weight.float() + update).view(torch.int32)
    noise = torch.randint(1 << 16, exact.shape, dtype=torch.int32)
    return ((exact + noise) & ~LOW).view(torch.float32).bfloat16()


@fails(
    "mean",
    "Rounded to the nearest: a small update is lost every time.",
)
def wrong_rounds_to_the_nearest(weight, update, seed, axis):
    """Sends nothing, as it should, but loses every small update."""
    return (weight.float() + update).bfloat16()


@fails(
    "mean",
    "One random number for all elements: each needs its own.",
)
def wrong_throws_one_die_for_all(weight, update, seed, axis):
    dice = torch.Generator().manual_seed(seed)
    exact = (weight.float() + update).view(torch.int32)
    noise = int(torch.randint(1 << 16, (), generator=dice))
    return ((exact + noise) & ~LOW).view(torch.float32).bfloat16()


@fails(
    "mean",
    "Up or down with equal chances: up as often as the step is filled.",
)
def wrong_throws_a_coin(weight, update, seed, axis):
    """Up or down with equal chances, wherever the number lies."""
    dice = torch.Generator().manual_seed(seed)
    exact = weight.float() + update
    coin = torch.randint(2, exact.shape, generator=dice).bool()
    up = torch.where(exact == _down(exact), exact, _up(exact))
    return torch.where(coin, _down(exact), up).bfloat16()


@fails(
    "neighbours",
    "Noise of a fixed size: the result is not always one of the two neighbours.",
)
def wrong_adds_noise_and_rounds(weight, update, seed, axis):
    """Noise of a fixed size is too much for small weights and nothing for large ones."""
    dice = torch.Generator().manual_seed(seed)
    return (weight.float() + update + 0.1 * torch.randn(weight.shape, generator=dice)).bfloat16()


@fails(
    "agreement",
    "The ranks draw different numbers: seed a generator with `seed`.",
)
def wrong_has_dice_of_its_own(weight, update, seed, axis):
    return _with_own_dice(weight, update)


@fails(
    "traffic",
    "One rank sends its weights: with a shared seed nothing needs to be sent.",
)
def wrong_asks_rank_0(weight, update, seed, axis):
    """Right, and as many bytes as the weights have, at every step."""
    return broadcast(_with_own_dice(weight, update), axis, src=0)


@fails(
    "agreement",
    "Each rank has a seed of its own: all take the same, without axis.rank.",
)
def wrong_seeds_by_rank(weight, update, seed, axis):
    return solution(weight, update, seed + axis.rank, axis)


@fails(
    "neighbours",
    "Rounded twice: set the lower 16 bits to zero before .bfloat16().",
)
def wrong_rounds_twice(weight, update, seed, axis):
    dice = torch.Generator().manual_seed(seed)
    exact = (weight.float() + update).view(torch.int32)
    noise = torch.randint(1 << 16, exact.shape, generator=dice, dtype=torch.int32)
    return (exact + noise).view(torch.float32).bfloat16()
