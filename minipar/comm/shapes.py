"""What a collective may be asked for, and how slices of a tensor lie in memory."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.mesh import Axis

Op = Literal["sum", "avg", "max", "min"]
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def check_op(verb: str, op: Op, tensor: Tensor) -> dist.ReduceOp:
    """Return torch's name of `op`; raise `ValueError` where it cannot reduce `tensor`."""
    if op not in _OPS:
        raise ValueError(f"{verb}: op={op!r} is not a reduction; use one of {', '.join(_OPS)}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{verb}: op='avg' of {tensor.dtype} is no whole number; use sum")
    return _OPS[op]


def check_type(verb: str, op: Op, tensor: Tensor) -> None:
    """Raise `ValueError` unless every backend can reduce numbers of this type."""
    if tensor.dtype not in _SENT and not (tensor.is_complex() and op in ("sum", "avg")):
        raise ValueError(
            f"{verb}: backends have no op={op!r} of {tensor.dtype}; convert the tensor first, to "
            f"torch.float32 or torch.int32, say"
        )


def check_dim(verb: str, tensor: Tensor, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"{verb}: a tensor of shape {tuple(tensor.shape)} has no dim {dim}")


def check_buffer(verb: str, buffer: Tensor) -> None:
    if not buffer.is_contiguous():
        raise ValueError(f"{verb}: a buffer to receive in must be contiguous")


def check_peer(verb: str, name: str, peer: int, axis: Axis) -> None:
    """Raise `ValueError` unless `peer` is a rank of `axis`."""
    if not 0 <= peer < axis.size:
        raise ValueError(
            f"{verb}: {name}={peer} is no rank of {axis.name}={axis.size}; use 0 to {axis.size - 1}"
        )


def check_out(verb: str, out: Tensor | None, tensor: Tensor, shape: Sequence[int]) -> None:
    if out is None:
        return
    if out.shape != torch.Size(shape) or out.dtype != tensor.dtype:
        raise ValueError(
            f"{verb}: out= must be of shape {tuple(shape)} and {tensor.dtype}, "
            f"not {tuple(out.shape)} and {out.dtype}"
        )


def check_divides(verb: str, tensor: Tensor, dim: int, axis: Axis) -> None:
    check_dim(verb, tensor, dim)
    length = tensor.shape[dim]
    if length % axis.size:
        below = length - length % axis.size
        raise ValueError(
            f"{verb}: {axis.name}={axis.size} does not divide dim {dim} of shape "
            f"{tuple(tensor.shape)}; pad it to {below + axis.size} or cut it to {below}"
        )


def check_counts(
    tensor: Tensor, axis: Axis, send_counts: Sequence[int] | None, recv_counts: Sequence[int] | None
) -> None:
    """Raise `ValueError` unless all-to-all can share out the rows of `tensor` so."""
    if send_counts is None or recv_counts is None:
        raise ValueError("all_to_all with counts needs both send_counts and recv_counts")
    if len(send_counts) != axis.size or len(recv_counts) != axis.size:
        raise ValueError(
            f"all_to_all over {axis.name}={axis.size} needs {axis.size} counts, not "
            f"{len(send_counts)} to send and {len(recv_counts)} to receive"
        )
    if sum(send_counts) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: send_counts={list(send_counts)} add up to {sum(send_counts)} rows "
            f"but the tensor has {tensor.shape[0]}"
        )
    if send_counts[axis.rank] != recv_counts[axis.rank]:
        raise ValueError(
            f"all_to_all: rank {axis.rank} sends {send_counts[axis.rank]} rows to itself but "
            f"expects {recv_counts[axis.rank]} from itself; both counts must be equal"
        )


@torch.no_grad()
def combine(pieces: Tensor, op: Op, out: Tensor) -> Tensor:
    """[n, ...] -> [...], in the order of the ranks; returns `out`."""
    if op == "sum":
        return torch.sum(pieces, 0, dtype=pieces.dtype, out=out)  # small integers stay small
    return {"avg": torch.mean, "max": torch.amax, "min": torch.amin}[op](pieces, 0, out=out)


@torch.no_grad()
def copy_into(out: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, `out` if it can be, with the values of `tensor`."""
    if out is None or not out.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return out if out is tensor else out.copy_(tensor)


def landing(out: Tensor | None, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a contiguous tensor for a result to arrive in: `out` if it can be, else a new one."""
    return out if out is not None and out.is_contiguous() else like.new_empty(shape)


_SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SENT |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
"""The types that every backend sends."""


def as_sent(tensor: Tensor) -> Tensor:
    """A contiguous tensor as it can be moved: itself, or the bytes of its rows if its type is none
    of those."""
    if tensor.dtype in _SENT:
        return tensor
    return torch.atleast_1d(tensor.detach()).unsqueeze(-1).flatten(1).view(torch.uint8)


@torch.no_grad()
def deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `out`, holding `result`, if there is one."""
    return result if out is None or out is result else out.copy_(result)


def split(tensor: Tensor, dim: int, size: int) -> Tensor:
    """[..., D, ...] -> [n, ..., D/n, ...], contiguous: one slice after the other in memory."""
    return tensor.detach().unflatten(dim, (size, -1)).movedim(dim % tensor.ndim, 0).contiguous()


def join(pieces: Tensor, dim: int) -> Tensor:
    """[n, ..., D, ...] -> [..., n D, ...]: the inverse of `split`."""
    dim = dim % (pieces.ndim - 1)
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def move_front_to(joined: Tensor, dim: int, size: int) -> Tensor:
    """What was gathered along dim 0 is joined along `dim` instead: a copy unless that is 0."""
    if dim == 0 or joined.ndim <= 1:
        return joined
    return join(joined.unflatten(0, (size, -1)), dim)
