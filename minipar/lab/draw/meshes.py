"""Meshes, and the work of collectives, samplers, plans on them: who has which data, who sends."""

import math
from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import Mesh, coordinates, groups_along
from minipar.comm.plans import Plan, Round
from minipar.lab.draw import pen
from minipar.lab.draw.pen import GRID, INK, KIND, MUTED, PAPER, RANK, SERIES, WIDTH, colour


# ---------------------------------------------------------------------- meshes
def mesh(mesh: Mesh | Mapping[str, int]) -> Figure:
    """Draw ranks as a grid; a line in the colour of an axis joins the ranks of a group.

    The last axis runs to the right, the one before it downward. A third axis makes panels to the
    right, a fourth axis panels below. Between panels of many ranks, one line stands for all.
    Raises ValueError for more axes or ranks than can be read: then a mesh shows its text.
    """
    given = mesh.sizes if isinstance(mesh, Mesh) else mesh
    sizes = {name: size for name, size in given.items() if size > 1}
    if len(sizes) > 4 or math.prod(sizes.values()) > 256:
        raise ValueError(f"mesh {dict(given)} cannot be read; at most 4 axes and 256 ranks")
    names = [*reversed(sizes), "", "", "", ""][:4]  # right, down, panels right, panels down
    right, down = (sizes.get(name, 1) + 0.7 for name in names[:2])
    ranks = [coordinates(rank, sizes) for rank in range(math.prod(sizes.values()))]
    places = [[at.get(name, 0) for name in names] for at in ranks]
    # Units of the grid from the upper left corner, by rank.
    where = [(i + right * k, j + down * m) for i, j, k, m in places]
    crowded = math.prod(sizes.get(name, 1) for name in names[:2]) > 8
    columns, lines = (max(axis) + 1 for axis in zip(*where, strict=True))
    cell = min(0.8, (WIDTH - 0.5) / columns)  # inches
    groups = {name: groups_along([name], sizes) for name in sizes}
    legend = {name: f"{name} groups: {_some(listed)}" for name, listed in groups.items()}
    width = max(columns * cell + 0.5, 0.075 * max(map(len, legend.values()), default=0) + 0.9, 4.2)
    height = lines * cell + 0.75 + 0.24 * len(sizes)
    shape = " × ".join(f"{name} {size}" for name, size in sizes.items())
    figure, ax = pen.sheet(width, height, f"{len(where)} ranks: {shape}" if sizes else "one device")
    xy = [(0.2 + (x + 0.5) * cell, height - 0.5 - (y + 0.5) * cell) for x, y in where]
    for name, listed in groups.items():
        far = names.index(name) >= 2  # in a bow, past the ranks between
        line = {"arrowstyle": "-", "color": colour(name), "lw": 1.8 if far else 3.5, "zorder": 1}
        bow = -min(0.22, 0.6 / (right if names.index(name) == 2 else down)) if far else 0
        line |= {"connectionstyle": f"arc3,rad={bow}", "shrinkA": 0, "shrinkB": 0}
        if far and crowded:  # one bow from panel to panel; the other ranks' would look the same
            listed = [group for group in listed if places[group[0]][:2] == [0, 0]]
            legend[name] += "  (only the first are drawn)"
        for group in listed:
            for a, b in zip(group, group[1:], strict=False):
                ax.add_patch(FancyArrowPatch(xy[a], xy[b], **line))
    side, box = 0.52 * cell, {"fc": PAPER, "ec": INK, "lw": 1.1, "zorder": 2}
    for rank, (x, y) in enumerate(xy):
        pen.rounded(ax, x - side / 2, y - side / 2, side, side, 0.14 * cell, **box)
        pen.text(ax, x, y - 0.01, rank, size=13 * cell, ha="center", zorder=3)
    for i, (name, text) in enumerate(reversed(legend.items())):
        y = 0.18 + 0.24 * i
        ax.plot([0.25, 0.6], [y, y], color=colour(name), lw=3.5, solid_capstyle="butt")
        pen.text(ax, 0.7, y - 0.01, text)
    return figure


def _some(groups: Sequence[Sequence[int]]) -> str:
    """Return the first groups, and of a long one the ends: "0 1 2  |  3 4 5"."""
    said = [" ".join(map(str, g)) if len(g) <= 8 else f"{g[0]} {g[1]} … {g[-1]}" for g in groups]
    return "  |  ".join(said[:4] + ["…"] * (len(groups) > 4))


# ---------------------------------------------------------------------- collectives
SENTENCE = {
    "all_reduce": "everybody gets the sum",
    "reduce": "rank 0 gets the sum",
    "reduce_scatter": "rank r gets block r of the sum",
    "all_gather": "everybody gets everybody's block",
    "gather": "rank 0 gets everybody's block",
    "broadcast": "everybody gets what rank 0 has",
    "scatter": "rank r gets block r of rank 0",
    "all_to_all": "block s of rank r becomes block r of rank s",
}
GAP = 0.12  # inches from row to row
Cell = tuple[frozenset[int], int]  # (ranks that have added their data, number of the block)


def blocks_of(verb: str, size: int) -> tuple[list[dict[int, Cell]], list[dict[int, Cell]]]:
    """Return the cells of each rank before and after `verb`: slot -> cell. Rank 0 is the root."""
    n = range(size)
    everyone = frozenset(n)
    own = [{b: (frozenset({r}), b) for b in n} for r in n]
    shard = [{r: (frozenset({r}), r)} for r in n]
    total: dict[int, Cell] = {b: (everyone, b) for b in n}
    joined = {r: (frozenset({r}), r) for r in n}
    nothing: list[dict[int, Cell]] = [{} for _ in n[1:]]
    return {
        "all_reduce": (own, [total for _ in n]),
        "reduce": (own, [total, *nothing]),
        "reduce_scatter": (own, [{r: total[r]} for r in n]),
        "all_gather": (shard, [joined for _ in n]),
        "gather": (shard, [joined, *nothing]),
        "broadcast": ([own[0], *nothing], [own[0] for _ in n]),
        "scatter": ([own[0], *nothing], [{r: own[0][r]} for r in n]),
        "all_to_all": (own, [{s: (frozenset({s}), r) for s in n} for r in n]),
    }[verb]


def collective(verb: str, size: int = 4) -> Figure:
    """Draw what every rank holds before `verb`, and after. Rank 0 is the root of rooted verbs.

    A colour is the rank that data comes from, a number its block; a cell of all colours is the sum.
    """
    before, after = blocks_of(verb, size)
    cell, left, middle = 0.44, 0.8, 1.1  # inches
    side, row = cell * size, cell + GAP
    width, height = max(left + 2 * side + middle + 0.25, 5.2), 1.2 + row * size
    share = wire_bytes(verb, 1200, size) / 1200
    note = f"of a tensor of N bytes, the ledger counts {share:.3g} N at the busiest rank"
    title = f"{verb.replace('_', '-')}: {SENTENCE[verb]}"
    figure, ax = pen.sheet(width, height, title, note)
    x, top = left + side, height - 0.8
    _ranks(ax, left, top, cell, "before", before, slots=size, named=True)
    _ranks(ax, x + middle, top, cell, "after", after, slots=size)
    y = top - (row * size - GAP) / 2
    pen.arrow(ax, (x + 0.28, y), (x + middle - 0.28, y), 16, color=INK, lw=1.4)
    return figure


Held = Sequence[Sequence[Set[int]]]
"""Data of ranks: ``held[rank][block]`` is the set of ranks that have added to that block."""


def rounds(history: Mapping[str, Held], *, title: str = "", note: str = "") -> Figure:
    """Draw an algorithm round by round: `{"after round 1": held, ...}`, a panel for each.

    Colours are as in `collective`. What has just arrived at a rank has a frame.
    """
    panels = list(history.items())
    ranks, blocks = len(panels[0][1]), max(len(row) for _, held in panels for row in held)
    cell, left, gap = 0.42, 0.75, 0.34  # inches
    side, row = cell * blocks, cell + GAP
    columns = min(len(panels), max(1, int((WIDTH - left) / (side + gap))))
    lines, panel = math.ceil(len(panels) / columns), row * ranks + 0.42
    width, height = max(left + columns * (side + gap), 5.2), 0.55 + panel * lines + 0.2
    figure, ax = pen.sheet(width, height, title, note)
    before: list[dict[int, Cell]] | None = None
    for i, (word, held) in enumerate(panels):
        x, top = left + (i % columns) * (side + gap), height - 0.85 - (i // columns) * panel
        cells = [{b: (frozenset(whose), b) for b, whose in enumerate(r) if whose} for r in held]
        _ranks(ax, x, top, cell, word, cells, before, slots=blocks, named=x == left)
        before = cells
    return figure


def _ranks(
    ax: Axes,
    left: float,
    top: float,
    cell: float,
    word: str,
    held: Sequence[Mapping[int, Cell]],
    before: Sequence[Mapping[int, Cell]] | None = None,
    *,
    slots: int,
    named: bool = False,
) -> None:
    """Draw what each rank holds, a row per rank. A frame is around each cell that is new.

    The colours of a block, from top to bottom, are the ranks that have added their data.
    """
    pen.text(ax, left + 0.03, top + 0.14, word, color=MUTED)
    for rank, contents in enumerate(held):
        y = top - (cell + GAP) * rank - cell
        if named:
            pen.text(ax, left - 0.12, y + cell / 2, f"rank {rank}", color=MUTED, ha="right")
        for slot in range(slots):
            box = left + slot * cell + 0.03, y + 0.03, cell - 0.06, cell - 0.06
            sources, block = contents.get(slot, (frozenset(), ""))
            fills = [RANK[source] for source in sorted(sources)] or [KIND["idle"]]
            is_sum = len(sources) > 1
            pen.striped(ax, box, fills, f"Σ{block}" if is_sum else block, on_paper=is_sum)
            if before and slot in contents and contents[slot] != before[rank].get(slot):
                pen.rectangle(ax, *box, fill=False, ec=INK, lw=1.6, zorder=4)


# ---------------------------------------------------------------------- shares of the data
def shares(order: Sequence[int], size: int, batch_size: int) -> Figure:
    """Draw an epoch: a row per batch, its samples in order, coloured by their rank.

    Sample i of a batch belongs to rank i mod `size`, as `train.data.share` deals them out.
    """
    cell, left, batches = 0.46, 0.95, math.ceil(len(order) / batch_size)
    width = max(left + cell * batch_size + 0.25, 5.2)
    height = 0.98 + cell * batches
    figure, ax = pen.sheet(width, height, f"every sample once, dealt out to {size} ranks")
    for i, sample in enumerate(order):
        row, column = divmod(i, batch_size)
        x, y = left + cell * column, height - 0.48 - cell * (row + 1)
        box = x + 0.025, y + 0.025, cell - 0.05, cell - 0.05
        pen.cell(ax, box, int(sample), RANK[column % size], size=9)
        if column == 0:
            pen.text(ax, left - 0.12, y + cell / 2, f"step {row}", color=MUTED, ha="right")
    pen.key(figure, pen.of_ranks(size), left + 0.03, 0.16)
    return figure


# ---------------------------------------------------------------------- plans of messages
ADDED, PASSED = SERIES[0], SERIES[1]
COLUMN, LINE, LEFT = 0.3, 0.3, 0.72  # inches


def schedules(
    plans: Mapping[str, Sequence[Plan]], *, numel: int, title: str = "", note: str = ""
) -> Figure:
    """Draw plans beside each other: `{"ring": [plan of rank 0, plan of rank 1, ...], ...}`.

    A column is a round, a row a rank, an arrow a message. An arrow is thicker where it holds more
    of `numel` elements, and half as thick where four or more arrive together. Its colour says
    whether the receiver adds the message to its own data. Rounds in which all rest are left out.
    """
    shown: dict[str, list[tuple[Round, ...]]] = {}  # by round, what each rank does
    for name, each in plans.items():
        steps = zip_longest(*each, fillvalue=Round())
        shown[name] = [step for step in steps if any(mine.sends for mine in step)]
    ranks = max(map(len, plans.values()))
    wide = {name: COLUMN * max(2, len(rounds)) for name, rounds in shown.items()}
    width = LEFT + sum(wide.values()) + 0.34 * len(wide)
    height = 1.3 + LINE * (ranks - 1) + 0.55
    figure, ax = pen.sheet(max(width, 5.2), height, title, note)
    top, x = height - 1.1, LEFT
    for rank in range(ranks):
        pen.text(ax, LEFT - 0.14, top - LINE * rank, f"rank {rank}", color=MUTED, ha="right")
    for name, rounds in shown.items():
        pen.text(ax, x, top + 0.52, name, weight="bold")
        caption = f"{len(rounds)} round{'s' * (len(rounds) > 1)}"
        pen.text(ax, x, top + 0.31, caption, color=MUTED, size=8)
        _rounds(ax, rounds, len(plans[name]), numel, x, top)
        x += wide[name] + 0.34
    pen.key(figure, [(ADDED, "added"), (PASSED, "passed on")], LEFT, 0.2)
    return figure


def _rounds(
    ax: Axes, rounds: Sequence[Sequence[Round]], ranks: int, numel: int, left: float, top: float
) -> None:
    column = COLUMN if len(rounds) > 1 else 2 * COLUMN
    ys = [top - LINE * rank for rank in range(ranks)]
    for i in range(len(rounds) + 1):
        x = left + column * i
        ax.plot([x, x], [ys[-1], top], color=GRID, lw=0.8, zorder=1)
        ax.plot([x] * ranks, ys, "o", color=MUTED, ms=2.6, mew=0, zorder=3)
    for i, steps in enumerate(rounds):
        for rank, step in enumerate(steps):
            crowd = 1 if len(step.recvs) < 4 else 2  # or the lines would be one block of colour
            for message in (message for message in step.recvs if message.peer != rank):
                adds = any(m.add and m.lo < message.hi and message.lo < m.hi for m in step.recvs)
                start, end = (
                    (left + column * i, ys[message.peer]),
                    (left + column * (i + 1), ys[rank]),
                )
                share = math.sqrt((message.hi - message.lo) / numel) / crowd
                style = {"lw": 0.3 + 2.9 * share, "color": ADDED if adds else PASSED, "zorder": 2}
                pen.arrow(ax, start, end, 4 + 7 * share, **style)
