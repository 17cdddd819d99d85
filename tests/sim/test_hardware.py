"""Devices and networks: the numbers are those of their sources, and the laws behave like hardware.

`collectives.csv` holds a few published rows of each table that the constants were fitted to.
"""

import csv
import math
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from minipar.comm.collectives import wire_bytes
from minipar.emulate.link import LINKS
from minipar.sim import hardware
from minipar.sim.hardware import load

H100 = load("h100-ndr")


# ---------------------------------------------------------------------- numbers
def test_links_that_can_be_emulated_have_the_bandwidth_they_have_here():
    """Mutant: gigabits for gigabytes in one of the two tables."""
    for name in ("1gbe", "10gbe", "100gbe", "ib-ndr"):
        machine = load(f"h100-{name.removeprefix('ib-')}")
        assert machine.between.bandwidth == LINKS[name].bandwidth
    for name, machine in {"nvlink4": "h100", "nvlink5": "b200", "pcie5": "h100-pcie"}.items():
        assert load(machine).inside.bandwidth == LINKS[name].bandwidth


def test_every_number_has_a_source_and_every_machine_loads():
    assert len(hardware.machines()) > 60
    for name in hardware.machines():
        assert load(name).name == name
    folder = resources.files("minipar.sim") / "machines"
    for path in folder.iterdir():
        sources = tomllib.loads(path.read_text(encoding="utf-8"))["sources"]
        text = path.read_text(encoding="utf-8")
        for short in sources:  # none that nothing refers to
            assert text.count(short) > 1, short


# ---------------------------------------------------------------------- one device
def test_small_products_are_far_from_the_ceiling():
    """Mutants: no launch; no tiles; no memory."""

    def rate(*shape):
        return 2 * math.prod(shape) / H100.device.seconds_of_matmul(*shape)

    assert rate(64, 64, 64) < 1e-3 * rate(8192, 8192, 8192)
    assert rate(16, 8192, 8192) < 0.2 * rate(8192, 8192, 8192)
    written = 8192**2 * 2 / H100.device.memory_bandwidth  # with k = 16 that is what takes time
    assert written < H100.device.seconds_of_matmul(8192, 8192, 16) < 2 * written
    # A tile is written when it is done: of two products as long, the deeper one is the faster.
    assert 0.85 < rate(8192, 8192, 8192) / 794.5e12 < 0.9 < rate(8192, 8192, 65536) / 794.5e12
    assert rate(8192, 8192, 2048) < 0.9 * rate(8192, 8192, 65536)


def test_bytes_travel_at_a_share_of_the_data_sheet_s_rate():
    device = replace(load("a100").device, memory_bandwidth=1e12, memory_efficiency=0.5, launch=0.0)
    assert device.seconds_of_bytes(1e12) == pytest.approx(2.0)


# ---------------------------------------------------------------------- collectives
TABLE = Path(__file__).with_name("collectives.csv")


# Stated: the median and the 90th percentile of |predicted / published - 1|, in-sample.
@pytest.mark.parametrize(
    ("source", "median", "most"),
    [
        ("vtrain", 0.08, 0.20),
        ("ml-engineering", 0.10, 0.25),
        ("ultrascale", 0.15, 0.50),
        ("simai", 0.05, 0.20),
    ],
)
def test_collectives_take_as_long_as_was_published(source, median, most):
    """And beat a constant bus bandwidth, which the same rows are measured with."""
    text = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [r for r in csv.DictReader(line for line in text if line[0] != "#")]
    rows = [r for r in rows if r["source"] == source and r["machine"] != "v100"]
    took, measured, buses = [], [], []
    for r in rows:
        what = r["verb"], int(r["bytes"]), int(r["ranks"])
        took.append(load(r["machine"]).seconds_of_collective(*what, int(r["nodes"])))
        measured.append(wire_bytes(*what) / float(r["busbw"]) / 1e9)
        buses.append(float(r["busbw"]))
    off = np.abs(np.array(took) / measured - 1)
    flat = np.abs(np.array(buses) / np.median(buses) - 1)
    assert len(rows) >= 8 and np.median(off) < median and np.quantile(off, 0.9) < most
    assert np.median(off) < 0.7 * np.median(flat)


def test_short_messages_among_many_ranks_take_a_tree():
    """Mutant: two thousand steps of a ring for a gradient's norm."""
    small, large = (H100.seconds_of_collective("all_reduce", n, 8192, 1024) for n in (8, 16e9))
    assert small < 1e-3 < 2 * 1023 * H100.between.latency < large
    assert small < 0.1 * H100.seconds_of_collective("all_gather", 8, 8192, 1024)


def test_a_network_that_nobody_named_is_an_error():
    """Mutant: its placeholder numbers."""
    nobody = replace(H100.inside, name="none")
    alone, apart = replace(H100, inside=nobody), replace(H100, between=nobody)
    for machine, ranks, nodes, where in ((alone, 2, 1, "inside"), (apart, 2, 2, "between")):
        with pytest.raises(ValueError, match=f"h100-ndr has no network {where} its nodes"):
            machine.seconds_of_collective("all_reduce", 8, ranks, nodes)
    assert alone.seconds_of_collective("all_reduce", 8, 2, 2) > 0  # one rank of each node
    assert not any("none" in name for name in hardware.machines())


def test_a_port_that_a_node_shares_is_divided_by_its_devices():
    """Eight groups of one rank per node, or one of eight: the card sends as much either way."""
    machine = load("h100-100gbe")
    one = machine.seconds_of_collective("all_gather", 1e10, 2, 2)
    assert one == pytest.approx(1e10 / 2 / (12.5e9 / 8 * 0.94), rel=0.01)
    all_eight = machine.seconds_of_collective("all_gather", 1e10, 16, 2)
    assert all_eight == pytest.approx(one / 8 * (15 / 16) / (1 / 2), rel=0.05)
    own_ports = load("h100-ndr").seconds_of_collective("all_gather", 1e10, 2, 2)
    assert own_ports == pytest.approx(1e10 / 2 / (50e9 * 0.96), rel=0.01)


# ---------------------------------------------------------------------- files
GOOD = """
[node.mine]
device = "other"
gpus = [4, "counted"]
inside = "nvlink4"
between = "slow"
[device.other]
like = "h100"
memory = [1e9, "measured"]
[network.slow]
like = "1gbe"
latency = [0, "measured"]
"""


def loaded(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    return load(tmp_path / "mine.toml")


def test_a_file_of_one_s_own_builds_on_what_is_there(tmp_path):
    machine = loaded(tmp_path, GOOD)
    assert (machine.name, machine.gpus, machine.device.memory) == ("mine", 4, 1e9)
    assert machine.device.peak == H100.device.peak
    assert machine.between.latency == 0 and machine.between.bandwidth == 125e6
    namesake = loaded(tmp_path, GOOD.replace("other", "h100"))  # like the built-in one
    assert namesake.device == replace(machine.device, name="h100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1e9", "[nan", "other.memory must be .number of 0 or more"),
        ("memory =", "memroy =", "Device.* unexpected keyword argument 'memroy'"),
        ("gpus = [4", 'like = "8xh100"\ngpus = [4', "no node '8xh100'; there are"),
        ('gpus = [4, "counted"]', "", "Machine.* missing 1 required .*: 'gpus'"),
        ("gpus = [4", "gpus = [2.5", "mine.gpus=2.5 must be a whole number"),
        ('like = "h100"', 'like = "h10"', "no device 'h10'; there are .*h100"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name_and_key(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=message) as caught:
        loaded(tmp_path, GOOD.replace(old, new, 1))
    assert "mine.toml is not a machine" in str(caught.value) and "\n" not in str(caught.value)
