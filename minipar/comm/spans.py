"""What ranks did when, on one clock, and how many bytes they sent; arithmetic on intervals."""

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
        for hole_start, hole_end in b:
            if hole_end <= start or hole_start >= end:
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


def read_json(path: str | Path) -> dict[str, Any]:
    """A chrome trace, plain or gzipped, as a dict with `traceEvents`. Raises ValueError."""
    raw = Path(path).read_bytes()
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        document = json.loads(raw)
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is no readable trace: {error}") from error
    if isinstance(document, list):  # the format also allows the bare list of events
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path} is JSON, but no chrome trace: it has no list `traceEvents`")
    return document
