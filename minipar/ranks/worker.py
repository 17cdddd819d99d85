"""One rank, seen from inside: it receives calls, runs them and answers, and can be stopped.

Two threads. The main thread runs what it is told. The control thread waits for the word to stop; it
also runs while the main thread is stuck in a collective, and then aborts the process groups from
under it.
"""

import bdb
import importlib
import os
import shutil
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm.mesh import Mesh
from minipar.emulate import device, strict
from minipar.ranks.backends import compute_device, init
from minipar.ranks.output import Output, Stream
from minipar.ranks.pack import pack, unpack


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    label: str  # "rank 1 of 4 (dp=0, tp=1)"
    kind: str  # name of the exception class, or "Died"
    message: str
    report: str  # the traceback, as it should be shown
    exitcode: int | None = None  # of a process that ended
    broken: bool = False  # it was the connection that failed, not the code
    stopped: bool = False  # because others had failed, not by itself
    everywhere: bool = False  # the other ranks of the group find the same


@dataclass(frozen=True)
class Setup:
    """All that a rank must know to start."""

    size: int
    backend: str
    timeout: float
    threads: int
    capture: bool
    max_lines: int | None  # that a rank may print in a call
    folder: str  # where the ranks meet
    preload: tuple[str, ...]
    emulated: device.Device | None = None
    strict: bool = False  # races are found
    rank: int = -1


class Stopped(KeyboardInterrupt):
    """Raised inside a rank whose call was stopped because another rank failed."""


CLEANING = 1.0
"""Seconds that a call which is to stop may spend in an `except` or `finally`, where it may be
letting go of locks and files, before it is interrupted there as well."""

_BROKEN = ("gloo", "NCCL", "Connection", "pair closure", "did not end", "was aborted", "destroyed")
"""What a communication error says when the process group can no longer be used."""


class _Worker:
    """The loop of a rank: receive a call, run it, answer."""

    def __init__(self, setup: Setup, work: Connection, control: Connection) -> None:
        self.setup, self.work, self.control = setup, work, control
        self.pid = os.getpid()
        self.call = 0  # number of the latest call
        self.stopped = 0  # number of the latest call that was stopped
        self.clean_by = 0.0  # when its handlers must have ended
        self.world: dist.ProcessGroup | None = None  # that we have joined
        self.busy = threading.Event()  # set only while the user's code runs
        self.lock = threading.Lock()
        self.output = Output(self.say, f"rank {setup.rank}", setup.max_lines)
        self.children = _Children(self.output)

    def run(self) -> None:
        signal.signal(signal.SIGUSR2, self._on_signal)
        for number in (signal.SIGTERM, signal.SIGUSR1):  # which the nursery leaves to us
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._obey, daemon=True).start()
        rank, size = str(self.setup.rank), str(self.setup.size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        torch.set_num_threads(self.setup.threads)
        device.use(self.setup.emulated)
        if self.setup.backend != "link":  # which carries what is on the CPU
            compute_device()
        if self.setup.capture:
            self.children.listen()
            sys.stdout, sys.stderr = Stream("stdout", self.output), Stream("stderr", self.output)
        while True:
            self.call, kind, content = self.work.recv()
            try:
                answer = ("result", self._answer(kind, content))
            except BaseException as error:
                self.busy.clear()
                answer = ("failure", self._failure(error))
            if os.getpid() != self.pid:  # a child of os.fork(): the answer is not for it to give
                leave_child(answer[1].report if answer[0] == "failure" else "")
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the function may have put anything in their place
                    stream.flush()
            self.children.take_in()
            self.output.end()
            self.say(*answer, dist.group.WORLD is self.world)

    def _answer(self, kind: str, content: Any) -> bytes:
        if kind == "join":
            self._join(content)
            return pack(None)
        fn, args, kwargs = unpack(content)
        self.busy.set()
        try:
            watched = strict.watching() if self.setup.strict else nullcontext()
            with device.running(), watched:
                result = fn(*args, **kwargs)
        finally:
            self.busy.clear()
        return pack(result)

    def _join(self, meeting: str) -> None:
        if dist.is_initialized() and self.setup.backend == "nccl":
            dist.distributed_c10d._abort_process_group()  # others may never come to what is open
        if dist.is_initialized():
            dist.destroy_process_group()
        size, store = self.setup.size, dist.FileStore(meeting, self.setup.size)
        where = {"store": store, "rank": self.setup.rank, "world_size": size}
        init(self.setup.backend, self.setup.timeout, **where)
        self.world = dist.group.WORLD

    def _failure(self, error: BaseException) -> Failure:
        # A caller that renders errors better than we do (a notebook cell) attaches the text.
        report = _attached(error, "report", str)
        if report is None:
            add_hint(error)
            # The first frames are this loop's; a reader wants those of the function.
            tb = error.__traceback__
            for _ in range(2):
                tb = tb.tb_next if tb is not None and tb.tb_next is not None else tb
            report = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
        kind = _attached(error, "kind", str) or type(error).__name__
        try:
            message = str(error)
        except Exception:
            message = f"<str() of this {type(error).__name__} fails>"
        broken = isinstance(error, RuntimeError) and any(word in message for word in _BROKEN)
        stopped, everywhere = self.stopped == self.call, bool(_attached(error, "everywhere", bool))
        return Failure(Mesh.label, kind, message, report, None, broken, stopped, everywhere)

    def say(self, kind: str, *content: Any) -> None:
        """Send a message to the parent; a signal must not cut it in two.

        It bears the number of the call, so that it is never taken for the answer to another.
        """
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            with self.lock:
                self.work.send((self.call, kind, *content))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    def _on_signal(self, *_: object) -> None:
        cleans = sys.exception() is not None and time.monotonic() < self.clean_by
        if self.busy.is_set() and not cleans:
            raise Stopped("stopped because another rank failed or the call was interrupted")

    def _obey(self) -> None:
        """The control thread: runs even while the main thread is stuck in a collective."""
        main = threading.main_thread().ident
        try:
            while True:
                unwanted = self.control.recv()  # the number of the call to stop

                def running(unwanted=unwanted):
                    return self.busy.is_set() and self.call == unwanted

                if running():
                    self.stopped, self.clean_by = unwanted, time.monotonic() + CLEANING
                    abort_groups()
                while running():  # plain Python: loops and sleeps
                    signal.pthread_kill(main, signal.SIGUSR2)
                    time.sleep(0.1)
        except (EOFError, OSError):  # the pipe is closed: our parent is gone
            shutil.rmtree(self.setup.folder, ignore_errors=True)
        finally:
            leave()


def _attached(error: BaseException, name: str, kind: type) -> Any:
    """What an error of ours bears under this name; None where a user's has something else there."""
    with suppress(Exception):
        value = getattr(error, name)
        return value if type(value) is kind else None
    return None


class _Children:
    """What processes that a rank has forked print: it is handed to the rank, and travels with it.

    They must not write to the rank's pipe: two messages at once would be garbled.
    """

    def __init__(self, output: Output) -> None:
        self._output, self._lock = output, threading.Lock()
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def listen(self) -> None:
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while self._ours.recv(1, socket.MSG_PEEK):
            self.take_in()

    def take_in(self) -> None:
        """Hand on what was said until now."""
        with self._lock, suppress(BlockingIOError):
            while True:
                said = self._ours.recv(1 << 13, socket.MSG_DONTWAIT).decode()
                self._output.write(*said.split(":", 1))

    def _in_child(self) -> None:
        # Made anew: a thread of the rank, which is not here, may have held its lock.
        self._output.__init__(self._say, "", None)

    def _say(self, stream: str, text: str) -> None:
        for start in range(0, len(text), 500):  # a datagram is small
            self._theirs.send(f"{stream}:{text[start : start + 500]}".encode())


def leave_child(report: str) -> None:
    """End a process that user code has forked in a rank and that came back from it."""
    with suppress(Exception):
        print(report, end="\n" * bool(report), file=sys.stderr)
        _worker.output.end()
    os._exit(bool(report))


def leave() -> None:
    """End this rank and the processes that were started in it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


_worker: _Worker | None = None  # of this process, if it is a rank


def shield() -> None:
    """From inside a rank: from here on this call is not stopped any more; it ends by itself."""
    if _worker is not None:
        _worker.busy.clear()


def say(kind: str, content: Any) -> None:
    """From inside a rank: hand (picklable) `content` to the sink of the parent.

    What was printed before travels first; beyond `max_lines` of a call it is counted only.
    """
    assert _worker is not None, "only a rank of a Ranks pool can speak to its parent"
    if os.getpid() != _worker.pid:
        raise RuntimeError("a process forked by a rank can print, but show no pictures")
    if _worker.output.make_room():
        _worker.say(kind, content)


def notify(kind: str, content: Any) -> None:
    """As `say`, of what is no output: it is not counted, and nothing travels before it."""
    _worker.say(kind, content)


def add_hint(error: BaseException) -> None:
    """Attach a sentence to an error that means something else on the ranks of a pool."""
    with suppress(Exception):  # str() of it may fail
        if "initialize the default process group twice" in str(error):
            error.add_note(
                "The ranks have joined before your code runs: leave init_process_group out. After "
                "destroy_process_group() they join again by themselves."
            )
        if isinstance(error, bdb.BdbQuit) or "EOF when reading a line" in str(error):
            error.add_note(
                "A rank has no keyboard. Call the function where the ranks were started, in the "
                "notebook say, as one rank of a group that is not there; breakpoint() works so:\n"
                "    from minipar.parallel.plan import Plan\n"
                "    from minipar.sim.trace import pretend\n"
                "    with pretend(Plan(dp=4), rank=2) as mesh: ..."
            )


def abort_groups() -> None:
    """Make every collective of this process fail now, from any thread."""
    carriers = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(Exception):  # another thread may be destroying this one right now
            carriers[group] = dist.get_backend(group)
    if over_nccl := [group for group, carrier in carriers.items() if "nccl" in carrier]:
        _abort_together(over_nccl)
    if any("gloo" in carrier for carrier in carriers.values()):
        _cut_connections()  # gloo's own abort() does nothing


def _abort_together(groups: list[dist.ProcessGroup]) -> None:
    """As torch's `_abort_process_group`: ended one by one, communicators may wait for another."""
    first = groups[0]._get_backend(torch.device("cuda"))
    first._group_start()
    for group in groups:
        with suppress(Exception):
            group.abort()
    first._group_end()


def _cut_connections() -> None:
    """Shut this process's TCP connections down (Linux): all of them are torch's.

    Not the listening sockets: gloo ends the process when those go.
    """
    if not os.path.isdir("/proc/self/fd"):
        return  # the supervisor will kill us instead
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as sock:
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if sock.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    sock.shutdown(socket.SHUT_RDWR)


def rank_main(setup: Setup, work_fd: int, control_fd: int) -> None:
    """A rank from its first breath to its last; never returns."""
    global _worker
    try:
        for module in setup.preload:
            importlib.import_module(module)
        _worker = _Worker(setup, Connection(work_fd), Connection(control_fd))
        _worker.run()
    except EOFError:  # the parent is gone
        shutil.rmtree(setup.folder, ignore_errors=True)
    except (OSError, KeyboardInterrupt):
        pass
    finally:
        # Not sys.exit: an interpreter that leaves with a live gloo group may abort noisily.
        leave()
