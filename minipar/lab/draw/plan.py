"""Pictures of a plan: what each axis does to each parameter, and which axes leave a node."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from minipar.comm.mesh import groups_along
from minipar.emulate.link import Topology
from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, GRID, HELD, INK, MUTED, PAPER
from minipar.parallel.explain import Explanation, Row

PIECE = HELD["weights"]  # what a rank has of a parameter


# ---------------------------------------------------------------------- parameters by axis
def families(explained: Explanation) -> list[list[Row]]:
    """Return the rows of an explanation; rows with the same shapes, cuts and sums are together."""
    alike: dict[tuple, list[Row]] = {}
    for row in explained.rows:
        key = (row.full_shape, row.shape, row.cut_over, tuple(row.summed.items()))
        alike.setdefault(key, []).append(row)
    return [*alike.values()]


def label_of(family: list[Row]) -> str:
    """Return "8 x k, v" for the keys and values of four layers."""
    known = {"embed_tokens": "embedding", "lm_head": "head"}
    lasts = [row.name.removesuffix(".weight").rsplit(".", 1)[-1] for row in family]
    lasts = ["norm" if "norm" in last else last.removesuffix("_proj") for last in lasts]
    names = ", ".join(dict.fromkeys(known.get(last, last) for last in lasts))
    return f"{len(family)} x {names}" if len(family) > 1 else names


def explanation(explained: Explanation, *, title: str = "", note: str = "") -> Figure:
    """Draw a row per family of parameters, a column per axis: cut, summed, or just a copy?

    A box in the colour of the axis: ranks along it have summands of the gradient. The box says
    which verb adds them up, and the bytes that a rank sends in one step for the whole family. A
    frame: each rank has a piece of its own. Grey: all have the same, and nothing is to be done. On
    the left stands the whole parameter, and in blue the piece of a rank of tp.
    """
    kinds, columns = families(explained), explained.plan.mesh_sizes()
    left, wide, row = 2.95, 1.62, 0.46  # inches
    width = max(left + wide * len(columns) + 0.2, pen.title_width(title), 5.2)
    height = 1.34 + row * len(kinds)
    figure, ax = pen.sheet(width, height, title, note)
    top = height - 0.82
    for i, (axis, size) in enumerate(columns.items()):
        x = left + wide * (i + 0.5) - 0.06
        pen.text(ax, x, top + 0.16, f"{axis} ({size} ranks)", ha="center", weight="bold")
    for i, family in enumerate(kinds):
        y = top - row * (i + 1)
        ax.plot([0.15, width - 0.15], [y + row, y + row], color=GRID, lw=0.8)
        pen.text(ax, 0.15, y + row / 2, label_of(family), weight="bold")
        _whole_and_piece(ax, family[0], 1.85, y + row / 2)
        for j, axis in enumerate(columns):
            _box(ax, family, axis, left + wide * j, y + 0.06, wide - 0.12, row - 0.12)
    legend = [(PIECE, "what a rank has, before dp and cp cut it")]
    pen.key(figure, legend, 0.15, 0.26, width - 0.4)
    return figure


def _whole_and_piece(ax: Axes, row: Row, x: float, y: float) -> None:
    """Draw the parameter around (x, y), and the shard of rank 0 in it."""
    rows, columns = (*row.full_shape, 1)[:2]
    share = [own / full for own, full in zip(row.shape, row.full_shape, strict=True)]
    unit = 0.36 / math.sqrt(max(rows, columns))
    down, across = (max(0.03, unit * math.sqrt(length)) for length in (rows, columns))
    corner = x - across / 2, y - down / 2
    pen.rectangle(ax, *corner, across, down, fc=PAPER, ec=MUTED, lw=0.8)
    tall, broad = down * share[0], across * (share[1] if len(share) > 1 else 1)
    pen.rectangle(ax, corner[0], y + down / 2 - tall, broad, tall, fc=PIECE)
    shape = "×".join(map(str, row.full_shape))
    pen.text(ax, x + 0.28, y, shape, size=8, color=MUTED)


def _box(
    ax: Axes, family: list[Row], axis: str, x: float, y: float, wide: float, tall: float
) -> None:
    verb, is_cut = family[0].summed.get(axis), axis in family[0].cut_over
    text, fill, edge, ink = "the same on all", GRID, GRID, MUTED
    if is_cut:
        text, fill = "on one stage" if axis == "pp" else "a piece each", PAPER
        edge, ink = pen.colour(axis), INK
    if verb:
        fill = edge = pen.colour(axis)
        sent = sum(row.sent.get(axis, 0) for row in family)
        text, ink = f"{verb}\n{sent:,} bytes", pen.ink_on(fill)
    pen.rounded(ax, x, y, wide, tall, 0.2 * tall, fc=fill, ec=edge, lw=1.2)
    pen.text(ax, x + wide / 2, y + tall / 2 - 0.01, text, size=7.5, color=ink, ha="center")


# ---------------------------------------------------------------------- axes on nodes
def crossing(sizes: Mapping[str, int], topology: Topology) -> dict[str, bool]:
    """Return for each axis of a mesh if a group along it spans nodes."""
    node = topology.ranks_per_node
    return {
        axis: any(len({r // node for r in group}) > 1 for group in groups_along([axis], sizes))
        for axis in sizes
    }


def placement(sizes: Mapping[str, int], topology: Topology, *, title: str = "") -> Figure:
    """Draw all ranks in a line per axis: bows join who talks, outlined in red across nodes."""
    crosses = crossing(sizes, topology)
    ranks, node = math.prod(sizes.values()), topology.ranks_per_node
    left, cell, gap = 0.75, min(0.62, 6.6 / ranks), 0.24
    right = left + cell * ranks + gap * topology.nodes
    width, row = max(right + 1.5, pen.title_width(title)), 0.92
    height = 0.72 + row * len(sizes) + 0.3
    figure, ax = pen.sheet(width, height, title)
    centre = [left + cell * (r + 0.5) + gap * (r // node) for r in range(ranks)]
    for i in range(topology.nodes):
        x = centre[i * node] - cell / 2 - 0.04
        box = {"fc": "none", "ec": GRID, "lw": 1.4}
        pen.rectangle(ax, x, 0.3, cell * node + 0.08, height - 1.02, **box)
        pen.text(ax, x + 0.05, height - 0.6, f"node {i}", size=8, color=MUTED)
    side = min(0.3, 0.7 * cell)
    for i, (axis, out) in enumerate(crosses.items()):
        y = height - 0.72 - row * (i + 1) + 0.3
        inks = [(EXPOSED, 4.5)] * out + [(pen.colour(axis), 2.2)]  # outlined in red across nodes
        for group in groups_along([axis], sizes):
            for a, b in zip(group, group[1:], strict=False):
                middle, wide = (centre[a] + centre[b]) / 2, centre[b] - centre[a]
                tall = min(0.85, 0.35 + 0.12 * wide)
                for ink, lw in inks:
                    bow = Arc((middle, y + side / 2), wide, tall, theta2=180, color=ink, lw=lw)
                    ax.add_patch(bow)
        for rank in range(ranks):
            corner = centre[rank] - side / 2, y - side / 2
            pen.rectangle(ax, *corner, side, side, fc=PAPER, ec=INK, lw=1, zorder=3)
            pen.text(ax, centre[rank], y - 0.01, rank, size=8, ha="center", zorder=4)
        pen.text(ax, 0.15, y, f"{axis} {sizes[axis]}", weight="bold")
        says = "leaves the node" if out else "stays inside"
        pen.text(ax, right + 0.05, y, says, color=EXPOSED if out else MUTED)
    return figure
