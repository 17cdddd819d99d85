"""A rank runs out of memory: one line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

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
