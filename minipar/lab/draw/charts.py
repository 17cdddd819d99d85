"""Curves and bars, labelled where they are, and the table of colours."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, FuncFormatter, LogLocator
from matplotlib.transforms import Bbox

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, GRID, INK, KIND, MUTED, PAPER, SERIES, Point, colour


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    note: str = "",
    points: Iterable[str] = (),
    logx: bool = False,
    logy: bool = False,
    ylim: tuple[float, float] | None = None,
    colours: Mapping[str, str] | None = None,
    key: bool = False,
    nested: bool = False,
) -> Figure:
    """Draw curves `{name: (x, y)}` with their names at their ends; those in `points` are marks.

    Marks with names of their own have shapes of their own, as colours look alike in grey.

    With `key` the names stand below the picture, for curves that end in one place; with `ylim` the
    axis stays as it is from picture to picture. With `nested` each curve is thinner than the curve
    before, so that equal ones are seen.

    A name that begins with "_" is not shown: for dots that belong to a line, in its colour.
    """
    points = set(points)
    names = [name for name in lines if not name.startswith("_")]
    longest = 0 if key else max(map(len, names), default=0)
    width, height = 7.2, 3.9
    figure = pen.figure(width, height, title, note)
    right = min(2.6, 0.085 * longest + 0.3)
    ax = pen.panel(figure, 0.75, 0.72, width - 0.75 - right, height - 1.3)
    ax.spines["bottom"].set(visible=True, color=MUTED, lw=0.8)
    ax.grid(axis="y", color=GRID, lw=0.8)
    xs, ys = ([v for xy in lines.values() for v in xy[i]] for i in (0, 1))
    if logx:
        ax.set_xscale("log")
        _log_ticks(ax.xaxis, xs)
    if logy:
        ax.set_yscale("log")
        _log_ticks(ax.yaxis, ylim or ys)
    if ylim:
        ax.set_ylim(ylim)
    ax.minorticks_off()
    shapes = dict(zip((n for n in names if n in points), itertools.cycle("osDXP"), strict=False))
    ends = []
    for i, (name, (x, y)) in enumerate(lines.items()):
        ink = (colours or {}).get(name, SERIES[i % len(SERIES)])
        if name in points:
            ax.plot(x, y, shapes.get(name, "o"), color=ink, ms=5, mec=PAPER, mew=0.8, zorder=4)
        else:
            inner = len(lines) - 1 - i  # curves that are to lie within this one
            wide = 2.0 + min(1.6, 3.5 / len(lines)) * nested * inner
            ax.plot(x, y, color=ink, lw=wide, solid_capstyle="round", zorder=3)
        if name in names:
            finite = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
            ends.append((*(finite or [(x[-1], math.nan)])[-1], name, ink))
    if key:
        pen.key(figure, [(ink, name) for *_, name, ink in ends], 0.75, 0.12)
    else:
        _end_labels(ax, ends)
    pen.label(ax, xlabel, ylabel)
    return figure


def _log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Set more ticks than powers of ten, for values that are near; powers of two get their own."""
    if not min(values, default=0) > 0 or max(values) >= 200 * min(values):
        return
    doubles = all(math.log2(v).is_integer() for v in values)
    axis.set_major_locator(
        FixedLocator(sorted(set(values))) if doubles else LogLocator(subs=(1, 2, 5))
    )
    axis.set_major_formatter(FormatStrFormatter("%g"))
    if doubles and max(values) >= 1e6:  # which %g writes as 1.04858e+06
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"$2^{{{math.log2(v):.0f}}}$"))


def _end_labels(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write names at the ends of curves, pushed apart until none covers another.

    A thin line leads from the end of a curve to its name, where that is far away. A curve without a
    finite value, which is not to be seen, has its name at the foot.
    """
    ax.get_xlim(), ax.get_ylim()  # matplotlib fits the limits to the data when asked for them
    apart = 0.18 / pen.inches_of(ax)
    to_axes = ax.transData + ax.transAxes.inverted()
    lowest = -1.0
    for y, x, name, ink in sorted(
        (*(to_axes.transform((x, y))[::-1] if math.isfinite(y) else (0.0, 1.0)), name, ink)
        for x, y, name, ink in ends
    ):
        lowest = max(y, lowest + apart)
        if math.dist((x, y), (1.0, lowest)) > 0.12:
            way = {"lw": 0.7, "ls": ":", "transform": ax.transAxes, "clip_on": False, "zorder": 2}
            ax.plot([x, 1.01], [y, lowest], color=ink, **way)
        pen.text(ax, 1.015, lowest, name, color=pen.readable(ink), transform=ax.transAxes)


def loss_curves(
    losses: Mapping[str, Sequence[float]], *, title: str = "", note: str = ""
) -> Figure:
    """Draw losses by step `{name: [loss of step 0, ...]}`; equal curves stay visible."""
    lines = {name: (range(len(values)), list(values)) for name, values in losses.items()}
    return curves(lines, xlabel="step", ylabel="loss", title=title, note=note, nested=True)


def label_points(
    ax: Axes, points: Sequence[Point], names: Sequence[str], inks: Sequence[str]
) -> None:
    """Write each name beside its point, where it covers no point and no other name."""
    dots = ax.transData.transform(points)  # pixels
    taken = [Bbox.from_bounds(x - 10, y - 10, 20, 20) for x, y in dots]
    spots = [(side, up) for up in (0, 12, -12, 22, -22) for side in ("left", "right")]
    for i in sorted(range(len(names)), key=lambda i: -dots[i][1]):
        style = {"size": 8.5, "color": pen.readable(inks[i]), "textcoords": "offset points"}
        for side, up in [*spots, spots[0]]:
            at = (7 if side == "left" else -7), up
            text = ax.annotate(names[i], points[i], at, ha=side, va="center", **style)
            box = text.get_window_extent()
            inside = ax.bbox.x0 < box.x0 and box.x1 < ax.bbox.x1 + 30
            if inside and not box.count_overlaps(taken):
                break
            text.remove()
        else:
            ax.add_artist(text)
        taken.append(box)


def bars(
    values: Mapping[str, float | Mapping[str, float]],
    *,
    unit: str = "",
    title: str = "",
    note: str = "",
    highlight: str | None = None,
    colours: Mapping[str, str] | None = None,
    longest: float | None = None,
    mark: float | None = None,
) -> Figure:
    """Draw horizontal bars `{name: value}`, or stacked ones `{name: {part: value}}`.

    Parts named as a kind of work, an axis or a part of memory ("weights") have its colour, unless
    `colours` has one for them. A part says its value where there is room. Bars that are all 100 %
    do not say so. A bar longer than `longest` is cut off there, with an arrow. At `mark` there is a
    line.
    """
    stacked = {n: dict(v) if isinstance(v, Mapping) else {"": v} for n, v in values.items()}
    names = list(dict.fromkeys(part for parts in stacked.values() for part in parts if part))
    of_memory = {n: ink for n in names if (ink := pen.held(n))}
    plain = pen.HELD_OTHERS if of_memory else SERIES  # no loud colour beside the palette of memory
    inks = {n: plain[i % len(plain)] for i, n in enumerate(n for n in names if n not in of_memory)}
    inks |= {n: colour(n) for n in names if n in KIND or n in AXIS or n == "exposed"}
    inks |= of_memory | dict(colours or {})
    left = 0.3 + 0.075 * max(map(len, stacked), default=0)
    width, row = 7.2, 0.36
    foot = 0.3 + (0.3 if names else 0) + (0.2 if mark is not None else 0)
    height = 0.55 + row * len(stacked) + foot
    figure = pen.figure(width, height, title, note)
    wide = width - left - 0.2
    ax = pen.panel(figure, left, foot, wide, row * len(stacked))
    most = max((sum(parts.values()) for parts in stacked.values()), default=1.0)
    is_fixed, longest = longest is not None, longest or most or 1.0
    sums = {name: pen.number(sum(parts.values())) for name, parts in stacked.items()}
    labels = {name: f"{total} {unit}".strip() for name, total in sums.items()}
    if unit == "%" and names and set(sums.values()) == {"100"}:
        labels = dict.fromkeys(labels, "")
    labels |= {n: f"→ {labels[n]}" for n, p in stacked.items() if sum(p.values()) > longest}
    widest = max(map(len, labels.values()), default=0)
    room = 0.25 + 0.085 * (max(widest, 10) if is_fixed else widest)  # inches, for the values
    pen.bar_rows(ax, stacked, longest * wide / (wide - room))
    for i, (name, parts) in enumerate(stacked.items()):
        start = 0.0
        for part, value in parts.items():
            said, value = pen.number(value), min(value, longest - start)
            ink = inks.get(part, KIND["forward" if highlight not in (None, name) else "backward"])
            ax.barh(i, value, left=start, height=0.62, color=ink, edgecolor=PAPER, lw=0.7)
            if len(parts) > 1 and value / longest * (wide - room) > 0.08 * len(said) + 0.06:
                style = {"size": 7.5, "ha": "center", "color": pen.ink_on(ink)}
                pen.text(ax, start + value / 2, i, said, **style)
            start += value
        weight = "bold" if name == highlight else "normal"
        above = {"bbox": {"fc": PAPER, "lw": 0, "pad": 1}, "zorder": 5} if mark is not None else {}
        pen.text(ax, start + 0.012 * longest, i, labels[name], weight=weight, **above)
    if mark is not None:
        ax.axvline(mark, color=INK, lw=1.5, zorder=4)
        ax.set_xticks([mark], [f"{pen.number(mark)} {unit}".strip()], color=INK, fontsize=9)
    if names:
        legend = [(inks[n], n.replace("_", " ")) for n in names]
        pen.key(figure, legend, left, 0.3, width - left)
    return figure
