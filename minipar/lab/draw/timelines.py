"""Timelines: who computes, who talks, who waits; compute above communication, exposed in red."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, EXPOSED, GRID, INK, KIND, LEFT, MUTED, PAPER, RIGHT, WIDTH
from minipar.observe.spans import NOT_COMPUTE, Interval, Span, intersect, measure, subtract, union
from minipar.observe.timeline import Timeline

Piece = tuple[float, float, str]  # start and end in seconds, name
Lane = tuple[str, str]  # "work", "waits", "hidden" or "exposed"; and the kind or the axis
UNEVEN = 0.2
"""Ranks whose waiting differs by more than this share of the time are the finding."""


def timeline(
    timeline: Timeline,
    *,
    title: str = "",
    xlim: tuple[float, float] | None = None,
    unit: str = "a step",
) -> Figure:
    """Draw who computes, who talks and who waits: a row per rank, compute above communication.

    `xlim` in milliseconds zooms; `unit` is what was recorded, for the finding "308 ms a step, 87 %
    of communication hidden", which is the title, or stands opposite of `title`. Raises ValueError
    when there are no spans.
    """
    return before_after({title: timeline}, xlim=xlim, unit=unit)


def before_after(
    timelines: Mapping[str, Timeline],
    *,
    xlim: tuple[float, float] | None = None,
    unit: str = "a step",
) -> Figure:
    """Draw timelines one below the other on one time axis: `{"After backward": a, ...}`.

    Arguments and errors are those of `timeline`.
    """
    _check_spans(timelines)
    shown = [t.shifted() for t in timelines.values()]
    xlim = xlim or (0.0, 1.005e3 * max(t.duration for t in shown))
    row = min(0.42, max(0.09, 6.5 / sum(len(t.ranks) for t in shown)))  # inches
    inch = (WIDTH - LEFT - RIGHT) / (xlim[1] - xlim[0])  # of a millisecond
    numbered = _layers_fit(shown, 1e3 * inch, 0.44 * row)
    heights = [row * len(t.ranks) + 0.08 for t in shown]
    entries = legend(shown, xlim) + [("", "number: layer")] * numbered
    figure, panels = pen.stack(heights, entries, "milliseconds", [t.label for t in shown])
    for ax, title, t in zip(panels, timelines, shown, strict=True):
        lanes(ax, t, xlim, numbered)
        is_loud = t.hidden_fraction < 0.5 and not _waiting(t)  # nan, without communication, is not
        pen.headline(ax, title, finding(t, unit), EXPOSED if is_loud else INK)
    return figure


def finding(timeline: Timeline, unit: str = "a step") -> str:
    """Return the sentence that a timeline says: "308 ms a step, 87 % of communication hidden".

    If some ranks wait much longer than others, this is the finding: "rank 0 waits 66 % of it".
    """
    hidden = timeline.hidden_fraction
    said = f"{100 * hidden:.0f} % of communication hidden"
    if math.isnan(hidden):
        said = "no communication"
    elif hidden < 0.005:
        said = "nothing hidden"
    if waiting := _waiting(timeline):
        ranks = [str(rank) for rank in waiting]
        who = f"ranks {', '.join(ranks[:-1])} and {ranks[-1]} wait" if ranks[1:] else ""
        if len(ranks) > 4:
            who = f"{len(ranks)} of {len(timeline.ranks)} ranks wait"
        share = sum(waiting.values()) / len(waiting)
        said = f"{who or f'rank {ranks[0]} waits'} {100 * share:.0f} % of it"
    return f"{pen.milliseconds(1e3 * timeline.duration)} {unit}".strip() + f", {said}"


def _waiting(t: Timeline) -> dict[int, float]:
    """Return the ranks that wait much longer than the busiest, and their share of the time."""
    waits = {rank: 1 - measure(busy) / t.duration for rank, busy in t.busy().items()}
    limit = min(waits.values()) + UNEVEN
    return {rank: share for rank, share in waits.items() if share > limit}


def _check_spans(timelines: Mapping[str, Timeline]) -> None:
    for title, t in timelines.items():
        if not t.spans:
            raise ValueError(
                f"{title or 'the timeline'} has no spans; was `record` around any work?"
            )
        if not t.duration > 0:
            raise ValueError(f"{title or 'the timeline'} has no length: its spans take no time")
    if not timelines:
        raise ValueError("there is no timeline to draw")


# ---------------------------------------------------------------------- bars
def lanes(ax: Axes, t: Timeline, xlim: tuple[float, float], numbered: bool = False) -> None:
    """Draw the ranks of a timeline that starts at 0 s; `xlim` in milliseconds.

    `numbered`: each block of a model says its number.
    """
    ax.set_xlim(xlim)
    ax.set_ylim(-0.06, len(t.ranks) + 0.06)
    axes = {s.axis for s in t if s.kind == "comm"}
    gap = 0.003 * (xlim[1] - xlim[0])
    inch = 1e3 * ax.get_position().width * ax.figure.get_figwidth() / (xlim[1] - xlim[0])
    two_lanes = "host" in axes and len(axes) > 1  # copies run below what ranks say to each other
    for row, rank in enumerate(reversed(t.ranks)):
        for (lane, name), pieces in _pieces(t.select(rank=rank), (t.start, t.end)).items():
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
            if lane == "work":
                pieces = _named(pieces, numbered, inch, 0.44 * pen.inches_of(ax) / len(t.ranks))
            _bars(ax, row + low, high, pieces, style)
            if lane == "exposed":  # one outline around what follows without a gap to be seen
                joined = union((1e3 * s, 1e3 * e + gap) for s, e, _ in pieces)
                joined = [(s, e - gap - s) for s, e in joined]
                style = {"facecolor": "none", "edgecolor": EXPOSED, "lw": 1.1, "zorder": 3}
                ax.broken_barh(joined, (row + low, high), **style)
    pen.quiet(ax)
    every = math.ceil(0.16 / (pen.inches_of(ax) / len(t.ranks)))
    ticks = [(len(t.ranks) - i - 0.5, f"rank {r}") for i, r in enumerate(t.ranks) if i % every == 0]
    ax.set_yticks([y for y, _ in ticks], [name for _, name in ticks], color=MUTED, fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(10))
    ax.grid(axis="x", color=GRID, lw=0.8)
    end = 1e3 * t.end
    if xlim[0] <= end <= xlim[1]:
        ax.axvline(end, color=INK, lw=0.9)


def _pieces(mine: Timeline, whole: Interval) -> dict[Lane, list[Piece]]:
    """Return the bars of one rank by what gives their look; `whole` is the time of all ranks."""
    busy = union((s.start, s.end) for s in mine if s.kind not in NOT_COMPUTE)
    pieces: dict[Lane, list[Piece]] = defaultdict(list)
    pieces["waits", ""] = [(*gap, "") for gap in subtract([whole], busy)]
    for s in mine:
        if s.kind != "comm":
            known = s.kind if s.kind in KIND else "compute"
            pieces["work", known].append((s.start, s.end, _short(s.name)))
            continue
        message, axis = [(s.start, s.end)], s.axis or "world"
        pieces["hidden", axis] += [(*p, _message(s)) for p in intersect(message, busy)]
        pieces["exposed", axis] += [(*p, _message(s)) for p in subtract(message, busy)]
    return pieces


def _bars(ax: Axes, y: float, height: float, pieces: Iterable[Piece], style: pen.Style) -> None:
    """Draw bars (start and end in seconds, name), with their names where they fit.

    Pieces too narrow to see are joined with what touches them: so a trace of 100,000 kernels is
    drawn in a moment, and in its true colours.
    """
    left, right = ax.get_xlim()
    pixel = (right - left) / (ax.get_position().width * ax.figure.get_figwidth() * pen.DPI)
    joined: list[Piece] = []
    for start, end, name in sorted((1e3 * s, 1e3 * e, n) for s, e, n in pieces):
        if joined:
            last_start, last_end, last_name = joined[-1]
            if end <= last_end:
                continue
            start = max(start, last_end)  # collectives in flight together are drawn as a queue
            small = min(end - start, last_end - last_start) < 3 * pixel
            if small and start - last_end < pixel / 2:
                # The sum keeps a name only if nearly all of it has that name.
                own, longest = max((end - start, name), (last_end - last_start, last_name))
                end = max(last_end, end)
                same = name == last_name or own > 0.8 * (end - last_start)
                joined[-1] = (last_start, end, longest if same else "")
                continue
        joined.append((start, end, name))
    wide = [(s, e - s) for s, e, _ in joined if e - s >= 4 * pixel]
    narrow = [(s, max(e - s, pixel)) for s, e, _ in joined if e - s < 4 * pixel]
    tall = height * pen.inches_of(ax) / (ax.get_ylim()[1] - ax.get_ylim()[0])  # inches
    line = {"lw": min(style["lw"], 5 * tall), "zorder": 2}
    ax.broken_barh(wide, (y, height), **style | line)
    solid = style["ec"] if style["ec"] != PAPER and "hatch" not in style else style["fc"]
    ax.broken_barh(narrow, (y, height), facecolor=solid, lw=0, zorder=2)
    size = _letters(tall)
    for start, end, name in joined if size else ():
        if name and (end - start) / pixel > _inches_of(name, size) * pen.DPI:
            ink = {"color": pen.ink_on(style["fc"]), "ha": "center", "clip_on": True}
            pen.text(ax, (start + end) / 2, y + height / 2 - 0.01, name, size=size, **ink)


def _letters(tall: float) -> float:
    """Return the size of letters, in points, in a bar of so many inches; 0: too small to read."""
    size = min(7.0, 72 * tall * 0.62)
    return size if size >= 4.5 else 0.0


def _inches_of(name: str, size: float) -> float:
    return (0.68 * len(name) + 0.6) * size / 72


def _layers_fit(shown: Sequence[Timeline], inch: float, tall: float) -> bool:
    """True if every block has room for its number: all boxes have one, or none.

    `inch` is the length of a second, `tall` the height of a box in inches. Lines do not count.
    """
    size = _letters(tall)
    blocks = [(s.duration, _short(s.name)) for t in shown for s in t if s.kind in KIND]
    blocks = [(seconds, number) for seconds, number in blocks if number.isdigit()]
    wide = [(seconds * inch, number) for seconds, number in blocks if seconds * inch > 0.04]
    fit = all(inches > _inches_of(number, size) for inches, number in wide)
    return bool(wide and size and fit)


def _named(pieces: list[Piece], numbered: bool, inch: float, tall: float) -> list[Piece]:
    """Return the pieces with names that all boxes of one name have room for; lines do not count."""
    need = {name: _inches_of(name, _letters(tall)) for _, _, name in pieces}
    left_out = {n for s, e, n in pieces if 0.04 < (e - s) * inch < need[n]}
    if not numbered:
        left_out |= {name for name in need if name.isdigit()}
    return [(s, e, "" if name in left_out else name) for s, e, name in pieces]


def _short(name: str) -> str:
    """Return "3" for layers.3 of a Llama; time between blocks has no name."""
    return "" if name in ("forward", "backward", "step") else name.rsplit(".", 1)[-1]


def _message(span: Span) -> str:
    size = f" {pen.num_bytes(span.num_bytes)}" if span.num_bytes else ""
    return _verb(span) + size


def _verb(span: Span) -> str:
    return span.name.replace("_", "-")


# ---------------------------------------------------------------------- legend
def legend(shown: Sequence[Timeline], xlim: tuple[float, float]) -> list[pen.Entry]:
    """Return the entries of what can be seen: work, waiting, then communication.

    What takes less than two pixels in all is left out; each bar takes one at least. `xlim` may end
    at infinity, for whole timelines.
    """
    last = min(xlim[1], 1.005e3 * max((t.duration for t in shown), default=0.0))
    pixel = (last - xlim[0]) / ((WIDTH - LEFT - RIGHT) * pen.DPI)
    length: Counter[Lane] = Counter()  # milliseconds of all pieces in the picture
    for t in shown:
        for rank in t.ranks:
            for key, pieces in _pieces(t.select(rank=rank), (t.start, t.end)).items():
                inside = (min(1e3 * e, xlim[1]) - max(1e3 * s, xlim[0]) for s, e, _ in pieces)
                length[key] += sum(max(ms, pixel) for ms in inside if ms > 0)
    seen = {key for key, ms in length.items() if ms >= 2 * pixel}
    names = {kind: kind.replace("_", " ") for kind in KIND}
    work = {s.name for t in shown for s in t if s.kind == "compute"}
    if len(work) == 1 and min(work):  # all other work is one and the same
        (name,) = work
        names["compute"] = "other work" if name == "step" else name
    entries: list[pen.Entry] = [
        (KIND[kind], name) for kind, name in names.items() if ("work", kind) in seen
    ]
    if ("waits", "") in seen:
        entries.append((pen.WAITS, "waits"))
    axes = {axis for lane, axis in seen if lane in ("hidden", "exposed")}
    looks = {lane for lane, _ in seen & {(w, a) for w in ("hidden", "exposed") for a in axes}}
    said = {axis: _talk(axis, shown) for axis in sorted(axes, key=lambda a: [*AXIS, a].index(a))}
    draw = {"hidden": pen.hidden, "exposed": pen.exposed}
    if len(said) == 1:
        ((axis, what),) = said.items()
        looks_of = {what + f", {look}": draw[look](pen.colour(axis)) for look in sorted(looks)}
        return entries + [(style, text) for text, style in reversed(looks_of.items())]
    entries += [(pen.colour(axis), what) for axis, what in said.items()]
    generic = {"hidden": "pale: hidden", "exposed": "red outline: exposed"}
    return entries + [(draw[k](MUTED), text) for k, text in generic.items() if k in looks]


def _talk(axis: str, shown: Sequence[Timeline]) -> str:
    """Return the words for communication along an axis: "dp all-reduce", if it is but one verb."""
    if axis == "host":
        return "copies from and to the host"
    spans = (s for t in shown for s in t if s.kind == "comm")
    verbs = {_verb(s) for s in spans if (s.axis or "world") == axis}
    what = verbs.pop() if len(verbs) == 1 else "communication"
    return what if axis == "world" else f"{axis} {what}"
