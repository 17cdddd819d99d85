"""The emulated link: it takes the time it promises, changes no bit, and never hangs."""

import itertools
import math
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from minipar.emulate import link, link_group
from minipar.emulate.link import LINKS, Link, Topology
from minipar.ranks.launch import RankError
from tests.on_ranks import on_ranks
from tests.patience import busy

SLACK = 0.1  # seconds that a busy machine may add to an emulated time


@contextmanager
def a_link_group(setting="none", checks=False, ranks=None):
    """A link group beside the pool's own group; every rank makes it."""
    link_group.register()
    link.use(setting)
    link.check_calls(checks)
    group = dist.new_group(ranks, backend="link")
    try:
        yield group
        dist.barrier()  # nobody closes connections that another still reads from
    finally:
        link.use("none")
        link.check_calls(True)
        if isinstance(group, link_group.LinkGroup):
            dist.destroy_process_group(group)


def clock(fn, *args):
    """Call in step with the other ranks; return (result, seconds)."""
    dist.barrier()
    start = time.monotonic()
    result = fn(*args)
    return result, time.monotonic() - start


def data(*shape, salt=0):
    """Random values, different on every rank."""
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randn(*shape, generator=generator)


# ---------------------------------------------------------------------- the cost model, pure
ALPHA, BETA = 1e-3, 1e8  # 1 ms, 100 MB/s


@pytest.mark.parametrize(
    "verb, size, steps, sent",
    [
        # Ring, as in Thakur, Rabenseifner & Gropp 2005 and Patarasuk & Yuan 2009.
        ("all_reduce", 4, 6, 1_500_000),
        ("all_reduce", 3, 4, 1_333_333),
        ("all_gather", 4, 3, 750_000),
        ("reduce_scatter", 4, 3, 750_000),
        ("all_to_all", 8, 7, 875_000),
        # Pipelined trees, as in the lower bounds of Chan et al. 2007.
        ("broadcast", 8, 3, 1_000_000),
        ("broadcast", 5, 3, 1_000_000),
        ("reduce", 4, 2, 1_000_000),
        ("scatter", 4, 2, 750_000),
        ("gather", 4, 2, 750_000),
        ("barrier", 6, 3, 0),
        ("send", 2, 1, 1_000_000),
        *[(verb, 1, 0, 0) for verb in ("all_reduce", "all_to_all", "broadcast", "barrier")],
    ],
)
def test_cost_table(verb, size, steps, sent):
    """Numbers worked out by hand: catches a wrong step count and 2(n-1)/n for (n-1)/n."""
    cost = link.seconds(verb, 1_000_000, size, Link("test", ALPHA, BETA))
    assert cost == pytest.approx(steps * ALPHA + sent / BETA, rel=1e-9)


def test_scaling_keeps_the_ratio_and_says_so():
    wire, slow = LINKS["nvlink4"], LINKS["nvlink4"].scaled(1000).scaled(2)
    assert slow.label == "emulated NVLink 4, slowed 2000x"
    fast, late = (link.seconds("all_reduce", 10**9, 4, setting) for setting in (wire, slow))
    assert late == pytest.approx(2000 * fast) and "slowed 10x" in Topology().scaled(10).label
    assert link.parse("1gbe*4") == LINKS["1gbe"].scaled(4) and link.parse("none") == LINKS["none"]


def test_topology_picks_the_slowest_hop():
    topology = Topology(2, 4, LINKS["nvlink4"], LINKS["100gbe"])
    assert topology.between([0, 1, 2, 3]) == LINKS["nvlink4"]
    assert topology.between([4, 7]) == LINKS["nvlink4"]
    assert topology.between([3, 4]) == LINKS["100gbe"]
    assert topology.between(range(8)) == LINKS["100gbe"]


SLOW = Link("slow", 1e-3, 1e6)


def test_neighbours_talk_over_the_same_card_at_the_same_time():
    """A card for two ranks carries two messages, unless one group has both. Mutant: one message."""
    eight = Topology(2, 4, LINKS["nvlink4"], SLOW, cards_per_node=2)
    for ranks, shared in {(0, 4): 2, (1, 7): 2, (0, 1, 2, 3): 0, (0, 1, 4, 5): 1}.items():
        verb = "send" if len(ranks) == 2 else "all_gather"
        sent = 1e6 if verb == "send" else 0.75e6
        took = link.seconds(verb, 1_000_000, len(ranks), eight.between(ranks))
        assert took == pytest.approx(shared * sent / 1e6, abs=0.01), ranks
    assert "2 cards per node" in eight.label and eight.scaled(3).cards_per_node == 2


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: link.use("NVLink-4"), "no link 'NVLink-4'; there are none, 1gbe, 10gbe"),
        (lambda: link.parse("1gbe*fast"), "could not convert string to float: 'fast'"),
        (lambda: LINKS["1gbe"].scaled(0), "factor"),
    ],
)
def test_bad_settings_are_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()


# ---------------------------------------------------------------------- measured against the model
def call(verb, num_bytes, group):
    """Return a function that does `verb`; `num_bytes` is the whole tensor's."""
    rank, n = dist.get_rank(group), group.size()
    whole, piece = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4 // n)
    pieces = list(whole.chunk(n)) if rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "scatter": lambda: dist.scatter(piece, pieces, 0, group=group),
        "gather": lambda: dist.gather(piece, pieces, 0, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "send": lambda: (dist.recv, dist.send)[rank == 0](whole, 1 - rank, group=group),
    }[verb]


def measure(verbs, sizes, setting):
    """Return `(verb, num_bytes, model, measured)` for each; the best of six tries."""
    rows = []
    with a_link_group(setting) as group:
        for verb, num_bytes in itertools.product(verbs, sizes):
            model = link.seconds(verb, num_bytes, group.size(), setting)
            fn, best = call(verb, num_bytes, group), math.inf
            for _ in range(6):
                best = min(best, clock(fn)[1])
                good = torch.tensor(best < 1.1 * model, dtype=torch.int32)
                dist.all_reduce(good, dist.ReduceOp.MIN)  # all ranks try again, or none
                if good:
                    break
            rows.append((verb, num_bytes, model, best))
    return rows


VERBS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
VERBS += ["broadcast", "reduce", "scatter", "gather"]


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(
    "size, verbs, sizes, wire",
    [
        (2, [*VERBS, "send"], [1_000, 64_000, 1_000_000, 64_000_000], Link("t", 25e-3, 100e6)),
        (4, [*VERBS, "barrier"], [4_000_000], Link("t", 20e-3, 50e6)),
    ],
)
def test_time_follows_the_model(ranks, size, verbs, sizes, wire):
    """Catches a term missing from the wait, waits that add up over what gloo takes itself, and
    formulas that are right for two ranks only."""
    for rows in zip(*ranks(size).run(measure, verbs, sizes, wire), strict=True):
        for verb, num_bytes, model, measured in rows:
            assert 0 < 0.999 * model <= measured <= 1.10 * model, (verb, num_bytes, model, measured)


@on_ranks(2)
def test_an_uneven_all_to_all_costs_what_goes_to_others():
    """A rank that only receives sends nothing, and is as long busy.

    Mutants: half of the tensor, as if it were even; what the busiest rank sends, on every rank.
    """
    even, swap = [(6, 6), (6, 6)], [(0, 12), (12, 0)]
    one_way, stay = [(0, 12), (0, 0)], [(12, 0), (0, 12)]
    flows = [even, swap, one_way, stay]
    sent, took = [], []

    def note(work):
        start, end = work.times
        sent.append(work.num_bytes)
        took.append(end - start)

    with a_link_group(Link("test", 0, 4800)) as group:
        rank = dist.get_rank(group)
        link.observers.append(note)
        for flow in flows:
            counts, received = list(flow[rank]), [row[rank] for row in flow]
            out = torch.empty(sum(received))
            dist.all_to_all_single(out, torch.zeros(sum(counts)), received, counts, group=group)
        link.observers.remove(note)
    assert sent == [24, 48, [48, 0][rank], 0]
    assert all(s >= least for s, least in zip(took, [0.0049, 0.0099, 0.0099, 0], strict=True)), took


@on_ranks(4)
def test_the_busiest_rank_may_be_one_that_receives():
    """Three ranks send 48 bytes each to rank 0, which takes three times as long as one of them."""
    with a_link_group(Link("test", 0, 4800)) as group:
        rank = dist.get_rank(group)
        sent, received = [12 * (rank > 0), 0, 0, 0], [0, *[12 * (rank == 0)] * 3]
        ends = torch.empty(sum(received)), torch.ones(sum(sent))
        work = dist.all_to_all_single(*ends, received, sent, group=group, async_op=True)
        work.wait()
    start, end = work.times
    assert end - start >= 0.0299


# ---------------------------------------------------------------------- the bits are gloo's
def every_verb(group):
    """One result per way of communicating that torch has."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    out = {}
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        out[name] = data(5)
        dist.all_reduce(out[name], getattr(dist.ReduceOp, name), group=group)
    out["async"] = data(1000, salt=1)
    work = dist.all_reduce(out["async"], group=group, async_op=True)
    work.wait()
    out["all_gather_single"] = torch.empty(3 * n)
    dist.all_gather_single(out["all_gather_single"], data(3, salt=2), group=group)
    out["all_gather"] = [torch.empty(2, 3) for _ in range(n)]
    dist.all_gather(out["all_gather"], data(2, 3, salt=3), group=group)
    out["reduce_scatter_single"] = torch.empty(3)
    dist.reduce_scatter_single(out["reduce_scatter_single"], data(3 * n, salt=4), group=group)
    out["reduce_scatter"] = torch.empty(3)
    dist.reduce_scatter(out["reduce_scatter"], list(data(n, 3, salt=5)), group=group)
    out["all_to_all_single"] = torch.empty(2 * n)
    dist.all_to_all_single(out["all_to_all_single"], data(2 * n, salt=6), group=group)
    sent, received = [(rank + to) % 3 for to in range(n)], [(rank + at) % 3 for at in range(n)]
    out["uneven"] = torch.empty(sum(received), 2)
    rows = data(sum(sent), 2, salt=7)
    dist.all_to_all_single(out["uneven"], rows, received, sent, group=group)
    out["broadcast"] = data(4, salt=9)
    dist.broadcast(out["broadcast"], 1, group=group)
    out["reduce"] = data(4, salt=10)
    dist.reduce(out["reduce"], 1, group=group)
    if rank != 1:
        del out["reduce"]  # of no meaning elsewhere
    out["gather"] = [torch.empty(2) for _ in range(n)] if rank == 1 else None
    dist.gather(data(2, salt=11), out["gather"], 1, group=group)
    out["scatter"] = torch.empty(2)
    dist.scatter(out["scatter"], list(data(n, 2)) if rank == 1 else None, 1, group=group)
    out["ring"] = torch.empty(3)
    ops = [(dist.isend, data(3), right), (dist.irecv, out["ring"], left)]
    for work in dist.batch_isend_irecv([dist.P2POp(*op, group=group) for op in ops]):
        work.wait()
    out["objects"] = [None] * n
    dist.all_gather_object(out["objects"], {"rank": rank}, group=group)
    dist.barrier(group=group)
    out["functional"] = funcol.wait_tensor(funcol.all_to_all_single(data(n), None, None, group))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
    out["DTensor"] = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]).full_tensor()
    return out


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("checks", [False, True])
@on_ranks(4)
def test_every_verb_gives_the_bits_of_gloo(checks):
    """With the checks on it also catches a check that refuses a correct call."""
    gloo = dist.new_group(backend="gloo")
    with a_link_group("none", checks=checks) as group:
        ours, truth = every_verb(group), every_verb(gloo)
    dist.destroy_process_group(gloo)
    one, another, *_ = ours["all_gather"]
    assert not torch.equal(one, another)  # the ranks did hold different data
    assert ours.keys() == truth.keys() and len(truth) > 18
    assert [name for name in truth if not equal(ours[name], truth[name])] == []


# ---------------------------------------------------------------------- overlap, queues, lateness


@pytest.mark.timed
@on_ranks(2)
def test_two_operations_queue_on_the_link():
    """Catches a link without memory of when it is free: both would take 0.1 s."""
    slack = SLACK * busy()
    with a_link_group(Link("test", 0, 40e6)) as group:
        tensors = [torch.ones(1_000_000) for _ in range(2)]  # 4 MB: 0.1 s each
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        assert not any(work.is_completed() for work in works)  # the calls did not wait
        for work in works:
            work.wait()
        (start_1, end_1), (start_2, end_2) = (work.times for work in works)
    assert 0.0999 <= end_1 - start_1 < 0.1 + slack
    assert 0.0999 <= start_2 - start_1 < 0.1 + slack
    assert 0.1999 <= end_2 - start_1 < 0.2 + slack


@pytest.mark.timed
@on_ranks(2)
def test_messages_pass_in_both_directions_and_in_a_row():
    """0.2 s each way at once; the second message leaves while the first one still travels.

    Mutant: it leaves when the first has arrived, which takes 0.4 s, as long as waiting in between.
    """
    peer = 1 - dist.get_rank()
    with a_link_group(Link("test", 0.1, 40e6)) as group:

        def swap(count):
            works = []
            for _ in range(count):  # both send first: a single queue would deadlock
                works.append(dist.isend(torch.ones(1_000_000), peer, group=group))
            for _ in range(count):
                works.append(dist.irecv(torch.empty(1_000_000), peer, group=group))
            for work in works:
                work.wait()

        calls = (lambda: swap(1)), (lambda: swap(2)), (lambda: [swap(1), swap(1)])
        tries = [[clock(call)[1] for call in calls] for _ in range(3)]
        one, two, in_turn = map(min, zip(*tries, strict=True))
    assert 0.2 <= one < 0.2 + SLACK
    assert 0.3 <= two < in_turn - 0.04 and in_turn >= 0.4


def late(verb):
    """Return when this rank called, and when the wire began and ended. Rank 0 calls late."""
    rank, tensor = dist.get_rank(), torch.ones(4)
    with a_link_group(Link("test", 0.05, math.inf)) as group:
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)
        if verb == "all_reduce":
            work = dist.all_reduce(tensor, group=group, async_op=True)
        elif (verb == "send") == (rank == 0):
            work = dist.isend(tensor, 1 - rank, group=group)
        else:
            work = dist.irecv(tensor, 1 - rank, group=group)
        work.wait()
        return work.t_issue, *work.times


@pytest.mark.timed
@pytest.mark.parametrize("verb, duration", [("all_reduce", 0.1), ("send", 0.05), ("recv", 0.05)])
def test_time_runs_from_the_last_call(ranks, verb, duration):
    """Catches a clock that starts at each rank's own call: the early one would end too soon."""
    (issued, start_0, end_0), (early, start_1, end_1) = ranks(2).run(late, verb)
    assert issued - early > 0.19
    for start, end in ((start_0, end_0), (start_1, end_1)):
        assert start == pytest.approx(issued, abs=1e-6)
        assert duration <= end - issued < duration + SLACK


@on_ranks(2)
def test_a_topology_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 6 ranks, but there are 2"):
        link.use(Topology(2, 3))


# ---------------------------------------------------------------------- when things go wrong
@pytest.mark.timed
@on_ranks(2)
def test_shutdown_ends_an_emulated_transfer():
    with a_link_group(Link("test", 3600, 1)) as group:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        dist.barrier()
        start = time.monotonic()
        threading.Timer(0.1, group.shutdown).start()
        with pytest.raises(RuntimeError, match="all_reduce on rank .: .* destroyed"):
            work.wait()
        failed = work.get_future()
        with pytest.raises(RuntimeError, match="destroyed"):
            failed.wait()
        assert work.is_completed() and work.exception() is not None
        assert time.monotonic() - start < 1.0
        for call in (
            lambda: dist.barrier(group),
            lambda: dist.send(torch.ones(1), 1 - dist.get_rank(), group=group),
        ):
            with pytest.raises(RuntimeError, match="destroyed"):
                call()


SUM = "all_reduce(sum) of float32 (4,)"
OTHER_CALLS = {  # of rank 1, and what is said of them
    "shape": (lambda x, on: dist.all_reduce(x[:3], group=on), SUM[:-4] + "(3,)"),
    "dtype": (lambda x, on: dist.all_reduce(x.double(), group=on), SUM.replace("32", "64")),
    "max": (lambda x, on: dist.all_reduce(x, dist.ReduceOp.MAX, on), SUM.replace("sum", "max")),
    "root": (lambda x, on: dist.broadcast(x, 1, on), "broadcast of float32 (4,) at rank 1"),
    "no tensor": (lambda x, on: dist.barrier(on), "barrier"),
}


@pytest.mark.parametrize("what", OTHER_CALLS)
@on_ranks(4)
def test_mismatch_says_who_called_what(what):
    """On gloo these hang, end the process, or (the shape) give wrong sums in silence."""
    call, said = OTHER_CALLS[what]
    x, total, start = torch.ones(4), torch.ones(4), time.monotonic()
    with a_link_group("none", checks=True) as group:
        with pytest.raises(link_group.Mismatch) as error:
            call(x, group) if dist.get_rank() == 1 else dist.all_reduce(x, group=group)
        assert time.monotonic() - start < 10  # and not until gloo's own time is up
        dist.all_reduce(total, group=group)  # the group is still good
    assert total.tolist() == [4.0] * 4
    says = f"the ranks do not agree: ranks 0, 2, 3 called {SUM}; rank 1 called {said}"
    assert str(error.value) == says


def wrong_sizes(what):
    rank = dist.get_rank()
    with a_link_group("none", checks=True) as group:
        if what == "splits":
            received = [3, 2] if rank == 0 else [1, 2]
            rows = torch.ones(5), received, [3, 2]
            dist.all_to_all_single(torch.empty(sum(received)), *rows, group=group)
        if (what == "late send") == (rank == 0):
            time.sleep(0.2)
        if rank == 0:
            dist.send(torch.ones(4), 1, group=group)
        dist.recv(torch.ones(3), 0, group=group)


@pytest.mark.parametrize(
    "what, who, says",
    [
        ("splits", [0, 1], "rank 0 sends 8 bytes to rank 1, which expects 4 from it"),
        ("late send", [0], "rank 0 sends 16 bytes to rank 1, which expects 12 from it"),
        ("late recv", [1], "rank 0 sends 16 bytes to rank 1, which expects 12 from it"),
    ],
)
def test_messages_of_a_wrong_size_are_refused(ranks, what, who, says):
    """On gloo a message longer than its buffer ends the process."""
    start = time.monotonic()
    with pytest.raises(RankError, match=f"Mismatch: {says}") as error:
        ranks(2).run(wrong_sizes, what)
    assert [*error.value.failures] == who and time.monotonic() - start < 10
