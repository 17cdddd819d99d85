"""A call in flight: started, entered in the ledger, told to observers, and waited for."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist

from minipar.comm.mesh import Axis
from minipar.emulate import device
from minipar.observe import timeline, watchdog
from minipar.observe.recorder import Recorder


class Observer(Protocol):
    """Told of every call that is sent, by number, and when this rank first waits for it."""

    def launched(
        self, number: int, verb: str, axis: Axis, num_bytes: int, peers: Sequence[int], result: Any
    ) -> None:
        """`num_bytes` leave this rank; of messages, `peers` are at the other end."""

    def waited(self, number: int) -> None:
        """From here on, this rank waits for that call."""


observers: list[Observer] = []
"""Those to be told: a simulator, which knows no clock but the order of calls."""
_numbers = itertools.count()
_beside: list[int] | None = None  # numbers of the calls for which work beside this rank's waits


@contextmanager
def beside() -> Iterator[list[int]]:
    """Calls that the body waits for hold up another thread of this rank: observers are not told.

    Yields the numbers of these calls, for `waited`.
    """
    global _beside
    before, _beside = _beside, []
    try:
        yield _beside
    finally:
        _beside = before


def waited(numbers: Sequence[int]) -> None:
    """Tell observers that this rank needs the results of these calls."""
    for number in numbers:
        for observer in observers:
            observer.waited(number)


class Pending:
    """A collective in flight. `wait` blocks until it is done and returns its result."""

    def __init__(
        self,
        work: Any,
        result: Any,
        finish: Callable[[Any], Any] | None = None,
        waiting: AbstractContextManager | None = None,
        number: int | None = None,
    ) -> None:
        self._work, self._result, self._finish, self._number = work, result, finish, number
        self._waiting = waiting or nullcontext()  # entered while this rank waits

    def wait(self) -> Any:
        """Return the result; a second call returns the same again."""
        if self._number is not None:  # the fake backend has no works
            if _beside is None:
                waited([self._number])
            else:
                _beside.append(self._number)
            self._number = None
        if self._work is not None:
            with self._waiting, timeline.blocked():
                self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


def launch(
    verb: str,
    axis: Axis,
    sent: int,
    call: Callable[[bool], Any],
    result: Any,
    async_op: bool,
    finish: Callable[[Any], Any] | None = None,
    peers: Sequence[int] | None = None,
) -> Any:
    """Start `call(async_op)`, enter it in the ledger, and return its result or a `Pending`.

    Of messages, `peers` are the ranks at the other end.
    """
    recorder, waiting, number = timeline.active(), None, None
    sent = device.counted(sent)
    if axis.size == 1:
        work = None
    else:
        waiting, number = watchdog.begin(verb, axis, sent, peers), next(_numbers)
        for observer in observers:
            observer.launched(number, verb, axis, sent, peers or (), result)
        start = time.monotonic()
        with waiting:  # a call that is not asynchronous returns when it is done
            work = call(async_op or recorder is not None)
        if recorder is not None and work is not None:
            if "nccl" in dist.get_backend(axis.group):
                # To wait here would stop the GPU; when its kernels ran, the profiler tells.
                recorder.comm(verb, axis.name, sent, start, time.monotonic())
            else:
                work = _Noted(work, recorder, verb, axis.name, sent, start)
    pending = Pending(work, result, finish, waiting, number)
    return pending if async_op else pending.wait()


class _Noted:
    """A work whose end is noted when it ends, not when it is waited for."""

    def __init__(self, work: Any, recorder: Recorder, *words: Any) -> None:
        self._work, self._start, self._recorder = work, words[-1], recorder
        self._note = recorder.travel(*words)
        recorder.unwaited.add(self)
        self._noted = threading.Event()
        self._error: BaseException | None = None
        self._thread = None
        try:
            # Where the backend tells through a future when an operation is over ...
            ended = getattr(work, "ended", None) or work.get_future()
            ended.add_done_callback(lambda _: self._over())
        except (AttributeError, RuntimeError):
            # ... else (gloo's reduce-scatter, send and recv) it tells only those who wait.
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _over(self) -> None:
        # A backend with a clock of its own (the emulated link) knows when the wire was busy.
        start, end = getattr(self._work, "times", None) or (self._start, time.monotonic())
        self._note(start, end)
        self._noted.set()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._over()

    def land(self, patience: float) -> None:
        """Wait, but no longer than that; who called still has to wait."""
        if self._noted.wait(patience) and self._thread is None:
            self._work.wait()  # gloo tells of the end before it has come to it

    def wait(self) -> None:
        if self._thread is None:
            self._work.wait()
        self._noted.wait()  # so that the ledger is complete when `wait` returns
        self._recorder.unwaited.discard(self)
        if self._error is not None:
            raise self._error
