"""Checks of a schedule: every dependency met, nothing missing, no deadlock.

The checks need the lists alone, before a process starts. A wrong schedule would not raise by
itself: ranks would wait for each other for ever, or train on a part of the gradient. No torch here.

A message can have two meanings. *Non-blocking*: a send returns at once, and a rank waits where it
needs the result; then only the computing actions matter. *Blocking*: a send returns when its
receive has begun. Any library may block in this way if messages are large. So a schedule without
messages is checked under the first meaning, and a schedule with messages under the second one.
`simulate.lower` places messages so that both work.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import accumulate

from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule, slots


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return the actions that must end before `action` starts.

    `2B0` needs `2F0`, and the gradient from stage 3: its receive `2RB0` if the lists hold messages,
    else `3B0` or `3I0`, whichever there is.
    """
    before = {"B": "F", "I": "F", "W": "I", "SF": "F", "SB": "BI"}
    message = schedule.takes(action)
    is_listed = schedule.is_lowered and schedule.travels(message)
    ends = [action] if is_listed or message is None else [action, message.twin]
    wanted = [Action(e.stage, kind, e.microbatch) for e in ends for kind in before.get(e.kind, "")]
    return [needed for needed in wanted if needed in schedule.every] + [message] * is_listed


def advance(schedule: Schedule, paired: bool = False) -> Iterator[tuple[tuple[Action, ...], int]]:
    """Yield each slot (see `slots`) and its rank, as soon as the slot waits for nothing.

    Raises ValueError when no rank gets any further.
    """
    rows = [deque(slots(row, paired)) for row in schedule.actions]
    done: set[Action] = set()

    def waits_for(action: Action) -> Action | None:
        if not action.computes:  # blocking: the other rank must have reached the twin
            other = rows[schedule.peer(action)]
            if action.twin not in done and (not other or action.twin not in other[0]):
                return action.twin
        return next((needed for needed in needs(schedule, action) if needed not in done), None)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row and not any(map(waits_for, row[0])):
                done.update(row[0])
                yield row.popleft(), rank
                moved = True
    first = [(rank, action) for rank, row in enumerate(rows) if row for action in row[0]]
    waits = [f"rank {rank} at {a} for {needed}" for rank, a in first if (needed := waits_for(a))]
    if waits:
        raise ValueError(f"deadlock: {'; '.join(waits)}")


def peak_live(schedule: Schedule) -> list[int]:
    """Return how many microbatches the stages of each rank hold at most, from F to B or W.

    The unit is one stage's activations of one microbatch, 1/v of a rank's share of the model. With
    a split backward, W still needs the input of each layer, so I frees nothing.
    """
    change = {"F": 1, "B": -1, "W": -1}
    rows = ([change.get(action.kind, 0) for action in row] for row in schedule.actions)
    return [max(accumulate(row), default=0) for row in rows]


# ---------------------------------------------------------------------- validate
def validate(schedule: Schedule) -> None:
    """Raise ValueError, which names what is wrong, unless the schedule can be run.

    Each action is on the rank of its stage. Every stage runs F and B, or F, I and W, once for every
    microbatch of its copy. Otherwise the optimizer would step without a part of the gradient. No
    rank waits for ever.
    """
    m = schedule.num_microbatches
    for rank, row in enumerate(schedule.actions):
        for action in row:
            path, own = schedule.path(action.microbatch), schedule.stages_on(rank)
            ends = {action.stage} if action.computes else {action.stage, action.twin.stage}
            is_known = action.microbatch in range(m) and ends <= {*path}
            if not is_known or action.stage not in own:
                raise ValueError(
                    f"{action} on rank {rank}: there are {m} microbatches, this one goes through "
                    f"the stages {path[0]}-{path[-1]}, and this rank has {own}"
                )
    count = Counter(action for row in schedule.actions for action in row)
    for i in range(m):
        for stage in schedule.path(i):
            has = [kind for kind in COMPUTE for _ in range(count[Action(stage, kind, i)])]
            if has not in (["F", "B"], ["F", "I", "W"]):
                why = "needs F B or F I W: the optimizer would step without a part of the gradient"
                has = " ".join(has) or "nothing"
                raise ValueError(f"stage {stage} has {has} for microbatch {i}, and {why}")
    for _ in advance(schedule):
        pass  # until all have ended
