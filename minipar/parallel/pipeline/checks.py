"""Checks of a schedule: every dependency met, nothing missing, no deadlock.

The checks need the lists alone, before a process starts. A wrong schedule would not raise by
itself: ranks would wait for each other for ever, or train on a part of the gradient. No torch here.

A message can have two meanings. *Non-blocking*: a send returns at once, and a rank waits where it
needs the result; then only the computing actions matter. *Blocking*: a send returns when its
receive has begun. Any library may send in this way once messages are large. So a schedule without
messages is checked under the first meaning, and a schedule with messages under the second one.
`simulate.lower` places messages so that both work.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return the computing actions, on any rank, that must end before `action` starts.

    Where a stage may have B or I, both are in the list; a schedule holds one of them.
    """
    stage, i = action.stage, action.microbatch
    before = {"W": ["I"], "F": []}.get(action.kind, ["F"])
    here = [Action(stage, kind, i) for kind in before]
    message = schedule.takes(action)
    if message is None:
        return here
    return here + [Action(message.twin.stage, k, i) for k in ("F" if action.kind == "F" else "BI")]


def advance(rows: Sequence[deque], must_wait: Callable[[Any, int], Any]) -> Iterator[tuple]:
    """Take items off the rows of all ranks, each as soon as it need not wait; yield item and rank.

    Ends when no rank gets any further: then `rows` hold what is left.
    """
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row and not must_wait(row[0], rank):
                yield row.popleft(), rank
                moved = True


def peak_live(schedule: Schedule) -> list[int]:
    """Return how many microbatches the stages of each rank hold at most, from F to B or W.

    In units of one stage's activations of one microbatch, 1/v of a rank's share of the model. With
    a split backward, W still needs the input of each layer, so I frees nothing.
    """
    change = {"F": 1, "B": -1, "W": -1}
    rows = ([change.get(action.kind, 0) for action in row] for row in schedule.actions)
    return [max(accumulate(row), default=0) for row in rows]


# ---------------------------------------------------------------------- validate
def validate(schedule: Schedule) -> None:
    """Raise ValueError, which names the action at fault, unless the schedule can be run.

    Checked in this order. Each action is on the rank of its stage, once. Every stage runs F of
    every microbatch of its copy, and B, or I and W; else the optimizer would step without a part of
    the gradient. Each message, if there are any, is sent after the action that makes it and
    received before the action that needs it. No rank waits for ever.
    """
    of_messages = [_wrong_messages] if schedule.is_lowered else []
    for check in (_wrong_actions, _missing_actions, *of_messages, _deadlocks):
        for problem in check(schedule):
            raise ValueError(problem)


def _wrong_actions(schedule: Schedule) -> Iterator[str]:
    m, seen = schedule.num_microbatches, set()
    for rank, row in enumerate(schedule.actions):
        for action in row:
            where, i = f"{action} on rank {rank}", action.microbatch
            path = schedule.path(i)
            if not 0 <= i < m:
                yield f"{where}: there are {m} microbatches"
            if action.stage not in path:
                yield f"{where}: microbatch {i} goes through the stages {path[0]}-{path[-1]}"
            if (owner := schedule.rank_of[action.stage]) != rank:
                yield f"{where}: its stage is on rank {owner}"
            if action in seen:
                yield f"{where}: it is there twice"
            seen.add(action)


def _missing_actions(schedule: Schedule) -> Iterator[str]:
    exists = {action for row in schedule.actions for action in row}
    for i in range(schedule.num_microbatches):
        for stage in schedule.path(i):
            where = f"on rank {schedule.rank_of[stage]}"
            has = {kind for kind in COMPUTE if Action(stage, kind, i) in exists}
            wanted = {"F", "I", "W"} if has & {"I", "W"} else {"F", "B"}
            if "B" in has - wanted:
                yield f"{stage}B{i} {where} is I and W in one; one of them is there as well"
            for kind in sorted(wanted - has):
                yield f"{stage}{kind}{i} is missing {where}: the optimizer would step without it"


def _wrong_messages(schedule: Schedule) -> Iterator[str]:
    for rank, row in enumerate(schedule.actions):
        at, wanted = {action: i for i, action in enumerate(row)}, set()
        for action in filter(lambda action: action.computes, row):
            takes, makes = schedule.takes(action), schedule.makes(action)
            for message in filter(schedule.travels, (takes, makes)):
                wanted.add(message)
                if message not in at:
                    yield f"{message} is missing on rank {rank}, for {action}"
                elif (at[message] < at[action]) != (message == takes):
                    side = "before" if message == takes else "after"
                    yield f"{message} must stand {side} {action} on rank {rank}"
        for message in at.keys() - wanted:
            if not message.computes:
                yield f"{message} on rank {rank}: no rank needs this message"


def _deadlocks(schedule: Schedule) -> Iterator[str]:
    rows = [deque(row) for row in schedule.actions]
    exists = {action for row in schedule.actions for action in row}
    done: set[Action] = set()

    def waits_for(action: Action, rank: int) -> str:
        """Return the reason why `rank` waits with `action` next; "" if it can go on."""
        if not action.computes:  # blocking: the other rank has to be at the other end
            peer = schedule.peer(action)
            met = action.twin in done or (rows[peer] and rows[peer][0] == action.twin)
            return "" if met else f"rank {peer}"
        for needed in (needed for needed in needs(schedule, action) if needed in exists):
            other = schedule.rank_of[needed.stage]
            # With messages, a receive before the action has waited for other ranks.
            if needed not in done and (other == rank or not schedule.is_lowered):
                return f"{needed} on rank {other}"
        return ""

    for action, _ in advance(rows, waits_for):
        done.add(action)
    if any(rows):
        what = "deadlock with blocking messages" if schedule.is_lowered else "deadlock"
        stuck = [(rank, row[0]) for rank, row in enumerate(rows) if row]
        waits = "; ".join(f"rank {rank} at {a} for {waits_for(a, rank)}" for rank, a in stuck)
        yield f"{what}: {waits}"
