"""The watchdog: when a collective hangs, it says which ranks wait and which rank is missing.

If one rank never calls a collective, all others hang in it. Minutes later they say "timed out", and
nothing about the rank that did not come. The watchdog asks that rank:

    with watch(60):                  # seconds; on every rank
        train()

prints, on one of the ranks, once a rank has waited for 60 s in one collective:

    minipar: stalled for 61.0 s
    look at rank 2 first
    rank 2 did not come to all_reduce #118 on dp.

    rank 2 of 4 (dp=1, tp=0): its last was all_gather #40 on tp; it is here: ... (its Python stack)

How:    A tap on calls notes this rank's last call on each axis, and the calls that this rank waits
        in. A note takes a microsecond and no message. A thread per rank checks the notes. If a wait
        is too long, the thread puts an alarm into torch's store. The threads of all ranks answer
        there with their notes and stacks. `hang.explain` turns the answers into a report.
Limits: On NCCL the GPU waits in a collective, not the process: only waits of the process are seen.
In torch: the flight recorder of ProcessGroupNCCL, and gloo's `monitored_barrier`.
"""

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from traceback import extract_stack

import torch.distributed as dist

from minipar.comm import calls
from minipar.comm.mesh import Mesh
from minipar.observe.hang import Entry, Recording, explain


class Watchdog(calls.Tap):
    """Notes this rank's calls and watches its waits. All ranks make one together, by `watch`."""

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self.seconds, self._tell = seconds, tell
        self.pause = min(seconds / 20, 5.0)  # between two looks
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # By axis, messages apart: which call was the last; an entry for each rank at the other end.
        self._begun: dict[tuple, tuple[int, list[Entry]]] = {}
        self._awaited: dict[calls.Call, float] = {}  # when this rank began to wait for each call
        self._alarms = 0  # the alarms of all ranks so far
        self._reported: set[calls.Call] = set()  # the calls that were part of the last alarm
        name = [time.monotonic_ns()]  # rank 0's time: no other watch has the same name
        dist.broadcast_object_list(name)
        # Use a new client: a thread that waits at the store holds the lock of its client.
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"watch {name[0]}", store).clone()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()

    def begin(self, call: calls.Call) -> None:
        """Note the call, unless no other rank takes part in it."""
        axis, peers = call.axis, call.peers
        if axis is None or (peers is not None and not peers):
            return
        key = axis.name, axis.ranks, peers is None  # two meshes may have an axis of one name
        number = self._begun[key][1][0].number + 1 if key in self._begun else 1
        group = str(key[:2])
        entries = [Entry(call.verb, group, number, None, peer=peer) for peer in peers or [None]]
        call.notes[self] = entries
        self._begun[key] = call.number, entries

    def wait(self, call: calls.Call) -> None:
        """Note that this rank waits."""
        if self in call.notes:
            self._awaited[call] = time.monotonic()

    def end(self, call: calls.Call) -> None:
        """Note that the wait is over."""
        self._awaited.pop(call, None)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        # The store ends with the process that hosts it. Then no rank is left to answer.
        with suppress(RuntimeError, OSError):
            while not self.stop.wait(self.pause):
                alarm, me = f"alarm {self._alarms}", b"%d" % self.rank
                before, awaited = time.monotonic() - self.seconds, [*self._awaited.items()]
                is_late = any(at < before and c not in self._reported for c, at in awaited)
                if self._store.check([alarm]):
                    self._answer()
                # Many ranks wait together: the first one to raise the alarm reports.
                elif is_late and self._store.compare_set(alarm, "", me) == me:
                    self._answer()
                    self._report(self._alarms - 1)

    def _answer(self) -> None:
        """Put the notes of this rank into the store."""
        self._reported = {*self._awaited}
        self._store.set(f"answer {self._alarms} {self.rank}", pickle.dumps(self._recording()))
        self._alarms += 1

    def _recording(self) -> Recording:
        """Return the last call on each axis, the calls that this rank waits in, and where it is."""
        awaited = [call.notes[self] for call in [*self._awaited]]
        begun = [noted for _, noted in sorted(self._begun.values()) if noted not in awaited]
        waits = [replace(entry, done=False) for entry in chain(*awaited)]
        groups = {str(key[:2]): key[:2] for key in [*self._begun]}
        frame = sys._current_frames().get(threading.main_thread().ident)
        stack = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in extract_stack(frame)]
        told = dict(label=Mesh.label, stack=tuple(stack[::-1]))
        return Recording(self.rank, [*chain(*begun), *waits], groups, **told)

    def _report(self, alarm: int) -> None:
        """Collect the answers of all ranks that answer soon, and tell their report."""
        keys = [f"answer {alarm} {rank}" for rank in range(self.size)]
        limit = time.monotonic() + 3 * self.pause + 1
        while not self._store.check(keys) and time.monotonic() < limit:
            if self.stop.wait(min(0.1, self.pause)):
                return  # the watch has ended meanwhile
        answered = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        told = {rank: pickle.loads(self._store.get(keys[rank])) for rank in answered}
        seconds = time.monotonic() - min(self._awaited.values(), default=time.monotonic())
        _, _, page = str(explain(told)).partition("\n")  # without the number of calls
        self._tell(f"minipar: stalled for {seconds:.1f} s\n{page}")


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
        watchdog.stop.set()
        watchdog.thread.join(timeout=5)
