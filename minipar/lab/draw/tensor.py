"""Cut matrices: which rank has which piece, and which sum is pending."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, PAPER, RANK, SAME

LENGTHS = {"T": 0.95, "D": 0.75, "F": 1.5, "V": 1.9}  # inches
SHEET = 0.13  # inches between the sheets of a pending sum


@dataclass(frozen=True)
class Matrix:
    """One matrix of a formula; `rows` and `columns` are letters, such as T, D and F.

    `cut` says what ranks have a part of: "rows" or "columns"; with "" each has the whole matrix.
    With `pending` every rank has a summand of full size, and the value is their sum.
    """

    name: str
    rows: str
    columns: str
    cut: Literal["", "rows", "columns"] = ""
    pending: bool = False

    @property
    def label(self) -> str:
        """Return its sharding in the usual notation: "h[T, F/tp]", "y[T, D] {partial tp}"."""
        rows, columns = (
            letter + "/tp" * (self.cut == dim)
            for letter, dim in ((self.rows, "rows"), (self.columns, "columns"))
        )
        return f"{self.name}[{rows}, {columns}]" + " {partial tp}" * self.pending


def formula(parts: Sequence[Matrix | str], size: int = 2, *, title: str = "") -> Figure:
    """Draw matrices and what stands between them, on one line: `[x, "·", A, "=", h]`.

    A colour is a rank, grey what all have alike. A pending sum is a pile of sheets of full size,
    one per rank, marked with Σ.
    """
    ax, x = pen.paper(), 0.0
    low = -max(LENGTHS[part.rows] for part in parts if isinstance(part, Matrix)) / 2
    for part in parts:
        if isinstance(part, str):
            room = 0.16 + 0.085 * max(2, *map(len, part.split("\n")))
            pen.text(ax, x + room / 2, 0, part, ha="center", size=12 if len(part) < 3 else 9)
        else:
            across, down = LENGTHS[part.columns], LENGTHS[part.rows]
            sheets = SHEET * (size - 1) * part.pending
            room = max(across + 2 * sheets, 0.073 * len(part.label)) + 0.16
            _matrix(ax, part, size, x + (room - across) / 2, -down / 2, across, down)
            pen.text(ax, x + room / 2, low - 0.17, part.label, ha="center")
        x += room
    legend = pen.of_ranks(size)
    if any(isinstance(part, Matrix) and not part.cut and not part.pending for part in parts):
        legend.append((SAME, "the same on every rank"))
    return pen.cut(ax, title, legend=legend)


def _matrix(
    ax: Axes, part: Matrix, size: int, x: float, y: float, across: float, down: float
) -> None:
    style = {"ec": INK, "lw": 0.9}
    for rank in range(size):
        box, fill = (x, y, across, down), SAME
        if part.pending:
            box = x + SHEET * rank, y + SHEET * rank, across, down
        elif part.cut == "columns":
            box = x + across * rank / size, y, across / size, down
        elif part.cut:  # the first rows stand at the top
            box = x, y + down * (size - 1 - rank) / size, across, down / size
        elif rank:
            return
        if part.cut or part.pending:
            fill = RANK[rank]
        pen.rectangle(ax, *box, fc=fill, zorder=2 - rank / 10, **style)
    if part.pending:
        box = {"boxstyle": "round,pad=0.2", "fc": PAPER, "ec": "none", "alpha": 0.9}
        style = {"size": 10.9, "weight": "bold", "ha": "center", "bbox": box}
        pen.text(ax, x + across / 2, y + down / 2, "Σ", **style)
