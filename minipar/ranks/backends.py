"""Which backend, which device, and joining the process group: on ranks of ours and of torchrun."""

import datetime
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm import threads
from minipar.comm.mesh import Mesh
from minipar.ranks import meeting

BACKENDS = ("gloo", "nccl", "link")


def pick_backend(size: int) -> str:
    """Return "nccl" where there is a GPU for each of `size` ranks of this machine, else "gloo"."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= size
    return "nccl" if enough else "gloo"


def pick_among(gpus: Sequence[str], backend: str = "auto") -> str:
    """Return "nccl" where each rank has a GPU of its own, else "gloo"; or `backend` if it is named.

    `gpus` holds the identity of each rank's GPU, "" for a rank without one: a scheduler may show
    each rank but one GPU, so counting those in sight does not tell. Raises `ValueError` for nccl
    where ranks share a GPU, or have none.
    """
    found = len(set(gpus) - {""})
    if backend == "auto":
        return "nccl" if found == len(gpus) else "gloo"
    if backend == "nccl" and found < len(gpus):
        raise ValueError(
            f"backend=nccl needs a GPU per rank: {len(gpus)} ranks have {found} GPUs; use gloo, "
            f"which also lets several ranks share a GPU"
        )
    return backend


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


def compute_device() -> torch.device:
    """Return this rank's device: a GPU, shared if there are fewer than ranks, or the CPU.

    The GPU follows from LOCAL_RANK, which counts the ranks of a host: not from the rank, since
    hosts may have more GPUs than ranks. The CPU also behind an emulated link, which carries nothing
    else.
    """
    emulated = dist.is_initialized() and dist.get_backend() == "link"
    if emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def init(backend: str, timeout: float, **where: Any) -> None:
    """Join the default process group; `where` says how the ranks meet.

    Where NCCL carries the tensors of GPUs, gloo carries those of the host, and objects, whose
    pickles would else be copied to every GPU.
    """
    if backend == "link":
        from minipar.emulate import link_group

        link_group.register()
    carriers = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    seconds = datetime.timedelta(seconds=timeout)
    with threads.patient():
        dist.init_process_group(carriers, timeout=seconds, **where)
    Mesh.label = f"rank {dist.get_rank()} of {dist.get_world_size()}"


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that speaks its variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def local_rank() -> int:
    """The number of this rank among those of its host, as the launcher says; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun() else 0


def restarts() -> int:
    """How often the torchrun of this host has started its ranks again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def restarts_left() -> int:
    """How often it would do so again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - restarts()


def job_name() -> str | None:
    """Name the job of torchrun that this process belongs to, the same after restarts of ranks.

    That is its --rdzv-id. Without one, a name that is kept in its store; None where that would not
    outlive the ranks.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    if not _store_outlives_ranks():
        return None
    return _store(60.0).compare_set("job", "", secrets.token_hex(8)).decode()


def excuse(problem: str) -> None:
    """Tell the ranks that already wait for this one why it will not join them."""
    if under_torchrun() and not dist.is_initialized() and _store_outlives_ranks():
        with suppress(Exception):  # what is wrong is told here in any case
            meeting.excuse(_store(5.0), int(os.environ["RANK"]), problem)


def _store_outlives_ranks() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout: float) -> dist.Store:
    """Connect to the store of torchrun or, where it lends none, to one that rank 0 keeps.

    Raises `ConnectionError` after `timeout` seconds.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = not _store_outlives_ranks() and os.environ["RANK"] == "0"
    seconds = datetime.timedelta(seconds=timeout)
    more = dict(is_master=keeps, wait_for_workers=False, multi_tenant=True, timeout=seconds)
    try:
        return dist.PrefixStore("minipar", dist.TCPStore(address, port, **more))
    except (dist.DistError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConnectionError(
            f"no connection to the store of torchrun at MASTER_ADDR {address}, port {port}, "
            f"within {timeout:g} s: {first}"
        ) from None


@contextmanager
def joined(backend: str, timeout: float = 600.0) -> Iterator[None]:
    """Join the ranks that torchrun started; leave them in order at the end.

    Leaving is ordered: every rank waits for all others, so that none closes its connections while
    another still reads from them. Not so after an error: then what is in flight is given up.
    `backend` is one of `BACKENDS`, or "auto" as in `pick_among`. Raises `ValueError`,
    `TimeoutError` or `ConnectionError` on all ranks where they cannot meet within `timeout`
    seconds.
    """
    rank, size, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _store(timeout)
    number, cards = meeting.meet(store, rank, size, timeout, "" if backend == "link" else _gpu())
    gpus = [card.gpu for card in cards]
    if backend in ("auto", "nccl"):
        _check_numbered(gpus)
    backend = pick_among(gpus, backend)
    # The store still holds the addresses of ranks before a restart: leave them alone.
    store = dist.PrefixStore(f"meeting {number}", store)
    init(backend, timeout, store=store, rank=rank, world_size=size)
    compute_device()  # nccl talks from there
    try:
        yield
        dist.barrier()
    except BaseException:
        if backend == "nccl":  # to destroy its groups would wait for ranks that do not come
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_numbered(gpus: Sequence[str]) -> None:
    """Raise `ValueError` where ranks share a GPU since their launcher has not numbered them."""
    found, count = [gpu for gpu in gpus if gpu], torch.cuda.device_count()
    if len(set(found)) < len(found) and count > 1 and "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"ranks share a GPU, and this host has {count}: which is for whom? The launcher sets "
            f"no LOCAL_RANK; export it, as of Slurm LOCAL_RANK=$SLURM_LOCALID"
        )


def _gpu() -> str:
    """Return the identity of this rank's GPU, "" where it has none."""
    device = compute_device()
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
