"""Background work: in order, in nobody's way, and its errors are heard of."""

import pytest
import torch

from minipar.comm.background import Background
from minipar.comm.values import lane
from tests.streams import GPU, Streams


def test_on_a_gpu_kernels_are_beside_those_of_the_rank_too(monkeypatch):
    """Mutants: on the stream of its backward; before what it sends is there; nobody waits; one
    stream for dp and tp, to which ranks come in different orders; not after what is before it."""
    streams = Streams(monkeypatch)
    lane.cache_clear()

    def begin(name: str, before: list[Background], purpose: str) -> Background:
        work = lambda: streams.log.append(f"{name} on {streams.now}")  # noqa: E731
        begun = Background(work, before, GPU, purpose)
        begun._thread.join()
        return begun

    first = begin("first", [], "dp")
    second = begin("second", [first], "dp")
    begin("third", [second], "dp+tp").wait()
    lane.cache_clear()
    begins = "lane 0 waits for computing"
    assert streams.log == [
        *(begins, "first on lane 0", begins, "lane 0 waits for lane 0", "second on lane 0"),
        *("lane 1 waits for computing", "lane 1 waits for lane 0", "third on lane 1"),
        "computing waits for lane 1",
    ]


def test_an_error_reaches_who_waits_and_not_what_comes_after():
    done, cpu = [], torch.device("cpu")
    failing = Background(lambda: 1 / 0, [], cpu, "first")
    with torch.inference_mode():  # the thread works in the mode of its caller
        mode = lambda: done.append(torch.is_inference_mode_enabled())  # noqa: E731
        Background(mode, [failing], cpu, "second").wait()
    assert done == [True]
    with pytest.raises(ZeroDivisionError):
        failing.wait()
