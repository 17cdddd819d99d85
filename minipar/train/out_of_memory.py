"""A rank runs out of memory: one line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from minipar.ranks.backends import compute_device
from minipar.text import one_line

_SAYS = "allocate memory", "out of memory", "not enough memory"


class OutOfMemory(MemoryError):
    """A rank has run out of memory."""


@contextmanager
def explained() -> Iterator[None]:
    """Raise `OutOfMemory` for an allocation that fails: Python's, torch's on the CPU, a GPU's."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(says in str(error) for says in _SAYS):
            raise
        remedy = "minipar plan --fix names a plan that needs less"
        raise OutOfMemory(f"out of memory ({one_line(error, 160)}); {remedy}") from error


def free_bytes(ranks: int = 1) -> int:
    """Return the bytes that this rank, one of `ranks` on this machine, could still get."""
    if compute_device().type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available // ranks
