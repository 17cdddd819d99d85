"""The price of sending less: what a gradient keeps, and rows of `minipar bench compression`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from minipar.lab.draw import pen
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


def accuracy(rows: Sequence[Row], *, title: str = "") -> Figure:
    """Draw a row per method: its loss minus fp32's as a dot, and the bytes that it sends.

    A bar spans the runs from different weights. A hollow dot is the same method without error
    feedback. Near zero the scale is linear.
    """
    first = rows[0]
    note = f"{first['preset']} Llama after {first['steps']} steps of {first['tokens_per_step']}"
    note += f" tokens, {first['ranks']} ranks. Hollow: no error feedback. Grey: within {FREE:g}"
    share = {r["method"]: r["share"] for r in rows if "no feedback" not in r["method"]}
    names, tall = sorted(share, key=share.__getitem__, reverse=True), 0.27 * len(share)
    figure = pen.figure(pen.WIDTH, tall + 1.5, title, note)
    ax = pen.panel(figure, 1.85, 0.95, pen.WIDTH - 3.6, tall)
    ax.set_xscale("symlog", linthresh=FREE, linscale=0.5)
    ax.set(ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names, color=INK)
    ax.grid(color=GRID, lw=0.8)
    ax.axvspan(-FREE, FREE, color=KIND["idle"], lw=0, zorder=0)
    for row in rows:
        plain, ink = row["method"].removesuffix(", no feedback"), FAMILY[row["family"]]
        y, face = names.index(plain), ink if plain == row["method"] else PAPER
        ax.plot([row["gap_low"], row["gap_high"]], [y, y], color=ink, lw=3, alpha=0.4, zorder=3)
        ax.plot(row["gap"], y, "o", ms=6.5, mfc=face, mec=ink, mew=1.3, zorder=4)
    for y, name in enumerate(names):
        said = f"{pen.number(100 * share[name])} % of the bytes"
        pen.text(ax, 1.02, y, said, color=MUTED, transform=ax.get_yaxis_transform())
    gaps = (-0.01, 0, 0.01, 0.03, 0.1, 0.3, 1)
    ax.set_xticks(gaps, [f"{gap:+g}" if gap else "fp32" for gap in gaps])
    ax.minorticks_off()
    pen.label(ax, "loss minus that of fp32, nats per token: further left learns better")
    families = {row["family"] for row in rows}
    pen.key(figure, [(FAMILY[f], f) for f in FAMILY if f in families], 1.85, 0.3)
    return figure


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
