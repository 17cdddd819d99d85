"""Copies between a device and its host: asynchronous, recorded, and emulated where there is no GPU.

Idea.   The memory of the host is larger and cheaper than that of a GPU, and PCIe lies between. A
        copy engine carries one tensor at a time in each direction while the GPU computes.
Cost.   latency + num_bytes / bandwidth seconds a copy (alpha-beta); both directions work at once.
CUDA.   A stream per direction, and pinned memory, without which a copy is not asynchronous.
CPU.    A thread per direction copies and then *sleeps* until PCIe would have been done. So overlap
        is real, and the processor is free to compute. Host and device are two accounts of the same
        memory: `on_host` says which.

Each copy is a span of kind "comm" along the axis "host" in a recorded timeline (on CUDA the
profiler makes it, of kind "copy"). In torch: `Tensor.to(device, non_blocking=True)` on a
`torch.cuda.Stream`.
Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), section 4.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from minipar.comm.calls import Call
from minipar.comm.mesh import Axis

HOST = Axis("host", 0, 1, (0,))
Pair = tuple[Tensor, Tensor]  # source and destination, of equal shape and dtype


class Link(Protocol):
    """PCIe, such as `minipar.emulate.link.parse("pcie5*1000")`."""

    latency: float  # seconds
    bandwidth: float  # bytes per second


_host_depth = 0


@contextmanager
def on_host() -> Iterator[None]:
    """Allocate memory of the host in the body, although the device is the CPU as well."""
    global _host_depth
    _host_depth += 1
    try:
        yield
    finally:
        _host_depth -= 1


def is_on_host() -> bool:
    """True inside of `on_host`."""
    return _host_depth > 0


class Copy:
    """A copy in flight; `wait` returns the tensors that it filled."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.num_bytes = sum(source.nbytes for source, _ in pairs)
        self.tensors = [destination for _, destination in pairs]  # filled when the copy is done
        self.call: Call | None = None  # on a CPU, until it was waited for
        self.event: Any = None  # on a GPU: recorded after the copy

    def wait(self, *, block: bool = False) -> list[Tensor]:
        """Return when the copy is done.

        Where a GPU receives the copy, only its stream waits, unless `block` asks for this thread.
        """
        if self.call is not None:
            with self.call.waiting():
                self.call.work.wait()
            self.call = None
        elif self.event is None:
            pass
        elif not block and any(tensor.is_cuda for tensor in self.tensors):
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.event)
        else:
            self.event.synchronize()
        return self.tensors


class HostCopy:
    """The copy engine of one rank: `to_host` and `to_device`, each in its own direction.

    `pcie` is the emulated link where the device is a CPU; None: as fast as this machine copies.
    Slowed 1000 times, PCIe 5 suits a slow processor. A GPU has a real link.
    """

    def __init__(self, device: torch.device | str = "cpu", pcie: Link | None = None) -> None:
        if isinstance(pcie, str):
            raise ValueError(f"pcie={pcie!r} is a name; use minipar.emulate.link.parse({pcie!r})")
        self.device, self.pcie = torch.device(device), pcie
        if self.device.type == "cuda":
            self._down, self._up = (_Stream(torch.cuda.Stream(self.device)) for _ in range(2))
        else:
            self._down, self._up = (_Thread(pcie, name) for name in ("to_host", "to_device"))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory of the host in the shape of `tensor`; pinned where there is a GPU."""
        with on_host():
            return torch.empty(
                tensor.shape,
                dtype=tensor.dtype,
                device="meta" if tensor.is_meta else "cpu",
                pin_memory=self.device.type == "cuda",
            )

    def to_host(self, tensors: Iterable[Tensor]) -> Copy:
        """Start to copy `tensors` of the device into new memory of the host.

        The caller may drop the tensors, but must not change them before the copy is done.
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


class _Work:
    """One copy in the queue of a thread: what `calls` takes for a work of torch."""

    def __init__(self, pairs: Sequence[Pair], num_bytes: int) -> None:
        self.pairs, self.num_bytes = pairs, num_bytes  # `pairs` keeps the sources alive
        self.called, self.times = time.monotonic(), None
        self.ended = torch.futures.Future()
        self._done, self._error = threading.Event(), None

    def copy(self, start: float, seconds: float) -> float:
        """Copy, then sleep until `start` + `seconds`; return the time when the link is free."""
        try:
            for source, destination in self.pairs:
                destination.copy_(source)
        except BaseException as error:
            self._error = error
        now, free = time.monotonic(), start + seconds
        time.sleep(max(0.0, free - now))
        self.pairs, self.times = (), (start, time.monotonic())
        self.ended.set_result(None)
        self._done.set()
        return max(free, now)  # `now` where the processor was slower than PCIe

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class _Thread:
    """One direction on the CPU: copies in the order of their start, as fast as `pcie` allows."""

    def __init__(self, pcie: Link | None, name: str) -> None:
        self._pcie, self._name = pcie, name
        self._works: queue.SimpleQueue | None = None

    def start(self, pairs: Sequence[Pair]) -> Copy:
        if self._works is None:
            self._works = queue.SimpleQueue()
            args = self._works, self._pcie
            threading.Thread(target=_work_off, args=args, name=self._name, daemon=True).start()
        copy = Copy(pairs)
        work = _Work(pairs, copy.num_bytes)
        copy.call = Call(self._name, HOST, copy.num_bytes, peers=())
        copy.call.begin(lambda: self._works.put(work) or work)
        return copy

    def __del__(self) -> None:
        if self._works is not None:
            self._works.put(None)


def _work_off(works: queue.SimpleQueue, pcie: Link | None) -> None:
    """Make the copies of one direction, until their engine is gone."""
    free = 0.0  # when the link is, by its own clock, so that oversleeping does not add up
    while (work := works.get()) is not None:
        seconds = 0.0 if pcie is None else pcie.latency + work.num_bytes / pcie.bandwidth
        free = work.copy(max(work.called, free), seconds)
        del work  # a thread at rest must not keep tensors alive


class _Stream:
    """One direction on CUDA: a stream that waits for earlier kernels, and not for later ones."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def start(self, pairs: Sequence[Pair]) -> Copy:
        copy = Copy(pairs)
        copy.event = _enqueue(pairs, self._stream)
        return copy


def _enqueue(pairs: Sequence[Pair], stream: Any) -> Any:
    """Make the copies on a CUDA stream; return the event of their end."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for source, destination in pairs:
            destination.copy_(source, non_blocking=True)
            for tensor in (source, destination):
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # the allocator must not reuse it yet
    return stream.record_event()
