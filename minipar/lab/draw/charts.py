"""Curves and bars, labelled where they are."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, FuncFormatter, LogLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, GRID, INK, KIND, MUTED, PAPER, SERIES, colour


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

    Each named series of marks has its own shape, as colours look alike in grey.

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
    inks = {name: SERIES[i % len(SERIES)] for i, name in enumerate(lines)} | dict(colours or {})
    for inner, (name, (x, y)) in zip(reversed(range(len(lines))), lines.items(), strict=True):
        if name in points:
            style = {"ms": 5, "mec": PAPER, "mew": 0.8, "zorder": 4}
            ax.plot(x, y, shapes.get(name, "o"), color=inks[name], **style)
        else:  # `inner` curves are to lie within this one
            wide = 2.0 + min(1.6, 3.5 / len(lines)) * nested * inner
            ax.plot(x, y, color=inks[name], lw=wide, solid_capstyle="round", zorder=3)
    if key:
        pen.key(figure, [(inks[name], name) for name in names], 0.75, 0.12)
    else:
        _end_labels(ax, {name: lines[name] for name in names}, inks)
    pen.label(ax, xlabel, ylabel)
    return figure


def _log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Set more ticks than powers of ten, for values that are near; powers of two get their own."""
    if not min(values, default=0) > 0 or max(values) >= 200 * min(values):
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    if all(math.log2(v).is_integer() for v in values):
        axis.set_major_locator(FixedLocator(sorted(set(values))))
        if max(values) >= 1e6:  # which %g writes as 1.04858e+06
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"$2^{{{math.log2(v):.0f}}}$"))


def _end_labels(ax: Axes, lines: Mapping[str, tuple], inks: Mapping[str, str]) -> None:
    """Write names at the ends of curves, each above the one before: none covers another.

    A thin line leads from the end of a curve to its name, where that is far away. A curve without a
    finite value, which is not to be seen, has its name at the foot.
    """
    ax.get_xlim(), ax.get_ylim()  # matplotlib fits the limits to the data when asked for them
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = []
    for name, (x, y) in lines.items():
        finite = [at for at in zip(x, y, strict=True) if math.isfinite(at[1])]
        end = to_axes.transform(finite[-1]) if finite else (1.0, 0.0)
        ends.append((end[1], end[0], name))
    lowest = -1.0
    for y, x, name in sorted(ends):
        lowest = max(y, lowest + 0.18 / pen.inches_of(ax)[1])
        if math.dist((x, y), (1.0, lowest)) > 0.12:
            way = {"lw": 0.7, "ls": ":", "transform": ax.transAxes, "clip_on": False, "zorder": 2}
            ax.plot([x, 1.01], [y, lowest], color=inks[name], **way)
        pen.text(ax, 1.015, lowest, name, color=pen.readable(inks[name]), transform=ax.transAxes)


def loss_curves(
    losses: Mapping[str, Sequence[float]], *, title: str = "", note: str = ""
) -> Figure:
    """Draw losses by step `{name: [loss of step 0, ...]}`; equal curves stay visible."""
    lines = {name: (range(len(values)), list(values)) for name, values in losses.items()}
    return curves(lines, xlabel="step", ylabel="loss", title=title, note=note, nested=True)


def bars(
    values: Mapping[str, float | Mapping[str, float]],
    *,
    unit: str = "",
    title: str = "",
    note: str = "",
    highlight: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Draw horizontal bars `{name: value}`, or stacked ones `{name: {part: value}}`.

    Parts named as a kind of work, an axis or a part of memory ("weights") have its colour, unless
    `colours` has one for them. A part says its value where there is room.
    """
    stacked = {n: dict(v) if isinstance(v, Mapping) else {"": v} for n, v in values.items()}
    parts = list(dict.fromkeys(part for each in stacked.values() for part in each if part))
    inks = {part: pen.held(part) for part in parts}
    plain = itertools.cycle(pen.HELD_OTHERS if any(inks.values()) else SERIES)  # none loud
    inks = {part: ink or next(plain) for part, ink in inks.items()}
    inks |= {part: colour(part) for part in parts if part in {*KIND, *AXIS, "exposed"}}
    inks |= colours or {}
    left = 0.3 + 0.075 * max(map(len, stacked), default=0)
    legend = [(inks[part], part.replace("_", " ")) for part in parts]
    width, row, foot = 7.2, 0.36, 0.3
    foot += 0.08 + 0.22 * len(pen.flow(legend, width - left - pen.RIGHT)) if parts else 0
    figure = pen.figure(width, 0.55 + row * len(stacked) + foot, title, note)
    ax = pen.panel(figure, left, foot, width - left - 0.2, row * len(stacked))
    sums = {name: sum(each.values()) for name, each in stacked.items()}
    labels = {name: f"{pen.number(total)} {unit}".strip() for name, total in sums.items()}
    end = max(sums.values(), default=0) or 1.0
    widest = max(map(len, labels.values()), default=0)
    inch = (width - left - 0.45 - 0.085 * widest) / end  # of a unit; the rest is for the values
    ax.set(xlim=(0, (width - left - 0.2) / inch), ylim=(len(stacked) - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(len(stacked)), stacked, color=INK, fontsize=9)
    for i, (name, each) in enumerate(stacked.items()):
        start = 0.0
        for part, value in each.items():
            said = pen.number(value)
            ink = inks.get(part, KIND["forward" if highlight not in (None, name) else "backward"])
            ax.barh(i, value, left=start, height=0.62, color=ink, edgecolor=PAPER, lw=0.7)
            if len(each) > 1 and value * inch > 0.08 * len(said) + 0.06:
                style = {"size": 7.5, "ha": "center", "color": pen.ink_on(ink)}
                pen.text(ax, start + value / 2, i, said, **style)
            start += value
        weight = "bold" if name == highlight else "normal"
        pen.text(ax, start + 0.012 * end, i, labels[name], weight=weight)
    pen.key(figure, legend, left, 0.3)
    return figure
