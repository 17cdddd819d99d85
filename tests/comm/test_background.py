"""Background work: in order, in nobody's way, and its errors are heard of."""

import pytest
import torch

from minipar.comm.background import Background
from tests.streams import GPU, Streams


def test_on_a_gpu_kernels_are_beside_those_of_the_rank_too(monkeypatch):
    """Mutants: on the stream of its backward; before what it sends is there; nobody waits."""
    streams = Streams(monkeypatch)

    def begin(name: str, after: Background | None) -> Background:
        work = lambda: streams.log.append(f"{name} on {streams.now}")  # noqa: E731
        begun = Background(work, after, GPU, name)
        begun._thread.join()
        return begun

    first = begin("first", None)
    begin("second", first).wait()
    begin("of another strategy", None)
    assert streams.log == [
        *("lane 0 waits for computing", "first on lane 0"),
        *("lane 0 waits for computing", "second on lane 0", "computing waits for lane 0"),
        *("lane 1 waits for computing", "of another strategy on lane 1"),
    ]


def test_an_error_reaches_who_waits_and_not_what_comes_after():
    done, cpu = [], torch.device("cpu")
    failing = Background(lambda: 1 / 0, None, cpu, "first")
    with torch.inference_mode():  # the thread works in the mode of its caller
        mode = lambda: done.append(torch.is_inference_mode_enabled())  # noqa: E731
        Background(mode, failing, cpu, "second").wait()
    assert done == [True]
    with pytest.raises(ZeroDivisionError):
        failing.wait()
