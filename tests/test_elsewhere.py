"""What plays other processors: weights are nudged everywhere alike, and a failure is counted."""

import os
import runpy
import subprocess
import sys

import pytest
import torch

from minipar.model.llama import PRESETS, Llama
from tests.elsewhere import HERE, environment, sitecustomize
from tests.elsewhere.__main__ import main

WEIGHTS = """
import sys
import torch
from minipar.ranks.launch import Ranks


def weights():
    from minipar.model.llama import PRESETS, Llama

    torch.manual_seed(5)
    linear, drawn = torch.nn.Linear(3, 4), torch.rand(2)  # drawn: as without a nudge
    llama = Llama(PRESETS["tiny"])
    return drawn, linear.weight.detach(), llama.lm_head.weight.detach()


if __name__ == "__main__":
    from tests.elsewhere import sitecustomize  # as the tests of it do

    with Ranks(2) as ranks:
        torch.save([weights(), *ranks.run(weights)], sys.argv[1])
"""


@pytest.mark.slow
def test_a_nudge_moves_all_weights_by_a_last_bit_and_all_ranks_alike(tmp_path, monkeypatch):
    """Mutants: no nudge; another one per process, or a second one where a test imports the file;
    dice from the stream that tests draw from."""
    script, result = tmp_path / "weights.py", tmp_path / "weights.pt"
    script.write_text(WEIGHTS, encoding="utf-8")
    env = environment() | {"MINIPAR_NUDGE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), env["PYTHONPATH"]])
    subprocess.run([sys.executable, str(script), str(result)], env=env, check=True)
    here, *on_ranks = torch.load(result)
    for rank in on_ranks:
        assert all(map(torch.equal, here, rank))
    torch.manual_seed(5)
    linear, drawn = torch.nn.Linear(3, 4).weight.detach(), torch.rand(2)
    assert torch.equal(drawn, here[0])
    for ours, plain in zip(here[1:], (linear, Llama(PRESETS["tiny"]).lm_head.weight), strict=True):
        assert 0 < (ours / plain - 1).abs().max() < 1e-6
    monkeypatch.setattr(sitecustomize, "NUDGE", "2")
    assert not torch.equal(here[2], sitecustomize.nudged(Llama(PRESETS["tiny"]).lm_head.weight))


@pytest.mark.slow
def test_a_sweep_counts_what_fails_under_a_setting(tmp_path, monkeypatch, capsys):
    """Mutants: a sweep that never reports a failure; settings that do not reach the tests."""
    fragile = tmp_path / "test_fragile.py"
    fragile.write_text(
        "import os, pytest\n\n@pytest.mark.trains\n@pytest.mark.parametrize('holds', '12')\n"
        "def test_it(holds):\n    assert os.environ['MINIPAR_NUDGE'] == holds\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "argv", ["-m", "--settings", "nudge-2", str(fragile)])
    assert main() == 1
    table = capsys.readouterr().out.splitlines()[-1]
    assert table.startswith("| nudge-2 | 1 failed, 1 passed | ") and "test_it[1] |" in table
    monkeypatch.setattr(sys, "argv", ["-m", "--settings", "nudge-1,sse5"])
    with pytest.raises(SystemExit):
        main()
    assert "sse5 is none of as it is, default, avx2" in capsys.readouterr().err


def test_what_the_machine_says_of_its_network_reaches_no_test(monkeypatch):
    """A namespace has no eth0, and no rank of ours belongs to a launcher around the tests."""
    said = {"GLOO_SOCKET_IFNAME": "eth0", "RANK": "1", "MASTER_ADDR": "head", "all_proxy": "far"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(HERE.parent / "conftest.py"))
    assert not said.keys() & os.environ.keys()
    assert {"PATH", "PYTEST_CURRENT_TEST"} <= os.environ.keys()
