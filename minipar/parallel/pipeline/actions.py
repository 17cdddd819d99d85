"""The parts of a pipeline schedule: actions, and a list of them for every rank. No torch.

`2F0` is stage 2, forward, microbatch 0. The kinds:

    F           forward
    B           full backward, which is I and W in one
    I           gradient of the stage's input, which the stage before waits for
    W           gradient of the stage's weights, which no rank waits for: it can fill bubbles
    SF, RF      send the output of F; receive what F needs (`2SF0` arrives as `3RF0`)
    SB, RB      send the gradient from B or I; receive what B or I needs (`2SB0` arrives as `1RB0`)
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

COMPUTE, MESSAGES = ("F", "B", "I", "W"), ("SF", "RF", "SB", "RB")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing a rank does. Prints as `2F0`: stage 2, forward, microbatch 0."""

    stage: int
    kind: str  # one of COMPUTE or MESSAGES
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    __repr__ = __str__

    @staticmethod
    def parse(text: str) -> "Action":
        """Read `2F0`. Raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)([SR]?[FB]|[IW])(\d+)", text)
        if match is None:
            kinds = ", ".join((*COMPUTE, *MESSAGES))
            raise ValueError(f"{text!r} is unknown; write stage, one of {kinds}, microbatch: 2F0")
        return Action(int(match[1]), match[2], int(match[3]))

    @property
    def computes(self) -> bool:
        """True for F, B, I and W; False for messages."""
        return self.kind in COMPUTE

    @property
    def twin(self) -> "Action":
        """The other end of a message: `2SF0` is received as `3RF0`, `2SB0` as `1RB0`."""
        assert not self.computes, f"{self} is not a message"
        step = 1 if self.kind in ("SF", "RB") else -1
        other = "R" if self.kind[0] == "S" else "S"
        return Action(self.stage + step, other + self.kind[1], self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in one step, in order.

    `rank_of[stage]` is the rank of a stage. With `copies` = 2 (DualPipe) the model exists twice:
    stage S + s has the same layers as stage s, microbatch i goes through copy i % 2, and the
    runtime sums the gradients of both.
    """

    name: str
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    copies: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """S, the number of parts of the model; copies do not count."""
        return len(self.rank_of) // self.copies

    @cached_property
    def every(self) -> frozenset[Action]:
        """The actions of all ranks."""
        return frozenset(action for row in self.actions for action in row)

    @cached_property
    def is_lowered(self) -> bool:
        """True if the lists hold messages as well."""
        return not all(action.computes for action in self.every)

    @property
    def splits_backward(self) -> bool:
        """True if some backward is I and W."""
        return any(action.kind == "W" for action in self.every)

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def part(self, stage: int) -> int:
        """Return the part of the model in a stage: 0 has the embedding, S - 1 the head."""
        return stage % self.num_stages

    def path(self, microbatch: int) -> range:
        """Return the stages that a microbatch goes through, in order."""
        first = microbatch % self.copies * self.num_stages
        return range(first, first + self.num_stages)

    def takes(self, action: Action) -> Action | None:
        """Return the message that an action needs; None for W, messages and ends of the model.

        `2F0` needs `2RF0`, the output of stage 1; `2B0` needs `2RB0`, the gradient from stage 3.
        """
        return self._message("R", action)

    def makes(self, action: Action) -> Action | None:
        """Return the message that sends the result of an action; None if no stage needs it."""
        return self._message("S", action)

    def _message(self, way: str, action: Action) -> Action | None:
        step = 1 if (way == "S") == (action.kind == "F") else -1
        if action.kind not in "FBI" or action.stage + step not in self.path(action.microbatch):
            return None
        return Action(action.stage, way + action.kind.replace("I", "B"), action.microbatch)

    def peer(self, message: Action) -> int:
        """Return the rank at the other end of a message."""
        return self.rank_of[message.twin.stage]

    def travels(self, message: Action | None) -> bool:
        """True if a message is for another rank; stages of one rank hand results over directly."""
        return message is not None and self.peer(message) != self.rank_of[message.stage]

    def last_gradient(self, stage: int) -> Action | None:
        """Return the B or W that completes the gradients of a stage; None if there is none.

        Data parallelism synchronises the stage right after this action, and never before.
        """
        row = self.actions[self.rank_of[stage]]
        return next((a for a in reversed(row) if a.stage == stage and a.kind in "BW"), None)

    def without_messages(self) -> "Schedule":
        """Return the same schedule with computing actions only."""
        return replace(self, actions=tuple(tuple(a for a in r if a.computes) for r in self.actions))

    def as_text(self) -> str:
        """Return a head line and a line per rank; `parse` reads them back."""
        head = f"{self.name}: microbatches {self.num_microbatches}"
        head += f"; stages on ranks {_words(self.rank_of)}"
        if self.copies > 1:
            head += f"; copies {self.copies}"
        rows = (f"rank {rank}: {_words(row)}" for rank, row in enumerate(self.actions))
        return "\n".join([head, *rows])

    __str__ = as_text

    @staticmethod
    def parse(text: str) -> "Schedule":
        """Read the text of `as_text`, or one that a person wrote. Raises ValueError."""
        head, *lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        pattern = r"(.+): microbatches (\d+); stages on ranks ([\d ]+)(?:; copies (\d+))?"
        match = re.fullmatch(pattern, head)
        if match is None:
            told = f"{head!r} does not say what the schedule is; write, for example, "
            raise ValueError(f"{told}'mine: microbatches 4; stages on ranks 0 1'")
        name, m, rank_of, copies = match.groups(default="1")
        rows = [tuple(map(Action.parse, line.partition(":")[2].split())) for line in lines]
        return Schedule(name, int(m), tuple(map(int, rank_of.split())), tuple(rows), int(copies))


def slots(row: Iterable[Action], paired: bool = False) -> Iterator[tuple[Action, ...]]:
    """Cut a row into single actions and, if `paired`, pairs that run side by side.

    A pair is an F and the B right after it, of another stage.
    """
    row = deque(row)
    while row:
        first = row.popleft()
        is_pair = paired and row and (first.kind, row[0].kind) == ("F", "B")
        yield (first, row.popleft()) if is_pair and first.stage != row[0].stage else (first,)


def _words(values: Iterable[object]) -> str:
    return " ".join(map(str, values))
