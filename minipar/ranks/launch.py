"""Ranks: a standing group of processes, the same one for tests, notebooks and the command line.

    with Ranks(4) as ranks:
        losses = ranks.run(train, config)      # train(config) on every rank; four results

*Failure.* When a rank raises, the others have `GRACE` seconds left, or 10 x `GRACE` if the rank has
only lost its connection. Then they are stopped, even inside of a collective: a control thread in
each rank aborts its process groups. A rank that does not answer is killed. Then the ranks make a
new process group and keep their variables. If a rank is dead, all ranks are started anew.

*End.* No rank outlives your process, however it ends.

In torch: `torch.multiprocessing.spawn`; `torchrun`; `minipar.ranks.backends` joins its ranks.
"""

import atexit
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from minipar.ranks.backends import check_ranks
from minipar.ranks.processes import Process, warm_up
from minipar.ranks.worker import Failure, join, pack, unpack
from minipar.text import names

GRACE = 1.0  # seconds that ranks may go on after another has failed
TO_STOP, TO_JOIN = 3.0, 60.0  # seconds until ranks that stop, or make a group, must answer

OutputSink = Callable[[int, str, Any], None]  # rank; "stdout", "stderr" or your own; payload


class RankError(RuntimeError):
    """One or more ranks failed. `failures` maps a rank to its `Failure`."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        super().__init__("\n".join(["a rank failed", *self.reports()]))

    def reports(self) -> list[str]:
        """Return one text per different failure, headed by the ranks that share it."""
        alike: dict[tuple[str, str], list[Failure]] = {}
        for failure in self.failures.values():
            alike.setdefault((failure.kind, failure.message), []).append(failure)
        longest = {_who(same): max((f.report for f in same), key=len) for same in alike.values()}
        return [f"{who}:\n{report}" for who, report in longest.items()]


def _who(failures: list[Failure]) -> str:
    """Name the ranks that failed alike: "rank 1 of 4 (dp=0, tp=1)", or "ranks 0, 2 of 4"."""
    if len(failures) == 1:
        return failures[0].label
    ranks = ", ".join(failure.label.split()[1] for failure in failures)
    size = failures[0].label.split()[3]
    return f"all {size} ranks alike" if len(failures) == int(size) else f"ranks {ranks} of {size}"


def prefixed(rank: int, stream: str, text: str) -> None:
    """Print every line of a rank behind its number: the default sink."""
    out = sys.stderr if stream == "stderr" else sys.stdout
    out.write("".join(f"[{rank}] {line}" for line in text.splitlines(keepends=True)))
    out.flush()


class Ranks(AbstractContextManager):
    """`size` worker processes with `torch.distributed` initialised, waiting for work.

    Args:
        size: number of ranks.
        backend: "gloo", "nccl", or "link" (gloo behind an emulated link).
        timeout: seconds after which a collective fails if not all ranks have called it.
        sink: receives the lines that ranks print in a call, up to `worker.MAX_LINES` per rank;
            with None, ranks print directly.

    Raises `ValueError` for ranks that this machine cannot start.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        backend: str = "gloo",
        timeout: float = 20.0,
        sink: OutputSink | None = prefixed,
    ) -> None:
        check_ranks(size, backend)
        self.size, self.sink = size, sink
        self.remade = 0  # how often the process group was made again
        self.time_limit: float | None = None  # seconds that a call may take
        self.lock = threading.RLock()  # held by the thread whose call is running
        self.closed = False
        self._group = backend, timeout
        door = socket.create_server(("127.0.0.1", 0))  # torch would listen on all networks
        port = door.getsockname()[1]
        how = dict(is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
        self._store = dist.TCPStore("127.0.0.1", port, **how)
        self._processes = list[Process]()
        atexit.register(self.close)
        self._start()

    def run(self, fn: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return the results in rank order.

        Raises `RankError` when a rank fails, `TypeError` if `fn` or an argument cannot be pickled.
        """
        return self.run_each(fn, [args] * self.size, **kwargs)

    def run_each(self, fn: Callable, args_of: list[tuple | None], **kwargs: Any) -> list[Any]:
        """Call ``fn(*args_of[rank], **kwargs)`` on each rank; None leaves a rank out."""
        why = "the function, something that it mentions, or an argument cannot be sent to the ranks"
        asked = {rank: args for rank, args in enumerate(args_of) if args is not None}
        calls = {rank: pack((fn, args, kwargs), why) for rank, args in asked.items()}
        with self.lock, _interrupts_held() as pressed:
            call = self._supervise(calls, self.time_limit or math.inf, pressed)
            self._mend(call)
            return call.outcome()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all ranks, at once, and all processes that they started."""
        self.closed = True
        for process in self._processes:
            process.kill()
        with self.lock:
            self._end()
            self._store = None
        atexit.unregister(self.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("these ranks have ended; start new ones with Ranks(...)")

    # ------------------------------------------------------------------ starting, and once more
    def _start(self) -> None:
        """Start all ranks, in place of those from before; they are not started once closed."""
        self._check_open()
        warm_up()
        try:
            self._end()
            for _ in range(self.size):
                self._processes.append(Process(capture=self.sink is not None))
            self._join()
        except BaseException:
            self.close()
            raise

    def _end(self) -> None:
        for process in self._processes:
            process.reap()
        self._processes = []

    def _join(self) -> None:
        """Make all ranks join a process group, under a new prefix in the store."""
        self.remade += 1
        how = self.size, self._store.port, self.remade, *self._group
        calls = {rank: pack((join, (rank, *how), {})) for rank in range(self.size)}
        self._supervise(calls, TO_JOIN, []).outcome()

    def _mend(self, call: "Call") -> None:
        """Make the ranks usable again after `call`, if `call` has broken their group."""
        try:
            if not call.dead and call.has_broken_group:
                self._join()
        except (RankError, TimeoutError):  # a rank ended meanwhile
            call.dead = True
        if call.dead:
            self._start()

    # ------------------------------------------------------------------ supervision
    def _supervise(self, calls: dict[int, bytes], seconds: float, pressed: list) -> "Call":
        """Send `calls[rank]`; return the call when these ranks have answered or ended.

        An exception that comes to be in `pressed` stops the call.
        """
        self._check_open()
        call = Call(self.size, set(calls), seconds)
        for rank, content in calls.items():
            with suppress(OSError):  # a dead rank is found below
                self._processes[rank].pipe.send(content)
        while call.waiting:
            try:
                if pressed:
                    raise pressed.pop()
                self._listen(call)
                self._press(call)
            except BaseException as error:  # Ctrl-C, the time limit, or an error of the sink
                self._stop(call)
                call.interrupted = error
        return call

    def _listen(self, call: "Call") -> None:
        """Take in the ranks' messages; wait for a tenth of a second at most."""
        rank_of = {sign: rank for rank in call.waiting for sign in self._processes[rank].signs}
        for rank in sorted({rank_of[sign] for sign in wait([*rank_of], 0.1)}):
            message = self._processes[rank].receive()
            if message is None:
                call.died(rank, self._processes[rank].reap())
            elif message[0] == "answer":
                call.answered(rank, *message[1:])
            else:
                self.sink(rank, *message)

    def _press(self, call: "Call") -> None:
        """Stop the ranks that have not answered within the limit."""
        if call.waiting and time.monotonic() >= call.limit:
            if not (call.stopped or call.failures):
                late = names(sorted(call.waiting))
                raise TimeoutError(f"{late}: not done after {call.seconds:g} s")
            self._stop(call)

    def _stop(self, call: "Call") -> None:
        """Stop the ranks that have not answered; kill them if they were stopped before."""
        for rank in call.waiting:
            if call.stopped:
                self._processes[rank].kill()
            else:
                with suppress(OSError):
                    self._processes[rank].pipe.send(None)
        call.stopped, call.limit = True, time.monotonic() + TO_STOP


class Call:
    """One call in progress: which ranks have not answered, which failed, what came back."""

    def __init__(self, size: int, asked: set[int], seconds: float) -> None:
        self.size, self.asked, self.seconds = size, asked, seconds
        self.waiting = set(asked)
        self.results: dict[int, bytes] = {}  # pickled
        self.failures: dict[int, Failure] = {}
        self.dead = self.left = False  # one of the ranks is dead, or has left our process group
        self.stopped, self.interrupted = False, None
        # The time to stop the ranks in `waiting`; after a stop, the time to kill them.
        self.limit = time.monotonic() + seconds

    def answered(self, rank: int, answer: bytes | Failure, joined: bool) -> None:
        """Note an answer; a failure counts unless the ranks were told to stop before."""
        self.waiting.discard(rank)
        self.left |= not joined
        if not isinstance(answer, Failure):
            self.results[rank] = answer
        elif not self.stopped:
            self.failures[rank] = answer
            # A lost connection is a consequence: the cause, an error or a dead rank, comes later.
            grace = 0 if self.dead else GRACE * (10 if answer.broken else 1)
            self.limit = min(self.limit, time.monotonic() + grace)

    def died(self, rank: int, exitcode: int) -> None:
        """Note that a process has ended."""
        self.dead = True
        by = f"exit {exitcode}"
        if exitcode < 0:
            by = f"signal {-exitcode} ({signal.Signals(-exitcode).name})"
        label, message = f"rank {rank} of {self.size}", f"the process ended by {by}"
        self.answered(rank, Failure(label, "Died", message, message), joined=False)

    @property
    def has_broken_group(self) -> bool:
        """True unless the ranks are in step: none failed, or all with the same kind of error."""
        failures = self.failures.values()
        is_alike = len(failures) == len(self.asked) and len({f.kind for f in failures}) == 1
        in_step = not failures or (is_alike and not any(f.broken for f in failures))
        return self.stopped or self.left or not in_step

    def outcome(self) -> list[Any]:
        """Return the results in rank order, None for a rank left out; raise the call's error."""
        if self.interrupted is not None:
            raise self.interrupted
        if self.failures:
            # If code failed on one rank, the lost connections of other ranks are a consequence.
            causes = {rank: f for rank, f in self.failures.items() if not f.broken}
            raise RankError(dict(sorted((causes or self.failures).items())))
        return [unpack(self.results[r]) if r in self.results else None for r in range(self.size)]


@contextmanager
def _interrupts_held() -> Iterator[list[KeyboardInterrupt]]:
    """Delay Ctrl-C in the body; yield the list to which it adds its exception.

    Ctrl-C could cut a message in two, or leave a group half made. Neither can be repaired.
    """
    pressed: list[KeyboardInterrupt] = []
    usual = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and callable(usual)
    if is_ours:
        signal.signal(signal.SIGINT, lambda *_: pressed.append(KeyboardInterrupt()))
    try:
        yield pressed
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, usual)
    if pressed:
        raise pressed.pop()
