"""The entry of `minipar`: run a command; turn its errors into a line and an exit code."""

import os
import sys
import time
from collections.abc import Sequence

from minipar.cli.commands import function_of, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in `argv`; end the process with its exit code."""
    try:
        name, command = parse(list(sys.argv[1:] if argv is None else argv))
        function_of(name)(command)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = explain(error)
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(3)  # torchrun ends all ranks with the first to end: let it be local rank 0
    sys.exit(code)


def explain(error: Exception) -> int:
    """Print what went wrong; return the exit code. Raises again what is a bug."""
    from minipar.ranks.launch import RankError  # and torch, which --help does without
    from minipar.train.out_of_memory import OutOfMemory

    if isinstance(error, RankError):
        return _of_ranks(list(error.failures.values()), error.reports())
    if isinstance(error, (OutOfMemory, OSError)):  # maybe of this rank of torchrun's alone
        _complain(f"rank {os.environ['RANK']}: {error}" if "RANK" in os.environ else str(error))
        return 1
    if isinstance(error, (ValueError, FloatingPointError)):
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # all ranks say the same
            _complain(str(error))
        return getattr(error, "exit_code", 2 if isinstance(error, ValueError) else 1)
    raise error


def _complain(words: str) -> None:
    print(f"minipar: error: {' '.join(words.split())}", file=sys.stderr, flush=True)


SAY_IT_ALL = ["Died", "FloatingPointError", "OSError", "MemoryError", "OutOfMemory"]
SAY_IT_ALL += [kind.__name__ for kind in OSError.__subclasses__()]  # such as PermissionError
"""Failures of ranks whose message says enough: no traceback is printed."""


def _of_ranks(failures: list, reports: list[str]) -> int:
    """Print which rank failed and why; return the exit code."""
    # Ranks beside one that is out of memory have only lost their connection to it.
    failures = [f for f in failures if f.kind == "OutOfMemory"] or failures
    messages = {failure.message: failure for failure in failures}  # most often the same of all
    if len(messages) == 1 and is_bad_input(failures):
        _complain(failures[0].message)
        return 2
    if all(f.kind in SAY_IT_ALL for f in failures):
        for message, failure in messages.items():
            alone = "" if len(messages) < len(failures) else f"{failure.label}: "
            _complain(alone + message)
    else:
        print("\n".join(reports), file=sys.stderr)
    return 1


def is_bad_input(failures: list) -> bool:
    """True if all ranks have refused what a user typed."""
    return all(f.kind in ("ValueError", "CheckpointError") for f in failures)
