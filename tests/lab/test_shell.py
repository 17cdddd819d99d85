"""The shell of a rank: whoever looks at what it does changes nothing. The rest: test_cells.py."""

import threading
import traceback
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from minipar.lab import shell
from minipar.lab.memory import OverBudget, budget


def test_looking_where_a_rank_waits_keeps_no_tensor_alive(monkeypatch):
    """Mutant: frames of the last look that are kept until the next one, with all their tensors."""
    looked, done = threading.Event(), threading.Event()
    pauses = iter(range(2))

    def sleep(seconds: float) -> None:
        if next(pauses) == 1:  # the look is over
            looked.set()
            done.wait()
            raise SystemExit

    monkeypatch.setattr(shell, "time", SimpleNamespace(sleep=sleep))

    def watching() -> None:
        with suppress(SystemExit):
            shell._watch()

    watch = threading.Thread(target=watching, daemon=True)

    def compute() -> weakref.ref:
        tensor = torch.ones(3)
        watch.start()
        assert looked.wait(10)
        return weakref.ref(tensor)

    try:
        assert compute()() is None
    finally:
        done.set()
        watch.join(10)


def test_frames_that_only_pass_a_call_on_are_left_out():
    """Two blocks, one in the other, and a budget. Mutants: frames in the middle stay; the cut takes
    the learner's own along; the first frame goes."""

    class Inner(torch.nn.Module):
        def forward(self, x):
            return (x / 2).expand(8, 4).clone()

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(Inner())

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(OverBudget) as caught, budget(100):
        Outer()(torch.ones(4))
    before = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    shell._cut_plumbing(caught.value)
    after = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert before.count("_call_impl") == 3 and "__torch_dispatch__" in before
    assert after == [before[0], "forward", "forward"]
