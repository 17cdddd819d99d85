"""`minipar doctor`: what this machine has, and whether ranks can work together on it.

A page that can be pasted into an issue: the software, the memory, the GPUs, the network, and
whether ranks start and talk.
"""

import os
import platform
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

import minipar
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Mesh
from minipar.ranks.launch import Ranks

RANKS = 4


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine, and say what works; exit code 1 where something will fail."""


def run(config: DoctorConfig) -> None:
    """Print the page. Raises `SystemExit`, with the cause, where ranks fail."""
    print(f"minipar {minipar.__version__} on {platform.platform(terse=True)}")
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}")
    memory = psutil.virtual_memory()
    print(f"{memory.available / 1e9:.1f} GB of memory free of {memory.total / 1e9:.1f}")
    print(f"GPUs: {gpus()}")
    print(f"network: {network()}", flush=True)
    try:
        print(f"ranks: {ranks()}. Nothing will fail.")
    except (RuntimeError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[-300:]  # the cause comes last
        raise SystemExit(f"FAIL: ranks: {why}") from None


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


def ranks() -> str:
    """Start ranks, and let them talk. Raises `RuntimeError` where they fail, or sum up wrongly."""
    start = time.perf_counter()
    with Ranks(RANKS, timeout=30) as pool:
        sums = pool.run(lambda: all_reduce(torch.ones(1), Mesh(dp=RANKS).world).item())
    if set(sums) != {RANKS}:
        raise RuntimeError(f"the sums of {RANKS} ones are {sums}")
    return f"{RANKS} ranks start, sum up and end in {time.perf_counter() - start:.1f} s"
