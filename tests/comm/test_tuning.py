"""Tuning: the line through measured messages, and the all-reduce that it calls the fastest."""

import pytest

from minipar.comm import plans
from minipar.comm.mesh import Axis
from minipar.comm.tuning import Tuning, fit, tune


def test_fit_finds_the_line():
    sizes = [1_000, 50_000, 2_000_000]
    alpha, beta = fit(sizes, [3e-4 + 2e-9 * size for size in sizes])
    assert alpha == pytest.approx(3e-4) and beta == pytest.approx(2e-9)
    alpha, beta = fit(sizes, [1e-3, 1e-3, 1e-4])  # nonsense
    assert alpha > 0 and beta > 0


def test_nccl_is_left_to_itself(monkeypatch):
    """Mutant: messages of host memory, which travel by gloo beside it."""
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "cpu:gloo,cuda:nccl")
    with pytest.raises(ValueError, match="NCCL chooses its algorithms by itself; use gloo or link"):
        tune(Axis("dp", 0, 2, (0, 1)))


def test_best_is_the_fastest_by_size():
    """One port each, 16 ranks on 1 GbE: direct, then a few rounds, then the ring's bytes."""
    tuning = Tuning(16, 50e-6, 8e-9)
    assert tuning.best(16) == "direct"
    assert tuning.best(10_000) == "halving_doubling"
    for num_bytes in 16, 10_000, 10_000_000:
        times = {name: tuning.seconds(name, num_bytes) for name in plans.ALL_REDUCE}
        assert tuning.best(num_bytes) == min(times, key=times.get)
    assert Tuning(3, 50e-6, 8e-9).best(10_000) != "halving_doubling"  # no power of two
    assert Tuning(4, 1e-6, 1e-9, sharing=0.0).best(10**6) != "direct"
    assert Tuning(4, 1e-3, 1e-9, sharing=0.0).best(10**6) == "direct"
