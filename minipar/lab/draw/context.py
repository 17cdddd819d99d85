"""Attention on ranks that hold different tokens: who multiplies which block, when, and who waits.

The blocks are those that the library multiplies (`context.blocks_of`), not drawn by a second rule.
"""

from collections.abc import Sequence
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

SIDE, STRIP = 2.7, 0.13  # inches of a triangle, and of the strip of ranks beside it
ROW = 0.27  # inches of a rank in a picture of steps
TOKENS = 48  # drawn where no mask is given: enough for a diagonal, few enough to see them


class Piece(NamedTuple):
    """One block: in `step` of the ring, `rank` multiplies these queries with these keys."""

    rank: int
    step: int
    queries: Tensor  # positions in the text, neighbours
    keys: Tensor


def pieces(size: int, order: context.Order, visible: Tensor) -> list[Piece]:
    """Return all blocks that ranks multiply; `visible` [T, T] is True where a query may look."""
    axes = [Axis("cp", rank, size, tuple(range(size))) for rank in range(size)]
    length = len(visible)
    held = [context.shard(torch.arange(length), axis, order) for axis in axes]
    queries = torch.empty(1, 1, length // size, 1)
    found = []
    for axis, own in zip(axes, held, strict=True):
        rows = context.shard(visible[None, None], axis, order, dim=2)
        for step, blocks in enumerate(context.blocks_of(rows, queries, axis, order)):
            source = held[(axis.rank - step) % size]
            found += [Piece(axis.rank, step, own[b.mine], source[b.theirs]) for b in blocks]
    return found


def quarters(size: int, order: context.Order, visible: Tensor) -> list[list[float]]:
    """Return work of each rank in each step: blocks of T/n x T/n scores, in quarters of one."""
    quarter = (len(visible) / size / 2) ** 2
    work = [[0.0] * size for _ in range(size)]
    for piece in pieces(size, order, visible):
        work[piece.rank][piece.step] += len(piece.queries) * len(piece.keys) / quarter
    return work


def causal(size: int) -> Tensor:
    """Return a causal mask of about `TOKENS` tokens that every order divides."""
    length = 2 * size * max(1, TOKENS // (2 * size))
    return torch.ones(length, length, dtype=torch.bool).tril()


def mask(
    size: int,
    order: context.Order = "plain",
    visible: Tensor | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw who multiplies which block of scores: rows are queries, columns keys.

    The number in a block is the step of the ring in which it is multiplied. `visible` [T, T] is
    True where a query may look: causal, unless given.
    """
    ax = pen.paper()
    _triangle(ax, 0, size, order, causal(size) if visible is None else visible)
    return pen.cut(ax, title, legend=[*pen.of_ranks(size), MASKED, STEP])


def orders(size: int = 4, *, title: str = "", note: str = "") -> Figure:
    """Draw both orders of tokens side by side: their blocks, and below who works and waits.

    Every step of a ring lasts as long as its slowest rank; hatched grey is waiting.
    """
    ax, visible, right = pen.paper(), causal(size), SIDE + 0.82
    works = {order: quarters(size, order, visible) for order in ("plain", "zigzag")}
    scale = SIDE / max(map(_duration, works.values()))
    for x, (order, work) in zip((0, right), works.items(), strict=True):
        _triangle(ax, x, size, order, visible)
        pen.text(ax, x, STRIP + 0.15, order, weight="bold")
        _steps(ax, x, -SIDE - 0.55 - ROW * size, work, scale)
        total = f"{_duration(work):g} quarters of a block"
        pen.text(ax, x, -SIDE - 0.39, total, weight="bold")
    return pen.cut(ax, title, note, [*pen.of_ranks(size), MASKED, WAITS, STEP])


# ---------------------------------------------------------------------- parts
MASKED = (pen.pale(RANK[0]), "multiplied, then masked")
WAITS, STEP = (pen.WAITS, "waits"), ("", "number: step of the ring")


def _triangle(ax: Axes, x: float, size: int, order: context.Order, visible: Tensor) -> None:
    """Draw the scores into a square, in inches; its upper left corner is (x, 0)."""
    length, chunks = len(visible), context.ORDERS[order] * size
    unit, edge = SIDE / length, SIDE / chunks  # inches of a token, and of a chunk
    cells = torch.tensor(to_rgb(KIND["idle"])).expand(length, length, 3).clone()
    for piece in pieces(size, order, visible):
        seen = visible[piece.queries][:, piece.keys, None]
        own = RANK[piece.rank]
        ink, pale = (torch.tensor(to_rgb(each)) for each in (own, pen.pale(own)))
        cells[piece.queries[:, None], piece.keys] = torch.where(seen, ink, pale)
        row, column = seen[..., 0].nonzero().double().mean(0).tolist()
        at = x + (piece.keys[0].item() + column + 0.5) * unit
        down = -(piece.queries[0].item() + row + 0.5) * unit
        pen.text(ax, at, down, piece.step, ha="center", size=min(9.0, 30 * edge))
    style = {"interpolation": "nearest", "aspect": "auto", "zorder": 1}
    limits = ax.get_xlim(), ax.get_ylim()
    ax.imshow(cells.numpy(), extent=(x, x + SIDE, -SIDE, 0), **style)
    ax.set(xlim=limits[0], ylim=limits[1])  # imshow has moved them
    line = {"color": PAPER, "lw": 0.9, "zorder": 2}
    for i in range(1, chunks):
        ax.plot([x, x + SIDE], [-i * edge] * 2, **line)
        ax.plot([x + i * edge] * 2, [-SIDE, 0], **line)
    for rank in range(size):
        style = {"fc": RANK[rank], "ec": PAPER, "lw": 0.7}
        for number in context.chunks_of(rank, size, order):
            pen.rectangle(ax, x - STRIP - 0.05, -(number + 1) * edge, STRIP, edge, **style)
            pen.rectangle(ax, x + number * edge, 0.05, edge, STRIP, **style)
    pen.text(ax, x - STRIP - 0.12, -SIDE / 2, "queries", color=MUTED, rotation=90, ha="right")
    pen.text(ax, x + SIDE, STRIP + 0.15, "keys and values", color=MUTED, ha="right")


def _steps(ax: Axes, x: float, y: float, work: Sequence[Sequence[float]], scale: float) -> None:
    """Draw a row per rank from (x, y) upward, `scale` inches per unit."""
    lengths = [max(step) for step in zip(*work, strict=True)]
    for rank, row in enumerate(work):
        low, at = y + ROW * (len(work) - 1 - rank), x
        pen.text(ax, x - 0.1, low + ROW / 2, f"rank {rank}", color=MUTED, ha="right", size=8)
        for step, (takes, lasts) in enumerate(zip(row, lengths, strict=True)):
            pen.rectangle(ax, at, low + 0.03, lasts * scale, ROW - 0.06, **pen.WAITS)
            box = at, low + 0.03, takes * scale, ROW - 0.06
            pen.cell(ax, box, step if takes * scale > 0.14 else "", RANK[rank], ec=PAPER, lw=0.7)
            at += lasts * scale
    end = x + sum(lengths) * scale
    ax.plot([end] * 2, [y, y + ROW * len(work)], color=INK, lw=0.9)


def _duration(work: Sequence[Sequence[float]]) -> float:
    """Return the seconds of all steps, each as long as its slowest rank."""
    return sum(max(step) for step in zip(*work, strict=True))
