"""Attention on ranks that hold different tokens: who multiplies which block, and when.

The blocks are those that the library multiplies (`context.blocks_of`), not drawn by a second rule.
"""

from typing import NamedTuple

import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from minipar.comm.mesh import Axis
from minipar.lab.draw import pen
from minipar.lab.draw.pen import KIND, MUTED, PAPER, RANK
from minipar.parallel import context

SIDE, STRIP = 2.7, 0.13  # inches of a triangle, and of the strip of ranks beside it
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
    visible = causal(size) if visible is None else visible
    ax, length, chunks = pen.paper(), len(visible), context.ORDERS[order] * size
    unit, edge = SIDE / length, SIDE / chunks  # inches of a token, and of a chunk
    cells = torch.tensor(to_rgb(KIND["idle"])).expand(length, length, 3).clone()
    for piece in pieces(size, order, visible):
        seen = visible[piece.queries][:, piece.keys, None]
        own = RANK[piece.rank]
        ink, pale = (torch.tensor(to_rgb(each)) for each in (own, pen.pale(own)))
        cells[piece.queries[:, None], piece.keys] = torch.where(seen, ink, pale)
        row, column = seen[..., 0].nonzero().double().mean(0).tolist()
        at = (piece.keys[0].item() + column + 0.5) * unit
        down = -(piece.queries[0].item() + row + 0.5) * unit
        pen.text(ax, at, down, piece.step, ha="center", size=min(9.0, 30 * edge))
    style = {"interpolation": "nearest", "aspect": "auto", "zorder": 1}
    ax.imshow(cells.numpy(), extent=(0, SIDE, -SIDE, 0), **style)
    line = {"color": PAPER, "lw": 0.9, "zorder": 2}
    for i in range(1, chunks):
        ax.plot([0, SIDE], [-i * edge] * 2, **line)
        ax.plot([i * edge] * 2, [-SIDE, 0], **line)
    for rank in range(size):
        style = {"fc": RANK[rank], "ec": PAPER, "lw": 0.7}
        for number in context.chunks_of(rank, size, order):
            pen.rectangle(ax, -STRIP - 0.05, -(number + 1) * edge, STRIP, edge, **style)
            pen.rectangle(ax, number * edge, 0.05, edge, STRIP, **style)
    pen.text(ax, -STRIP - 0.12, -SIDE / 2, "queries", color=MUTED, rotation=90, ha="right")
    pen.text(ax, SIDE, STRIP + 0.15, "keys and values", color=MUTED, ha="right")
    masked, step = (pen.pale(RANK[0]), "multiplied, then masked"), ("", "number: step of the ring")
    return pen.cut(ax, title, legend=[*pen.of_ranks(size), masked, step])
