"""The processes that are the ranks, and the fork server of `multiprocessing` that they come from.

    your process ──starts──► fork server (imports torch, once) ──forks──► rank 0 .. n-1

All pools of a process share one fork server: a pool starts in milliseconds once torch is imported.
Where forking is not safe, as on macOS, each rank is a process started from scratch.

In torch: `torch.multiprocessing`.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, Pipe
from types import ModuleType

from minipar.ranks.worker import Setup, rank_main

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ("minipar.ranks.preload",)
"""Modules that the fork server imports in any case."""


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start the fork server, unless it runs; return while it imports torch and `modules`."""
    if METHOD != "forkserver":
        return
    forkserver.set_forkserver_preload([*PRELOAD, *modules])
    if len(tempfile.gettempdir()) > 50:  # the address of a Unix socket has 107 bytes at most
        usual, tempfile.tempdir = tempfile.tempdir, "/tmp"
        util.get_temp_dir()  # of `multiprocessing`, which keeps it
        tempfile.tempdir = usual
    # The server must find the minipar that is imported here, and not one in the current folder.
    here = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in here}
    os.environ.update(here)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _nameless_program() -> Iterator[None]:
    """Hide the user's program from `multiprocessing`, which would run its file in each rank.

    Ranks need nothing of that file: functions travel by value. So a script starts ranks without
    `if __name__ == "__main__"`.
    """
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


class Process:
    """One rank, as its parent sees it."""

    def __init__(self, setup: Setup) -> None:
        self.exitcode: int | None = None
        self.work, work = Pipe()
        self.control, control = Pipe()
        streams = [Connection(os.dup(fd)) for fd in (1, 2)]  # where a rank prints for itself
        args = (setup, work, control, *streams)
        self._process = multiprocessing.get_context(METHOD).Process(target=rank_main, args=args)
        try:
            with _nameless_program():
                self._process.start()
        except (EOFError, ConnectionError) as error:
            raise OSError(
                "Python's fork server ended before it could fork a rank. Its own error stands "
                "above: a module of preload= that fails, or too many processes (ulimit -u)"
            ) from error
        for end in (work, control, *streams):
            end.close()
        self.pid = self._process.pid
        # A rank that has ended closes its pipe, unless a child of its own still holds it.
        self.signs = [self.work, self._process.sentinel]

    def heard(self, ready: list) -> list[tuple]:
        """Return what the rank has said, if one of its signs is among those that are `ready`.

        A hundred messages at most, so that a rank that never stops talking lets others be heard.
        Raises `EOFError` or `OSError` when the rank has ended.
        """
        if self.work not in ready:
            if self._process.sentinel in ready:
                raise EOFError
            return []
        said = [self.work.recv()]
        with suppress(EOFError, OSError):  # it will be found again
            while len(said) < 100 and self.work.poll():
                said.append(self.work.recv())
        return said

    def kill(self) -> None:
        """End the rank at once, and the processes that it has started."""
        if self.exitcode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()  # it had no group yet

    def reap(self) -> int:
        """End the rank and wait until it is gone; return its exit code, -9 for signal 9."""
        if self.exitcode is None:
            self.kill()
            self._process.join()
            self.exitcode = self._process.exitcode
            self.work.close()
            self.control.close()
        return self.exitcode
