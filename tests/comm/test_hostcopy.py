"""Copies between host and device: right, as slow as they should be, and seen."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch

from minipar.comm import hostcopy
from minipar.comm.hostcopy import HostCopy
from minipar.emulate.link import Link
from minipar.observe import memory, timeline

SLOW = Link("slow PCIe", 0.01, 10e6)  # a megabyte takes 110 ms


def test_what_arrives_is_what_was_sent():
    """Mutant: a copy that is never made, or made of the wrong tensor of several."""
    copies = HostCopy()
    sources = [torch.arange(5.0), torch.randn(3, 4).T, torch.zeros(0), torch.tensor(7)]
    on_host = [pending.wait() for pending in [copies.to_host(source) for source in sources]]
    assert all(torch.equal(a, b) for a, b in zip(sources, on_host, strict=True))
    assert {a.data_ptr() for a in on_host if a.numel()}.isdisjoint(a.data_ptr() for a in sources)
    back = [torch.full_like(a, 9) for a in on_host]
    coming = [copies.to_device(*pair) for pair in zip(on_host, back, strict=True)]
    arrived = [pending.wait() for pending in coming]
    assert all(torch.equal(a, b) for a, b in zip(sources, arrived, strict=True))


def test_takes_as_long_as_pcie_would(monkeypatch):
    """By a clock that only sleeping moves on, and only when the lane may sleep.

    Mutants: a copy that waits for its latency only, or forgets that the lane was busy, or is
    waited for where it is started.
    """
    clock, may_sleep, slept = [0.0], threading.Event(), []

    def sleep(seconds: float) -> None:
        assert may_sleep.wait(60)
        clock[0] += seconds
        slept.append(seconds)

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(hostcopy, "time", fake)
    copies = HostCopy(pcie=SLOW)
    started = [copies.to_host(torch.zeros(250_000 // 4)) for _ in range(4)]
    assert not slept  # asynchronous
    may_sleep.set()
    started[-1].wait()
    assert clock[0] == pytest.approx(4 * 0.035) and len(slept) == 4


def test_every_copy_is_a_span_of_the_timeline():
    """Also one that is still in flight at the end of a recording: no byte is left out."""
    copies = HostCopy(pcie=SLOW)
    with timeline.record() as earlier:
        left = copies.to_device(torch.zeros(250_000), torch.empty(250_000))
    assert earlier.bytes_by_axis() == {"host": 1_000_000}
    with timeline.record() as recorded:
        copies.to_host(torch.zeros(1000)).wait()
        left.wait()
    [span] = recorded.select(kind="comm")
    assert (span.name, span.axis, span.num_bytes) == ("to_host", "host", 4000)
    assert span.duration >= 0.01  # as PCIe takes


def test_an_error_in_the_lane_is_raised_where_it_is_waited_for():
    """Mutant: a lane that dies, so that `wait` hangs."""
    copies = HostCopy()
    tensor = torch.zeros(3)
    expanded = torch.zeros(1).expand(3)  # cannot be written to
    with pytest.raises(RuntimeError, match="more than one element"):
        copies.to_device(tensor, expanded).wait()
    assert torch.equal(copies.to_host(tensor).wait(), tensor)


def test_memory_of_the_host_is_told_apart():
    seen = []
    before = set(memory.tags)  # other tests' models may still be alive
    memory.watchers.append(lambda storage, *word: seen.append(word))
    try:
        assert not memory.is_on_host()
        with memory.on_host():
            with memory.on_host():
                assert memory.is_on_host()
            memory.tag("gradients", torch.zeros(1))  # still inside of the outer one
            assert memory.is_on_host()
        memory.tag("gathered", torch.zeros(1))
    finally:
        memory.watchers.pop()
    assert seen == [("gradients", True), ("gathered", False)]
    gc.collect()
    assert set(memory.tags) <= before  # the word goes with its tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_per_direction_on_a_gpu():
    copies = HostCopy("cuda")
    tensor = torch.randn(1 << 20, device="cuda")
    on_host = copies.to_host(tensor).wait()
    assert on_host.is_pinned() and torch.equal(on_host, tensor.cpu())
    back = copies.to_device(on_host, torch.empty_like(tensor)).wait()
    assert torch.equal(back, tensor)
