"""Starting ranks: forked from one clean process, or each from scratch; watching and ending them."""

import ctypes
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any

import psutil

from minipar.ranks.worker import Setup, rank_main

_BOOT = "import sys; sys.path[:] = {path!r}; from minipar.ranks import processes; processes.{call}"


def _python(call: str, fds: list[int], threads: int) -> subprocess.Popen:
    """Start a fresh interpreter that runs ``processes.<call>`` and inherits `fds`.

    It has a session of its own, so that Ctrl-C reaches only the parent, which decides.
    """
    lo = "lo0" if sys.platform == "darwin" else "lo"
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": lo}
    env = {**quiet, **os.environ, "OMP_NUM_THREADS": str(threads)}
    code = _BOOT.format(path=sys.path, call=call)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=env,
    )


class Nursery:
    """The clean process that ranks are forked from, as its parent sees it."""

    def __init__(self, setup: Setup) -> None:
        self._socket, theirs = socket.socketpair()
        self._ready = False
        self._before = self._inherited(setup)
        call = f"_nursery({theirs.fileno()}, {os.getpid()}, {setup.folder!r}, {setup.preload!r})"
        self._process = _python(call, [theirs.fileno()], setup.threads)
        theirs.close()

    def ready(self, seconds: float | None) -> bool:
        """Wait until it has imported torch, for so many seconds at most; tell whether it has."""
        if not self._ready and wait([self._socket], seconds):
            self._ready = True
            with suppress(OSError):
                self._socket.recv(1)
        return self._ready

    def ask(self, request: tuple, fds: tuple[int, ...] = ()) -> Any:
        """Send a request; return the answer.

        Raises `RuntimeError` when the nursery is gone, `OSError` when it cannot fork.
        """
        answer = b""
        self.ready(None)
        with suppress(OSError):
            socket.send_fds(self._socket, [pickle.dumps(request)], fds)
            answer = self._socket.recv(1 << 16)
        if not answer:
            raise RuntimeError("the process that ranks are forked from has ended")
        answer = pickle.loads(answer)
        if isinstance(answer, OSError):
            raise answer
        return answer

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def suits(self, setup: Setup) -> bool:
        """Whether it lives, and ranks of another pool would find what they need."""
        return not self.ended and self._before == self._inherited(setup)

    @staticmethod
    def _inherited(setup: Setup) -> tuple:
        """What ranks take over from the nursery: its options, environment and folder."""
        return setup.threads, setup.preload, setup.capture, dict(os.environ), os.getcwd()

    def close(self) -> None:
        self._socket.close()
        end_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()


def _nursery(fd: int, parent_pid: int, folder: str, preload: tuple[str, ...]) -> None:
    """Import torch once, fork a rank per request, report exits; end with the parent.

    What a rank leaves behind in a session of its own becomes a child of this process, and ends with
    it. With start="spawn" it would not be known, and lives on.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    # The first optimizer or DDP of a rank would import it: a second each.
    import torch._dynamo  # noqa: F401

    for module in preload:
        importlib.import_module(module)
    gc.freeze()  # collectors of ranks shall not go through all this, and copy each page of it
    # A scheduler signals every process of a job; what to do then is up to the ranks.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    parent, pids, folders = socket.socket(fileno=fd), set(), {folder}
    with suppress(OSError):  # the parent ended while we were answering
        parent.send(b".")
        while _is_asked(parent, parent_pid):
            request, fds, _, _ = socket.recv_fds(parent, 1 << 16, 2)
            if not request:
                break
            what, content = pickle.loads(request)
            if what == "fork":
                folders.add(content.folder)  # of another pool, if it was handed on
                pid = _fork(content, fds, parent)
                if isinstance(pid, int):
                    pids.add(pid)
                for theirs in fds:
                    os.close(theirs)
                parent.send(pickle.dumps(pid))
            else:
                pids.discard(content)
                parent.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(content, 0)[1])))
                _let_orphans_go(pids)
    for pid in pids:
        kill_group(pid)
    end_descendants(os.getpid())
    for each in folders:
        shutil.rmtree(each, ignore_errors=True)
    os._exit(0)


def _let_orphans_go(ranks: set[int]) -> None:
    """Reap what has ended of the rest; ranks keep their numbers until the parent asks for them."""
    with suppress(ChildProcessError, AttributeError):  # on macOS there are none, nor waitid
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        # A rank stands before what it leaves behind, and is asked for: then the rest goes.
        while (child := os.waitid(os.P_ALL, 0, look)) is not None and child.si_pid not in ranks:
            os.waitpid(child.si_pid, os.WNOHANG)


def _is_asked(parent: socket.socket, parent_pid: int) -> bool:
    """Wait for a request; False if the parent ends, whose socket a fork of it may hold open."""
    while not wait([parent], 1.0):
        if os.getppid() != parent_pid:
            return False
    return True


def _fork(setup: Setup, fds: list[int], parent: socket.socket) -> int | OSError:
    """Fork a rank; return its process id, or why there cannot be one."""
    try:
        pid = os.fork()
    except OSError as error:
        return OSError(error.errno, f"a rank cannot be forked: {error.strerror}; see ulimit -u")
    if pid == 0:
        parent.close()
        os.setpgid(0, 0)  # with all that it will start, so that they end together
        with suppress(OSError, AttributeError):
            # PR_SET_PDEATHSIG: the kernel ends a rank with the nursery, come what may.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        rank_main(setup, *fds)
    with suppress(OSError):  # done already, by the child
        os.setpgid(pid, pid)
    return pid


def kill_group(pid: int) -> None:
    """End a rank at once, and the processes that were started in it."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left of it
        os.killpg(pid, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """End all processes below `pid` at once, in whichever session they are."""
    left, limit = [None], time.monotonic() + 2
    while left and time.monotonic() < limit:  # one may have started another meanwhile
        left = []
        with suppress(psutil.Error):
            left = psutil.Process(pid).children(recursive=True)
        left = [child for child in left if _condition(child) != psutil.STATUS_ZOMBIE]
        for child in left:
            with suppress(psutil.Error):
                child.kill()


def _condition(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.Error:
        return psutil.STATUS_ZOMBIE


class Process:
    """One rank, as its parent sees it."""

    def __init__(self, setup: Setup, nursery: Nursery | None) -> None:
        self.exitcode: int | None = None
        self._nursery = nursery
        self.work, work = Pipe()
        self.control, control = Pipe()
        fds = (work.fileno(), control.fileno())
        if nursery is not None:
            self.pid = nursery.ask(("fork", setup), fds)
        else:
            self._popen = _python(
                f"rank_main(processes.{setup!r}, {fds[0]}, {fds[1]})", list(fds), setup.threads
            )
            self.pid = self._popen.pid
        work.close()
        control.close()
        # A rank that ended closes its pipe, unless a DataLoader worker that it forked still holds
        # it: on Linux we therefore watch the process as well.
        self._pidfd = None
        with suppress(OSError, AttributeError):
            self._pidfd = os.pidfd_open(self.pid)
        self.signs = [self.work] if self._pidfd is None else [self.work, self._pidfd]

    def heard(self) -> list[tuple]:
        """Return what the rank has said: a message at least, and texts that follow on it, joined.

        A hundred at most, so that a rank that never stops talking lets the others be heard.
        Raises `EOFError` or `OSError` when it has ended.
        """
        number, kind, *content = self.work.recv()
        if kind not in ("stdout", "stderr"):
            return [(number, kind, *content)]
        said, texts = [], content
        with suppress(EOFError, OSError):  # it will be found again
            while len(texts) < 100 and self.work.poll():
                after = self.work.recv()
                if after[:2] != (number, kind):
                    said.append(after)
                    break
                texts.append(after[2])
        return [(number, kind, "".join(texts)), *said]

    def kill(self) -> None:
        """End the process at once, if it has not ended yet."""
        if self.exitcode is None:
            kill_group(self.pid)

    def reap(self) -> int:
        """Wait for the end of the process; return its exit code, -9 for signal 9.

        What was started in it ends as well.
        """
        if self.exitcode is None:
            kill_group(self.pid)
            if self._nursery is None:
                self.exitcode = self._popen.wait()
            else:
                try:
                    self.exitcode = self._nursery.ask(("wait", self.pid))
                except RuntimeError:  # then the kernel has ended the rank with the nursery
                    self.exitcode = -signal.SIGKILL
            if self._pidfd is not None:
                os.close(self._pidfd)
            self.work.close()
            self.control.close()
        return self.exitcode
