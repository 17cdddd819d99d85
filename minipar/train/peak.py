"""The peak FLOP/s of a device, and the share of the peak that training uses.

Model FLOPs utilisation (MFU) = FLOPs that the model needs per token * tokens/s / peak FLOP/s of all
devices; recomputed FLOPs do not count. Source: Chowdhery et al., "PaLM" (arXiv 2204.02311),
appendix B. The first factor is `LlamaConfig.flops_per_token`.

The peak of a GPU comes from its data sheet, for dense matrices: no program reaches it.
The peak of any other device depends on its cores, its clock and other processes. It is *measured*:
the speed of a matmul on all ranks at once. Training with larger matmuls may then exceed 100 %.
`Peak.source` says which of the two a figure is.
"""

import re
import time
from dataclasses import dataclass

import torch

from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis

# Part of the name of a GPU: FLOP/s in 16 bits, and in float32 without TF32. The first that fits
# counts: "H100" is the SXM board.
DATA_SHEETS = {
    " MIG ": (None, None),  # a slice of a GPU
    "H200 NVL": (835e12, 60e12),
    "H200 PCIe": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
}


@dataclass(frozen=True)
class Peak:
    """FLOP/s of all ranks together, and where the number is from."""

    flops_per_second: float
    source: str

    def utilisation(self, flops_per_token: int, num_tokens: int, seconds: float) -> float:
        """Return the MFU of `seconds` in which all ranks together trained on `num_tokens`."""
        return flops_per_token * num_tokens / seconds / self.flops_per_second


def of_ranks(device: torch.device, dtype: torch.dtype, axis: Axis) -> Peak:
    """Return the peak of the ranks of `axis` for matmuls in `dtype`; a collective.

    A GPU that several ranks share counts once.
    """
    sheet, kind = data_sheet(device, dtype), str(dtype).removeprefix("torch.")
    barrier(axis)  # so that ranks measure at the same time, as they will compute
    if device.type == "cuda" and sheet is not None:
        own = str(torch.cuda.get_device_properties(device).uuid), sheet
        source = f"{torch.cuda.get_device_name(device)} in {kind}, by its data sheet"
    else:
        own = axis.rank, matmul_rate(device, dtype, 8192 if device.type == "cuda" else 256)
        source = f"a {kind} matmul, measured on {axis.size} ranks at once"
    rates = dict(all_gather_object(own, axis))
    return Peak(sum(rates.values()), source)


def data_sheet(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s that the maker of a GPU promises; None for other devices and dtypes."""
    if device.type != "cuda" or dtype.itemsize not in (2, 4):
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"-\d+C$", name):  # a virtual GPU, such as "NVIDIA H100XM-80C": a share of one
        return None
    in_16_bits, in_float32 = next((v for k, v in DATA_SHEETS.items() if k in name), (None, None))
    return in_16_bits if dtype.itemsize == 2 else in_float32


def _synchronise(device: torch.device) -> None:
    """Wait until `device` has finished all work launched so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(
    device: torch.device, dtype: torch.dtype, size: int, min_seconds: float = 0.2
) -> float:
    """Return the FLOP/s of a large square matmul: what this device can really do.

    It is the mean over `min_seconds`, long enough for other processes to use the cores in between.
    """
    generator = torch.Generator(device).manual_seed(0)  # leaves the global generator as it is
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    a @ b  # warms up
    _synchronise(device)
    start, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < min_seconds:
        a @ b
        _synchronise(device)
        count, seconds = count + 1, time.perf_counter() - start
    return 2 * size**3 * count / seconds
