"""Where communication is exposed: by step, collective, group and call site; and who is waited for.

`minipar overlap` prints it. Exposed, as in `Timeline.overlap`: in flight while the rank computes
nothing. A rank is waited for where it begins a collective last: until then, the ranks that came
before wait inside of theirs.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from minipar.observe.spans import Interval, Span, covered, intersect, measure, union
from minipar.observe.timeline import Timeline
from minipar.text import aligned, printable
from minipar.tools.traces import matched


@dataclass(frozen=True)
class Part:
    """Seconds of communication per rank, in the mean of the ranks; `calls` and bytes likewise.

    `seconds` is the length of a step; for any other part, of all that was recorded. A call belongs
    to the step that launched it, wherever it runs. `num_bytes` is 0 where the trace does not say.
    """

    name: str
    seconds: float
    total: float
    exposed: float
    calls: float
    num_bytes: float


@dataclass(frozen=True)
class Waited:
    """Others waited for `rank` for so many rank-seconds, in `calls` of the `of` that it shares."""

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
        tables = [table(kind, rows) for kind, rows in self.parts.items() if rows]
        return "\n\n".join(filter(None, [*tables, self.verdict()]))

    def verdict(self) -> str:
        """Return who is waited for most, in a sentence; empty where one rank was recorded."""
        if not self.waited:
            unknown = "who is waited for is not known: no collective of a known group on one clock"
            return unknown if self.ranks > 1 else ""
        w = self.waited[0]
        return (
            f"waited for most: rank {w.rank}, last to begin {w.calls} of its {w.of} collectives; "
            f"the others spent {1e3 * w.seconds:.1f} ms in them until it came"
        )


def table(kind: str, rows: list[Part]) -> str:
    """Return the parts in plain text, milliseconds a rank; "-" stands for unknown numbers."""
    lines = [(kind, "ms", "comm ms", "exposed ms", "hidden", "calls", "MB sent")]
    for row in rows[:12]:
        times = (f"{1e3 * t:.2f}" for t in (row.seconds, row.total, row.exposed))
        hidden = f"{1 - row.exposed / row.total:.0%}" if row.total else "-"
        sent = f"{row.num_bytes / 1e6:.2f}" if row.num_bytes else "-"
        lines.append((row.name[:70], *times, hidden, f"{row.calls:.4g}", sent))
    return "\n".join(aligned(lines, left=1) + [f"and {len(rows) - 12} more"] * (len(rows) > 12))


def breakdown(timeline: Timeline) -> Breakdown:
    """Take a timeline apart; its steps are those that the profiler was told of."""
    busy = timeline.busy()
    comm: dict[int, list[Span]] = {rank: [] for rank in timeline.ranks}
    for span in timeline:
        if span.kind == "comm":
            comm[span.rank].append(span)
    parts = {"step": _steps(timeline, comm, busy)}
    keys = {
        "collective": lambda s: s.name,
        "group": lambda s: s.axis or "not recorded",
        "call site": lambda s: printable(s.meta.get("site", "not recorded")),
    }
    for kind, key in keys.items():
        groups: dict[str, dict[int, list[Span]]] = defaultdict(lambda: {rank: [] for rank in comm})
        for rank, spans in comm.items():
            for span in spans:
                groups[key(span)][rank].append(span)
        rows = [_part(name, timeline.duration, own, busy) for name, own in groups.items()]
        rows.sort(key=lambda row: (-row.exposed, row.name))
        parts[kind] = rows if [row.name for row in rows] != ["not recorded"] else []
    return Breakdown(parts, _waited(comm), list(timeline.notes), len(comm))


def _part(name: str, seconds: float, comm: dict[int, list[Span]], busy: dict) -> Part:
    total = exposed = calls = num_bytes = 0.0
    for rank, spans in comm.items():
        talking = covered(spans)
        whole, hidden = measure(talking), measure(intersect(talking, busy[rank]))
        total, exposed = total + whole, exposed + whole - hidden
        calls, num_bytes = calls + len(spans), num_bytes + sum(span.num_bytes for span in spans)
    n = max(1, len(comm))
    return Part(name, seconds, total / n, exposed / n, calls / n, num_bytes / n)


def _steps(timeline: Timeline, comm: dict, busy: dict) -> list[Part]:
    windows: dict[str, dict[int, Interval]] = defaultdict(dict)
    for rank, steps in timeline.steps.items():
        for name, start, end in steps:
            windows[name][rank] = start, end
    rows = []
    for name, window in sorted(windows.items(), key=lambda item: min(item[1].values())):
        seconds = statistics.mean(end - start for start, end in window.values())
        mine = {
            rank: [span for span in comm[rank] if span.meta.get("step") == name]
            for rank in window
            if rank in comm
        }
        rows.append(_part(name, seconds, mine, busy))
    if len(rows) > 1:
        fields = ("seconds", "total", "exposed", "calls", "num_bytes")
        values = (statistics.median(getattr(row, field) for row in rows) for field in fields)
        rows.insert(0, Part("median", *values))
    return rows


def _waited(comm: dict[int, list[Span]]) -> list[Waited]:
    """Return ranks by the time that others wait for them, the longest first.

    Only collectives of a known group count. Time in which a rank waits in two counts once.
    """
    shared: dict[Any, dict[int, Span]] = defaultdict(dict)
    for rank, spans in comm.items():
        for key, span in matched(spans).items():
            if span.meta.get("group") or span.axis == "world":
                shared[key][rank] = span
    waits: dict[int, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    last, count = defaultdict(int), defaultdict(int)
    for spans in shared.values():
        if len(spans) > 1:
            late = max(spans, key=lambda rank: spans[rank].start)
            came = spans[late].start
            for rank, span in spans.items():
                waits[late][rank].append((span.start, min(came, span.end)))
                count[rank] += 1
            last[late] += 1
    found = [
        Waited(late, sum(measure(union(intervals)) for intervals in of.values()), last[late],
               count[late])
        for late, of in waits.items()
    ]  # fmt: skip
    return sorted(found, key=lambda waited: -waited.seconds)
