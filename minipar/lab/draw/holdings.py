"""Who holds what in each phase of a step, and what travels in between: a picture of sharding.

A row is a rank, a column is a phase. Small boxes are slices of the model: of its weights, its
gradients and its optimizer state. Taught in: notebook 06.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import GRID, HELD, INK, MUTED, RIGHT, WIDTH

PARTS = ("weights", "gradients", "optimizer state")
LOOKS = {
    "whole": "every slice, all the time",
    "own": "its own slice",
    "block": "its own slice, and the others of one block at a time",
    "summands": "every slice, not added up yet",
    "block of summands": "its own slice, and the summands of one block at a time",
    "nothing": "no slice",
}
"""The ways in which a rank holds a part of the model."""
LEFT, BOX, ROW, GAP = 1.0, 0.135, 0.2, 0.14  # inches


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
    count = len(next(iter(steps.values())))
    wide = len(PARTS) * (size * BOX + GAP) - GAP
    pitch = (WIDTH - LEFT - RIGHT - wide) / max(1, count - 1)
    tall = size * ROW + 0.62
    figure, ax = pen.sheet(WIDTH, tall * len(steps) + 1.1, title, note)
    top = tall * len(steps) + 0.55
    for name, phases in steps.items():
        pen.text(ax, 0.15, top, name, size=11, weight="bold")
        for i, phase in enumerate(phases):
            x, y = LEFT + i * pitch, top - 0.34
            pen.text(ax, x, y + 0.12, phase.name, color=MUTED)
            words = phase.weights, phase.gradients, phase.optimizer
            for k, (part, word) in enumerate(zip(PARTS, words, strict=True)):
                left = x + k * (size * BOX + GAP)
                for rank, piece in product(range(size), repeat=2):
                    box = left + piece * BOX, y - ROW * (rank + 1), BOX - 0.02, ROW - 0.05
                    pen.rectangle(ax, *box, **_style(word, HELD[part], piece == rank))
            if phase.before:
                # The collective before the first phase comes from the step before.
                start, end = x - (pitch - wide) + 0.08 if i else x - 0.75, x - 0.08
                middle, y = (start + end) / 2, y - size * ROW / 2
                verb, _, more = phase.before.partition(" ")
                pen.arrow(ax, (start, y), (end, y), 9, color=INK, lw=1.1)
                pen.text(ax, middle, y + 0.13, verb, size=8, ha="center")
                pen.text(ax, middle, y - 0.13, more, size=8, ha="center", color=MUTED)
        top -= tall
    entries = [(HELD[part], part) for part in PARTS]
    entries += [({"fc": pen.pale(HELD["weights"])}, "for one block at a time")]
    entries += [(_summand(HELD["gradients"]), "summand, not added up yet"), (_EMPTY, "not held")]
    pen.key(figure, entries, 0.15, 0.3, WIDTH - 0.3)
    return figure


_EMPTY = {"fc": "none", "ec": GRID, "lw": 0.8}


def _summand(ink: str) -> pen.Style:
    return {"fc": pen.pale(ink), "ec": ink, "hatch": "//////", "lw": 0}


def _style(word: str, ink: str, is_own: bool) -> pen.Style:
    """Return how a slice is drawn."""
    if word not in LOOKS:
        raise ValueError(f"{word!r} is none of {', '.join(LOOKS)}")
    if word == "whole" or (is_own and word != "summands" and word != "nothing"):
        return {"fc": ink}
    if word in ("summands", "block of summands"):
        return _summand(ink)
    return {"fc": pen.pale(ink)} if word == "block" else _EMPTY
