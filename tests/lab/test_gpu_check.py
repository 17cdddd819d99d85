"""The check for GPUs, rehearsed on the CPU: all of it runs, and it can fail."""

import json
from pathlib import Path

import pytest
import torch

from minipar.lab import gpu_check
from minipar.lab.gpu_check import Rows
from minipar.model.llama import PRESETS
from minipar.parallel.plan import Plan
from tests.law.harness import muted

MEASURED = Path("notebooks/assets/measured")


@pytest.mark.slow
def test_rehearsal_goes_through_all_checks(tmp_path, capsys, monkeypatch):
    """And, asked again, measures nothing twice. Mutant: a file that is written at the end alone."""
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    by_check: dict[str, list] = {}
    for row in rows:
        by_check.setdefault(row["check"], []).append(row)
    assert [row["plan"] for row in by_check["parity"]] == list(gpu_check.PLANS[::6])
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in by_check["parity"])
    assert by_check["calibrate"][0]["peak"]["fp32"] > 1e8
    assert [row["recompute"] for row in by_check["utilisation"]] == ["none", "full"]
    for row in by_check["utilisation"]:
        assert 0 < row["share_of_matmul"] < 2 and row["simulated_ms"] > 0
        assert row["simulated_bytes"] > 16 * PRESETS["tiny"].num_parameters
    alone, *talked = by_check["overlap"]
    assert alone["plan"] == "dp=1" and alone["communication_ms"] == 0
    for row in talked:
        assert row["ok"] and 0 < row["hidden_fraction"] <= 1 and row["communication_ms"] > 0
    said = capsys.readouterr().out
    assert "the CPU: nothing of a GPU: parity dp=2" in said and "fastest: " in said
    for name in ("parity", "overlap", "utilisation", "calibrated"):
        monkeypatch.setattr(gpu_check, name, lambda *_: pytest.fail("measured again"))
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == rows


def test_a_row_that_fails_is_noted_and_tried_again(tmp_path):
    """Mutants: one failure ends the check; memory that is full counts as a failure."""
    rows, machine = Rows(tmp_path / "gpu.json", gpus=1), dict(gpus=1)

    def fails(words):
        raise RuntimeError(words)

    rows.add({"check": "parity", "plan": "dp=2"}, lambda: fails("no such kernel"))
    rows.add({"check": "utilisation"}, lambda: fails("torch.OutOfMemoryError: CUDA"))
    rows.add({"check": "overlap", "plan": "tp=2"}, lambda: {"ok": True})
    assert [row.get("ok") for row in rows] == [None, False, None, True]
    assert rows[2]["message"] == "does not fit into memory"
    assert "FAILED: parity dp=2" in gpu_check.verdict(rows, 1)
    again = Rows(tmp_path / "gpu.json", **machine)
    assert [row["check"] for row in again] == ["machine", "utilisation", "overlap"]
    assert len(Rows(tmp_path / "gpu.json", gpus=2)) == 1  # another machine


@pytest.mark.slow
def test_ranks_that_do_not_talk_are_noticed(monkeypatch):
    assert gpu_check.parity("dp=2", 0)["ok"]
    monkeypatch.setattr(gpu_check, "losses", losses_when_muted)
    assert not gpu_check.parity("dp=2", 0)["ok"]


def losses_when_muted(plan: Plan, experts: bool = False) -> list[float]:
    with muted():
        return losses(plan, experts)


losses = gpu_check.losses


@pytest.mark.slow
def test_the_simulator_knows_what_was_measured_on_a_gpu(monkeypatch):
    """The steps of the H200 whose rows are here. Mutants: norms spelled out in operations; products
    at the rate of a data sheet's peak."""
    told = json.loads((MEASURED / "gpu.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(gpu_check.backends, "compute_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(gpu_check, "name_of", lambda _: told[0]["device"])
    done = 0
    for setting in gpu_check.settings(told[0]["preset"]):
        for old in told:
            same = all(old.get(k) == v for k, v in vars(setting).items())
            if same and "simulated_ms" in old and not old.get("loss_chunk"):
                new = gpu_check.simulated(setting, MEASURED / "gpu_machine.toml")
                assert new["simulated_bytes"] == pytest.approx(old["peak_bytes"], rel=0.02)
                assert new["simulated_ms"] == pytest.approx(old["step_ms"], rel=0.03)
                assert new["data_sheet_ms"] == pytest.approx(old["step_ms"], rel=0.08)
                done += 1
    assert done


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "minipar: error: there is no GPU here; --rehearse runs on the CPU\n"
    )
