"""What a pipeline schedule is made of: actions, and a list of them for every rank. No torch.

`2F0` is stage 2, forward, microbatch 0. The kinds:

    F           forward
    B           full backward, which is I and W in one
    I           gradient of the stage's input, which the stage before waits for
    W           gradient of the stage's weights, which no rank waits for: it can fill bubbles
    SF, RF      send the output of F; receive what F needs (`2SF0` arrives as `3RF0`)
    SB, RB      send the gradient from B or I; receive what B or I needs (`2SB0` arrives as `1RB0`)
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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
            raise ValueError(f"{text!r} is no action; write stage, one of {kinds}, microbatch: 2F0")
        return Action(int(match[1]), match[2], int(match[3]))

    @property
    def computes(self) -> bool:
        """True for F, B, I and W; False for messages."""
        return self.kind in COMPUTE

    @property
    def twin(self) -> "Action":
        """Of a message, the other end: `2SF0` is received as `3RF0`, `2SB0` as `1RB0`."""
        assert not self.computes, f"{self} is no message"
        step = 1 if self.kind in ("SF", "RB") else -1
        return Action(
            self.stage + step, ("RS"[self.kind[0] == "R"]) + self.kind[1], self.microbatch
        )


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step, in order.

    `rank_of[stage]` is where a stage lives. With `copies` = 2 (DualPipe) the model is held twice:
    stage S + s holds the same layers as stage s, microbatch i goes through copy i % 2, and the
    runtime sums the gradients of both. `max_live[rank]` promises how many microbatches the stages
    of a rank hold at most; empty if nothing is promised.
    """

    name: str
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    copies: int = 1
    max_live: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """p."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """S: how many pieces the model is cut into (copies do not count)."""
        return len(self.rank_of) // self.copies

    @property
    def is_lowered(self) -> bool:
        """Whether the lists hold messages as well."""
        return any(not action.computes for row in self.actions for action in row)

    def stages_on(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def part(self, stage: int) -> int:
        """Which piece of the model a stage holds: 0 has the embedding, S - 1 the head."""
        return stage % self.num_stages

    def path(self, microbatch: int) -> range:
        """The stages that a microbatch goes through, in order."""
        first = microbatch % self.copies * self.num_stages
        return range(first, first + self.num_stages)

    def peer(self, message: Action) -> int:
        """The rank at the other end of a message."""
        return self.rank_of[message.twin.stage]

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Ranks that send messages to each other, once the lists hold these."""
        rows = enumerate(self.actions)
        return {(rank, self.peer(a)) for rank, row in rows for a in row if not a.computes}

    def last_gradient(self, stage: int) -> Action | None:
        """The B or W after which the gradients of a stage are complete; None if it has none.

        Data parallelism synchronises the stage right after it, and never before.
        """
        row = self.actions[self.rank_of[stage]]
        return next((a for a in reversed(row) if a.stage == stage and a.kind in "BW"), None)

    def without_messages(self) -> "Schedule":
        """The same schedule with computing actions only."""
        return replace(self, actions=tuple(tuple(a for a in r if a.computes) for r in self.actions))

    def as_text(self) -> str:
        """A line that says what it is, then a line per rank; `parse` reads it back."""
        head = f"{self.name}: microbatches {self.num_microbatches}"
        head += f"; stages on ranks {_numbers(self.rank_of)}"
        if self.copies > 1:
            head += f"; copies {self.copies}"
        if self.max_live:
            head += f"; live at most {_numbers(self.max_live)}"
        rows = (f"rank {rank}: {_numbers(row)}" for rank, row in enumerate(self.actions))
        return "\n".join([head, *rows])

    __str__ = as_text

    @staticmethod
    def parse(text: str) -> "Schedule":
        """Read what `as_text` wrote, or what a person did. Raises ValueError."""
        head, *lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        match = re.fullmatch(
            r"(.+): microbatches (\d+); stages on ranks ([\d ]+)"
            r"(?:; copies (\d+))?(?:; live at most ([\d ]+))?",
            head,
        )
        if match is None:
            raise ValueError(
                f"{head!r} does not say what the schedule is; write, for two ranks and four "
                "microbatches, 'mine: microbatches 4; stages on ranks 0 1'"
            )
        rows = []
        for rank, line in enumerate(lines):
            name, _, actions = line.partition(":")
            if name != f"rank {rank}":
                raise ValueError(f"line {rank + 2} starts with {name!r}; write 'rank {rank}: ...'")
            rows.append(tuple(Action.parse(word) for word in actions.split()))
        return Schedule(
            match[1],
            int(match[2]),
            tuple(map(int, match[3].split())),
            tuple(rows),
            int(match[4] or 1),
            tuple(map(int, (match[5] or "").split())),
        )


def slots(row: Iterable[Action], paired: bool = False) -> Iterator[tuple[Action, ...]]:
    """What a rank does at a time: `paired`, an F with the B right after it, of another stage."""
    row, at = list(row), 0
    while at < len(row):
        slot = tuple(row[at : at + 2])
        if not paired or [a.kind for a in slot] != ["F", "B"] or slot[0].stage == slot[1].stage:
            slot = slot[:1]
        yield slot
        at += len(slot)


def _numbers(values: Iterable[object]) -> str:
    return " ".join(map(str, values))
