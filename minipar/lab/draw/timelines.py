"""Timelines: who computes, who talks, who waits; compute above communication, exposed in red."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, EXPOSED, GRID, INK, KIND, LEFT, MUTED, PAPER, RIGHT, WIDTH
from minipar.observe.spans import NOT_COMPUTE, Span, intersect, subtract, union
from minipar.observe.timeline import Timeline

Piece = tuple[float, float, str]  # start and end in seconds, name


def timeline(
    timeline: Timeline,
    *,
    title: str = "",
    xlim: tuple[float, float] | None = None,
    unit: str = "a step",
) -> Figure:
    """Who computes, who talks, who waits: a row per rank, compute above communication.

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
    """Timelines one below the other on one time axis: `{"After backward": a, "Overlapped": b}`.

    Arguments and errors are those of `timeline`.
    """
    _check_spans(timelines)
    shown = [t.shifted() for t in timelines.values()]
    xlim = xlim or (0.0, 1.005e3 * max(t.duration for t in shown))
    most = max(len(t.ranks) for t in shown)
    row = min(0.42, max(0.09, 6.5 / (len(shown) * most)))  # inches
    heights = [row * len(t.ranks) + 0.08 for t in shown]
    labels = [t.label for t in shown]
    figure, panels = pen.stack(heights, legend(shown, xlim), "milliseconds", labels)
    for ax, title, t in zip(panels, timelines, shown, strict=True):
        lanes(ax, t, xlim)
        _heading(ax, title, t, xlim, unit)
    return figure


def finding(timeline: Timeline, unit: str = "a step") -> str:
    """The one sentence that a timeline says: "308 ms a step, 87 % of communication hidden"."""
    hidden = timeline.hidden_fraction
    said = f"{100 * hidden:.0f} % of communication hidden"
    if math.isnan(hidden):
        said = "no communication"
    elif hidden < 0.005:
        said = "nothing hidden"
    return f"{pen.milliseconds(1e3 * timeline.duration)} {unit}".strip() + f", {said}"


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


def lanes(ax: Axes, t: Timeline, xlim: tuple[float, float]) -> None:
    """Draw the ranks of a timeline that starts at 0 s; `xlim` in milliseconds."""
    pixel = (xlim[1] - xlim[0]) / (ax.get_position().width * ax.figure.get_figwidth() * pen.DPI)
    ax.set_xlim(xlim)
    ax.set_ylim(-0.06, len(t.ranks) + 0.06)
    axes = {s.axis for s in t if s.kind == "comm"}
    two_lanes = "host" in axes and len(axes) > 1  # copies run below what ranks say to each other
    for row, rank in enumerate(reversed(t.ranks)):
        for key, pieces in _pieces(t.select(rank=rank)).items():
            low, high = (0.46, 0.44) if key in KIND else (0.16, 0.2)
            if key.startswith("exposed"):
                low, high = 0.08, 0.36
            if two_lanes and key not in KIND:
                low, high = (low / 2, high / 2) if "host" in key else (0.22 + low / 2, high / 2)
            _bars(ax, row + low, high, pieces, pen.colour(key), pixel)
    pen.quiet(ax)
    every = math.ceil(0.16 / (pen.inches_of(ax) / len(t.ranks)))
    ticks = [(len(t.ranks) - i - 0.5, f"rank {r}") for i, r in enumerate(t.ranks) if i % every == 0]
    ax.set_yticks([y for y, _ in ticks], [name for _, name in ticks], color=MUTED, fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(10))
    ax.grid(axis="x", color=GRID, lw=0.8)
    end = 1e3 * t.duration
    if xlim[0] <= end <= xlim[1]:
        ax.axvline(end, color=INK, lw=0.9)


def _pieces(mine: Timeline) -> dict[str, list[Piece]]:
    """The bars of one rank by what gives their colour: a kind of work, an axis, or "exposed"."""
    busy = union((s.start, s.end) for s in mine if s.kind not in NOT_COMPUTE)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for s in mine:
        if s.kind != "comm":
            known = s.kind if s.kind in KIND else "compute"
            pieces[known].append((s.start, s.end, _short(s.name)))
            continue
        whole = [(s.start, s.end)]
        pieces[s.axis or "world"] += [(*p, _message(s)) for p in intersect(whole, busy)]
        exposed = "exposed host" if s.axis == "host" else "exposed"
        pieces[exposed] += [(*p, _message(s)) for p in subtract(whole, busy)]
    return pieces


def _bars(
    ax: Axes, y: float, height: float, pieces: Iterable[Piece], fill: str, pixel: float
) -> None:
    """Bars (start and end in seconds, name), parted by white hairlines; names where they fit.

    Pieces too narrow to see are joined with what touches them: so a trace of 100,000 kernels is
    drawn in a moment, and in its true colours.
    """
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
    hairline = min(0.7, 5 * tall)
    ax.broken_barh(wide, (y, height), facecolor=fill, edgecolor=PAPER, lw=hairline, zorder=2)
    ax.broken_barh(narrow, (y, height), facecolor=fill, lw=0, zorder=2)
    size = min(7.0, 72 * tall * 0.62)  # points
    if size < 4.5:
        return
    for start, end, name in joined:
        if name and (end - start) / pixel > (0.68 * len(name) + 1.2) * size / 72 * pen.DPI:
            style = {"size": size, "color": pen.ink_on(fill), "ha": "center", "clip_on": True}
            pen.text(ax, (start + end) / 2, y + height / 2 - 0.01, name, **style)


def _short(name: str) -> str:
    """layers.3 of a Llama is "3"; time between blocks has no name."""
    if name in ("forward", "backward"):
        return ""
    return name.rsplit(".", 1)[-1]


def _message(span: Span) -> str:
    size = f" {pen.num_bytes(span.num_bytes)}" if span.num_bytes else ""
    return span.name.replace("_", "-") + size


def _heading(ax: Axes, title: str, t: Timeline, xlim: tuple[float, float], unit: str) -> None:
    said, start = finding(t, unit), xlim[0]
    top = ax.get_ylim()[1] + 0.1 * ax.get_ylim()[1] / pen.inches_of(ax)
    ink = EXPOSED if t.hidden_fraction < 0.5 else INK  # nan, without communication, is not loud
    place = {"va": "bottom", "clip_on": False}
    if not title:
        ax.text(start, top, said, size=12, weight="bold", color=ink, **place)
        return
    ax.text(start, top, title, size=12, weight="bold", color=INK, **place)
    place |= {"gid": pen.FINDING, "size": 10, "color": ink}
    # The finding ends where the step ends, unless it would run into the title.
    end = min(1e3 * t.duration, xlim[1])
    inch = (xlim[1] - start) / (WIDTH - LEFT - RIGHT)  # milliseconds
    if end - start < inch * ((0.62 * 12 * len(title) + 0.56 * 10 * len(said)) / 72 + 0.2):
        ax.text(start + inch * (0.66 * 12 * len(title) / 72 + 0.25), top, said, **place)
    else:
        ax.text(end, top, said, ha="right", **place)


def legend(shown: Sequence[Timeline], xlim: tuple[float, float]) -> list[tuple[str, str]]:
    """(colour, text) of what can be seen: work first, then communication, exposed last.

    What takes less than two pixels in all is left out; each bar takes one at least. `xlim` may end
    at infinity, for whole timelines.
    """
    last = min(xlim[1], 1.005e3 * max((t.duration for t in shown), default=0.0))
    pixel = (last - xlim[0]) / ((WIDTH - LEFT - RIGHT) * pen.DPI)
    length: dict[str, float] = defaultdict(float)  # milliseconds, of all pieces in the picture
    for t in shown:
        for rank in t.ranks:
            for key, pieces in _pieces(t.select(rank=rank)).items():
                for start, end, _ in pieces:
                    inside = min(1e3 * end, xlim[1]) - max(1e3 * start, xlim[0])
                    # Copies that are exposed are "exposed host".
                    length[key.split()[0]] += max(inside, pixel) if inside > 0 else 0.0
    seen = {key for key, ms in length.items() if ms >= 2 * pixel}
    verbs = {s.name.replace("_", "-") for t in shown for s in t if s.kind == "comm"}
    what = verbs.pop() if len(verbs) == 1 else "communication"
    axes = sorted(seen - KIND.keys() - {"exposed"}, key=lambda a: ([*AXIS, a].index(a), a))
    hidden = {a: f"{what}, hidden" if len(axes) == 1 else f"{a}, hidden" for a in axes}
    names = {kind: kind.replace("_", " ") for kind in KIND} | hidden
    work = {s.name for t in shown for s in t if s.kind == "compute"}
    if len(work) == 1 and min(work):  # all other work is one and the same
        (name,) = work
        names["compute"] = "other work" if name == "step" else name
    names["exposed"] = f"{what}, exposed"
    return [(pen.colour(key), text) for key, text in names.items() if key in seen]
