"""The facts of a check: each rank's inputs, result and messages; and how a check refuses.

Each wrong answer of an exercise has a sentence, ``@fails("result", "Did you divide?")``. An answer
that fails with the same fingerprint, on the inputs of one seed, is told the sentence. The file
``slips.json`` holds for each exercise the "seed" and "told", sentences by fingerprint, and no code:
it goes into copies without answers. ``python -m minipar.lab.publish notebooks/ --slips`` writes it.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from types import FrameType
from typing import Any

import torch

from minipar.ranks.worker import InWords

RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Mismatch|Stuck|Race)\b.*$", re.MULTILINE)
PLACE = re.compile(r" at (?:\S+:\d+|Cell In\[\d+\], line \d+)")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


class CheckFailed(InWords, AssertionError):
    """A check refused an answer; `criterion` is the name of what was not met, in which `case`."""

    def __init__(self, message: str, criterion: str = "", case: "Case | None" = None) -> None:
        super().__init__(message)
        self.criterion, self.case = criterion, case

    @property
    def fingerprint(self) -> str:
        """Return how the answer failed, in twelve letters: criterion, message, what was sent.

        Numbers are rounded to three digits, so that the fingerprint is the same on any processor.
        Results count only if no rank has sent anything. If the answer itself raised an error, only
        the message of the error counts, not its place.
        """
        sent, results = ((), None) if self.case is None else (self.case.sent, self.case.results)
        if self.criterion == "run":
            raised = {PLACE.sub("", line) for line in RAISED.findall(str(self))}
            said = [re.sub(r"\d+", "#", line) for line in sorted(raised)]
        else:
            said = [NUMBER.sub(_rounded, str(self))]
            said += [str(sorted(Counter(map(str, rank)).items())) for rank in sent]
            said += [] if any(sent) else [_digest(results)]
        return hashlib.sha256("\n".join([self.criterion, *said]).encode()).hexdigest()[:12]


def _digest(value: Any) -> str:
    """Return a result in short, without numbers that are no tensors: they may be seconds."""
    if isinstance(value, torch.Tensor):
        value = value.double()
        size, total = value.abs().sum().item(), value.sum().item()
        # A sum may be only rounding of 0, so it counts relative to the sum of absolute values.
        return f"{list(value.shape)} {size:.3g} {round(total / size, 2) + 0.0 if size else 0.0}"
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_digest, value))}]"
    return repr(value) if isinstance(value, int | str) else type(value).__name__


def _rounded(number: re.Match) -> str:
    value = float(number[0].replace(",", ""))
    return f"{value:.3g}" if abs(value) > 1e-9 else "0"


@dataclass(frozen=True)
class Sent:
    """One operation of one rank, with the bytes that it sent; a message also has its `peer`."""

    verb: str
    num_bytes: int
    peer: int | None = None

    def __str__(self) -> str:
        to = "" if self.peer is None else f" to rank {self.peer}"
        return f"{self.verb}{to}, {self.num_bytes} bytes"


@dataclass(frozen=True)
class Case:
    """One run of an answer on `size` ranks: arguments, results and messages by rank."""

    size: int
    given: list[tuple]
    results: list[Any]
    sent: list[list[Sent]]

    def expect_close(
        self,
        expected: list[Any],
        what: str = "the result",
        *,
        names: Sequence[str] = (),
        rtol: float = 1e-9,
        atol: float = 1e-12,
    ) -> None:
        """Compare the result of each rank with the truth, a tensor or a list of tensors.

        Errors name a tensor of a list by `what` and its entry in `names`, or else its number.
        """
        for rank, (got, want) in enumerate(zip(self.results, expected, strict=True)):
            if not isinstance(want, list):
                got, want = [got], [want]
            if not isinstance(got, list) or len(got) != len(want):
                raise CheckFailed(f"{what} of rank {rank}: expected {len(want)} tensors, got {got}")
            for i, pair in enumerate(zip(got, want, strict=True)):
                name = what if len(want) == 1 else f"{what} {names[i] if names else i}"
                _expect_close(*pair, f"{name} of rank {rank}", rtol, atol)

    def expect_accepted(self, refused: Callable, criterion: str) -> None:
        """Raise `CheckFailed` if `refused(found, given)` is (criterion, why), with this criterion.

        The result of each rank begins with a list of findings, one for each of its inputs.
        """
        for rank, (found, *_) in enumerate(self.results):
            for said in map(refused, found, self.given[rank][0]):
                if said and said[0] == criterion:
                    raise CheckFailed(f"rank {rank}: {said[1]}")

    def expect_sent(self, rank: int, expected: list[Sent]) -> None:
        """Compare the messages of a rank with those expected, in any order."""
        got, want = Counter(self.sent[rank]), Counter(expected)
        if got != want:
            raise CheckFailed(
                f"rank {rank} of {self.size} sent\n{_ledger(got)}\nexpected\n{_ledger(want)}\n"
                f"difference: {got.total() - want.total():+d} operations, "
                f"{_total(got) - _total(want):+d} bytes"
            )


def _expect_close(got: Any, want: torch.Tensor, what: str, rtol: float, atol: float) -> None:
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(f"{what}: expected a tensor, got {got!r}")
    if got.shape != want.shape or got.dtype != want.dtype:
        raise CheckFailed(
            f"{what}: expected {tuple(want.shape)} of {want.dtype}, "
            f"got {tuple(got.shape)} of {got.dtype}"
        )
    wrong = ~torch.isclose(got, want, rtol=rtol, atol=atol)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        many = f"{int(wrong.sum())} of {want.numel()} values are wrong, the first at {list(at)}"
        which = many if want.dim() else "the value is wrong"
        raise CheckFailed(f"{what}: {which}: {apart(want[at].item(), got[at].item())}")


def apart(want: float, got: float) -> str:
    """Say what was expected and what came; ask for the cause where six digits look the same."""
    texts = told_apart(want, got)
    hint = "; computed in float32?" if f"{want:.6g}" == f"{got:.6g}" else ""
    return f"expected {texts[0]}, got {texts[1]}{hint}"


def told_apart(want: float, got: float) -> list[str]:
    """Return two numbers in six digits, or in all where six look the same."""
    texts = [f"{want:.6g}", f"{got:.6g}"]
    return texts if texts[0] != texts[1] else [repr(want), repr(got)]


def whole_numbers(value: Any) -> Any:
    """Return a list of int if `value` is a sequence of whole numbers of any kind, else `value`."""
    try:
        return [index(number) for number in value]
    except TypeError:
        return value


@contextmanager
def calls_of(*functions: Callable) -> Iterator[set[str]]:
    """Note which of these functions the body calls; a learner's own may have the same names.

    Calls from one of these functions to another are not noted.
    """
    names, called = {function.__code__: function.__name__ for function in functions}, set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names and frame.f_back.f_code not in names:
            called.add(names[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _ledger(sent: Counter) -> str:
    if not sent:
        return "    nothing"
    lines = [f"    {count} x {one}" for one, count in sorted(sent.items(), key=str)]
    return "\n".join([*lines, f"    = {_total(sent)} bytes in all"])


def _total(sent: Counter) -> int:
    return sum(one.num_bytes * count for one, count in sent.items())
