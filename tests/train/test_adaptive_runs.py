"""Whole runs whose batches or shares change: the same on any ranks, and when interrupted."""

import json
import math

import pytest
import torch

from minipar.observe.timeline import Timeline
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.precision import LossScaler, Precision
from tests.train.runs import assert_same_run

PLAIN = TrainConfig(
    steps=6,
    batch_size=4,
    seq_len=16,
    dtype="float64",
    warmup_steps=0,
    lr=1e-3,
    schedule="stable",
    eval_batches=2,
    sample_tokens=0,
    save_every=3,
    record_every=100,
)


def column(folder, key: str) -> list:
    return [line[key] for line in read(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_ramp_is_the_same_run_on_any_ranks_and_resumed_anywhere(run):
    """Mutants: a batch that grows on one rank, an lr without its rule, a ramp that starts anew."""
    ramp = dict(batch_ramp="6@2,9@4")
    one = run(1, "one", **ramp)
    assert column(one, "batch_size") == [4, 4, 6, 6, 9, 9]
    assert column(one, "tokens") == [16 * size for size in (4, 4, 6, 6, 9, 9)]
    rates = [math.sqrt(size / 4) for size in (4, 4, 6, 6, 9, 9)]
    found = column(one, "lr")
    assert found[:4] == pytest.approx([1e-3 * rate for rate in rates[:4]])  # the decay comes later
    two = run(2, "two", **ramp)
    assert_same_run(two, one)
    rest = run(2, "rest", start=two / "checkpoints/step_000003", **ramp)
    assert column(rest, "loss") == column(two, "loss")[3:]  # to the bit
    assert column(rest, "batch_size") == [6, 9, 9]
    linear = run(1, "linear", batch_lr="linear", **ramp)
    assert column(linear, "lr")[2] == pytest.approx(1.5e-3)


@pytest.mark.slow
def test_the_batch_grows_with_the_noise_and_is_resumed_to_the_bit(run):
    """Mutants: noise or patience not in the checkpoint; a rank that decides for itself hangs or
    loses samples, and then the tokens are wrong."""
    growing = dict(steps=30, seq_len=8, batch_size=2, grow_batch_to=4, save_every=15, lr=5e-3)
    whole = run(2, "whole", **growing)
    assert column(whole, "batch_size") == [2] * 20 + [4] * 10  # it waits for 20 steps
    full = [8 * size for size in column(whole, "batch_size")]
    off = [b - a for a, b in zip(column(whole, "tokens"), full, strict=True)]
    assert all(0 <= gap < 8 for gap in off)  # the last sequence of the text is shorter, once each
    assert sum(gap > 0 for gap in off) <= 2  # epoch
    assert column(whole, "lr")[20] == pytest.approx(math.sqrt(2) * 5e-3)
    assert column(whole, "noise_scale")[19] >= 32
    rest = run(2, "rest", start=whole / "checkpoints/step_000015", **growing)
    for key in ("loss", "batch_size", "noise_scale", "lr", "tokens"):
        assert column(rest, key) == column(whole, key)[15:], key


@pytest.mark.slow
def test_measuring_noise_changes_nothing(run):
    """--grow-batch-to of the batch size itself. In the rank's order of additions: to the bit."""
    plain, measured = run(2, "plain"), run(2, "measured", grow_batch_to=4)
    assert column(plain, "loss") == column(measured, "loss")
    assert set(column(measured, "batch_size")) == {4}
    assert any(noise is not None for noise in column(measured, "noise_scale"))


@pytest.mark.slow
def test_microbatches_go_to_the_faster_rank_and_training_stays_the_same(run):
    """Rank 1 is slowed 6 times. Mutants: speeds with waiting in them (all alike, nothing moves),
    a step that is not the sum over all tokens."""
    even = run(2, "even", batch_size=16, microbatches=4)
    moved = run(2, "moved", batch_size=16, microbatches=4, slow="1=6", rebalance_every=2)
    shares = column(moved, "shares")
    assert shares[:2] == [[4, 4]] * 2
    assert all(sum(pair) == 8 and pair[0] >= 5 for pair in shares[2:])
    assert_same_run(moved, even)
    state = checkpoint.load(moved / "checkpoints/step_000003")[1]
    fast, slow = state["workload"]["balance"]["speeds"]
    assert fast > 1.5 * slow
    rest = run(
        2,
        "rest",
        start=moved / "checkpoints/step_000003",
        **dict(batch_size=16, microbatches=4, slow="1=6", rebalance_every=2),
    )
    assert column(rest, "shares")[0] == shares[3]
    assert column(rest, "loss") == pytest.approx(column(even, "loss")[3:], rel=1e-10)
    recorded = Timeline.load(moved / "timeline.json")
    assert "rank 1 slowed 6 times on purpose" in recorded.label
    assert recorded.select(name="slowed on purpose").ranks == [1]


def test_a_skipped_step_is_null_in_the_metrics(run, monkeypatch):
    """The gradient norm of a step left out by loss scaling is infinite: JSON has no such word."""
    wild = LossScaler(init_scale=2.0**100)
    monkeypatch.setattr(trainer, "Precision", lambda *args: Precision(*args, scaler=wild))
    folder = run(1, "fp16", precision="fp16", dtype="float32", steps=2)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert found[0]["skipped_steps"] == 1 and found[0]["grad_norm"] is None
    assert math.isfinite(found[0]["loss"])
    torch.testing.assert_close(found[0]["tokens"], 64)
