"""Watchdog: when a collective hangs, who waits in it, and which rank keeps the others waiting?

A collective that one rank never calls hangs all the others, and minutes later all that they have to
say is "timed out". The one to ask is the rank that did not come.

    with watch(60):                  # seconds; on every rank
        train()

prints, once a rank has waited that long in one collective, from one of the ranks:

    minipar: stalled
    rank 2 of 4 (dp=1, tp=0) has not reached all_reduce #118 on dp (4.0 MB on the wire), in which
    rank 0 of 4 (dp=0, tp=0) has waited for 61 s.
    rank 2 of 4 (dp=1, tp=0): its last was all_gather #40 on tp (1.0 MB on the wire), begun 62 s
    ago. It is here: ... (its Python stack)

How. Every rank keeps a page of memory that the ranks of its machine share. A tap on calls writes to
it, per axis, the number and name of the call that it begins, and of the one that it waits in: about
a microsecond, and no message. A thread per rank looks at its own page now and then. One that sees a
wait over the bound puts an alarm into the store through which the ranks met; the threads of the
others answer with what their pages say and with their stacks. A rank that cannot answer, because it
was stopped or has ended, is read from its page where the machine is the same. `stalls` makes the
report of it.

Limits: on nccl it is the GPU that waits in a collective, not the process; there a hang is seen only
in what the process itself waits for. In torch: the flight recorder of ProcessGroupNCCL, and
`torch.distributed.monitored_barrier` of gloo.
"""

import json
import mmap
import os
import platform
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from minipar.comm import calls
from minipar.comm.mesh import Axis, Mesh
from minipar.observe.stalls import Call, State, explain


# ---------------------------------------------------------------------- shared memory
class _Page:
    """The memory in which one rank writes what it calls, for others of its machine to read.

    A header (process id, label), then a slot per axis: its name and ranks, the call begun last, and
    the call waited in. There is no lock: the table is read when nothing moves any more.
    """

    # number, bytes, time, peers: how many, who; verb; subject
    CALL = struct.Struct("<qqdq4q24s96s")
    TEXT = struct.Struct("<H")  # its length, then the text
    HEADER, SLOT, SLOTS, BEGUN, AWAITED = 512, 4096, 255, 3584, 3840

    NUM_BYTES = HEADER + SLOT * SLOTS

    def __init__(self, path: str | None) -> None:
        """In the file `path`; without one, memory of this process alone.

        Raises `ValueError` for a file that is too short.
        """
        if path is None:
            self.memory = mmap.mmap(-1, self.NUM_BYTES)
            return
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), self.NUM_BYTES)

    def write_header(self) -> None:
        """Say who this is."""
        self.write_text(0, f"{os.getpid()} {Mesh.label}"[:250])

    def write_text(self, at: int, text: str) -> None:
        data = text.encode()
        data = self.TEXT.pack(len(data)) + data
        self.memory[at : at + len(data)] = data

    def read_text(self, at: int) -> str:
        (length,) = self.TEXT.unpack_from(self.memory, at)
        start = at + self.TEXT.size
        return self.memory[start : start + length].decode(errors="replace")

    def slot(self, index: int) -> int:
        return self.HEADER + self.SLOT * index

    def state(self, rank: int, where: str = "") -> State:
        """What is written here, and how its process looks from outside."""
        pid, _, label = self.read_text(0).partition(" ")
        begun, awaited = self.calls()
        return State(rank, label + where, begun, awaited, silence=_condition(int(pid)))

    def calls(self) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """The last call on each axis, and those that this rank waits in."""
        begun, awaited = [], []
        for index in range(self.SLOTS):
            at = self.slot(index)
            axis, *ranks = self.read_text(at).split(",")
            if not axis:
                break
            for found, where in ((begun, self.BEGUN), (awaited, self.AWAITED)):
                found += self._read_call(at + where, axis, tuple(map(int, ranks)))
        return tuple(begun), tuple(awaited)

    def _read_call(self, at: int, axis: str, ranks: tuple[int, ...]) -> list[Call]:
        number, num_bytes, begun, num_peers, *rest = self.CALL.unpack_from(self.memory, at)
        if not number:
            return []
        seconds = time.monotonic() - begun
        *peers, verb, subject = rest
        peers = tuple(peers[:num_peers])
        name, subject = (text.rstrip(b"\0").decode(errors="replace") for text in (verb, subject))
        return [Call(name, axis, ranks, number, num_bytes, seconds, peers, subject)]


def _condition(pid: int) -> str:
    """Why the process `pid` of this machine does not answer, seen from outside."""
    status = psutil.STATUS_ZOMBIE
    with suppress(psutil.NoSuchProcess):
        status = psutil.Process(pid).status()
    if status == psutil.STATUS_ZOMBIE:
        return f"its process {pid} has ended"
    if status == psutil.STATUS_STOPPED:
        return f"its process {pid} was stopped by a signal; kill -CONT {pid} lets it go on"
    return f"its process {pid} does not answer ({status})"


@dataclass(slots=True)
class _Slot:
    """Where the calls along one axis are written, and how many there were."""

    begun: int
    awaited: int
    count: int = 0


@dataclass(slots=True)
class _Ticket:
    """One call that has begun."""

    memory: mmap.mmap
    at: int
    record: bytes

    def wait(self) -> None:
        self.memory[self.at : self.at + len(self.record)] = self.record
        _TIME.pack_into(self.memory, self.at + 16, time.monotonic())  # third field of _Page.CALL

    def end(self) -> None:
        self.memory[self.at : self.at + 8] = _NO_NUMBER


_TIME, _NO_NUMBER, _NO_PEERS = struct.Struct("<d"), bytes(8), (0,) * 5


def _ends(ranks: list[int]) -> tuple[int, ...]:
    """How many ranks, and who, as a page holds them: four at most."""
    return min(len(ranks), 4), *(*ranks, *_NO_PEERS)[:4]


# ---------------------------------------------------------------------- the watchdog of this rank
class Watchdog(calls.Tap):
    """Keeps the page of this rank and watches it. Made by all ranks together, as by `watch`."""

    def __init__(
        self, seconds: float, tell: Callable[[str], None], dump: Path | None = None
    ) -> None:
        self.seconds, self._tell, self._dump = seconds, tell, dump
        self.pause = min(seconds / 20, 5.0)  # between two looks
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._slots: dict[tuple, _Slot] = {}
        self._lock = threading.Lock()
        self._alarms = 0  # that were raised so far, here or elsewhere
        self._reported: set[tuple] = set()  # calls waited in that were part of an alarm
        self._pages, name = self._meet()
        self._page = self._pages[self.rank]
        # A client of its own: another may be waiting at the store, and holds its lock meanwhile.
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, store).clone()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def _meet(self) -> tuple[dict[int, _Page], str]:
        """Return the pages of all ranks of this machine, and a name for this meeting."""
        handle, mine = tempfile.mkstemp(prefix="minipar-watch-")
        # No hole: who writes into one on a full disk is killed. There, the page is not shared.
        with suppress(OSError), open(handle, "wb") as file:
            file.write(bytes(_Page.NUM_BYTES))
        cards: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(cards, (mine, platform.node(), os.getpid()))
            paths, hosts, pids = zip(*cards, strict=True)
            # One host needs no name; several need one, and several nodes of torchrun are several.
            if len(set(hosts)) > 1 or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
                names = zip(hosts, pids, strict=True)
                self._where = [f" on host {host}, process {pid}" for host, pid in names]
            else:
                self._where = [""] * self.size
            pages = {}
            for rank, path in enumerate(paths):
                # That rank is on another machine, its disk is full, or files are refused.
                with suppress(OSError, ValueError):
                    pages[rank] = _Page(path)
            if self.rank not in pages:
                pages[self.rank] = _Page(None)
            pages[self.rank].write_header()
            dist.barrier()
        finally:
            os.unlink(mine)  # the memory lives on
        return pages, os.path.basename(paths[0])

    # ------------------------------------------------------------------ a tap
    def begin(self, call: calls.Call) -> None:
        """Write down that this rank calls, unless there is no other rank to wait for."""
        axis, peers = call.axis, call.peers
        if axis is None or (peers is not None and not peers):
            return
        key = axis.name, axis.ranks, peers is None  # two meshes may have an axis of one name
        slot = self._slots.get(key) or self._open(key, axis)
        slot.count += 1
        ends = _NO_PEERS if peers is None else _ends([axis.ranks[peer] for peer in peers])
        now = time.monotonic()
        words = call.verb.encode(), _subject.encode()
        record = _Page.CALL.pack(slot.count, call.num_bytes, now, *ends, *words)
        memory = self._page.memory
        memory[slot.begun : slot.begun + len(record)] = record
        call.notes[self] = _Ticket(memory, slot.awaited, record)

    def wait(self, call: calls.Call) -> None:
        if self in call.notes:
            call.notes[self].wait()

    def end(self, call: calls.Call) -> None:
        if self in call.notes:
            call.notes[self].end()

    def _open(self, key: tuple, axis: Axis) -> _Slot:
        with self._lock:  # backward may run in a thread of its own
            # A rank with more axes than there are slots writes over the last.
            at = self._page.slot(min(len(self._slots), _Page.SLOTS - 1))
            self._page.write_header()  # there is a mesh now
            self._page.write_text(at, ",".join(map(str, (axis.name, *axis.ranks[:500]))))
            return self._slots.setdefault(key, _Slot(at + _Page.BEGUN, at + _Page.AWAITED))

    def close(self) -> None:
        """End the watching thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        # The store goes when the process that keeps it ends; then there is no rank left to talk to.
        with suppress(RuntimeError, OSError):
            while not self._stop.wait(self.pause):
                alarm, me = f"alarm {self._alarms}", b"%d" % self.rank
                if self._store.check([alarm]):
                    self._answer()
                # Many wait together: the first to say so speaks for all.
                elif self._waits_too_long() and self._store.compare_set(alarm, "", me) == me:
                    self._answer()
                    self._report(self._alarms - 1)

    def _waits_too_long(self) -> bool:
        _, awaited = self._page.calls()
        return any(c.seconds > self.seconds and c.key not in self._reported for c in awaited)

    def _answer(self) -> None:
        """Put into the store what this rank does."""
        state = self._state()
        self._reported |= {call.key for call in state.awaited}
        self._store.set(f"answer {self._alarms} {self.rank}", json.dumps(asdict(state)))
        self._alarms += 1

    def _state(self) -> State:
        begun, awaited = self._page.calls()
        frame = sys._current_frames().get(threading.main_thread().ident)
        stack = "".join(traceback.format_stack(frame)[-STACK_FRAMES:]).rstrip()
        return State(self.rank, Mesh.label + self._where[self.rank], begun, awaited, stack)

    def _report(self, alarm: int) -> None:
        """Collect the answers; of ranks that do not answer soon, what their pages say; and tell."""
        limit = time.monotonic() + 3 * self.pause + 1
        keys = {rank: f"answer {alarm} {rank}" for rank in range(self.size)}
        states: dict[int, State] = {}
        while keys and time.monotonic() < limit and not self._stop.is_set():
            for rank, key in list(keys.items()):
                if self._store.check([key]):
                    # Not a pickle: any process that reaches the store can write there.
                    with suppress(ValueError, TypeError, KeyError):
                        states[rank] = State.from_json(self._store.get(key))
                        del keys[rank]
            if keys:
                time.sleep(min(0.1, self.pause))
        for rank in keys:
            if rank in self._pages:
                states[rank] = self._pages[rank].state(rank, self._where[rank])
            else:  # on another host, which is down, cut off, or stopped
                label = f"rank {rank} of {self.size}{self._where[rank]}"
                states[rank] = State(rank, label, silence=_SILENT, is_known=False)
        if not self._stop.is_set():  # else the wait has ended meanwhile
            ordered = [states[rank] for rank in sorted(states)]
            if self._dump is not None:
                with suppress(OSError):  # a full disk does not keep the report back
                    content = json.dumps({"minipar_stall": [asdict(state) for state in ordered]})
                    self._dump.write_text(content, encoding="utf-8")
            self._tell(explain(ordered))


_SILENT = "it does not answer: was it stopped, has it ended, is its host down or cut off?"
STACK_FRAMES = 12
"""Innermost frames of a rank that are shown."""


_subject = ""  # of the calls that this rank begins now


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Calls in the body are about `subject`, such as "weights of layers.0", in a report."""
    global _subject
    before, _subject = _subject, subject
    try:
        yield
    finally:
        _subject = before


def _print(report: str) -> None:
    print(report, file=sys.stderr, flush=True)


@contextmanager
def watch(
    seconds: float, tell: Callable[[str], None] = _print, dump: Path | None = None
) -> Iterator[None]:
    """Report ranks that wait longer than `seconds` in one collective called in the body.

    A collective itself: all ranks enter it. `tell` is called with the report, by one of them, from
    another thread, and once per wait; nothing is stopped. It also writes what all ranks did into
    `dump`, for `minipar hang`. With 0 seconds, or alone, it does nothing. Raises `ValueError` for
    less than 0.
    """
    if seconds < 0:
        raise ValueError(f"watch({seconds:g}): the seconds must be above 0, or 0 for no watchdog")
    if seconds == 0 or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watchdog = Watchdog(seconds, tell, dump)
    calls.taps.append(watchdog)
    try:
        yield
    finally:
        calls.taps.remove(watchdog)
        watchdog.close()
