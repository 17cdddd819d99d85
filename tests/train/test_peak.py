"""Utilisation: FLOPs of the model over FLOP/s of the devices, and which kind of number that is."""

import pytest
import torch

from minipar.comm.mesh import Axis, Mesh
from minipar.train import peak

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_cpu_is_measured_and_says_so():
    """Mutants: in another dtype; the random numbers of the run are used up."""
    before = torch.get_rng_state()
    found = peak.of_ranks(CPU, torch.float32, Mesh().world)
    assert torch.get_rng_state().equal(before)
    assert 1e8 < found.flops_per_second < 1e14
    assert found.source == "a float32 matmul, measured on 1 ranks at once"
    one, large = (peak.matmul_rate(CPU, torch.float32, size, 0.02) for size in (4, 256))
    assert large > 5 * one  # small matmuls are not the peak


def test_boards_with_the_same_chip_have_peaks_of_their_own(monkeypatch):
    """And of a slice none is known. Mutant: all that is called H100 is an SXM."""
    for name, expected in {
        "NVIDIA H200": (989e12, 67e12),
        "NVIDIA H200 NVL": (835e12, 60e12),
        "NVIDIA H100 PCIe": (756e12, 51e12),
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": (None, None),
        "NVIDIA T4": (None, None),
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found = tuple(peak.data_sheet(GPU, kind) for kind in (torch.bfloat16, torch.float32))
        assert found == expected, name
    assert peak.data_sheet(GPU, torch.float64) is None  # measured
    assert peak.data_sheet(CPU, torch.float32) is None


def test_gpus_that_ranks_share_count_once(monkeypatch):
    """Four ranks, two H100. Mutant: the sum over ranks, so that sharing halves the utilisation."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("", (), {"uuid": "GPU-0"})
    )
    gathered = [("GPU-0", 989e12), ("GPU-1", 989e12)] * 2
    monkeypatch.setattr(
        peak, "all_gather_object", lambda own, _: gathered if own in gathered else pytest.fail()
    )
    monkeypatch.setattr(peak, "barrier", lambda _: None)
    found = peak.of_ranks(GPU, torch.bfloat16, Axis("world", 0, 4, (0, 1, 2, 3)))
    assert found.flops_per_second == 2 * 989e12
    assert found.source == "NVIDIA H100 80GB HBM3 in bfloat16, by its data sheet"
