"""Collectives from scratch: ring, trees, halving and doubling, from sends and receives alone.

Idea:   An all-reduce is a library call until one asks who sends what to whom. Here the answer is a
        plan (`minipar.comm.plans`), and this file runs it: every round is one
        `collectives.exchange`, so the ledger shows a call as the rounds it consists of.
Math:   A message of b bytes takes alpha + beta b seconds (Hockney 1994). With n ranks, S bytes on
        each, and lg = ceil(log2 n), an all-reduce costs the busiest rank:

        algorithm          rounds    messages   bytes sent        seconds
        ring               2(n-1) g  2(n-1) g   2 S (n-1)/n       2(n-1) alpha + 2 (n-1)/n S beta
        bidirectional      2(n-1) g  4(n-1) g   2 S (n-1)/n       the same; half the bytes where
                                                                  each neighbour has its own wire
        bruck              2 lg      2 lg *     2 S (n-1)/n       2 lg alpha + 2 (n-1)/n S beta
        halving_doubling   2 lg      2 lg       2 S (n-1)/n       the same, for n = 2^k; for others
                           +3        +2         +3/2 S            and p = 2^k < n the same with p,
                                                                  and 3 alpha + 2 S beta on top
        double_tree        2d+g-1    <= 4 g     <= 2 S            <= (2d+g-1) (alpha + 2 S/g beta)
        direct             1         n-1        S (n-1)           alpha + (n-1) S beta
        hierarchical       the sum of its three steps; across nodes only S / (ranks inside)

        (g chunks; d the depth of a tree, floor(log2 n); * one more in a round where a span wraps
        around; adding takes gamma per byte on top, S (n-1)/n of them, direct S (n-1).)
        Small tensors want few rounds, large ones few bytes: `tune` measures alpha and beta and
        says which wins where. `plans.seconds` computes the last column from the plans themselves.
Chunks: Messages above `chunk_bytes` are cut, so that adding one piece hides behind the transfer of
        the next: a round is posted as soon as what it sends is there, not when the last one ended.
Bits:   All ranks end with the same bits: each element is added up in one place, or in one order.
Costs you: Python between messages. Scratch memory of a few chunks per call.
Limits: Nothing else may exchange messages along an axis while a call runs on it. Run on gloo and on
        the emulated link; on NCCL it was never tried.
In torch: gloo's ring and NCCL's ring, tree and NVLS, chosen by NCCL's own alpha-beta table.
Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in
        MPICH"; Patarasuk & Yuan 2009; Sanders, Speck & Traeff 2009.
"""

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minipar.comm import collectives as comm
from minipar.comm import plans
from minipar.comm.collectives import Op, Pending
from minipar.comm.mesh import Axis
from minipar.comm.plans import Message, Plan, Round, Span, cut

CHUNK_BYTES = 4 << 20
"""Messages are cut to this size where the algorithm can work on pieces."""

IN_FLIGHT = 4
"""Rounds posted before the first of them has ended: more would cost scratch and hide no more."""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


# ---------------------------------------------------------------------- the verbs
def all_reduce(
    tensor: Tensor,
    axis: Axis,
    algorithm: "str | Tuning" = "ring",
    op: Op = "sum",
    *,
    chunk_bytes: int | None = CHUNK_BYTES,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over all ranks; each gets the result: [D, ...] -> [D, ...], any shape.

    `algorithm` is a key of `plans.ALL_REDUCE`, or a `Tuning` that picks one by size.
    ``chunk_bytes=None`` cuts nothing. Raises `ValueError` for an unknown algorithm or op.
    """
    if isinstance(algorithm, Tuning):
        algorithm = algorithm.best(tensor.nbytes)
    make = _pick("all_reduce", algorithm, plans.ALL_REDUCE)
    comm.check_op("all_reduce", op, tensor)

    def call() -> Tensor:
        data = _flat(tensor)
        plan = make(data.numel(), axis.rank, axis.size, _chunk(tensor, chunk_bytes))
        _execute(plan, data, axis, op)
        return _mean(data, op, axis.size).view(tensor.shape)

    return _start(call, [axis], async_op)


def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    algorithm: str = "ring",
    op: Op = "sum",
    *,
    chunk_bytes: int | None = CHUNK_BYTES,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over all ranks; rank r gets the r-th of n slices of dim 0: [D, ...] -> [D/n, ...].

    Where n does not divide D, the first ranks get one row more. Rounds and bytes: those of the
    first half of an all-reduce; "direct" sends each slice to its rank in one round.
    """
    make = _pick("reduce_scatter", algorithm, plans.ALL_GATHER)
    comm.check_op("reduce_scatter", op, tensor)
    _check_rows("reduce_scatter", tensor)

    def call() -> Tensor:
        data = _flat(tensor)
        rows = [hi - lo for lo, hi in cut((0, tensor.shape[0]), axis.size)]
        parts = _spans(rows, tensor)
        plan = plans.dual(make(parts, axis.rank, axis.size, _chunk(tensor, chunk_bytes)))
        _execute(plan, data, axis, op)
        mine = data[slice(*parts[axis.rank])].clone()  # so that the rest can be freed
        return _mean(mine, op, axis.size).view(rows[axis.rank], *tensor.shape[1:])

    return _start(call, [axis], async_op)


def all_gather(
    tensor: Tensor,
    axis: Axis,
    algorithm: str = "ring",
    *,
    counts: Sequence[int] | None = None,
    chunk_bytes: int | None = CHUNK_BYTES,
    async_op: bool = False,
) -> Tensor | Pending:
    """Join the tensors of all ranks along dim 0, in rank order: [D, ...] -> [n D, ...].

    `counts` are the rows of every rank where they differ. Rounds and bytes: those of the second
    half of an all-reduce.
    """
    make = _pick("all_gather", algorithm, plans.ALL_GATHER)
    _check_rows("all_gather", tensor)
    rows = list(counts) if counts is not None else [tensor.shape[0]] * axis.size
    if len(rows) != axis.size or rows[axis.rank] != tensor.shape[0]:
        raise ValueError(
            f"all_gather over {axis.name}={axis.size}: counts={rows} must name the rows of every "
            f"rank, and {tensor.shape[0]} for rank {axis.rank}"
        )

    def call() -> Tensor:
        parts = _spans(rows, tensor)
        data = tensor.new_empty(parts[-1][1])
        data[slice(*parts[axis.rank])] = tensor.detach().reshape(-1)
        _execute(make(parts, axis.rank, axis.size, _chunk(tensor, chunk_bytes)), data, axis)
        return data.view(sum(rows), *tensor.shape[1:])

    return _start(call, [axis], async_op)


def broadcast(
    tensor: Tensor,
    axis: Axis,
    src: int = 0,
    algorithm: str = "tree",
    *,
    chunk_bytes: int | None = CHUNK_BYTES,
    async_op: bool = False,
) -> Tensor | Pending:
    """Give all ranks the tensor of rank `src`; the others' tensors lend only shape and dtype.

    "tree": d + g - 1 rounds in g chunks; a rank sends S bytes to each of its 0 to 2 children.
    "scatter_ring": n rounds; `src` sends 2 S (n-1)/n, no rank more, and nothing has to be cut.
    """
    make = _pick("broadcast", algorithm, plans.BROADCAST)
    comm.check_peer("broadcast", "src", src, axis)

    def call() -> Tensor:
        data = _flat(tensor)
        plan = make(src, data.numel(), axis.rank, axis.size, _chunk(tensor, chunk_bytes))
        _execute(plan, data, axis)
        return data.view(tensor.shape)

    return _start(call, [axis], async_op)


def all_to_all(
    tensor: Tensor,
    axis: Axis,
    *,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Send the r-th slice of dim 0 to rank r, and join what arrives: n-1 rounds of pairs.

    With counts, ``send_counts[r]`` rows go to rank r and ``recv_counts[r]`` come from it. A rank
    sends all of its S bytes but its own slice. Raises `ValueError` where n does not divide dim 0.
    """
    _check_rows("all_to_all", tensor)
    n, length = axis.size, tensor.shape[0]
    if (send_counts is None) != (recv_counts is None):
        raise ValueError("all_to_all with counts needs both send_counts and recv_counts")
    if send_counts is None and length % n:
        below = length - length % n
        raise ValueError(
            f"all_to_all: {axis.name}={n} does not divide dim 0 of shape {tuple(tensor.shape)}; "
            f"pad it to {below + n}, cut it to {below}, or give counts"
        )
    sent_rows = list(send_counts or [length // n] * n)
    received_rows = list(recv_counts or [length // n] * n)
    if len(sent_rows) != n or len(received_rows) != n or sum(sent_rows) != length:
        raise ValueError(
            f"all_to_all over {axis.name}={n}: send_counts={sent_rows} and recv_counts="
            f"{received_rows} need {n} numbers each, the first adding up to {length} rows"
        )

    def call() -> Tensor:
        sent, received = _spans(sent_rows, tensor), _spans(received_rows, tensor)
        source = tensor.detach().reshape(-1)
        data = source.new_empty(received[-1][1])
        data[slice(*received[axis.rank])] = source[slice(*sent[axis.rank])]
        _execute(plans.pairwise(sent, received, axis.rank, n), data, axis, source=source)
        return data.view(sum(received_rows), *tensor.shape[1:])

    return _start(call, [axis], async_op)


def hierarchical_all_reduce(
    tensor: Tensor,
    inner: Axis,
    across: Axis,
    algorithm: str = "ring",
    op: Op = "sum",
    *,
    chunk_bytes: int | None = CHUNK_BYTES,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over both axes: reduce-scatter inside a node, all-reduce across, all-gather inside.

    With m ranks inside and k nodes, each rank sends 2 S (m-1)/m inside, where links are fast, and
    only 2 S/m (k-1)/k across. `algorithm` is that of the step across; inside it is the ring.
    """
    _pick("all_reduce", algorithm, plans.ALL_REDUCE)
    comm.check_op("all_reduce", op, tensor)
    part = "sum" if op == "avg" else op
    options: dict[str, Any] = {"chunk_bytes": chunk_bytes}

    def call() -> Tensor:
        whole = tensor.detach().reshape(-1)
        counts = [hi - lo for lo, hi in cut((0, whole.numel()), inner.size)]
        mine = reduce_scatter(whole, inner, "ring", part, **options)
        mine = all_reduce(mine, across, algorithm, part, **options)
        data = all_gather(mine, inner, "ring", counts=counts, **options)
        return _mean(data, op, inner.size * across.size).view(tensor.shape)

    return _start(call, [inner, across], async_op)


# ---------------------------------------------------------------------- running a plan
@torch.no_grad()
def _execute(
    plan: Plan, data: Tensor, axis: Axis, op: Op = "sum", source: Tensor | None = None
) -> None:
    """Carry out this rank's `plan` on the flat buffer `data`; sends read from `source` if given."""
    in_flight: deque[_Posted] = deque()
    scratch: dict[int, list[Tensor]] = {}  # buffers to use again, by size
    for step in plan:
        if not step.sends and not step.recvs:
            continue
        while in_flight and (
            len(in_flight) == IN_FLIGHT
            or any(_conflict(posted.step, step, source is None) for posted in in_flight)
        ):
            in_flight.popleft().finish(data, op, scratch)
        in_flight.append(_Posted(step, data, data if source is None else source, axis, scratch))
    while in_flight:
        in_flight.popleft().finish(data, op, scratch)


class _Posted:
    """A round that is on its way."""

    def __init__(
        self, step: Round, data: Tensor, source: Tensor, axis: Axis, scratch: dict[int, list]
    ) -> None:
        self.step = step
        self.staged: list[tuple[Message, Tensor]] = []  # what has to be added or moved in the end
        sends = [(source[m.lo : m.hi], m.peer) for m in step.sends if m.peer != axis.rank]
        recvs = []
        for message in step.recvs:
            buffer = data[message.lo : message.hi]
            if message.add or (source is data and _overlap([message], step.sends)):
                free = scratch.setdefault(buffer.numel(), [])
                buffer = free.pop() if free else torch.empty_like(buffer)
                self.staged.append((message, buffer))
            if message.peer == axis.rank:
                buffer.copy_(source[message.lo : message.hi])
            else:
                recvs.append((buffer, message.peer))
        self._pending = comm.exchange(sends, recvs, axis, async_op=True)

    def finish(self, data: Tensor, op: Op, scratch: dict[int, list[Tensor]]) -> None:
        """Wait, and add what came to what is there."""
        self._pending.wait()
        for message, buffer in self.staged:
            target = data[message.lo : message.hi]
            if message.add:
                _COMBINE[op](target, buffer, out=target)
            else:
                target.copy_(buffer)
            scratch[buffer.numel()].append(buffer)


def _overlap(some: Sequence[Message], others: Sequence[Message]) -> bool:
    return any(a.lo < b.hi and b.lo < a.hi for a in some for b in others)


def _conflict(earlier: Round, later: Round, in_place: bool) -> bool:
    """Whether `later` has to wait: it sends or overwrites what comes, or overwrites what leaves."""
    if not in_place:
        return _overlap(earlier.recvs, later.recvs)
    return (
        _overlap(earlier.recvs, later.sends)
        or _overlap(earlier.recvs, later.recvs)
        or _overlap(earlier.sends, later.recvs)
    )


# ---------------------------------------------------------------------- calls at the same time
_ends: dict[str, threading.Event] = {}
"""Per process group: the end of the latest call that runs, or ran, in a thread."""


class _Call:
    """A call in a thread of its own, which has to post a round whenever the last one ends.

    It first waits for the call before it along the same group: messages have no names, so the
    n-th that one rank sends must be the n-th that the other expects.
    """

    def __init__(self, function: Callable[[], Any], before: list[threading.Event]) -> None:
        self.done, self.result = threading.Event(), None
        self._error: BaseException | None = None
        threading.Thread(target=self._work, args=(function, before), daemon=True).start()

    def _work(self, function: Callable[[], Any], before: list[threading.Event]) -> None:
        try:
            for end in before:
                end.wait()
            self.result = function()
        except BaseException as error:  # the caller that waits must hear of it
            self._error = error
        self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self._error is not None:
            raise self._error


class _Inside(threading.local):
    """Whether this thread is that of a call: its steps must not wait for the end of the call."""

    running = False


_inside = _Inside()


def _start(function: Callable[[], Tensor], axes: Sequence[Axis], async_op: bool) -> Any:
    """Call now, after what still runs along the axes; or return a `Pending` at once."""
    groups = [axis.group.group_name for axis in axes if axis.group is not None]
    before = [_ends[name] for name in groups if name in _ends]
    if not async_op:
        for end in before if not _inside.running else ():
            end.wait()
        return function()

    def inside() -> Tensor:
        _inside.running = True
        return function()

    call = _Call(inside, before)
    _ends.update(dict.fromkeys(groups, call.done))
    return Pending(call, None, lambda _: call.result)


# ---------------------------------------------------------------------- which algorithm when
@dataclass(frozen=True)
class Tuning:
    """What an axis of `size` ranks costs, in seconds: `alpha` per message, `beta` per byte sent,
    `gamma` per byte added up.

    `sharing` is the part of the bytes to several peers that queues: 1 where all go through one
    port, 1/(n-1) where each peer has a wire of its own.
    """

    size: int
    alpha: float
    beta: float
    gamma: float = 0.0
    sharing: float = 1.0

    def seconds(self, algorithm: str, num_bytes: int) -> float:
        """Return the predicted time of an all-reduce."""
        make = _pick("all_reduce", algorithm, plans.ALL_REDUCE)
        every = [make(num_bytes, rank, self.size, CHUNK_BYTES) for rank in range(self.size)]
        return plans.seconds(every, 1, self.alpha, self.beta, self.gamma, self.sharing)

    @functools.cache  # noqa: B019 (a Tuning is small and lives as long as its axis)
    def best(self, num_bytes: int) -> str:
        """Return the algorithm with the smallest predicted time, the same on all ranks."""
        return min(plans.ALL_REDUCE, key=lambda name: self.seconds(name, num_bytes))


def tune(
    axis: Axis,
    sizes: Sequence[int] = (1_000, 10_000, 100_000, 1_000_000),
    *,
    rounds: int = 5,
    device: torch.device | str = "cpu",
) -> Tuning:
    """Measure an axis by messages of `sizes` bytes round its ring. A collective: all ranks call it.

    Takes the best of `rounds` for each size and the slowest rank, then the line through them by
    least squares of the relative error; rank 0's numbers count for all, so that all choose alike.
    """
    if axis.size == 1:
        return Tuning(1, 0.0, 0.0)
    if len(set(sizes)) < 2 or min(sizes) < 1 or rounds < 1:
        raise ValueError(f"tune: sizes={tuple(sizes)} needs two sizes above 0; rounds={rounds}, 1")
    left, right = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    others = [peer for peer in range(axis.size) if peer != axis.rank]
    ring = [_measure(axis, [right], [left], size, rounds, device) for size in sizes]
    everybody = _measure(axis, others, others, max(sizes), rounds, device)
    adding = _measure_adding(max(sizes), rounds, device)
    times = torch.tensor([*ring, everybody, adding], dtype=torch.float64, device=device)
    *ring, everybody, adding = comm.all_reduce(times, axis, op="max").tolist()
    alpha, beta = fit(sizes, ring)
    load = (everybody - alpha) / (beta * max(sizes))  # in messages, 1 to n-1
    sharing = min(max(load / (axis.size - 1), 1 / (axis.size - 1)), 1.0)
    found = [alpha, beta, adding / max(sizes), sharing]
    agreed = comm.broadcast(torch.tensor(found, dtype=torch.float64, device=device), axis)
    return Tuning(axis.size, *agreed.tolist())


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the alpha and beta of ``seconds = alpha + beta sizes``, by least squares.

    Errors count relative to the time, or the largest size would be all that matters.
    """
    times = torch.tensor(seconds, dtype=torch.float64)[:, None]
    rows = torch.tensor([[1.0, size] for size in sizes], dtype=torch.float64) / times
    alpha, beta = torch.linalg.lstsq(rows, torch.ones_like(times)).solution.flatten().tolist()
    return max(alpha, 1e-9), max(beta, 1e-15)  # noise must not make a message free


def _measure(
    axis: Axis, to: list[int], source: list[int], num_bytes: int, rounds: int, device: Any
) -> float:
    """Seconds of the fastest exchange with these peers; the first is for making connections."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    buffers = [torch.empty_like(sent) for _ in source]
    best = float("inf")
    for turn in range(rounds + 1):
        comm.barrier(axis)
        start = time.perf_counter()
        comm.exchange([(sent, peer) for peer in to], list(zip(buffers, source, strict=True)), axis)
        if sent.device.type != "cpu":
            torch.accelerator.synchronize(sent.device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return best


def _measure_adding(num_bytes: int, rounds: int, device: Any) -> float:
    """Seconds to add up floats of so many bytes."""
    total = torch.zeros(max(1, num_bytes // 4), device=device)
    other, best = torch.ones_like(total), float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        total.add_(other)
        if total.device.type != "cpu":
            torch.accelerator.synchronize(total.device)
        best = min(best, time.perf_counter() - start)
    return best


# ---------------------------------------------------------------------- shapes
def _pick(verb: str, algorithm: str, table: dict[str, Callable[..., Plan]]) -> Callable[..., Plan]:
    if algorithm not in table:
        raise ValueError(f"{verb}: algorithm={algorithm!r} is unknown; use one of {list(table)}")
    return table[algorithm]


def _check_rows(verb: str, tensor: Tensor) -> None:
    if tensor.ndim == 0:
        raise ValueError(f"{verb}: a number has no rows; give it a dim with tensor[None]")


def _flat(tensor: Tensor) -> Tensor:
    """A copy of the caller's tensor, in one row."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _mean(data: Tensor, op: Op, size: int) -> Tensor:
    return data.div_(size) if op == "avg" else data


def _chunk(tensor: Tensor, chunk_bytes: int | None) -> int | None:
    """`chunk_bytes` in elements."""
    if chunk_bytes is None:
        return None
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes} must be 1 or more, or None to cut nothing")
    return max(1, chunk_bytes // tensor.element_size())


def _spans(rows: Sequence[int], tensor: Tensor) -> list[Span]:
    """Where the rows of each rank lie in a flat buffer."""
    width, spans, lo = math.prod(tensor.shape[1:]), [], 0
    for count in rows:
        spans.append((lo, lo + count * width))
        lo += count * width
    return spans
