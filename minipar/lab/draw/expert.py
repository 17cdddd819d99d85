"""Pictures of experts: the way of a token, tables of loads and choices."""

from collections.abc import Collection, Mapping, Sequence

import matplotlib.colors as colors
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import GRID, INK, KIND, MUTED, PAPER, RANK

TOKEN, SLOT, ROW = 0.25, 0.19, 0.74  # inches: a token, a slot that has travelled, a rank
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
    ax, step = pen.paper(), TOKEN + 0.05
    home, away = step * max(map(len, experts)), SLOT * max(map(len, arrived))
    first, second = 0.0, max(1.0 + home, 1.5)
    third = second + max(1.0 + away, 2.7)
    names = ("tokens at home", "after dispatch: at their experts", "after combine: home")
    for number, (x, name) in enumerate(zip((first, second, third), names, strict=True), 1):
        pen.text(ax, x, 0.86, f"{number}. {name}", size=10.5, weight="bold")
    stops = []  # where the token `follow` is at its experts
    outline = {"fc": "none", "ec": INK, "lw": 1.8, "zorder": 5}
    for rank, tokens in enumerate(experts):
        top, middle = -ROW * rank, TOKEN / 2 - ROW * rank
        pen.text(ax, first - 0.12, middle, f"rank {rank}", ha="right", color=MUTED)
        owners = [expert // per_rank for token in tokens for expert in token]
        counts = " ".join(str(owners.count(to)) for to in range(n))
        for x, said in ((first, counts), (third, f"{len(tokens)} tokens")):
            above = {"bbox": {"fc": PAPER, "lw": 0, "pad": 1}, "zorder": 7}  # than the arrows
            pen.text(ax, x + home + 0.06, middle, said, size=8.5, **above)
            for number, chosen in enumerate(tokens):  # a stripe for each of the token's experts
                box = x + step * number, top, TOKEN, TOKEN
                pen.striped(ax, box, [inks[expert] for expert in chosen])
                if x == third:
                    pen.text(ax, box[0] + TOKEN / 2, middle, "Σ", ha="center", size=8)
                if (rank, number) == follow:
                    pen.rectangle(ax, *box, **outline)
        for place, (expert, source, number) in enumerate(arrived[rank]):
            box = second + SLOT * place, top, SLOT - 0.02, TOKEN
            pen.cell(ax, box, source, inks[expert], 6.5)
            if (source, number) == follow:
                pen.rectangle(ax, *box, **outline)
                stops.append((box[0] + SLOT / 2 - 0.01, top))
        end, rows = second + SLOT * len(arrived[rank]) + 0.08, f"{len(arrived[rank])} rows"
        pen.text(ax, end, middle, rows, size=8.5)
    to = "to rank\n" + " ".join(map(str, range(n)))
    pen.text(ax, first + home + 0.06, -ROW * (n - 1) - 0.2, to, size=8, color=MUTED)
    style = {"color": INK, "lw": 1.0, "alpha": 0.75, "zorder": 6}
    own = -ROW * follow[0]
    for x, y in stops:  # there and back, from the edges of boxes that face each other
        stop, edge = (x, y + TOKEN * (y <= own)), own + TOKEN * (y >= own)
        start, end = ((x + step * follow[1] + TOKEN / 2, edge) for x in (first, third))
        style["connectionstyle"] = f"arc3,rad={-0.12 if y == own else 0}"
        pen.arrow(ax, start, stop, 8, **style)
        pen.arrow(ax, stop, end, 8, **style)
    legend = [(ink, f"expert {e}, on rank {e // per_rank}") for e, ink in enumerate(inks)]
    return pen.cut(ax, title, note, legend)


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
    marked: Collection[Cell] = (),
) -> Figure:
    """Draw tables `{name: table}`, `across` of them side by side: the larger a number, the darker.

    A row may be shorter. The cells `marked`, (row, column), are framed in each table.
    """
    most = max(max(line) for table in panels.values() for line in table) or 1
    shade = colors.LinearSegmentedColormap.from_list("load", [PAPER, KIND["forward"]])
    wide, tall = 0.075 * max(2, *(len(form.format(most)), *map(len, columns))) + 0.2, 0.34
    ax = pen.paper()
    for number, (name, table) in enumerate(panels.items()):
        x = number % across * (wide * len(columns) + 0.3)
        top = -(number // across) * (tall * len(rows) + 0.65)
        pen.text(ax, x, top + 0.38, name)
        words = {"ha": "center", "color": MUTED, "size": 8}
        for j, column in enumerate(columns):
            pen.text(ax, x + wide * (j + 0.5), top + 0.13, column, **words)
        for i, row in enumerate(rows):
            y = top - tall * (i + 0.5)
            if number % across == 0:
                pen.text(ax, x - 0.1, y, row, ha="right", color=MUTED)
            for j, value in enumerate(table[i]):
                box, fill = (x + wide * j, y - tall / 2, wide, tall), shade(value / most)
                edge = {"ec": GRID, "lw": 0.8}
                edge = {"ec": INK, "lw": 2.2, "zorder": 2} if (i, j) in marked else edge
                pen.cell(ax, box, form.format(value), colors.to_hex(fill), **edge)
    return pen.cut(ax, title, note)
