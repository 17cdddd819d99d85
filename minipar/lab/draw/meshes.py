"""Meshes, and the work of collectives and plans on them: who has which data, who sends."""

import math
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise, zip_longest

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
    right. Between panels of many ranks, one line stands for all. Raises ValueError for more axes or
    ranks than can be read: then a mesh shows its text.
    """
    given = mesh.sizes if isinstance(mesh, Mesh) else mesh
    sizes = {name: size for name, size in given.items() if size > 1}
    if len(sizes) > 3 or math.prod(sizes.values()) > 256:
        raise ValueError(f"mesh {dict(given)} cannot be read; at most 3 axes and 256 ranks")
    names = [*reversed(sizes), "", "", ""][:3]  # right, down, panels
    right = sizes.get(names[0], 1) + 0.7
    ranks = [coordinates(rank, sizes) for rank in range(math.prod(sizes.values()))]
    places = [[at.get(name, 0) for name in names] for at in ranks]
    where = [(i + right * panel, j) for i, j, panel in places]  # in cells, by rank
    cell = min(0.8, (WIDTH - 0.5) / (1 + max(x for x, _ in where)))  # inches
    xy = [(x * cell, -y * cell) for x, y in where]
    ax, legend = pen.paper(), []
    for name in sizes:
        groups, far = groups_along([name], sizes), name == names[2]  # past ranks between
        some = f"{name} groups: {_some(groups)}"
        if far and math.prod(sizes.get(near, 1) for near in names[:2]) > 8:
            # One bow from panel to panel; the other ranks' would look the same.
            groups = [group for group in groups if places[group[0]][:2] == [0, 0]]
            some += "  (only the first are drawn)"
        legend.append((colour(name), some))
        line = {"arrowstyle": "-", "color": colour(name), "lw": 1.8 if far else 3.5, "zorder": 1}
        bow = -min(0.22, 0.6 / right) if far else 0
        line |= {"connectionstyle": f"arc3,rad={bow}", "shrinkA": 0, "shrinkB": 0}
        for group in groups:
            for a, b in pairwise(group):
                ax.add_patch(FancyArrowPatch(xy[a], xy[b], **line))
    side = 0.52 * cell
    style = {"radius": 0.14 * cell, "ec": INK, "lw": 1.1, "zorder": 2, "size": 13 * cell}
    for rank, (x, y) in enumerate(xy):
        pen.cell(ax, (x - side / 2, y - side / 2, side, side), rank, PAPER, **style)
    shape = " × ".join(f"{name} {size}" for name, size in sizes.items())
    title = f"{len(xy)} ranks: {shape}" if sizes else "one device"
    return pen.cut(ax, title, legend=legend)


def _some(groups: Sequence[Sequence[int]]) -> str:
    """Return the first groups, and of a long one the ends: "0 1 2  |  3 4 5"."""
    said = [" ".join(map(str, g)) if len(g) <= 8 else f"{g[0]} {g[1]} … {g[-1]}" for g in groups]
    return "  |  ".join(said[:4] + ["…"] * (len(groups) > 4))


# ---------------------------------------------------------------------- collectives
SENTENCE = {
    "all_reduce": "every rank gets the sum",
    "reduce": "rank 0 gets the sum",
    "reduce_scatter": "rank r gets block r of the sum",
    "all_gather": "every rank gets all blocks",
    "gather": "rank 0 gets all blocks",
    "broadcast": "every rank gets what rank 0 has",
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
    ax, cell, end = pen.paper(), 0.44, 0.44 * size  # inches
    _ranks(ax, (0, 0), cell, "before", before)
    _ranks(ax, (end + 1.1, 0), cell, "after", after)
    y = -((cell + GAP) * size - GAP) / 2
    pen.arrow(ax, (end + 0.28, y), (end + 0.82, y), 16, color=INK, lw=1.4)
    share = wire_bytes(verb, 1200, size) / 1200
    note = f"of a tensor of N bytes, the ledger counts {share:.3g} N at the busiest rank"
    return pen.cut(ax, f"{verb.replace('_', '-')}: {SENTENCE[verb]}", note)


Held = Sequence[Sequence[Set[int]]]
"""Data of ranks: ``held[rank][block]`` is the set of ranks that have added to that block."""


def rounds(history: Mapping[str, Held], *, title: str = "", note: str = "") -> Figure:
    """Draw an algorithm round by round: `{"after round 1": held, ...}`, a panel for each.

    Colours are as in `collective`. What has just arrived at a rank has a frame.
    """
    ax, cell = pen.paper(), 0.42  # inches
    first = next(iter(history.values()))
    ranks, blocks = len(first), max(map(len, first))
    wide, tall = cell * blocks + 0.34, (cell + GAP) * ranks + 0.42  # of a panel
    across = max(1, int((WIDTH - 0.75) / wide))
    before: list[dict[int, Cell]] | None = None
    for i, (word, held) in enumerate(history.items()):
        at = i % across * wide, -(i // across) * tall
        cells = [{b: (frozenset(whose), b) for b, whose in enumerate(r) if whose} for r in held]
        _ranks(ax, at, cell, word, cells, before)
        before = cells
    return pen.cut(ax, title, note)


def _ranks(
    ax: Axes,
    corner: pen.Point,
    cell: float,
    word: str,
    held: Sequence[Mapping[int, Cell]],
    before: Sequence[Mapping[int, Cell]] | None = None,
) -> None:
    """Draw what each rank holds, a row per rank. A frame is around each cell that is new.

    The colours of a block, from top to bottom, are the ranks that have added their data. Ranks are
    named at the left end of the paper.
    """
    left, top = corner
    slots = 1 + max(slot for contents in held for slot in contents)
    pen.text(ax, left + 0.03, top + 0.14, word, color=MUTED)
    for rank, contents in enumerate(held):
        y = top - (cell + GAP) * rank - cell
        if left == 0:
            pen.text(ax, left - 0.12, y + cell / 2, f"rank {rank}", color=MUTED, ha="right")
        for slot in range(slots):
            box = left + slot * cell + 0.03, y + 0.03, cell - 0.06, cell - 0.06
            sources, block = contents.get(slot, (frozenset(), ""))
            fills = [RANK[source] for source in sorted(sources)] or [KIND["idle"]]
            pen.striped(ax, box, fills, f"Σ{block}" if len(sources) > 1 else block)
            if before and slot in contents and contents[slot] != before[rank].get(slot):
                pen.rectangle(ax, *box, fill=False, ec=INK, lw=1.6, zorder=4)


# ---------------------------------------------------------------------- plans of messages
ADDED, PASSED = SERIES[0], SERIES[1]
COLUMN, LINE = 0.3, 0.3  # inches


def schedules(
    plans: Mapping[str, Sequence[Plan]], *, numel: int, title: str = "", note: str = ""
) -> Figure:
    """Draw plans beside each other: `{"ring": [plan of rank 0, plan of rank 1, ...], ...}`.

    A column is a round, a row a rank, an arrow a message. An arrow is thicker where it holds more
    of `numel` elements, and half as thick where four or more arrive together. Its colour says
    whether the receiver adds the message to its own data. Rounds in which all rest are left out.
    """
    ax, x = pen.paper(), 0.0
    for rank in range(max(map(len, plans.values()))):
        pen.text(ax, -0.14, -LINE * rank, f"rank {rank}", color=MUTED, ha="right")
    for name, each in plans.items():
        steps = zip_longest(*each, fillvalue=Round())
        rounds = [step for step in steps if any(mine.sends for mine in step)]
        pen.text(ax, x, 0.52, name, weight="bold")
        caption = f"{len(rounds)} round{'s' * (len(rounds) > 1)}"
        pen.text(ax, x, 0.31, caption, color=MUTED, size=8)
        _rounds(ax, rounds, len(each), numel, x)
        x += COLUMN * max(2, len(rounds)) + 0.34
    return pen.cut(ax, title, note, [(ADDED, "added"), (PASSED, "passed on")])


def _rounds(
    ax: Axes, rounds: Sequence[Sequence[Round]], ranks: int, numel: int, left: float
) -> None:
    column = COLUMN if len(rounds) > 1 else 2 * COLUMN
    ys = [-LINE * rank for rank in range(ranks)]
    for i in range(len(rounds) + 1):
        x = left + column * i
        ax.plot([x, x], [ys[-1], 0], color=GRID, lw=0.8, zorder=1)
        ax.plot([x] * ranks, ys, "o", color=MUTED, ms=2.6, mew=0, zorder=3)
    for i, steps in enumerate(rounds):
        for rank, step in enumerate(steps):
            crowd = 1 if len(step.recvs) < 4 else 2  # or the lines would be one block of colour
            for message in (message for message in step.recvs if message.peer != rank):
                adds = any(m.add and m.lo < message.hi and message.lo < m.hi for m in step.recvs)
                start = left + column * i, ys[message.peer]
                end = left + column * (i + 1), ys[rank]
                share = math.sqrt((message.hi - message.lo) / numel) / crowd
                style = {"lw": 0.3 + 2.9 * share, "color": ADDED if adds else PASSED, "zorder": 2}
                pen.arrow(ax, start, end, 4 + 7 * share, **style)
