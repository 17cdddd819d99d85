"""Where W may go.

Nobody waits for a weight gradient, so it may be put off until the memory that it holds is needed:
right before the forward that would hold one microbatch too many. Without another forward to make
room for, one W after each I keeps the rank busy until the next gradient arrives.
Source: Qi et al. 2023 (2401.10241), section 2.1.
"""

import torch

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live, validate
from minipar.parallel.pipeline.schedules import zb_h1
from minipar.parallel.pipeline.simulate import simulate

LEVEL, MINUTES = "medium", 20
GOOD = "a third of 1F1B's bubble where F, I and W take equally long, in the memory of 1F1B"
PRAISE = "Two thirds of the bubble are gone, and no rank holds more than rank 0 did. This is ZB-H1."
SIZES = (1,)


def given(size, random):
    """Pairs (p, m), m more than p: with m = p nobody can hold too many."""
    pairs = []
    for p in (torch.randperm(4, generator=random)[:3] + 2).tolist():
        pairs.append((p, int(torch.randint(p + 1, 3 * p, (), generator=random))))
    return [(pairs,)] * size


def _bare(p, m):
    """Rows of F and I, as many forwards ahead as the memory of p microbatches allows."""
    return [[str(a) for a in row if a.kind != "W"] for row in zb_h1(p, m).actions]


def run(answer, axis, questions):
    """For each (p, m) the rows of all ranks, with W."""
    return [[list(answer(row, p)) for row in _bare(p, m)] for p, m in questions]


def _schedules(case: Case) -> list[Schedule]:
    made = []
    for (p, m), rows in zip(case.given[0][0], case.results[0], strict=True):
        for rank, (row, bare) in enumerate(zip(rows, _bare(p, m), strict=True)):
            if [word for word in row if "W" not in word] != bare:
                raise CheckFailed(f"p={p}, m={m}: F and I of rank {rank} are not as they were")
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
            if held > p:
                raise CheckFailed(
                    f"p={p}, m={m}: rank {rank} holds {held} microbatches at once; at most {p}"
                )


def check_bubble(case: Case) -> None:
    for schedule in _schedules(case):
        p, m = schedule.num_ranks, schedule.num_microbatches
        took, best = simulate(schedule).duration, 3 * m + p - 1
        if took > best:
            raise CheckFailed(
                f"p={p}, m={m}: with F = I = W = 1 the step takes {took:g}; {best} are enough"
            )


def solution(row, bound):
    placed, owed, held = [], [], 0
    forwards_left = sum("F" in action for action in row)
    for action in row:
        if "F" in action:
            if held == bound:
                placed.append(owed.pop(0))
                held -= 1
            held += 1
            forwards_left -= 1
        placed.append(action)
        if "I" in action:
            owed.append(action.replace("I", "W"))
            if not forwards_left:
                placed.append(owed.pop(0))
    return placed + owed


@fails(
    "valid",
    "The list is empty.",
)
def wrong_says_nothing(row, bound):
    return []


@fails(
    "valid",
    "There is no W at all: weights would get no gradient.",
)
def wrong_leaves_w_out(row, bound):
    return row


@fails(
    "valid",
    "The W that are left when the row ends are missing.",
)
def wrong_drops_what_is_owed_at_the_end(row, bound):
    whole = solution(row, bound)
    while "W" in whole[-1]:
        whole = whole[:-1]
    return whole


@fails(
    "memory",
    "All W come last, so that too many microbatches are held.",
)
def wrong_puts_all_w_last(row, bound):
    return row + [action.replace("I", "W") for action in row if "I" in action]


@fails(
    "bubble",
    "W right after I is a whole B again: put it off to where a rank waits.",
)
def wrong_puts_w_right_after_i(row, bound):
    """That is B again: rank r - 1 gets its gradient in time, but nothing fills the cool-down."""
    placed = []
    for action in row:
        placed += [action] + [action.replace("I", "W")] * ("I" in action)
    return placed
