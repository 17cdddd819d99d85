"""A rank runs out of memory: the error says what the rank held at that moment, by category."""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from minipar.ranks.backends import compute_device
from minipar.text import one_line

_SAYS = "allocate memory", "out of memory", "not enough memory"


class OutOfMemory(MemoryError):
    """A rank has run out of memory; the message says what the rank held."""


def is_one(error: BaseException) -> bool:
    """True if an allocation has failed: Python's, torch's on the CPU, or that of a GPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _SAYS)
    )


@contextmanager
def explained() -> Iterator[list[Any]]:
    """Raise `OutOfMemory` for an allocation that fails in the body.

    The body puts its `Trainer` into the list as soon as it has one.
    """
    known: list[Any] = []
    before = _used()
    try:
        yield known
    except (RuntimeError, MemoryError) as error:
        if not is_one(error):
            raise
        gc.collect()  # garbage is not held
        held = by_category(known[0]) if known else {}
        # The frames that have failed are still there, and so are their activations.
        held["all else"] = max(0, _used() - before - sum(held.values()))
        when = f"in step {known[0].step}" if known and known[0].step else "before the first step"
        parts = ", ".join(f"{part} {num_bytes / 1e9:.2f}" for part, num_bytes in held.items())
        raise OutOfMemory(
            f"out of memory {when}: of {sum(held.values()) / 1e9:.2f} GB held, {parts} "
            f"({one_line(error, 160)}); minipar plan --fix names a plan that needs less"
        ) from error


def by_category(trainer: Any) -> dict[str, int]:
    """Return the bytes of the tensors that a rank keeps: parameters, gradients, optimizer."""
    found: dict[int, tuple[str, int]] = {}

    def count(category: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                found.setdefault(storage.data_ptr(), (category, storage.nbytes()))

    parameters = list(trainer.model.parameters())
    with torch._C.DisableTorchFunctionSubclass():  # weights that are still on their way
        count("parameters", parameters)
        count("gradients", (p.grad for p in parameters))
        count("optimizer", tree_leaves(list(trainer.optimizer.state.values())))
        stepped = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        count("optimizer", [*stepped, *(getattr(p, "master", None) for p in stepped)])
    totals: dict[str, int] = defaultdict(int)
    for category, num_bytes in found.values():
        totals[category] += num_bytes
    return dict(totals)


def _used() -> int:
    """Return the bytes of tensors on this rank's GPU; without a GPU, of this process."""
    if compute_device().type == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def free_bytes(ranks: int = 1) -> int:
    """Return the bytes that this rank, one of `ranks` on this machine, could still get."""
    if compute_device().type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available // ranks
