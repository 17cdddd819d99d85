"""Ranks: a standing group of processes, the same one for tests, notebooks and the command line.

    with Ranks(4) as ranks:
        losses = ranks.run(train, config)      # train(config) on every rank; four results

What happens behind it:

    your process ──┬── pipes: "call this", results, output ──► rank 0 .. n-1
                   └── socket: "fork a rank" ──► nursery ──fork──┘

*Start.* The nursery is one clean process that imports torch once and forks every rank from there:
a rank is ready in milliseconds, also when one has to be replaced. (Where forking is not safe,
as on macOS, each rank is a process started from scratch.) The ranks find each other through a
file, so that no port can collide.

*Failure.* When a rank raises, the others get `grace` seconds to finish and are then stopped, even
if they wait inside of a collective: a control thread in each rank aborts its process groups from
under it. Where ranks have but lost a connection, or say that all find the same, they get ten times
as long. What they do in an `except` or `finally` is interrupted only after a second, so that locks
and files are let go of. A rank that does not even answer to that is killed. Then the process group
is made anew, dead ranks are forked again, and `RankError` shows the traceback of the rank that
failed *first*.

*End.* No rank outlives your process, however it ends: pipes that close end the ranks; on Linux the
kernel ends them with the nursery as well.

Under torchrun there is nothing to start: `minipar.ranks.backends` joins the ranks that it made.
In torch: `torch.multiprocessing.spawn`, `torchrun`.
"""

import atexit
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import psutil

from minipar.emulate.device import Device
from minipar.ranks.backends import check_backend
from minipar.ranks.jobs import Interrupts, Job
from minipar.ranks.pack import pack_call, unpack
from minipar.ranks.processes import Nursery, Process
from minipar.ranks.worker import Failure, Setup

RANK_BYTES = 100e6
"""Memory of a process that has imported torch and joined a group, at the least."""

OutputSink = Callable[[int, str, Any], None]
"""Called as ``sink(rank, stream, payload)``; stream is "stdout", "stderr" or one of your own."""


class RankError(RuntimeError):
    """One or more ranks failed. `failures` maps a rank to its `Failure`."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        super().__init__("\n".join(["a rank failed", *self.reports()]))

    def reports(self) -> list[str]:
        """One text per different failure, headed by the ranks that share it."""
        alike: dict[tuple[str, str], list[Failure]] = {}
        for failure in self.failures.values():
            alike.setdefault((failure.kind, failure.message), []).append(failure)
        # Of reports of one and the same failure, the one that tells most.
        return [
            f"{_who(same)}:\n{max((f.report for f in same), key=len)}" for same in alike.values()
        ]

    def __reduce__(self):
        return RankError, (self.failures,)


def _who(failures: list[Failure]) -> str:
    """Name the ranks that failed alike: "rank 1 of 4 (dp=0, tp=1)", or "ranks 0, 2 of 4"."""
    if len(failures) == 1:
        return failures[0].label
    size = failures[0].label.split(" of ")[1].split()[0]
    ranks = [failure.label.split()[1] for failure in failures]
    if len(ranks) == int(size):
        return f"all {size} ranks alike"
    return f"ranks {', '.join(ranks)} of {size}"


def prefixed(rank: int, stream: str, text: str) -> None:
    """The default sink: print every line of a rank behind its number."""
    out = sys.stderr if stream == "stderr" else sys.stdout
    out.write("".join(f"[{rank}] {line}" for line in text.splitlines(keepends=True)))
    out.flush()


def check_fits_here(size: int, weight_bytes: float = 0) -> None:
    """Raise `ValueError` for more ranks than this machine can start.

    `weight_bytes` is what each holds besides itself. Cores may be shared, within reason; memory
    may not.
    """
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total
    rank_bytes = RANK_BYTES + weight_bytes
    most = min(max(64, cores), int(memory / rank_bytes))
    if size > most:
        raise ValueError(
            f"{size:,} ranks do not fit this machine: it has {cores} cores and "
            f"{memory / 1e9:.1f} GB, and a rank takes {rank_bytes / 1e9:.1f} GB or more, so "
            f"that up to {most} do; use fewer, a smaller model, or torchrun on more machines"
        )


class Ranks:
    """`size` worker processes with `torch.distributed` initialised, waiting for work.

    Args:
        size: number of ranks.
        backend: "gloo", "nccl", or "link" (gloo behind an emulated link).
        timeout: seconds after which a collective that is not joined by all fails.
        grace: seconds that ranks may go on after another has failed; see *Failure* above.
        threads: threads of each rank for computing.
        sink: receives what ranks print, while they run; None lets them print for themselves.
        mend: after a failure make the pool usable again; otherwise end it.
        max_lines: how many lines a rank may print in a call; more are only counted. None: all.
        preload: names of modules that every rank should find imported when it starts.
        start: "fork" from a clean process, or "spawn" each rank from scratch: slower, but safe
            everywhere. None picks "fork" on Linux.
        device: what every rank computes on by declaration, see `minipar.emulate.device`; needs the
            backend "link".
        strict: stop at what would be a race on a GPU, in each call: results are NaN until they are
            waited for, what travels must be left alone, and no handle be forgotten. Slow; needs
            the backend "link". See `minipar.emulate.strict`.

    Raises `ValueError` for a size below 1, an unknown backend or start, a device or strict=True
    without a link.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        backend: str = "gloo",
        timeout: float = 20.0,
        grace: float = 1.0,
        threads: int = 1,
        sink: OutputSink | None = prefixed,
        mend: bool = True,
        max_lines: int | None = None,
        preload: tuple[str, ...] = (),
        start: str | None = None,
        device: Device | None = None,
        strict: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"Ranks({size}): a group needs at least 1 rank")
        check_fits_here(size)
        check_backend(backend, size)
        if device is not None and not (isinstance(device, Device) and backend == "link"):
            raise ValueError(
                f"device={device!r} with backend={backend!r}: an emulated device talks over the "
                "backend 'link', and is made by minipar.sim.emulate.device('h100/100'), say"
            )
        if strict and backend != "link":
            raise ValueError(f"strict=True watches the backend 'link', not {backend!r}")
        start = start or ("fork" if sys.platform == "linux" else "spawn")
        if start not in ("fork", "spawn"):
            raise ValueError(f"start={start!r} is unknown; use fork or spawn")
        self.size, self.grace, self.mend, self.sink = size, grace, mend, sink
        self.remade = 0  # how often the process group was made again
        self.time_limit: float | None = None  # seconds that a call may take
        self.lock = threading.RLock()  # held by the thread whose call is running
        self.closed = False
        self._call, self._listening = 0, False
        self._pid = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="minipar-")
        more = self._folder, tuple(preload), device, strict
        self._setup = Setup(size, backend, timeout, threads, sink is not None, max_lines, *more)
        self._nursery = self._new_nursery() if start == "fork" else None
        self._processes: list[Process | None] = [None] * size
        atexit.register(self.close)
        try:
            self._start_all(range(size))
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return the results in rank order.

        The function and its arguments travel by value when they are of `__main__` or local, by
        name otherwise. Calls of several threads take turns. Raises `RankError` when a rank fails,
        and `CannotTravel`, a `TypeError`, for what cannot be pickled.
        """
        return self.run_each(fn, [args] * self.size, **kwargs)

    def run_each(self, fn: Callable, args_of: list[tuple | None], **kwargs: Any) -> list[Any]:
        """Call ``fn(*args_of[rank], **kwargs)`` on each rank; None leaves a rank out.

        Raises `ValueError` unless there is an entry for each rank, and else what `run` raises.
        """
        self._check_open()
        if len(args_of) != self.size:
            raise ValueError(
                f"run_each: {len(args_of)} entries for {self.size} ranks; give each rank a tuple "
                f"of arguments, or None to leave it out"
            )
        distinct = {id(args): args for args in args_of if args is not None}
        packed = {key: pack_call(fn, args, kwargs) for key, args in distinct.items()}
        calls = [None if args is None else ("call", packed[id(args)]) for args in args_of]
        with self.lock:
            return self._supervise(calls)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._processes]

    def restart(self) -> None:
        """End all ranks and start fresh ones in their place."""
        self._check_open()
        with self.lock, Interrupts():
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.reap()
            if self._nursery is not None and self._nursery.ended:
                self._nursery = self._new_nursery()
            self._start_all(range(self.size))

    def close(self) -> None:
        """End all ranks, at once, and what was started in them, also in sessions of their own.

        With start="spawn" the latter go on. A call that is running in another thread fails.
        """
        if self._pid != os.getpid():
            return  # a fork of the process whose ranks they are
        self.closed = True
        for process in filter(None, self._processes):
            process.kill()
        turn = self.lock.acquire(timeout=10)  # that call has noticed
        for process in filter(None, self._processes):
            process.reap()
        self._processes = []
        if self._nursery is not None:
            self._nursery.close()
        if turn:
            self.lock.release()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self):
        raise TypeError(
            "it is the pool of ranks itself, which stays in the process that started it; "
            "did you mean `rank`?"
        )

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("these ranks have ended; start new ones with Ranks(...)")
        if self._pid != os.getpid():
            raise RuntimeError("these ranks obey the process that started them, not a fork of it")

    # ------------------------------------------------------------------ supervision
    def _new_nursery(self) -> Nursery:
        return Nursery(self._setup)

    def _start(self, rank: int) -> None:
        self._processes[rank] = Process(replace(self._setup, rank=rank), self._nursery)

    def _start_all(self, ranks: Iterable[int]) -> None:
        """Start these ranks; then let all ranks make a process group, at a new meeting point."""
        for rank in ranks:
            self._start(rank)
        self.remade += 1
        meeting = os.path.join(self._folder, str(self.remade))
        self._supervise([("join", meeting)] * self.size, limit=time.monotonic() + 60)

    def _supervise(self, messages: list[tuple | None], limit: float | None = None) -> list[Any]:
        """Send `messages[rank]`, collect the answers, and see to it that all ranks come back."""
        self._check_open()
        if self._listening:
            raise RuntimeError("a sink cannot call the ranks while it hears them")
        self._call += 1
        job = Job(self._call, {r for r, m in enumerate(messages) if m is not None}, limit)
        if self.time_limit is not None and limit is None:
            job.deadline = time.monotonic() + self.time_limit
        with Interrupts() as interrupts:
            for rank in job.waiting:
                with suppress(OSError):  # a dead rank is found below
                    self._processes[rank].work.send((self._call, *messages[rank]))
            while job.waiting:
                try:
                    interrupts.check()
                    self._listen(job, interrupts)
                    self._press(job)
                except BaseException as error:  # Ctrl-C, or a test's time limit
                    if self.closed or not self.mend:
                        self.close()
                        raise
                    if job.interrupted is not None:  # the second time: no more patience
                        self._kill(job)
                    job.interrupted = error
                    self._stop(job)
            joining = limit is not None
            if self.closed:
                raise RuntimeError("these ranks were ended during the call")
            if job.dead or job.stopped or (job.failures and not job.all_alike):
                if not self.mend:
                    self.close()
                elif not joining:
                    self._mend(job.dead)
            elif job.left and not joining:  # a call ended with dist.destroy_process_group()
                self._mend([])
        if job.interrupted is not None:
            raise job.interrupted
        if job.failures:
            # Where code failed somewhere, connections that broke elsewhere are a consequence.
            causes = {rank: f for rank, f in job.failures.items() if not f.broken}
            raise RankError(dict(sorted((causes or job.failures).items())))
        answers = [job.results.get(rank) for rank in range(self.size)]
        return [None if answer is None else unpack(answer) for answer in answers]

    def _mend(self, dead: list[int]) -> None:
        """Put fresh ranks in the place of the dead, and let all meet again."""
        try:
            self._start_all(dead)
        except RuntimeError:  # a rank ended meanwhile, or the nursery is gone
            self.restart()

    def _listen(self, job: Job, interrupts: Interrupts) -> None:
        """Take in what each rank has said by now; wait for half a second at most."""
        due = min(job.deadline, math.inf if job.limit is None else job.limit)
        patience = max(0.0, min(0.5, due - time.monotonic()))
        asked = {rank: self._processes[rank] for rank in sorted(job.waiting)}
        with interrupts.allowed():
            ready = wait([sign for process in asked.values() for sign in process.signs], patience)
        for rank, process in asked.items():
            if not any(sign in ready for sign in process.signs):
                continue
            try:
                if process.work not in ready:
                    raise EOFError("ended, though a child of its own still holds the pipe")
                said = process.heard()
            except (EOFError, OSError):
                job.died(rank, self.size, process.reap())
                continue
            for number, kind, *content in said:
                self._take(job, rank, number, kind, content)

    def _take(self, job: Job, rank: int, number: int, kind: str, content: list) -> None:
        """Enter what a rank has said; an answer to another call is none to this one."""
        if kind not in ("result", "failure"):
            self._listening = True
            try:
                self.sink(rank, kind, content[0])
            finally:
                self._listening = False
        elif number == job.number and rank not in job.killed:  # then its end is what we wait for
            answer, joined = content
            if not joined:
                job.left.add(rank)
            if kind == "failure":
                job.failed(rank, answer)
            else:
                job.waiting.discard(rank)
                job.results[rank] = answer

    def _press(self, job: Job) -> None:
        """Once a rank has failed: wait, then stop the others, then kill them."""
        now = time.monotonic()
        if now >= job.deadline and job.waiting and not job.stopped and not job.failures:
            late = ", ".join(map(str, sorted(job.waiting)))
            job.interrupted = TimeoutError(f"ranks {late}: not done after {self.time_limit:g} s")
            self._stop(job)
        if job.failures and job.limit is None:
            found_by_all = any(failure.everywhere for failure in job.failures.values())
            # A rank that was killed may still die: a GPU's memory is given back before it is gone.
            only_felt = all(failure.broken for failure in job.failures.values())
            job.limit = now + self.grace * (10 if found_by_all or only_felt else 1)
        if job.dead and not job.stopped:
            job.limit = now  # a wait for the dead is in vain
        if job.waiting and job.limit is not None and now >= job.limit:
            if not self.mend or job.stopped:
                self._kill(job)
            else:
                self._stop(job)

    def _stop(self, job: Job) -> None:
        job.stopped, job.limit = True, time.monotonic() + 3
        for rank in job.waiting:
            with suppress(OSError):
                self._processes[rank].control.send(job.number)

    def _kill(self, job: Job) -> None:
        job.stopped = True
        job.killed |= job.waiting
        for rank in job.waiting:
            self._processes[rank].kill()
        job.limit = time.monotonic() + 3


def spawn(fn: Callable, size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Start `size` ranks, run ``fn(*args, **kwargs)`` on each, end them; return the results."""
    with Ranks(size) as ranks:
        return ranks.run(fn, *args, **kwargs)
