"""The verbs: every byte that minipar moves between ranks goes through this file.

Each verb takes a tensor and the `Axis` to talk along, and returns its result; the caller's tensor
is left as it was unless `out=` names it. With ``async_op=True`` it returns a `Pending` at once,
whose ``wait()`` gives the result. On an axis of size 1 nothing is sent.

The ledger: while a recorder is active (`timeline.record`), every call appends a span of kind
"comm" with the axis, the *bytes on the wire* that this rank sends by the ring formula
(`wire_bytes`), and when it started and ended. Unrecorded, that costs one comparison.
Recorders, the watchdog and others are taps on these calls: see `calls.py`.

Shapes: n is the size of the axis, [D, ...] the caller's tensor; ranks and peers are coordinates
along the axis, not global ranks.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import clock
from minipar.comm.calls import Call, Pending, launch
from minipar.comm.mesh import Axis
from minipar.comm.shapes import (
    Op,
    as_sent,
    check_buffer,
    check_counts,
    check_dim,
    check_divides,
    check_op,
    check_out,
    check_peer,
    check_type,
    combine,
    copy_into,
    deliver,
    join,
    landing,
    move_front_to,
    split,
)

_SLICES, _PIECES = 1, 2
"""Tags of messages that make up a collective, to keep them apart from the caller's own."""
_LARGE = 1 << 18
"""Bytes from which messages in the right order gain more than Python's part in them costs."""
stands_for: ContextVar[str] = ContextVar("stands_for", default="")
"""The call whose work this thread does by another; see `standing_for`."""


def wire_bytes(verb: str, num_bytes: int, size: int) -> int:
    """Return the bytes that the busiest of `size` ranks sends, by the algorithm that wastes none.

    `num_bytes` is the size of the whole tensor: what an all-gather returns, a reduce-scatter is
    given, and every rank holds before and after an all-reduce. A ring moves 1/n of it per round:
    n-1 rounds to reduce-scatter, n-1 to all-gather, both for an all-reduce. Where one rank has a
    part of its own (scatter, gather, broadcast, reduce) all are charged alike, as in nccl-tests.
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
    if size == 1:
        return 0
    return num_bytes * rounds[verb] // size


# ---------------------------------------------------------------------- reductions
def all_reduce(
    tensor: Tensor, axis: Axis, op: Op = "sum", *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Combine over all ranks; each gets the result: [D, ...] -> [D, ...].

    ``out=tensor`` reduces in place. Raises `ValueError` for an unknown `op`, for "avg" of whole
    numbers, and for types that a backend cannot reduce, such as float8.
    """
    reduce_op = check_op("all_reduce", op, tensor)
    check_type("all_reduce", op, tensor)
    check_out("all_reduce", out, tensor, tensor.shape)
    result = copy_into(out, tensor)
    call = partial(dist.all_reduce, result, reduce_op, axis.group)
    sent = _sent("all_reduce", tensor, axis)
    return launch("all_reduce", axis, sent, call, result, async_op, partial(deliver, out=out))


def reduce(
    tensor: Tensor, axis: Axis, dst: int = 0, op: Op = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """Combine over all ranks; rank `dst` gets the result, the others a tensor of no meaning."""
    reduce_op = check_op("reduce", op, tensor)
    check_type("reduce", op, tensor)
    check_peer("reduce", "dst", dst, axis)
    result = copy_into(None, tensor)
    call = partial(dist.reduce, result, None, reduce_op, axis.group, group_dst=dst)
    return launch("reduce", axis, _sent("reduce", tensor, axis), call, result, async_op)


def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    dim: int = 0,
    op: Op = "sum",
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over all ranks; rank r gets the r-th of n slices along `dim`: [D, ...] -> [D/n, ...].

    On a CPU it takes another [D, ...], where the slices of all ranks arrive; they are added up, and
    `out` is written, when it is waited for. Raises `ValueError` when n does not divide that dim.
    """
    reduce_op = check_op("reduce_scatter", op, tensor)
    check_type("reduce_scatter", op, tensor)
    check_divides("reduce_scatter", tensor, dim, axis)
    pieces = split(tensor, dim, axis.size)  # [n, ..., D/n, ...]
    shape = pieces.shape[1:]
    check_out("reduce_scatter", out, tensor, shape)
    sent = _sent("reduce_scatter", tensor, axis)
    if axis.size > 1 and tensor.device.type == "cpu":
        # Gloo sums up all of it on every rank, and cuts: twice the bytes. So ranks hand each other
        # the slices, and each adds up its own.
        arrived = torch.empty_like(pieces)

        def hand_over(is_async: bool) -> Any:
            with standing_for(f"reduce_scatter({op})"):
                return _swap(arrived, pieces, axis, is_async)

        def add_up(arrived: Tensor) -> Tensor:
            with clock.paused():  # a GPU adds up while it sends
                result = combine(arrived, op, landing(out, arrived, shape))
            return deliver(result, out)

        return launch("reduce_scatter", axis, sent, hand_over, arrived, async_op, add_up)
    result = landing(out, pieces, shape)
    if axis.size == 1:
        result.copy_(pieces[0])
    call = partial(dist.reduce_scatter_single, result, pieces.flatten(0, 1), reduce_op, axis.group)
    return launch("reduce_scatter", axis, sent, call, result, async_op, partial(deliver, out=out))


# ---------------------------------------------------------------------- moving data
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Join the tensors of all ranks along `dim`, in rank order: [D, ...] -> [n D, ...].

    `out` is for dim 0 only, where the result lies in memory as it arrives.
    """
    if out is not None and dim != 0:
        raise ValueError(f"all_gather: out= needs dim=0, not dim={dim}")
    tensor = torch.atleast_1d(tensor.detach()).contiguous()  # numbers are joined to [n]
    check_dim("all_gather", tensor, dim)
    shape = (axis.size * tensor.shape[0], *tensor.shape[1:])
    check_out("all_gather", out, tensor, shape)
    joined = landing(out, tensor, shape)
    if axis.size == 1:
        joined.copy_(tensor)

    def finish(joined: Tensor) -> Tensor:
        return deliver(move_front_to(joined, dim, axis.size), out)

    call = partial(_gather, as_sent(joined), as_sent(tensor), axis)
    sent = wire_bytes("all_gather", tensor.nbytes * axis.size, axis.size)
    return launch("all_gather", axis, sent, call, joined, async_op, finish)


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
    """Cut along `split_dim` and send slice r to rank r; join what arrives along `concat_dim`.

    A transpose between ranks: [D, F] split on dim 1 and joined on dim 0 becomes [n D, F/n].
    With counts (both, and along dim 0) the slices may be uneven: rank r is sent
    ``send_counts[r]`` rows, and ``recv_counts[r]`` come from it.

    Raises `ValueError` when n does not divide the split dim, or counts do not add up.
    """
    if send_counts is None and recv_counts is None:
        check_divides("all_to_all", tensor, split_dim, axis)
        check_dim("all_to_all", tensor, concat_dim)
        pieces, rows = split(tensor, split_dim, axis.size), {}
        arrived, finish = torch.empty_like(pieces), partial(join, dim=concat_dim)
        sent = _sent("all_to_all", tensor, axis)
    else:
        check_counts(tensor, axis, send_counts, recv_counts)
        pieces = tensor.detach().contiguous()
        rows = {"recv_rows": list(recv_counts), "send_rows": list(send_counts)}
        arrived, finish = pieces.new_empty(sum(recv_counts), *pieces.shape[1:]), None
        row_bytes = pieces.element_size() * math.prod(pieces.shape[1:])
        sent = row_bytes * (sum(send_counts) - send_counts[axis.rank])
    if axis.size == 1:
        arrived.copy_(pieces)
    call = partial(_swap, as_sent(arrived), as_sent(pieces), axis, **rows)
    return launch("all_to_all", axis, sent, call, arrived, async_op, finish)


def broadcast(
    tensor: Tensor, axis: Axis, src: int = 0, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Give all ranks the tensor of rank `src`; the others' tensors lend only shape and dtype."""
    check_peer("broadcast", "src", src, axis)
    check_out("broadcast", out, tensor, tensor.shape)
    result = copy_into(out, tensor)
    call = partial(dist.broadcast, as_sent(result), None, axis.group, group_src=src)
    sent = _sent("broadcast", tensor, axis)
    return launch("broadcast", axis, sent, call, result, async_op, partial(deliver, out=out))


def scatter(
    tensor: Tensor, axis: Axis, src: int = 0, *, async_op: bool = False
) -> Tensor | Pending:
    """Give rank r the r-th of n slices of `src`'s tensor: [D, ...] -> [D/n, ...] along dim 0.

    Every rank passes a tensor of the whole shape; only that of `src` is read.
    """
    check_peer("scatter", "src", src, axis)
    check_divides("scatter", tensor, 0, axis)
    pieces = split(tensor, 0, axis.size)
    result = pieces[0].clone()
    source = [as_sent(piece) for piece in pieces] if axis.rank == src else None
    call = partial(dist.scatter, as_sent(result), source, None, axis.group, group_src=src)
    return launch("scatter", axis, _sent("scatter", tensor, axis), call, result, async_op)


def gather(
    tensor: Tensor, axis: Axis, dst: int = 0, *, async_op: bool = False
) -> Tensor | Pending | None:
    """Join the tensors of all ranks along dim 0 on rank `dst`: [D, ...] -> [n D, ...].

    The other ranks get None.
    """
    check_peer("gather", "dst", dst, axis)
    tensor = torch.atleast_1d(tensor.detach()).contiguous()
    pieces = [torch.empty_like(tensor) for _ in range(axis.size)] if axis.rank == dst else None
    if axis.size == 1:
        pieces = [tensor.clone()]

    def finish(pieces: list[Tensor] | None) -> Tensor | None:
        return None if pieces is None else torch.cat(pieces)

    places = None if pieces is None else [as_sent(piece) for piece in pieces]
    call = partial(dist.gather, as_sent(tensor), places, None, axis.group, group_dst=dst)
    sent = wire_bytes("gather", tensor.nbytes * axis.size, axis.size)
    return launch("gather", axis, sent, call, pieces, async_op, finish)


# ---------------------------------------------------------------------- one to one
def send(
    tensor: Tensor, axis: Axis, peer: int, *, async_op: bool = False, name: str = "send"
) -> Tensor | Pending:
    """Send `tensor` to rank `peer` of the axis, which must call `recv`. `name`: in the ledger."""
    check_peer("send", "peer", peer, axis)
    tensor = _staged(tensor.detach().contiguous(), axis)

    def call(_: bool) -> Any:
        return dist.isend(tensor, group=axis.group, group_dst=peer)

    return launch(name, axis, tensor.nbytes, call, tensor, async_op, peers=[peer])


def recv(buffer: Tensor, axis: Axis, peer: int, *, async_op: bool = False) -> Tensor | Pending:
    """Fill `buffer` (contiguous, of the sender's shape and dtype) with what `peer` sends."""
    check_peer("recv", "peer", peer, axis)
    check_buffer("recv", buffer)
    landing = _staged(buffer, axis)

    def call(_: bool) -> Any:
        work = dist.irecv(landing, group=axis.group, group_src=peer)
        return work if landing is buffer else _All([work], [(buffer, landing)])

    return launch("recv", axis, 0, call, buffer, async_op, peers=[peer])


def connect(axis: Axis, device: torch.device, pairs: Iterable[tuple[int, int]] = ()) -> None:
    """Let the axis, and each of these pairs of its ranks, meet now. A collective.

    With NCCL the first collective of a group, and the first message of two ranks, makes a
    communicator: that takes long, and both ends wait for each other, in vain where all turn to
    another rank first. So the pairs come in one order, the same on all ranks, before the first
    step. Batches of messages, as in a ring, take the communicator of the group. Other backends need
    none of it, and nothing is sent.
    """
    if axis.size == 1 or "nccl" not in dist.get_backend(axis.group):
        return
    number = all_reduce(torch.zeros(1, device=device), axis)
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        if axis.rank == low:
            send(number, axis, high)
        elif axis.rank == high:
            recv(number, axis, low)


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    recvs: Sequence[tuple[Tensor, int]],
    axis: Axis,
    *,
    async_op: bool = False,
) -> list[Tensor] | Pending:
    """Post several sends ``(tensor, peer)`` and receives ``(buffer, peer)`` at once.

    All are in flight together, so no order of calls can deadlock: this is how rings are built.
    Returns the buffers in their order.
    """
    sends = [(tensor.detach().contiguous(), peer) for tensor, peer in sends]
    buffers = [buffer for buffer, _ in recvs]
    for _, peer in (*sends, *recvs):
        check_peer("exchange", "peer", peer, axis)
    for buffer in buffers:
        check_buffer("exchange", buffer)
    if axis.size == 1:  # a ring of one
        for (tensor, _), buffer in zip(sends, buffers, strict=True):
            buffer.copy_(tensor)

    num_bytes = sum(tensor.nbytes for tensor, _ in sends)
    peers = list(dict.fromkeys(peer for _, peer in (*recvs, *sends)))
    call = lambda _: _post(sends, recvs, axis)  # noqa: E731
    return launch("exchange", axis, num_bytes, call, buffers, async_op, peers=peers)


def _post(
    sends: Sequence[tuple[Tensor, int]],
    recvs: Sequence[tuple[Tensor, int]],
    axis: Axis,
    tag: int = 0,
) -> "_All | None":
    """Receives first: gloo tells the peer over the same connection that a buffer is there, and
    behind a message that is leaving this would wait for its end. So both ways work at once.
    """
    landings = [(buffer, _staged(buffer, axis)) for buffer, _ in recvs]
    ways = [(dist.irecv, b, peer) for (_, b), (_, peer) in zip(landings, recvs, strict=True)]
    ways += [(dist.isend, _staged(tensor, axis), peer) for tensor, peer in sends]
    posts = [dist.P2POp(op, tensor, None, axis.group, tag, peer) for op, tensor, peer in ways]
    if any(post.tensor.is_meta for post in posts):  # the batch asks for the device's backend
        return _All([p.op(p.tensor, None, p.group, p.tag, p.group_peer) for p in posts])
    return _All(dist.batch_isend_irecv(posts), landings) if posts else None


def _staged(tensor: Tensor, axis: Axis) -> Tensor:
    """Return what of a message travels: ranks that share a GPU talk over gloo, whose messages are
    of the host's memory.
    """
    shared = tensor.is_cuda and axis.size > 1 and dist.get_backend(axis.group) == "gloo"
    return tensor.cpu() if shared else tensor


def _gather(joined: Tensor, piece: Tensor, axis: Axis, is_async: bool) -> Any:
    """Start an all-gather. Gloo's own holds the whole a second time; so what is large is, on a CPU,
    messages of ours, each to its place. Not where several ranks share the card of one of several
    hosts: each of them would send its piece to all other hosts, and of a ring only the last does.
    """
    # All ranks choose alike: hosts may differ in how many ranks they have.
    several_share_a_host = 1 < num_hosts() < dist.get_world_size()
    is_ring_better = piece.nbytes < _LARGE or several_share_a_host
    if is_ring_better or not _is_gloo(piece, axis):
        return dist.all_gather_single(joined, piece, axis.group, is_async)
    places = joined.split(len(piece))
    places[axis.rank].copy_(piece)
    peers = [(axis.rank + k) % axis.size for k in range(1, axis.size)]
    sends, recvs = [(piece, peer) for peer in peers], [(places[peer], peer) for peer in peers[::-1]]
    return _post(sends, recvs, axis, _PIECES) or _All([])


@contextmanager
def standing_for(call: str) -> Iterator[None]:
    """Do the work of `call`, "reduce_scatter(sum)" say, by another collective of equal cost.

    An emulated link reports the collective of the body by that name.
    """
    token = stands_for.set(call)
    try:
        yield
    finally:
        stands_for.reset(token)


def num_hosts() -> int:
    """Return how many hosts the job has: torchrun says so, to all ranks alike; without it, 1."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def ranks_per_host() -> int:
    """Return how many ranks of the job this host has: torchrun says so; without it, all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _is_gloo(tensor: Tensor, axis: Axis) -> bool:
    return tensor.device.type == "cpu" and "gloo" in dist.get_backend(axis.group)


def _swap(
    arrived: Tensor,
    sent: Tensor,
    axis: Axis,
    is_async: bool,
    recv_rows: Sequence[int] | None = None,
    send_rows: Sequence[int] | None = None,
) -> Any:
    """Start an all-to-all of rows. Gloo's own sends first, so on a CPU it is messages of ours.

    Not of few bytes; nor of uneven rows, where ranks do not know each other's number, and few bytes
    are what messages cost most with.
    """
    is_small = recv_rows is not None or sent.nbytes < _LARGE
    if is_small or not _is_gloo(sent, axis):
        rows = recv_rows, send_rows
        return dist.all_to_all_single(arrived, sent, *rows, axis.group, is_async)
    n, rank = axis.size, axis.rank
    into, out = arrived.split(len(arrived) // n), sent.split(len(sent) // n)
    into[rank].copy_(out[rank])
    sources, peers = ([(rank + way * k) % n for k in range(1, n)] for way in (-1, 1))
    sends = [(out[peer], peer) for peer in peers if out[peer].numel()]
    recvs = [(into[peer], peer) for peer in sources if into[peer].numel()]
    return _post(sends, recvs, axis, _SLICES) or _All([])  # a call that moves nothing is a call


class _All:
    """Several works waited for as one; then what landed elsewhere is put into its buffer."""

    def __init__(
        self, works: Sequence[dist.Work], landings: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._works, self._landings = works, landings

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for buffer, arrived in self._landings:
            if arrived is not buffer:
                buffer.copy_(arrived)
        self._landings = ()

    @property
    def ended(self) -> torch.futures.Future:
        """Of all of them, where the backend tells without a `wait`, which hands results out."""
        return torch.futures.collect_all([work.ended for work in self._works])

    @property
    def times(self) -> tuple[float, float]:
        """Start of the first and end of the last, where the backend knows them."""
        now = time.monotonic()
        times = [work.times for work in self._works] or [(now, now)]
        return min(start for start, _ in times), max(end for _, end in times)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has called this."""
    launch("barrier", axis, 0, partial(dist.barrier, axis.group), None, False)
    if axis.size > 1 and "nccl" in dist.get_backend(axis.group):
        torch.cuda.current_stream().synchronize()  # for taps, only the stream has waited


def all_gather_object(obj: Any, axis: Axis) -> list[Any]:
    """Return every rank's (picklable) object, in rank order. For set-up and reports: unrecorded.

    Ranks trust each other: what can speak as one of them can also send wrong gradients. So the
    network between them must be closed to others, as for torch. Anything else is read as JSON or
    by `torch.load(weights_only=True)`: the store of torchrun, which any process that reaches its
    port can write to, and files.
    """
    if axis.size == 1:
        return [obj]
    objects = [None] * axis.size
    call = Call("all_gather_object", axis)
    call.begin(lambda: None)
    with call.waiting(), clock.paused():
        dist.all_gather_object(objects, obj, axis.group)
    return objects


def _sent(verb: str, whole: Tensor, axis: Axis) -> int:
    return wire_bytes(verb, whole.nbytes, axis.size)
