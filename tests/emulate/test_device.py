"""An emulated device takes the time that it promises, asleep, and changes no bit."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from minipar.comm import algorithms, clock, collectives
from minipar.comm.background import Background
from minipar.comm.mesh import Mesh
from minipar.emulate import device, link, operations
from minipar.emulate.device import Device
from minipar.observe import timeline
from minipar.ranks.launch import RankError


@dataclass(frozen=True)
class Sheet:
    """A device on which a product takes as long as it says, and nothing else any time."""

    product: float = 0.1
    byte: float = 0.0
    name: str = "slate"
    asked: list[str] = field(default_factory=list)  # the formats of products

    def seconds_of_matmul(self, m, n, k, dtype, *, batch):
        self.asked.append(dtype)
        return self.product * m * n * k / 8**3

    def seconds_of_attention(self, *sizes, causal, backward):
        return 0.0

    def seconds_of_bytes(self, num_bytes):
        return self.byte * num_bytes


@contextmanager
def emulating(ranks, size, emulated, wire="none"):
    pool = ranks(size, "link")
    pool.run(device.use, emulated)
    pool.run(link.use, wire)
    try:
        yield pool
    finally:
        pool.run(device.use, None)
        pool.run(link.use, "none")


def now():
    """Seconds of the declared device."""
    return clock.now() / device.current().slowdown


def multiply(count):
    """Clock, real seconds and spans of some products in a row, and their result."""
    axis, a = Mesh(dp=2).dp, torch.eye(8)
    collectives.barrier(axis)
    begun, start = now(), time.monotonic()
    with timeline.record() as recorded, timeline.span("forward", "products"):
        for _ in range(count):
            a = a @ torch.eye(8)
    return now() - begun, time.monotonic() - start, recorded.spans, a


@pytest.mark.slow
def test_products_take_their_time_asleep(ranks):
    """Declared seconds in the timeline, slowed ones on the clock. Mutant: no sleep at the end."""
    with emulating(ranks, 2, Device(Sheet(), slowdown=3)) as pool:
        cpu = -sum(pool.run(time.process_time))
        found = pool.run(multiply, 4)
        cpu += sum(pool.run(time.process_time))
    for declared, real, spans, result in found:
        assert declared == pytest.approx(0.4, abs=0.1)  # and a barrier, in which both wait
        assert real >= 1.2
        work = [s for s in spans if s.kind == "forward"]
        assert sum(s.duration for s in work) == pytest.approx(0.4, rel=1e-6)
        assert torch.equal(result, torch.eye(8))
    assert cpu < 0.5 * 2.4  # two ranks, each of which would have been at work for 1.2 s


def talk(num_numbers):
    axis, a = Mesh(dp=2).dp, torch.eye(8)
    with timeline.record() as recorded:
        a @ a
        pending = collectives.all_reduce(torch.ones(num_numbers), axis, async_op=True)
        a @ a
        total = pending.wait()
        a @ a
    return recorded.spans, total


def test_a_call_begins_when_its_input_is_there_and_holds_up_who_waits(ranks):
    """0.1 s of work, a call of 0.25 s that starts then, 0.1 s beside it, and 0.1 s after it.

    Mutant: a clock that a wait does not move.
    """
    wire = link.Link("wire", 0.0, 2e6)
    with emulating(ranks, 2, Device(Sheet(), slowdown=2), wire) as pool:
        found = pool.run(talk, 250_000)
    for spans, total in found:
        assert torch.equal(total, torch.full((250_000,), 2.0))
        begin = min(s.start for s in spans)
        call = next(s for s in spans if s.kind == "comm")
        assert call.duration == pytest.approx(0.25, rel=0.01) and call.num_bytes == 500_000
        work = sorted((s.start - begin, s.end - begin) for s in spans if s.kind != "comm")
        assert sum(end - start for start, end in work) == pytest.approx(0.3, rel=0.01)
        assert work[-1] == pytest.approx((0.35, 0.45), abs=0.05)


def rounds_beside_products():
    axis, a, x = Mesh(dp=2).dp, torch.eye(8), torch.ones(250_000)
    start, ends = now(), []

    def ring(after):
        return Background(lambda: algorithms.all_reduce(x, axis), after, x.device, "rings")

    with timeline.record() as recorded:
        first = ring(None)
        second = ring(first)
        for _ in range(4):
            a = a @ a
        for each in (first, second, ring(second)):
            each.wait()
            ends.append(now() - start)
    return ends, recorded.hidden_fraction


@pytest.mark.slow
def test_rounds_in_a_thread_go_on_beside_products(ranks):
    """Two rings of 0.25 s, one after the other, beside 0.4 s of work: 0.5 s; then one alone.

    Mutants: later rounds wait for the work; the second ring begins with the first; who waits is not
    held up, nor is a call whose turn comes later.
    """
    wire = link.Link("wire", 0.0, 2e6)
    with emulating(ranks, 2, Device(Sheet(), slowdown=2), wire) as pool:
        for ends, hidden in pool.run(rounds_beside_products):
            assert ends == pytest.approx([0.4, 0.5, 0.75], abs=0.04)
            assert hidden == pytest.approx(0.4 / 0.75, abs=0.04)


def without_gradients(mode):
    axis, a = Mesh(dp=2).dp, torch.eye(8)
    with mode():
        start = now()
        F.linear(a, a)
        a @ a
        return now() - start, collectives.all_reduce(a, axis)


def test_without_gradients_products_are_products_as_well(ranks):
    """In inference mode torch hands a linear layer over whole, which would cost its bytes."""
    with emulating(ranks, 2, Device(Sheet(product=0.05))) as pool:
        for took, total in pool.run(without_gradients, torch.no_grad):
            assert took == pytest.approx(0.1) and torch.equal(total, 2 * torch.eye(8))
        with pytest.raises(RankError, match=r"needs torch.no_grad\(\), not inference_mode"):
            pool.run(without_gradients, torch.inference_mode)


def test_magnified_sides_make_cubes_of_flops_and_squares_of_bytes():
    """Mutant: bytes counted `magnify` times."""
    emulated = Device(Sheet(byte=1e-9), magnify=10)
    work = operations.Work("mm", "product", (1, 8, 8, 8), "bfloat16", 1000)
    assert operations.seconds_of(work, emulated) == pytest.approx(100)
    add = work._replace(op="add", work="bytes", shape=())
    assert operations.seconds_of(add, emulated) == pytest.approx(1e-4)
    attention = emulated.played(work._replace(work="attention", shape=(2, 3, 4, 5, 6, 1)))
    assert attention.shape == (2, 3, 40, 50, 60, 1)
    assert emulated.counted(3) == 300


def test_float32_stands_for_bf16():
    """And integers, or what is in 16 bits already, for themselves; a step needs all of its bytes.

    Mutants: float32 priced as float32; bytes that stay whole; a step whose bytes count half.
    """
    work = operations.Work("mm", "product", (1, 8, 8, 8), "float32", 768)
    sheet = Sheet(byte=1.0)
    emulated = Device(sheet)
    operations.seconds_of(work, emulated)
    assert sheet.asked.pop() == "bfloat16"
    add = work._replace(op="add", work="bytes", shape=())
    assert operations.seconds_of(add, emulated) == 384
    assert operations.seconds_of(add._replace(dtype="bfloat16"), emulated) == 768
    step = operations.step_of([torch.empty(64)], {"exp_avg": torch.empty(64)})
    assert operations.seconds_of(step, emulated) == 3 * 256 + 2 * 256
    sizes = [emulated.counted(100, dtype) for dtype in ("float32", "bfloat16", "uint8", "int64")]
    assert sizes == [50, 100, 100, 100]


def all_verbs():
    """Bytes of calls on two ranks, each of 1,000 numbers of float32 and then of 1,000 bytes."""
    axis, sent = Mesh(dp=2).dp, []
    for tensor in (torch.ones(1000), torch.ones(1000, dtype=torch.uint8)):
        with timeline.record() as recorded:
            collectives.all_reduce(tensor, axis)
            collectives.all_gather(tensor, axis)
            collectives.reduce_scatter(tensor, axis)
            collectives.all_to_all(tensor, axis)
            sends = [(tensor, 1)] if axis.rank == 0 else []
            recvs = [] if sends else [(torch.empty_like(tensor), 0)]
            collectives.exchange(sends, recvs, axis)
        spans = (s for s in recorded.spans if s.kind == "comm")
        sent.append([(s.num_bytes, s.duration) for s in sorted(spans, key=lambda s: s.start)])
    return sent


def test_what_travels_counts_half_on_every_kind_of_call(ranks):
    """In bytes and in seconds, also for who only sends. Mutants: a verb that forgets the type."""
    wire = link.Link("wire", 0.0, 1e4)
    with emulating(ranks, 2, Device(Sheet()), wire) as pool:
        wide, narrow = pool.run(all_verbs)[0]
    assert [num for num, _ in wide] == [2000, 2000, 1000, 1000, 2000]
    assert [num for num, _ in narrow] == [1000, 1000, 500, 500, 1000]
    assert [s for _, s in wide] == pytest.approx([2 * s for _, s in narrow], rel=0.05)


def setting_up():
    with device.paused():
        start = now()
        torch.eye(8) @ torch.eye(8)
        collectives.all_gather_object("hello" * 1000, Mesh(dp=2).dp)
        return now() - start


def test_a_pause_takes_no_time(ranks):
    with emulating(ranks, 2, Device(Sheet(), slowdown=1, magnify=1000), "1gbe") as pool:
        assert max(pool.run(setting_up)) < 1  # not 40 s


def test_bad_devices_are_refused():
    """Before any process starts, in one line."""
    for bad in ({"slowdown": 0.5}, {"magnify": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* must be from 1 up"):
            Device(Sheet(), **bad)
