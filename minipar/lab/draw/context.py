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

SIDE, LEFT, STRIP = 2.7, 0.72, 0.13  # inches: a triangle, the words beside it, the strip of ranks
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
    visible = causal(size) if visible is None else visible
    width, height = max(LEFT + SIDE + 0.3, pen.title_width(title), 6.5), SIDE + 1.72
    figure, ax = pen.sheet(width, height, title)
    _triangle(ax, (width - SIDE) / 2, 0.84, size, order, visible)
    pen.key(figure, [*pen.of_ranks(size), MASKED, STEP], 0.2, 0.26, width - 0.3)
    return figure


def orders(size: int = 4, *, title: str = "", note: str = "") -> Figure:
    """Draw both orders of tokens side by side: their blocks, and below who works and waits.

    Every step of a ring lasts as long as its slowest rank; hatched grey is waiting.
    """
    visible, below = causal(size), ROW * size + 0.94
    width, height = 2 * (LEFT + SIDE) + 0.75, SIDE + below + 1.5
    figure, ax = pen.sheet(width, height, title, note)
    works = {order: quarters(size, order, visible) for order in ("plain", "zigzag")}
    longest = max(map(_duration, works.values()))
    for i, (order, work) in enumerate(works.items()):
        x = LEFT + i * (LEFT + SIDE + 0.1)
        _triangle(ax, x, 0.55 + below, size, order, visible)
        pen.text(ax, x, 0.7 + below + SIDE + STRIP, order, weight="bold")
        _steps(ax, x, 0.84, work, SIDE / longest)
        total = f"{_duration(work):g} quarters of a block"
        pen.text(ax, x, 0.84 + ROW * size + 0.16, total, weight="bold")
    pen.key(figure, [*pen.of_ranks(size), MASKED, WAITS, STEP], 0.2, 0.26, width - 0.4)
    return figure


def steps(
    work: Mapping[str, Sequence[Sequence[float]]], *, title: str = "", note: str = ""
) -> Figure:
    """Draw rings in lockstep, ``work[name][rank][step]`` in ms: a step waits for its slowest."""
    ranks = max(len(rows) for rows in work.values())
    width, panel = max(7.2, pen.title_width(title)), ROW * ranks + 0.44
    height = 1.2 + panel * len(work)
    figure, ax = pen.sheet(width, height, title, note)
    scale = (width - LEFT - 0.3) / max(map(_duration, work.values()))
    for i, (name, rows) in enumerate(work.items()):
        y = height - 0.34 - panel * (i + 1)
        _steps(ax, LEFT, y, rows, scale)
        top, said = y + ROW * ranks + 0.14, f"{_duration(rows):.3g} ms"
        pen.text(ax, LEFT, top, name, weight="bold")
        pen.text(ax, LEFT + _duration(rows) * scale, top, said, ha="right")
    pen.key(figure, [*pen.of_ranks(ranks), WAITS, STEP], 0.2, 0.26, width - 0.4)
    return figure


# ---------------------------------------------------------------------- parts
MASKED = (pen.pale(RANK[0]), "multiplied, then masked")
WAITS, STEP = (pen.WAITS, "waits"), ("", "number: step of the ring")


def _triangle(
    ax: Axes, x: float, y: float, size: int, order: context.Order, visible: Tensor
) -> None:
    """Draw the scores into a square at (x, y), in inches."""
    length, top = len(visible), y + SIDE
    chunks = context.ORDERS[order] * size
    unit, edge = SIDE / length, SIDE / chunks  # inches of a token, and of a chunk
    found = pieces(size, order, visible)
    cells = torch.tensor(to_rgb(KIND["idle"])).expand(length, length, 3).clone()
    for piece in found:
        seen = visible[piece.queries][:, piece.keys, None]
        own = RANK[piece.rank]
        ink, pale = (torch.tensor(to_rgb(each)) for each in (own, pen.pale(own)))
        rows, columns = (slice(at[0], at[-1] + 1) for at in (piece.queries, piece.keys))
        cells[rows, columns] = torch.where(seen, ink, pale)
        row, column = seen[..., 0].nonzero().double().mean(0).tolist()
        at = x + (piece.keys[0].item() + column + 0.5) * unit
        down = top - (piece.queries[0].item() + row + 0.5) * unit
        style = {"ha": "center", "size": min(9.0, 30 * edge), "zorder": 3}
        pen.text(ax, at, down, piece.step, **style)
    style = {"interpolation": "nearest", "aspect": "auto", "zorder": 1}
    ax.imshow(cells.numpy(), extent=(x, x + SIDE, y, top), **style)
    ax.set_xlim(0, ax.figure.get_figwidth())  # imshow has moved them
    ax.set_ylim(0, ax.figure.get_figheight())
    for i in range(1, chunks):
        ax.plot([x, x + SIDE], [top - i * edge] * 2, color=PAPER, lw=0.9, zorder=2)
        ax.plot([x + i * edge] * 2, [y, top], color=PAPER, lw=0.9, zorder=2)
    for rank in range(size):
        style = {"fc": RANK[rank], "ec": PAPER, "lw": 0.7}
        for number in context.chunks_of(rank, size, order):
            pen.rectangle(ax, x - STRIP - 0.05, top - (number + 1) * edge, STRIP, edge, **style)
            pen.rectangle(ax, x + number * edge, top + 0.05, edge, STRIP, **style)
    pen.text(ax, x - STRIP - 0.12, y + SIDE / 2, "queries", color=MUTED, rotation=90, ha="right")
    pen.text(ax, x + SIDE, top + STRIP + 0.15, "keys and values", color=MUTED, ha="right")


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
