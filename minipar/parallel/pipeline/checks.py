"""Checks of a schedule: every dependency met, nothing missing, no deadlock, memory as promised.

The checks need the lists alone, before a process starts. A wrong schedule would not raise by
itself: ranks would wait for each other for ever, or train on a part of the gradient. No torch here.

A message can have two meanings. *Non-blocking*: a send returns at once, and a rank waits where it
needs the result; then only the computing actions matter. *Blocking*: a send returns when its
receive has begun. Any library may send in this way once messages are large. So a schedule without
messages is checked under the first meaning, and a schedule with messages under the second one.
`simulate.lower` places messages so that both work.
"""

from collections.abc import Iterable, Iterator

from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return the computing actions, on any rank, that must end before `action` starts.

    Where a stage may have B or I, both are in the list; a schedule holds one of them.
    """
    stage, i = action.stage, action.microbatch
    part = schedule.part(stage)
    if action.kind == "F":
        return [Action(stage - 1, "F", i)] if part else []
    if action.kind == "W":
        return [Action(stage, "I", i)]
    after = [Action(stage + 1, kind, i) for kind in "BI"] if part < schedule.num_stages - 1 else []
    return [Action(stage, "F", i), *after]


def peak_live(schedule: Schedule) -> list[int]:
    """Return how many microbatches the stages of each rank hold at most, from F to B or W.

    In units of one stage's activations of one microbatch, 1/v of a rank's share of the model. With
    a split backward, W still needs the input of each layer, so I frees nothing.
    """
    return [max((held for _, held in _live(row)), default=0) for row in schedule.actions]


def _live(row: Iterable[Action]) -> Iterator[tuple[Action, int]]:
    """Yield each action, and the number of microbatches held during the action."""
    held = 0
    for action in row:
        held += action.kind == "F"
        yield action, held
        held -= action.kind in ("B", "W")


# ---------------------------------------------------------------------- validate
def validate(schedule: Schedule) -> None:
    """Raise ValueError, which names the action at fault, unless the schedule can be run.

    Checked in this order. Each action is on the rank of its stage, once. Every stage runs F of
    every microbatch of its copy, and B, or I and W; else the optimizer would step without a part of
    the gradient. Each message, if there are any, is sent after the action that makes it and
    received before the action that needs it. No rank waits for ever. The stages of a rank hold as
    many microbatches as the schedule promises, as `peak_live` counts.
    """
    _check_actions(schedule)
    _check_complete(schedule)
    if schedule.is_lowered:
        _check_messages(schedule)
    _check_deadlock(schedule)
    for rank, (bound, row) in enumerate(zip(schedule.max_live, schedule.actions, strict=False)):
        for action, held in _live(row):
            if held > bound:
                raise ValueError(
                    f"{action} on rank {rank} makes {held} live activations; at most {bound}"
                )


def _check_actions(schedule: Schedule) -> None:
    stages, m, p = len(schedule.rank_of), schedule.num_microbatches, schedule.num_ranks
    if m < 1 or not stages or stages % schedule.copies:
        raise ValueError(
            f"{schedule.name} has {stages} stages in {schedule.copies} equal copies of the model, "
            f"and {m} microbatches; it needs at least one of each"
        )
    if not set(schedule.rank_of) <= set(range(p)):
        raise ValueError(f"stages are on ranks {schedule.rank_of}; there are lists for {p} ranks")
    seen = set()
    for rank, row in enumerate(schedule.actions):
        for action in row:
            where = f"{action} on rank {rank}"
            if not 0 <= action.microbatch < m:
                raise ValueError(f"{where}: there are {m} microbatches")
            if action.stage not in (path := schedule.path(action.microbatch)):
                raise ValueError(
                    f"{where}: microbatch {action.microbatch} goes through the stages "
                    f"{path.start}-{path.stop - 1}"
                )
            if (owner := schedule.rank_of[action.stage]) != rank:
                raise ValueError(f"{where}: its stage is on rank {owner}")
            if action in seen:
                raise ValueError(f"{where}: it is there twice")
            seen.add(action)


def _check_complete(schedule: Schedule) -> None:
    exists = {action for row in schedule.actions for action in row}
    for i in range(schedule.num_microbatches):
        for stage in schedule.path(i):
            has = {kind for kind in COMPUTE if Action(stage, kind, i) in exists}
            wanted = {"F", "I", "W"} if has & {"I", "W"} else {"F", "B"}
            for kind in sorted(wanted ^ has):
                action, where = Action(stage, kind, i), f"on rank {schedule.rank_of[stage]}"
                if kind in wanted:
                    raise ValueError(
                        f"{action} is missing {where}: the optimizer would step without it"
                    )
                raise ValueError(
                    f"{action} {where} is I and W in one; one of them is there as well"
                )


def _check_messages(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        at, wanted = {action: i for i, action in enumerate(row)}, set()
        for action in filter(lambda action: action.computes, row):
            takes, makes = schedule.takes(action), schedule.makes(action)
            for message in filter(schedule.travels, (takes, makes)):
                wanted.add(message)
                if message not in at:
                    raise ValueError(f"{message} is missing on rank {rank}, for {action}")
                if (at[message] < at[action]) != (message == takes):
                    side = "before" if message == takes else "after"
                    raise ValueError(f"{message} must stand {side} {action} on rank {rank}")
        for message in at.keys() - wanted:
            if not message.computes:
                raise ValueError(f"{message} on rank {rank}: no rank needs this message")


def _check_deadlock(schedule: Schedule) -> None:
    """Advance every rank as far as it gets, again and again; raise when none gets any further."""
    rows = [iter(row) for row in schedule.actions]
    heads = [next(row, None) for row in rows]
    exists = {action for row in schedule.actions for action in row}
    done: set[Action] = set()

    def waits_for(action: Action, rank: int) -> str:
        """Return the reason why `rank` waits with `action` next; "" if it can go on."""
        if not action.computes:  # blocking: the other rank has to be at the other end
            peer = schedule.peer(action)
            return "" if action.twin in done or heads[peer] == action.twin else f"rank {peer}"
        for needed in (needed for needed in needs(schedule, action) if needed in exists):
            other = schedule.rank_of[needed.stage]
            # With messages, a receive before the action has waited for other ranks.
            if needed not in done and (other == rank or not schedule.is_lowered):
                return f"{needed} on rank {other}"
        return ""

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while (action := heads[rank]) is not None and not waits_for(action, rank):
                done.add(action)
                heads[rank] = next(row, None)
                moved = True
    stuck = [(rank, action) for rank, action in enumerate(heads) if action is not None]
    if stuck:
        what = "deadlock with blocking messages" if schedule.is_lowered else "deadlock"
        waits = "; ".join(f"rank {rank} at {a} for {waits_for(a, rank)}" for rank, a in stuck)
        raise ValueError(f"{what}: {waits}")
