"""Cut matrices: which rank has which piece, which sum is pending, and heads by rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, MUTED, PAPER, RANK
from minipar.model.llama import LlamaConfig
from minipar.parallel.matrices import by_heads

SAME = "#d5d8e0"  # what all ranks have alike
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


def formula(
    parts: Sequence[Matrix | str],
    size: int = 2,
    *,
    lengths: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Draw matrices and what stands between them, on one line: `[x, "·", A, "=", h]`.

    A colour is a rank, grey what all have alike. A pending sum is a pile of sheets of full size,
    one per rank, marked with Σ. `lengths` gives other inches for some letters than `LENGTHS`.
    """
    inches = {**LENGTHS, **(lengths or {})}
    wide = [_width(part, size, inches) for part in parts]
    tall = max(inches[part.rows] for part in parts if isinstance(part, Matrix))
    width = max(0.3 + sum(wide), pen.title_width(title), 5.2)
    height = tall + SHEET * (size - 1) + 1.42
    figure, ax = pen.sheet(width, height, title)
    x, middle = 0.15 + (width - 0.3 - sum(wide)) / 2, 0.74 + tall / 2
    for part, room in zip(parts, wide, strict=True):
        centre = x + room / 2
        if isinstance(part, Matrix):
            across, down = inches[part.columns], inches[part.rows]
            _matrix(ax, part, size, centre - across / 2, middle - down / 2, across, down)
            pen.text(ax, centre, 0.74 - 0.17, part.label, ha="center", size=9)
        else:
            pen.text(ax, centre, middle, part, ha="center", size=12 if len(part) < 3 else 9)
        x += room
    legend = pen.of_ranks(size)
    if any(isinstance(part, Matrix) and not part.cut and not part.pending for part in parts):
        legend.append((SAME, "the same on every rank"))
    pen.key(figure, legend, 0.2, 0.2, width - 0.4)
    return figure


def _width(part: Matrix | str, size: int, inches: Mapping[str, float]) -> float:
    if isinstance(part, str):
        return 0.16 + 0.085 * max(2, *map(len, part.split("\n")))
    sheets = SHEET * (size - 1) if part.pending else 0.0
    return max(inches[part.columns] + 2 * sheets, 0.073 * len(part.label)) + 0.16


def _matrix(
    ax: Axes, part: Matrix, size: int, x: float, y: float, across: float, down: float
) -> None:
    frame = {"ec": INK, "lw": 0.9}
    for rank in range(size):
        if part.pending:
            at, piece = (x + SHEET * rank, y + SHEET * rank), (across, down)
        elif part.cut == "columns":
            at, piece = (x + across * rank / size, y), (across / size, down)
        elif part.cut:  # the first rows stand at the top
            at, piece = (x, y + down * (size - 1 - rank) / size), (across, down / size)
        else:
            pen.rectangle(ax, x, y, across, down, fc=SAME, **frame)
            return
        pen.rectangle(ax, *at, *piece, fc=RANK[rank], zorder=3 - rank / 10, **frame)
    if part.pending:
        box = {"boxstyle": "round,pad=0.2", "fc": PAPER, "ec": "none", "alpha": 0.9}
        style = {"size": 10.9, "weight": "bold", "ha": "center", "bbox": box, "zorder": 4}
        pen.text(ax, x + across / 2, y + down / 2, "Σ", **style)


def heads(config: LlamaConfig, sizes: Sequence[int], *, title: str = "") -> Figure:
    """Draw which rank has which heads, for some numbers of ranks.

    A head of several colours has a copy on each of these ranks.
    """
    rows = {"queries": config.num_heads, "keys, values": config.num_kv_heads}
    cell, beside, high = 0.52, 1.15, 1.28  # inches: a head, the names beside heads, a panel
    panel = beside + cell * config.num_heads + 0.2
    across = min(len(sizes), max(1, int(pen.WIDTH / panel)))
    width = max(panel * across + 0.2, pen.title_width(title), 6.0)
    height = 0.95 + high * -(-len(sizes) // across)
    figure, ax = pen.sheet(width, height, title)
    for i, size in enumerate(sizes):
        left, top = beside + i % across * panel, height - 0.72 - high * (i // across)
        pen.text(ax, left, top, f"tp = {size}", weight="bold")
        for row, (name, count) in enumerate(rows.items()):
            y = top - 0.17 - 0.48 * (row + 1) + 0.06
            pen.text(ax, left - 0.12, y + 0.18, name, color=MUTED, ha="right")
            wide = cell * config.num_heads / count
            spans = by_heads(count, 1, size)
            for head in range(count):
                owners = [RANK[r] for r, (start, stop) in enumerate(spans) if start <= head < stop]
                box = left + wide * head + 0.03, y, wide - 0.06, 0.36
                pen.striped(ax, box, owners, head, size=9, on_paper=True)
    pen.key(figure, pen.of_ranks(max(sizes)), beside, 0.16)
    return figure


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
    arrows = ["all-to-all\n→", "attention,\nall-to-all\n→"]
    cell, gap, arrow = 0.34, 0.28, 0.95
    grids = [grid for panel in panels.values() for grid in panel.values()]
    wide = 0.5 + sum(cell * len(grid[0]) + gap for grid in grids) + arrow * len(arrows)
    height = 1.75 + cell * size
    figure, ax = pen.sheet(max(wide, pen.title_width(title)), height, title, note)
    x, top = 0.25 + gap / 2, 0.8 + cell * size
    for words, panel in panels.items():
        pen.text(ax, x, top + 0.17, words, weight="bold")
        for name, grid in panel.items():
            for i, row in enumerate(grid):
                for j, (rank, number) in enumerate(row):
                    box = x + cell * j, top - cell * (i + 1), cell, cell
                    pen.cell(ax, box, number, RANK[rank], ec=PAPER, lw=1.2)
            centre = x + cell * len(grid[0]) / 2
            pen.text(ax, centre, top - cell * size - 0.16, name, ha="center")
            x += cell * len(grid[0]) + gap
        if arrows:
            middle = x + (arrow - gap) / 2, top - cell * size / 2
            pen.text(ax, *middle, arrows.pop(0), ha="center", size=9)
            x += arrow
    pen.key(figure, pen.of_ranks(size), 0.25, 0.2, ax.get_xlim()[1] - 0.4)
    return figure
