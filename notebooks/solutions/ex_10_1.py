"""The order of 1F1B on every rank.

Rank r is followed by p - 1 - r stages. It starts with so many forwards, because the first backward
cannot come back to it earlier; from then on every forward is paid for with a backward.
Source: Narayanan et al. 2020 (2006.09503), PipeDream-Flush; Narayanan et al. 2021 (2104.04473).
"""

import torch

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live, validate
from minipar.parallel.pipeline.simulate import simulate

LEVEL, MINUTES = "easy", 15
GOOD = "the step is as short as GPipe's, and rank r never holds more than p - r microbatches"
PRAISE = "This order, in one form or another, trains most large models."
SIZES = (1,)


def given(size, random):
    """Pairs (p, m): one with more microbatches than ranks, one with fewer, one with one each."""
    few, many = (torch.randperm(4, generator=random)[:2] + 2).sort().values.tolist()
    more = int(torch.randint(many + 1, 3 * many, (), generator=random))
    return [([(many, more), (many + 1, few), (1, 3)],)] * size


def run(answer, axis, questions):
    """For each (p, m) the rows of all ranks."""
    return [[list(answer(rank, p, m)) for rank in range(p)] for p, m in questions]


def _schedules(case: Case) -> list[Schedule]:
    made = []
    for (p, m), rows in zip(case.given[0][0], case.results[0], strict=True):
        try:
            actions = tuple(tuple(Action.parse(str(word)) for word in row) for row in rows)
            made.append(Schedule("yours", m, tuple(range(p)), actions))
            validate(made[-1])
        except ValueError as error:
            raise CheckFailed(f"p={p}, m={m}: {error}") from None
    return made


def check_valid(case: Case) -> None:
    _schedules(case)


def check_memory(case: Case) -> None:
    for schedule in _schedules(case):
        p, m = schedule.num_ranks, schedule.num_microbatches
        for rank, held in enumerate(peak_live(schedule)):
            if held > min(m, p - rank):
                raise CheckFailed(
                    f"p={p}, m={m}: rank {rank} holds {held} microbatches at once; "
                    f"{min(m, p - rank)} are enough"
                )


def check_bubble(case: Case) -> None:
    for schedule in _schedules(case):
        p, m = schedule.num_ranks, schedule.num_microbatches
        took, best = simulate(schedule).duration, 3 * (m + p - 1)
        if took > best:
            raise CheckFailed(
                f"p={p}, m={m}: with F = 1 and B = 2 the step takes {took:g}; {best} are enough"
            )


def solution(rank, p, m):
    warmup = min(m, p - 1 - rank)
    order = [f"{rank}F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            order.append(f"{rank}F{warmup + i}")
        order.append(f"{rank}B{i}")
    return order


def _with_warmup(rank, m, warmup):
    warmup = max(0, min(m, warmup))
    order = [f"{rank}F{i}" for i in range(warmup)]
    for i in range(m):
        order += [f"{rank}F{warmup + i}"] * (warmup + i < m) + [f"{rank}B{i}"]
    return order


@fails(
    "valid",
    "The list is empty.",
)
def wrong_says_nothing(rank, p, m):
    return []


@fails(
    "valid",
    "The warm-up has more forwards than there are microbatches.",
)
def wrong_expects_enough_microbatches(rank, p, m):
    """Right for m >= p; for fewer it runs forwards of microbatches that are not there."""
    warmup = p - 1 - rank
    order = [f"{rank}F{i}" for i in range(warmup)]
    for i in range(m):
        order += [f"{rank}F{warmup + i}"] * (warmup + i < m) + [f"{rank}B{i}"]
    return order


@fails(
    "memory",
    "This is GPipe: all forwards first, so that all are held.",
)
def wrong_is_gpipe(rank, p, m):
    return [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)]


@fails(
    "memory",
    "All ranks warm up alike: how many ranks come after rank r?",
)
def wrong_warms_up_alike_on_all_ranks(rank, p, m):
    return _with_warmup(rank, m, p - 1)


@fails(
    "bubble",
    "The warm-up is one forward too short.",
)
def wrong_warms_up_one_too_few(rank, p, m):
    return _with_warmup(rank, m, p - 2 - rank)


@fails(
    "bubble",
    "Each microbatch goes alone: warm up with some forwards first.",
)
def wrong_is_naive(rank, p, m):
    return [f"{rank}{kind}{i}" for i in range(m) for kind in "FB"]
