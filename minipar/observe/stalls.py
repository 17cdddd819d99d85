"""A stall: the states of all ranks, and which rank they say is missing.

Pure: `minipar.observe.watchdog` collects the states; this file draws the conclusion.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A collective or a message, as one rank has called it."""

    verb: str
    axis: str
    ranks: tuple[int, ...]  # of the axis, as numbers in the world
    number: int  # the first collective of this rank on this axis is 1; messages count apart
    num_bytes: int  # on the wire
    seconds: float  # since it began, or since this rank waits in it
    peers: tuple[int, ...] = ()  # of a message: who is at the other end
    subject: str = ""  # what is sent, such as "weights of layers.0"

    @property
    def key(self) -> tuple:
        """Return the key that one collective has on all of its ranks."""
        return self.axis, self.ranks, bool(self.peers), self.number

    def __str__(self) -> str:
        size = f" ({_size(self.num_bytes)} on the wire)" if self.num_bytes else ""
        size = f" of {self.subject}{size}" if self.subject else size
        if self.peers:
            return f"{self.verb} on {self.axis} with {names(self.peers)}{size}"
        return f"{self.verb} #{self.number} on {self.axis}{size}"


@dataclass(frozen=True)
class State:
    """The state of one rank: its last call on each axis, and the calls that it waits in."""

    rank: int
    label: str  # "rank 2 of 4 (dp=1, tp=0)"
    begun: tuple[Call, ...] = ()
    awaited: tuple[Call, ...] = ()
    stack: str = ""  # of its main thread; empty if the rank does not answer
    silence: str = "it does not answer"  # ... and why, as far as one can see from outside
    is_known: bool = True  # whether anything can be said of its calls

    @classmethod
    def from_json(cls, text: str | bytes) -> "State":
        """Undo ``json.dumps(asdict(state))``. Raises `ValueError` or `TypeError` if it is none."""
        values = json.loads(text)
        for name in ("begun", "awaited"):
            calls = [{**call, "ranks": tuple(call["ranks"])} for call in values[name]]
            values[name] = tuple(Call(**{**c, "peers": tuple(c["peers"])}) for c in calls)
        return cls(**values)

    def number_on(self, axis: str, ranks: tuple[int, ...]) -> int:
        """How many collectives this rank has begun on that axis."""
        calls = (c for c in self.begun if (c.axis, c.ranks) == (axis, ranks) and not c.peers)
        return max((call.number for call in calls), default=0)


# ---------------------------------------------------------------------- the report
def explain(states: Sequence[State]) -> str:
    """Say who waits in what, for whom, and what those do instead. `states`: one of each rank."""
    by_rank = {state.rank: state for state in states}
    lines, guilty = [], []
    for waiting in _waits(states):
        call = waiting[0][1]
        axis, ranks, number = call.axis, call.ranks, call.number
        waiting = [(rank, own) for rank, own in waiting if own.verb == call.verb]
        unknown = [r for r in ranks if not by_rank[r].is_known]
        missing = [r for r in ranks if by_rank[r].number_on(axis, ranks) < number]
        missing = [r for r in missing if r not in unknown]
        others = _called_otherwise(call, [by_rank[rank] for rank in ranks])
        who = _labels([by_rank[rank] for rank, _ in waiting])
        seconds = max(call.seconds for _, call in waiting)
        if missing:
            lines.append(
                f"{_labels([by_rank[r] for r in missing])} {_has(missing)} not reached {call}, in "
                f"which {who} {_has(waiting)} waited for {_time(seconds)}."
            )
        elif unknown:
            lines.append(
                f"{who} {_has(waiting)} waited for {_time(seconds)} in {call}. Whether "
                f"{_labels([by_rank[r] for r in unknown])} {_has(unknown)} reached it is unknown."
            )
        elif others:
            lines.append(f"{who} called {call}, but {others}: they wait for each other.")
        else:
            lines.append(
                f"{who} {_has(waiting)} waited for {_time(seconds)} in {call}, which all have "
                f"reached, and which does not end."
            )
            missing = [r for r in ranks if not by_rank[r].stack]
        guilty += missing + unknown
    for state in states:
        for call in state.awaited:
            if call.peers:
                lines.append(f"{state.label} has waited for {_time(call.seconds)} in {call}.")
                guilty += call.peers
    # A rank that waits in turn is a victim: the stacks of the others are what one wants to see. If
    # all wait for each other, those of all.
    busy = [r for r in guilty if not by_rank[r].awaited or not by_rank[r].stack]
    shown = dict.fromkeys(busy or [state.rank for state in states if state.awaited])
    return "\n".join(["minipar: stalled", *lines, *(_doing(by_rank[rank]) for rank in shown)])


def _waits(states: Sequence[State]) -> list[list[tuple[int, Call]]]:
    """For each collective that a rank waits in: the ranks, and what they have called."""
    waits: dict[tuple, list[tuple[int, Call]]] = {}
    for state in states:
        for call in state.awaited:
            if not call.peers:
                waits.setdefault(call.key, []).append((state.rank, call))
    return list(waits.values())


def _called_otherwise(call: Call, states: Sequence[State]) -> str:
    """Who has called something else where others called `call`, in words; empty if none has."""
    return " and ".join(
        f"{state.label} called {own}"
        for state in states
        for own in state.begun
        if own.key == call.key and own.verb != call.verb
    )


def _doing(state: State) -> str:
    last = min(state.begun, key=lambda call: call.seconds, default=None)
    ago = f"its last was {last}, begun {_time(last.seconds)} ago" if last else "it has called none"
    if not state.is_known:
        ago = "nothing is heard of it"
    if not state.stack:
        return f"{state.label}: {ago}; {state.silence}."
    return f"{state.label}: {ago}. It is here:\n{state.stack}"


def names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")


def _labels(states: Sequence[State]) -> str:
    """ "rank 2 of 4 (dp=1, tp=0)", or "ranks 0, 1, 3"."""
    return states[0].label if len(states) == 1 else names([state.rank for state in states])


def _size(num_bytes: int) -> str:
    """ "4.0 MB", "12 kB" or "40 bytes"."""
    if num_bytes < 1e3:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _has(several: Sequence) -> str:
    return "has" if len(several) == 1 else "have"
