"""`minipar doctor`: what this machine has, and whether ranks can work together on it.

A page that can be pasted into an issue: what is as it should be, what is worth knowing, and what
will fail, with its cure. Under torchrun, all of its ranks take part: each host is looked at, and
must share the folder of runs with the others.
"""

import ipaddress
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

import minipar
from minipar.comm.collectives import all_gather_object, all_reduce, barrier
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.threads import usable_cores
from minipar.ranks import backends
from minipar.ranks.launch import Ranks
from minipar.train.folder import held
from minipar.train.out_of_memory import free_bytes

RANKS = 4
NEEDED_BYTES = 1.5e9
"""What four ranks and their notebook take, with some room."""


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine, and say in green and red what works; exit code 1 where it is red.

    Under torchrun, look at all of its hosts.
    """

    out: str = "runs"
    """Folder of the runs, which all hosts must share."""


class Line(NamedTuple):
    """What was found: "ok", "note" (worth knowing) or "FAIL" (red)."""

    mark: str
    what: str
    says: str


def run(config: DoctorConfig) -> None:
    """Print the page. Raises `SystemExit(1)` where something is red."""
    speaks = True
    if backends.under_torchrun():
        with backends.joined("auto", timeout=60.0):
            world = Mesh(dp=int(os.environ["WORLD_SIZE"])).world
            lines = [*_of_hosts(world), _together(world), _shared(Path(config.out), world)]
            speaks = world.rank == 0
    else:
        lines = [*machine(), _writable(Path(config.out)), *_pool()]
    if speaks:
        print(page(lines))
    if any(line.mark == "FAIL" for line in lines):
        raise SystemExit(1)


def page(lines: list[Line]) -> str:
    """Return the lines as a table, in colours on a terminal that has some."""
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    is_plain |= os.environ.get("TERM") == "dumb"
    colours = {} if is_plain else {"ok": "\x1b[32m", "FAIL": "\x1b[1;31m"}
    width = max(len(line.what) for line in lines)
    rows = [f"minipar {minipar.__version__} on {platform.platform(terse=True)}"]
    for mark, what, says in lines:
        colour, end = (colours[mark], "\x1b[0m") if mark in colours else ("", "")
        rows.append(f"{colour}{mark:4}{end}  {what:{width}}  {says}")
    red = sum(line.mark == "FAIL" for line in lines)
    rows.append(f"{red} of {len(lines)} will fail: see above" if red else "Nothing is red.")
    return "\n".join(rows)


# ---------------------------------------------------------------------- one machine
def machine() -> list[Line]:
    """Look at this host, from one process."""
    free, total = free_bytes(1) / 1e9, psutil.virtual_memory().total / 1e9
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    cores, load = usable_cores(), os.getloadavg()[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def judged(is_good: bool, what: str, says: str, cure: str) -> Line:
        return Line("ok", what, says) if is_good else Line("FAIL", what, f"{says}; {cure}")

    return [
        judged(sys.version_info >= (3, 11), "Python", platform.python_version(), "3.11 is needed"),
        judged(version >= (2, 13), "PyTorch", torch.__version__, "2.13 is needed"),
        Line("ok" if cores > 1 else "note", "cores", f"{cores}, load {load:.1f}"),
        judged(
            free * 1e9 >= NEEDED_BYTES,
            "memory",
            f"{free:.1f} GB free of {total:.1f}",
            f"four ranks and a notebook take {NEEDED_BYTES / 1e9:g}: end other programs",
        ),
        *_gpus(),
        judged(files >= 256, "open files", f"{files} at most", "ranks need more: ulimit -n 4096"),
        _gloo(),
        _nccl(),
    ]


def _gpus() -> list[Line]:
    """GPUs, and the memory through which NCCL sends between those of a host."""
    shm = 0.0
    with suppress(OSError):
        shm = os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks / 1e6
    lines = [Line("ok", "/dev/shm", f"{shm:,.0f} MB")]
    if shm < 512:
        bad = torch.cuda.device_count() > 1
        says = f"{shm:,.0f} MB; NCCL between GPUs needs more: docker run --shm-size=1g"
        lines = [Line("FAIL" if bad else "note", "/dev/shm", says)]
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in found]
        return [Line("ok", "GPUs", f"{len(found)}: {'; '.join(names)}"), *lines]
    if Path("/dev/nvidia0").exists():
        says = f"PyTorch, built for CUDA {torch.version.cuda}, cannot use those that there are"
        return [Line("FAIL", "GPUs", says), *lines]
    return [Line("note", "GPUs", "none: ranks compute on the CPU, and talk by gloo"), *lines]


def _gloo() -> Line:
    """Which interface gloo will listen at: that of the host's name, unless it is told another."""
    try:
        address = _gloo_address()
    except ValueError as error:
        return Line("FAIL", "gloo", str(error))
    if not ipaddress.ip_address(address).is_loopback:
        return Line("ok", "gloo", f"would listen at {address} ({_interface_of(address)})")
    if not (others := _outward()):
        return Line("note", "gloo", f"would listen at {address}: this host has no other network")
    return Line(
        "note",
        "gloo",
        f"would listen at {address}: this host's name leads to the loopback, in /etc/hosts (Debian "
        "writes 127.0.1.1 there). Fine on one host, in vain between hosts: there, export "
        f"GLOO_SOCKET_IFNAME={others[0]}, or put the host's own address into that file",
    )


def _gloo_address() -> str:
    """Return the address at which gloo will listen: of GLOO_SOCKET_IFNAME, or of the host's name.

    Raises `ValueError` for an interface that is not there.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        for entry in psutil.net_if_addrs().get(name, []):
            if entry.family == socket.AF_INET:
                return entry.address
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={name}: this host has no such interface with an address; use one "
            f"of {', '.join(psutil.net_if_addrs())}"
        )
    with suppress(OSError), socket.socket() as own:
        own.bind((socket.gethostname(), 0))  # is it one of this host's?
        return own.getsockname()[0]
    return "127.0.0.1"


def _interface_of(address: str) -> str:
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if address in [e.address for e in own]), "")


def _nccl() -> Line:
    """As NCCL chooses: what it is told, else ib*, else what is neither docker nor loopback."""
    told = os.environ.get("NCCL_SOCKET_IFNAME")
    choice = f"NCCL_SOCKET_IFNAME={told}" if told else next(iter(_outward()), "")
    if not choice:
        return Line("note", "NCCL", "would find the loopback alone: this host works by itself")
    return Line("ok", "NCCL", f"would take {choice}")


def _outward() -> list[str]:
    """Return the interfaces that lead out of this host, those of InfiniBand first."""
    found, states = [], psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        speaks_ip = any(e.family in (socket.AF_INET, socket.AF_INET6) for e in entries)
        is_inside = name.startswith(("docker", "lo", "virbr"))
        if speaks_ip and not is_inside and name in states and states[name].isup:
            found.append(name)
    return sorted(found, key=lambda name: not name.startswith("ib"))


# ---------------------------------------------------------------------- ranks
def probe(size: int) -> tuple[float, float, float]:
    """Return seconds of a round of work, of a small all-reduce, and of one of 4 MB; a collective.

    The quickest of many counts: others may be using this machine. Raises `ArithmeticError` where a
    sum is wrong.
    """
    axis, device = Mesh(dp=size).world, backends.compute_device()
    a, small = torch.ones(256, 256, device=device), torch.ones(1, device=device)
    large = torch.ones(1 << 20, device=device)
    if (total := all_reduce(small, axis).item()) != size:
        raise ArithmeticError(f"the sum of {size} ones is {total:g}")

    def work() -> float:
        for _ in range(8):
            a @ a
        return all_reduce(large, axis)[0].item()  # which waits for a GPU

    found = []
    for job in (work, lambda: all_reduce(small, axis).item(), lambda: all_reduce(large, axis)[0]):
        times = []
        for _ in range(20):
            barrier(axis)
            start = time.perf_counter()
            float(job())
            times.append(time.perf_counter() - start)
        found.append(min(times))
    return tuple(found)


def _pool() -> list[Line]:
    """Ranks of our own, and what the notebooks will take with such ranks."""
    start = time.perf_counter()
    try:
        with Ranks(RANKS, timeout=30) as ranks:
            begun = time.perf_counter() - start
            times = max(ranks.run(probe, RANKS))
    except (RuntimeError, OSError, ValueError) as error:  # also of ranks
        return [Line("FAIL", f"{RANKS} ranks", " ".join(str(error).split())[:300])]
    return [Line("ok", f"{RANKS} ranks", f"start in {begun:.1f} s; {_told(*times)}"), *_notebooks()]


def _told(work: float, small: float, large: float) -> str:
    times = f"an all-reduce takes {small * 1e3:.2f} ms, of 4 MB {large * 1e3:.1f} ms"
    return f"{times}, after 8 products of 256 x 256 {work * 1e3:.1f} ms"


def _notebooks() -> list[Line]:
    """Return the minutes of the host's page: for two cores that nothing else keeps busy."""
    text = ""
    with suppress(OSError):  # an installed package has none
        page = Path(minipar.__file__).parents[1] / "notebooks/README.md"
        text = page.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[(\d\d\w? [^\]]+)\]\([^)]*\.ipynb\) \|.*\| (\d+) \|$", text, re.MULTILINE
    )
    minutes = ", ".join(f"{name} {number}" for name, number in rows)
    label = f"minutes of reading, guessing and running, without exercises: {minutes}"
    if is_busy := usable_cores() < 2 or os.getloadavg()[0] > usable_cores():
        label = f"cells will run longer than planned: see cores, and their load. {label}"
    return [Line("note" if is_busy else "ok", "notebooks", label)] if rows else []


# ---------------------------------------------------------------------- under torchrun
def _of_hosts(world: Axis) -> list[Line]:
    """What each host tells of itself: of rank 0's all, of others what is not ok. A collective."""
    mine = machine() if backends.local_rank() == 0 else []
    return [
        line._replace(says=f"{host}: {line.says}" if rank else line.says)
        for rank, (host, found) in enumerate(all_gather_object((platform.node(), mine), world))
        for line in found
        if rank == 0 or line.mark != "ok"
    ]


def _together(world: Axis) -> Line:
    times = all_gather_object((*probe(world.size), platform.node()), world)
    hosts, (*slowest, _) = len({host for *_, host in times}), max(times)
    return Line("ok", f"{world.size} ranks", f"on {hosts} of torchrun's hosts; {_told(*slowest)}")


def _writable(out: Path) -> Line:
    """Whether this user can write into the folder of runs, or make it."""
    try:
        there = next(path for path in (out, *out.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            return Line("ok", "run folder", f"{out}/ can be written")
    except OSError as error:
        return Line("FAIL", "run folder", f"{out}/: {error.strerror}; name another by --out")


def _shared(out: Path, world: Axis) -> Line:
    """Whether all ranks see what rank 0 writes into the folder of runs. A collective."""
    is_new = not out.exists()
    line = Line("ok", "run folder", f"all ranks see what rank 0 writes into {out}/")
    try:
        with held(out / f"doctor-{all_gather_object(os.getpid(), world)[0]}", world):
            pass
    except (ValueError, OSError) as error:
        line = Line("FAIL", "run folder", str(error))
    if is_new and world.rank == 0:
        with suppress(OSError):
            out.rmdir()
    return line
