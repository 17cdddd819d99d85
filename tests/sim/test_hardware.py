"""Devices and networks: the numbers are those of their sources, and the laws behave like hardware.

`collectives.csv` holds a few published rows of each table that the constants were fitted to.
"""

import math
import runpy
import sys
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.emulate.link import LINKS
from minipar.sim import fit, hardware
from minipar.sim.hardware import HardwareError, load
from minipar.train.peak import DATA_SHEETS

H100 = load("h100-ndr")


# ---------------------------------------------------------------------- numbers
# stas00/ml-engineering, compute/accelerator/README.md: TFLOP/s, dense; memory in TB/s.
@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "fp4", "fp32", "memory"),
    [
        ("a100", 312, None, None, 19.5, 2.0),
        ("h100", 989, 1979, None, 67, 3.35),
        ("h100-pcie", 756, 1513, None, 51, 2.0),
        ("h200", 989, 1979, None, 67, 4.8),
        ("b200", 2250, 4500, 9000, 80, 8.0),
        ("gb200", 2500, 5000, 10_000, 80, 8.0),
        ("b300", 2250, 4500, 12_600, 80, 8.0),
        ("gb300", 2500, 5000, 15_000, 80, 8.0),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, bf16, fp8, fp4, fp32, memory):
    device = load(name).device
    assert device.peak["bf16"] == bf16 * 1e12 and device.peak["fp32"] == fp32 * 1e12
    for narrow, peak in (("fp8", fp8), ("fp4", fp4)):
        assert device.peak.get(narrow) == (peak and peak * 1e12)
    assert device.memory_bandwidth == memory * 1e12


# The same, the fastest products of mamf-finder.py: TFLOP/s, and the shape m x n x k.
@pytest.mark.parametrize(
    ("name", "dtype", "best", "shape"),
    [
        ("a100", "bf16", 271.2, (1024, 10240, 5120)),
        ("h100", "bf16", 794.5, (2048, 2048, 13312)),
        ("b200", "bf16", 1745.0, (1792, 16128, 3072)),
        ("gb200", "bf16", 1822.0, (4096, 9728, 2048)),
        ("h100", "fp8", 1402.6, (1024, 9216, 14336)),
        ("h200", "fp8", 1453.4, (1280, 4096, 12032)),
    ],
)
def test_ceilings_are_the_fastest_products_measured(name, dtype, best, shape):
    """Mutant: a product beats the ceiling, or the shape that reached it is held for a bad one.

    (Its inner side is short for two of them, so that the law lets them write for long.)
    """
    device = load(name).device
    assert device.ceiling_of(dtype) == best * 1e12 < device.peak[dtype]
    rate = 2 * math.prod(shape) / device.seconds_of_matmul(*shape, dtype)
    assert 0.72 < rate / (best * 1e12) <= 0.95


def test_a_ceiling_that_is_not_published_is_the_peak_at_the_share_of_bf16():
    device = load("a100").device
    assert device.ceiling_of("float16") == device.ceiling_of("bf16")
    assert replace(device, peak={"fp32": 1e12}).ceiling_of("fp32") == 1e12
    assert device.ceiling_of("fp32") == pytest.approx(19.5e12 * 271.2 / 312)


def test_links_that_can_be_emulated_have_the_bandwidth_they_have_here():
    """Mutant: gigabits for gigabytes in one of the two tables."""
    shared = {"1gbe": "between", "10gbe": "between", "100gbe": "between", "ib-ndr": "between"}
    for name, where in shared.items():
        machine = load(f"h100-{name.removeprefix('ib-')}")
        assert getattr(machine, where).bandwidth == LINKS[name].bandwidth
    for name, machine in {"nvlink4": "h100", "nvlink5": "b200", "pcie5": "h100-pcie"}.items():
        assert load(machine).inside.bandwidth == LINKS[name].bandwidth


def test_every_number_has_a_source_and_every_machine_loads():
    assert len(hardware.names()) > 60
    for name in hardware.names():
        assert load(name).name == name
    folder = resources.files("minipar.sim") / "machines"
    for path in folder.iterdir():
        sources = tomllib.loads(path.read_text(encoding="utf-8"))["sources"]
        text = path.read_text(encoding="utf-8")
        for short in sources:  # none that nothing refers to
            assert text.count(short) > 1, short
    project = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert project["tool"]["setuptools"]["package-data"]["minipar.sim"] == ["machines/*.toml"]


def test_utilisation_is_counted_from_the_same_peaks():
    """`train.peak` may not import the simulator: two tables, one truth."""
    sheets = {part.lower().replace(" ", "-"): rates for part, rates in DATA_SHEETS.items()}
    assert len(shared := sheets.keys() & hardware.names()) == 4  # others cannot be simulated
    for name in shared:
        peak, (in_16_bits, in_float32) = load(name).device.peak, sheets[name]
        assert (peak["bf16"], peak["fp16"], peak["fp32"]) == (in_16_bits, in_16_bits, in_float32)


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


def test_attention_reaches_what_was_published():
    """FlashAttention-3 on H100, head width 128, 16k tokens in all: TFLOP/s, causal forward."""
    for length, published in {512: 292, 1024: 423, 2048: 521, 4096: 579, 16384: 616}.items():
        batch = 16384 // length
        seconds = H100.device.seconds_of_attention(batch, 16, length, length, 128, kernel="flash3")
        rate = 4 * batch * 16 * length**2 * 128 / 2 / seconds / 1e12
        assert rate == pytest.approx(published, rel=0.13), length


def test_unfused_attention_is_slower_and_backward_is_slower_than_forward():
    shape = (4, 32, 4096, 4096, 128)
    one = H100.device.seconds_of_attention
    assert one(*shape, kernel="flash3") < one(*shape) < one(*shape, kernel="unfused")
    assert one(*shape, causal=False) > 1.9 * one(*shape)
    for kernel in ("flash2", "unfused"):
        assert one(*shape, backward=True, kernel=kernel) > 1.2 * one(*shape, kernel=kernel)
    with pytest.raises(ValueError, match="flash2.*flash3.*unfused"):
        one(*shape, kernel="flash9")
    assert load("v100").device.seconds_of_attention(1, 8, 512, 512, 64, "fp16") > 0  # unfused


def test_memory_that_is_left_shrinks_with_process_groups():
    device = H100.device
    groups = (replace(device, nccl=count * device.nccl) for count in (0, 1, 4, 10_000))
    left = [each.usable_memory() for each in groups]
    assert device.memory > left[0] > left[1] > left[2] > 0.8 * device.memory
    assert left[3] == 0


def test_types_have_torch_s_names_too():
    torch = pytest.importorskip("torch")
    one = H100.device.seconds_of_matmul
    assert (
        one(512, 512, 512, torch.bfloat16) == one(512, 512, 512, "bfloat16") == one(512, 512, 512)
    )
    assert one(8192, 8192, 8192, torch.float8_e4m3fn) < one(8192, 8192, 8192)
    with pytest.raises(ValueError, match="a100 has no fp8; it has fp32, tf32"):
        load("a100").device.seconds_of_matmul(8, 8, 8, "fp8")
    with pytest.raises(ValueError, match="no type 'int7'"):
        one(8, 8, 8, "int7")
    with pytest.raises(ValueError, match="m=-1 must be"):
        one(-1, 8, 8)


def test_a_layer_takes_as_long_as_was_published():
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 4: the 22B model, 4 x 2048 tokens, tp = 8,
    A100, without recomputation: 7.7 ms forward, 11.9 ms backward. Nothing is fitted to it."""
    machine, tokens, width, tp = load("a100"), 4 * 2048, 6144, 8
    device, num_bytes = machine.device, tokens * width * 2
    inputs = [(3 * width // tp, width), (width, width // tp)]
    inputs += [(4 * width // tp, width), (width, 4 * width // tp)]
    products = sum(device.seconds_of_matmul(tokens, n, k) for n, k in inputs)
    # Two norms, two dropouts with their residuals, and a GELU on the rank's share of 4 widths.
    touched = 2 * 2 * num_bytes + 2 * 3.5 * num_bytes + 2 * 4 * num_bytes / tp
    other = machine.seconds_of_collective("all_reduce", num_bytes, tp) * 2
    other += device.seconds_of_bytes(touched)
    heads = (4, 64 // tp, 2048, 2048, 96)
    scores = [device.seconds_of_attention(*heads, kernel="unfused", backward=b) for b in (0, 1)]
    assert products + scores[0] + other == pytest.approx(7.7e-3, rel=0.1)
    assert 2 * products + scores[1] + other == pytest.approx(11.9e-3, rel=0.1)


# ---------------------------------------------------------------------- collectives
TABLE = Path(__file__).with_name("collectives.csv")


# Stated: the median and the 90th percentile of |predicted / published - 1|, in-sample.
@pytest.mark.parametrize(
    ("source", "median", "most"),
    [
        ("vtrain", 0.05, 0.25),
        ("ml-engineering", 0.06, 0.30),
        ("ultrascale", 0.25, 0.50),
        ("simai", 0.15, 0.40),
    ],
)
def test_collectives_take_as_long_as_was_published(source, median, most):
    """And beat a constant bus bandwidth, which the same rows are measured with."""
    points = [point for point in fit.read(TABLE) if point.source == source]
    assert len(points) >= 9
    found = fit.errors(points, [p.predicted() for p in points])
    assert found[0] < median and found[1] < most
    flat = [float(np.median([p.bus for p in points]))] * len(points)
    assert found[0] < 0.7 * fit.errors(points, flat)[0]


def test_the_fit_finds_the_constants_that_made_the_times():
    """Times made with other constants than the file's, and noise in one row of eight."""
    made = {"launch": 70e-6, "share": 0.6, "ramp": 0.9}
    network = replace(load("a100").inside, **made)
    points = []
    for ranks in (2, 4, 8):
        for size in 2 ** np.arange(15, 33):
            point = fit.Point("", "a100", "all_gather", int(size), ranks, 1, 1.0)
            wrong = 3.0 if len(points) % 8 == 0 else 1.0
            points.append(replace(point, bus=wrong * point.predicted(inside=network)))
    found = fit.fit(points, "inside", list(made))
    assert found == pytest.approx(made, rel=0.05)


def test_no_fit_has_more_than_all_of_the_bandwidth():
    """Of messages that a network cannot have carried so fast, and slowly for no reason between."""
    network = load("a100").inside
    points = [
        fit.Point("", "a100", "all_reduce", size, 2, 1, bus * network.bandwidth)
        for size, bus in ((2**12, 0.1), (2**20, 0.01), (2**24, 0.3), (2**28, 3.0), (2**30, 5.0))
    ]
    found = fit.fit(points, "inside", ["launch", "share", "ramp"])
    assert found["share"] <= 1 and found["ramp"] <= 2


def test_the_fit_prints_errors_and_constants(capsys):
    fit.main(str(TABLE))
    printed = capsys.readouterr().out
    assert "vtrain" in printed and "a100, inside: launch = " in printed


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "No such file"),
        ("source,machine\nhere,a100", "has no column 'bytes'; use source,machine,verb"),
        (f"{fit.COLUMNS}\nhere,a100,all_reduce,many,8,1,2", "row 1 needs numbers as its bytes"),
        (f"{fit.COLUMNS}\nhere,a101,all_reduce,8,8,1,2", "no machine 'a101'"),
    ],
)
def test_what_is_no_table_of_collectives_is_one_line(tmp_path, monkeypatch, rows, message):
    """Mutant: a traceback."""
    path = tmp_path / "table.csv"
    if rows:
        path.write_text(rows, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["fit", str(path)])
    monkeypatch.delitem(sys.modules, "minipar.sim.fit")
    with pytest.raises(SystemExit, match=message) as error:
        runpy.run_module("minipar.sim.fit", run_name="__main__")
    assert str(error.value).count("\n") == 0


sizes = st.floats(0, 1e12)
groups = st.sampled_from([(2, 1), (5, 1), (8, 1), (2, 2), (16, 2), (64, 8), (1024, 128)])


@given(st.sampled_from(hardware.VERBS), sizes, sizes, groups, st.sampled_from(["h100-ndr", "v100"]))
def test_more_bytes_never_take_less_time(verb, one, other, group, name):
    machine = load(name)
    less, more = (machine.seconds_of_collective(verb, s, *group) for s in sorted((one, other)))
    assert 0 < less <= more < math.inf


def test_one_rank_is_free_and_latency_dominates_what_is_small():
    for verb in hardware.VERBS:
        assert H100.seconds_of_collective(verb, 1e9, 1) == 0
    for nodes in (1, 4):
        small, double, large = (
            H100.seconds_of_collective("all_reduce", size, 8 * nodes, nodes)
            for size in (1e3, 2e3, 1e9)
        )
        assert double < 1.05 * small < 0.05 * large
    many = [H100.seconds_of_collective("all_gather", 8, 8 * n, n) for n in (2, 8, 64)]
    assert many == sorted(many)


def test_a_switch_that_reduces_beats_the_ring_and_a_tree_beats_it_far_away():
    """NVLS (ml-engineering, network/README.md): 480 instead of 367 GB/s on 8 H200."""
    times = load("h200").algorithms("all_reduce", 16e9, 8, 1)
    assert times["ring"] / times["nvls"] == pytest.approx(480 / 367, rel=0.03)
    assert "nvls" not in load("a100").algorithms("all_reduce", 16e9, 8, 1)
    times = H100.algorithms("all_reduce", 8, 1024, 128)
    assert times["tree"] < 0.1 * times["ring"]


def test_a_port_that_a_node_shares_is_divided_by_its_devices():
    """Eight groups of one rank per node, or one of eight: the card sends as much either way."""
    machine = load("h100-100gbe")
    one = machine.seconds_of_collective("all_gather", 1e10, 2, 2)
    assert one == pytest.approx(1e10 / 2 / (12.5e9 / 8 * 0.94), rel=0.01)
    all_eight = machine.seconds_of_collective("all_gather", 1e10, 16, 2)
    assert all_eight == pytest.approx(one / 8 * (15 / 16) / (1 / 2), rel=0.05)
    own_ports = load("h100-ndr").seconds_of_collective("all_gather", 1e10, 2, 2)
    assert own_ports == pytest.approx(1e10 / 2 / (50e9 * 0.96), rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("all_reduce", 1, 9, 1), "9 ranks on 1 nodes of h100-ndr.* use 2 to 9 nodes"),
        (("all_reduce", 1, 2, 4), "use 1 to 2 nodes"),
        (("allreduce", 1, 2, 1), "did you mean 'all_reduce'"),
        (("all_reduce", -1, 2, 1), "num_bytes=-1"),
        (("all_reduce", math.nan, 2, 1), "num_bytes=nan"),
    ],
)
def test_impossible_collectives_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        H100.seconds_of_collective(*call)


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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1e9", "[nan", "device.other.memory: nan must be"),
        ("[1e9", "[-1", "device.other.memory: -1 must be"),
        ("[1e9", "[true", "device.other.memory: must be .number, .source"),
        ("[1e9", "['a'", "device.other.memory: must be .number, .source"),
        ('[1e9, "measured"]', "1e9", "device.other.memory: must be .number, .source"),
        ('"measured"', '""', "device.other.memory: must be .number, .source"),
        ("[1e9", f"[{10**400}", "device.other.memory: 1000.* must be"),
        ("memory =", "memroy =", "device.other.memroy: is not known here; did you mean memory"),
        ('like = "h100"', "", "device.other.context: is missing"),
        ('like = "h100"', 'like = "other"', "device.other.like: 'other': is like itself"),
        ('like = "h100"', 'like = "h10"', "no such device; there is h100"),
        ('"nvlink4"', "4", "node.mine.inside: 4: no such network"),
        ("gpus = [4,", "gpus = [4.5,", "gpus: 4.5 must be .* whole"),
        ("[node.mine]", "[nodes.mine]", "nodes: is not known here; did you mean node"),
        ("latency", "share = [1.2, 's']\nlatency", "slow.share: 1.2 must be .* at most 1"),
        ("memory =", "peak.bf61 = [1, 's']\nmemory =", "peak.bf61: is not .* mean bf16"),
        ("memory =", "attention.x.forward = [1, 's']\nmemory =", "x.backward: is missing"),
        ("[node.mine]", "[node.mine", "cannot be read as TOML"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name_and_key(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(HardwareError, match=message) as caught:
        loaded(tmp_path, GOOD.replace(old, new, 1))
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match="h100-ndr"):
        load("h100_ndr")
    with pytest.raises(ValueError, match=r"no-such.toml: cannot be read"):
        load("no-such.toml")


odd = ["1", "nan", "'h100'", "true", "[]", "{}", "[1, 'a']", "1979-05-27", "[-0.0, '']", '"""\n"""']
places = ["4", '"counted"', '"other"', '"h100"', "[1e9", '"slow"', "=", "\n", "device", "node.mine"]
changed = st.lists(st.tuples(st.sampled_from(places), st.sampled_from([*odd, *places])), max_size=4)


@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])]
)
def test_no_file_brings_another_error_than_our_own(tmp_path, count):
    path = tmp_path / "fuzz.toml"

    @settings(max_examples=count, deadline=None)
    @given(changed, st.text(max_size=20))
    def once(changes, text):
        text = GOOD if changes else text
        for old, new in changes:
            text = text.replace(old, new)
        path.write_bytes(text.encode("utf-8", "replace"))
        try:
            assert load(path).device.memory > 0
        except HardwareError as error:
            assert "\n" not in str(error)

    once()
