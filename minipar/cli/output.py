"""Printing into whatever the output is: a terminal, a closed pipe, a locale without letters."""

import io
import os
import sys

BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone, as of `| head -1`: what shells make of it."""


def mute() -> None:
    """Let output go nowhere from now on; the interpreter would try again to print the rest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def say(words: str) -> None:
    """Print at once; a reader that has gone, such as `head`, does not end a run."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        mute()


def print_anything() -> None:
    """Let no name of a file end a run because the locale has no letters for it.

    Nor a stream that a shell has closed (>&-).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
