"""The ranks of my group.

Ranks are numbered row by row, so one step along an axis is a step of as many ranks as there are
places on all axes after it: its stride. Go back to coordinate 0, and from there in strides.
"""

import math

import torch

from minipar.comm.mesh import coordinates, groups_along, rank_at
from minipar.lab.cases import calls_of
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "easy", 10
GOOD = "right for every rank and every axis of any mesh, by your own arithmetic"
PRAISE = "From these lists the library makes its process groups, one per axis."
SIZES = (1,)


def given(size, random):
    """Questions about three meshes: for each axis, a rank that is not the first of its group."""
    questions = []
    for _ in range(3):
        names = [("pp", "dp", "tp")[i] for i in torch.randperm(3, generator=random)]
        lengths = (torch.randperm(3, generator=random) + 2).tolist()
        sizes = dict(zip(names, lengths, strict=True))
        for name in sizes:
            groups = groups_along([name], sizes)
            group = groups[int(torch.randint(len(groups), (), generator=random))]
            at = 1 + int(torch.randint(sizes[name] - 1, (), generator=random))
            questions.append((group[at], sizes, name))
    return [(questions,)] * size


def run(answer, axis, questions):
    """Return the answers, and which functions of the library have helped."""
    with calls_of(groups_along, coordinates, rank_at) as called:
        answers = [list(answer(rank, dict(sizes), name)) for rank, sizes, name in questions]
    return answers, sorted(called)


def check_result(case: Case) -> None:
    answers, _ = case.results[0]
    for (rank, sizes, name), got in zip(case.given[0][0], answers, strict=True):
        want = next(list(group) for group in groups_along([name], sizes) if rank in group)
        if got != want:
            raise CheckFailed(f"rank {rank} of {sizes} along {name}: expected {want}, got {got}")


def check_by_hand(case: Case) -> None:
    _, asked = case.results[0]
    if asked:
        raise CheckFailed(f"by your own arithmetic, please: not by {', '.join(asked)}")


def solution(rank, sizes, name):
    names = list(sizes)
    stride = math.prod(sizes[later] for later in names[names.index(name) + 1 :])
    first = rank - rank // stride % sizes[name] * stride
    return [first + k * stride for k in range(sizes[name])]


@fails(
    "result",
    "The list is empty.",
)
def wrong_says_nothing(rank, sizes, name):
    return []


@fails(
    "result",
    "These are neighbours by number, as along the last axis: what is this axis's stride?",
)
def wrong_takes_neighbours(rank, sizes, name):
    first = rank - rank % sizes[name]
    return list(range(first, first + sizes[name]))


@fails(
    "result",
    "The list begins at the rank itself: go back by its own coordinate first.",
)
def wrong_starts_at_itself(rank, sizes, name):
    names = list(sizes)
    stride = math.prod(sizes[later] for later in names[names.index(name) + 1 :])
    return [rank + k * stride for k in range(sizes[name])]


@fails(
    "result",
    "As if the first axis varied fastest: it is the last one that does.",
)
def wrong_counts_column_by_column(rank, sizes, name):
    return solution(rank, dict(reversed(sizes.items())), name)


@fails(
    "by_hand",
    "The library has answered: work it out with // and %.",
)
def wrong_asks_the_library(rank, sizes, name):
    return next(list(group) for group in groups_along([name], sizes) if rank in group)
