"""The check for GPUs, rehearsed on the CPU: all of it runs, and it can fail."""

import json

import pytest
import torch

from minipar.lab import gpu_check
from tests.parity.harness import muted


@pytest.mark.slow
def test_rehearsal_goes_through_all_checks(tmp_path):
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [row["check"] for row in rows] == ["parity"] * 6 + ["utilisation", "timeline"]
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in rows[:6])
    assert {row["dtype"] for row in rows[:6]} == {"float32", "bfloat16"}
    assert 0 < rows[6]["share_of_matmul"] < 2
    assert {"forward", "backward", "optimizer"} <= set(rows[7]["spans"])
    assert (tmp_path / "gpu_timeline.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_strategy_that_sends_nothing_is_noticed(ranks):
    rows = ranks(2).run(parity_when_muted)[0]
    assert not any(row["ok"] for row in rows)


def parity_when_muted():
    with muted():
        return gpu_check.parity()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "minipar: error: there is no GPU here; --rehearse runs on the CPU\n"
    )
