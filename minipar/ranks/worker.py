"""The process of one rank: it receives calls, runs them and answers, and can be stopped.

A rank has two threads. The main thread runs calls. The control thread receives them, and the order
to stop one. It runs even while the main thread hangs in a collective. It then aborts the process
groups.
"""

import gc
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from minipar.comm.mesh import Mesh
from minipar.emulate import device
from minipar.ranks.backends import init, is_lost_connection

MAX_LINES = 200  # lines that a rank may print in a call; further lines are only counted


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    label: str  # "rank 1 of 4 (dp=0, tp=1)"
    kind: str  # name of the exception class, or "Died"
    message: str
    report: str  # the traceback, as it should be shown
    broken: bool = False  # True if the connection failed, not the code


class Stopped(KeyboardInterrupt):
    """Raised inside a rank to stop its call: another rank failed, or the call was interrupted."""


# ---------------------------------------------------------------------- what travels
class InWords:
    """Makes a notebook show only the message of an exception: all frames would be minipar's."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class _Pickler(cloudpickle.Pickler):
    """Sends a function by value if it is of `__main__` or local, else by name."""

    def reducer_override(self, thing: Any) -> Any:
        # For a view, torch would send the whole storage.
        is_dense = type(thing) is torch.Tensor and thing.layout == torch.strided
        if is_dense and thing.nbytes < thing.untyped_storage().nbytes():
            return thing.detach().clone().requires_grad_(thing.requires_grad).__reduce_ex__(2)
        return super().reducer_override(thing)


def pack(thing: Any, what: str = "the result cannot be sent back") -> bytes:
    """Return `thing` pickled. Raises `TypeError`, which begins with `what`."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(thing)
    except Exception as error:
        raise TypeError(f"{what}: {error}") from None
    return file.getvalue()


unpack = cloudpickle.loads  # undoes `pack`; only what our own processes have sent


class Stream(io.RawIOBase):
    """Sends a rank's ``sys.stdout`` or ``sys.stderr`` to the parent; programs write to `text`.

    At most `MAX_LINES` lines are sent per call, so that endless prints do not fill the notebook.
    """

    def __init__(self, name: str, say: Callable[[str, str], None]) -> None:
        self.name, self._say = name, say
        self._num_lines = 0  # of this call
        self.text = io.TextIOWrapper(self, "utf-8", line_buffering=True)

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int:
        """Send lines, or a part of a line, such as the state of a progress bar."""
        lines = bytes(data).decode().split("\n")  # the last one has not ended
        room = MAX_LINES - self._num_lines
        self._num_lines += len(lines) - 1
        if data and room > 0:
            self._say(self.name, "\n".join(lines[:room]) + "\n" * (len(lines) > room))
        return len(data)

    def end(self) -> None:
        """Send the rest at the end of a call, and the number of lines left out."""
        self.text.flush()
        left_out, self._num_lines = self._num_lines - MAX_LINES, 0
        if left_out > 0:
            self._say(self.name, f"... {left_out:,} more lines\n")


# ---------------------------------------------------------------------- the loop
class _Worker:
    """The loop of a rank: receive a call, run it, answer."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.calls = pipe, SimpleQueue[bytes]()
        self.called = self.busy = False  # there is a call to answer; the user's code runs
        self.world: dist.ProcessGroup | None = None  # the group that this rank has joined
        self.lock = threading.Lock()  # held while a message is sent
        self.streams = [Stream(name, self.say) for name in ("stdout", "stderr")]

    def run(self) -> None:
        while True:
            content = self.calls.get()
            try:
                answer: Any = self._run(content)
            except BaseException as error:
                self.busy = False
                answer = self._failure(error)
            sys.stdout.flush()  # for ranks that print directly
            for stream in self.streams:
                stream.end()
            self.called = False
            self.say("answer", answer, dist.group.WORLD is self.world)

    def _run(self, content: bytes) -> bytes:
        self.busy = True
        try:
            fn, args, kwargs = unpack(content)
            with device.running():
                result = fn(*args, **kwargs)
        finally:
            self.busy = False
        return pack(result)

    def _failure(self, error: BaseException) -> Failure:
        report = getattr(error, "report", None)  # a notebook cell renders errors better than we do
        if not isinstance(report, str):
            shown = traceback.TracebackException.from_exception(error)
            del shown.stack[:2]  # the frames of this loop
            report = "".join(shown.format()).rstrip()
        what = Mesh.label, type(error).__name__, str(error), report
        return Failure(*what, broken=is_lost_connection(error))

    def say(self, kind: str, *content: Any) -> None:
        """Send a message to the parent; a signal must not cut it in two."""
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            with self.lock:
                self.pipe.send((kind, *content))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    # ------------------------------------------------------------------ being stopped
    def on_signal(self, *_: object) -> None:
        if self.busy:
            raise Stopped

    def obey(self) -> None:
        """The control thread: runs even while the main thread is stuck in a collective."""
        main = threading.main_thread().ident
        try:
            while True:  # until the parent is gone
                content = self.pipe.recv()
                if content is not None:
                    self.called = True
                    self.calls.put(content)
                    continue
                while self.called:
                    if self.busy:
                        abort_groups()
                        signal.pthread_kill(main, signal.SIGUSR2)  # ends Python loops and sleeps
                    if self.pipe.poll(0.1):
                        break
        finally:
            leave()


def join(rank: int, size: int, port: int, meeting: int, backend: str, timeout: float) -> None:
    """Join a new process group of all ranks of a pool, whose store listens at `port`."""
    if dist.is_initialized() and backend == "nccl":
        dist.distributed_c10d._abort_process_group()  # destroying it would wait for other ranks
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    store = dist.PrefixStore(f"meeting {meeting}", store)
    init(backend, timeout, store=store, rank=rank, world_size=size)
    _worker.world = dist.group.WORLD


def leave() -> None:
    """End this rank and the processes that were started in it."""
    os.killpg(0, signal.SIGKILL)  # after sys.exit, a live gloo group may abort noisily


def abort_groups() -> None:
    """Make every collective of this process fail now, from any thread.

    gloo's own abort() does nothing, so shut down the TCP connections: all of them are torch's. Keep
    the listening sockets: gloo ends the process if one of them is shut down.
    """
    with suppress(Exception):  # the main thread may be destroying its groups right now
        if "nccl" in dist.get_backend_config():
            dist.distributed_c10d._abort_process_group()  # all communicators in one batch
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------------- for code that a rank runs
_worker: _Worker | None = None  # of this process, if it is a rank


def shield() -> None:
    """Protect this rank's call from stops, from here to its own end. Call it inside a rank."""
    if _worker is not None:
        _worker.busy = False


def say(kind: str, content: Any) -> None:
    """Send (picklable) `content`, such as a picture, from inside a rank to the parent's sink."""
    for stream in _worker.streams:
        stream.text.flush()
    _worker.say(kind, content)


def rank_main(
    pipe: Connection, streams: list[Connection], environment: dict[str, str], capture: bool
) -> None:
    """Run a rank, from its start to its end; never return."""
    global _worker
    os.setpgid(0, 0)  # a process group for this rank and its children: all end together
    try:
        gc.freeze()  # a garbage collection over all imported modules would copy each shared page
        multiprocessing.set_start_method(None, force=True)  # a DataLoader needs the usual method
        for number in (signal.SIGTERM, signal.SIGUSR1):  # the fork server ignores these signals
            signal.signal(number, signal.SIG_DFL)
        for fd, stream in enumerate(streams, start=1):
            os.dup2(stream.fileno(), fd)
        os.environ.clear()  # the fork server's variables; one server may serve many pools
        os.environ.update(environment)
        torch.set_num_threads(1)
        _worker = _Worker(pipe)
        signal.signal(signal.SIGUSR2, _worker.on_signal)
        threading.Thread(target=_worker.obey, daemon=True).start()
        if capture:
            sys.stdout, sys.stderr = (stream.text for stream in _worker.streams)
        _worker.run()
    except OSError:  # the parent is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        leave()
