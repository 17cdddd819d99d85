"""What `minipar` calls: a command is run, and what went wrong becomes a line and an exit code."""

import os
import sys
import time
from collections.abc import Sequence

from minipar.cli.commands import COMMANDS, parse
from minipar.cli.output import BROKEN_PIPE, mute, print_anything
from minipar.cli.training import is_bad_input
from minipar.comm import backends
from minipar.comm.launch import RankError
from minipar.comm.mesh import Mesh
from minipar.comm.spans import printable
from minipar.sim import planner
from minipar.train import out_of_memory


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in `argv`; end the process with its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    print_anything()
    try:
        try:
            name, command = parse(argv)
            COMMANDS[name].run(command)
        finally:
            sys.stdout.flush()
        code = 0
    except planner.NothingFits as error:
        complain(error)
        code = 3
    except ValueError as error:
        backends.excuse(str(error))
        complain(error)
        code = 2
    except RankError as error:
        code = explain(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = BROKEN_PIPE
    except out_of_memory.OutOfMemory as error:  # of torchrun's ranks, maybe of this one alone
        complain(MemoryError(f"{Mesh.label}: {error}"), *getattr(error, "__notes__", ()))
        code = 1
    except (OSError, FloatingPointError) as error:
        complain(error)
        code = 1
    if code == BROKEN_PIPE:
        mute()
    if code and int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(3)  # torchrun ends all ranks with the first: let the one that speaks be first
    sys.exit(code)


def complain(error: BaseException, *notes: str) -> None:
    """Print one line. The ranks of torchrun fail alike, so that one per machine speaks for all."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 or isinstance(error, MemoryError):
        notes = *notes, *getattr(error, "__notes__", ())
        said = printable(" ".join(str(error).split()))
        print(f"minipar: error: {said}", file=sys.stderr, flush=True)
        print(*notes, sep="", end="", file=sys.stderr, flush=True)


def explain(error: RankError) -> int:
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
            complain(RuntimeError(f"{alone}{message}"))
    else:
        print("\n".join(error.reports()), file=sys.stderr)
    print(*getattr(error, "__notes__", ()), sep="", end="", file=sys.stderr)
    return 1


_SAY_IT_ALL = ("Died", "FloatingPointError", "OSError", "MemoryError", "OutOfMemory")
"""Failures of ranks whose message is all that there is to know."""
