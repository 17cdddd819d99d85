"""A rank runs out of memory: what it held at that moment is noted down, by category.

The first rank of a run to fail so writes `out_of_memory.json` into its folder, for the page that
`minipar train` ends with (`minipar.sim.remedy`).
"""

import gc
import json
import os
import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from minipar.comm.mesh import Mesh
from minipar.observe import memory
from minipar.ranks.backends import compute_device
from minipar.text import one_line

FILE = "out_of_memory.json"
_SAYS = "allocate memory", "out of memory", "not enough memory"
_CGROUP = Path("/sys/fs/cgroup")


class OutOfMemory(MemoryError):
    """A rank has run out of memory; the message says what it held."""

    folder = Path()  # of the run
    speaks = False  # whether it was the first to fail, and has noted it down


def is_one(error: BaseException) -> bool:
    """Whether an allocation has failed: Python's, torch's on the CPU, or that of a GPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _SAYS)
    )


@contextmanager
def noted(folder: Path) -> Iterator[list[Any]]:
    """Raise `OutOfMemory` for an allocation of the body that fails, and note it down in `folder`.

    The body puts its `Trainer` into the list as soon as it has one.
    """
    known: list[Any] = []
    with suppress(OSError):
        (folder / FILE).unlink()  # of an earlier start
    before = _used()
    try:
        yield known
    except (RuntimeError, MemoryError) as error:
        if not is_one(error):
            raise
        gc.collect()  # garbage is not held
        held: dict[str, int] = by_category(known[0]) if known else {}
        # The frames that have failed are still there, and so are the activations.
        held["all else"] = max(0, _used() - before - sum(held.values()))
        step = known[0].step + 1 if known else 0
        free = free_bytes()
        parts = ", ".join(f"{part} {num_bytes / 1e9:.2f}" for part, num_bytes in held.items())
        when = f"in step {step}" if step else "before the first step"
        failed = OutOfMemory(
            f"out of memory {when}: of {sum(held.values()) / 1e9:.2f} GB held, {parts}; "
            f"{free / 1e9:.2f} GB were free ({one_line(error, 160)})"
        )
        with suppress(OSError), (folder / FILE).open("x", encoding="utf-8") as file:
            json.dump({"rank": Mesh.label, "held": held, "free": free}, file)
            failed.folder, failed.speaks = folder, True
        raise failed from error


def by_category(trainer: Any) -> dict[str, int]:
    """Return the bytes of the tensors that a rank keeps, by what they are for."""
    found: dict[int, tuple[str, int]] = {}

    def count(category: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = category, storage.nbytes()

    parameters = list(trainer.model.parameters())
    with torch._C.DisableTorchFunctionSubclass():  # of weights that are on their way
        count("optimizer", tree_leaves(list(trainer.optimizer.state.values())))
        count("gradients", (p.grad for p in parameters))
        count("parameters", parameters)
    for storage, word in list(memory.tags.items()):  # what the code itself says
        found[storage.data_ptr()] = word.category, storage.nbytes()
    totals: dict[str, int] = defaultdict(int)
    for category, num_bytes in found.values():
        totals[category] += num_bytes
    return dict(sorted(totals.items()))


def _used() -> int:
    """Bytes of tensors on this rank's GPU; without one, bytes of this process."""
    if compute_device().type == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def free_bytes(ranks: int = 0) -> int:
    """Return the bytes that this rank, one of `ranks` on this machine, could still get."""
    if compute_device().type == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    ranks = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    limits = [psutil.virtual_memory().available / ranks]
    with suppress(OSError, ValueError):  # a container's
        files = _CGROUP / "memory.max", _CGROUP / "memory.current"
        most, now = (int(file.read_text(encoding="utf-8")) for file in files)
        limits.append((most - now) / ranks)
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        limits.append(most - psutil.Process().memory_info().vms)
    return max(0, int(min(limits)))
