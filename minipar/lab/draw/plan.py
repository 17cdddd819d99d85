"""Pictures of a plan: what each axis does to each parameter, and which axes leave a node."""

import math
from collections.abc import Mapping
from itertools import pairwise

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
    ax, columns = pen.paper(), explained.plan.mesh_sizes()
    left, wide, row = 2.8, 1.62, 0.46  # inches
    for i, (axis, size) in enumerate(columns.items()):
        x = left + wide * (i + 0.5) - 0.06
        pen.text(ax, x, 0.16, f"{axis} ({size} ranks)", ha="center", weight="bold")
    for i, family in enumerate(families(explained)):
        y = -row * (i + 1)
        ax.plot([0, left + wide * len(columns)], [y + row, y + row], color=GRID, lw=0.8)
        pen.text(ax, 0, y + row / 2, label_of(family), weight="bold")
        _whole_and_piece(ax, family[0], 1.7, y + row / 2)
        for j, axis in enumerate(columns):
            _box(ax, family, axis, (left + wide * j, y + 0.06, wide - 0.12, row - 0.12))
    return pen.cut(ax, title, note, [(PIECE, "what a rank has, before dp and cp cut it")])


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


def _box(ax: Axes, family: list[Row], axis: str, box: pen.Box) -> None:
    verb = family[0].summed.get(axis)
    said, fill, edge = "the same on all", GRID, GRID
    if axis in family[0].cut_over:
        said = "on one stage" if axis == "pp" else "a piece each"
        fill, edge = PAPER, pen.colour(axis)
    if verb:
        fill = edge = pen.colour(axis)
        said = f"{verb}\n{sum(row.sent.get(axis, 0) for row in family):,} bytes"
    pen.cell(ax, box, said, fill, 7.5, radius=0.07, ec=edge, lw=1.2)


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
    ax, ranks, node = pen.paper(), math.prod(sizes.values()), topology.ranks_per_node
    cell, row = min(0.62, 6.6 / ranks), 0.92
    centre = [cell * (r + 0.5) + 0.24 * (r // node) for r in range(ranks)]
    for i in range(topology.nodes):
        x = centre[i * node] - cell / 2 - 0.04
        box = x, -row * len(sizes), cell * node + 0.08, row * len(sizes)
        pen.rectangle(ax, *box, fc="none", ec=GRID, lw=1.4)
        pen.text(ax, x + 0.05, 0.12, f"node {i}", size=8, color=MUTED)
    side = min(0.3, 0.7 * cell)
    for i, (axis, out) in enumerate(crossing(sizes, topology).items()):
        y = 0.3 - row * (i + 1)
        inks = [(EXPOSED, 4.5)] * out + [(pen.colour(axis), 2.2)]  # outlined in red across nodes
        for a, b in (pair for group in groups_along([axis], sizes) for pair in pairwise(group)):
            middle, wide = (centre[a] + centre[b]) / 2, centre[b] - centre[a]
            tall = min(0.85, 0.35 + 0.12 * wide)
            for ink, lw in inks:
                bow = {"theta2": 180, "color": ink, "lw": lw}
                ax.add_patch(Arc((middle, y + side / 2), wide, tall, **bow))
        for rank in range(ranks):
            box = centre[rank] - side / 2, y - side / 2, side, side
            pen.cell(ax, box, rank, PAPER, ec=INK, lw=1, zorder=2)
        pen.text(ax, -0.65, y, f"{axis} {sizes[axis]}", weight="bold")
        says, ink = ("leaves the node", EXPOSED) if out else ("stays inside", MUTED)
        pen.text(ax, centre[-1] + cell / 2 + 0.25, y, says, color=ink)
    return pen.cut(ax, title)
