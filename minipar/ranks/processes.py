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
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from types import ModuleType
from unittest import mock

from minipar.ranks.worker import rank_main

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ("minipar.ranks.preload",)
"""Modules that the fork server imports in any case."""


def _environment() -> dict[str, str]:
    """Return the variables of the ranks: the user's take precedence."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    usual = {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": loopback}
    return {**usual, **os.environ, "OMP_NUM_THREADS": "1"}


def warm_up(*modules: str) -> None:
    """Start the fork server, unless it runs; do not wait until it has imported `modules`."""
    if METHOD == "forkserver":
        forkserver.set_forkserver_preload([*PRELOAD, *modules])
        # The server must find the minipar that is imported here, not one in the current folder.
        found = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
        with mock.patch.dict(os.environ, _environment() | found):
            forkserver.ensure_running()


class Process:
    """One rank, as its parent sees it."""

    def __init__(self, capture: bool) -> None:
        self.pipe, pipe = Pipe()
        streams = [Connection(os.dup(fd)) for fd in (1, 2)]  # where a rank prints for itself
        args = (pipe, streams, _environment(), capture)
        self._process = multiprocessing.get_context(METHOD).Process(target=rank_main, args=args)
        # `multiprocessing` would run the user's program in each rank. Ranks do not need it, because
        # functions travel by value.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        for end in (pipe, *streams):
            end.close()
        self.pid = self._process.pid
        # A rank that has ended closes its pipe, unless a child of its own still holds it.
        self.signs = [self.pipe, self._process.sentinel]

    def receive(self) -> tuple | None:
        """Return a message of the rank after one of its signs; None if the rank has ended."""
        with suppress(EOFError, OSError):
            return self.pipe.recv() if self.pipe.poll() else None

    def kill(self) -> None:
        """End the rank at once, and the processes that it has started."""
        if not self.pipe.closed:  # else another process may have the same pid by now
            with suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()  # for a rank that has no process group yet

    def reap(self) -> int:
        """End the rank and wait until it is gone; return its exit code, -9 for signal 9."""
        self.kill()
        self._process.join()
        self.pipe.close()
        return self._process.exitcode
