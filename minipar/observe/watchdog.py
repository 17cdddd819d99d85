"""The watchdog: when a collective hangs, it says which ranks wait and which rank is missing.

If one rank never calls a collective, all others hang in it. Minutes later they say "timed out", and
nothing about the rank that did not come. The watchdog asks that rank:

    with watch(60):                  # seconds; on every rank
        train()

prints, on one of the ranks, once a rank has waited for 60 s in one collective:

    minipar: stalled
    rank 2 of 4 (dp=1, tp=0) has not reached all_reduce #118 on dp (4.0 MB on the wire), in which
    rank 0 of 4 (dp=0, tp=0) has waited for 61.0 s.
    rank 2 of 4 (dp=1, tp=0): its last was all_gather #40 on tp (1.0 MB on the wire), begun 62.0 s
    ago. It is here: ... (its Python stack)

How:    A tap on calls notes this rank's last call on each axis, and the calls that it waits in: a
        microsecond, and no message. A thread per rank looks at the notes now and then. A wait over
        the bound puts an alarm into the store through which the ranks met. The threads of all ranks
        answer there with their notes and stacks. `explain` makes the report of the answers.
Limits: On NCCL the GPU waits in a collective, not the process: only waits of the process are seen.
In torch: the flight recorder of ProcessGroupNCCL, and gloo's `monitored_barrier`.
"""

import os
import pickle
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from minipar.comm import calls
from minipar.comm.mesh import Mesh


# ---------------------------------------------------------------------- the report, pure
@dataclass(frozen=True)
class Call:
    """A collective or a message, as one rank has called it."""

    verb: str
    axis: str
    ranks: Sequence[int]  # of the axis, as numbers in the world
    number: int  # the first collective of this rank on this axis is 1; messages count apart
    num_bytes: int  # on the wire
    seconds: float  # since it began, or since this rank waits in it
    peers: Sequence[int] = ()  # of a message: the ranks at the other end

    @property
    def key(self) -> tuple:
        """Return the key that one collective has on all of its ranks."""
        return self.axis, tuple(self.ranks), bool(self.peers), self.number, self.verb

    def __str__(self) -> str:
        what = f" with {names(self.peers)}" if self.peers else ""
        number = "" if self.peers else f" #{self.number}"
        size = f" ({_size(self.num_bytes)} on the wire)" if self.num_bytes else ""
        return f"{self.verb}{number} on {self.axis}{what}{size}"


@dataclass(frozen=True)
class State:
    """The state of one rank: its last call on each axis, and the calls that it waits in."""

    rank: int
    label: str  # "rank 2 of 4 (dp=1, tp=0)"
    begun: Sequence[Call] = ()
    awaited: Sequence[Call] = ()
    stack: str = ""  # of its main thread
    silence: str = ""  # why it does not answer: nothing is known about its calls

    def has_reached(self, call: Call) -> bool:
        """True if this rank has begun the collective `call`, or a later one on the same axis."""
        latest = next((c for c in self.begun if c.key[:3] == call.key[:3]), None)
        return latest is not None and (latest.number > call.number or latest.key == call.key)


def explain(states: Sequence[State]) -> str:
    """Return the report: who waits in which call, for whom, and what the missing ranks do instead.

    `states` has one of each rank, in order.
    """
    lines: list[str] = []
    causes: list[State] = []
    awaited = [(state, call) for state in states for call in state.awaited]
    for key in dict.fromkeys(call.key for _, call in awaited if not call.peers):
        waiting = [state for state, call in awaited if call.key == key]
        call = max((c for _, c in awaited if c.key == key), key=lambda call: call.seconds)
        wait = f"{_have(waiting)} waited for {call.seconds:.1f} s"
        of_axis = [states[rank] for rank in call.ranks]
        unknown = [s for s in of_axis if s.silence]
        missing = [s for s in of_axis if not s.silence and not s.has_reached(call)]
        if missing:
            lines.append(f"{_have(missing)} not reached {call}, in which {wait}.")
        elif unknown:
            lines.append(f"{wait} in {call}. Whether {_have(unknown)} reached it is unknown.")
        else:
            lines.append(f"{wait} in {call}, which all have reached, and which does not end.")
        causes += missing + unknown
    for state, call in awaited:
        if call.peers:
            lines.append(f"{state.label} has waited for {call.seconds:.1f} s in {call}.")
            causes += [states[peer] for peer in call.peers]
    # Rank 0 waits for 1, which waits for 2: only the stack of 2 helps. In a circle, show all.
    shown = [s for s in causes if not s.awaited] or [s for s in states if s.awaited]
    lines += [_doing(states[rank]) for rank in dict.fromkeys(s.rank for s in shown)]
    return "\n".join(["minipar: stalled", *lines])


def _doing(state: State) -> str:
    """Return what a rank does, with its stack."""
    if state.silence:
        return f"{state.label}: nothing is heard of it; {state.silence}."
    last = min(state.begun, key=lambda call: call.seconds, default=None)
    ago = f"its last was {last}, begun {last.seconds:.1f} s ago" if last else "it has called none"
    return f"{state.label}: {ago}. It is here:\n{state.stack}"


def names(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2": at most eight of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")


def _have(states: Sequence[State]) -> str:
    """Return "rank 2 of 4 (dp=1, tp=0) has", or "ranks 0, 1, 3 have"."""
    if len(states) == 1:
        return f"{states[0].label} has"
    return f"{names([state.rank for state in states])} have"


def _size(num_bytes: int) -> str:
    """Return "4.0 MB", "12 kB" or "40 bytes"."""
    if num_bytes < 1e3:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


# ---------------------------------------------------------------------- watching
class Watchdog(calls.Tap):
    """Notes this rank's calls and watches its waits. All ranks make one together, by `watch`."""

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self.seconds, self._tell = seconds, tell
        self.pause = min(seconds / 20, 5.0)  # between two looks
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # In these two, `seconds` is the time at which a call, or the wait for it, began.
        self._begun: dict[tuple, Call] = {}  # the last call by axis, messages apart
        self._awaited: dict[calls.Call, Call] = {}
        self._alarms = 0  # so far, of any rank
        self._reported: set[tuple] = set()  # keys of calls that were part of an alarm
        self._places: list[Any] = [None] * self.size
        place = platform.node(), os.getpid(), time.monotonic_ns()
        dist.all_gather_object(self._places, place)
        # A client of its own: another may be waiting at the store, and holds its lock meanwhile.
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"watch {self._places[0]}", store).clone()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, call: calls.Call) -> None:
        """Note the call, unless no other rank takes part in it."""
        axis, peers = call.axis, call.peers
        if axis is None or (peers is not None and not peers):
            return
        key = axis.name, axis.ranks, peers is None  # two meshes may have an axis of one name
        number = self._begun[key].number + 1 if key in self._begun else 1
        to = tuple(axis.ranks[peer] for peer in peers or ())
        begun = Call(call.verb, axis.name, axis.ranks, number, call.num_bytes, time.monotonic(), to)
        call.notes[self] = self._begun[key] = begun

    def wait(self, call: calls.Call) -> None:
        """Note that this rank waits."""
        if self in call.notes:
            self._awaited[call] = replace(call.notes[self], seconds=time.monotonic())

    def end(self, call: calls.Call) -> None:
        """Note that the wait is over."""
        self._awaited.pop(call, None)

    def close(self) -> None:
        """End the watching thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        # The store ends with the process that keeps it. Then there is no rank left to talk to.
        with suppress(RuntimeError, OSError):
            while not self._stop.wait(self.pause):
                alarm, me = f"alarm {self._alarms}", b"%d" % self.rank
                if self._store.check([alarm]):
                    self._answer()
                # Many ranks wait together: the first one to raise the alarm reports.
                elif self._waits_too_long() and self._store.compare_set(alarm, "", me) == me:
                    self._answer()
                    self._report(self._alarms - 1)

    def _waits_too_long(self) -> bool:
        awaited = _until_now(self._awaited)
        return any(c.seconds > self.seconds and c.key not in self._reported for c in awaited)

    def _answer(self) -> None:
        """Put the state of this rank into the store."""
        begun, awaited = _until_now(self._begun), _until_now(self._awaited)
        frame = sys._current_frames().get(threading.main_thread().ident)
        stack = "".join(traceback.format_stack(frame)[-12:]).rstrip()
        state = State(self.rank, Mesh.label + self._where(self.rank), begun, awaited, stack)
        self._reported |= {call.key for call in awaited}
        self._store.set(f"answer {self._alarms} {self.rank}", pickle.dumps(state))
        self._alarms += 1

    def _where(self, rank: int) -> str:
        """Return the host of `rank`; nothing where one host has all the ranks."""
        hosts = [host for host, *_ in self._places]
        return f" on host {hosts[rank]}" if len({*hosts}) > 1 else ""

    def _report(self, alarm: int) -> None:
        """Collect the answers of all ranks that answer soon, and tell their report."""
        keys = [f"answer {alarm} {rank}" for rank in range(self.size)]
        limit = time.monotonic() + 3 * self.pause + 1
        while not self._store.check(keys) and time.monotonic() < limit:
            if self._stop.wait(min(0.1, self.pause)):
                return  # the wait has ended meanwhile
        states = []
        for rank, key in enumerate(keys):
            if self._store.check([key]):
                states.append(pickle.loads(self._store.get(key)))
            else:
                why = "does not answer: it was stopped, has ended, or is cut off"
                silence = f"its process {self._places[rank][1]} {why}"
                label = f"rank {rank} of {self.size}{self._where(rank)}"
                states.append(State(rank, label, silence=silence))
        self._tell(explain(states))


def _until_now(noted: dict[Any, Call]) -> tuple[Call, ...]:
    """Return the calls with the seconds that have passed since their noted times."""
    now = time.monotonic()
    return tuple(replace(call, seconds=now - call.seconds) for call in list(noted.values()))


def _print(report: str) -> None:
    print(report, file=sys.stderr, flush=True)


@contextmanager
def watch(seconds: float, tell: Callable[[str], None] = _print) -> Iterator[None]:
    """Report ranks that wait longer than `seconds` in one collective called in the body.

    All ranks enter `watch` together. One of them calls `tell` with the report, from another thread,
    once per wait; nothing is stopped. With 0 seconds, or on one rank, `watch` does nothing.
    """
    if seconds == 0 or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watchdog = Watchdog(seconds, tell)
    calls.taps.append(watchdog)
    try:
        yield
    finally:
        calls.taps.remove(watchdog)
        watchdog.close()
