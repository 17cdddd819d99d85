"""The part of a gradient that compression keeps: pictures of its numbers, one by one."""

from collections.abc import Mapping

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
    flat = {name: tensor.detach().double().flatten() for name, tensor in versions.items()}
    truth, *_ = flat.values()
    there = truth[start : start + COUNT]
    left, right, row, width = 1.15, 1.35, 0.74, 9.6  # inches
    height = 0.62 + row * len(flat) + 0.3
    note = f"pale: the truth; red: became zero; {len(there)} numbers in a row, error over all"
    figure = pen.figure(width, height, title, note)
    ax = pen.panel(figure, left, 0.3, width - left - right, row * len(flat))
    ax.set_xlim(-1, len(there))
    ax.set_ylim(0, len(flat))
    ax.set_xticks([])
    ax.set_yticks([])
    largest = max(values[start : start + COUNT].abs().max().item() for values in flat.values())
    scale, places = 0.46 / largest, range(len(there))
    truths = [scale * value for value in there.tolist()]
    for i, (name, values) in enumerate(flat.items()):
        middle = len(flat) - 1 - i + 0.5
        shown = [scale * value for value in values[start : start + COUNT].tolist()]
        ax.plot([-1, len(there)], [middle, middle], color=GRID, lw=0.8, zorder=1)
        style = {"transform": ax.get_yaxis_transform()}
        pen.text(ax, -0.015, middle, name, ha="right", **style)
        if i == 0:
            ax.bar(places, shown, 0.72, bottom=middle, color=INK, zorder=3)
            pen.text(ax, 1.015, middle, f"{len(values):,} numbers", color=MUTED, **style)
            continue
        lost = [0.0 if new else old for old, new in zip(truths, shown, strict=True)]
        ax.bar(places, truths, 0.9, bottom=middle, color=KIND["forward"], alpha=0.6, zorder=2)
        ax.bar(places, lost, 0.9, bottom=middle, color=EXPOSED, alpha=0.75, zorder=3)
        ax.bar(places, shown, 0.45, bottom=middle, color=KIND["backward"], zorder=4)
        error = ((values - truth).norm() / truth.norm()).item()
        pen.text(ax, 1.015, middle, f"{100 * error:.2g} % off", **style)
    return figure
