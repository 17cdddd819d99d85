"""Every verb against what one process computes; the ledger against the formulas.

A rank can make the inputs of all ranks, so that it knows itself what it must get.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import collectives as comm
from minipar.comm import gloo
from minipar.comm.collectives import Pending, wire_bytes
from minipar.comm.mesh import Axis, Mesh
from minipar.observe import timeline
from minipar.ranks import worker
from tests.comm.same import equal, laid_out, launched_over, numbers
from tests.on_ranks import on_ranks

SHAPE = (12, 24, 36)  # 2, 3 and 4 divide every dim, and no two dims are alike
REDUCTIONS = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0) / len(stack),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def axis_of(size: int) -> Axis:
    """An axis of 2 of 4 ranks, whose rank 1 is rank 2 or 3 of the world; or one of all ranks.

    Mutants: a root or peer that is a global rank.
    """
    return Mesh(dp=2, tp=2).dp if size == 2 else Mesh(dp=size).dp


WORLD = {2: 4, 3: 3}  # ranks that a test with an axis of 2 or 3 needs

Case = tuple[Callable[..., Tensor | Pending], tuple, Tensor | None, float]


def cases(x: Tensor, xs: list[Tensor], axis: Axis) -> Iterator[Case]:
    """Yield (verb, arguments, expected, bytes sent); expected is None where a result means nothing.

    The bytes are those of a ring, S of them on every rank.
    """
    n, r, s = axis.size, axis.rank, x.nbytes
    part = s * (n - 1) / n
    for op in (op for op in REDUCTIONS if op != "avg" or x.is_floating_point()):
        reduced = REDUCTIONS[op](torch.stack(xs))
        yield comm.all_reduce, (op,), reduced, 2 * part
        for dim in (0, 1, -1, -3) if op in ("sum", "avg") else ():
            yield comm.reduce_scatter, (dim, op), reduced.chunk(n, dim)[r], part
    for dst in range(n):
        yield comm.reduce, (dst,), sum(xs) if r == dst else None, s
    for dim in 0, 1, 2, -1, -2, -3:
        yield comm.all_gather, (dim,), torch.cat(xs, dim), s * (n - 1)
    for split, concat in itertools.product([0, 1, -1], [0, 1, -1]):
        pieces = [other.chunk(n, split)[r] for other in xs]
        yield comm.all_to_all, (split, concat), torch.cat(pieces, concat), part
    for root in range(n):
        yield comm.broadcast, (root,), xs[root], s
        yield comm.scatter, (root,), xs[root].chunk(n)[r], part
        yield comm.gather, (root,), torch.cat(xs) if r == root else None, s * (n - 1)


def check_case(case: Case, x: Tensor, axis: Axis, async_op: bool) -> None:
    verb, args, expected, _ = case
    before, async_op = x.clone(), async_op and verb not in (comm.reduce, comm.scatter, comm.gather)
    result = verb(x, axis, *args, **({"async_op": True} if async_op else {}))
    if async_op:
        assert isinstance(result, Pending), case
        pending, result = result, result.wait()
        assert pending.wait() is result, case  # finished only once
    if expected is not None:
        assert result.dtype == expected.dtype, case
        equal(result, expected)
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), case
    elif verb is comm.gather:
        assert result is None
    assert result is None or not result.requires_grad, case  # a copy to autograd would be wrong
    equal(x, before)


def check_verbs(size: int, dtype: torch.dtype, how: str) -> None:
    axis = axis_of(size)
    xs = numbers(axis, SHAPE, dtype)
    x = laid_out(xs[axis.rank], axis.rank).requires_grad_(dtype.is_floating_point)
    for case in cases(x, xs, axis):
        with timeline.record() if "recorded" in how else nullcontext() as ledger:
            check_case(case, x, axis, async_op="async" in how)
        if ledger is not None:
            found = [(s.name, s.axis, s.num_bytes, s.rank) for s in ledger]
            assert found == [(case[0].__name__, "dp", case[3], dist.get_rank())], case


@pytest.mark.parametrize("size", [2, 3])
def test_every_verb_equals_one_process(ranks, size):
    """Catches: a wrong dim, root or order; an input reduced in place; layouts taken for equal; 2S
    bytes for an all-reduce, a shard taken for the whole; results that have a gradient."""
    pool = ranks(WORLD[size])
    for how in "plain", "async", "recorded", "recorded async":
        pool.run(check_verbs, size, torch.float32, how)
    pool.run(check_verbs, size, torch.bfloat16, "async")
    pool.run(check_verbs, size, torch.int64, "plain")


@pytest.mark.parametrize("size", [2, 3])
def test_odd_shapes_uneven_counts_and_peers(ranks, size):
    ranks(WORLD[size]).run(check_small_shapes, size)
    ranks(WORLD[size]).run(check_uneven, size)
    ranks(WORLD[size]).run(check_peers, size)


def check_small_shapes(size: int) -> None:
    axis = axis_of(size)
    n, r = axis.size, axis.rank
    number = torch.tensor(float(r))
    equal(comm.all_gather(number, axis), torch.arange(float(n)))
    equal(comm.all_reduce(number, axis), torch.tensor(n * (n - 1) / 2))
    equal(comm.reduce_scatter(torch.arange(float(n)), axis), torch.tensor([float(n * r)]))
    equal(comm.all_to_all(torch.arange(n) + 10 * r, axis), 10 * torch.arange(n) + r)
    assert comm.all_gather(torch.empty(0, 3), axis, 1).shape == (0, 3 * n)
    assert comm.all_to_all(torch.empty(0, n), axis, 1, 0).shape == (0, 1)
    assert comm.reduce_scatter(torch.empty(n, 0), axis).shape == (1, 0)


def check_uneven(size: int) -> None:
    axis = axis_of(size)
    n, r = axis.size, axis.rank
    counts = [[(3 * i + 2 * j + 1) % 4 for j in range(n)] for i in range(n)]  # [from][to], some 0
    assert counts[0][0] and counts[1][1]  # what stays must not be charged
    xs = [100.0 * i + torch.arange(sum(counts[i]) * 2).reshape(-1, 2) for i in range(n)]
    expected = torch.cat([x.split(row)[r] for x, row in zip(xs, counts, strict=True)])
    call = dict(send_counts=counts[r], recv_counts=[row[r] for row in counts])
    with timeline.record() as ledger:
        nothing = comm.all_to_all(xs[r][:0], axis, send_counts=[0] * n, recv_counts=[0] * n)
        equal(comm.all_to_all(laid_out(xs[r], r), axis, **call), expected)
    equal(comm.all_to_all(xs[r], axis, **call, async_op=True).wait(), expected)
    assert nothing.shape == (0, 2)
    rows = sum(counts[r][j] for j in range(n) if j != r)
    assert [span.num_bytes for span in ledger.spans] == [0, rows * 2 * 4]


def check_peers(size: int) -> None:
    """Rings in both directions at once, then a chain from the first rank to the last."""
    axis = axis_of(size)
    n, r = axis.size, axis.rank
    left, right = (r - 1) % n, (r + 1) % n
    for async_op in False, True:
        mine = laid_out(torch.full((2, 3), float(r)), 1 + r)
        from_left, from_right = torch.empty(2, 3), torch.empty(2, 3)
        sends, recvs = [(mine, right), (mine + 0.5, left)], [(from_left, left), (from_right, right)]
        result = comm.exchange(sends, recvs, axis, async_op=async_op)
        result = result.wait() if async_op else result
        assert result[0] is from_left and result[1] is from_right
        equal(from_left, torch.full((2, 3), float(left)))
        equal(from_right, torch.full((2, 3), right + 0.5))
    assert comm.exchange([], [], axis) == []

    total = torch.tensor([float(r)])
    with timeline.record() as ledger:
        if r > 0:
            total += comm.recv(torch.empty(1), axis, r - 1)
        if r < n - 1:
            assert comm.send(total, axis, r + 1, async_op=True).wait() is not None
        comm.exchange([(total, right)], [(torch.empty(1), left)], axis)
        comm.barrier(axis)
    equal(total, torch.tensor([r * (r + 1) / 2]))
    own = [("recv", 0)] * (r > 0) + [("send", 4)] * (r < n - 1)
    found = [(span.name, span.num_bytes) for span in ledger]
    assert found == [*own, ("exchange", 4), ("barrier", 0)]
    times = [moment for span in ledger for moment in (span.start, span.end)]
    assert times == sorted(times)  # one after the other, none ends before it starts


@on_ranks(2)
def test_receives_are_posted_before_sends():
    """Else a real link works in one direction at a time: twice the time, see `tests/hosts`."""
    axis, posted, batch = Mesh(dp=2).dp, [], dist.batch_isend_irecv
    peer, mine = 1 - axis.rank, torch.ones(gloo.LARGE // 4)

    def post(ops: list[dist.P2POp]) -> list[dist.Work]:
        posted.append([op.op.__name__ for op in ops])
        return batch(ops)

    with mock.patch.object(dist, "batch_isend_irecv", post):
        comm.exchange([(mine, peer)], [(torch.empty_like(mine), peer)], axis)
        comm.reduce_scatter(mine, axis)
        comm.all_to_all(mine, axis)
    assert posted == [["irecv", "isend"]] * 3


def test_over_gloo_messages_of_a_gpu_go_through_the_host(monkeypatch):
    on_host, axis = torch.ones(3), Axis("dp", 0, 2, (0, 1))
    on_gpu = mock.Mock(is_cuda=True, cpu=lambda: on_host)
    for backend, sent in ("gloo", on_host), ("cpu:gloo,cuda:nccl", on_gpu):
        monkeypatch.setattr(dist, "get_backend", lambda group, name=backend: name)
        assert gloo.staged(on_gpu, axis) is sent and gloo.staged(on_host, axis) is on_host


# ---------------------------------------------------------------------- who meets whom
def met(pairs: list[tuple[int, int]], backend: str) -> list[tuple[str, ...]]:
    """What this rank calls in `connect`, if it believes to be on that `backend`."""
    with launched_over(backend) as called:
        comm.connect(Mesh(pp=4).pp, torch.device("cpu"), pairs)
    return called


def test_over_nccl_all_meet_in_one_order(ranks):
    """Each pair once, both ends in the same order: who waits for a communicator waits for one who
    comes. Mutants: pairs as a rank has them; over gloo as well."""
    pairs = [(3, 0), (2, 3), (1, 2), (0, 1), (1, 0), (0, 3)]
    found = ranks(4).run(met, pairs, "cpu:gloo,cuda:nccl")
    assert found == [
        [("all_reduce",), ("send", 1), ("send", 3)],
        [("all_reduce",), ("recv", 0), ("send", 2)],
        [("all_reduce",), ("recv", 1), ("send", 3)],
        [("all_reduce",), ("recv", 0), ("recv", 2)],
    ]
    for backend in ("gloo", "fake", "link"):
        assert ranks(4).run(met, pairs, backend) == [[]] * 4


@on_ranks(2)
def test_slices_of_a_collective_are_no_messages_of_the_caller():
    """Mutant: one tag for both, and the early receive takes a slice."""
    axis = Mesh(dp=2).dp
    half = gloo.LARGE // 8  # numbers of a slice that travels as a message
    peer, mine = 1 - axis.rank, (torch.arange(2.0) + 10 * axis.rank).repeat_interleave(half)
    early = comm.recv(torch.empty(half), axis, peer, async_op=True)
    swapped = comm.all_to_all(mine, axis)
    comm.send(torch.full((half,), -1.0), axis, peer)
    found = [x.unique().tolist() for x in (swapped, early.wait())]
    assert found == [[axis.rank, axis.rank + 10], [-1]]


@on_ranks(3)
def test_out_is_where_the_result_goes():
    axis = Mesh(dp=3).dp
    r, xs = axis.rank, numbers(axis, SHAPE)
    x, total = xs[r], torch.stack(xs).sum(0)
    for how in range(3):  # in place, whatever the layout, and elsewhere
        for verb, args, given, rows, expected in [
            (comm.all_reduce, (), None, 12, total),
            (comm.all_reduce, (), x, 12, total),
            (comm.broadcast, (1,), None, 12, xs[1]),
            (comm.all_gather, (), x, 3 * 12, torch.cat(xs)),
        ]:
            out = laid_out(x if given is None else torch.zeros(rows, *SHAPE[1:]), how + r)
            given = out if given is None else given
            assert verb(given, axis, *args, out=out, async_op=True).wait() is out
            equal(out, expected)
    weight = torch.nn.Parameter(xs[r].clone())
    comm.broadcast(weight, axis, out=weight)  # a parameter may be written to, unseen by autograd
    equal(weight.detach(), xs[0])
    assert weight.requires_grad and weight.grad_fn is None


def test_on_an_axis_of_size_1_nothing_is_sent():
    """And nothing else differs: copies, shapes, `out=`, `Pending`; no torch.distributed needed."""
    assert not dist.is_initialized()
    axis = Mesh().dp
    x = laid_out(numbers(axis, SHAPE)[0], 1)
    with timeline.record() as ledger:
        for case in cases(x, [x.clone()], axis):
            check_case(case, x, axis, async_op=False)
            check_case(case, x, axis, async_op=True)
        out = torch.zeros(SHAPE)
        for verb in comm.all_reduce, comm.broadcast, comm.all_gather:
            assert verb(x, axis, out=out.zero_()) is out
            equal(out, x)
        equal(comm.all_to_all(x, axis, send_counts=[12], recv_counts=[12]), x.contiguous())
        (got,) = comm.exchange([(x, 0)], [(torch.empty(SHAPE), 0)], axis)
        equal(got, x)
        comm.barrier(axis)
        assert comm.all_gather_object("a", axis) == ["a"]
    assert ledger.spans == []


def test_wire_bytes_are_rounded_last():
    """Where ranks do not divide the bytes. `cases` has the factors of nccl-tests."""
    assert wire_bytes("all_reduce", 10, 4) == 15 and wire_bytes("all_gather", 3, 4) == 2


ASYNC_VERBS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange"]


def start_async(verb: str, axis: Axis) -> Pending:
    x = torch.ones(12)
    if verb == "exchange":
        other = 1 - axis.rank
        return comm.exchange([(x, other)], [(torch.empty(12), other)], axis, async_op=True)
    return getattr(comm, verb)(x, axis, async_op=True)


@on_ranks(2)
def test_a_span_ends_when_the_operation_ends():
    """Not when somebody waits for it (else all seems exposed), nor when it was started."""
    axis = Mesh(dp=2).dp
    comm.barrier(axis)
    time.sleep(0.2 * axis.rank)
    with timeline.record() as ledger:
        called = time.monotonic()
        pending = [start_async(verb, axis) for verb in ASYNC_VERBS]
        time.sleep(0.5)
        before_wait = time.monotonic()
        for each in pending:
            each.wait()
    joined = max(comm.all_gather_object(called, axis))
    spans = {span.name: span for span in ledger}
    for verb in ASYNC_VERBS:
        assert called <= spans[verb].start <= spans[verb].end < before_wait, verb
        # Rank 0 cannot be done before rank 1 has begun; but the root need not wait for anybody.
        assert verb == "broadcast" or spans[verb].end >= joined, verb


# ---------------------------------------------------------------------- errors
def bad_calls(axis: Axis) -> list[tuple[Callable[[], object], str]]:
    x = torch.ones(5, 4)
    return [
        (lambda: comm.all_reduce(x.long(), axis, "avg"), "avg.*does not fit torch.int64; use"),
        (lambda: comm.all_gather(x, axis, 1, out=x), "out= needs dim=0, not dim=1"),
        (lambda: comm.all_gather(x, axis, out=x), r"shape \(15, 4\).*not \(5, 4\)"),
        (lambda: comm.all_reduce(x[0], axis, out=x), r"shape \(4,\) and torch.float32"),
        (lambda: comm.all_reduce(x, axis, out=x.double()), "not .* torch.float64"),
        (lambda: comm.send(x, axis, 3), "send: peer=3 is not another rank of dp=3"),
        (lambda: comm.exchange([(x, 3)], [], axis), "exchange: peer=3 is not another rank"),
        (lambda: comm.send(x, axis, axis.rank), "is not another rank"),
    ]


@on_ranks(3)
def test_what_cannot_work_raises_before_anything_is_sent():
    axis = Mesh(dp=3).dp
    with timeline.record() as ledger:
        for call, message in bad_calls(axis):
            with pytest.raises(ValueError, match=message):
                call()
        for verb in comm.reduce_scatter, comm.all_to_all, comm.scatter:
            with pytest.raises(RuntimeError, match=r"\[3, -1\] don't multiply up to"):
                verb(torch.ones(5, 4), axis)
    assert ledger.spans == []
    with pytest.raises(AttributeError, match="MEAN"):
        comm.all_reduce(torch.ones(3), axis, "mean")
    with pytest.raises(KeyError, match="max"):
        comm.reduce_scatter(torch.ones(3), axis, op="max")
    # The group is as it was: had anybody sent anything, this would hang or be wrong.
    assert comm.all_reduce(torch.tensor([1.0 + axis.rank]), axis).item() == 6


def test_an_error_in_flight_is_raised_by_wait(ranks):
    """Also where another thread sees it first, because the operation is recorded."""

    def check() -> None:
        axis = Mesh(dp=2).dp
        comm.barrier(axis)
        if axis.rank == 0:  # rank 1 never sends
            with timeline.record():
                pending = comm.exchange([], [(torch.empty(4), 1)], axis, async_op=True)
                worker.abort_groups()
                for _ in range(2):
                    with pytest.raises(RuntimeError, match="[Cc]onnection"):
                        pending.wait()

    try:
        ranks(2).run(check)
    finally:
        ranks(2).close()
