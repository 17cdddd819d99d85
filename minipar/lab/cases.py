"""What a check looks at: what each rank was given, returned and sent; and how it refuses."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minipar.lab import slips


class CheckFailed(AssertionError):
    """A check refused an answer; `criterion` is the name of what was not met, in which `case`."""

    def __init__(self, message: str, criterion: str = "", case: "Case | None" = None) -> None:
        super().__init__(message)
        self.criterion, self.case = criterion, case

    @property
    def fingerprint(self) -> str:
        """How the answer failed, for `slips`."""
        seen = () if self.case is None else (self.case.sent, self.case.results)
        return slips.fingerprint(self.criterion, str(self), *seen)

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()  # a learner is not helped by our frames


class StrangeAnswer(CheckFailed):
    """An answer that a check was not made for, unless the check itself has a bug."""


@dataclass(frozen=True)
class Sent:
    """One operation of one rank: `num_bytes` it sent; `peer` is whom, of a message."""

    verb: str
    num_bytes: int
    peer: int | None = None

    def __str__(self) -> str:
        to = "" if self.peer is None else f" to rank {self.peer}"
        return f"{self.verb}{to}, {self.num_bytes} bytes"


@dataclass(frozen=True)
class Case:
    """One run of an answer on `size` ranks: per rank what it was given, returned and sent."""

    size: int
    given: list[tuple]
    results: list[Any]
    sent: list[list[Sent]]

    def expect_close(self, expected: list[Any], what: str = "the result") -> None:
        """Compare the result of each rank with the truth, a tensor or a list of tensors."""
        for rank, (got, want) in enumerate(zip(self.results, expected, strict=True)):
            if not isinstance(want, list):
                got, want = [got], [want]
            if not isinstance(got, list) or len(got) != len(want):
                raise CheckFailed(f"{what} of rank {rank}: expected {len(want)} tensors, got {got}")
            for i, pair in enumerate(zip(got, want, strict=True)):
                name = what if len(want) == 1 else f"{what} {i}"
                _expect_close(*pair, f"{name} of rank {rank}")

    def expect_accepted(self, refused: Callable, criterion: str) -> None:
        """Raise what `refused(found, given)` says, (criterion, why) or None, of this criterion.

        The result of each rank begins with a list of what it found, one for each of its inputs.
        """
        for rank, (found, *_) in enumerate(self.results):
            for said in map(refused, found, self.given[rank][0]):
                if said and said[0] == criterion:
                    raise CheckFailed(f"rank {rank}: {said[1]}")

    def expect_sent(self, rank: int, expected: list[Sent]) -> None:
        """Compare what a rank sent with what it should have sent, in any order."""
        got, want = Counter(self.sent[rank]), Counter(expected)
        if got != want:
            raise CheckFailed(
                f"rank {rank} of {self.size} sent\n{_ledger(got)}\nexpected\n{_ledger(want)}\n"
                f"difference: {got.total() - want.total():+d} operations, "
                f"{_total(got) - _total(want):+d} bytes"
            )


def _expect_close(got: Any, want: torch.Tensor, what: str) -> None:
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(f"{what}: expected a tensor, got {got!r}")
    if got.shape != want.shape or got.dtype != want.dtype:
        raise CheckFailed(
            f"{what}: expected {tuple(want.shape)} of {want.dtype}, "
            f"got {tuple(got.shape)} of {got.dtype}"
        )
    wrong = ~torch.isclose(got, want, rtol=1e-9, atol=1e-12)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise CheckFailed(
            f"{what}: {int(wrong.sum())} of {want.numel()} values are wrong, the first at "
            f"{list(at)}: expected {want[at].item():.6g}, got {got[at].item():.6g}"
        )


def _ledger(sent: Counter) -> str:
    if not sent:
        return "    nothing"
    lines = [f"    {count} x {one}" for one, count in sorted(sent.items(), key=str)]
    return "\n".join([*lines, f"    = {_total(sent)} bytes in all"])


def _total(sent: Counter) -> int:
    return sum(one.num_bytes * count for one, count in sent.items())


class NoAnswer(TypeError):
    """What a learner's function returned cannot be used at all."""

    @property
    def report(self) -> str:
        return str(self)
