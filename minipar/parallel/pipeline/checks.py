"""Is a schedule right? Every dependency met, nothing missing, no deadlock, memory as promised.

Checked before a process starts, from the lists alone. A wrong schedule would not raise by itself:
ranks would wait for each other for ever, or train on a part of the gradient. No torch in this file.

A message can have two meanings. *Non-blocking*: a send returns at once, and a rank waits where it
needs the result; then only the computing actions matter. *Blocking*: a send returns when its
receive has begun. Any library may send in this way once messages are large. So a schedule without
messages is checked under the first meaning, and a schedule with messages under the second one.
`simulate.lower` places messages so that both work.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from minipar.parallel.pipeline.actions import COMPUTE, MESSAGES, Action, Schedule


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """The computing actions that have to end before this one starts, on whichever rank.

    Where a stage may have either B or I, both are named; a schedule holds one of them.
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
    """Per rank, how many microbatches its stages hold at most: from F to the end of B or W.

    In units of one stage's activations of one microbatch, 1/v of a rank's share of the model. With
    a split backward, W still needs the input of each layer, so that I frees nothing here.
    """
    return [max((held for _, held in _live(row)), default=0) for row in schedule.actions]


def _live(row: Iterable[Action]) -> Iterator[tuple[Action, int]]:
    held = 0
    for action in row:
        held += action.kind == "F"
        yield action, held
        held -= action.kind in ("B", "W")


# ---------------------------------------------------------------------- validate
def validate(schedule: Schedule, max_live: int | None = None) -> None:
    """Raise ValueError, which names the action at fault, unless the schedule can be run.

    Checked in this order. Each action is on the rank of its stage, once. Every stage runs F of
    every microbatch of its copy, and B, or I and W; else the optimizer would step without a part of
    the gradient. The stages of a rank do things in order. Each message, if there are any, is sent
    after the action that makes it and received before the action that needs it, in the order sent.
    No rank waits for ever. The stages of a rank hold at most `max_live` microbatches, as
    `peak_live` counts, or as many as the schedule promises.
    """
    _check_actions(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    if schedule.is_lowered:
        _check_messages(schedule)
    _check_deadlock(schedule)
    bounds = schedule.max_live if max_live is None else (max_live,) * schedule.num_ranks
    for rank, (bound, row) in enumerate(zip(bounds, schedule.actions, strict=False)):
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
            if action.kind not in (*COMPUTE, *MESSAGES):
                kinds = ", ".join((*COMPUTE, *MESSAGES))
                raise ValueError(
                    f"{action} on rank {rank}: there is no kind {action.kind!r}; use one of {kinds}"
                )
            if not (0 <= action.stage < stages and 0 <= action.microbatch < m):
                raise ValueError(
                    f"{action} on rank {rank}: there are {stages} stages, {m} microbatches"
                )
            if action.stage not in (path := schedule.path(action.microbatch)):
                raise ValueError(
                    f"{action} on rank {rank}: microbatch {action.microbatch} goes through the "
                    f"stages {path.start}-{path.stop - 1}"
                )
            if (owner := schedule.rank_of[action.stage]) != rank:
                raise ValueError(f"{action} is on rank {rank}, but its stage on rank {owner}")
            if action in seen:
                raise ValueError(f"{action} is on rank {rank} twice")
            seen.add(action)


def _check_complete(schedule: Schedule) -> None:
    exists = {action for row in schedule.actions for action in row}
    for i in range(schedule.num_microbatches):
        for stage in schedule.path(i):
            f, b, inputs, w = every = [Action(stage, kind, i) for kind in "FBIW"]
            has_f, has_b, has_i, has_w = (action in exists for action in every)
            where = f"on rank {schedule.rank_of[stage]}"
            if not has_f:
                raise ValueError(f"{f} is missing {where}: every stage sees every microbatch")
            if has_b and (has_i or has_w):
                other = inputs if has_i else w
                raise ValueError(f"{other} {where} repeats a part of {b}, which is I and W in one")
            if not has_b and not has_i:
                raise ValueError(f"{b} (or {inputs} and {w}) is missing {where}")
            if has_i and not has_w:
                raise ValueError(f"{w} is missing {where}: the optimizer would step without it")


def _check_order(schedule: Schedule) -> None:
    """On one rank, an action stands after the actions of its own stage that it needs."""
    for rank, row in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in row:
            for needed in needs(schedule, action) if action.computes else ():
                if needed.stage == action.stage and needed not in seen:
                    raise ValueError(f"{action} stands before {needed} on rank {rank}")
            seen.add(action)


def _check_messages(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by rank and peer, in order
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        at = {action: i for i, action in enumerate(row)}
        wanted = set()
        for action in filter(lambda action: action.computes, row):
            takes, makes = schedule.takes(action), schedule.makes(action)
            for message in filter(schedule.travels, (takes, makes)):
                wanted.add(message)
                if message not in at:
                    needs_it = "needs what it receives" if message == takes else "is to be sent"
                    raise ValueError(f"{message} is missing on rank {rank}: {action} {needs_it}")
                if message == takes and at[message] > at[action]:
                    raise ValueError(f"{message} stands after {action}, which needs it")
                if message == makes and at[message] < at[action]:
                    raise ValueError(f"{message} stands before {action}, which makes it")
        for message in row:
            if message.computes:
                continue
            if message not in wanted:
                raise ValueError(f"{message} on rank {rank}: no rank needs this message")
            both = sent if message.kind[0] == "S" else received
            both[rank, schedule.peer(message)].append(message)
    for (rank, peer), messages in sent.items():
        for send, receive in zip(messages, received[peer, rank], strict=True):
            if send.twin != receive:
                raise ValueError(f"rank {peer} awaits {receive} where rank {rank} sends {send}")


def _check_deadlock(schedule: Schedule) -> None:
    """Advance every rank as far as it gets, again and again; raise when none gets any further."""
    rows = [iter(row) for row in schedule.actions]
    heads = [next(row, None) for row in rows]
    exists = {action for row in schedule.actions for action in row}
    done: set[Action] = set()

    def waits_for(action: Action) -> str:
        """Return the reason why a rank with `action` next waits; "" if it can go on."""
        if not action.computes:  # blocking: the other rank has to be at the other end
            peer = schedule.peer(action)
            return "" if action.twin in done or heads[peer] == action.twin else f"rank {peer}"
        if schedule.is_lowered:  # messages, which stand before it, have done the waiting
            return ""
        missing = (n for n in needs(schedule, action) if n in exists and n not in done)
        return next((f"{n} on rank {schedule.rank_of[n.stage]}" for n in missing), "")

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while (action := heads[rank]) is not None and not waits_for(action):
                done.add(action)
                heads[rank] = next(row, None)
                moved = True
    stuck = [(rank, action) for rank, action in enumerate(heads) if action is not None]
    if stuck:
        what = "deadlock with blocking messages" if schedule.is_lowered else "deadlock"
        waits = "; ".join(f"rank {rank} at {a} for {waits_for(a)}" for rank, a in stuck)
        raise ValueError(f"{what}: {waits}")
