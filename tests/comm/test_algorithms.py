"""All-reduce and its kin from messages alone: the backend's results, the promised bytes and times.

That every plan is right for any number of ranks is shown in `test_plans.py`, without processes;
here they run.
"""

import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minipar.comm import algorithms, plans, rounds, tuning
from minipar.comm import collectives as comm
from minipar.comm.background import Background
from minipar.comm.collectives import Pending
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.plans import cut
from minipar.comm.tuning import Tuning
from minipar.observe import timeline
from tests.comm.same import emulated, equal, fastest, laid_out, numbers
from tests.on_ranks import on_ranks

SHAPES = [(), (0,), (1,), (13,), (7, 11)]


def axis_of(size: int) -> Axis:
    return Mesh(dp=size).dp


def chunks_of(num_bytes: int):
    """In here messages are cut into chunks of so many bytes."""
    return mock.patch.object(algorithms, "CHUNK_BYTES", num_bytes)


def check(expected: torch.Tensor, verb, x: torch.Tensor, *args, **options) -> None:
    """Call, then call and wait: the result; the input stays, and shares no memory with it."""
    kept = x.clone()
    for async_op in False, True:
        result = verb(x, *args, **options, async_op=async_op)
        if async_op:
            assert isinstance(result, Pending)
            result = result.wait()
        equal(result, expected)
        assert not result.requires_grad
        if result.numel():
            assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    equal(x, kept)


# ---------------------------------------------------------------------- against the backend
def check_all_reduce(size: int) -> int:
    axis, checked = axis_of(size), 0
    for shape in SHAPES:
        xs = numbers(axis, shape)
        x = laid_out(xs[axis.rank], axis.rank) if len(shape) > 1 else xs[axis.rank]
        for op in ("sum", "avg", "max", "min") if shape == (7, 11) else ("sum",):
            theirs = comm.all_reduce(x, axis, op)
            if op == "sum":
                equal(theirs, torch.stack(xs).sum(0))
            for name in plans.ALL_REDUCE:
                with chunks_of(16):
                    check(theirs, algorithms.all_reduce, x, axis, name, op)
                checked += 1
    for dtype in torch.int64, torch.bfloat16:
        x = numbers(axis, (7, 11), dtype)[axis.rank]
        for name in plans.ALL_REDUCE:
            equal(algorithms.all_reduce(x, axis, name), comm.all_reduce(x, axis))
            checked += 1
    return checked


MARKS = {2: pytest.mark.slow, 3: (), 4: pytest.mark.slow, 5: pytest.mark.exhaustive}


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(n, marks=mark) for n, mark in MARKS.items()])
def test_all_reduce_equals_the_backends(ranks, size):
    """Catches: a scratch buffer used twice, a round posted too early, op or chunks ignored."""
    count = len(plans.ALL_REDUCE) * (len(SHAPES) + 3 + 2)
    assert ranks(size).run(check_all_reduce, size) == [count] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks("size")
def test_the_other_verbs_equal_the_backends(size):
    """Catches: slices of the wrong rank, a dual in the wrong order, counts taken for even."""
    axis = axis_of(size)
    r = axis.rank
    for shape in (0,), (2,), (13,), (7, 11):
        xs = numbers(axis, shape)
        x = laid_out(xs[r], r) if len(shape) > 1 else xs[r]
        total, rows = torch.stack(xs).sum(0), cut((0, shape[0]), size)
        counts = [hi - lo for lo, hi in rows]
        mine = x[slice(*rows[r])].clone()
        joined = torch.cat([y[slice(*span)] for y, span in zip(xs, rows, strict=True)])
        with chunks_of(16):
            for name in plans.ALL_GATHER:
                check(total[slice(*rows[r])], algorithms.reduce_scatter, x, axis, name)
                check(torch.cat(xs), algorithms.all_gather, x, axis, name)
                check(joined, algorithms.all_gather, mine, axis, name, counts=counts)
            for src in range(size):
                check(xs[src], algorithms.broadcast, x, axis, src)
    x = numbers(axis, (4 * size, 3))[r]
    check(comm.all_to_all(x, axis), algorithms.all_to_all, x, axis)
    # Uneven, with slices of no rows among them.
    table = [[(3 * i + 2 * j) % 5 for j in range(size)] for i in range(size)]
    counts = dict(send_counts=table[r], recv_counts=[row[r] for row in table])
    x = 100.0 * r + torch.arange(sum(table[r]) * 2.0).reshape(-1, 2)
    check(comm.all_to_all(x, axis, **counts), algorithms.all_to_all, x, axis, **counts)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "double_tree"])
@on_ranks(4)
def test_two_levels(algorithm):
    """Inside, across, inside again: the sum over both axes, and few bytes across."""
    mesh, two_levels = Mesh(dp=2, tp=2), algorithms.hierarchical_all_reduce
    for shape in (), (1,), (13,), (8, 6):
        x = numbers(mesh.world, shape)[mesh.rank]
        for op in "sum", "avg", "max":
            theirs = comm.all_reduce(x, mesh.world, op)
            check(theirs, two_levels, x, mesh.tp, mesh.dp, algorithm, op)
    with timeline.record() as ledger:
        two_levels(torch.ones(120), mesh.tp, mesh.dp, algorithm)
    # 480 bytes: 2 x 480/2 inside; half of it across, of which again 2 x 1/2.
    assert ledger.bytes_by_axis() == {"dp": 240, "tp": 480} and len(ledger) == 4


def test_floats_end_with_the_same_bits_everywhere(ranks):
    """Catches: ranks that add in an order of their own, such as "what I have, then what comes"."""

    def body(size: int) -> list[bytes]:
        axis = axis_of(size)
        torch.manual_seed(axis.rank)
        x = torch.randn(1001) * 10 ** torch.randn(1001)
        exact = comm.all_reduce(x.double(), axis)
        results = []
        for name in plans.ALL_REDUCE:
            with chunks_of(400):
                result = algorithms.all_reduce(x, axis, name)
            error = (result - exact).abs() / comm.all_reduce(x.abs().double(), axis)
            assert error.max() < 1e-6, name
            results.append(result.numpy().tobytes())
        return results

    for size in 3, 4:
        first, *others = ranks(size).run(body, size)
        assert len(set(first)) > 1  # so the order does matter
        assert all(other == first for other in others)


def test_on_an_axis_of_size_1_nothing_is_sent():
    axis = Mesh().dp
    x = torch.arange(12.0).reshape(4, 3)
    with timeline.record() as ledger:
        for name in plans.ALL_REDUCE:
            for op in "sum", "avg", "max":
                check(x, algorithms.all_reduce, x, axis, name, op)
        for name in plans.ALL_GATHER:
            check(x, algorithms.reduce_scatter, x, axis, name)
            check(x, algorithms.all_gather, x, axis, name)
        check(x, algorithms.broadcast, x, axis)
        check(x, algorithms.all_to_all, x, axis)
        check(x, algorithms.hierarchical_all_reduce, x, axis, axis)
        assert tuning.tune(axis) == Tuning(1, 0.0, 0.0)
    assert ledger.spans == []


# ---------------------------------------------------------------------- the ledger
def record_messages(size: int, numel: int, chunk_bytes: int) -> dict[str, tuple]:
    """Of each algorithm: rounds and bytes in the ledger, messages really handed to the backend."""
    axis, found = axis_of(size), {}
    original, sends = dist.batch_isend_irecv, []

    def counting(posts: list) -> list:
        sends.extend(post for post in posts if post.op is dist.isend)
        return original(posts)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        for name in plans.ALL_REDUCE:
            sends.clear()
            with timeline.record() as ledger, chunks_of(chunk_bytes):
                algorithms.all_reduce(torch.ones(numel), axis, name)
            assert {(span.name, span.axis) for span in ledger} == {("exchange", "dp")}
            num_bytes = sum(span.num_bytes for span in ledger)
            assert num_bytes == sum(post.tensor.nbytes for post in sends)
            found[name] = len(ledger), len(sends), num_bytes
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ledger_holds_the_table(ranks, size):
    """S = 4 numel bytes. Catches: bytes of an all-reduce entered beside those of its messages."""
    n, numel = size, 240
    s, log = 4 * numel, (n - 1).bit_length()
    once = s * (n - 1) // n
    every = ranks(n).run(record_messages, n, numel, plans.CHUNK_BYTES)
    for rank, found in enumerate(every):
        assert found["ring"] == (2 * (n - 1), 2 * (n - 1), 2 * once)
        assert found["bidirectional"] == (2 * (n - 1), 4 * (n - 1), 2 * once)
        assert found["direct"] == (1, n - 1, s * (n - 1))
        assert (found["bruck"][0], found["bruck"][2]) == (2 * log, 2 * once)
        if n in (2, 4):
            assert found["halving_doubling"] == (2 * log, 2 * log, 2 * once)
        else:  # p = 2: ranks 0 and 1 fold together, 0 and 2 go on
            fold = [(2 + 3, 2 + 2, s + 3 * s // 2), (3, 2, s), (2, 2, s)]
            assert found["halving_doubling"] == fold[rank]
        rounds, messages, num_bytes = found["double_tree"]
        depth = n.bit_length() - 1
        assert rounds <= 2 * depth and messages <= 4 and num_bytes <= 2 * s
    assert sum(found["double_tree"][2] for found in every) == 2 * (n - 1) * s
    # In chunks: more messages, the same bytes.
    chunked = ranks(n).run(record_messages, n, numel, s // n // 4)
    for before, after in zip(every, chunked, strict=True):
        assert after["ring"] == (8 * (n - 1), 8 * (n - 1), 2 * once)
        assert {k: v[2] for k, v in after.items()} == {k: v[2] for k, v in before.items()}


def test_what_the_other_verbs_send(ranks):
    def body() -> dict[str, list[int]]:
        axis, x = axis_of(4), torch.ones(240)  # 960 bytes
        calls = {"gather ring": lambda: algorithms.all_gather(x, axis)}
        for k in plans.ALL_GATHER:
            calls[f"scatter {k}"] = lambda k=k: algorithms.reduce_scatter(x, axis, k)
        calls["tree"] = lambda: algorithms.broadcast(x, axis)
        calls["all_to_all"] = lambda: algorithms.all_to_all(x, axis)
        found = {}
        for name, call in calls.items():
            with timeline.record() as ledger:
                call()
            found[name] = sum(span.num_bytes for span in ledger)
        return found

    every = ranks(4).run(body)
    for found in every:
        assert found["gather ring"] == 3 * 960 and found["all_to_all"] == 720
        assert {found[f"scatter {name}"] for name in plans.ALL_GATHER} == {720}
    assert sum(found["tree"] for found in every) == 3 * 960
    assert max(found["tree"] for found in every) <= 2 * 960


# ---------------------------------------------------------------------- at the same time
@pytest.mark.slow
def test_calls_in_flight_together_do_not_mix(ranks):
    """Threads without an order would let the messages of one call end up in another."""

    def body() -> int:
        mesh = Mesh(dp=2, tp=2)
        axes = [mesh.dp, mesh.tp, mesh.world]
        xs = [torch.full((17,), float(10**i * (mesh.rank + 1))) for i in range(6)]
        wanted = [[comm.all_reduce(x, axis) for axis in axes] for x in xs]
        for name in "ring", "double_tree", "bruck":
            with chunks_of(8):
                call = partial(algorithms.all_reduce, algorithm=name)
                pending = [[call(x, axis, async_op=True) for axis in axes] for x in xs]
                now = [call(xs[0], axis) for axis in axes]  # waits its turn
                found = [[each.wait() for each in row] for row in reversed(pending)][::-1]
            for row, wants in zip([now, *found], [wanted[0], *wanted], strict=True):
                for result, want in zip(row, wants, strict=True):
                    equal(result, want)
        return threading.active_count()

    assert max(ranks(4).run(body)) < 10  # no thread outlives its call


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_a_call_in_a_thread_sends_what_it_was_given(mode):
    """The caller may overwrite its tensor at once. Mutants: it is read when the call's turn comes;
    a copy of inference mode that the thread may not write to."""
    axis, alone = axis_of(2), Axis("alone", 0, 1, (0,))
    verbs = [
        algorithms.all_reduce,
        algorithms.reduce_scatter,
        algorithms.all_gather,
        algorithms.broadcast,
        algorithms.all_to_all,
        partial(algorithms.hierarchical_all_reduce, across=alone),
    ]
    with mode():
        for verb in verbs:
            x = torch.arange(4.0) + 10 * axis.rank
            want, before = verb(x, axis), threading.Event()
            rounds._latest[axis.group.group_name] = Background(before.wait, [], x.device, "")
            pending = verb(x, axis, async_op=True)
            x.zero_()
            before.set()
            equal(pending.wait(), want)


@on_ranks(2)
def test_an_error_in_a_thread_reaches_who_waits():
    axis = axis_of(2)
    with mock.patch.object(algorithms, "execute", side_effect=ValueError("not to be run")):
        pending = algorithms.all_reduce(torch.ones(2), axis, async_op=True)
        with pytest.raises(ValueError, match="^not to be run$"):
            pending.wait()
    equal(algorithms.all_reduce(torch.ones(2), axis), torch.full((2,), 2.0))


def test_bad_calls_are_refused_before_the_first_message():
    x = torch.ones(4)
    others = Axis("dp", 0, 3, (0, 1, 2))  # a group that would fail if it were used
    for call, word in (
        (
            lambda: algorithms.all_reduce(x, others, "rign"),
            "'rign' is unknown; use one of .*'ring'",
        ),
        (lambda: algorithms.all_reduce(x, others, "ring", "prod"), "op='prod'"),
        (lambda: algorithms.reduce_scatter(x.long(), others, op="avg"), "avg"),
        (lambda: algorithms.broadcast(x, others, 3), "src=3 .* use 0 to 2"),
        (lambda: algorithms.all_gather(torch.tensor(1.0), others), "no rows"),
        (lambda: algorithms.all_gather(x, others, counts=[4, 4]), r"counts=\[4, 4\]"),
        (lambda: algorithms.all_to_all(x, others), "pad it to 6 or cut it to 3"),
        (lambda: algorithms.all_to_all(x, others, send_counts=[1, 2, 1]), "both"),
        (lambda: tuning.tune(others, [1000]), "two sizes"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


# ---------------------------------------------------------------------- time
def time_algorithms(size: int, alpha: float, beta: float, num_bytes: int) -> dict:
    """(measured, predicted) seconds of each algorithm, each peer with a wire of its own."""
    axis, x = axis_of(size), torch.ones(num_bytes // 4)
    model = Tuning(size, alpha, beta, sharing=0.0)
    with emulated(alpha, beta):
        found = {}
        for name in plans.ALL_REDUCE:
            expected = model.seconds(name, num_bytes)
            call = partial(algorithms.all_reduce, x, axis, name)
            found[name] = fastest(call, axis, 10, enough=1.1 * expected + 0.01), expected
        return found


@pytest.mark.slow
def test_times_follow_alpha_and_beta_and_the_tree_crosses_the_ring(ranks):
    """Small: 6 rounds of the ring against 4 of the tree. Large: 1.5 S bytes against 2 S.

    Never faster than the model, and not much slower. Catches: rounds that queue where they could
    be sent together, and a tree whose two halves take turns.
    """
    small = ranks(4, "link").run(time_algorithms, 4, 20e-3, 1e-8, 4_000)[0]
    large = ranks(4, "link").run(time_algorithms, 4, 4e-3, 1.5e-7, 1_000_000)[0]
    for found in small, large:
        for name, (measured, predicted) in found.items():
            assert 0.95 * predicted < measured < 1.2 * predicted + 0.1, (name, found)
    assert small["double_tree"][0] < 0.85 * small["ring"][0]
    assert large["ring"][0] < 0.9 * large["double_tree"][0]


@pytest.mark.timed
@pytest.mark.slow
def test_chunks_hide_each_others_latency(ranks):
    """2 x 8 messages of 30 ms each: one after the other 0.48 s; in flight together far less.

    The mutant that waits for each round before it posts the next takes the whole time.
    """

    def body(in_flight: int) -> float:
        axis, x = Mesh(dp=2, tp=2).dp, torch.ones(64)
        at_once = mock.patch.object(rounds, "IN_FLIGHT", in_flight)
        with at_once, emulated(30e-3, 1e-9), chunks_of(16):
            call = partial(algorithms.all_reduce, x, axis)
            return fastest(call, axis, 10, enough=0.3 if in_flight > 1 else 10.0)

    assert max(ranks(4, "link").run(body, 1)) > 0.47
    assert max(ranks(4, "link").run(body, rounds.IN_FLIGHT)) < 0.35


def test_async_leaves_the_caller_free(ranks):
    """A ring of 6 rounds of 33 ms behind a computation of as long: hardly longer than either."""

    def body() -> tuple[float, float]:
        axis, x, returned = axis_of(4), torch.ones(30), []

        def call() -> None:
            start = time.monotonic()
            pending = algorithms.all_reduce(x, axis, async_op=True)
            returned.append(time.monotonic() - start)
            time.sleep(0.2)
            equal(pending.wait(), torch.full((30,), 4.0))

        with emulated(33e-3, 1e-9):
            return fastest(call, axis, 10, enough=0.3), min(returned)

    for ended, returned in ranks(4, "link").run(body):
        assert returned < 0.1 and 0.19 < ended < 0.35


@on_ranks(3)
def test_an_uneven_all_to_all_keeps_its_own_rows():
    """They lie elsewhere in what is sent than in what arrives. Mutant: taken from there."""
    axis = Mesh(dp=3).dp
    counts = [[1, 0, 3], [2, 1, 0], [0, 4, 2]]  # [sender][receiver]
    sent, received = counts[axis.rank], [row[axis.rank] for row in counts]
    x = torch.arange(2.0 * sum(sent)).view(-1, 2) + 100 * axis.rank
    both = {"send_counts": sent, "recv_counts": received}
    assert algorithms.all_to_all(x, axis, **both).equal(comm.all_to_all(x, axis, **both))
