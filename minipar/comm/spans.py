"""What ranks did when, on one clock, and how many bytes they sent; arithmetic on intervals."""

import gzip
import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

NOT_COMPUTE = {"comm", "copy"}  # every other kind keeps the rank's processor busy

Interval = tuple[float, float]


@dataclass(slots=True)
class Span:
    """One piece of work of one rank: `start` and `end` in seconds, `num_bytes` this rank sends."""

    kind: (
        str  # forward, backward, weight_gradient, optimizer, compute (anything else), comm or copy
    )
    name: str
    rank: int
    start: float
    end: float
    axis: str = ""  # comm only: the axis of the mesh, or the name of the process group
    num_bytes: int = 0  # comm only; see `wire_bytes`
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


def wire_bytes(verb: str, num_bytes: int, size: int) -> int:
    """Return the bytes that the busiest of `size` ranks sends, by the algorithm that wastes none.

    `num_bytes` is the size of the whole tensor: what an all-gather returns, a reduce-scatter is
    given, and every rank holds before and after an all-reduce. A ring moves 1/n of it per round:
    n-1 rounds to reduce-scatter, n-1 to all-gather, both for an all-reduce. Where one rank has a
    part of its own (scatter, gather, broadcast, reduce) all are charged alike, as in nccl-tests.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 3.
    """
    rounds = {
        "all_reduce": 2 * (size - 1),
        "all_gather": size - 1,
        "reduce_scatter": size - 1,
        "all_to_all": size - 1,
        "scatter": size - 1,
        "gather": size - 1,
        "broadcast": size,
        "reduce": size,
        "send": size,
        "recv": 0,  # the sender pays: a message is counted once
        "barrier": 0,
    }
    if size == 1:
        return 0
    return num_bytes * rounds[verb] // size


def moved(spans: list[Span], by: float) -> list[Span]:
    """The same spans, `by` seconds later."""
    return [replace(s, start=s.start + by, end=s.end + by) for s in spans] if by else spans


def clipped(
    spans: Iterable[Span], begins: Mapping[int, float], ends: Mapping[int, float]
) -> list[Span]:
    """What is of a time that begins and ends for each rank: a step, between others like it.

    Of a span that began before it, the bytes are those of the step before.
    """
    found = []
    for s in spans:
        begin, end = begins[s.rank], ends[s.rank]
        if s.start < end and s.end > begin:
            num_bytes = s.num_bytes if s.start >= begin else 0
            words = {"start": max(s.start, begin), "end": min(s.end, end)}
            found.append(replace(s, num_bytes=num_bytes, **words))
    return found


# ---------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of points as disjoint intervals in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif start < end:
            result.append((start, end))
    return result


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Points in both; `a` and `b` are disjoint and in order, as `union` returns them."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Points of `a` that are not in `b`; both disjoint and in order."""
    result = []
    for start, end in a:
        first = max(0, bisect_right(b, (start, float("inf"))) - 1)
        for hole_start, hole_end in b[first : bisect_left(b, (end,))]:
            if hole_end <= start:
                continue
            if hole_start > start:
                result.append((start, hole_start))
            start = hole_end
        if start < end:
            result.append((start, end))
    return result


def measure(disjoint: list[Interval]) -> float:
    """Summed length."""
    return sum(end - start for start, end in disjoint)


# ---------------------------------------------------------------------- files


LARGEST_TRACE = 1 << 30
"""Bytes of JSON: what would unpack to more is refused, for it would take several times as much."""


def read_json(path: str | Path, keep: Callable[[dict], Any] | None = None) -> dict[str, Any]:
    """A chrome trace, plain or gzipped, as a dict with `traceEvents`; `keep` thins its objects out.

    Raises ValueError, which names the file, for any other, and for one above `LARGEST_TRACE`.
    """
    try:
        document = json.loads(_unpacked(path), object_hook=keep)
    except RecursionError:
        raise ValueError(f"{path} is no readable trace: it is nested too deeply") from None
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is no readable trace: {error}") from error
    if isinstance(document, list):  # the format also allows the bare list of events
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path} is JSON, but no chrome trace: it has no list `traceEvents`")
    return document


def _unpacked(path: str | Path) -> bytearray:
    raw = bytearray()
    with _open(path) as file:
        while chunk := file.read(1 << 20):
            raw += chunk
            if len(raw) > LARGEST_TRACE:
                raise ValueError(f"it holds over {LARGEST_TRACE >> 20} MiB; profile fewer steps")
    return raw


def _open(path: str | Path) -> IO[bytes]:
    if not Path(path).is_file():  # a pipe or a device might never end
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else open(path, "rb")


def is_ours(path: str | Path) -> bool:
    """Whether `Timeline.save` wrote this file, by its first bytes."""
    try:
        with _open(path) as file:
            return file.read(32).replace(b" ", b"").lstrip().startswith(b'{"minipar"')
    except (EOFError, OSError, zlib.error, ValueError):
        return False


def is_number(value: Any, most: float = 1e17) -> bool:
    """Whether a value out of a file is a number that one can reckon with: real, finite, sane.

    Microseconds since 1970 are 2e15.
    """
    return type(value) in (int, float) and -most < value < most


def printable(text: Any) -> str:
    """A name out of a file, fit for terminals and pictures: what cannot be shown becomes `?`."""
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
