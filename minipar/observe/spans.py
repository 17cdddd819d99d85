"""Spans: which rank did what, when, and how many bytes it sent; arithmetic on intervals."""

import gzip
import json
import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

NOT_COMPUTE = {"comm", "copy"}  # every other kind keeps the rank's processor busy

Interval = tuple[float, float]


@dataclass(slots=True)
class Span:
    """One piece of work of one rank: `start` and `end` in seconds, `num_bytes` this rank sends."""

    # forward, backward, weight_gradient, optimizer, compute (anything else), comm or copy
    kind: str
    name: str
    rank: int
    start: float
    end: float
    axis: str = ""  # comm only: the axis of the mesh, or the name of the process group
    num_bytes: int = 0  # comm only; see `collectives.wire_bytes`
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


def moved(spans: list[Span], by: float) -> list[Span]:
    """Return the same spans, `by` seconds later."""
    return [replace(s, start=s.start + by, end=s.end + by) for s in spans] if by else spans


def clipped(
    spans: Iterable[Span], begins: Mapping[int, float], ends: Mapping[int, float]
) -> list[Span]:
    """Cut spans to one step of several, from ``begins[rank]`` to ``ends[rank]``.

    The bytes of a span that began earlier belong to the step before.
    """
    found = []
    for s in spans:
        begin, end = begins[s.rank], ends[s.rank]
        if s.start < end and s.end > begin:
            num_bytes = s.num_bytes if s.start >= begin else 0
            start, end = max(s.start, begin), min(s.end, end)
            found.append(replace(s, start=start, end=end, num_bytes=num_bytes))
    return found


# ---------------------------------------------------------------------- intervals
def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same set of points as disjoint intervals in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif start < end:
            result.append((start, end))
    return result


def covered(spans: Iterable[Span]) -> list[Interval]:
    """Return the time in which at least one of `spans` runs."""
    return union((span.start, span.end) for span in spans)


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the points in both; `a` and `b` are disjoint and in order, as `union` returns them."""
    met = ((max(s, t), min(e, f)) for s, e in a for t, f in _beside(s, e, b))
    return [(start, end) for start, end in met if start < end]


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the points of `a` that are not in `b`; both are disjoint and in order."""
    near = _beside(a[0][0], a[-1][1], b) if a else []
    edges = [-math.inf, *chain(*near), math.inf]
    return intersect(a, list(zip(edges[::2], edges[1::2], strict=True)))


def _beside(start: float, end: float, intervals: list[Interval]) -> list[Interval]:
    """Return the `intervals` (disjoint, in order) that may meet one interval, by bisection."""
    first = max(0, bisect_right(intervals, (start, math.inf)) - 1)
    return intervals[first : bisect_left(intervals, (end,))]


def measure(disjoint: list[Interval]) -> float:
    """Return the summed length."""
    return sum(end - start for start, end in disjoint)


# ---------------------------------------------------------------------- files
def read_json(path: str | Path) -> dict[str, Any]:
    """Return a chrome trace, plain or gzipped, as a dict with `traceEvents`.

    Raises `ValueError` with the name of the file if it is not a trace.
    """
    try:
        content = Path(path).read_bytes()
        document = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable trace: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path} is JSON, but not a chrome trace: it has no list `traceEvents`")
    return document


def is_ours(path: str | Path) -> bool:
    """True if `Timeline.save` wrote this file."""
    return Path(path).is_file() and Path(path).read_bytes().startswith(b'{"minipar"')
