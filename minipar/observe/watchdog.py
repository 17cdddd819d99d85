"""The watchdog: when a collective hangs, it says which ranks wait and which rank is missing.

If one rank never calls a collective, all others hang in it. Minutes later they say "timed out", and
nothing about the rank that did not come. The watchdog asks that rank:

    with watch(60):                  # seconds; on every rank
        train()

prints, on one of the ranks, once a rank has waited for 60 s in one collective:

    minipar: stalled
    rank 2 of 4 (dp=1, tp=0) has not reached all_reduce #118 on dp (4.0 MB on the wire), in which
    rank 0 of 4 (dp=0, tp=0) has waited for 61 s.
    rank 2 of 4 (dp=1, tp=0): its last was all_gather #40 on tp (1.0 MB on the wire), begun 62 s
    ago. It is here: ... (its Python stack)

How:    A tap on calls notes this rank's last call on each axis, and the calls that it waits in: a
        microsecond, and no message. A thread per rank looks at the notes now and then. A thread
        that sees a wait over the bound puts an alarm into the store through which the ranks met.
        The threads of all ranks answer through the store with their notes and stacks.
        `stalls.explain` makes the report of the answers. A rank without an answer was stopped, has
        ended, or is cut off.
Limits: On NCCL the GPU waits in a collective, not the process. There the watchdog sees a hang only
        in what the process itself waits for.
In torch: the flight recorder of ProcessGroupNCCL, and gloo's `monitored_barrier`.
"""

import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minipar.comm import calls
from minipar.comm.mesh import Mesh
from minipar.observe.stalls import Call, State, explain


class Watchdog(calls.Tap):
    """Notes this rank's calls and watches its waits. All ranks make one together, by `watch`."""

    def __init__(
        self, seconds: float, tell: Callable[[str], None], dump: Path | None = None
    ) -> None:
        self.seconds, self._tell, self._dump = seconds, tell, dump
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

    # ------------------------------------------------------------------ a tap
    def begin(self, call: calls.Call) -> None:
        """Note the call, unless no other rank takes part in it."""
        axis, peers = call.axis, call.peers
        if axis is None or (peers is not None and not peers):
            return
        key = axis.name, axis.ranks, peers is None  # two meshes may have an axis of one name
        last = self._begun.get(key)
        call.notes[self] = self._begun[key] = Call(
            verb=call.verb,
            axis=axis.name,
            ranks=axis.ranks,
            number=1 if last is None else last.number + 1,
            num_bytes=call.num_bytes,
            seconds=time.monotonic(),
            peers=tuple(axis.ranks[peer] for peer in peers or ()),
        )

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
        state = self._state()
        self._reported |= {call.key for call in state.awaited}
        self._store.set(f"answer {self._alarms} {self.rank}", json.dumps(asdict(state)))
        self._alarms += 1

    def _state(self) -> State:
        begun, awaited = _until_now(self._begun), _until_now(self._awaited)
        frame = sys._current_frames().get(threading.main_thread().ident)
        stack = "".join(traceback.format_stack(frame)[-STACK_FRAMES:]).rstrip()
        return State(self.rank, Mesh.label + self._where(self.rank), begun, awaited, stack)

    def _where(self, rank: int) -> str:
        """Return the host and the process of `rank`; nothing where one host has all the ranks."""
        host, pid, _ = self._places[rank]
        # Several nodes of torchrun are several hosts, even where all have one name.
        several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        several = several or len({host for host, *_ in self._places}) > 1
        return f" on host {host}, process {pid}" if several else ""

    def _silent(self, rank: int) -> State:
        """Return the state of a rank that does not answer."""
        pid = self._places[rank][1]
        silence = f"its process {pid} does not answer: it was stopped, has ended, or is cut off"
        label = f"rank {rank} of {self.size}{self._where(rank)}"
        return State(rank, label, silence=silence, is_known=False)

    def _report(self, alarm: int) -> None:
        """Collect the answers of all ranks that answer soon, and tell their report."""
        limit = time.monotonic() + 3 * self.pause + 1
        keys = {rank: f"answer {alarm} {rank}" for rank in range(self.size)}
        states: dict[int, State] = {}
        while keys and time.monotonic() < limit and not self._stop.is_set():
            for rank, key in list(keys.items()):
                if self._store.check([key]):
                    # JSON and no pickle: any process that reaches the store can write there.
                    with suppress(ValueError, TypeError, KeyError):
                        states[rank] = State.from_json(self._store.get(key))
                        del keys[rank]
            if keys:
                time.sleep(min(0.1, self.pause))
        states |= {rank: self._silent(rank) for rank in keys}
        if not self._stop.is_set():  # else the wait has ended meanwhile
            ordered = [states[rank] for rank in sorted(states)]
            if self._dump is not None:
                with suppress(OSError):  # a full disk does not keep the report back
                    content = json.dumps({"minipar_stall": [asdict(state) for state in ordered]})
                    self._dump.write_text(content, encoding="utf-8")
            self._tell(explain(ordered))


def _until_now(noted: dict[Any, Call]) -> tuple[Call, ...]:
    """Return the calls with the seconds that have passed since their noted times."""
    now = time.monotonic()
    return tuple(replace(call, seconds=now - call.seconds) for call in list(noted.values()))


STACK_FRAMES = 12
"""Innermost frames of a rank that are shown."""


def _print(report: str) -> None:
    print(report, file=sys.stderr, flush=True)


@contextmanager
def watch(
    seconds: float, tell: Callable[[str], None] = _print, dump: Path | None = None
) -> Iterator[None]:
    """Report ranks that wait longer than `seconds` in one collective called in the body.

    All ranks enter `watch` together. One of them calls `tell` with the report, from another thread,
    once per wait; nothing is stopped. It also writes the states of all ranks into `dump`, for
    `minipar hang`. With 0 seconds, or on one rank, `watch` does nothing. Raises `ValueError` below
    0 seconds.
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
