"""All-reduce from scratch: ring, trees, halving and doubling, from sends and receives alone.

Idea:   An all-reduce is a library call until one asks who sends what to whom. The answer is a plan
        (`minipar.comm.plans`). This file runs plans: every round is one `collectives.exchange`, so
        the ledger shows a call as its rounds.
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
        around. Adding takes gamma per byte on top: S (n-1)/n bytes, for direct S (n-1).)
        Small tensors want few rounds, large ones few bytes. `tuning.tune` measures alpha and beta;
        `plans.seconds` computes the last column from the plans.
Chunks: Messages above `plans.CHUNK_BYTES` are cut, so that adding one chunk hides behind the
        transfer of the next. A round is posted as soon as the data that it sends is there.
Bits:   All ranks end with the same bits: each element is added up in one place, or in one order.
Costs you: Python between messages. Scratch memory of a few chunks per call.
Limits: Nothing else may exchange messages along an axis while a call runs on it. Run on gloo and on
        the emulated link; never tried on NCCL.
In torch: gloo's ring and NCCL's ring, tree and NVLS, chosen by NCCL's own alpha-beta table.
Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in
        MPICH"; Patarasuk & Yuan 2009; Sanders, Speck & Traeff 2009.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minipar.comm import plans
from minipar.comm.collectives import Op, check_op, exchange
from minipar.comm.mesh import Axis
from minipar.comm.plans import CHUNK_BYTES, Message, Plan, Round, cut
from minipar.comm.tuning import Tuning

IN_FLIGHT = 4
"""Rounds posted before the first of them has ended. More would cost scratch and hide no more."""

Scratch = dict[int, list[Tensor]]
"""Buffers to use again, by their number of elements."""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def all_reduce(
    tensor: Tensor, axis: Axis, algorithm: str | Tuning = "ring", op: Op = "sum"
) -> Tensor:
    """Combine over all ranks; each gets the result: [D, ...] -> [D, ...], any shape.

    `algorithm` is a key of `plans.ALL_REDUCE`, or a `Tuning` that picks one by size.
    Raises `ValueError` for an unknown algorithm or op.
    """
    if isinstance(algorithm, Tuning):
        algorithm = algorithm.best(tensor.nbytes)
    make = plans.pick(algorithm)
    check_op("all_reduce", op, tensor)
    data = _flat(tensor)
    execute(make(data.numel(), axis.rank, axis.size, _chunk(data)), data, axis, op)
    return _mean(data, op, axis.size).view(tensor.shape)


def hierarchical_all_reduce(
    tensor: Tensor, inner: Axis, across: Axis, algorithm: str = "ring", op: Op = "sum"
) -> Tensor:
    """Combine over both axes: reduce-scatter inside a node, all-reduce across, all-gather inside.

    With m ranks inside and k nodes, each rank sends 2 S (m-1)/m inside, where links are fast, and
    only 2 S/m (k-1)/k across. `algorithm` names the step across; the step inside is the ring.
    """
    plans.pick(algorithm)
    check_op("all_reduce", op, tensor)
    data, part = _flat(tensor), "sum" if op == "avg" else op
    parts = cut((0, data.numel()), inner.size)
    gather = plans.ring_gather(parts, inner.rank, inner.size, _chunk(data))
    execute(plans.dual(gather), data, inner, part)
    mine = slice(*parts[inner.rank])
    data[mine] = all_reduce(data[mine], across, algorithm, part)
    execute(gather, data, inner)
    return _mean(data, op, inner.size * across.size).view(tensor.shape)


# ---------------------------------------------------------------------- running a plan
@torch.no_grad()
def execute(plan: Plan, data: Tensor, axis: Axis, op: Op = "sum") -> None:
    """Carry out this rank's `plan` on the flat buffer `data`."""
    in_flight: deque[_Posted] = deque()
    scratch: Scratch = {}
    for step in plan:
        if not step.sends and not step.recvs:
            continue
        while in_flight and (
            len(in_flight) == IN_FLIGHT or any(_conflict(posted.step, step) for posted in in_flight)
        ):
            in_flight.popleft().finish(op, scratch)
        in_flight.append(_Posted(step, data, axis, scratch))
    while in_flight:
        in_flight.popleft().finish(op, scratch)


class _Posted:
    """A round that is on its way."""

    def __init__(self, step: Round, data: Tensor, axis: Axis, scratch: Scratch) -> None:
        self.step, self.data = step, data
        self.staged: list[tuple[Message, Tensor]] = []  # to be added or moved in the end
        sends = [(data[m.lo : m.hi], m.peer) for m in step.sends if m.peer != axis.rank]
        recvs = []
        for message in step.recvs:
            buffer = data[message.lo : message.hi]
            if message.add or _overlap([message], step.sends):
                free = scratch.setdefault(buffer.numel(), [])
                buffer = free.pop() if free else torch.empty_like(buffer)
                self.staged.append((message, buffer))
            if message.peer == axis.rank:
                buffer.copy_(data[message.lo : message.hi])
            else:
                recvs.append((buffer, message.peer))
        self.pending = exchange(sends, recvs, axis, async_op=True)

    def finish(self, op: Op, scratch: Scratch) -> None:
        """Wait, and add the received elements to the rank's own."""
        self.pending.wait()
        for message, buffer in self.staged:
            target = self.data[message.lo : message.hi]
            if message.add:
                _COMBINE[op](target, buffer, out=target)
            else:
                target.copy_(buffer)
            scratch[buffer.numel()].append(buffer)


def _overlap(some: Sequence[Message], others: Sequence[Message]) -> bool:
    return any(a.lo < b.hi and b.lo < a.hi for a in some for b in others)


def _conflict(earlier: Round, later: Round) -> bool:
    """True if `later` must wait: it uses elements that arrive, or overwrites some that leave."""
    return (
        _overlap(earlier.recvs, later.sends)
        or _overlap(earlier.recvs, later.recvs)
        or _overlap(earlier.sends, later.recvs)
    )


# ---------------------------------------------------------------------- flat buffers
def _flat(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in one row."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _mean(data: Tensor, op: Op, size: int) -> Tensor:
    return data.div_(size) if op == "avg" else data


def _chunk(data: Tensor) -> int:
    """Return `CHUNK_BYTES` in elements."""
    return max(1, CHUNK_BYTES // data.element_size())
