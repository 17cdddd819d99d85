"""Draw the way of a tensor through a step: boxes, and arrows between them.

A box in the palette of memory is a tensor that a rank holds. A white box is computed. A
box in the colour of an axis is a collective. Taught in: notebooks 03, 04a, 04b, 05.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, HELD, INK, MUTED, WIDTH

TALL, PITCH = 0.5, 0.92  # inches: of a box, and from row to row


@dataclass(frozen=True)
class Box:
    """A box in a column and a row, counted from the upper left; halves lie between two rows.

    `kind` is a part of memory such as "weights", an axis such as "dp", or "" for computing.
    """

    said: str
    column: float
    row: float = 0
    kind: str = ""


def mechanism(
    boxes: Mapping[str, Box],
    arrows: Sequence[tuple[str, str] | tuple[str, str, str]],
    *,
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw boxes, and arrows (from, to, and the words beside the arrow)."""
    ax = pen.paper()
    pitch = (WIDTH - 0.3) / (1 + max(box.column for box in boxes.values()))
    wide = min(1.5, pitch - 0.4)
    places = {name: (box.column * pitch, -box.row * PITCH) for name, box in boxes.items()}
    for name, box in boxes.items():
        x, y = places[name]
        fill = HELD.get(box.kind) or AXIS.get(box.kind) or pen.PAPER
        style = {"radius": 0.06, "ec": fill if box.kind else INK, "lw": 1.0, "size": 8.5}
        pen.cell(ax, (x - wide / 2, y - TALL / 2, wide, TALL), box.said, fill, **style)
        ax.texts[-1].set_gid(pen.FINDING)
    for start, end, *said in arrows:
        _arrow(ax, places[start], places[end], wide, *said)
    return pen.cut(ax, title, note)


def _arrow(ax: Axes, start: pen.Point, end: pen.Point, wide: float, said: str = "") -> None:
    """Draw an arrow from edge to edge: sideways between columns, else up or down."""
    across = (end[0] > start[0]) - (end[0] < start[0])
    down = 0 if across else (end[1] > start[1]) - (end[1] < start[1])
    gap = wide / 2 + 0.03, TALL / 2 + 0.03
    a = start[0] + across * gap[0], start[1] + down * gap[1]
    b = end[0] - across * gap[0], end[1] - down * gap[1]
    pen.arrow(ax, a, b, 10, color=INK, lw=1.1)
    x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    beside = {"ha": "center"} if across else {"ha": "left"}
    place = (x, y + 0.12) if across else (x + 0.08, y)
    pen.text(ax, *place, said, size=8, color=MUTED, **beside)
