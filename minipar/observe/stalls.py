"""A stall: from the states of all ranks to the rank that is missing, and a report that says so.

`minipar.observe.watchdog` collects the states. This file is pure: it only draws the conclusion.
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
    peers: tuple[int, ...] = ()  # of a message: the ranks at the other end

    @property
    def key(self) -> tuple:
        """Return the key that one collective has on all of its ranks."""
        return self.axis, self.ranks, bool(self.peers), self.number

    def __str__(self) -> str:
        what = f" with {names(self.peers)}" if self.peers else ""
        number = "" if self.peers else f" #{self.number}"
        size = f" ({_size(self.num_bytes)} on the wire)" if self.num_bytes else ""
        return f"{self.verb}{number} on {self.axis}{what}{size}"


@dataclass(frozen=True)
class State:
    """The state of one rank: its last call on each axis, and the calls that it waits in."""

    rank: int
    label: str  # "rank 2 of 4 (dp=1, tp=0)"
    begun: tuple[Call, ...] = ()
    awaited: tuple[Call, ...] = ()
    stack: str = ""  # of its main thread; empty if the rank does not answer
    silence: str = "it does not answer"
    is_known: bool = True  # False: nothing is known about its calls

    @classmethod
    def from_json(cls, text: str | bytes) -> "State":
        """Undo ``json.dumps(asdict(state))``. Raises `ValueError` or `TypeError` if it is none."""
        values = json.loads(text)
        for name in ("begun", "awaited"):
            calls = [{**call, "ranks": tuple(call["ranks"])} for call in values[name]]
            values[name] = tuple(Call(**{**c, "peers": tuple(c["peers"])}) for c in calls)
        return cls(**values)

    def has_reached(self, call: Call) -> bool:
        """True if this rank has begun the collective `call`, or a later one on the same axis."""
        own = (c for c in self.begun if (c.axis, c.ranks) == (call.axis, call.ranks))
        return any(c.number >= call.number for c in own if not c.peers)


# ---------------------------------------------------------------------- the report
def explain(states: Sequence[State]) -> str:
    """Return the report: who waits in which call, for whom, and what the missing ranks do instead.

    `states` has one of each rank.
    """
    by_rank = {state.rank: state for state in states}
    collectives = {c.key: c for state in states for c in state.awaited if not c.peers}
    lines: list[str] = []
    causes: list[State] = []
    for call in collectives.values():
        line, found = _explain_collective(call, [by_rank[rank] for rank in call.ranks])
        lines.append(line)
        causes += found
    for state in states:
        for call in state.awaited:
            if call.peers:
                lines.append(f"{state.label} has waited for {_time(call.seconds)} in {call}.")
                causes += [by_rank[peer] for peer in call.peers]
    # Rank 0 waits for 1, which waits for 2: only the stack of 2 helps. In a circle, show all.
    shown = [s for s in causes if not s.awaited or not s.stack] or [s for s in states if s.awaited]
    lines += [_doing(by_rank[rank]) for rank in dict.fromkeys(s.rank for s in shown)]
    return "\n".join(["minipar: stalled", *lines])


def _explain_collective(call: Call, states: Sequence[State]) -> tuple[str, list[State]]:
    """Return a sentence on `call`, in which ranks wait, and the ranks that are the cause of it.

    `states` are those of the ranks of its axis.
    """
    waits = {
        s.rank: c for s in states for c in s.awaited if (c.key, c.verb) == (call.key, call.verb)
    }
    waiting = [state for state in states if state.rank in waits]
    seconds = _time(max(own.seconds for own in waits.values()))
    unknown = [s for s in states if not s.is_known]
    missing = [s for s in states if s.is_known and not s.has_reached(call)]
    others = [
        f"{state.label} called {own}"
        for state in states
        for own in state.begun
        if own.key == call.key and own.verb != call.verb
    ]
    wait = f"{_labels(waiting)} {_has(waiting)} waited for {seconds}"
    if missing:
        sentence = f"{_labels(missing)} {_has(missing)} not reached {call}, in which {wait}."
        return sentence, missing + unknown
    if unknown:
        who = f"{_labels(unknown)} {_has(unknown)} reached it"
        return f"{wait} in {call}. Whether {who} is unknown.", unknown
    if others:
        how = f"{_labels(waiting)} called {call}, but {' and '.join(others)}"
        return f"{how}: they wait for each other.", []
    silent = [state for state in states if not state.stack]
    return f"{wait} in {call}, which all have reached, and which does not end.", silent


def _doing(state: State) -> str:
    """Return what a rank does, with its stack."""
    last = min(state.begun, key=lambda call: call.seconds, default=None)
    ago = f"its last was {last}, begun {_time(last.seconds)} ago" if last else "it has called none"
    if not state.is_known:
        ago = "nothing is heard of it"
    if not state.stack:
        return f"{state.label}: {ago}; {state.silence}."
    return f"{state.label}: {ago}. It is here:\n{state.stack}"


# ---------------------------------------------------------------------- words
def names(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2": at most eight of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")


def _labels(states: Sequence[State]) -> str:
    """Return "rank 2 of 4 (dp=1, tp=0)", or "ranks 0, 1, 3"."""
    return states[0].label if len(states) == 1 else names([state.rank for state in states])


def _size(num_bytes: int) -> str:
    """Return "4.0 MB", "12 kB" or "40 bytes"."""
    if num_bytes < 1e3:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _has(several: Sequence) -> str:
    return "has" if len(several) == 1 else "have"
