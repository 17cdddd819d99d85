"""The check for GPUs, rehearsed on the CPU: all of it runs, and it can fail."""

import json
from pathlib import Path

import pytest
import torch

from minipar.lab import gpu_check
from minipar.model.llama import PRESETS

MEASURED = Path("notebooks/assets/measured")


@pytest.mark.slow
def test_rehearsal_goes_through_all_checks(tmp_path, capsys):
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    _, calibrated, *alone, talked = rows
    assert calibrated["peak"]["fp32"] > 1e8
    assert [row["recompute"] for row in alone] == ["none", "full"]
    for row in alone:
        assert row["ok"] and row["tflops_per_device"] > 0 and row["simulated_ms"] > 0
        assert row["simulated_bytes"] > 16 * PRESETS["tiny"].num_parameters
        assert row["communication_ms"] == 0
    assert talked["ok"] and 0 < talked["hidden_fraction"] <= 1 and talked["communication_ms"] > 0
    assert [*tmp_path.glob("gpu_timeline_dp2.png")]
    assert "on the CPU: nothing of a GPU; failed: nothing" in capsys.readouterr().out


def test_a_failure_is_a_row_and_does_not_end_the_check(tmp_path, monkeypatch, capsys):
    """Mutant: the first error ends it."""

    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_check, "calibrated", fails)
    monkeypatch.setattr(gpu_check, "measure", lambda *_: {"ok": True})
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 1
    _, failed, *others = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert failed == {"check": "calibrate", "message": "no such kernel", "ok": False}
    assert len(others) == 3 and "failed: calibrate" in capsys.readouterr().out


@pytest.mark.slow
def test_the_simulator_knows_what_was_measured_on_a_gpu(monkeypatch):
    """The steps of the H200 whose rows are here. Mutants: norms spelled out in operations; products
    at the rate of a data sheet's peak."""
    told = json.loads((MEASURED / "gpu.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(gpu_check.backends, "compute_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(gpu_check, "name_of", lambda _: told[0]["device"])
    done = 0
    for recompute, preset, *size in gpu_check.ALONE:
        for old in told:
            known = zip(gpu_check.KEYS, (recompute, preset, *size), strict=True)
            same = all(old.get(k) == v for k, v in known)
            if same and "simulated_ms" in old and not old.get("loss_chunk"):
                plan = gpu_check.plan_of("dp=1", recompute)
                machine = MEASURED / "gpu_machine.toml"
                new = gpu_check.simulated(plan, PRESETS[preset], *size, machine)
                assert new["simulated_bytes"] == pytest.approx(old["peak_bytes"], rel=0.02)
                assert new["simulated_ms"] == pytest.approx(old["step_ms"], rel=0.03)
                assert new["data_sheet_ms"] == pytest.approx(old["step_ms"], rel=0.08)
                done += 1
    assert done
