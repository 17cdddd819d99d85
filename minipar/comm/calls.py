"""Calls: every collective, message and copy of this rank, and the taps that hear of them.

A tap is told when a call begins, when the call is under way, and when this rank's wait for the call
begins and ends. The recorder, the watchdog, the race detector, the emulated device and the
simulator are taps. Each tap adds itself to `taps`; `minipar.comm` imports none of them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from minipar.comm.mesh import Axis

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Call:
    """One collective, message or copy of this rank."""

    verb: str
    axis: Axis | None = None  # None: work of this rank alone, in a thread of its own
    num_bytes: int = 0  # bytes that this rank sends
    peers: Sequence[int] | None = None  # of a message: the ranks of `axis` at the other end
    result: Any = None
    dtype: str = ""  # of the tensors that travel, such as "float32"
    work: Any = None  # torch's handle, once the call is made; a tap may put its own around it
    number: int = field(default_factory=_numbers.__next__)
    start: float = field(default_factory=time.monotonic)
    notes: dict["Tap", Any] = field(default_factory=dict)  # what each tap stores about this call

    def begin(self, start: Callable[[], Any]) -> None:
        """Make the call: `start` returns its work."""
        for tap in taps:
            tap.begin(self)
        self.work = start()
        for tap in taps:
            tap.started(self)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the taps that the body waits for the call."""
        told = list(taps)
        try:
            for tap in told:
                tap.wait(self)
            yield
        finally:
            for tap in told:
                tap.end(self)


class Tap:
    """Base class of taps: a method for each of four moments of a call. Subclasses override some."""

    def begin(self, call: Call) -> None:
        """Hear that this rank is about to make `call`."""

    def started(self, call: Call) -> None:
        """Hear that `call.work` is under way."""

    def wait(self, call: Call) -> None:
        """Hear that this rank begins to wait for `call`."""

    def end(self, call: Call) -> None:
        """Hear that this rank waits no longer: `call` is complete, or has failed."""


taps: list[Tap] = []
"""The taps that are told of each call, in this order."""


def launch(
    verb: str,
    axis: Axis,
    num_bytes: int,
    start: Callable[[bool], Any],
    result: Any,
    async_op: bool,
    finish: Callable[[Any], Any] | None = None,
    peers: Sequence[int] | None = None,
    travelling: Any = None,
) -> Any:
    """Make a call and return its result, or a `Pending`. ``start(is_async)`` returns torch's work.

    `travelling` is a tensor with the dtype that is sent; by default, the result.

    While there are taps, every call is asynchronous, so that taps see call and wait separately.
    Raises `ValueError` unless `peers` are other ranks of the axis: torch would end the process.
    """
    for peer in peers or ():
        if not 0 <= peer < axis.size or (peer == axis.rank and axis.size > 1):
            raise ValueError(f"{verb}: peer={peer} is not another rank of {axis.name}={axis.size}")
    if axis.size == 1:
        pending = Pending(None, result, finish)
    else:
        dtype = getattr(result if travelling is None else travelling, "dtype", "")
        call = Call(verb, axis, num_bytes, peers, result, str(dtype).removeprefix("torch."))
        call.begin(lambda: start(async_op or bool(taps)))
        pending = Pending(call.work, result, finish, call)
    return pending if async_op else pending.wait()


@dataclass(eq=False)
class Pending:
    """A call in flight. `wait` blocks until it is done and returns its result."""

    work: Any
    result: Any
    finish: Callable[[Any], Any] | None = None
    call: Call | None = None

    def wait(self) -> Any:
        """Return the result; a second `wait` returns the same one."""
        call, self.call = self.call, None
        with nullcontext() if call is None else call.waiting():
            if self.work is not None:
                self.work.wait()
                self.work = None
        if self.finish is not None:
            self.result, self.finish = self.finish(self.result), None
        return self.result
