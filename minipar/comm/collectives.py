"""The verbs: every byte that minipar moves between ranks goes through this file.

Each verb takes a tensor and the `Axis` to talk along, and returns its result; the caller's tensor
is left as it was unless `out=` names it. With ``async_op=True`` it returns a `Pending` at once,
whose ``wait()`` gives the result. On an axis of size 1 nothing is sent.

The ledger: while a recorder is active (`timeline.record`), every call appends a span of kind
"comm" with the axis, the *bytes on the wire* that this rank sends by the ring formula
(`spans.wire_bytes`), and when it started and ended. Unrecorded, that costs one comparison.
The watchdog, where there is one, learns from here what this rank has called and waits for.

Shapes: n is the size of the axis, [D, ...] the caller's tensor; ranks and peers are coordinates
along the axis, not global ranks.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import device, link, timeline, watchdog
from minipar.comm.mesh import Axis
from minipar.comm.spans import wire_bytes

Op = Literal["sum", "avg", "max", "min"]
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_SLICES = 1
"""The tag of messages that make up a collective, to keep them apart from the caller's own."""
_LARGE = 1 << 18
"""Bytes from which messages in the right order gain more than Python's part in them costs."""


class Observer(Protocol):
    """Told of every call that is sent, by number, and when this rank first waits for it."""

    def launched(
        self, number: int, verb: str, axis: Axis, num_bytes: int, peers: Sequence[int], result: Any
    ) -> None:
        """`num_bytes` leave this rank; of messages, `peers` are at the other end."""

    def waited(self, number: int) -> None:
        """From here on, this rank waits for that call."""


observers: list[Observer] = []
"""Those to be told: a simulator, which knows no clock but the order of calls."""
_numbers = itertools.count()


class Pending:
    """A collective in flight. `wait` blocks until it is done and returns its result."""

    def __init__(
        self,
        work: Any,
        result: Any,
        finish: Callable[[Any], Any] | None = None,
        waiting: AbstractContextManager | None = None,
        number: int | None = None,
    ) -> None:
        self._work, self._result, self._finish, self._number = work, result, finish, number
        self._waiting = waiting or nullcontext()  # entered while this rank waits

    def wait(self) -> Any:
        """Return the result; a second call returns the same again."""
        if self._number is not None:  # the fake backend has no works
            for observer in observers:
                observer.waited(self._number)
            self._number = None
        if self._work is not None:
            recorder = timeline.active()
            with self._waiting, recorder.blocked() if recorder else nullcontext():
                self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


# ---------------------------------------------------------------------- reductions
def all_reduce(
    tensor: Tensor, axis: Axis, op: Op = "sum", *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Pending:
    """Combine over all ranks; each gets the result: [D, ...] -> [D, ...].

    ``out=tensor`` reduces in place. Raises `ValueError` for an unknown `op`, and for "avg" of whole
    numbers.
    """
    reduce_op = check_op("all_reduce", op, tensor)
    _check_out("all_reduce", out, tensor, tensor.shape)
    result = _copy_into(out, tensor)
    return _launch(
        "all_reduce",
        axis,
        _sent("all_reduce", tensor, axis),
        lambda a: dist.all_reduce(result, reduce_op, axis.group, a),
        result,
        async_op,
        finish=lambda result: _deliver(result, out),
    )


def reduce(
    tensor: Tensor, axis: Axis, dst: int = 0, op: Op = "sum", *, async_op: bool = False
) -> Tensor | Pending:
    """Combine over all ranks; rank `dst` gets the result, the others a tensor of no meaning."""
    reduce_op = check_op("reduce", op, tensor)
    check_peer("reduce", "dst", dst, axis)
    result = _copy_into(None, tensor)
    return _launch(
        "reduce",
        axis,
        _sent("reduce", tensor, axis),
        lambda a: dist.reduce(result, None, reduce_op, axis.group, a, group_dst=dst),
        result,
        async_op,
    )


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
    _check_divides("reduce_scatter", tensor, dim, axis)
    pieces = _split(tensor, dim, axis.size)  # [n, ..., D/n, ...]
    shape = pieces.shape[1:]
    _check_out("reduce_scatter", out, tensor, shape)
    sent = _sent("reduce_scatter", tensor, axis)
    if axis.size > 1 and tensor.device.type == "cpu":
        # Gloo sums up all of it on every rank, and cuts: twice the bytes. So ranks hand each other
        # the slices, and each adds up its own.
        arrived = torch.empty_like(pieces)

        def hand_over(is_async: bool) -> Any:
            with link.standing_for(f"reduce_scatter({op})"):
                return _swap(arrived, pieces, axis, is_async)

        def add_up(arrived: Tensor) -> Tensor:
            with device.paused():  # a GPU adds up while it sends
                result = _combine(arrived, op, _landing(out, arrived, shape))
            return _deliver(result, out)

        return _launch("reduce_scatter", axis, sent, hand_over, arrived, async_op, add_up)
    result = _landing(out, pieces, shape)
    if axis.size == 1:
        result.copy_(pieces[0])
    return _launch(
        "reduce_scatter",
        axis,
        sent,
        lambda a: dist.reduce_scatter_single(
            result, pieces.flatten(0, 1), reduce_op, axis.group, a
        ),
        result,
        async_op,
        finish=lambda result: _deliver(result, out),
    )


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
    _check_dim("all_gather", tensor, dim)
    shape = (axis.size * tensor.shape[0], *tensor.shape[1:])
    _check_out("all_gather", out, tensor, shape)
    joined = _landing(out, tensor, shape)
    if axis.size == 1:
        joined.copy_(tensor)
    return _launch(
        "all_gather",
        axis,
        wire_bytes("all_gather", tensor.nbytes * axis.size, axis.size),
        lambda a: dist.all_gather_single(joined, tensor, axis.group, a),
        joined,
        async_op,
        finish=lambda joined: _deliver(_move_front_to(joined, dim, axis.size), out),
    )


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
    if send_counts is not None or recv_counts is not None:
        return _all_to_all_uneven(tensor, axis, send_counts, recv_counts, async_op)
    _check_divides("all_to_all", tensor, split_dim, axis)
    _check_dim("all_to_all", tensor, concat_dim)
    pieces = _split(tensor, split_dim, axis.size)
    arrived = pieces.clone() if axis.size == 1 else torch.empty_like(pieces)
    return _launch(
        "all_to_all",
        axis,
        _sent("all_to_all", tensor, axis),
        lambda a: _swap(arrived, pieces, axis, a),
        arrived,
        async_op,
        finish=lambda arrived: _join(arrived, concat_dim),
    )


def _all_to_all_uneven(
    tensor: Tensor,
    axis: Axis,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    async_op: bool,
) -> Tensor | Pending:
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
    tensor = tensor.detach().contiguous()
    arrived = tensor.new_empty(sum(recv_counts), *tensor.shape[1:])
    if axis.size == 1:
        arrived.copy_(tensor)
    row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    return _launch(
        "all_to_all",
        axis,
        row_bytes * (sum(send_counts) - send_counts[axis.rank]),
        lambda a: _swap(arrived, tensor, axis, a, list(recv_counts), list(send_counts)),
        arrived,
        async_op,
    )


def broadcast(
    tensor: Tensor,
    axis: Axis,
    src: int = 0,
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Give all ranks the tensor of rank `src`; the others' tensors lend only shape and dtype."""
    check_peer("broadcast", "src", src, axis)
    _check_out("broadcast", out, tensor, tensor.shape)
    result = _copy_into(out, tensor)
    return _launch(
        "broadcast",
        axis,
        _sent("broadcast", tensor, axis),
        lambda a: dist.broadcast(result, None, axis.group, a, group_src=src),
        result,
        async_op,
        finish=lambda result: _deliver(result, out),
    )


def scatter(
    tensor: Tensor, axis: Axis, src: int = 0, *, async_op: bool = False
) -> Tensor | Pending:
    """Give rank r the r-th of n slices of `src`'s tensor: [D, ...] -> [D/n, ...] along dim 0.

    Every rank passes a tensor of the whole shape; only that of `src` is read.
    """
    check_peer("scatter", "src", src, axis)
    _check_divides("scatter", tensor, 0, axis)
    pieces = _split(tensor, 0, axis.size)
    result = pieces[0].clone()
    source = list(pieces) if axis.rank == src else None
    return _launch(
        "scatter",
        axis,
        _sent("scatter", tensor, axis),
        lambda a: dist.scatter(result, source, None, axis.group, a, group_src=src),
        result,
        async_op,
    )


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
    return _launch(
        "gather",
        axis,
        wire_bytes("gather", tensor.nbytes * axis.size, axis.size),
        lambda a: dist.gather(tensor, pieces, None, axis.group, a, group_dst=dst),
        pieces,
        async_op,
        finish=lambda pieces: None if pieces is None else torch.cat(pieces),
    )


# ---------------------------------------------------------------------- one to one
def send(
    tensor: Tensor, axis: Axis, peer: int, *, async_op: bool = False, name: str = "send"
) -> Tensor | Pending:
    """Send `tensor` to rank `peer` of the axis, which must call `recv`. `name`: in the ledger."""
    check_peer("send", "peer", peer, axis)
    tensor = _staged(tensor.detach().contiguous(), axis)
    return _launch(
        name,
        axis,
        tensor.nbytes,
        lambda a: dist.isend(tensor, group=axis.group, group_dst=peer),
        tensor,
        async_op,
        peers=[peer],
    )


def recv(buffer: Tensor, axis: Axis, peer: int, *, async_op: bool = False) -> Tensor | Pending:
    """Fill `buffer` (contiguous, of the sender's shape and dtype) with what `peer` sends."""
    check_peer("recv", "peer", peer, axis)
    _check_buffer("recv", buffer)
    landing = _staged(buffer, axis)

    def call(_: bool) -> Any:
        work = dist.irecv(landing, group=axis.group, group_src=peer)
        return work if landing is buffer else _All([work], [(buffer, landing)])

    return _launch(
        "recv",
        axis,
        0,
        call,
        buffer,
        async_op,
        peers=[peer],
    )


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
        _check_buffer("exchange", buffer)
    if axis.size == 1:  # a ring of one
        for (tensor, _), buffer in zip(sends, buffers, strict=True):
            buffer.copy_(tensor)

    num_bytes = sum(tensor.nbytes for tensor, _ in sends)
    peers = list(dict.fromkeys(peer for _, peer in (*recvs, *sends)))
    call = lambda _: _post(sends, recvs, axis)  # noqa: E731
    return _launch("exchange", axis, num_bytes, call, buffers, async_op, peers=peers)


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
    if is_small or sent.device.type != "cpu" or "gloo" not in dist.get_backend(axis.group):
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
        for buffer, landing in self._landings:
            if landing is not buffer:
                buffer.copy_(landing)
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
    _launch("barrier", axis, 0, lambda a: dist.barrier(axis.group, a), None, False)


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
    with watchdog.begin("all_gather_object", axis, 0), device.paused():
        dist.all_gather_object(objects, obj, axis.group)
    return objects


# ---------------------------------------------------------------------- the one place that calls
def _launch(
    verb: str,
    axis: Axis,
    sent: int,
    call: Callable[[bool], Any],
    result: Any,
    async_op: bool,
    finish: Callable[[Any], Any] | None = None,
    peers: Sequence[int] | None = None,
) -> Any:
    """Start `call(async_op)`, enter it in the ledger, and return its result or a `Pending`.

    Of messages, `peers` are the ranks at the other end.
    """
    recorder, waiting, number = timeline.active(), None, None
    sent = device.counted(sent)
    if axis.size == 1:
        work = None
    else:
        waiting, number = watchdog.begin(verb, axis, sent, peers), next(_numbers)
        for observer in observers:
            observer.launched(number, verb, axis, sent, peers or (), result)
        start = time.monotonic()
        with waiting:  # a call that is not asynchronous returns when it is done
            work = call(async_op or recorder is not None)
        if recorder is None or work is None:
            pass
        elif "nccl" in dist.get_backend(axis.group):
            # To wait here would stop the GPU; when its kernels ran, the profiler tells.
            recorder.comm(verb, axis.name, sent, start, time.monotonic())
        else:
            work = _Watched(
                work, lambda t0, t1: recorder.comm(verb, axis.name, sent, t0, t1), start
            )
    pending = Pending(work, result, finish, waiting, number)
    return pending if async_op else pending.wait()


class _Watched:
    """A work whose end is noted when it ends, not when it is waited for."""

    def __init__(self, work: Any, note: Callable[[float, float], None], start: float) -> None:
        self._work, self._note, self._start = work, note, start
        self._noted = threading.Event()
        self._error: BaseException | None = None
        self._thread = None
        try:
            # Where the backend tells through a future when an operation is over ...
            ended = getattr(work, "ended", None) or work.get_future()
            ended.add_done_callback(lambda _: self._over())
        except (AttributeError, RuntimeError):
            # ... else (gloo's reduce-scatter, send and recv) it tells only those who wait.
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _over(self) -> None:
        # A backend with a clock of its own (the emulated link) knows when the wire was busy.
        start, end = getattr(self._work, "times", None) or (self._start, time.monotonic())
        self._note(start, end)
        self._noted.set()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._over()

    def wait(self) -> None:
        if self._thread is None:
            self._work.wait()
        self._noted.wait()  # so that the ledger is complete when `wait` returns
        if self._error is not None:
            raise self._error


# ---------------------------------------------------------------------- shapes
def check_op(verb: str, op: Op, tensor: Tensor) -> dist.ReduceOp:
    """Return torch's name of `op`; raise `ValueError` where it cannot reduce `tensor`."""
    if op not in _OPS:
        raise ValueError(f"{verb}: op={op!r} is not a reduction; use one of {', '.join(_OPS)}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{verb}: op='avg' of {tensor.dtype} is no whole number; use sum")
    return _OPS[op]


def _check_dim(verb: str, tensor: Tensor, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"{verb}: a tensor of shape {tuple(tensor.shape)} has no dim {dim}")


def _check_buffer(verb: str, buffer: Tensor) -> None:
    if not buffer.is_contiguous():
        raise ValueError(f"{verb}: a buffer to receive in must be contiguous")


def check_peer(verb: str, name: str, peer: int, axis: Axis) -> None:
    """Raise `ValueError` unless `peer` is a rank of `axis`."""
    if not 0 <= peer < axis.size:
        raise ValueError(
            f"{verb}: {name}={peer} is no rank of {axis.name}={axis.size}; use 0 to {axis.size - 1}"
        )


def _check_out(verb: str, out: Tensor | None, tensor: Tensor, shape: Sequence[int]) -> None:
    if out is None:
        return
    if out.shape != torch.Size(shape) or out.dtype != tensor.dtype:
        raise ValueError(
            f"{verb}: out= must be of shape {tuple(shape)} and {tensor.dtype}, "
            f"not {tuple(out.shape)} and {out.dtype}"
        )


def _sent(verb: str, whole: Tensor, axis: Axis) -> int:
    return wire_bytes(verb, whole.nbytes, axis.size)


@torch.no_grad()
def _combine(pieces: Tensor, op: Op, out: Tensor) -> Tensor:
    """[n, ...] -> [...], in the order of the ranks; returns `out`."""
    if op == "sum":
        return torch.sum(pieces, 0, dtype=pieces.dtype, out=out)  # small integers stay small
    return {"avg": torch.mean, "max": torch.amax, "min": torch.amin}[op](pieces, 0, out=out)


@torch.no_grad()
def _copy_into(out: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, `out` if it can be, with the values of `tensor`."""
    if out is None or not out.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return out if out is tensor else out.copy_(tensor)


def _landing(out: Tensor | None, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a contiguous tensor for a result to arrive in: `out` if it can be, else a new one."""
    return out if out is not None and out.is_contiguous() else like.new_empty(shape)


@torch.no_grad()
def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `out`, holding `result`, if there is one."""
    return result if out is None or out is result else out.copy_(result)


def _check_divides(verb: str, tensor: Tensor, dim: int, axis: Axis) -> None:
    _check_dim(verb, tensor, dim)
    length = tensor.shape[dim]
    if length % axis.size:
        below = length - length % axis.size
        raise ValueError(
            f"{verb}: {axis.name}={axis.size} does not divide dim {dim} of shape "
            f"{tuple(tensor.shape)}; pad it to {below + axis.size} or cut it to {below}"
        )


def _split(tensor: Tensor, dim: int, size: int) -> Tensor:
    """[..., D, ...] -> [n, ..., D/n, ...], contiguous: one slice after the other in memory."""
    return tensor.detach().unflatten(dim, (size, -1)).movedim(dim % tensor.ndim, 0).contiguous()


def _join(pieces: Tensor, dim: int) -> Tensor:
    """[n, ..., D, ...] -> [..., n D, ...]: the inverse of `_split`."""
    dim = dim % (pieces.ndim - 1)
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _move_front_to(joined: Tensor, dim: int, size: int) -> Tensor:
    """What was gathered along dim 0 is joined along `dim` instead: a copy unless that is 0."""
    if dim == 0 or joined.ndim <= 1:
        return joined
    return _join(joined.unflatten(0, (size, -1)), dim)
