"""The shell of a rank: whoever looks at what it does changes nothing. The rest: test_cells.py."""

import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import torch

from minipar.lab import shell


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
