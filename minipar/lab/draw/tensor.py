"""Cut matrices: which rank has which piece, which sum is pending, and heads that change ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, PAPER, RANK, SAME
from minipar.model.llama import LlamaConfig

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


def swap(config: LlamaConfig, size: int, *, title: str = "", note: str = "") -> Figure:
    """Draw Ulysses around attention: blocks of tokens (rows) and heads (columns).

    A colour is the rank that has a block; a number is the rank that it goes to, or, behind the
    all-to-all, the one that it came from. A block without a number stays. Key/value heads are
    repeated where `size` asks for it.
    """
    ranks, copies = range(size), math.lcm(config.num_kv_heads, size) // config.num_kv_heads
    kinds = {"q": (config.num_heads, 1), "k, v": (config.num_kv_heads, copies)}
    apart, together = {}, {}  # rows of tokens: (the rank of a block, the number in the block)
    for name, (count, copies) in kinds.items():
        owners = [head * size // (count * copies) for head in range(count * copies)]
        goes = [dict.fromkeys(owners[copies * h : copies * (h + 1)]) for h in range(count)]
        apart[name] = [
            [(row, " ".join(str(r) for r in each if r != row)) for each in goes] for row in ranks
        ]
        together[name] = [
            [(own, str(row) if row != own else "") for own in owners] for row in ranks
        ]
    panels = {
        "tokens apart (number: goes to)": apart,
        "heads apart (number: came from)": together,
        "tokens apart": {"out": [[(row, "")] * config.num_heads for row in ranks]},
    }
    arrows = ["all-to-all\n→", "attention,\nall-to-all\n→", ""]
    ax, cell, x = pen.paper(), 0.34, 0.0
    for (words, panel), arrow in zip(panels.items(), arrows, strict=True):
        pen.text(ax, x, 0.17, words, weight="bold")
        for name, grid in panel.items():
            for i, row in enumerate(grid):
                for j, (rank, number) in enumerate(row):
                    box = x + cell * j, -cell * (i + 1), cell, cell
                    pen.cell(ax, box, number, RANK[rank], ec=PAPER, lw=1.2)
            wide = cell * len(grid[0])
            pen.text(ax, x + wide / 2, -cell * size - 0.16, name, ha="center")
            x += wide + 0.28
        pen.text(ax, x + 0.335, -cell * size / 2, arrow, ha="center")
        x += 0.95
    return pen.cut(ax, title, note, pen.of_ranks(size))
