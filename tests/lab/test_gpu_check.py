"""The check for GPUs, rehearsed on the CPU: all of it runs, and it can fail."""

import json
from pathlib import Path

import pytest

from minipar.lab import gpu_check
from minipar.model.llama import PRESETS
from minipar.parallel.plan import Plan
from minipar.sim import hardware
from minipar.sim.replay import replay
from minipar.sim.trace import trace

MEASURED = Path("notebooks/assets/measured")


@pytest.mark.slow
def test_rehearsal_goes_through_all_checks(tmp_path, capsys):
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    _, *alone, talked = rows
    assert [row["recompute"] for row in alone] == ["none", "full"]
    for row in alone:
        assert row["ok"] and row["tflops_per_device"] > 0
        assert row["communication_ms"] == 0
    assert talked["ok"] and 0 < talked["hidden_fraction"] <= 1 and talked["communication_ms"] > 0
    assert "on the CPU: nothing of a GPU; failed: nothing" in capsys.readouterr().out


def test_a_failure_is_a_row_and_does_not_end_the_check(tmp_path, monkeypatch, capsys):
    """Mutant: the first error ends it."""

    def fails(config):
        if "full" in config.plan:
            raise ValueError("no such kernel")
        return {"ok": True}

    monkeypatch.setattr(gpu_check, "measure", fails)
    monkeypatch.setattr(gpu_check, "ALONE", (("full", "tiny", 1, 64), ("none", "tiny", 1, 64)))
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 1
    _, failed, *others = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert failed["message"] == "no such kernel" and not failed["ok"]
    assert len(others) == 2 and "failed: dp=1" in capsys.readouterr().out


@pytest.mark.slow
def test_the_simulator_knows_what_was_measured_on_a_gpu():
    """A step of the H200 whose rows are here. Mutants: norms spelled out in operations; products
    at the rate of a data sheet's peak."""
    rows = json.loads((MEASURED / "gpu.json").read_text(encoding="utf-8"))
    (row,) = [r for r in rows if "peak_bytes" in r and not r["compile"] and not r["loss_chunk"]]
    plan = Plan.parse(f"precision=bf16,checkpointing={row['recompute']}")
    traces = trace(
        PRESETS[row["preset"]], plan, sequences=row["batch_size"], seq_len=row["seq_len"]
    )
    assert sum(traces.at_peak().values()) == pytest.approx(row["peak_bytes"], rel=0.02)
    seconds = replay(traces, hardware.load("h200")).seconds
    assert 1e3 * seconds == pytest.approx(row["step_ms"], rel=0.08)
