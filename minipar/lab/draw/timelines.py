"""Timelines: who computes, who talks, who waits; compute above communication, exposed in red."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, EXPOSED, GRID, INK, KIND, LEFT, MUTED, PAPER, RIGHT, WIDTH
from minipar.observe.spans import NOT_COMPUTE, Span, intersect, measure, subtract, union
from minipar.observe.timeline import Timeline

Piece = tuple[float, float, str]  # start and end in milliseconds, name
Lane = tuple[str, str]  # "work", "waits", "hidden" or "exposed"; and the kind or the axis
UNEVEN = 0.2
"""If the waiting of ranks differs by more than this share of the time, it is the finding."""
ACROSS = WIDTH - LEFT - RIGHT  # inches of a panel


def timeline(timeline: Timeline, *, title: str = "", unit: str = "a step") -> Figure:
    """Draw who computes, who talks and who waits: a row per rank, compute above communication.

    `unit` is what was recorded, for the finding "308 ms a step, 87 % of communication hidden",
    which is the title, or stands opposite of `title`. Raises ValueError when there are no spans.
    """
    return before_after({title: timeline}, unit=unit)


def before_after(timelines: Mapping[str, Timeline], *, unit: str = "a step") -> Figure:
    """Draw timelines one below the other on one time axis: `{"After backward": a, ...}`.

    Arguments and errors are as in `timeline`.
    """
    for title, t in timelines.items():
        if not t.duration > 0:
            raise ValueError(f"{title or 'the timeline'} has no spans, or they take no time")
    shown = [t.shifted() for t in timelines.values()]
    end = 1.005e3 * max(t.duration for t in shown)
    row = min(0.42, max(0.09, 6.5 / sum(len(t.ranks) for t in shown)))  # inches
    numbered = row > 0.23 and _numbered(shown, 1e3 * ACROSS / end)
    entries = legend(shown, end) + [("", "number: layer")] * numbered
    heights = [row * len(t.ranks) + 0.08 for t in shown]
    figure, panels = pen.stack(heights, entries, "milliseconds", [t.label for t in shown])
    uneven = any(map(_waiting, shown))  # then waiting is the finding of all of them
    for ax, title, t in zip(panels, timelines, shown, strict=True):
        lanes(ax, t, end, numbered)
        is_loud = t.hidden_fraction < 0.5 and not uneven  # nan, without communication, is not
        pen.headline(ax, title, finding(t, unit, uneven), EXPOSED if is_loud else INK)
    return figure


def finding(timeline: Timeline, unit: str = "a step", uneven: bool = False) -> str:
    """Return the sentence that a timeline says: "308 ms a step, 87 % of communication hidden".

    If some ranks wait much longer than others, this is the finding: "rank 0 waits 66 % of it". A
    timeline beside such a one, `uneven`, says "no rank waits longer than 30 % of it".
    """
    hidden, waiting, ms = timeline.hidden_fraction, _waiting(timeline), 1e3 * timeline.duration
    said = f"{100 * hidden:.0f} % of communication hidden"
    if waiting:
        *others, last = map(str, waiting)
        who = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
        if len(waiting) > 4:
            who = f"{len(waiting)} of {len(timeline.ranks)} ranks"
        share = sum(waiting.values()) / len(waiting)
        said = f"{who} wait{'s' * (len(waiting) == 1)} {100 * share:.0f} % of it"
    elif uneven:
        said = f"no rank waits longer than {100 * max(_waits(timeline).values()):.0f} % of it"
    elif math.isnan(hidden):
        said = "no communication"
    elif hidden < 0.005:
        said = "nothing hidden"
    length = f"{ms:.0f}" if ms >= 20 else f"{ms:.3g}"
    return f"{length} ms {unit}".strip() + f", {said}"


def _waits(t: Timeline) -> dict[int, float]:
    return {rank: 1 - measure(busy) / t.duration for rank, busy in t.busy().items()}


def _waiting(t: Timeline) -> dict[int, float]:
    """Return the ranks that wait much longer than the busiest, and their share of the time."""
    waits = _waits(t)
    limit = min(waits.values()) + UNEVEN
    return {rank: share for rank, share in waits.items() if share > limit}


# ---------------------------------------------------------------------- bars
def lanes(ax: Axes, t: Timeline, end: float, numbered: bool = False) -> None:
    """Draw the ranks of a timeline that starts at 0 s; the axis ends after `end` milliseconds.

    `numbered`: each block of a model says its number.
    """
    ax.set_xlim(0, end)
    ax.set_ylim(-0.06, len(t.ranks) + 0.06)
    axes = {s.axis for s in t if s.kind == "comm"}
    gap = 0.003 * end
    two_lanes = "host" in axes and len(axes) > 1  # copies run below what ranks say to each other
    for row, rank in enumerate(reversed(t.ranks)):
        for (lane, name), pieces in _pieces(t, rank).items():
            ink = pen.colour(name)
            low, high = {"hidden": (0.16, 0.2), "exposed": (0.08, 0.36)}.get(lane, (0.46, 0.44))
            if two_lanes and lane in ("hidden", "exposed"):
                low, high = (low / 2 + 0.22 * (name != "host"), high / 2)
            style = {
                "work": {"fc": ink, "ec": PAPER, "lw": 0.7},
                "waits": pen.WAITS,
                "hidden": pen.hidden(ink),
                "exposed": {"fc": ink, "ec": PAPER, "lw": 0.5},
            }[lane]
            if not numbered:
                pieces = [(s, e, "" if word.isdigit() else word) for s, e, word in pieces]
            _bars(ax, row + low, high, pieces, style)
            if lane == "exposed":  # one outline around what follows without a gap to be seen
                joined = [(s, e - gap - s) for s, e in union((s, e + gap) for s, e, _ in pieces)]
                points = 72 * pen.inches_of(ax)[0] / end  # a thin outline around what is narrow
                style = {"lw": [min(1.1, 0.3 * points * length) for _, length in joined]}
                style |= {"facecolor": "none", "edgecolor": EXPOSED, "zorder": 3}
                ax.broken_barh(joined, (row + low, high), **style)
    every = math.ceil(0.16 * len(t.ranks) / pen.inches_of(ax)[1])
    ticks = {len(t.ranks) - i - 0.5: f"rank {t.ranks[i]}" for i in range(0, len(t.ranks), every)}
    size = 9 if t.ranks[-1] < 10_000 else 7.5
    ax.set_yticks([*ticks], [*ticks.values()], color=MUTED, fontsize=size)
    ax.xaxis.set_major_locator(MaxNLocator(10))
    ax.grid(axis="x", color=GRID, lw=0.8)
    ax.axvline(1e3 * t.end, color=INK, lw=0.9)


def _pieces(t: Timeline, rank: int) -> dict[Lane, list[Piece]]:
    """Return the bars of one rank, by lane and by kind or axis, which give them their style."""
    mine = t.select(rank=rank)
    busy = union((s.start, s.end) for s in mine if s.kind not in NOT_COMPUTE)
    pieces: dict[Lane, list[Piece]] = defaultdict(list)

    def add(lane: str, kind: str, times: Iterable[tuple[float, float]], name: str = "") -> None:
        pieces[lane, kind] += [(1e3 * start, 1e3 * end, name) for start, end in times]

    add("waits", "", subtract([(t.start, t.end)], busy))
    for s in mine:
        times = [(s.start, s.end)]
        if s.kind != "comm":
            add("work", s.kind if s.kind in KIND else "compute", times, _word(s))
        else:
            add("hidden", s.axis or "world", intersect(times, busy), _word(s))
            add("exposed", s.axis or "world", subtract(times, busy), _word(s))
    return pieces


def _word(span: Span) -> str:
    """Return what a bar says: "all-reduce 4 MB", the number of a block, or the name of work."""
    if span.kind == "comm":
        size = f" {pen.num_bytes(span.num_bytes)}" if span.num_bytes else ""
        return span.name.replace("_", "-") + size
    return "" if span.name in ("forward", "backward", "step") else span.name.rsplit(".", 1)[-1]


def _bars(ax: Axes, y: float, height: float, pieces: Iterable[Piece], style: pen.Style) -> None:
    """Draw bars, with their names where they fit.

    Pieces too narrow to see are joined with what touches them: so a trace of 100,000 kernels is
    drawn in a moment, and in its true colours. A joined bar has the name of a piece that is nearly
    all of it: "3" for a block and the short call after it.
    """
    wide, tall = pen.inches_of(ax)
    pixel = ax.get_xlim()[1] / (wide * pen.DPI)
    joined: list[tuple[float, float, str, float]] = []  # pieces, and how long the named part is
    for start, end, name in sorted(pieces):
        if joined:
            last_start, last_end, last_name, last_named = joined[-1]
            if end <= last_end:
                continue
            start = max(start, last_end)  # collectives in flight together are drawn as a queue
            small = min(end - start, last_end - last_start) < 3 * pixel
            if small and start - last_end < pixel / 2:
                named = last_named + end - start
                if name != last_name:
                    named, name = max((last_named, last_name), (end - start, name))
                joined[-1] = (last_start, end, name, named)
                continue
        joined.append((start, end, name, end - start))
    tall *= height / (ax.get_ylim()[1] - ax.get_ylim()[0])  # inches of a bar
    wide = [(s, e - s) for s, e, *_ in joined if e - s >= 4 * pixel]
    narrow = [(s, max(e - s, pixel)) for s, e, *_ in joined if e - s < 4 * pixel]
    line = {"lw": min(style["lw"], 5 * tall), "zorder": 2}
    ax.broken_barh(wide, (y, height), **style | line)
    solid = style["ec"] if style["ec"] != PAPER and "hatch" not in style else style["fc"]
    ax.broken_barh(narrow, (y, height), facecolor=solid, lw=0, zorder=2)
    size = min(7.0, 72 * tall * 0.62)
    for start, end, name, named in joined:
        fits = (end - start) / pixel > _inches_of(name, size) * pen.DPI
        if name and size >= 4.5 and fits and named > 0.9 * (end - start):
            ink = {"color": pen.ink_on(style["fc"]), "ha": "center", "clip_on": True}
            pen.text(ax, (start + end) / 2, y + height / 2 - 0.01, name, size=size, **ink)


def _inches_of(name: str, size: float = 7.0) -> float:
    return (0.68 * len(name) + 0.6) * size / 72


def _numbered(shown: Sequence[Timeline], inch: float) -> bool:
    """True if each block of a model has room for its number, or is but a line.

    `inch` is the length of a second.
    """
    words = [(inch * s.duration, _word(s)) for t in shown for s in t if s.kind != "comm"]
    blocks = [(wide, word) for wide, word in words if word.isdigit() and wide > 0.04]
    return bool(blocks) and all(wide > _inches_of(word) for wide, word in blocks)


# ---------------------------------------------------------------------- legend
def legend(shown: Sequence[Timeline], end: float) -> list[pen.Entry]:
    """Return the entries of what can be seen: work, waiting, then communication.

    What takes less than two pixels of `end` milliseconds in all is left out.
    """
    length: Counter[Lane] = Counter()  # milliseconds of all pieces in the picture
    for pieces in (_pieces(t, rank) for t in shown for rank in t.ranks):
        for key, each in pieces.items():
            length[key] += sum(end - start for start, end, _ in each)
    seen = {key for key, ms in length.items() if ms >= 2 * end / (ACROSS * pen.DPI)}
    work = {s.name for t in shown for s in t if s.kind == "compute"} - {"step"}
    names = {kind: kind.replace("_", " ") for kind in KIND}
    names["compute"] = work.pop() if len(work) == 1 else "other work"
    entries: list[pen.Entry] = [
        (KIND[kind], name) for kind, name in names.items() if ("work", kind) in seen
    ]
    if ("waits", "") in seen:
        entries.append((pen.WAITS, "waits"))
    talks = {(lane, axis) for lane, axis in seen if lane in ("hidden", "exposed")}
    looks = sorted({lane for lane, _ in talks}, reverse=True)  # "hidden" before "exposed"
    axes = sorted({axis for _, axis in talks}, key=lambda a: ([*AXIS, a].index(a), a))
    draw = {"hidden": pen.hidden, "exposed": pen.exposed}
    if len(axes) == 1:
        what, ink = _talk(axes[0], shown), pen.colour(axes[0])
        return entries + [(draw[look](ink), f"{what}, {look}") for look in looks]
    entries += [(pen.colour(axis), _talk(axis, shown)) for axis in axes]
    generic = {"hidden": "pale: hidden", "exposed": "red outline: exposed"}
    return entries + [(draw[look](MUTED), generic[look]) for look in looks]


def _talk(axis: str, shown: Sequence[Timeline]) -> str:
    """Return the words for communication along an axis: "dp all-reduce", if it is but one verb."""
    if axis == "host":
        return "copies from and to the host"
    spans = (s for t in shown for s in t if s.kind == "comm")
    verbs = {s.name.replace("_", "-") for s in spans if (s.axis or "world") == axis}
    what = verbs.pop() if len(verbs) == 1 else "communication"
    return what if axis == "world" else f"{axis} {what}"
