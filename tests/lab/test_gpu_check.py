"""The check for GPUs, rehearsed on the CPU: all of it runs, and it can fail."""

import json
from pathlib import Path

import pytest
import torch

from minipar.lab import gpu_check
from minipar.train import trainer
from minipar.train.metrics import read
from tests.parity.harness import muted


@pytest.mark.slow
def test_rehearsal_goes_through_all_checks(tmp_path):
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    *parity, measured, recorded = rows
    assert {(row["plan"], row["precision"]) for row in parity} == {
        (plan, precision) for plan in gpu_check.PLANS[::5] for precision in gpu_check.TOLERANCE
    }
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in parity)
    assert (measured["check"], recorded["check"]) == ("utilisation", "timeline")
    assert 0 < measured["share_of_matmul"] < 2
    assert {"forward", "backward", "optimizer"} <= set(recorded["spans"])
    assert (tmp_path / "gpu_timeline.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_plan_that_does_another_thing_is_noticed(ranks, tmp_path, monkeypatch):
    """Mutants: gradients that are not summed; a plan that fails is left out."""
    monkeypatch.setattr(gpu_check, "TOLERANCE", {"float32": 1e-4})
    monkeypatch.setattr(gpu_check, "train", train_when_muted)
    plans = ["dp=2", "tp=2"]
    rows = gpu_check.parity(ranks(1), ranks(2), plans, str(tmp_path))
    assert [row["plan"] for row in rows] == plans and not any(row["ok"] for row in rows)


def train_when_muted(config, folder):
    if config.mesh == "dp=1":
        return trainer.train(config, folder) and read(Path(folder) / "metrics.jsonl")
    if config.mesh == "tp=2":
        raise RuntimeError("no such kernel")
    with muted():
        trainer.train(config, folder)
    return read(Path(folder) / "metrics.jsonl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "minipar: error: there is no GPU here; --rehearse runs on the CPU\n"
    )
