"""Copies between a device and its host: asynchronous, recorded, and emulated where there is no GPU.

Idea.   The memory of the host is larger and cheaper than that of a GPU, and PCIe lies between. A
        copy engine carries one tensor at a time in each direction while the GPU computes.
Cost.   latency + num_bytes / bandwidth seconds a copy (alpha-beta); both directions work at once.
CUDA.   A stream per direction, and pinned memory, without which a copy is not asynchronous.
CPU.    A thread per direction copies and then *sleeps* until PCIe would have been done, as
        `link.py` does for networks: so overlap is real, and the processor is free to compute. Host
        and device are then two accounts of the same memory, see `memory.on_host`.

Each copy appends a span of kind "comm" along the axis "host" to the timeline (on CUDA the profiler
does, of kind "copy"). Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), section 4.
In torch: `Tensor.to(device, non_blocking=True)` on a `torch.cuda.Stream`.
"""

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.emulate import link
from minipar.observe import memory, timeline

AXIS = "host"
Pair = tuple[Tensor, Tensor]  # source and destination, of equal shape and dtype


class Copy:
    """A copy in flight; `wait` returns the tensors that it filled."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.num_bytes = sum(source.nbytes for source, _ in pairs)
        self._pairs = pairs  # keeps the sources alive until they are read
        self.tensors = [destination for _, destination in pairs]  # filled when it has landed
        self._error: BaseException | None = None
        self._done: Any = threading.Event()  # or that of a stream

    def wait(self, *, block: bool = False) -> list[Tensor]:
        """Return when the copy has landed.

        Where a GPU receives it, only its stream waits, unless `block` asks for this thread as well.
        """
        if isinstance(self._done, threading.Event):
            if not self._done.is_set():
                with timeline.blocked():
                    self._done.wait()
        elif not block and any(tensor.is_cuda for tensor in self.tensors):
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self._done)
        else:
            self._done.synchronize()
        if self._error is not None:
            raise self._error
        return self.tensors


class HostCopy:
    """The copy engine of one rank: `to_host` and `to_device`, each a lane of its own.

    `pcie` is the emulated link where the device is a CPU (a `Link`, or its name as in `link.parse`:
    "pcie5*1000" is PCIe 5 slowed 1000 times, to sit beside a slow processor); a GPU has a real one.
    """

    def __init__(self, device: torch.device | str = "cpu", pcie: link.Link | str = "pcie5") -> None:
        self.device = torch.device(device)
        self.pcie = link.parse(pcie) if isinstance(pcie, str) else pcie
        if self.device.type == "cuda":
            self._down, self._up = (_Stream(torch.cuda.Stream(self.device)) for _ in range(2))
        else:
            self._down, self._up = (_Thread(self.pcie, name) for name in ("to_host", "to_device"))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Memory of the host in the shape of `tensor`; pinned where there is a GPU."""
        with memory.on_host():
            return torch.empty(
                tensor.shape,
                dtype=tensor.dtype,
                device="meta" if tensor.is_meta else "cpu",  # no values to land on a host
                pin_memory=self.device.type == "cuda",
            )

    def to_host(self, tensors: Iterable[Tensor]) -> Copy:
        """Start to copy `tensors` of the device into new memory of the host.

        The caller may drop them, but must not change them before the copy is done.
        """
        tensors = [tensor.detach() for tensor in tensors]
        return self._down.start([(tensor, self.empty_like(tensor)) for tensor in tensors])

    def to_device(self, pairs: Iterable[Pair]) -> Copy:
        """Start to copy host tensors into those of the device: ``[(source, destination), ...]``.

        Raises `ValueError` for a pair of different shapes or dtypes: PCIe carries plain bytes.
        """
        pairs = [(source.detach(), destination.detach()) for source, destination in pairs]
        for source, destination in pairs:
            if source.shape != destination.shape or source.dtype != destination.dtype:
                raise ValueError(
                    f"to_device: {tuple(source.shape)} of {source.dtype} cannot land in "
                    f"{tuple(destination.shape)} of {destination.dtype}; they must be alike"
                )
        return self._up.start(pairs)


class _Thread:
    """One direction on the CPU: copies in the order of their start, as fast as `pcie` allows."""

    def __init__(self, pcie: link.Link, name: str) -> None:
        self._pcie, self._name = pcie, name
        self._queue: queue.SimpleQueue | None = None

    def start(self, pairs: Sequence[Pair]) -> Copy:
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            what = self._queue, self._pcie, self._name
            threading.Thread(target=_carry, args=what, name=self._name, daemon=True).start()
        copy = Copy(pairs)
        self._queue.put((copy, timeline.active(), time.monotonic()))
        return copy

    def __del__(self) -> None:
        if self._queue is not None:
            self._queue.put(None)


def _carry(calls: queue.SimpleQueue, pcie: link.Link, name: str) -> None:
    """What the thread of a lane does, until no copy can be started any more."""
    free = 0.0  # when the lane is, by PCIe's clock: so that oversleeping does not add up
    while (call := calls.get()) is not None:
        copy, recorder, called = call
        start = max(called, free)
        try:
            for source, destination in copy._pairs:
                destination.copy_(source)
        except BaseException as error:
            copy._error = error
        free = start + pcie.latency + copy.num_bytes / pcie.bandwidth
        now = time.monotonic()
        time.sleep(max(0.0, free - now))
        free = max(free, now)  # where the processor was slower than PCIe
        if recorder is None or not recorder.on:
            recorder = timeline.active()  # what a step leaves in flight is seen in the next one
        if recorder is not None:
            recorder.comm(name, AXIS, copy.num_bytes, start, time.monotonic())
        copy._pairs = ()
        copy._done.set()
        del copy, call


class _Stream:
    """One direction on CUDA: a stream that waits for what was computed, and not for what comes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def start(self, pairs: Sequence[Pair]) -> Copy:
        copy = Copy(pairs)
        copy._done = _enqueue(pairs, self._stream)
        return copy


def _enqueue(pairs: Sequence[Pair], stream: Any) -> Any:
    """Let a CUDA stream make the copies; return the event of their end."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for source, destination in pairs:
            destination.copy_(source, non_blocking=True)
            for tensor in (source, destination):
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # the allocator must not reuse it yet
    return stream.record_event()
