"""The order of interleaved 1F1B.

Rank r holds the stages r, p + r, 2p + r ... A round is p microbatches through its first stage, the
same ones through its second, and so on; backwards the same way, last stage first. What is left is
1F1B with a longer warm-up: (v - 1) p forwards until the last stage of the rank is reached, and two
for every rank that follows.
Source: Narayanan et al. 2021 (2104.04473), section 2.2.
"""

import torch

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live, validate
from minipar.parallel.pipeline.simulate import Costs, simulate

LEVEL, MINUTES = "hard", 30
GOOD = "1F1B's bubble divided by v, with at most (v-1)p + 2(p-r) - 1 stage activations on rank r"
PRAISE = "Each stage is v times thinner, so filling and draining the pipeline takes v times less."
SIZES = (1,)


def given(size, random):
    """Triples (p, m, v), m a multiple of p and at least 2p."""

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    ranks = [draw(2, 4), draw(4, 6)]
    return [([(p, p * draw(2, 4), v) for p, v in zip(ranks, (3, 2), strict=True)],)] * size


def run(answer, axis, questions):
    """For each (p, m, v) the rows of all ranks."""
    return [[list(answer(rank, p, m, v)) for rank in range(p)] for p, m, v in questions]


def _schedules(case: Case) -> list[tuple[Schedule, int]]:
    made = []
    for (p, m, v), rows in zip(case.given[0][0], case.results[0], strict=True):
        try:
            actions = tuple(tuple(Action.parse(str(word)) for word in row) for row in rows)
            schedule = Schedule("yours", m, tuple(range(p)) * v, actions)
            validate(schedule)
        except ValueError as error:
            raise CheckFailed(f"p={p}, m={m}, v={v}: {error}") from None
        made.append((schedule, v))
    return made


def check_valid(case: Case) -> None:
    _schedules(case)


def check_bubble(case: Case) -> None:
    for schedule, v in _schedules(case):
        p, m = schedule.num_ranks, schedule.num_microbatches
        costs = Costs(*([[1.0] * p * v] * 3))  # F, I and W of each stage
        took, best = simulate(schedule, costs).duration, 3 * (m * v + p - 1)
        if took > best:
            raise CheckFailed(
                f"p={p}, m={m}, v={v}: with F = 1 and B = 2 for each stage the step takes "
                f"{took:g}; {best} are enough"
            )


def check_memory(case: Case) -> None:
    for schedule, v in _schedules(case):
        p, m = schedule.num_ranks, schedule.num_microbatches
        for rank, held in enumerate(peak_live(schedule)):
            bound = min(m * v, (v - 1) * p + 2 * (p - rank) - 1)
            if held > bound:
                raise CheckFailed(
                    f"p={p}, m={m}, v={v}: rank {rank} holds {held} stage activations at once; "
                    f"{bound} are enough"
                )


def solution(rank, p, m, v):
    stages = [rank + p * chunk for chunk in range(v)]
    rounds = [range(first, first + p) for first in range(0, m, p)]
    forward = [f"{s}F{i}" for part in rounds for s in stages for i in part]
    backward = [f"{s}B{i}" for part in rounds for s in reversed(stages) for i in part]
    warmup = (v - 1) * p + 2 * (p - 1 - rank)
    return _one_f_one_b(forward, backward, warmup)


def _one_f_one_b(forward, backward, warmup):
    order = forward[:warmup]
    late = forward[warmup:]
    for i, action in enumerate(backward):
        order += late[i : i + 1] + [action]
    return order


@fails(
    "valid",
    "The list is empty.",
)
def wrong_says_nothing(rank, p, m, v):
    return []


@fails(
    "valid",
    "Backward begins with the first stage: gradients come from the last.",
)
def wrong_goes_backward_through_the_first_stage_first(rank, p, m, v):
    stages = [rank + p * chunk for chunk in range(v)]
    rounds = [range(first, first + p) for first in range(0, m, p)]
    forward, backward = (
        [f"{s}{kind}{i}" for part in rounds for s in stages for i in part] for kind in "FB"
    )
    return _one_f_one_b(forward, backward, (v - 1) * p + 2 * (p - 1 - rank))


@fails(
    "valid",
    "The warm-up is that of plain 1F1B: too short for v stages per rank.",
)
def wrong_warms_up_as_plain_1f1b(rank, p, m, v):
    stages = [rank + p * chunk for chunk in range(v)]
    rounds = [range(first, first + p) for first in range(0, m, p)]
    forward = [f"{s}F{i}" for part in rounds for s in stages for i in part]
    backward = [f"{s}B{i}" for part in rounds for s in reversed(stages) for i in part]
    return _one_f_one_b(forward, backward, p - 1 - rank)


@fails(
    "bubble",
    "Each round drains before the next begins: let them follow at once.",
)
def wrong_runs_one_round_after_the_other(rank, p, m, v):
    """Every round is a little pipeline that fills and drains."""
    order = []
    for first in range(0, m, p):
        part = solution(rank, p, p, v)
        parsed = [Action.parse(word) for word in part]
        order += [f"{a.stage}{a.kind}{a.microbatch + first}" for a in parsed]
    return order


@fails(
    "memory",
    "All forwards come first, so that too much is held.",
)
def wrong_is_breadth_first(rank, p, m, v):
    stages = [rank + p * chunk for chunk in range(v)]
    forward = [f"{s}F{i}" for s in stages for i in range(m)]
    return forward + [f"{s}B{i}" for s in reversed(stages) for i in range(m)]
