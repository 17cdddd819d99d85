"""Spans of work on one clock, and arithmetic on the intervals of time that they take."""

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
    num_bytes: int = 0  # comm only
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


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
