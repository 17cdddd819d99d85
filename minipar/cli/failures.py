"""What went wrong, in a line or by the traceback of the rank that failed; and the exit code."""

import os
import sys

from minipar.cli.output import BROKEN_PIPE
from minipar.cli.training import is_bad_input
from minipar.comm.mesh import Mesh
from minipar.ranks import backends
from minipar.ranks.launch import RankError
from minipar.text import printable
from minipar.train import out_of_memory


def exit_code(error: Exception) -> int:
    """Print what went wrong; return the exit code. Raises again what is a bug."""
    match error:
        case ValueError():
            complain(error)
            return getattr(error, "exit_code", 2)
        case RankError():
            return _of_ranks(error)
        case out_of_memory.OutOfMemory():  # of torchrun's ranks, maybe of this one alone
            complain(error, f"{Mesh.label}: ")
            return 1
        case OSError():  # likewise, maybe before they have met
            complain(error, f"rank {os.environ['RANK']}: " if "RANK" in os.environ else "")
            return 1
        case FloatingPointError():
            complain(error)
            return 1
    raise error


def complain(error: BaseException, who: str = "") -> None:
    """Print one line. The ranks of torchrun fail alike, so that one per machine speaks for all.

    But memory and files may fail on any of them alone, unless they have agreed on it.
    """
    is_own = isinstance(error, MemoryError | OSError) and not getattr(error, "everywhere", False)
    if backends.local_rank() == 0 or is_own:
        said = printable(who + " ".join(str(error).split()))
        print(f"minipar: error: {said}", file=sys.stderr, flush=True)
        _print_notes(error)


def _print_notes(error: BaseException) -> None:
    print(*getattr(error, "__notes__", ()), sep="", end="", file=sys.stderr, flush=True)


def _of_ranks(error: RankError) -> int:
    """Print who failed and why; return the exit code."""
    failures = list(error.failures.values())
    # The others have only lost their connection to it.
    failures = [f for f in failures if f.kind == "OutOfMemory"] or failures
    if any(failure.kind == "BrokenPipeError" for failure in failures):
        return BROKEN_PIPE
    messages = {failure.message: failure for failure in failures}  # most often all ranks' is one
    if is_bad_input(error) and len(messages) == 1:
        complain(ValueError(failures[0].message))
        return 2
    if all(f.kind in _SAY_IT_ALL or "allocate memory" in f.message for f in failures):
        for message, failure in messages.items():
            alone = "" if len(messages) < len(failures) else f"{failure.label}: "
            complain(RuntimeError(message), alone)
    else:
        print("\n".join(error.reports()), file=sys.stderr)
    _print_notes(error)
    return 1


_SAY_IT_ALL = ("Died", "FloatingPointError", "OSError", "MemoryError", "OutOfMemory")
"""Failures of ranks whose message is all that there is to know."""
