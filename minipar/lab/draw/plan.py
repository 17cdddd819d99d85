"""A picture of a mesh on machines: which axes leave a node."""

import math
from collections.abc import Mapping
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.patches import Arc

from minipar.comm.mesh import groups_along
from minipar.emulate.link import Topology
from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, GRID, INK, MUTED, PAPER


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
