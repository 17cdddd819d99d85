"""Overlap for tensor parallelism: one piece travels while the matmul of another piece runs.

With ``sequence=True`` an all-gather comes before the first matmuls of a region, and a
reduce-scatter after the last. Here, both are rings of n - 1 messages. In each step, one piece of
the tokens travels while a rank computes the matmul of another piece.

Source: Wang et al. 2022, "Overlap communication with dependent computation via decomposition"
(ASPLOS 2023). tensor.py puts `fuse` around attention and MLP.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.autograd import outside_of_graphs
from minipar.comm.mesh import Axis
from minipar.model import casts


def ring_gather(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Gather pieces around a ring; yield (rank, piece of this rank) as each piece arrives.

    While the caller works with one piece, the next piece travels: n-1 messages.
    """
    n, rank = axis.size, axis.rank
    for step in range(n):
        coming = None
        if step < n - 1:
            sends, recvs = [(x, (rank + 1) % n)], [(torch.empty_like(x), (rank - 1) % n)]
            coming = collectives.exchange(sends, recvs, axis, async_op=True)
        yield (rank - step) % n, x
        if coming is not None:
            (x,) = coming.wait()


def ring_reduce_scatter(part: Callable[[int], Tensor], axis: Axis) -> Tensor:
    """Return the sum over all ranks of ``part(r)`` for this rank r; parts are computed in turn.

    The sum for rank r starts at rank r+1, goes around the ring, and ends at rank r. While it
    travels, every rank computes its own part of the next sum.
    """
    n, rank = axis.size, axis.rank
    total = part((rank - 1) % n).contiguous()
    for step in range(1, n):
        sends, recvs = [(total, (rank + 1) % n)], [(torch.empty_like(total), (rank - 1) % n)]
        coming = collectives.exchange(sends, recvs, axis, async_op=True)
        own = part((rank - 1 - step) % n)
        (arrived,) = coming.wait()
        total = own + arrived
    return total


class _GatherLinears(torch.autograd.Function):
    """all_gather(x) Wᵀ for x [B, T/n, D] V and each of several W [F, D]: [B, T, F] V.

    Every W multiplies a piece of x as the piece arrives. Backward keeps this rank's piece only.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.axis = axis
        batch, seq_len, _ = x.shape
        outs = [x.new_empty(batch, axis.size, seq_len, len(weight)) for weight in weights]
        for source, piece in ring_gather(x.contiguous(), axis):
            for out, weight in zip(outs, weights, strict=True):
                out[:, source] = F.linear(piece, weight)
        return tuple(out.flatten(1, 2) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *weights), axis = ctx.saved_tensors, ctx.axis
        grads = [grad.unflatten(1, (axis.size, -1)) for grad in grads]  # [B, n, T/n, F]
        grad_x, grad_weights = None, [None] * len(weights)
        if ctx.needs_input_grad[1]:

            def part(target: int) -> Tensor:
                first, *rest = (g[:, target] @ w for g, w in zip(grads, weights, strict=True))
                return sum(rest, start=first)

            grad_x = ring_reduce_scatter(part, axis)
        if any(ctx.needs_input_grad[2:]):
            grad_weights = [torch.zeros_like(weight) for weight in weights]
            for source, piece in ring_gather(x.contiguous(), axis):  # again: forward kept only `x`
                for grad, grad_weight in zip(grads, grad_weights, strict=True):
                    grad_weight.addmm_(grad[:, source].flatten(0, 1).T, piece.flatten(0, 1))
        return None, grad_x, *grad_weights


class _LinearScatter(torch.autograd.Function):
    """reduce_scatter(x Wᵀ) for x [B, T, F] V and W [D, F]: [B, T/n, D] V."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        x = x.unflatten(1, (axis.size, -1))  # [B, n, T/n, F]
        return ring_reduce_scatter(lambda target: F.linear(x[:, target], weight), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), axis = ctx.saved_tensors, ctx.axis
        x = x.unflatten(1, (axis.size, -1))
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for source, piece in ring_gather(grad.contiguous(), axis):
            grad_x[:, source] = piece @ weight
            grad_weight.addmm_(piece.flatten(0, 1).T, x[:, source].flatten(0, 1))
        return grad_x.flatten(1, 2), grad_weight, None


def fuse(region: nn.Module, firsts: Sequence[str], last: str, axis: Axis) -> None:
    """Multiply by the linear layers `firsts` of `region` in one ring, by its `last` in another."""
    for i, name in enumerate(firsts):  # each picks its product [B, T, F/n] V
        getattr(region, name).forward = itemgetter(i)
    linear = getattr(region, last)
    linear.forward = partial(_scatter, linear, axis)

    def multiply(_: nn.Module, args: tuple) -> tuple:
        weights = [getattr(region, name).weight for name in firsts]
        computed = _as_computed(args[0], *weights)
        return outside_of_graphs(_GatherLinears.apply, axis, *computed), *args[1:]

    region.register_forward_pre_hook(multiply)


def _scatter(linear: nn.Linear, axis: Axis, x: Tensor) -> Tensor:
    return outside_of_graphs(_LinearScatter.apply, *_as_computed(x, linear.weight), axis)


def _as_computed(*tensors: Tensor) -> Sequence[Tensor]:
    """Cast as autocast casts for a matmul: autocast does not look into our functions."""
    dtype = casts.product_dtype(tensors[0].device.type)
    return tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]
