"""`minipar doctor`: what this machine has, and whether ranks can work together on it.

A page that can be pasted into an issue: what is as it should be, and what will fail, with its
cure. Five probes: software, memory, GPUs, network, ranks.
"""

import os
import platform
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

import psutil
import torch

import minipar
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Mesh
from minipar.ranks.launch import Ranks

RANKS = 4
PACKAGES = "matplotlib", "jupyterlab", "safetensors", "tokenizers", "tqdm"
NEEDED_BYTES = 1.5e9  # by these ranks and their notebook, with some room


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine, and say what works; exit code 1 where something will fail."""


def run(config: DoctorConfig) -> None:
    """Print the page. Raises `SystemExit(1)` where something will fail."""
    print(f"minipar {minipar.__version__} on {platform.platform(terse=True)}")
    failed = False
    for probe in (software, memory, gpus, network, ranks):
        try:
            mark, says = "ok", probe()
        except (RuntimeError, OSError, ValueError) as error:  # also of ranks
            mark, says = "FAIL", " ".join(str(error).split())[-300:]  # the cause comes last
            failed = True
        print(f"{mark:4}  {probe.__name__:8}  {says}", flush=True)
    if failed:
        raise SystemExit(1)
    print("Nothing will fail.")


def software() -> str:
    """Return the versions of Python and PyTorch. Raises `ValueError` if they are old, or alone."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    says = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing or sys.version_info < (3, 11) or version < (2, 13):
        wanted = " ".join(missing) or "torch"
        raise ValueError(f"{says}; 3.11 and 2.13 are needed: pip install {wanted}")
    return says


def memory() -> str:
    """Return the free memory. Raises `ValueError` where ranks find too little."""
    held = psutil.virtual_memory()
    says = f"{held.available / 1e9:.1f} GB free of {held.total / 1e9:.1f}"
    if held.available < NEEDED_BYTES:
        raise ValueError(f"{says}: ranks and a notebook take more; end other programs")
    return says


def gpus() -> str:
    """Return the GPUs that PyTorch can use."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    says = "; ".join(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in found)
    return says or "none that PyTorch can use: ranks compute on the CPU, by gloo"


def network() -> str:
    """Return where gloo listens: at GLOO_SOCKET_IFNAME, else at the address of the host's name."""
    where = os.environ.get("GLOO_SOCKET_IFNAME", "127.0.0.1")
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        with suppress(OSError), socket.socket() as own:
            own.bind((socket.gethostname(), 0))  # is it one of this host's?
            where = own.getsockname()[0]
    cure = ": fine on one host. Between hosts, export GLOO_SOCKET_IFNAME=INTERFACE"
    return f"gloo listens at {where}{cure * where.startswith('127.')}"


def probe(size: int) -> float:
    """Return the sum of the ones of all ranks."""
    return all_reduce(torch.ones(1), Mesh(dp=size).world).item()


def ranks() -> str:
    """Start ranks, and let them talk. Raises `RuntimeError` where they fail, or sum up wrongly."""
    start = time.perf_counter()
    with Ranks(RANKS, timeout=30) as pool:
        sums = pool.run(probe, RANKS)
    if set(sums) != {RANKS}:
        raise RuntimeError(f"the sums of {RANKS} ones are {sums}")
    return f"{RANKS} ranks start, sum up and end in {time.perf_counter() - start:.1f} s"
