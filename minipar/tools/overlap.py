"""Where communication is exposed: by step, collective, group and call site; and who is waited for.

`minipar overlap` prints this. Communication is exposed while it is in flight and its rank computes
nothing (`Timeline.overlap`). Ranks wait for the rank whose part of a collective is the shortest:
all parts end together, and early ranks wait inside of their parts. Clocks need not agree for this.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from itertools import chain
from operator import add
from typing import Any

from minipar.observe.spans import Interval, Span, measure, union
from minipar.observe.timeline import Timeline
from minipar.text import aligned, printable

_MESSAGES = {"send", "recv", "exchange", "coalesced", "peer_copy"}
_APART = _MESSAGES | {"broadcast", "reduce", "gather", "scatter"}  # whose ranks do not end together


@dataclass(frozen=True)
class Part:
    """Seconds, calls and bytes of communication, each as the mean over the ranks.

    `seconds` is the length of a step; for any other part, of the whole recording. A call belongs to
    the step that launched it, wherever it runs. `num_bytes` is 0 where it is not known.
    """

    name: str
    seconds: float
    total: float = 0.0
    exposed: float = 0.0
    calls: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Waited:
    """Others waited `seconds` for `rank`, in `calls` of the `of` collectives that it shares."""

    rank: int
    seconds: float
    calls: int
    of: int


@dataclass(frozen=True)
class Breakdown:
    """Parts by kind ("step", "collective", "group", "call site"), and who is waited for most."""

    parts: dict[str, list[Part]]
    waited: list[Waited]
    notes: list[str]
    ranks: int = 1

    def __str__(self) -> str:
        tables = [_table(kind, rows) for kind, rows in self.parts.items() if rows]
        total = self.ranks * sum(row.total for row in self.parts["collective"])
        if self.waited and (w := self.waited[0]).seconds < 0.01 * total:
            tables.append("no rank is waited for by more than 1 % of the communication")
        elif self.waited:
            last = f"last to begin {w.calls} of its {w.of} collectives"
            others = f"the others spent {1e3 * w.seconds:.2f} ms in them until it came"
            tables.append(f"waited for most: rank {w.rank}, {last}; {others}")
        elif self.ranks > 1:
            why = "no collective that ranks share, of a known group"
            tables.append(f"who is waited for is not known: {why}")
        return "\n\n".join(tables)


def _table(kind: str, rows: list[Part]) -> str:
    """Return the parts in plain text, milliseconds a rank; "-" stands for unknown numbers."""
    lines = [(kind, "ms", "comm ms", "exposed ms", "hidden", "calls", "MB sent")]
    for row in rows[:12]:
        times = (f"{1e3 * t:.2f}" for t in (row.seconds, row.total, row.exposed))
        hidden = f"{1 - row.exposed / row.total:.0%}" if row.total else "-"
        sent = f"{row.num_bytes / 1e6:.2f}" if row.num_bytes else "-"
        lines.append((row.name[:70], *times, hidden, f"{row.calls:.4g}", sent))
    return "\n".join(aligned(lines, left=1) + [f"and {len(rows) - 12} more"] * (len(rows) > 12))


KEYS: dict[str, Callable[[Span], str]] = {
    "collective": lambda span: span.name,
    "group": lambda span: span.axis or "not recorded",
    "call site": lambda span: printable(span.meta.get("site", "not recorded")),
}


def breakdown(timeline: Timeline) -> Breakdown:
    """Break a timeline down by `KEYS` and by steps; the profiler has marked the steps."""
    parts = {"step": _steps(timeline)}
    for kind, key in KEYS.items():
        rows = sorted(_parts(timeline, key).values(), key=lambda row: (-row.exposed, row.name))
        parts[kind] = rows if [row.name for row in rows] != ["not recorded"] else []
    return Breakdown(parts, _waited(timeline), list(timeline.notes), len(timeline.ranks))


def _parts(timeline: Timeline, key: Callable[[Span], str]) -> dict[str, Part]:
    """Return communication by its key: `Timeline.overlap`, with keys in the place of axes."""
    spans = (replace(span, axis=key(span)) if span.kind == "comm" else span for span in timeline)
    sums, n = defaultdict(lambda: [0.0] * 4), len(timeline.ranks)
    for row in Timeline(spans).overlap():
        values = row.total, row.exposed, row.count, row.num_bytes
        sums[row.axis] = list(map(add, sums[row.axis], values))
    return {k: Part(k, timeline.duration, *(x / n for x in total)) for k, total in sums.items()}


def _steps(timeline: Timeline) -> list[Part]:
    """Return the parts of the steps that all ranks recorded; of several, first their median."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for name, start, end in chain.from_iterable(timeline.steps.values()):
        lengths[name].append(end - start)
    found = _parts(timeline, lambda span: span.meta.get("step", ""))
    rows = [
        replace(found.get(name, Part(name, 0.0)), seconds=statistics.mean(seconds))
        for name, seconds in lengths.items()
        if len(seconds) == len(timeline.ranks)
    ]
    if len(rows) > 1:
        _, *columns = zip(*map(astuple, rows), strict=True)
        rows.insert(0, Part("median", *map(statistics.median, columns)))
    return rows


def _waited(timeline: Timeline) -> list[Waited]:
    """Return ranks by the time that others wait for them, the longest first.

    Time in which a rank waits in two collectives counts once.
    """
    waits: dict[int, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    last, count = Counter(), Counter()
    for spans in _matched(timeline).values():
        if len(spans) > 1:
            late = min(spans, key=lambda rank: spans[rank].duration)
            for rank, span in spans.items():
                waits[late][rank].append((span.start, span.end - spans[late].duration))
            last[late] += 1
            count.update(spans.keys())
    found = [
        Waited(late, sum(measure(union(times)) for times in of.values()), last[late], count[late])
        for late, of in waits.items()
    ]
    return sorted(found, key=lambda waited: -waited.seconds)


def _matched(timeline: Timeline) -> dict[Any, dict[int, Span]]:
    """Return collectives by group, verb and number: the span of each rank.

    With several groups, gloo does not name the group of a call: such calls are left out. The number
    is NCCL's; without NCCL, it counts within the step.
    """
    calls: dict[Any, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline:
        is_known = span.axis == "world" or span.meta.get("group")
        if span.kind == "comm" and span.name not in _APART and is_known:
            step = span.meta.get("step") if span.meta.get("seq") is None else None
            group = span.axis, span.meta.get("group"), step
            calls[group][span.rank].append(span)
    found: dict[Any, dict[int, Span]] = defaultdict(dict)
    for group, ranks in calls.items():
        # Where one rank recorded more than another, the nth of both need not be the same call.
        is_alike = len(set(map(len, ranks.values()))) == 1
        for rank, spans in ranks.items():
            count = Counter()  # coalesced calls share a number
            for span in spans:
                seq = span.meta.get("seq")
                count[seq] += 1
                if seq is not None or is_alike:
                    found[group, span.name, seq, count[seq]][rank] = span
    return found
