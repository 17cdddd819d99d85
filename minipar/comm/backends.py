"""Which backend, which device, and joining the process group: on ranks of ours and of torchrun."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm.mesh import Mesh

BACKENDS = ("gloo", "nccl", "link")


def pick_backend(size: int) -> str:
    """Return "nccl" where there is a GPU for each of `size` ranks of this machine, else "gloo"."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= size
    return "nccl" if enough else "gloo"


def check_backend(backend: str, size: int) -> None:
    """Raise `ValueError` for an unknown backend, or nccl with fewer GPUs than ranks."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    if backend == "nccl":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus < size:
            raise ValueError(
                f"backend=nccl needs a GPU per rank: {size} ranks but {gpus} GPUs; use gloo, "
                f"which also lets several ranks share a GPU"
            )


def device_of(local_rank: int) -> torch.device:
    """Return this rank's device: a GPU, shared if there are fewer than ranks, or the CPU.

    The CPU also behind an emulated link, which carries nothing else.
    """
    emulated = dist.is_initialized() and dist.get_backend() == "link"
    if emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def init(backend: str, timeout: float, **where: Any) -> None:
    """Join the default process group; `where` says how the ranks meet."""
    if backend == "link":
        from minipar.comm import link_group

        link_group.register()
    seconds = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, timeout=seconds, **where)
    Mesh.label = f"rank {dist.get_rank()} of {dist.get_world_size()}"


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that speaks its variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def restarts() -> int:
    """How often torchrun has started the ranks again, after one had failed (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def job_store(prefix: str = "minipar") -> dist.Store | None:
    """Return the store of the torchrun that started this process: it outlives restarts of ranks.

    None where there is none, or where it would not outlive them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(prefix, dist.TCPStore(address, port, is_master=False))


@contextmanager
def joined(backend: str, timeout: float = 600.0) -> Iterator[None]:
    """Join the ranks that torchrun started; leave them in order at the end.

    Leaving is ordered: everybody waits for everybody, so that no rank closes its connections
    while another still reads from them.
    """
    where = {}
    # After a restart the store still holds the addresses of the ranks before: leave them alone.
    if (store := job_store(f"restart {restarts()}")) is not None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = {"store": store, "rank": rank, "world_size": size}
    init(backend, timeout, **where)
    device_of(int(os.environ.get("LOCAL_RANK", dist.get_rank())))  # nccl talks from there
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
