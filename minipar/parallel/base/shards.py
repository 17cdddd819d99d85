"""Shards: which part of which parameter a tensor holds.

A parameter has attributes that describe its part. The strategy that cuts it sets them, by `mark`:

    region       its place in the parameter of the serial model; absent: all of that parameter
    shard_axes   the axes over which it is cut; none: it is whole, and alike on all ranks
    copies       the ranks with the same numbers, over which data parallelism sums the gradient;
                 absent: all ranks of the data axis. Only experts have it.
    is_copy      True if another rank of a shard axis counts these numbers in the gradient norm.
                 Two cases need it: two ranks of tp share a head, two stages share an embedding.

zero and fsdp cut in the same way. Parameters lie one after the other in a row, padded to n S
numbers. Rank r keeps S of these numbers, from number r S on: its shard. The part of a parameter in
the shard is a *piece*. Three parameters of 4, 5 and 2 numbers on two ranks, S = 6::

    parameter   a a a a b b | b b b c c .
    rank        0 0 0 0 0 0 | 1 1 1 1 1 1
                                            on rank 1:   a           b            c
    span, the place in the shard                         [0:0]       [0:3]        [3:5]
    cut, the part of the parameter                       [0:0]       [2:5]        [0:2]
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minipar.comm.collectives import Op, Pending, all_reduce, reduce_scatter
from minipar.comm.mesh import Axis


def mark(
    p: nn.Parameter, axis: Axis, region: "Region | None" = None, *, copy: bool = False
) -> None:
    """Mark `p` as a shard along `axis`; the other ranks have other numbers, or copies.

    `region` is the place of these numbers. Without a region, other ranks have other parameters.
    """
    if region is not None:
        p.region = region._replace(axes=(*region.axes, axis), is_copy=copy or region.is_copy)
    p.shard_axes, p.is_copy = (*axes_of(p), axis), copy or getattr(p, "is_copy", False)


def axes_of(p: Tensor) -> tuple[Axis, ...]:
    """Return the axes over which `p` and its gradient are cut."""
    return getattr(p, "shard_axes", ())


def region_of(p: Tensor) -> "Region":
    """Return the place of `p` in the parameter of the serial model."""
    return getattr(p, "region", None) or Region.whole(p.shape)


def piece_of(p: nn.Parameter) -> nn.Parameter:
    """Return the parameter that the optimizer steps for `p`: under zero its piece, else `p`."""
    return getattr(p, "piece", p)


def copies_axis(p: Tensor, axis: Axis | None) -> Axis | None:
    """Return the ranks of the data axis `axis` with copies of `p`, over which gradients are summed.

    Raises `ValueError` unless each rank of `axis` has a copy of this expert, or another expert. An
    expert's first shard axis is the axis of expert parallelism. `spread_outside` of its ranks share
    a batch, as ranks of tensor parallelism do.
    """
    copies = getattr(p, "copies", axis)
    if axis is not None and hasattr(p, "copies"):
        spread = axes_of(p)[0]
        sharing = spread.size // getattr(p, "spread_outside", 1) * copies.size
        if sharing != axis.size:
            raise ValueError(
                f"experts over {spread.name} have copies={copies.size}, so {sharing} ranks share "
                f"their gradients, but data is over {axis.name}={axis.size}; let both be the same "
                f'ranks: copies=mesh.dp and data over mesh.joint("dp", "ep")'
            )
    return copies


def is_part(axis: Axis, joint: Axis) -> bool:
    """True if `joint` is `axis`, or joins several axes and `axis` is one of them."""
    return axis.name in joint.name.split("+")


def is_spread_over(p: Tensor, axis: Axis) -> bool:
    """True if `p` is an expert's, and ranks of `axis` have other experts."""
    return hasattr(p, "copies") and is_part(axis, axes_of(p)[0])


def in_order(axes: Iterable[Axis]) -> list[Axis]:
    """Return each axis of several ranks once, in the same order on all ranks."""
    return sorted({axis for axis in axes if axis.size > 1}, key=lambda axis: axis.name)


def laid_out_as(p: Tensor, numbers: Tensor) -> Tensor:
    """Return a view of the vector `numbers` with the shape and the strides of `p`.

    Fused optimizers step weight and gradient in memory order, also for channels_last weights.
    """
    span = 1 + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
    return numbers.as_strided(p.shape, p.stride()) if span == p.numel() else numbers.view_as(p)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return views of the vector `flat`: for each of `tensors`, one in its shape."""
    parts = flat.split([t.numel() for t in tensors])
    return {t: part.view(t.shape) for t, part in zip(tensors, parts, strict=True)}


def gradient_bytes(p: Tensor) -> int:
    """Return the bytes of the gradient of `p`; with a master, they are more than the weight's."""
    return p.numel() * p.grad_dtype.itemsize


def in_groups(
    parameters: Iterable[nn.Parameter], capacity: Callable[[int], float]
) -> list[list[nn.Parameter]]:
    """Pack `parameters` in order, each kind alone; group i has ``capacity(i)`` bytes at most.

    The bytes are those of gradients. A parameter that is larger gets its own group.
    """
    groups: list[list[nn.Parameter]] = []
    latest: dict[tuple, tuple[list, float]] = {}  # the latest group of each kind; its free bytes
    for p in parameters:
        kind = p.grad_dtype, p.device, copies_axis(p, None)
        group, room = latest.get(kind, ([], 0.0))
        if not group or gradient_bytes(p) > room:
            group, room = [], capacity(len(groups))
            groups.append(group)
        group.append(p)
        latest[kind] = group, room - gradient_bytes(p)
    return groups


def check_divides(name: str, n: int, what: str, size: int) -> None:
    """Raise `ValueError` unless n, called `name`, divides `size`; name the numbers that do."""
    if n < 1 or size % n:
        good = ", ".join(str(k) for k in range(1, size + 1) if size % k == 0)
        raise ValueError(f"{name}={n} does not divide {what}={size}; use one of {good}")


# ---------------------------------------------------------------------- parameters in a row
class Row:
    """Parameters in a row, cut over the ranks with copies of them; see the drawing above.

    This rank has `shard` [S]; the `pieces` are views of the shard. The optimizer steps pieces. A
    piece has the k numbers of a parameter that lie on this rank; k may be 0. A piece is [k], or
    [k, 1] for a matrix, so ``p.ndim`` is kept.
    """

    reducing: Pending | None = None  # gradients of all ranks, on their way to the shards
    reduced: Tensor | None = None  # [S]: the sum of those that have arrived

    def __init__(self, parameters: Sequence[nn.Parameter], data_axis: Axis) -> None:
        numels, axis = [p.numel() for p in parameters], copies_axis(parameters[0], data_axis)
        self.axis, self.size = axis, math.ceil(sum(numels) / axis.size)  # S
        self.share = axis.size / data_axis.size  # below 1 for experts: fewer ranks have copies
        self.shapes = [p.shape for p in parameters]
        self.splits = [*numels, axis.size * self.size - sum(numels)]  # the last one is the padding
        self.places: list[tuple[slice, slice]] = []  # span and cut of each parameter
        place = -axis.rank * self.size  # where a parameter begins, as seen from the shard
        for numel in numels:
            start, end = (min(max(at, 0), self.size) for at in (place, place + numel))
            cut = slice(start - place, end - place) if start < end else slice(0, 0)
            self.places.append((slice(start, end), cut))
            place += numel

    def hold(self, parameters: Sequence[nn.Parameter], shard: Tensor) -> None:
        """Keep `shard`, and make the pieces of `parameters`."""
        self.shard, self.spans = shard, {}
        for p, (span, cut) in zip(parameters, self.places, strict=True):
            piece = nn.Parameter(shard[span].view(-1, *(1 for _ in p.shape[1:])), p.requires_grad)
            vars(piece).update(vars(p))
            mark(piece, self.axis, region_of(p)._replace(flat=cut))
            self.spans[piece] = span
        self.pieces: list[nn.Parameter] = [*self.spans]

    def move(self, shard: Tensor) -> None:
        """Make the pieces views of `shard` [S], which may lie on another device."""
        self.shard = shard
        for piece, span in self.spans.items():
            piece.data = shard[span].view_as(piece)

    def check_memory(self, views: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        """Raise `RuntimeError` unless `views` lie in the memory of `buffers`, as when made."""
        lie, made = ({t.untyped_storage().data_ptr() for t in each} for each in (views, buffers))
        if lie != made:
            raise RuntimeError(
                "the model was moved or cast after its ShardedOptimizer or fsdp took the weights "
                "over; move or cast first, and write p.copy_(x), not p.data = x"
            )

    def split(self, row: Tensor) -> list[Tensor]:
        """Return views of a whole row [n S], one in the shape of each parameter."""
        parts = row.split(self.splits)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=False)]

    def start_to_reduce(self, whole: Tensor, op: Op) -> None:
        """Start to reduce-scatter the gradients `whole` [n S] of this rank."""
        if op == "avg" and self.share < 1:  # the average is over all ranks of the data axis
            whole = whole * self.share
        self.reducing = reduce_scatter(whole, self.axis, op=op, async_op=True)

    def wait_for_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way, and keep its result."""
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            self.store(gradient)

    def store(self, gradient: Tensor) -> None:
        """Add a reduced gradient [S] to the sum of the microbatches before."""
        gradient = gradient.to(self.shard)
        self.reduced = gradient if self.reduced is None else self.reduced.add_(gradient)


# ---------------------------------------------------------------------- what is not here yet
class Elsewhere(Tensor):
    """A placeholder in ``p.grad`` while the gradient is not there: every read raises an error.

    With None in ``p.grad``, torch's `clip_grad_norm_` would clip nothing, without an error.
    """

    def __new__(cls, p: nn.Parameter) -> Tensor:
        one = torch.empty((), dtype=p.grad_dtype, device=p.device)
        return cls._make_subclass(cls, one.expand(p.shape))

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise RuntimeError(
            "no gradient is here yet, or it lies in shards: it comes by finish_backward() of the "
            "data strategy, which finishes first. Then clip by strategy.clip_grad_norm_, look at "
            "strategy.full_gradients(), and under zero drop gradients by zero_grad() of the "
            "ShardedOptimizer, not of the model. In a step, all backwards but the last are under "
            "no_sync(), and checkpoint(...) has use_reentrant=False"
        )


class OnItsWay(nn.Parameter):
    """A parameter in flight: its first read or write waits for the all-gather of its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) not in (Tensor.grad, Tensor.device):
            for p in tree_leaves((args, kwargs)):
                if type(p) is cls:
                    p.__class__ = nn.Parameter
                    if hasattr(p, "arrives"):  # else `p` is a copy, made after the all-gather
                        p.arrives()
        return super().__torch_function__(func, types, args, kwargs or {})


# ---------------------------------------------------------------------- places in a whole tensor
class Region(NamedTuple):
    """The numbers of a tensor of `shape` that a rank has: for states that any plan reads.

    Tensor and expert parallelism keep a slice: for each dim the `spans` (start, stop), one after
    the other. zero and fsdp flatten this slice, and keep the numbers of `flat`. An example of both:
    columns 2 to 4 of a [3, 4] matrix, and numbers 1 to 5 of the flattened columns::

        . . a b        spans ((0, 3),), ((2, 4),)
        . . c d        flat  slice(1, 5): b, c, d, e
        . . e f        boxes [0:1, 3:4], [1:2, 2:4], [2:3, 2:3]

    The ranks of `axes` together have all numbers.
    """

    shape: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    flat: slice | None = None  # None: all numbers of the slice
    axes: tuple[Axis, ...] = ()
    is_copy: bool = False  # another rank of `axes` has the same numbers, and gives them to `join`

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """Return the region of all numbers."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def numel(self) -> int:
        """The count of its numbers."""
        return math.prod(self._slice) if self.flat is None else self.flat.stop - self.flat.start

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

    def cut(self, whole: Tensor) -> Tensor:
        """Return a copy of the numbers [k] of the region.

        Raises `ValueError` unless `whole` has the shape of the tensor.
        """
        if whole.shape != self.shape:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} is not for a parameter of shape "
                f"{self.shape}: does the state belong to another model?"
            )
        numbers = whole.new_empty(self.numel)
        for offset, box in self.boxes(numbers):
            box.copy_(whole[_place(offset, box)])
        return numbers

    def join(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return a copy of the whole tensor, of which this rank has `numbers`.

        A collective over `axes`, on `device`: all ranks add up their numbers and zeros elsewhere.
        """
        if not self.axes:
            return numbers.detach().clone()
        whole = torch.zeros(self.shape, dtype=numbers.dtype, device=device)
        for offset, box in () if self.is_copy else self.boxes(numbers.detach().flatten()):
            whole[_place(offset, box)] = box
        for axis in self.axes:
            all_reduce(whole, axis, out=whole)
        return whole


def _place(offset: Sequence[int], box: Tensor) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offset, box.shape, strict=True))


def boxes_of(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the numbers `start` to `stop` of a tensor laid out flat into boxes: offsets and sizes.

    The boxes are in order, and few. For a matrix: the rest of a row, whole rows, part of a row.
    """
    if not shape:
        return [((), ())][start:stop]
    units, found = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))], []
    while start < stop:
        # The first dim with a whole unit from here on. A box is several such units, side by side.
        whole = (d for d, unit in enumerate(units) if not start % unit and start + unit <= stop)
        dim = next(whole)
        offset = tuple(start // unit % size for unit, size in zip(units, shape, strict=True))
        count = min((stop - start) // units[dim], shape[dim] - offset[dim])
        found.append((offset, (*(1 for _ in range(dim)), count, *shape[dim + 1 :])))
        start += count * units[dim]
    return found


def _along(spans: Sequence[tuple[int, int]], offset: int, size: int) -> list[tuple[int, slice]]:
    """Return where a box of the slice lies in the whole along one dim: places, parts of the box."""
    found, at = [], -offset  # where a span begins, as seen from the box
    for start, stop in spans:
        first, last = max(at, 0), min(at + stop - start, size)
        if first < last:
            found.append((start + first - at, slice(first, last)))
        at += stop - start
    return found
