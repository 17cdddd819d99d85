"""`minipar calibrate`: the file that it writes has what was measured, and nothing else."""

from dataclasses import replace

import pytest

from minipar.cli import main
from minipar.sim import calibrate, hardware, planner
from minipar.sim.asked import PlanConfig

MEASURED = {
    "fp32": 1 / 50e12, "bf16": 1 / 700e12, "byte": 1 / 3e12, "launch": 4e-6, "processors": 132,
    "forward": 1 / 400e12, "backward": 1 / 350e12,
    "length": 4096, "memory": -80e9,
}  # fmt: skip


def test_the_written_machine_is_the_measured_one(tmp_path):
    """Mutants: a GPU without processors; seconds for rates; a network's latency in its rate."""
    messages = {str(2**12): 20e-6, str(2**28): 20e-6 + 2 * 7 / 8 * 2**28 / 400e9}
    machine = calibrate.write(tmp_path / "m.toml", MEASURED | messages, 8)
    device = machine.device
    assert machine == hardware.load(tmp_path / "m.toml") and machine.gpus == 8
    assert device.peak == pytest.approx({"fp32": 50e12, "bf16": 700e12})
    assert (device.memory, device.processors) == (80e9, 132)
    assert device.memory_bandwidth == pytest.approx(3e12, rel=1e-5)
    took, flops = device.seconds_of_attention(1, 320, 4096, 4096, 64), 2 * 320 * 4096**2 * 64
    assert flops / took == pytest.approx(400e12, rel=0.01)
    times = [machine.seconds_of_collective("all_reduce", 2**k, 8) for k in (12, 28)]
    assert times == pytest.approx([messages[str(2**k)] for k in (12, 28)], rel=0.01)


@pytest.mark.parametrize(("ranks", "gpus", "where"), [(1, 8, "between"), (8, 16, "between")])
def test_a_network_that_nobody_measured_ranks_nothing(tmp_path, ranks, gpus, where):
    """Mutant: one rank's placeholder of some GB/s, by which plans are ranked without a word."""
    path, messages = tmp_path / "m.toml", {"4096": 2e-5, str(2**28): 1e-3}
    calibrate.write(path, MEASURED | (messages if ranks > 1 else {}), ranks)
    asked = PlanConfig("llama-3.2-1b", gpus, str(path), 2048, 64, replay=False)
    with pytest.raises(ValueError, match=f"has no network {where} its nodes, as nobody"):
        planner.answer(asked)
    assert planner.answer(replace(asked, gpus=ranks))[1]  # alone, or in a node


@pytest.mark.parametrize(
    ("out", "says"),
    [("W/no/where.toml", "name a .toml"), ("W/a.json", "name a .toml"), ("W/a.toml", "is there")],
)
def test_a_bad_place_is_one_line_before_anything_is_measured(tmp_path, capfd, out, says):
    """Mutant: a file in which a person has named a network is lost."""
    (tmp_path / "a.toml").touch()
    with pytest.raises(SystemExit) as stop:
        main.main(["calibrate", "--out", out.replace("W", str(tmp_path))])
    assert stop.value.code == 2 and says in capfd.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path, capfd):
    machine = calibrate.run(calibrate.CalibrateConfig(str(tmp_path / "here.toml"), ranks=2))
    assert machine.gpus == 2 and 1e8 < machine.device.peak["fp32"] < 1e16
    assert 1e-8 < machine.device.launch < 1e-3
    assert machine.seconds_of_collective("all_reduce", 2**20, 2) > 1e-6
    assert "written into" in capfd.readouterr().out
