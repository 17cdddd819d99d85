"""What sending less costs: pictures of the rows of `minipar bench compression`."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from minipar.lab.draw import pen
from minipar.lab.draw.charts import curves
from minipar.lab.draw.pen import AXIS, GRID, INK, KIND, MUTED, PAPER

Row = Mapping[str, Any]

FAMILY = {
    "exact": INK,
    "rounding": KIND["backward"],
    "fewer numbers": AXIS["dp"],
    "low rank": AXIS["tp"],
    "less often, or late": AXIS["pp"],
}
"""A colour for what a method spares."""
FREE = 0.01  # nats per token: 1 % of perplexity, which few would pay for
TYPICAL = ("fp32", "int8", "top-k 10 %", "PowerSGD rank 4", "DiLoCo streaming")  # one of each


def finding(rows: Sequence[Row]) -> str:
    """The one sentence that the rows say: who sends least at (nearly) no cost in every run."""
    free = [r for r in rows if r["family"] != "exact" and abs_gap(r) < FREE and r["share"] < 1]
    if not free:
        return f"whoever sends less than fp32 loses more than {FREE:g} nats per token"
    best = min(free, key=lambda r: (r["num_bytes"], abs(r["gap"])))
    return (
        f"{best['method']}: {100 * best['share']:.2g} % of the bytes, within {FREE:g} nats of fp32"
    )


def abs_gap(row: Row) -> float:
    """The largest gap to fp32 in any run, in nats per token, in either direction."""
    return max(abs(row["gap_low"]), abs(row["gap_high"]))


# ---------------------------------------------------------------------- accuracy against bytes
def accuracy(rows: Sequence[Row], *, title: str = "") -> Figure:
    """A dot per method: bytes that a rank sends per step, and how far its loss is from fp32's.

    Further left sends less, further down learns better. A line spans the runs from different
    weights; a hollow dot is a method without error feedback. Near zero the scale is linear.
    Raises ValueError when there is nothing to draw.
    """
    if not rows:
        raise ValueError("there is no row to draw; run `minipar bench compression` first")
    width, height = 9.6, 5.6
    figure = pen.figure(width, height)
    ax = pen.panel(figure, 0.85, 1.0, width - 1.1, height - 1.75)
    ax.spines["bottom"].set(visible=True, color=MUTED, lw=0.8)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=FREE, linscale=0.5)
    ax.grid(axis="y", color=GRID, lw=0.8)
    ax.minorticks_off()
    for row in rows:
        ink = FAMILY[row["family"]]
        x = row["num_bytes"] / 1e6
        ax.plot([x, x], [row["gap_low"], row["gap_high"]], color=ink, lw=1.4, alpha=0.45, zorder=3)
        face = PAPER if "no feedback" in row["method"] else ink
        ax.plot(x, row["gap"], "o", ms=6.5, mfc=face, mec=ink, mew=1.3, zorder=4)
    _limits(ax, rows)
    ax.axhspan(-FREE, FREE, color=KIND["idle"], lw=0, zorder=0)
    style = {"color": MUTED, "size": 8, "va": "bottom"}
    ax.text(ax.get_xlim()[0], -FREE, f" within {FREE:g} of fp32", **style)
    _labels(ax, rows)
    ax.set_xlabel("megabytes that a rank sends per step", color=MUTED, fontsize=9, loc="right")
    what = "loss minus that of fp32, nats per token (lower is better)"
    ax.text(0, 1.03, what, color=MUTED, size=9, transform=ax.transAxes)
    pen.title(figure, title or finding(rows))
    families = {row["family"] for row in rows}
    key = [(ink, family) for family, ink in FAMILY.items() if family in families]
    pen.key(figure, pen.flow(key), 0.85, 0.32)
    first = rows[0]
    note = f"{first['preset']} Llama after {first['steps']} steps of {first['tokens_per_step']}"
    note += f" tokens, {first['ranks']} ranks; hollow: no error feedback"
    pen.footnote(figure, note, height)
    return figure


def _limits(ax: Axes, rows: Sequence[Row]) -> None:
    values = [row["num_bytes"] / 1e6 for row in rows]
    ax.set_xlim(min(values) / 1.6, max(values) * 2)
    low = min(-2 * FREE, *(row["gap_low"] for row in rows))
    high = max(2 * FREE, *(row["gap_high"] for row in rows))
    ax.set_ylim(1.3 * low, 1.8 * high)
    ticks = [0.0]
    for size in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        ticks += [tick for tick in (-size, size) if 1.3 * low < tick < 1.8 * high]
    ax.set_yticks(sorted(ticks))
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y:+g}".replace("-", "\u2212") if y else "fp32")
    )
    spots = [m * 10.0**e for e in range(-4, 6) for m in (1, 3)]
    ax.set_xticks([x for x in spots if ax.get_xlim()[0] < x < ax.get_xlim()[1]])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


class _Box(NamedTuple):
    """In inches from the lower left corner of the axes."""

    left: float
    low: float
    right: float
    top: float

    def overlap(self, other: "_Box") -> float:
        """Square inches in both."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        tall = min(self.top, other.top) - max(self.low, other.low)
        return max(wide, 0.0) * max(tall, 0.0)


def _labels(ax: Axes, rows: Sequence[Row]) -> None:
    """Names beside the dots, where they cover least; dots that touch share a block of names."""
    width = ax.get_position().width * ax.figure.get_figwidth()
    height = pen.inches_of(ax)
    to_axes = ax.transData + ax.transAxes.inverted()
    dots = []
    for row in rows:
        x, y = to_axes.transform((row["num_bytes"] / 1e6, row["gap"]))
        dots.append((x * width, y * height))
    taken = [_Box(x - 0.07, y - 0.07, x + 0.07, y + 0.07) for x, y in dots]
    paper = _Box(0.0, 0.0, width, height)
    for group in sorted(_touching(dots), key=len, reverse=True):
        group = sorted(group, key=lambda i: -dots[i][1])
        x, y = (statistics.mean(dots[i][k] for i in group) for k in (0, 1))
        names = [rows[i]["method"] for i in group]
        size = 0.066 * max(map(len, names)) + 0.03, 0.155 * len(names)
        box = min(
            _places(x, y, *size),
            key=lambda at: (
                round(sum(at[0].overlap(other) for other in taken), 4)
                + _area(at[0])
                - at[0].overlap(paper),
                at[1],
            ),
        )[0]
        taken.append(box)
        right = box.left > x - 0.02
        edge = box.left if right else box.right
        near = min(max(y, box.low + 0.07), box.top - 0.07)
        if math.dist((edge, near), (x, y)) > 0.17:
            line = {"color": MUTED, "lw": 0.6, "transform": ax.transAxes, "zorder": 2}
            ax.plot([x / width, edge / width], [y / height, near / height], **line)
        for k, i in enumerate(group):
            at = (edge / width, (box.top - 0.155 * (k + 0.5)) / height)
            style = {"ha": "left" if right else "right", "va": "center", "size": 8.5}
            ink = pen.readable(FAMILY[rows[i]["family"]])
            ax.text(*at, rows[i]["method"], color=ink, transform=ax.transAxes, **style)


def _area(box: _Box) -> float:
    return (box.right - box.left) * (box.top - box.low)


def _touching(dots: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Numbers of the dots in groups: those that touch, directly or by way of others."""
    groups: list[list[int]] = []
    for i, dot in enumerate(dots):
        near = [g for g in groups if any(math.dist(dot, dots[j]) < 0.13 for j in g)]
        groups = [g for g in groups if g not in near] + [[j for g in near for j in g] + [i]]
    return groups


def _places(x: float, y: float, wide: float, tall: float) -> Iterable[tuple[_Box, float]]:
    """Where the names of a dot may stand, each with how little it is liked."""
    for away in (0.1, 0.2, 0.35, 0.5, 0.7, 0.95):
        for slope in (0, 0.6, -0.6, 1.2, -1.2, 2.2, -2.2):
            middle = y + slope * away
            for left in (x + away, x - away - wide):
                dislike = away * (1 + 0.3 * abs(slope)) + (0.02 if left < x else 0)
                yield _Box(left, middle - tall / 2, left + wide, middle + tall / 2), dislike


# ---------------------------------------------------------------------- convergence
def convergence(
    rows: Sequence[Row],
    *,
    against: Literal["step", "seconds"] = "step",
    methods: Iterable[str] = TYPICAL,
    title: str = "",
) -> Figure:
    """Training losses of some methods by step, or by the seconds that their steps would take.

    Losses are means of the last 8 steps. Seconds are steps times the step time that was measured on
    the emulated link. Raises ValueError for a method that has no row.
    """
    found = {row["method"]: row for row in rows}
    lines, inks = {}, {}
    for name in methods:
        if name not in found:
            raise ValueError(f"there is no row of {name!r}; there are {', '.join(found)}")
        row = found[name]
        unit = 1 if against == "step" else row["step_ms"] / 1e3
        losses = row["losses"]
        smooth = [statistics.mean(losses[max(0, i - 7) : i + 1]) for i in range(len(losses))]
        lines[name] = [unit * (i + 1) for i in range(len(losses))], smooth
        inks[name] = FAMILY[row["family"]]
    note = "training loss, mean of the last 8 steps"
    if against == "seconds":
        note += f"; seconds on {rows[0]['link']}, {rows[0]['ranks']} ranks on one machine"
    return curves(
        lines,
        xlabel=against,
        ylabel="nats per token",
        title=title,
        note=note,
        colours=inks if len(set(inks.values())) == len(inks) else None,
    )
