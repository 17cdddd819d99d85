"""What is measured is written down as a machine that loads; nccl-tests' output may be pasted."""

from dataclasses import replace

import numpy as np
import pytest

from minipar.cli import main
from minipar.emulate import link
from minipar.ranks.launch import RankError
from minipar.sim import calibrate, fit, hardware

MEASURED = {"launch": 4e-6, "fp32": 1e-11, "bf16": 2e-11, "byte": 1e-10, "memory": -8e9}
MEASURED |= {"forward": 2e-11, "backward": 4e-11, "short": 3.2e-11, "length": 512, "shorter": 4}
PASTED = """# nThread 1 nGpus 2 ... all_reduce_perf
#  Rank  0 Group  0 Pid  1 on  node device  0 [0x18] NVIDIA H100
#  Rank  1 Group  0 Pid  1 on  node device  1 [0x2a] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    50.00   20.97   20.97      0
  1073741824     268435456     float     sum      -1  3000.00  357.91  357.91      0
# Avg bus bandwidth    : 189.4
"""


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_written_machine_has_the_times_that_made_it(tmp_path, kind):
    """A processor's, and a GPU's, whose attention is measured in bf16. Mutants: a rate that is a
    time; a fit that is not written; sequences of any length alike; a GPU without processors."""
    measured = MEASURED | ({"processors": 114, "bf16": 5e-12} if kind == "bf16" else {})
    path, model = tmp_path / "m.toml", hardware.load("this-cpu")
    model = replace(model, inside=replace(model.inside, launch=3e-4, bandwidth=4e9, ramp=0.2))
    rows = [("all_reduce", int(n), 4, 1) for n in 2 ** np.arange(12, 26)]
    points = [
        fit.Point("", str(path), *row, fit.wire_bytes("all_reduce", row[1], 4)
                  / model.seconds_of_collective(*row)) for row in rows
    ]  # fmt: skip
    machine = calibrate.write(path, measured, points, 4)
    assert (machine.gpus, machine.device.memory) == (4, 8e9)
    assert machine.device.processors == (114 if kind == "bf16" else 1)
    assert machine.device.peak["fp32"] == pytest.approx(1e11)
    assert machine.device.seconds_of_bytes(1e9) == pytest.approx(0.1, rel=0.01)
    for length, seconds in ((512, MEASURED["forward"]), (128, MEASURED["short"])):
        sizes = 1, 8, length, length, 64
        found = machine.device.seconds_of_attention(*sizes, kind) - MEASURED["launch"]
        assert found == pytest.approx(seconds * 2 * 8 * length**2 * 64, rel=0.01)
    for row in rows:
        found = machine.seconds_of_collective(*row)
        assert found == pytest.approx(model.seconds_of_collective(*row), rel=0.1)
    assert calibrate.write(path, measured, [], 1).gpus == 1


def test_a_pasted_output_may_be_of_more_ranks_than_measure_here(tmp_path):
    """Mutants: as many devices as measured, on which the fit is refused; a file before the fit."""
    path, log = tmp_path / "m.toml", tmp_path / "log.txt"
    log.write_text(PASTED, encoding="utf-8")
    points = calibrate.parse_nccl(log, str(path))
    machine = calibrate.write(path, MEASURED, points, 1)
    assert machine.gpus == 2 and "placeholder" not in path.read_text(encoding="utf-8")
    path.unlink()
    with pytest.raises(ValueError, match="no collective"):
        calibrate.write(path, MEASURED, [replace(points[0], verb="no_verb")], 1)
    assert not path.exists()


def test_a_network_that_nothing_measured_is_said_to_be_a_placeholder(tmp_path):
    """Mutant: numbers of nobody's, labelled as measured."""
    calibrate.write(tmp_path / "m.toml", MEASURED, [], 1)
    device, _, network = (tmp_path / "m.toml").read_text(encoding="utf-8").partition("[network.")
    assert "measured here" in device and "placeholder" not in device
    assert "placeholder" in network and "measured here" not in network


def test_the_output_of_nccl_tests_is_read(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(PASTED, encoding="utf-8")
    points = calibrate.parse_nccl(path, "h100")
    assert [(p.verb, p.num_bytes, p.ranks, p.bus) for p in points] == [
        ("all_reduce", 2**20, 2, 20.97e9),
        ("all_reduce", 2**30, 2, 357.91e9),
    ]
    path.write_text(PASTED.replace("on  node device  1", "on  other device  1"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"ran on 2 hosts \(node, other\)"):
        calibrate.parse_nccl(path, "h100")
    path.write_text("nothing of the kind", encoding="utf-8")
    with pytest.raises(ValueError, match="no output of nccl-tests"):
        calibrate.parse_nccl(path, "h100")


@pytest.mark.parametrize("old", ["20.97", "1048576", "#  Rank", "all_reduce_perf", "float", "\n"])
@pytest.mark.parametrize("new", ["", "1.2.3", ".", "9" * 5000, "nan", "\0", " 7" * 9999])
def test_hostile_output_of_nccl_tests_is_read_or_refused(tmp_path, old, new):
    """Mutant: what is no number is an error that names no file."""
    path = tmp_path / "log.txt"
    assert old in PASTED
    path.write_text(PASTED.replace(old, new), encoding="utf-8")
    try:
        points = calibrate.parse_nccl(path, "h100")
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(0 < p.bus < 1e15 and 0 < p.num_bytes < 1e15 and p.ranks > 1 for p in points)


@pytest.mark.parametrize("out", ["W/no/where.toml", "W/machine.json"])
def test_a_bad_place_is_one_line_before_anything_is_measured(tmp_path, capfd, out):
    with pytest.raises(SystemExit) as stop:
        main.main(["calibrate", "--out", out.replace("W", str(tmp_path))])
    assert stop.value.code == 2 and "name a .toml file" in capfd.readouterr().err


def test_calls_of_the_emulated_link_are_measured_without_their_check(tmp_path, monkeypatch):
    """It is a call of its own, which `python -m minipar.sim.here` leaves out of its steps."""

    def look(*_) -> None:
        raise ValueError(f"compared: {link.checks}")

    monkeypatch.setattr(calibrate, "measure", look)
    config = calibrate.CalibrateConfig(str(tmp_path / "here.toml"), ranks=2)
    with pytest.raises(RankError, match="compared: False"):
        calibrate.run(config, backend="link")


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path, capfd):
    machine = calibrate.run(calibrate.CalibrateConfig(str(tmp_path / "here.toml"), ranks=2))
    assert machine.gpus == 2 and 1e8 < machine.device.peak["fp32"] < 1e16
    assert 1e-7 < machine.device.launch < 1e-3  # of an operation: a whole step takes some ms
    assert machine.seconds_of_collective("all_reduce", 2**20, 2) > 1e-6
    assert "written into" in capfd.readouterr().out
