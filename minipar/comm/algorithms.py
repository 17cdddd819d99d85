"""Collectives from scratch: ring, trees, halving and doubling, from sends and receives alone.

Idea:   An all-reduce is a library call until one asks who sends what to whom. Here the answer is a
        plan (`minipar.comm.plans`), and here it is run: every round is one
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
        Small tensors want few rounds, large ones few bytes: `tuning.tune` measures alpha and beta
        and says which wins where; `plans.seconds` computes the last column from the plans.
Chunks: Messages above `plans.CHUNK_BYTES` are cut, so that adding one piece hides behind the
        transfer of the next: a round is posted as soon as what it sends is there, not when the last
        one ended.
Bits:   All ranks end with the same bits: each element is added up in one place, or in one order.
Costs you: Python between messages. Scratch memory of a few chunks per call.
Limits: Nothing else may exchange messages along an axis while a call runs on it. Run on gloo and on
        the emulated link; on NCCL it was never tried.
In torch: gloo's ring and NCCL's ring, tree and NVLS, chosen by NCCL's own alpha-beta table.
Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in
        MPICH"; Patarasuk & Yuan 2009; Sanders, Speck & Traeff 2009.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm import plans
from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, check_counts, check_divides, check_op, check_peer
from minipar.comm.mesh import Axis
from minipar.comm.plans import CHUNK_BYTES, Span, cut
from minipar.comm.rounds import execute, start
from minipar.comm.tuning import Tuning


# ---------------------------------------------------------------------- the verbs
def all_reduce(
    tensor: Tensor,
    axis: Axis,
    algorithm: str | Tuning = "ring",
    op: Op = "sum",
    *,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over all ranks; each gets the result: [D, ...] -> [D, ...], any shape.

    `algorithm` is a key of `plans.ALL_REDUCE`, or a `Tuning` that picks one by size.
    Raises `ValueError` for an unknown algorithm or op.
    """
    if isinstance(algorithm, Tuning):
        algorithm = algorithm.best(tensor.nbytes)
    make = plans.pick("all_reduce", algorithm, plans.ALL_REDUCE)
    check_op("all_reduce", op, tensor)
    data = _flat(tensor)

    def call() -> Tensor:
        plan = make(data.numel(), axis.rank, axis.size, _chunk(tensor))
        execute(plan, data, axis, op)
        return _mean(data, op, axis.size).view(tensor.shape)

    return start(call, [axis], async_op, data)


def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    algorithm: str = "ring",
    op: Op = "sum",
    *,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over all ranks; rank r gets the r-th of n slices of dim 0: [D, ...] -> [D/n, ...].

    Where n does not divide D, the first ranks get one row more. Rounds and bytes: those of the
    first half of an all-reduce; "direct" sends each slice to its rank in one round.
    """
    make = plans.pick("reduce_scatter", algorithm, plans.ALL_GATHER)
    check_op("reduce_scatter", op, tensor)
    _check_rows("reduce_scatter", tensor)
    data = _flat(tensor)

    def call() -> Tensor:
        rows = [hi - lo for lo, hi in cut((0, tensor.shape[0]), axis.size)]
        parts = _spans(rows, tensor)
        plan = plans.dual(make(parts, axis.rank, axis.size, _chunk(tensor)))
        execute(plan, data, axis, op)
        mine = data[slice(*parts[axis.rank])].clone()  # so that the rest can be freed
        return _mean(mine, op, axis.size).view(rows[axis.rank], *tensor.shape[1:])

    return start(call, [axis], async_op, data)


def all_gather(
    tensor: Tensor,
    axis: Axis,
    algorithm: str = "ring",
    *,
    counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    """Join the tensors of all ranks along dim 0, in rank order: [D, ...] -> [n D, ...].

    `counts` are the rows of every rank where they differ. Rounds and bytes: those of the second
    half of an all-reduce.
    """
    make = plans.pick("all_gather", algorithm, plans.ALL_GATHER)
    _check_rows("all_gather", tensor)
    rows = list(counts) if counts is not None else [tensor.shape[0]] * axis.size
    if len(rows) != axis.size or rows[axis.rank] != tensor.shape[0]:
        raise ValueError(
            f"all_gather over {axis.name}={axis.size}: counts={rows} must name the rows of every "
            f"rank, and {tensor.shape[0]} for rank {axis.rank}"
        )
    parts = _spans(rows, tensor)
    data = tensor.new_empty(parts[-1][1])
    data[slice(*parts[axis.rank])] = tensor.detach().reshape(-1)

    def call() -> Tensor:
        execute(make(parts, axis.rank, axis.size, _chunk(tensor)), data, axis)
        return data.view(sum(rows), *tensor.shape[1:])

    return start(call, [axis], async_op, data)


def broadcast(
    tensor: Tensor, axis: Axis, src: int = 0, *, async_op: bool = False
) -> Tensor | Pending:
    """Give all ranks the tensor of rank `src`; the others' tensors lend only shape and dtype.

    Down a tree of depth d: d + g - 1 rounds in g chunks; a rank sends S bytes to each of its 0 to 2
    children.
    """
    check_peer("broadcast", "src", src, axis)
    data = _flat(tensor)

    def call() -> Tensor:
        plan = plans.tree_from(src, data.numel(), axis.rank, axis.size, _chunk(tensor))
        execute(plan, data, axis)
        return data.view(tensor.shape)

    return start(call, [axis], async_op, data)


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
    if send_counts is None and recv_counts is None:
        check_divides("all_to_all", tensor, 0, axis)
        send_counts = recv_counts = [length // n] * n
    check_counts(tensor, axis, send_counts, recv_counts)
    source = _given(tensor, async_op)

    def call() -> Tensor:
        sent, received = _spans(send_counts, tensor), _spans(recv_counts, tensor)
        data = source.new_empty(received[-1][1])
        data[slice(*received[axis.rank])] = source[slice(*sent[axis.rank])]
        execute(plans.pairwise(sent, received, axis.rank, n), data, axis, source=source)
        return data.view(sum(recv_counts), *tensor.shape[1:])

    return start(call, [axis], async_op, source)


def hierarchical_all_reduce(
    tensor: Tensor,
    inner: Axis,
    across: Axis,
    algorithm: str = "ring",
    op: Op = "sum",
    *,
    async_op: bool = False,
) -> Tensor | Pending:
    """Combine over both axes: reduce-scatter inside a node, all-reduce across, all-gather inside.

    With m ranks inside and k nodes, each rank sends 2 S (m-1)/m inside, where links are fast, and
    only 2 S/m (k-1)/k across. `algorithm` is that of the step across; inside it is the ring.
    """
    plans.pick("all_reduce", algorithm, plans.ALL_REDUCE)
    check_op("all_reduce", op, tensor)
    part = "sum" if op == "avg" else op
    whole = _given(tensor, async_op)

    def call() -> Tensor:
        counts = [hi - lo for lo, hi in cut((0, whole.numel()), inner.size)]
        mine = reduce_scatter(whole, inner, "ring", part)
        mine = all_reduce(mine, across, algorithm, part)
        data = all_gather(mine, inner, "ring", counts=counts)
        return _mean(data, op, inner.size * across.size).view(tensor.shape)

    return start(call, [inner, across], async_op, whole)


# ---------------------------------------------------------------------- shapes
def _check_rows(verb: str, tensor: Tensor) -> None:
    if tensor.ndim == 0:
        raise ValueError(f"{verb}: a number has no rows; give it a dim with tensor[None]")


def _flat(tensor: Tensor) -> Tensor:
    """A copy of the caller's tensor, in one row."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _given(tensor: Tensor, async_op: bool) -> Tensor:
    """The caller's tensor in one row; a copy for a thread, as the caller may soon overwrite it."""
    return _flat(tensor) if async_op else tensor.detach().reshape(-1)


def _mean(data: Tensor, op: Op, size: int) -> Tensor:
    return data.div_(size) if op == "avg" else data


def _chunk(tensor: Tensor) -> int:
    """`CHUNK_BYTES` in elements."""
    return max(1, CHUNK_BYTES // tensor.element_size())


def _spans(rows: Sequence[int], tensor: Tensor) -> list[Span]:
    """Where the rows of each rank lie in a flat buffer."""
    width, spans, lo = math.prod(tensor.shape[1:]), [], 0
    for count in rows:
        spans.append((lo, lo + count * width))
        lo += count * width
    return spans
