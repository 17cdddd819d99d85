"""Pictures of experts: the way of a token, loads, who sums what, and experts that choose."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import matplotlib.colors as colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, KIND, MUTED, PAPER, RANK

TOKEN, SLOT, ROW = 0.25, 0.19, 0.74  # inches: a token, a slot that has travelled, a rank
SAME = "#d5d8e0"  # what all ranks have alike
Cell, Table = tuple[int, int], Sequence[Sequence[float]]


def ink_of(expert: int, per_rank: int) -> str:
    """Return the colour of an expert: its rank's colour, darker from expert to expert."""
    rank, place = divmod(expert, per_rank)
    darker = 1 - 0.3 * place / max(1, per_rank - 1)
    return colors.to_hex([darker * part for part in colors.to_rgb(RANK[rank])])


# ---------------------------------------------------------------------- one layer, all its tokens
def journey(
    experts: Sequence[Sequence[Sequence[int]]],
    num_experts: int,
    *,
    follow: Cell = (0, 0),
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw one layer in three panels: tokens at home, their slots at the experts, tokens back.

    `experts` has the experts of each token, by rank. The token `follow`, (rank, number), is
    outlined, and arrows show its way.
    """
    n = len(experts)
    per_rank, inks = num_experts // n, [ink_of(e, num_experts // n) for e in range(num_experts)]
    slots = sorted(
        (expert, rank, number)
        for rank, tokens in enumerate(experts)
        for number, token in enumerate(tokens)
        for expert in token
    )
    arrived = [[slot for slot in slots if slot[0] // per_rank == rank] for rank in range(n)]
    step = TOKEN + 0.05
    home, away = step * max(map(len, experts)), SLOT * max(map(len, arrived))
    first, second, third = 0.8, 1.8 + home, 2.8 + home + away
    width, height = third + home + 0.85, ROW * n + 1.86
    figure, ax = pen.sheet(width, height, title, note)
    names = ("tokens at home", "after dispatch: at their experts", "after combine: home")
    for number, (x, name) in enumerate(zip((first, second, third), names, strict=True), 1):
        pen.text(ax, x, height - 0.62, f"{number}. {name}", size=10.5, weight="bold")
    tops = [height - 1.48 - ROW * rank for rank in range(n)]

    def outline(x: float, y: float, wide: float) -> None:
        pen.rectangle(ax, x, y, wide, TOKEN, fc="none", ec=INK, lw=1.8, zorder=5)

    stops = []  # where the token `follow` is at its experts
    for rank, (tokens, top) in enumerate(zip(experts, tops, strict=True)):
        middle = top + TOKEN / 2
        pen.text(ax, first - 0.12, middle, f"rank {rank}", ha="right", color=MUTED)
        owners = [expert // per_rank for token in tokens for expert in token]
        counts = " ".join(str(owners.count(to)) for to in range(n))
        for x, said in ((first, counts), (third, f"{len(tokens)} tokens")):
            above = {"bbox": {"fc": PAPER, "lw": 0, "pad": 1}, "zorder": 7}  # than the arrows
            pen.text(ax, x + home + 0.06, middle, said, size=8.5, **above)
            for number, chosen in enumerate(tokens):  # a stripe for each of the token's experts
                left = x + step * number
                pen.striped(ax, (left, top, TOKEN, TOKEN), [inks[expert] for expert in chosen])
                if x == third:
                    pen.text(ax, left + TOKEN / 2, middle, "Σ", ha="center", size=8)
                if (rank, number) == follow:
                    outline(left, top, TOKEN)
        for place, (expert, source, number) in enumerate(arrived[rank]):
            left = second + SLOT * place
            box = left, top, SLOT - 0.02, TOKEN
            pen.cell(ax, box, source, inks[expert], size=6.5)
            if (source, number) == follow:
                outline(left, top, SLOT - 0.02)
                stops.append((left + SLOT / 2 - 0.01, top))
        end, rows = second + SLOT * len(arrived[rank]) + 0.08, f"{len(arrived[rank])} rows"
        pen.text(ax, end, middle, rows, size=8.5)
    to = "to rank\n" + " ".join(map(str, range(n)))
    pen.text(ax, first + home + 0.06, tops[-1] - 0.2, to, size=8, color=MUTED)
    style = {"color": INK, "lw": 1.0, "alpha": 0.75, "zorder": 6}
    own = tops[follow[0]]
    for x, y in stops:  # there and back, from the edges of boxes that face each other
        stop, edge = (x, y + TOKEN * (y <= own)), own + TOKEN * (y >= own)
        start, end = ((x + step * follow[1] + TOKEN / 2, edge) for x in (first, third))
        style["connectionstyle"] = f"arc3,rad={-0.12 if y == own else 0}"
        pen.arrow(ax, start, stop, 8, **style)
        pen.arrow(ax, stop, end, 8, **style)
    key = [(ink, f"expert {e}, on rank {e // per_rank}") for e, ink in enumerate(inks)]
    pen.key(figure, key, 0.2, 0.32, width - 0.4)
    return figure


# ---------------------------------------------------------------------- tables
def heat(
    panels: Mapping[str, Table],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    note: str = "",
    form: str = "{:.0f}",
    across: int = 1,
    sums: bool = False,
) -> Figure:
    """Draw tables `{name: table}`, `across` of them side by side: the larger a number, the darker.

    With `sums`, the sums of rows and columns stand at the margins.
    """
    most = max(max(line) for table in panels.values() for line in table) or 1
    shade = colors.LinearSegmentedColormap.from_list("load", [PAPER, KIND["forward"]])
    inner = len(rows), len(columns)
    if sums:
        rows, columns = [*rows, "sum"], [*columns, "sum"]
    figure, ax, corners = _tables([*panels], rows, columns, (0.52, 0.34, 0.3), across, title, note)
    for (x, top), table in zip(corners, panels.values(), strict=True):
        lines = [[*line, sum(line)] for line in table]
        lines.append([sum(column) for column in zip(*lines, strict=True)])
        for i, j in product(range(len(rows)), range(len(columns))):
            box = x + 0.52 * j, top - 0.34 * (i + 1), 0.52, 0.34
            if i < inner[0] and j < inner[1]:
                fill = colors.to_hex(shade(lines[i][j] / most))
                pen.cell(ax, box, form.format(lines[i][j]), fill, ec=pen.GRID, lw=0.8)
            elif i < inner[0] or j < inner[1]:
                where, said = (box[0] + 0.26, box[1] + 0.17), form.format(lines[i][j])
                pen.text(ax, *where, said, ha="center", size=8.5, weight="bold")
    return figure


def choices(
    panels: Mapping[str, Table],
    *,
    marked: Collection[Cell],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw tables of choices, a dot for each 1; the cells `marked`, (row, column), are framed."""
    side = 0.25
    shape = (side, side, 0.37), len(panels)
    figure, ax, corners = _tables([*panels], rows, columns, *shape, title, note)
    for (x, top), table in zip(corners, panels.values(), strict=True):
        for i, j in product(range(len(rows)), range(len(columns))):
            at, is_marked = (x + side * j, top - side * (i + 1)), (i, j) in marked
            edge = {"ec": INK, "lw": 2.2, "zorder": 5} if is_marked else {"ec": pen.GRID, "lw": 0.8}
            pen.rectangle(ax, *at, side, side, fc="none", **edge)
            if table[i][j]:
                ink = INK if is_marked else KIND["forward"]
                ax.plot(at[0] + side / 2, at[1] + side / 2, "o", color=ink, ms=8)
    return figure


def _tables(
    names: Sequence[str],
    rows: Sequence[str],
    columns: Sequence[str],
    sides: tuple[float, float, float],
    across: int,
    title: str,
    note: str,
) -> tuple[Figure, Axes, list[pen.Point]]:
    """Draw names of tables, rows and columns; return the upper left corner of each table.

    `sides` in inches: width and height of a cell, and from table to table.
    """
    (wide, tall, gap), left = sides, 0.25 + 0.075 * max(map(len, rows))
    pitch, high = wide * len(columns) + gap, tall * len(rows) + 0.65
    width = max(left + pitch * across, pen.title_width(title))
    height = high * -(-len(names) // across) + 0.7
    figure, ax = pen.sheet(width, height, title, note)
    corners = []
    for number, name in enumerate(names):
        x, top = left + number % across * pitch, height - 0.95 - number // across * high
        corners.append((x, top))
        pen.text(ax, x, top + 0.38, name)
        for i, row in enumerate(rows if number % across == 0 else ()):
            pen.text(ax, x - 0.1, top - tall * (i + 0.5), row, ha="right", color=MUTED)
        for j, column in enumerate(columns):
            pen.text(ax, x + wide * (j + 0.5), top + 0.13, column, ha="center", color=MUTED, size=8)
    return figure, ax, corners


# ---------------------------------------------------------------------- who sums a gradient
def groups(
    found: Mapping[str, Sequence[Sequence[int]]],
    held: Mapping[str, Sequence[str]],
    *,
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw a line for each kind of weights: boxes of ranks, of one colour where ranks sum.

    `found` has the groups of ranks by kind; `held` has what each rank holds of that kind.
    """
    wide, high = 1.55, 0.95
    left = 0.3 + 0.08 * max(map(len, found))
    size = len(next(iter(held.values())))
    width, height = left + wide * size + 0.2, high * len(found) + 0.7
    figure, ax = pen.sheet(max(width, pen.title_width(title)), height, title, note)
    for i, (kind, sets) in enumerate(found.items()):
        y = height - 0.4 - high * (i + 0.75)
        pen.text(ax, left - 0.15, y + 0.24, kind, ha="right", weight="bold")
        for number, ranks in enumerate(sets):
            ink = RANK[number] if len(sets) > 1 else SAME
            for rank in ranks:
                x = left + wide * rank
                pen.rounded(ax, x, y, wide - 0.2, 0.48, 0.06, fc=ink, ec="none")
                pen.text(ax, x + wide / 2 - 0.1, y + 0.32, f"rank {rank}", ha="center")
                pen.text(ax, x + wide / 2 - 0.1, y + 0.14, held[kind][rank], ha="center", size=8)
            middle = [left + wide * (rank + 0.5) - 0.1 for rank in ranks]
            low = y - 0.1 - 0.1 * number
            ax.plot([middle[0], middle[-1]], [low, low], color=pen.readable(ink), lw=1.6)
            for x in middle:
                ax.plot([x, x], [low, y], color=pen.readable(ink), lw=1.6)
    return figure
