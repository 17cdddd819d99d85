"""Microbatches in proportion to speed, agreed on by all ranks.

A step lasts as long as its slowest rank. Ranks tell each other how long a microbatch takes them;
then each works out the same shares for all. Hand the microbatches out one at a time, each to the
rank that would be done with it first: no other way ends earlier, which rounding proportional shares
cannot promise.
Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies".
"""

from itertools import product

import torch

from minipar.comm.collectives import all_gather
from minipar.lab.cases import whole_numbers
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 20
GOOD = "the same shares on all ranks, of the shortest possible step, for 8 bytes to each other rank"
PRAISE = "The slowest rank no longer decides what the fastest may do."
SIZES = (4, 3)


def given(size, random):
    """For each rank the seconds that one microbatch takes it, and how many there are in all.

    Such that it matters: equal shares are not good enough, nor proportional ones, however rounded.
    """
    while True:
        seconds = (0.5 + 4 * torch.rand(size, generator=random, dtype=torch.float64)).tolist()
        seconds[int(torch.randint(size, (), generator=random))] *= 3  # a straggler
        total = int(torch.randint(2 * size, 4 * size, (), generator=random))
        easy = (shares(seconds, total) for shares in (_evenly, _rounded, _nearest))
        lengths = [_length(shares, seconds) for shares in easy]
        if min(lengths) > 1.01 * _shortest(seconds, total):
            return [(one, total) for one in seconds]


def run(answer, axis, seconds, total):
    return whole_numbers(answer(seconds, total, axis))


def _evenly(seconds, total):
    size = len(seconds)
    return [total // size + (rank < total % size) for rank in range(size)]


def _rounded(seconds, total):
    speed = sum(1 / one for one in seconds)
    shares = [max(1, int(total / one / speed)) for one in seconds]
    shares[seconds.index(max(seconds))] += total - sum(shares)
    return shares


def _nearest(seconds, total):
    speed = sum(1 / one for one in seconds)
    shares = [max(1, round(total / one / speed)) for one in seconds]
    shares[seconds.index(min(seconds))] += total - sum(shares)
    return shares


def _length(shares, seconds):
    return max(share * one for share, one in zip(shares, seconds, strict=True))


def _shortest(seconds, total):
    """By trying them all."""
    *others, last = seconds
    counts = product(range(1, total), repeat=len(others))
    tries = ((*some, total - sum(some)) for some in counts if sum(some) < total)
    return min(_length(shares, [*others, last]) for shares in tries)


def check_result(case: Case) -> None:
    seconds, total = [one for one, _ in case.given], case.given[0][1]
    best = _shortest(seconds, total)
    for rank, got in enumerate(case.results):
        if not isinstance(got, list) or len(got) != case.size:
            raise CheckFailed(f"rank {rank}: expected a list of {case.size} counts, got {got!r}")
        if sum(got) != total or any(count != int(count) or count < 1 for count in got):
            raise CheckFailed(
                f"rank {rank}: {got} must be whole numbers from 1 up that add up to {total}"
            )
        if _length(got, seconds) > best * (1 + 1e-9):
            spoken = ", ".join(f"{one:.2f}" for one in seconds)
            raise CheckFailed(
                f"rank {rank}: with {got} the step takes {_length(got, seconds):.3f} s, where "
                f"{best:.3f} s are possible; a microbatch takes the ranks {spoken} s"
            )


def check_agreement(case: Case) -> None:
    for rank, got in enumerate(case.results):
        if got != case.results[0]:
            raise CheckFailed(f"rank {rank} says {got}, rank 0 says {case.results[0]}")


def check_traffic(case: Case) -> None:
    """A float64 to each other rank; without any, nobody can know."""
    allowed = 8 * (case.size - 1)
    for rank, sent in enumerate(case.sent):
        total = sum(one.num_bytes for one in sent)
        if not 0 < total <= allowed:
            raise CheckFailed(f"rank {rank} sent {total} bytes; expected at most {allowed}")


def _deal(seconds, num_microbatches):
    shares = [1] * len(seconds)
    for _ in range(num_microbatches - len(seconds)):
        done = [(share + 1) * one for share, one in zip(shares, seconds, strict=True)]
        shares[done.index(min(done))] += 1
    return shares


def solution(own_seconds, num_microbatches, axis):
    seconds = all_gather(torch.tensor([own_seconds], dtype=torch.float64), axis).tolist()
    shares = [1] * axis.size
    for _ in range(num_microbatches - axis.size):
        done = [(share + 1) * one for share, one in zip(shares, seconds, strict=True)]
        shares[done.index(min(done))] += 1
    return shares


@fails(
    "result",
    "Shares are even: the ranks have not told each other their seconds.",
)
def wrong_evenly_without_asking(own_seconds, num_microbatches, axis):
    return _evenly([own_seconds] * axis.size, num_microbatches)


@fails(
    "result",
    "Slow ranks get more: seconds per microbatch are the inverse of speed.",
)
def wrong_more_for_the_slow(own_seconds, num_microbatches, axis):
    """Seconds per microbatch are not microbatches per second."""
    seconds = all_gather(torch.tensor([own_seconds], dtype=torch.float64), axis)
    return _deal((1 / seconds).tolist(), num_microbatches)


@fails(
    "result",
    "Rounded in proportion, and the remainder went to the wrong rank.",
)
def wrong_rest_to_the_slowest(own_seconds, num_microbatches, axis):
    """Rounded down in proportion; somebody has to take what remains."""
    seconds = all_gather(torch.tensor([own_seconds], dtype=torch.float64), axis).tolist()
    return _rounded(seconds, num_microbatches)


@fails(
    "result",
    "Proportional shares, rounded, are not always best: deal microbatches out one at a time.",
)
def wrong_rest_to_the_fastest(own_seconds, num_microbatches, axis):
    """Rounded to the nearest, and the fastest takes what remains."""
    seconds = all_gather(torch.tensor([own_seconds], dtype=torch.float64), axis).tolist()
    return _nearest(seconds, num_microbatches)


@fails(
    "result",
    "One share came back: return the list of all.",
)
def wrong_only_its_own_share(own_seconds, num_microbatches, axis):
    seconds = all_gather(torch.tensor([own_seconds], dtype=torch.float64), axis).tolist()
    return _deal(seconds, num_microbatches)[axis.rank]


@fails(
    "traffic",
    "Two numbers per rank are sent: one is enough.",
)
def wrong_tells_everything_twice(own_seconds, num_microbatches, axis):
    both = torch.tensor([own_seconds, 1 / own_seconds], dtype=torch.float64)
    seconds = all_gather(both, axis)[::2].tolist()
    return _deal(seconds, num_microbatches)


@fails(
    "result",
    "Proportional shares, rounded, are not always best: deal microbatches out one at a time.",
)
def wrong_only_rounds(own_seconds, num_microbatches, axis):
    """Rounded to the nearest; their sum may not even be right."""
    speeds = 1 / all_gather(torch.tensor([own_seconds], dtype=torch.float64), axis)
    return (speeds / speeds.sum() * num_microbatches).round().int().tolist()
