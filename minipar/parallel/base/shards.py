"""Pieces of parameters: how they say of what they are, and a row of them that is cut over an axis.

A parameter that is not whole on each rank, or whose gradient is not, says so in three attributes,
which the strategy that cuts it sets (`mark`), and `axes_of`, `full_shape` and `is_copy` read:

    shard_axes   the axes over which it is cut; none: it is whole, and alike on all ranks
    full_shape   the shape before it was cut, by whichever of them came first
    is_copy      it stands for numbers that another rank of the axis has, too, and counts

zero and fsdp cut alike. Parameters lie one after the other in a row, which is padded to n S
numbers, and rank r keeps the S from r S on, its shard. Three of 4, 5 and 2 numbers on two ranks,
S = 6::

    parameter   a a a a b b | b b b c c .
    rank        0 0 0 0 0 0 | 1 1 1 1 1 1
                                            on rank 1:   a           b            c
    span, where it lies in the shard                     [0:0]       [0:3]        [3:5]
    cut, what part of the parameter it is                [0:0]       [2:5]        [0:2]
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_gather
from minipar.comm.mesh import Axis


def mark(
    p: nn.Parameter, axis: Axis, *, of: nn.Parameter | None = None, copy: bool = False
) -> None:
    """Let `p` say that it is a piece along `axis`: of `of`, or of what it was itself until now."""
    of = p if of is None else of
    p.full_shape, p.shard_axes = full_shape(of), (*axes_of(of), axis)
    p.is_copy = copy or is_copy(of)


def axes_of(p: Tensor) -> tuple[Axis, ...]:
    """Return the axes over which `p` and its gradient are cut."""
    return getattr(p, "shard_axes", ())


@torch.no_grad()
def master_of(p: nn.Parameter) -> Tensor:
    """The master of `p`, or this rank's slice of it, with what was written into `p` meanwhile.

    Only where that differs from the master, rounded: all other digits are kept.
    """
    if p._version != p.rounded:
        p.rounded = p._version
        working = p.part_of(p.data) if hasattr(p, "part_of") else p.data
        is_own = working == p.master.to(working.dtype)
        p.master.copy_(torch.where(is_own, p.master, working.to(p.master.dtype)))
    return p.master


def in_order(axes: Iterable[Axis]) -> list[Axis]:
    """Return each axis of several ranks once, in the same order on all ranks."""
    return sorted({axis for axis in axes if axis.size > 1}, key=lambda axis: axis.name)


def copies_axis(p: Tensor, axis: Axis) -> Axis:
    """Return the ranks of the data axis `axis` with copies of `p`, over which gradients are summed.

    All of them, unless the strategy that cut `p` says otherwise in `p.copies`: ranks of expert
    parallelism share a batch, and yet each has experts of its own. `p.spread` is the axis of these,
    of which `p.spread_outside` ranks, those of tensor parallelism, are not of the data axis. Raises
    `ValueError` where both together are not as many ranks as the data axis.
    """
    copies, spread = getattr(p, "copies", axis), getattr(p, "spread", None)
    if None in (axis, spread):
        return copies
    sharing = spread.size // getattr(p, "spread_outside", 1) * copies.size
    if sharing != axis.size:
        raise ValueError(
            f"experts are spread over {spread.name}={spread.size} with copies={copies.size}, so "
            f"{sharing} ranks share their gradients, but data is over "
            f"{axis.name}={axis.size}; let both be the same ranks, as expert.apply(model, mesh.ep, "
            f'copies=mesh.dp) and then data over mesh.joint("dp", "ep")'
        )
    return copies


def is_part(axis: Axis, joint: Axis) -> bool:
    """Whether `joint` is that axis, or several at once of which it is one."""
    return axis.name in joint.name.split("+")


def is_spread_over(p: Tensor, axis: Axis) -> bool:
    """Whether `p` is an expert's, and ranks of `axis` have experts of their own."""
    return hasattr(p, "spread") and is_part(axis, p.spread)


def full_shape(p: Tensor) -> torch.Size:
    """Return the shape of `p` in the serial model."""
    return getattr(p, "full_shape", p.shape)


def check_divides(name: str, n: int, what: str, size: int) -> None:
    """Raise `ValueError` unless n, called `name`, divides `size`; it says which numbers do."""
    if n < 1 or size % n:
        good = ", ".join(str(k) for k in range(1, size + 1) if size % k == 0)
        raise ValueError(f"{name}={n} does not divide {what}={size}; use one of {good}")


def laid_out_as(p: Tensor, numbers: Tensor) -> Tensor:
    """Return a view of the vector `numbers` in the shape of `p`, in memory as `p` is, if that has
    no gaps: fused optimizers take one number after the other, of channels_last weights too."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
    return numbers.as_strided(p.shape, p.stride()) if span == p.numel() else numbers.view_as(p)


def gradient_bytes(p: Tensor) -> int:
    """Return the bytes of the gradient of `p`; with a master, a wider one than the weight."""
    return p.numel() * p.grad_dtype.itemsize


def is_copy(p: Tensor) -> bool:
    """Whether another rank of an axis of `p` counts these numbers."""
    return getattr(p, "is_copy", False)


def piece_of(p: nn.Parameter) -> nn.Parameter:
    """Return what an optimizer steps in the place of `p`, and where its gradient is in the end."""
    return getattr(p, "piece", p)


class Region(NamedTuple):
    """Which numbers of a tensor of `shape` a rank has.

    Tensor and expert parallelism leave it a slice: of each dim the `spans` (start, stop), one after
    the other. zero and fsdp leave it, of that slice laid out flat, the numbers of `flat`. Both in
    one: columns 2 to 4 of a [3, 4] matrix, and of these the numbers 1 to 5::

        . . a b        spans ((0, 3),), ((2, 4),)
        . . c d        flat  slice(1, 5): b, c, d, e
        . . e f        boxes [0:1, 3:4], [1:2, 2:4], [2:3, 2:3]
    """

    shape: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    flat: slice | None = None  # all of them

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """All of a tensor."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        if self.flat is not None:
            return self.flat.stop - self.flat.start
        return math.prod(self._slice)

    @property
    def _slice(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    def boxes(self, numbers: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield `numbers` [k] of the region as boxes of the whole: offset of each, and a view."""
        first = 0 if self.flat is None else self.flat.start
        for offset, size in boxes_of(self._slice, first, first + self.numel):
            box, numbers = numbers[: math.prod(size)].view(size), numbers[math.prod(size) :]
            for cut in itertools.product(*map(_along, self.spans, offset, size)):
                yield tuple(place for place, _ in cut), box[tuple(own for _, own in cut)]


class Part(NamedTuple):
    """What a rank has of a tensor: `numbers` [k], which are those of `region`."""

    numbers: Tensor
    region: Region


def boxes_of(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the numbers `start` to `stop` of what is laid out flat into boxes: offsets and sizes.

    In order, and few: of a matrix the rest of a row, rows, and the beginning of one.
    """
    if not shape:
        return [((), ())][start:stop]
    row, found = math.prod(shape[1:]), []
    while start < stop:
        i, at = divmod(start, row)
        rows = 0 if at else (stop - start) // row
        end = min(stop, start + rows * row if rows else (i + 1) * row)
        if rows:
            found.append(((i, *(0 for _ in shape[1:])), (rows, *shape[1:])))
        else:
            inner = boxes_of(shape[1:], at, at + end - start)
            found += [((i, *offset), (1, *size)) for offset, size in inner]
        start = end
    return found


def _along(spans: Sequence[tuple[int, int]], offset: int, size: int) -> list[tuple[int, slice]]:
    """Along one dim, where a box of a slice is in the whole: places, and the part of the box."""
    found, at = [], -offset  # where a span begins, as seen from the box
    for start, stop in spans:
        first, last = max(at, 0), min(at + stop - start, size)
        if first < last:
            found.append((start + first - at, slice(first, last)))
        at += stop - start
    return found


class Layout:
    """Parameters of `numels` numbers in a row, cut over `axis`; see above."""

    def __init__(self, numels: Sequence[int], axis: Axis) -> None:
        self.size = size = math.ceil(sum(numels) / axis.size)  # S
        self.total = axis.size * size
        self.splits = [*numels, self.total - sum(numels)]  # and the padding
        self.spans, self.cuts = [], []
        place = -axis.rank * size  # where a parameter begins, as seen from the shard
        for numel in numels:
            start, end = (min(max(at, 0), size) for at in (place, place + numel))
            self.spans.append(slice(start, end))
            self.cuts.append(slice(start - place, end - place) if start < end else slice(0, 0))
            place += numel


class Row:
    """Parameters in a row, of which this rank has `shard` [S], and `pieces` that are views of it.

    A piece is what an optimizer steps: a parameter of the k numbers that lie on this rank, perhaps
    none. It is [k], or of a matrix [k, 1], so that ``p.ndim`` is that of the whole.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout, axis: Axis, shard: Tensor
    ) -> None:
        self.layout, self.axis, self.shard = layout, axis, shard
        self.device = shard.device  # which computes and sends, wherever the shard goes
        self.shapes: dict[nn.Parameter, torch.Size] = {}  # of the whole, by piece
        for p, span in zip(parameters, layout.spans, strict=True):
            data = shard[span].view(-1, *(1 for _ in p.shape[1:]))
            piece = nn.Parameter(data, p.requires_grad)
            vars(piece).update(vars(p))
            mark(piece, axis, of=p)
            self.shapes[piece] = p.shape
        self.pieces = list(self.shapes)
        self.cuts = dict(zip(self.pieces, layout.cuts, strict=True))

    def move(self, shard: Tensor) -> None:
        """Let the pieces be views of `shard` [S], which may lie on another device."""
        self.shard = shard
        for piece, span in zip(self.pieces, self.layout.spans, strict=True):
            piece.data = shard[span].view_as(piece)

    def check_place(self) -> None:
        """Raise `RuntimeError` for a piece that has other memory than the shard."""
        first, width = self.shard.data_ptr(), self.shard.element_size()
        for piece, span in zip(self.pieces, self.layout.spans, strict=True):
            with torch._C.DisableTorchFunctionSubclass():  # also where it is elsewhere
                place = piece.data_ptr()
            if piece.numel() and place != first + span.start * width:
                raise RuntimeError(
                    f"a parameter of shape {tuple(self.shapes[piece])} has got new memory since "
                    f"its strategy was applied, as by p.data = ..., vector_to_parameters or "
                    f"model.to(): write into it, as by p.data.copy_(...), or move and cast the "
                    f"model before"
                )

    def split(self, row: Tensor) -> list[Tensor]:
        """Return views of a whole row [n S], one in the shape of each parameter."""
        parts = row.split(self.layout.splits)
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=False)]

    def part_of(self, piece: nn.Parameter, whole: Tensor) -> Tensor:
        """Return what of `whole`, shaped as the parameter, belongs to `piece`."""
        return whole.reshape(-1)[self.cuts[piece]].view_as(piece)

    @torch.no_grad()
    def join(
        self, own: Mapping[nn.Parameter, Tensor], dtype: torch.dtype
    ) -> dict[nn.Parameter, Tensor]:
        """Gather whole tensors from what all ranks have for each piece; zeros where it has none.

        Weights, gradients, moments: whatever has the shape of the piece. A collective.
        """
        shard = torch.zeros(self.layout.size, dtype=dtype, device=self.device)
        for piece, span in zip(self.pieces, self.layout.spans, strict=True):
            if piece in own:
                shard[span] = own[piece].flatten()
        whole = self.split(all_gather(shard, self.axis))
        return {piece: t.clone() for piece, t in zip(self.pieces, whole, strict=True)}
