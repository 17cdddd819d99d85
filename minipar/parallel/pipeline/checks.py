"""Is a schedule right? Every dependency met, nothing missing, no deadlock, memory as promised.

Checked before a process starts, from the lists alone. A wrong schedule would not raise by itself:
ranks would wait for each other for ever, or train on a part of the gradient. No torch in this file.

A deadlock is looked for under two meanings of a message. *Non-blocking*: a send returns at once,
and a rank waits where it needs what it receives; then only the computing actions matter.
*Blocking*: a send returns when its receive has begun, which is what a send may do in any library
once messages are large. `simulate.lower` places messages so that both work.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

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


def _live(row: Iterable[Action]) -> Iterable[tuple[Action, int]]:
    held = 0
    for action in row:
        held += action.kind == "F"
        yield action, held
        held -= action.kind in ("B", "W")


# ---------------------------------------------------------------------- validate
def validate(schedule: Schedule, max_live: int | None = None) -> None:
    """Raise ValueError, which names the action at fault, unless the schedule can be run.

    Checked in this order: actions are on the rank of their stage, and once; every stage runs F of
    every microbatch of its copy, and B, or I and W (else the optimizer would step without a part of
    the gradient); order on each rank; no deadlock; if there are messages, each is sent once, is
    received once, in the order sent, between what makes and what needs it, and blocking messages do
    not deadlock either; at most `max_live` (or what the schedule promises) microbatches held by the
    stages of a rank, as `peak_live` counts.
    """
    _check_shape(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    _check_progress(schedule)
    if schedule.is_lowered:
        _check_messages(schedule)
        _check_blocking(schedule)
    _check_live(schedule, max_live)


def _check_shape(schedule: Schedule) -> None:
    p = schedule.num_ranks
    if schedule.num_microbatches < 1 or not schedule.rank_of:
        raise ValueError(f"{schedule.name} has no microbatches or no stages; it needs both")
    if schedule.copies < 1 or len(schedule.rank_of) % schedule.copies:
        stages = len(schedule.rank_of)
        raise ValueError(f"{stages} stages cannot be {schedule.copies} copies of a model")
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < p:
            raise ValueError(
                f"stage {stage} is on rank {rank}; there are lists for ranks 0-{p - 1}"
            )
    if schedule.max_live and len(schedule.max_live) != p:
        raise ValueError(f"{len(schedule.max_live)} bounds on live activations for {p} ranks")


def _check_complete(schedule: Schedule) -> None:
    stages, m = len(schedule.rank_of), schedule.num_microbatches
    count: Counter[Action] = Counter()
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind not in (*COMPUTE, *MESSAGES):
                raise ValueError(
                    f"{action} on rank {rank}: there is no kind {action.kind!r}; use one of "
                    f"{_list((*COMPUTE, *MESSAGES))}"
                )
            if not (0 <= action.stage < stages and 0 <= action.microbatch < m):
                raise ValueError(
                    f"{action} on rank {rank}: there are {stages} stages, {m} microbatches"
                )
            if action.stage not in schedule.path(action.microbatch):
                raise ValueError(
                    f"{action} on rank {rank}: microbatch {action.microbatch} goes through the "
                    f"stages {_list(schedule.path(action.microbatch))}"
                )
            if schedule.rank_of[action.stage] != rank:
                owner = schedule.rank_of[action.stage]
                raise ValueError(f"{action} is on rank {rank}, but its stage on rank {owner}")
            count[action] += 1
            if count[action] > 1:
                raise ValueError(f"{action} is on rank {rank} twice")
    for i in range(m):
        for stage in schedule.path(i):
            f, b, inputs, w = (Action(stage, kind, i) for kind in "FBIW")
            where = f"on rank {schedule.rank_of[stage]}"
            if not count[f]:
                raise ValueError(f"{f} is missing {where}: every stage sees every microbatch")
            if count[b] and (count[inputs] or count[w]):
                other = inputs if count[inputs] else w
                raise ValueError(f"{other} {where} repeats a part of {b}, which is I and W in one")
            if not count[b] and not count[inputs]:
                raise ValueError(f"{b} (or {inputs} and {w}) is missing {where}")
            if count[inputs] and not count[w]:
                raise ValueError(f"{w} is missing {where}: the optimizer would step without it")


def _check_order(schedule: Schedule) -> None:
    """On one rank: what an action needs of its own stage stands before it."""
    for rank, row in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in row:
            for needed in needs(schedule, action) if action.computes else ():
                if needed.stage == action.stage and needed not in seen:
                    raise ValueError(f"{action} stands before {needed} on rank {rank}")
            seen.add(action)


def _check_progress(schedule: Schedule) -> None:
    """Non-blocking messages: run what can be run, until all is done or all ranks wait."""
    done: set[Action] = set()
    exists = {action for row in schedule.actions for action in row}

    def missing(action: Action) -> list[Action]:
        wanted = needs(schedule, action) if action.computes else []
        return [n for n in wanted if n in exists and n not in done]

    def ready(action: Action, heads: list[Action | None]) -> bool:
        if missing(action):
            return False
        done.add(action)
        return True

    def waits(rank: int, action: Action) -> str:
        other = missing(action)[0]
        return f"rank {rank} at {action} for {other} on rank {schedule.rank_of[other.stage]}"

    _run(schedule, ready, waits, "deadlock")


def _check_messages(schedule: Schedule) -> None:
    position = {
        a: (rank, at) for rank, row in enumerate(schedule.actions) for at, a in enumerate(row)
    }
    for wanted, (maker, user) in _messages(schedule).items():
        for message in (wanted, wanted.twin):
            if message not in position:
                rank = schedule.rank_of[message.stage]
                raise ValueError(f"{message} is missing on rank {rank}: {user} needs {maker}")
        if position[wanted] < position[maker]:
            raise ValueError(f"{wanted} stands before {maker}, which makes what it sends")
        if position[wanted.twin] > position[user]:
            raise ValueError(f"{wanted.twin} stands after {user}, which needs what it receives")
    sends = _messages(schedule).keys()
    for action in position:
        if not action.computes and action not in sends and action.twin not in sends:
            raise ValueError(f"{action} on rank {position[action][0]}: no rank needs this message")
    order: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for send in sorted(sends, key=position.__getitem__):
        order[position[send][0], schedule.peer(send)].append(send)
    for (source, target), sent in order.items():
        received = sorted((send.twin for send in sent), key=position.__getitem__)
        for send, receive in zip(sent, received, strict=True):
            if send.twin != receive:
                raise ValueError(f"rank {target} awaits {receive} where rank {source} sends {send}")


def _messages(schedule: Schedule) -> dict[Action, tuple[Action, Action]]:
    """Every send that the schedule needs: what makes its data, and what needs it."""
    result = {}
    exists = {action for row in schedule.actions for action in row}
    for user in exists:
        for maker in needs(schedule, user) if user.computes else ():
            if maker in exists and schedule.rank_of[maker.stage] != schedule.rank_of[user.stage]:
                kind = "SF" if maker.kind == "F" else "SB"
                result[Action(maker.stage, kind, maker.microbatch)] = maker, user
    return result


def _check_blocking(schedule: Schedule) -> None:
    """Blocking messages: both ends of a message have to be next on their ranks."""

    met: set[Action] = set()  # messages of which the other end has been there

    def ready(action: Action, heads: list[Action | None]) -> bool:
        if action.computes:
            return True
        if action not in met and heads[schedule.peer(action)] != action.twin:
            return False
        met.add(action.twin)
        return True

    def waits(rank: int, action: Action) -> str:
        return f"rank {rank} at {action} for rank {schedule.peer(action)}"

    _run(schedule, ready, waits, "deadlock with blocking messages")


def _run(
    schedule: Schedule,
    ready: Callable[[Action, list[Action | None]], bool],
    waits: Callable[[int, Action], str],
    what: str,
) -> None:
    """Advance every rank as far as it gets, again and again; raise when none gets any further.

    `ready(action, heads)` is asked of the next action of a rank, and knows the next of all.
    """
    rows = [iter(row) for row in schedule.actions]
    heads = [next(row, None) for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while (action := heads[rank]) is not None and ready(action, heads):
                heads[rank] = next(row, None)
                moved = True
    stuck = [waits(rank, head) for rank, head in enumerate(heads) if head is not None]
    if stuck:
        raise ValueError(f"{what}: " + "; ".join(stuck))


def _check_live(schedule: Schedule, max_live: int | None) -> None:
    bounds = schedule.max_live if max_live is None else (max_live,) * schedule.num_ranks
    for rank, (bound, row) in enumerate(zip(bounds, schedule.actions, strict=False)):
        for action, held in _live(row):
            if held > bound:
                raise ValueError(
                    f"{action} on rank {rank} makes {held} live activations; at most {bound}"
                )


def _list(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
