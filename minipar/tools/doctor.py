"""`minipar doctor`: what this machine has, and whether ranks can work together on it.

A page that can be pasted into an issue: what is as it should be, what is worth knowing, and what
will fail, with its cure. Five probes: software, memory, GPUs, network, ranks.
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
from typing import NamedTuple

import psutil
import torch

import minipar
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Mesh
from minipar.comm.threads import usable_cores
from minipar.ranks.launch import Ranks
from minipar.train.out_of_memory import free_bytes

RANKS = 4
PACKAGES = "matplotlib", "jupyterlab", "ipywidgets", "safetensors", "tokenizers", "tqdm"
NEEDED_BYTES = 1.5e9  # by these ranks and their notebook, with some room


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine, and say what works; exit code 1 where something will fail."""


class Line(NamedTuple):
    """The finding: "ok", "note" (worth knowing) or "FAIL"."""

    mark: str
    what: str
    says: str


def run(config: DoctorConfig) -> None:
    """Print the page. Raises `SystemExit(1)` where something will fail."""
    lines = [software(), memory(), gpus(), network()]
    if lines[-1].mark != "FAIL":  # else ranks wait for each other for minutes
        lines.append(ranks())
    print(f"minipar {minipar.__version__} on {platform.platform(terse=True)}")
    for mark, what, says in lines:
        print(f"{mark:4}  {what:8}  {says}")
    if any(line.mark == "FAIL" for line in lines):
        raise SystemExit(1)
    print("Nothing will fail.")


def software() -> Line:
    """Return the versions of Python and PyTorch, and which packages are missing."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    is_good = sys.version_info >= (3, 11) and version >= (2, 13)
    says = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    says += "; 3.11 and 2.13 are needed"
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        is_good, says = False, f"{says}; missing: pip install {' '.join(missing)}"
    return Line("ok" if is_good else "FAIL", "software", says)


def memory() -> Line:
    """Return the free memory, and the cores."""
    free, total = free_bytes(1), psutil.virtual_memory().total
    says = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}; {usable_cores()} cores, "
    says += f"load {os.getloadavg()[0]:.1f}"
    if free >= NEEDED_BYTES:
        return Line("ok", "memory", says)
    needed = f"four ranks and a notebook take {NEEDED_BYTES / 1e9:g} GB: end other programs"
    return Line("FAIL", "memory", f"{says}; {needed}")


def gpus() -> Line:
    """Return the GPUs that PyTorch can use."""
    if not torch.cuda.is_available():
        return Line("note", "GPUs", "none that PyTorch can use: ranks compute on the CPU, by gloo")
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    says = "; ".join(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in found)
    return Line("ok", "GPUs", says)


def network() -> Line:
    """Return where gloo listens: at GLOO_SOCKET_IFNAME, else at the address of the host's name."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        here = psutil.net_if_addrs()
        if not {*name.split(",")} <= {*here}:
            says = f"GLOO_SOCKET_IFNAME={name}, but the interfaces here are {', '.join(here)}"
            return Line("FAIL", "network", says)
        return Line("ok", "network", f"gloo listens at the interface {name}")
    address = "127.0.0.1"
    with suppress(OSError), socket.socket() as own:
        own.bind((socket.gethostname(), 0))  # is it one of this host's?
        address = own.getsockname()[0]
    if address.startswith("127."):
        cure = "Between hosts, export GLOO_SOCKET_IFNAME=INTERFACE"
        return Line("note", "network", f"gloo listens at {address}: fine on one host. {cure}")
    return Line("ok", "network", f"gloo listens at {address}")


def probe(size: int) -> float:
    """Return the seconds of a small all-reduce. Raises `ArithmeticError` for a wrong sum."""
    axis, one, times = Mesh(dp=size).world, torch.ones(1), []
    for _ in range(20):
        start = time.perf_counter()
        if (total := all_reduce(one, axis).item()) != size:
            raise ArithmeticError(f"the sum of {size} ones is {total:g}")
        times.append(time.perf_counter() - start)
    return min(times)


def ranks() -> Line:
    """Start ranks, and let them talk."""
    start = time.perf_counter()
    try:
        with Ranks(RANKS, timeout=30) as pool:
            begun = time.perf_counter() - start
            seconds = max(pool.run(probe, RANKS))
    except (RuntimeError, OSError, ValueError) as error:  # also of ranks
        return Line("FAIL", "ranks", " ".join(str(error).split())[-300:])  # the cause comes last
    says = f"{RANKS} ranks start in {begun:.1f} s; an all-reduce takes {seconds * 1e3:.2f} ms"
    return Line("ok", "ranks", says)
