"""Jobs that hang, in six ways, under PyTorch's flight recorder: `python -m tests.tools.hanging F`.

gloo in torch 2.13 is recorded on CPUs as NCCL is on GPUs (``TORCH_FR_BUFFER_SIZE``), but for its
messages between two ranks, for the ranks of its groups, and for when a call started or ended.
Each way is a job of real processes that write what the recorder holds while they hang.
"""

import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

SECONDS = 1.5  # until the ranks write down where they are


def absent(rank, dist, one, groups):
    """Rank 2 computes on and never comes: what a loop of uneven length does."""
    if rank != 2:
        dist.all_reduce(one)


def swapped(rank, dist, one, groups):
    """Rank 1 calls two collectives in the other order, as of a dict that differs."""
    calls = [lambda: dist.all_reduce(one), lambda: dist.all_gather_single(one.repeat(4), one)]
    for call in reversed(calls) if rank == 1 else calls:
        call()


def sizes(rank, dist, one, groups):
    """Rank 3 expects a longer tensor; rank 0, whose it is, is late (else gloo would end rank 3)."""
    if rank != 0:
        dist.broadcast(one.repeat(2) if rank == 3 else one, 0)


def one_more(rank, dist, one, groups):
    """Rank 0 alone waits at a barrier, as when it alone saves a checkpoint."""
    if rank == 0:
        dist.barrier()
    dist.all_reduce(one)


def circle(rank, dist, one, groups):
    """Two groups, entered in different orders: each waits for one that waits in the other."""
    mine = [g for g, ranks in groups if rank in ranks]
    for group in mine if rank in (0, 3) else reversed(mine):
        dist.all_reduce(one, group=group)


def frozen(rank, dist, one, groups):
    """Rank 1 is stopped, as of a driver that hangs: it leaves no dump."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(one)


WAYS = (absent, swapped, sizes, one_more, circle, frozen)


def _rank(way, folder: Path, rank: int) -> None:
    import threading

    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), 4)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    # A square of ranks: rows and columns, so that two groups can wait for each other.
    rows = {"dp": [(0, 1), (2, 3)], "tp": [(0, 2), (1, 3)]}
    groups = [
        (dist.new_group(ranks, group_desc=name), ranks) for name in rows for ranks in rows[name]
    ]
    one = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(one)
    for group, ranks in groups:
        if rank in ranks:
            dist.all_reduce(one, group=group)
    (folder / f"ready{rank}").touch()
    while not all((folder / f"ready{r}").exists() for r in range(4)):
        time.sleep(0.01)
    threading.Thread(target=way, args=(rank, dist, one, groups), daemon=True).start()
    time.sleep(SECONDS)
    from torch._C import _distributed_c10d as c10d

    (folder / f"nccl_trace_rank_{rank}").write_bytes(c10d._dump_fr_trace(True, True, False))
    if way is absent:
        as_json = folder.parent / "absent_json"
        as_json.mkdir(exist_ok=True)
        (as_json / f"rank_{rank}.json").write_bytes(c10d._dump_fr_trace_json(True, False))
    (folder / f"done{rank}").touch()

    while not all((folder / f"done{r}").exists() for r in range(4) if (way, r) != (frozen, 1)):
        time.sleep(0.01)
    os._exit(0)


def main(out: Path) -> None:
    """Run all ways at once, by fork: four processes each; dumps go to `out`/WAY/."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch._dynamo  # noqa: F401  (the recorder wants it for stacks; here once for all)

    children = []
    for way in WAYS:
        folder = out / way.__name__
        folder.mkdir(parents=True)
        for rank in range(4):
            pid = os.fork()
            if pid == 0:
                try:
                    _rank(way, folder, rank)
                finally:
                    os._exit(1)
            children.append(pid)
    for pid in children:
        if os.waitpid(pid, os.WUNTRACED)[1] & 0xFF == 0x7F:  # stopped
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for file in out.glob("*/*"):
        if not file.name.startswith(("nccl_trace", "rank_")):
            file.unlink()


def hide_paths(out: Path) -> None:
    """Write the dumps again, with the names of files as they are on no machine in particular."""
    places = {
        str(Path(__file__).parents[2]): "/job",
        sys.base_prefix: "/python",
        sys.prefix: "/env",
    }
    for file in out.glob("*/nccl_trace*"):
        dump = pickle.loads(file.read_bytes())
        for entry in dump["entries"]:
            for frame in entry["frames"]:
                for place, name in places.items():
                    frame["filename"] = frame["filename"].replace(place, name)
        file.write_bytes(pickle.dumps(dump, 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    hide_paths(Path(sys.argv[1]))
