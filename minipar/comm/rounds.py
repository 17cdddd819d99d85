"""Rounds: a plan of sends and receives is carried out, while other calls go on beside it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.comm import collectives as comm
from minipar.comm.background import Background
from minipar.comm.calls import Pending
from minipar.comm.collectives import Op
from minipar.comm.mesh import Axis
from minipar.comm.plans import Message, Plan, Round

IN_FLIGHT = 4
"""Rounds posted before the first of them has ended: more would cost scratch and hide no more."""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


# ---------------------------------------------------------------------- running a plan
@torch.no_grad()
def execute(
    plan: Plan, data: Tensor, axis: Axis, op: Op = "sum", source: Tensor | None = None
) -> None:
    """Carry out this rank's `plan` on the flat buffer `data`; sends read from `source` if given."""
    in_flight: deque[_Posted] = deque()
    scratch: dict[int, list[Tensor]] = {}  # buffers to use again, by size
    for step in plan:
        if not step.sends and not step.recvs:
            continue
        while in_flight and (
            len(in_flight) == IN_FLIGHT
            or any(_conflict(posted.step, step, source is None) for posted in in_flight)
        ):
            in_flight.popleft().finish(data, op, scratch)
        in_flight.append(_Posted(step, data, data if source is None else source, axis, scratch))
    while in_flight:
        in_flight.popleft().finish(data, op, scratch)


class _Posted:
    """A round that is on its way."""

    def __init__(
        self, step: Round, data: Tensor, source: Tensor, axis: Axis, scratch: dict[int, list]
    ) -> None:
        self.step = step
        self.staged: list[tuple[Message, Tensor]] = []  # what has to be added or moved in the end
        sends = [(source[m.lo : m.hi], m.peer) for m in step.sends if m.peer != axis.rank]
        recvs = []
        for message in step.recvs:
            buffer = data[message.lo : message.hi]
            if message.add or (source is data and _overlap([message], step.sends)):
                free = scratch.setdefault(buffer.numel(), [])
                buffer = free.pop() if free else torch.empty_like(buffer)
                self.staged.append((message, buffer))
            if message.peer == axis.rank:
                buffer.copy_(source[message.lo : message.hi])
            else:
                recvs.append((buffer, message.peer))
        self._pending = comm.exchange(sends, recvs, axis, async_op=True)

    def finish(self, data: Tensor, op: Op, scratch: dict[int, list[Tensor]]) -> None:
        """Wait, and add what came to what is there."""
        self._pending.wait()
        for message, buffer in self.staged:
            target = data[message.lo : message.hi]
            if message.add:
                _COMBINE[op](target, buffer, out=target)
            else:
                target.copy_(buffer)
            scratch[buffer.numel()].append(buffer)


def _overlap(some: Sequence[Message], others: Sequence[Message]) -> bool:
    return any(a.lo < b.hi and b.lo < a.hi for a in some for b in others)


def _conflict(earlier: Round, later: Round, in_place: bool) -> bool:
    """True if `later` must wait: it sends or overwrites received rows, or overwrites sent rows."""
    if not in_place:
        return _overlap(earlier.recvs, later.recvs)
    return (
        _overlap(earlier.recvs, later.sends)
        or _overlap(earlier.recvs, later.recvs)
        or _overlap(earlier.sends, later.recvs)
    )


# ---------------------------------------------------------------------- calls at the same time
_latest: dict[str, Background] = {}
"""Per process group: the latest call that runs, or ran, in a thread."""


_thread = threading.local()  # `is_call`: this thread is that of a call


def start(
    function: Callable[[], Tensor], axes: Sequence[Axis], async_op: bool, data: Tensor
) -> Any:
    """Call now, after what still runs along the axes; or return a `Pending` at once.

    Then the call has a thread of its own, which posts a round whenever the last one ends. It first
    waits for the call before it along the same group: messages have no names, so the n-th that one
    rank sends must be the n-th that the other expects. `data` is its own, to work on.
    """
    groups = [axis.group.group_name for axis in axes if axis.group is not None]
    before = [_latest[name] for name in groups if name in _latest]
    if not async_op:
        if not hasattr(_thread, "is_call"):  # a step of a call must not wait for the call's end
            for other in before:
                other.join()
        return function()
    results: list[Tensor] = []

    def work() -> None:
        _thread.is_call = True
        results.append(function())

    def result(_: Any) -> Tensor:
        if results[0].is_cuda:
            results[0].record_stream(torch.cuda.current_stream(results[0].device))
        return results[0]

    call = Background(work, before, data.device, "+".join(groups))
    if data.is_cuda:  # its memory is that of the stream in which it was made, and soon let go of
        data.record_stream(call.lane)
    _latest.update(dict.fromkeys(groups, call))
    return Pending(call, None, result)
