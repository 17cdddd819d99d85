"""Choose the backend and the device, and join the process group: our own ranks and torchrun's."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist

from minipar.comm import threads
from minipar.comm.mesh import Mesh

BACKENDS = ("gloo", "nccl", "link")
RANK_BYTES = 100e6  # of a process that has imported torch and joined a group, at the least


def pick_backend(size: int) -> str:
    """Return "nccl" where there is a GPU for each of `size` ranks of this machine, else "gloo"."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= size
    return "nccl" if enough else "gloo"


def check_ranks(size: int, backend: str = "gloo", weight_bytes: float = 0) -> None:
    """Raise `ValueError` if this machine cannot start `size` ranks, each with `weight_bytes`."""
    if size < 1:
        raise ValueError(f"{size} ranks: a group needs at least 1 rank")
    memory, rank_bytes = psutil.virtual_memory().total, RANK_BYTES + weight_bytes
    most = min(max(64, os.cpu_count() or 1), int(memory / rank_bytes))
    if size > most:
        why = f"it has {memory / 1e9:.1f} GB, and a rank takes {rank_bytes / 1e9:.1f} GB or more"
        raise ValueError(f"{size:,} ranks do not fit this machine, but up to {most}: {why}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    if backend == "nccl" and pick_backend(size) != "nccl":
        few = f"{size} ranks but {torch.cuda.device_count()} GPUs; use gloo, also to share one"
        raise ValueError(f"backend=nccl needs a GPU per rank: {few}")


def compute_device() -> torch.device:
    """Return this rank's device: a GPU (ranks share GPUs if there are too few), or the CPU.

    The GPU follows from LOCAL_RANK, not from the rank: hosts may have more GPUs than ranks. An
    emulated link carries tensors of the CPU only.
    """
    emulated = dist.is_initialized() and dist.get_backend() == "link"
    if emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def init(backend: str, timeout: float, **where: Any) -> None:
    """Join the default process group; `where` says how the ranks meet.

    If the backend is NCCL, gloo carries host tensors and pickled objects.
    """
    if backend == "link":
        from minipar.emulate import link_group

        link_group.register()
    else:
        compute_device()  # nccl uses the GPU that this call selects
    carriers = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    seconds = datetime.timedelta(seconds=timeout)
    with threads.patient():
        dist.init_process_group(carriers, timeout=seconds, **where)
    Mesh.label = f"rank {dist.get_rank()} of {dist.get_world_size()}"


_BROKEN = ("gloo", "NCCL", "Connection", "pair closure", "destroyed")


def is_lost_connection(error: BaseException) -> bool:
    """True if the connection failed: the process group cannot be used any more."""
    is_gloos = isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)
    return is_gloos or isinstance(error, dist.DistError)


# ---------------------------------------------------------------------- ranks of torchrun
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables by which srun and mpirun tell a task the number of tasks."""


def under_torchrun() -> bool:
    """True if torchrun, or a launcher that sets its variables, started this process.

    Raises `ValueError` if srun or mpirun started tasks without these: each would train alone.
    """
    if all(name in os.environ for name in VARIABLES):
        return True
    in_step = "SLURM_STEP_ID" in os.environ  # outside of a step, Slurm counts the whole job's tasks
    for name in _NUM_TASKS:
        num_tasks = os.environ.get(name, "1") if in_step or "SLURM" not in name else "1"
        if num_tasks.isdecimal() and int(num_tasks) > 1:
            how = f"start one on each host, and torchrun in it, or export {', '.join(VARIABLES)}"
            tasks = f"{'srun' if 'SLURM' in name else 'mpirun'} started {num_tasks} tasks"
            raise ValueError(f"{name}={num_tasks}: {tasks}, and nothing tells their ranks; {how}")
    return False


def rank_and_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE. Raises `ValueError` unless 0 <= RANK < WORLD_SIZE."""
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise ValueError(f"{', '.join(missing)} not set: start the program by torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} with WORLD_SIZE={size}: ranks are 0 to {size - 1}")
    return rank, size


@contextmanager
def joined(backend: str, timeout: float = 600.0) -> Iterator[None]:
    """Join the ranks that torchrun started; leave the process group cleanly at the end.

    Between hosts, gloo uses the network interface GLOO_SOCKET_IFNAME, else the host name's.
    At the end every rank waits for all others. So no rank closes a connection from which another
    rank still reads. `backend` is one of `BACKENDS`, or "auto": nccl if each rank of this host has
    a GPU. Raises `ValueError` for an impossible rank or port, and `ConnectionError` if the ranks do
    not meet within `timeout` seconds, or lose their connections.
    """
    rank, size = rank_and_size()
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    backend = pick_backend(num_here) if backend == "auto" else backend
    check_ranks(num_here, backend)
    where = ", ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    what = f"the {size} ranks do not meet at {where} within {timeout:g} s"
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
        # When torchrun restarts its ranks, its store still has the addresses of the dead ranks.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start {start}", store)
        init(backend, timeout, store=store, rank=rank, world_size=size)
        what = "lost the other ranks"
        yield
        dist.barrier()
    except BaseException as error:
        if backend == "nccl" and dist.is_initialized():  # destroying it would wait for other ranks
            dist.distributed_c10d._abort_process_group()
        if is_lost_connection(error):
            lost = ConnectionError(f"{what}: {str(error).splitlines()[0]}")
            raise lost.with_traceback(error.__traceback__) from None
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
