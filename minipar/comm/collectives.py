"""The verbs: every byte that minipar moves between ranks goes through this file.

Each verb takes a tensor and the `Axis` to talk along, and returns its result. The caller's tensor
stays as it was unless `out=` names it. With ``async_op=True`` a verb returns a `Pending` at once;
``pending.wait()`` returns the result. On an axis of size 1 nothing is sent.

The ledger: while a recorder is active (`timeline.record`), every call appends a span of kind
"comm" with the axis, the *bytes on the wire* that this rank sends by the ring formula
(`wire_bytes`), its start and its end.

Shapes: n is the size of the axis, [D, ...] the caller's tensor; ranks and peers are coordinates
along the axis, not global ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import clock, gloo
from minipar.comm.calls import Call, Pending, launch
from minipar.comm.mesh import Axis

Op = Literal["sum", "avg", "max", "min"]


def _op(name: Op, tensor: Tensor) -> dist.ReduceOp:
    """Return torch's constant for a reduction. Raise `ValueError` if it cannot reduce `tensor`."""
    if name == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):  # NCCL rounds
        raise ValueError(f"op='avg' does not fit {tensor.dtype}; use 'sum'")
    return getattr(dist.ReduceOp, name.upper())


def wire_bytes(verb: str, num_bytes: int, size: int) -> int:
    """Return the bytes that the busiest of `size` ranks sends, by the algorithm that wastes none.

    `num_bytes` is the size of the whole tensor: the result of an all-gather, the input of a
    reduce-scatter, either one of an all-reduce. A ring moves 1/n of it per round: n-1 rounds to
    reduce-scatter, n-1 to all-gather, both for an all-reduce. Where one rank is special (scatter,
    gather, broadcast, reduce), all ranks are charged alike, as in nccl-tests.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 3.
    """
    rounds = {
        "all_reduce": 2 * (size - 1),
        "all_gather": size - 1,
        "reduce_scatter": size - 1,
        "all_to_all": size - 1,
        "scatter": size - 1,
        "gather": size - 1,
        "broadcast": size,
        "reduce": size,
        "send": size,
        "recv": 0,  # the sender pays: a message is counted once
        "barrier": 0,
    }
    return 0 if size == 1 else num_bytes * rounds[verb] // size


# ---------------------------------------------------------------------- reductions
def all_reduce(
    tensor: Tensor, axis: Axis, op: Op = "sum", *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Combine over all ranks; each gets the result: [D, ...] -> [D, ...].

    ``out=tensor`` reduces in place. Raises `ValueError` for "avg" of integers.
    """
    result, finish = _copy("all_reduce", tensor, out), partial(_deliver, out=out)
    call = partial(dist.all_reduce, result, _op(op, tensor), axis.group)
    sent = wire_bytes("all_reduce", tensor.nbytes, axis.size)
    return launch("all_reduce", axis, sent, call, result, async_op, finish)


def reduce(tensor: Tensor, axis: Axis, dst: int = 0) -> Tensor:
    """Add up over all ranks; rank `dst` gets the sum, the others a tensor without meaning."""
    result = _copy("reduce", tensor)
    call = partial(dist.reduce, result, None, dist.ReduceOp.SUM, axis.group, group_dst=dst)
    sent = wire_bytes("reduce", tensor.nbytes, axis.size)
    return launch("reduce", axis, sent, call, result, False)


def reduce_scatter(
    tensor: Tensor, axis: Axis, dim: int = 0, op: Op = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """Combine over all ranks; rank r gets the r-th of n slices along `dim`: [D, ...] -> [D/n, ...].

    `op` is "sum" or "avg". On a CPU, a second [D, ...] receives all slices; `wait` adds them up.
    """
    pieces = split(tensor, dim, axis.size).contiguous()  # [n, ..., D/n, ...]
    sent = wire_bytes("reduce_scatter", tensor.nbytes, axis.size)
    if axis.size > 1 and tensor.device.type != "cpu":
        result = pieces.new_empty(pieces.shape[1:])
        whole = pieces.flatten(0, 1)
        call = partial(dist.reduce_scatter_single, result, whole, _op(op, tensor), axis.group)
        return launch("reduce_scatter", axis, sent, call, result, async_op)

    # Gloo's own reduce-scatter reduces the whole tensor on every rank, and sends twice the bytes.
    # So here rank r receives the r-th slice of every rank, and adds up these n slices.
    def add_up(arrived: Tensor) -> Tensor:
        with clock.paused():  # a GPU adds up during the sends; summands in rank order
            return combine(arrived, 0, dtype=arrived.dtype)  # int8 stays int8, not int64

    combine = {"sum": torch.sum, "avg": torch.mean}[op]
    arrived = pieces if axis.size == 1 else torch.empty_like(pieces)
    call = partial(standing_for, f"reduce_scatter({op})", gloo.all_to_all, arrived, pieces, axis)
    return launch("reduce_scatter", axis, sent, call, arrived, async_op, add_up)


# ---------------------------------------------------------------------- moving data
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Join the tensors of all ranks along `dim`, in rank order: [D, ...] -> [n D, ...].

    `out` needs dim 0: only then the slices arrive at their final places in memory.
    """
    if out is not None and dim != 0:
        raise ValueError(f"all_gather: out= needs dim=0, not dim={dim}")
    tensor = torch.atleast_1d(tensor.detach()).contiguous()  # n numbers become [n]
    shape = (axis.size * tensor.shape[0], *tensor.shape[1:])
    _check_out("all_gather", out, tensor, shape)
    joined = tensor.new_empty(shape) if out is None else out
    if axis.size == 1:
        joined.copy_(tensor)
    call = partial(dist.all_gather_single, joined, tensor, axis.group)
    sent = wire_bytes("all_gather", tensor.nbytes * axis.size, axis.size)
    result, finish = joined, None  # along dim 0, the slices arrive at their final places
    if range(tensor.ndim)[dim] > 0:
        result, finish = joined.view(axis.size, *tensor.shape), partial(_join, dim=dim)
    return launch("all_gather", axis, sent, call, result, async_op, finish)


def all_to_all(
    tensor: Tensor,
    axis: Axis,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Cut along `split_dim` and send slice r to rank r; join the received ones along `concat_dim`.

    A transpose between ranks: [D, F] split on dim 1 and joined on dim 0 becomes [n D, F/n].
    With both counts, along dim 0, slices may be uneven: ``send_counts[r]`` rows go to rank r, and
    ``recv_counts[r]`` come from rank r.
    """
    if send_counts is None and recv_counts is None:
        pieces, rows = split(tensor, split_dim, axis.size).contiguous(), ()
        arrived, finish = torch.empty_like(pieces), partial(_join, dim=concat_dim)
        sent = wire_bytes("all_to_all", tensor.nbytes, axis.size)
    else:
        pieces, rows = tensor.detach().contiguous(), (list(recv_counts), list(send_counts))
        arrived, finish = pieces.new_empty(sum(recv_counts), *pieces.shape[1:]), None
        row_bytes = pieces.element_size() * math.prod(pieces.shape[1:])
        sent = row_bytes * (sum(send_counts) - send_counts[axis.rank])
    if axis.size == 1:
        arrived.copy_(pieces)
    call = partial(gloo.all_to_all, arrived, pieces, axis, rows=rows)
    return launch("all_to_all", axis, sent, call, arrived, async_op, finish)


def broadcast(
    tensor: Tensor, axis: Axis, src: int = 0, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Give all ranks the tensor of rank `src`. The others pass tensors of equal shape and dtype."""
    result, finish = _copy("broadcast", tensor, out), partial(_deliver, out=out)
    call = partial(dist.broadcast, result, None, axis.group, group_src=src)
    sent = wire_bytes("broadcast", tensor.nbytes, axis.size)
    return launch("broadcast", axis, sent, call, result, async_op, finish)


def scatter(tensor: Tensor, axis: Axis, src: int = 0) -> Tensor:
    """Give rank r the r-th of n slices of `src`'s tensor: [D, ...] -> [D/n, ...] along dim 0.

    Every rank passes a tensor of the whole shape; only the one of `src` is read.
    """
    pieces = split(tensor, 0, axis.size).contiguous()
    result = pieces[0].clone()
    source = list(pieces) if axis.rank == src else None
    call = partial(dist.scatter, result, source, None, axis.group, group_src=src)
    sent = wire_bytes("scatter", tensor.nbytes, axis.size)
    return launch("scatter", axis, sent, call, result, False)


def gather(tensor: Tensor, axis: Axis, dst: int = 0) -> Tensor | None:
    """Join the tensors of all ranks along dim 0 on rank `dst`: [D, ...] -> [n D, ...].

    The other ranks get None.
    """
    tensor = torch.atleast_1d(tensor.detach()).contiguous()
    places = [tensor.clone() for _ in range(axis.size)] if axis.rank == dst else None
    finish = torch.cat if axis.rank == dst else None
    call = partial(dist.gather, tensor, places, None, axis.group, group_dst=dst)
    sent = wire_bytes("gather", tensor.nbytes * axis.size, axis.size)
    return launch("gather", axis, sent, call, places, False, finish, travelling=tensor)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has called this."""
    launch("barrier", axis, 0, partial(dist.barrier, axis.group), None, False)
    if axis.size > 1 and "nccl" in dist.get_backend(axis.group):
        torch.cuda.current_stream().synchronize()  # so far the stream has waited, not the host


def all_gather_object(obj: Any, axis: Axis) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order. For set-up and reports: no span."""
    if axis.size == 1:
        return [obj]
    objects, call = [None] * axis.size, Call("all_gather_object", axis)
    call.begin(lambda: None)
    with call.waiting(), clock.paused():
        dist.all_gather_object(objects, obj, axis.group)
    return objects


# ---------------------------------------------------------------------- one to one
def send(
    tensor: Tensor, axis: Axis, peer: int, *, async_op: bool = False, name: str = "send"
) -> Tensor | Pending:
    """Send `tensor` to rank `peer` of the axis, which must call `recv`. The ledger says `name`."""
    tensor = gloo.staged(tensor.detach().contiguous(), axis)
    call = lambda _: dist.isend(tensor, group=axis.group, group_dst=peer)  # noqa: E731
    return launch(name, axis, tensor.nbytes, call, tensor, async_op, peers=[peer])


def recv(buffer: Tensor, axis: Axis, peer: int, *, async_op: bool = False) -> Tensor | Pending:
    """Fill `buffer` (contiguous, of the sender's shape and dtype) with the tensor of `peer`."""
    staged = gloo.staged(buffer, axis)

    def call(_: bool) -> Any:
        return gloo.All([dist.irecv(staged, group=axis.group, group_src=peer)], [(buffer, staged)])

    return launch("recv", axis, 0, call, buffer, async_op, peers=[peer])


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    recvs: Sequence[tuple[Tensor, int]],
    axis: Axis,
    *,
    async_op: bool = False,
) -> list[Tensor] | Pending:
    """Post several sends ``(tensor, peer)`` and receives ``(buffer, peer)``; return the buffers.

    All messages are in flight together, so no order of calls can deadlock. Rings use this verb.
    """
    sends = [(tensor.detach().contiguous(), peer) for tensor, peer in sends]
    buffers = [buffer for buffer, _ in recvs]
    if axis.size == 1:  # a ring of one
        for (tensor, _), buffer in zip(sends, buffers, strict=True):
            buffer.copy_(tensor)
    num_bytes = sum(tensor.nbytes for tensor, _ in sends)
    peers = list(dict.fromkeys(peer for _, peer in (*recvs, *sends)))
    call = lambda _: gloo.post(sends, recvs, axis)  # noqa: E731
    first = next((tensor for tensor, _ in (*sends, *recvs)), None)
    return launch("exchange", axis, num_bytes, call, buffers, async_op, None, peers, first)


def connect(axis: Axis, device: torch.device, pairs: Iterable[tuple[int, int]] = ()) -> None:
    """Connect all ranks of the axis over NCCL, and each of `pairs`, before the first step.

    NCCL makes a communicator at the first collective of a group, and at the first message of a
    pair. There, the two ranks wait for each other. They would hang if each first waited for a third
    rank. So all ranks connect the pairs in one order. Other backends need none of this.
    """
    if axis.size == 1 or "nccl" not in dist.get_backend(axis.group):
        return
    number = all_reduce(torch.zeros(1, device=device), axis)
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        if axis.rank == low:
            send(number, axis, high)
        elif axis.rank == high:
            recv(number, axis, low)


# ---------------------------------------------------------------------- slices in memory
def _check_out(verb: str, out: Tensor | None, like: Tensor, shape: Sequence[int]) -> None:
    if out is not None and (out.shape != torch.Size(shape) or out.dtype != like.dtype):
        fits = f"shape {tuple(shape)} and {like.dtype}"
        raise ValueError(f"{verb}: out= must be of {fits}, not {tuple(out.shape)} and {out.dtype}")


@torch.no_grad()
def _copy(verb: str, tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a contiguous tensor with the values of `tensor`: `out` if it can be."""
    _check_out(verb, out, tensor, tensor.shape)
    if out is None or not out.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return out if out is tensor else out.copy_(tensor)


@torch.no_grad()
def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `out` with the values of `result`; without an `out`, return `result`."""
    return result if out is None or out is result else out.copy_(result)


def split(tensor: Tensor, dim: int, size: int) -> Tensor:
    """View [..., D, ...] as [n, ..., D/n, ...]. Torch raises an error if n does not divide D."""
    return tensor.detach().unflatten(dim, (size, -1)).movedim(dim % tensor.ndim, 0)


def _join(pieces: Tensor, dim: int) -> Tensor:
    """Undo `split`: [n, ..., D, ...] -> [..., n D, ...]."""
    dim = range(pieces.ndim - 1)[dim]
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


# ---------------------------------------------------------------------- for the emulated link
stands_for: ContextVar[str] = ContextVar("stands_for", default="")  # see `standing_for`


def standing_for(call: str, function: Callable, *args: Any) -> Any:
    """Return ``function(*args)``; an emulated link reports its collective as `call`."""
    context = copy_context()
    context.run(stands_for.set, call)
    return context.run(function, *args)
