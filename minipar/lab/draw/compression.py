"""The price of sending less: what compressors keep of a gradient, number by number."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, GRID, INK, KIND, MUTED

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
