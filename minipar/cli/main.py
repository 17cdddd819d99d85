"""What `minipar` calls: a command is run."""

import sys
import time
from collections.abc import Sequence

from minipar.cli.commands import COMMANDS, parse
from minipar.cli.output import BROKEN_PIPE, mute, print_anything


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
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = BROKEN_PIPE
    except Exception as error:
        code = explain(error)
    if code == BROKEN_PIPE:
        mute()
    sys.exit(code)


def explain(error: Exception) -> int:
    """Print what went wrong; return the exit code. Raises again what is a bug."""
    from minipar.cli import failures  # and torch with it, which help does without
    from minipar.ranks import backends

    code = failures.exit_code(error)
    if backends.local_rank() > 0:
        time.sleep(3)  # torchrun ends all ranks with the first: let the one that speaks be first
    return code
