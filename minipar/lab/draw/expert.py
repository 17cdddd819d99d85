"""Pictures of experts: how loaded they are, and which rank sends how much to which."""

from collections.abc import Sequence

import matplotlib.colors as colors
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, KIND, MUTED, PAPER

WIDE, TALL = 0.52, 0.34  # inches of a cell


def heat(
    panels: dict[str, Sequence[Sequence[float]]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    note: str = "",
    form: str = "{:.0f}",
    across: int | None = None,
) -> Figure:
    """Draw tables of numbers side by side, the larger the darker: `{name: [[...], ...]}`.

    A load by layer and expert, step by step, say, or rows from each rank to each; `across` of them
    beside each other, by default all. Raises `ValueError` for tables that differ in size from their
    `rows` and `columns`.
    """
    for name, table in panels.items():
        if len(table) != len(rows) or any(len(line) != len(columns) for line in table):
            raise ValueError(f"{name}: a table of {len(rows)} x {len(columns)} numbers is expected")
    most = max(max(line) for table in panels.values() for line in table) or 1
    shade = colors.LinearSegmentedColormap.from_list("load", [PAPER, KIND["backward"]])
    left, side = 0.25 + 0.075 * max(map(len, rows)), WIDE * len(columns)
    across = min(across or len(panels), len(panels))
    width = max(left + (side + 0.3) * across, pen.title_width(title))
    high = TALL * len(rows) + 0.65  # of a panel with its heading
    height = high * -(-len(panels) // across) + 0.7
    figure, ax = pen.sheet(width, height, title, note)
    for number, (name, table) in enumerate(panels.items()):
        x, top = left + number % across * (side + 0.3), height - 0.95 - number // across * high
        for i, row in enumerate(rows if not number % across else ()):
            pen.text(ax, left - 0.1, top - TALL * (i + 0.5), row, ha="right", color=MUTED)
        pen.text(ax, x, top + 0.4, name)
        for j, column in enumerate(columns):
            pen.text(ax, x + WIDE * (j + 0.5), top + 0.13, column, ha="center", color=MUTED, size=8)
            for i, line in enumerate(table):
                fill = colors.to_hex(shade(line[j] / most))
                box = x + WIDE * j, top - TALL * (i + 1), WIDE, TALL
                pen.cell(ax, box, form.format(line[j]), fill, ec=INK, lw=0.4)
    return figure
