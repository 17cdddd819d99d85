"""The average of everybody's numbers.

Every rank has numbers of its own, some have more and some have none. A sum and a count from each
rank are enough: their all-reduce gives both for all ranks together, and the mean is their quotient.
"""

import torch

from minipar.comm.collectives import all_gather, all_reduce, wire_bytes
from minipar.lab.exercises import Case, Sent, fails

LEVEL, MINUTES = "easy", 10
GOOD = "the mean of all numbers on every rank, after a single all-reduce of two of them"
PRAISE = "Two numbers travelled instead of all. Losses are averaged over tokens in the same way."
SIZES = (4, 3)

MOST = 9  # numbers that a rank may have


def given(size, random):
    """For each rank another count of numbers, and none for one of them."""
    counts = [0, *(torch.randperm(MOST, generator=random)[: size - 1] + 1).tolist()]
    order = torch.randperm(size, generator=random).tolist()
    return [(torch.randn(counts[i], generator=random, dtype=torch.float64),) for i in order]


def check_result(case: Case) -> None:
    mean = torch.cat([numbers for (numbers,) in case.given]).mean()
    case.expect_close([mean] * case.size, "the mean")


def check_traffic(case: Case) -> None:
    two_numbers = Sent("all_reduce", wire_bytes("all_reduce", 2 * 8, case.size))
    for rank, sent in enumerate(case.sent):
        if len(sent) > 1 or sum(one.num_bytes for one in sent) > two_numbers.num_bytes:
            case.expect_sent(rank, [two_numbers])


def solution(numbers, axis):
    own = torch.tensor([numbers.sum(), len(numbers)], dtype=numbers.dtype)
    total, count = all_reduce(own, axis)
    return total / count


@fails(
    "result",
    "This is the mean of each rank's own numbers: did the ranks talk?",
)
def wrong_sends_nothing(numbers, axis):
    return numbers.mean()


@fails(
    "result",
    "This is a mean of means: a rank with few numbers weighs as much as one with many.",
)
def wrong_is_a_mean_of_means(numbers, axis):
    return all_reduce(numbers.mean().nan_to_num(), axis) / axis.size


@fails(
    "result",
    "A mean of the means of those who have any: sum and count first, divide last.",
)
def wrong_leaves_out_who_has_none(numbers, axis):
    mean, present = all_reduce(torch.stack([numbers.mean().nan_to_num(), _any(numbers)]), axis)
    return mean / present


def _any(numbers):
    return torch.tensor(float(len(numbers) > 0), dtype=numbers.dtype)


@fails(
    "traffic",
    "Sum and count travel in two calls: put both into one tensor.",
)
def wrong_asks_twice(numbers, axis):
    count = torch.tensor(len(numbers), dtype=numbers.dtype)
    return all_reduce(numbers.sum(), axis) / all_reduce(count, axis)


@fails(
    "traffic",
    "All numbers are sent: two are enough, a sum and a count.",
)
def wrong_sends_all_numbers(numbers, axis):
    padded = torch.full((MOST,), torch.nan, dtype=numbers.dtype)
    padded[: len(numbers)] = numbers
    return all_gather(padded, axis).nanmean()


@fails(
    "result",
    "The sum was not used: all_reduce returns it, and leaves its argument as it was.",
)
def wrong_drops_the_result(numbers, axis):
    own = torch.tensor([numbers.sum(), len(numbers)], dtype=numbers.dtype)
    all_reduce(own, axis)
    return own[0] / own[1].clamp(min=1)


@fails(
    "result",
    "The sum was not used: all_reduce returns it, and leaves its argument as it was.",
)
def wrong_drops_the_result_and_divides_by_0(numbers, axis):
    own = torch.tensor([numbers.sum(), len(numbers)], dtype=numbers.dtype)
    all_reduce(own, axis)
    return own[0] / own[1]


@fails(
    "result",
    "Divided by the number of ranks: divide by the count of all numbers.",
)
def wrong_divides_by_the_ranks(numbers, axis):
    return all_reduce(numbers.sum(), axis) / axis.size
