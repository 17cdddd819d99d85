"""Attention on ranks that hold different tokens: who multiplies which block, when, and who waits.

The blocks are those that the library multiplies (`context.blocks_of`), not drawn by a second rule.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from minipar.comm.mesh import Axis
from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, KIND, MUTED, PAPER, RANK
from minipar.parallel import context

SIDE, LEFT, STRIP = 2.7, 0.72, 0.13  # inches: a triangle, what stands beside it, whose tokens
ROW = 0.27  # inches of a rank in a picture of steps
TOKENS = 48  # drawn where no mask is given: enough for a diagonal, few enough to see them


class Piece(NamedTuple):
    """One block: in `step` of the ring, `rank` multiplies these queries with these keys."""

    rank: int
    step: int
    queries: Tensor  # positions in the text, neighbours
    keys: Tensor


def pieces(size: int, order: context.Order, visible: Tensor) -> list[Piece]:
    """Return all blocks that ranks multiply; `visible` [T, T] is True where a query may look.

    Raises `ValueError` for lengths that the order does not divide.
    """
    axes = [Axis("cp", rank, size, tuple(range(size))) for rank in range(size)]
    length = len(visible)
    held = [context.shard(torch.arange(length), axis, order) for axis in axes]
    queries = torch.empty(1, 1, length // size, 1)
    found = []
    for axis in axes:
        rows = context.shard(visible[None, None], axis, order, dim=2)
        for step, blocks in enumerate(context.blocks_of(rows, queries, axis, order)):
            source = held[(axis.rank - step) % size]
            own = held[axis.rank]
            found += [Piece(axis.rank, step, own[b.mine], source[b.theirs]) for b in blocks]
    return found


def quarters(size: int, order: context.Order, visible: Tensor | None = None) -> list[list[float]]:
    """Return work of each rank in each step: blocks of T/n x T/n scores, in quarters of one."""
    visible = _causal(size) if visible is None else visible
    quarter = (len(visible) / size / 2) ** 2
    work = [[0.0] * size for _ in range(size)]
    for piece in pieces(size, order, visible):
        work[piece.rank][piece.step] += len(piece.queries) * len(piece.keys) / quarter
    return work


def mask(
    size: int,
    order: context.Order = "plain",
    visible: Tensor | None = None,
    *,
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw who multiplies which block of scores: rows are queries, columns keys.

    The number in a block is the step of the ring in which it is multiplied. `visible` [T, T] is
    True where a query may look: causal, unless given. Raises `ValueError` for sizes that cannot be
    seen.
    """
    visible = _checked(size, visible)
    width, height = max(LEFT + SIDE + 0.3, pen.title_width(title), 6.5), SIDE + 1.72
    figure, ax = pen.sheet(width, height, title, note)
    _triangle(ax, (width - SIDE) / 2, 0.84, size, order, visible)
    _legend(figure, size, width - 0.3)
    return figure


def orders(size: int = 4, *, title: str = "", note: str = "") -> Figure:
    """Draw both orders of tokens side by side: their blocks, and below who works and waits.

    Every step of a ring lasts as long as its slowest rank; hatched grey is waiting. Raises
    `ValueError` for sizes that cannot be seen.
    """
    visible = _checked(size, None)
    below = ROW * size + 0.94
    width, height = 2 * (LEFT + SIDE) + 0.75, SIDE + below + 1.5
    figure, ax = pen.sheet(width, height, title, note)
    works = {order: quarters(size, order) for order in ("plain", "zigzag")}
    longest = max(map(_duration, works.values()))
    for i, (order, work) in enumerate(works.items()):
        x = LEFT + i * (LEFT + SIDE + 0.1)
        _triangle(ax, x, 0.55 + below, size, order, visible, head=order)
        _steps(ax, x, 0.84, work, SIDE / longest)
        total = f"{_duration(work):g} quarters of a block"
        pen.text(ax, x, 0.84 + ROW * size + 0.16, total, weight="bold")
    _legend(figure, size, width - 0.4, waiting=True)
    return figure


def steps(
    work: Mapping[str, Sequence[Sequence[float]]],
    *,
    unit: str = "ms",
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw rings in lockstep, ``work[name][rank][step]`` in `unit`: a step waits for its slowest.

    Raises `ValueError` for no work, or for more ranks than there are colours.
    """
    ranks = max((len(rows) for rows in work.values()), default=0)
    if not 1 <= ranks <= len(RANK):
        raise ValueError(f"{ranks} ranks make no picture that can be read; use 1 to {len(RANK)}")
    width, panel = max(7.2, pen.title_width(title)), ROW * ranks + 0.44
    height = 1.2 + panel * len(work)
    figure, ax = pen.sheet(width, height, title, note)
    scale = (width - LEFT - 0.3) / max(map(_duration, work.values()))
    for i, (name, rows) in enumerate(work.items()):
        y = height - 0.34 - panel * (i + 1)
        _steps(ax, LEFT, y, rows, scale)
        top, said = y + ROW * ranks + 0.14, f"{_duration(rows):.3g} {unit}"
        pen.text(ax, LEFT, top, name, weight="bold")
        pen.text(ax, LEFT + _duration(rows) * scale, top, said, ha="right")
    _legend(figure, ranks, width - 0.4, masked=False, waiting=True)
    return figure


# ---------------------------------------------------------------------- parts
def _causal(size: int) -> Tensor:
    length = 2 * size * max(1, TOKENS // (2 * size))
    return torch.ones(length, length, dtype=torch.bool).tril()


def _checked(size: int, visible: Tensor | None) -> Tensor:
    pen.check_ranks(size)
    visible = _causal(size) if visible is None else visible
    if visible.ndim != 2 or visible.shape[0] != visible.shape[1]:
        raise ValueError(f"visible of shape {tuple(visible.shape)} is no [T, T]")
    return visible


def _triangle(
    ax: Axes, x: float, y: float, size: int, order: context.Order, visible: Tensor, head: str = ""
) -> None:
    """Draw the scores into a square at (x, y), in inches."""
    length = len(visible)
    found = pieces(size, order, visible)
    cells = torch.tensor(to_rgb(KIND["idle"])).expand(length, length, 3).clone()
    for piece in found:
        seen = visible[piece.queries][:, piece.keys, None]
        own = RANK[piece.rank]
        ink, pale = (torch.tensor(to_rgb(each)) for each in (own, pen.pale(own)))
        rows, columns = (slice(at[0], at[-1] + 1) for at in (piece.queries, piece.keys))
        cells[rows, columns] = torch.where(seen, ink, pale)
    top = y + SIDE
    style = {"interpolation": "nearest", "aspect": "auto", "zorder": 1}
    ax.imshow(cells.numpy(), extent=(x, x + SIDE, y, top), **style)
    ax.set_xlim(0, ax.figure.get_figwidth())  # imshow has moved them
    ax.set_ylim(0, ax.figure.get_figheight())
    unit, chunk = SIDE / length, length // (context.ORDERS[order] * size)
    for i in range(1, length // chunk):
        at = i * chunk * unit
        ax.plot([x, x + SIDE], [top - at] * 2, color=PAPER, lw=0.9, zorder=2)
        ax.plot([x + at] * 2, [y, top], color=PAPER, lw=0.9, zorder=2)
    for piece in found:
        row, column = visible[piece.queries][:, piece.keys].nonzero().double().mean(0).tolist()
        at = (piece.keys[0].item() + column + 0.5) * unit
        down = (piece.queries[0].item() + row + 0.5) * unit
        size_of = min(9.0, 30 * chunk * unit)  # points
        style = {"ha": "center", "size": size_of, "zorder": 3}
        pen.text(ax, x + at, top - down, piece.step, **style)
    for number in range(context.ORDERS[order] * size):
        owner = next(r for r in range(size) if number in context.chunks_of(r, size, order))
        edge, style = chunk * unit, {"fc": RANK[owner], "ec": PAPER, "lw": 0.7}
        pen.rectangle(ax, x - STRIP - 0.05, top - (number + 1) * edge, STRIP, edge, **style)
        pen.rectangle(ax, x + number * edge, top + 0.05, edge, STRIP, **style)
    pen.text(ax, x - STRIP - 0.12, y + SIDE / 2, "queries", color=MUTED, rotation=90, ha="right")
    pen.text(ax, x + SIDE, top + STRIP + 0.15, "keys and values", color=MUTED, ha="right")
    pen.text(ax, x, top + STRIP + 0.15, head, weight="bold")


def _steps(ax: Axes, x: float, y: float, work: Sequence[Sequence[float]], scale: float) -> None:
    """Draw a row per rank from (x, y) upward, `scale` inches per unit."""
    lengths = [max(step) for step in zip(*work, strict=True)]
    for rank, row in enumerate(work):
        low = y + ROW * (len(work) - 1 - rank)
        pen.text(ax, x - 0.1, low + ROW / 2, f"rank {rank}", color=MUTED, ha="right", size=8)
        at = x
        for step, (takes, lasts) in enumerate(zip(row, lengths, strict=True)):
            own = {"fc": RANK[rank], "ec": PAPER, "lw": 0.7}
            for seconds, style in ((lasts, pen.WAITS), (takes, own)):
                pen.rectangle(ax, at, low + 0.03, seconds * scale, ROW - 0.06, **style)
            if takes * scale > 0.14:
                middle = at + takes * scale / 2
                pen.text(ax, middle, low + ROW / 2 - 0.005, step, ha="center", size=8)
            at += lasts * scale
    end = x + sum(lengths) * scale
    ax.plot([end] * 2, [y, y + ROW * len(work)], color=INK, lw=0.9)


def _duration(work: Sequence[Sequence[float]]) -> float:
    """Return the seconds of all steps, each as long as its slowest rank."""
    return sum(max(step) for step in zip(*work, strict=True))


def _legend(
    figure: Figure, size: int, room: float, masked: bool = True, waiting: bool = False
) -> None:
    entries = pen.of_ranks(size)
    if masked:
        entries.append((pen.pale(RANK[0]), "multiplied, then masked"))
    if waiting:
        entries.append((pen.WAITS, "waits"))
    entries.append(("", "number: step of the ring"))
    pen.key(figure, entries, 0.2, 0.26, room)
