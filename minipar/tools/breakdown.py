"""Where communication is exposed: by step, collective, group and call site; and who is waited for.

`minipar overlap` prints it. Exposed, as in `Timeline.overlap`: in flight while the rank computes
nothing. A rank is waited for where it begins a collective last: until then, those that came before
wait inside of theirs.
"""

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from minipar.observe.spans import Interval, Span, covered, intersect, measure
from minipar.observe.timeline import Timeline
from minipar.text import aligned, printable
from minipar.tools.traces import matched


@dataclass(frozen=True)
class Part:
    """Seconds of communication per rank, in the mean of the ranks; `calls` and bytes likewise.

    `seconds` is the length of a step; for any other part, of all that was recorded.
    """

    name: str
    seconds: float
    total: float
    exposed: float
    calls: float
    num_bytes: float


@dataclass(frozen=True)
class Waited:
    """That others waited for `rank`: rank-seconds, in `calls` of the `of` that it shares."""

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

    def __str__(self) -> str:
        return "\n\n".join(
            [table(kind, rows) for kind, rows in self.parts.items() if len(rows) > 0]
            + [self.verdict()] * bool(self.waited)
        )

    def verdict(self) -> str:
        """The slowest rank, in a sentence; empty where no collective is known on several ranks."""
        if not self.waited:
            return ""
        w = self.waited[0]
        return (
            f"waited for most: rank {w.rank}, last to begin {w.calls} of its {w.of} collectives; "
            f"the others spent {1e3 * w.seconds:.1f} ms in them until it came"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        return asdict(self)


def table(kind: str, rows: list[Part]) -> str:
    """The parts in plain text, milliseconds a rank."""
    lines = [(kind, "ms", "comm ms", "exposed ms", "hidden", "calls", "MB sent")]
    lines += [(row.name[:70], *cells(row)) for row in rows[:12]]
    return "\n".join(aligned(lines, left=1) + [f"and {len(rows) - 12} more"] * (len(rows) > 12))


def cells(row: Part) -> tuple[str, ...]:
    """What stands beside the name of a part."""
    hidden = f"{1 - row.exposed / row.total:.0%}" if row.total else "-"
    times = (f"{1e3 * t:.2f}" for t in (row.seconds, row.total, row.exposed))
    return (*times, hidden, f"{row.calls:.4g}", f"{row.num_bytes / 1e6:.2f}")


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
    return Breakdown(parts, _waited(comm), list(timeline.notes))


def _part(
    name: str,
    seconds: float,
    comm: dict[int, list[Span]],
    busy: dict[int, list[Interval]],
    window: dict[int, Interval] | None = None,
) -> Part:
    total = exposed = calls = num_bytes = 0.0
    for rank, spans in comm.items():
        a, b = (window or {}).get(rank, (float("-inf"), float("inf")))
        talking = intersect(covered(spans), [(a, b)])
        whole, hidden = measure(talking), measure(intersect(talking, busy[rank]))
        total, exposed = total + whole, exposed + whole - hidden
        begun = [s.num_bytes for s in spans if a <= s.start < b]
        calls, num_bytes = calls + len(begun), num_bytes + sum(begun)
    n = max(1, len(comm))
    return Part(name, seconds, total / n, exposed / n, calls / n, num_bytes / n)


def _steps(timeline: Timeline, comm: dict, busy: dict) -> list[Part]:
    windows: dict[str, dict[int, Interval]] = defaultdict(dict)
    for rank, steps in timeline.steps.items():
        for name, start, end in steps:
            windows[name][rank] = start, end
    rows = []
    for name, window in sorted(windows.items(), key=lambda item: min(item[1].values())):
        mine = {rank: comm[rank] for rank in window if rank in comm}
        seconds = statistics.mean(end - start for start, end in window.values())
        rows.append(_part(name, seconds, mine, busy, window))
    if len(rows) > 1:
        fields = ("seconds", "total", "exposed", "calls", "num_bytes")
        values = (statistics.median(getattr(row, field) for row in rows) for field in fields)
        rows.insert(0, Part("median", *values))
    return rows


def _waited(comm: dict[int, list[Span]]) -> list[Waited]:
    """By rank, the longest first: only collectives of a group that is named, or of all ranks."""
    shared: dict[Any, dict[int, Span]] = defaultdict(dict)
    for rank, spans in comm.items():
        for key, span in matched(spans).items():
            if span.meta.get("group") or span.axis == "world":
                shared[key][rank] = span
    seconds, last, count = defaultdict(float), defaultdict(int), defaultdict(int)
    for spans in shared.values():
        if len(spans) > 1 and len({span.name for span in spans.values()}) == 1:
            late = max(spans, key=lambda rank: spans[rank].start)
            came = spans[late].start
            seconds[late] += sum(max(0.0, min(came, s.end) - s.start) for s in spans.values())
            last[late] += 1
            for rank in spans:
                count[rank] += 1
    order = sorted(seconds, key=lambda rank: -seconds[rank])
    return [Waited(rank, seconds[rank], last[rank], count[rank]) for rank in order]
