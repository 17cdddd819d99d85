"""Who holds what in each phase of a step, and what travels in between: a picture of sharding.

A row is a rank, a column is a phase. Small boxes are slices of the model: of its weights, its
gradients and its optimizer state. Taught in: notebook 06.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import GRID, HELD, INK, MUTED, WIDTH

PARTS = ("weights", "gradients", "optimizer state")
LOOKS = {
    "whole": ("held", "held"),
    "own": ("held", "empty"),
    "block": ("held", "for a while"),  # the other slices of one block at a time
    "summands": ("summand", "summand"),  # every slice, not added up yet
    "block of summands": ("held", "summand"),
    "nothing": ("empty", "empty"),
}
"""The ways in which a rank holds a part of the model: its own slice, and the others."""
LEFT, BOX, ROW, GAP = 0.85, 0.135, 0.2, 0.14  # inches


@dataclass(frozen=True)
class Phase:
    """One phase of a step: what a rank holds of each part, in words of `LOOKS`.

    `before` is the collective that leads to the phase, such as "reduce-scatter".
    """

    name: str
    weights: str
    gradients: str
    optimizer: str
    before: str = ""


def holdings(
    steps: Mapping[str, Sequence[Phase]], size: int = 4, *, title: str = "", note: str = ""
) -> Figure:
    """Draw for each step, by its name, the slices that `size` ranks hold in each phase.

    All steps have equally many phases. Raises ValueError for a word that is not in `LOOKS`.
    """
    ax, top = pen.paper(), 0.0
    count = len(next(iter(steps.values())))
    wide = len(PARTS) * (size * BOX + GAP) - GAP
    pitch = (WIDTH - 0.3 - LEFT - wide) / max(1, count - 1)
    for name, phases in steps.items():
        pen.text(ax, 0, top, name, size=11, weight="bold")
        for i, phase in enumerate(phases):
            x, y = LEFT + i * pitch, top - 0.34
            pen.text(ax, x, y + 0.12, phase.name, color=MUTED)
            words = phase.weights, phase.gradients, phase.optimizer
            for k, (part, word) in enumerate(zip(PARTS, words, strict=True)):
                if word not in LOOKS:
                    raise ValueError(f"{word!r} is none of {', '.join(LOOKS)}")
                left = x + k * (size * BOX + GAP)
                for rank, piece in product(range(size), repeat=2):
                    box = left + piece * BOX, y - ROW * (rank + 1), BOX - 0.02, ROW - 0.05
                    pen.rectangle(ax, *box, **_styles(HELD[part])[LOOKS[word][piece != rank]])
            if phase.before:
                # The collective before the first phase comes from the step before.
                start, end = x - (pitch - wide) + 0.08 if i else x - 0.75, x - 0.08
                middle, y = (start + end) / 2, y - size * ROW / 2
                verb, _, more = phase.before.partition(" ")
                pen.arrow(ax, (start, y), (end, y), 9, color=INK, lw=1.1)
                pen.text(ax, middle, y + 0.13, verb, size=8, ha="center")
                pen.text(ax, middle, y - 0.13, more, size=8, ha="center", color=MUTED)
        top -= size * ROW + 0.62
    legend = [(HELD[part], part) for part in PARTS]
    legend += [(_styles(HELD["weights"])["for a while"], "for one block at a time")]
    legend += [(_styles(HELD["gradients"])["summand"], "summand, not added up yet")]
    return pen.cut(ax, title, note, [*legend, (_styles(INK)["empty"], "not held")])


def _styles(ink: str) -> dict[str, pen.Style]:
    """Return how a slice is drawn that a rank holds, or does not."""
    return {
        "held": {"fc": ink},
        "for a while": {"fc": pen.pale(ink)},
        "summand": {"fc": pen.pale(ink), "ec": ink, "hatch": "//////", "lw": 0},
        "empty": {"fc": "none", "ec": GRID, "lw": 0.8},
    }
