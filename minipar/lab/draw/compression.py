"""The price of sending less: what a gradient keeps, and rows of `minipar bench compression`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from minipar.lab.draw import pen
from minipar.lab.draw.charts import curves, label_points
from minipar.lab.draw.pen import AXIS, EXPOSED, GRID, INK, KIND, MUTED, PAPER

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
TYPICAL = ("fp32", "int8", "top-k 10 %", "PowerSGD rank 4", "DiLoCo delayed")  # one of each


def finding(rows: Sequence[Row]) -> str:
    """Return the sentence that the rows say: who sends least at (nearly) no cost in every run."""
    free = [
        row
        for row in rows
        if row["share"] < 1
        and max(abs(row["gap_low"]), abs(row["gap_high"])) < FREE
        and "no feedback" not in row["method"]
    ]
    if not free:
        return f"every method that sends less than fp32 loses more than {FREE:g} nats per token"
    best = min(free, key=lambda r: (r["num_bytes"], abs(r["gap"])))
    return (
        f"{best['method']}: {100 * best['share']:.2g} % of the bytes, within {FREE:g} nats of fp32"
    )


def accuracy(rows: Sequence[Row]) -> Figure:
    """Draw a dot per method: bytes that a rank sends per step, and its loss minus fp32's.

    Further left sends less, further down learns better. A line spans the runs from different
    weights. An arrow leads from a method without error feedback, a hollow dot, to the same method
    with it. Near zero the scale is linear. Methods of equal bytes near zero share a label.
    """
    first = rows[0]
    note = f"{first['preset']} Llama after {first['steps']} steps of {first['tokens_per_step']}"
    note += f" tokens, {first['ranks']} ranks. Arrows: from no error feedback to feedback"
    figure = pen.figure(pen.WIDTH, 5.6, finding(rows), note)
    ax = pen.panel(figure, 0.85, 1.0, pen.WIDTH - 1.1, 3.85)
    ax.spines["bottom"].set(visible=True, color=MUTED, lw=0.8)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=FREE, linscale=0.5)
    ax.grid(axis="y", color=GRID, lw=0.8)
    ax.axhspan(-FREE, FREE, color=KIND["idle"], lw=0, zorder=0)
    gap_of = {row["method"]: row["gap"] for row in rows}
    labels: dict[tuple, list[Row]] = {}
    for row in rows:
        ink, method = FAMILY[row["family"]], row["method"]
        x, y = row["num_bytes"] / 1e6, row["gap"]
        ax.plot([x, x], [row["gap_low"], row["gap_high"]], color=ink, lw=1.4, alpha=0.45, zorder=3)
        plain = method.removesuffix(", no feedback")
        face = ink if plain == method else PAPER
        ax.plot(x, y, "o", ms=6.5, mfc=face, mec=ink, mew=1.3, zorder=4)
        if plain == method:
            near = (f"{x:.2g}", "free" if abs(y) < FREE else method)
            labels.setdefault(near, []).append(row)
        elif plain in gap_of:
            ends = {"arrowstyle": "-|>", "color": ink, "shrinkA": 5, "shrinkB": 5}
            ax.annotate("", (x, gap_of[plain]), (x, y), arrowprops=ends, zorder=3)
    left, right = ax.get_xlim()
    ax.set_xlim(left, 1.5 * right)  # for the names
    low, high = ax.get_ylim()
    gaps = [0.0, *(sign * m * 10.0**e for e in (-2, -1, 0) for m in (1, 3) for sign in (1, -1))]
    ax.set_yticks([gap for gap in gaps if low < gap < high])
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:+g}".replace("-", "\u2212") if y else "fp32")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.minorticks_off()
    ax.text(left, -FREE, f" within {FREE:g} of fp32", color=MUTED, size=8, va="bottom")
    firsts = [group[0] for group in labels.values()]
    dots = [(row["num_bytes"] / 1e6, row["gap"]) for row in firsts]
    names = [", ".join(row["method"] for row in group) for group in labels.values()]
    label_points(ax, dots, names, [FAMILY[row["family"]] for row in firsts])
    what = "loss minus that of fp32, nats per token (lower is better)"
    pen.label(ax, "megabytes that a rank sends per step", what, above=1.03)
    families = {row["family"] for row in rows}
    pen.key(figure, [(FAMILY[f], f) for f in FAMILY if f in families], 0.85, 0.32)
    return figure


def convergence(rows: Sequence[Row], *, title: str = "") -> Figure:
    """Draw the training losses of `TYPICAL` methods by the seconds that their steps take.

    Losses are means of the last 8 steps. Seconds are steps times the step time that was measured on
    the emulated link.
    """
    lines, inks = {}, {}
    for row in (row for name in TYPICAL for row in rows if row["method"] == name):
        losses, seconds = row["losses"], row["step_ms"] / 1e3
        smooth = [statistics.mean(losses[max(0, i - 7) : i + 1]) for i in range(len(losses))]
        lines[row["method"]] = [seconds * (i + 1) for i in range(len(losses))], smooth
        inks[row["method"]] = FAMILY[row["family"]]
    where = f"seconds on {rows[0]['link']}, {rows[0]['ranks']} ranks on one machine"
    return curves(
        lines,
        xlabel="seconds",
        ylabel="nats per token",
        title=title,
        note=f"training loss, mean of the last 8 steps; {where}",
        colours=inks,
    )


# ------------------------------------------------------------------ a gradient, number by number
COUNT = 96  # numbers in a row


def kept(versions: Mapping[str, Tensor], *, start: int = 0, title: str = "") -> Figure:
    """Draw some numbers of a gradient, and what compressors make of them: a row for each.

    The first version is the truth; it stands pale behind the others. Red is what became zero. Shown
    are `COUNT` numbers from `start` on; the error |version - truth| / |truth| is over all of them.
    """
    flat = {name: tensor.detach().double().flatten().numpy() for name, tensor in versions.items()}
    shown = {name: values[start : start + COUNT] for name, values in flat.items()}
    (truth, *_), (there, *_) = flat.values(), shown.values()
    row = 0.74  # inches
    note = f"pale: the truth; red: became zero; {len(there)} numbers in a row, error over all"
    figure = pen.figure(pen.WIDTH, 0.92 + row * len(flat), title, note)
    ax = pen.panel(figure, 1.15, 0.3, pen.WIDTH - 2.5, row * len(flat))
    ax.set(xlim=(-1, len(there)), ylim=(0.5 - len(flat), 0.5), xticks=[], yticks=[])
    scale = 0.46 / max(np.abs(values).max() for values in shown.values())
    places, beside = range(len(there)), {"transform": ax.get_yaxis_transform()}
    for i, (name, values) in enumerate(shown.items()):
        ax.axhline(-i, color=GRID, lw=0.8, zorder=1)
        pen.text(ax, -0.015, -i, name, ha="right", **beside)
        if i == 0:
            ax.bar(places, scale * values, 0.72, bottom=0, color=INK, zorder=3)
            pen.text(ax, 1.015, 0, f"{len(truth):,} numbers", color=MUTED, **beside)
            continue
        lost = np.where(values == 0, there, 0)
        for what, wide, ink, alpha in (
            (there, 0.9, KIND["forward"], 0.6),
            (lost, 0.9, EXPOSED, 0.75),
            (values, 0.45, KIND["backward"], 1.0),
        ):
            ax.bar(places, scale * what, wide, bottom=-i, color=ink, alpha=alpha, zorder=3)
        error = np.linalg.norm(flat[name] - truth) / np.linalg.norm(truth)
        pen.text(ax, 1.015, -i, f"{100 * error:.2g} % off", **beside)
    return figure
