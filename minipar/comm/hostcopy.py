"""Copies between a device and its host: asynchronous, recorded, and emulated where there is no GPU.

Idea.   A host has more memory than a GPU, and cheaper memory; PCIe lies between the two. A
        copy engine carries one tensor at a time in each direction while the GPU computes.
Cost.   latency + num_bytes / bandwidth seconds a copy (alpha-beta); both directions work at once.
CUDA.   A stream per direction, and pinned memory: only from pinned memory a copy is asynchronous.
        The profiler records each copy as a span of kind "copy".
CPU.    A thread per direction copies and then *sleeps* until PCIe would have been done. So the
        processor is free to compute, and overlap is real. A copy is a span along the axis "host".
        Host and device use the same memory, but their bytes are counted separately: `on_host`
        says which count a tensor belongs to.
In torch: `Tensor.to(device, non_blocking=True)` on a stream.
Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), section 4.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar.comm.calls import Call, Pending
from minipar.comm.mesh import Axis

HOST = Axis("host", 0, 1, (0,))
_host_depth = 0


@contextmanager
def on_host() -> Iterator[None]:
    """Count tensors that the body allocates as host memory, even where the device is the CPU."""
    global _host_depth
    _host_depth += 1
    try:
        yield
    finally:
        _host_depth -= 1


def is_on_host() -> bool:
    """True inside of `on_host`."""
    return _host_depth > 0


class HostCopy:
    """The copy engine of one rank: `to_host` and `to_device`, each a queue of its own.

    Both return a `Pending`. If the destination is on a GPU, `wait` blocks its stream, not the host.

    On a CPU, `pcie` is an emulated link: `link.parse("pcie5*1000")` is PCIe 5 slowed 1000 times, as
    the processor is slow too. With None, copies run at the speed of this machine.
    """

    def __init__(self, device: torch.device | str = "cpu", pcie: Any = None) -> None:
        self.device, self.pcie = torch.device(device), pcie
        if self.device.type == "cuda":
            streams = [torch.cuda.Stream(self.device) for _ in range(2)]
            self._down, self._up = (partial(_enqueue, stream) for stream in streams)
        else:
            self._down, self._up = (_Lane(pcie, name).start for name in ("to_host", "to_device"))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory of the host in the shape of `tensor`; pinned where there is a GPU."""
        device, pinned = "meta" if tensor.is_meta else "cpu", self.device.type == "cuda"
        with on_host():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)

    def to_host(self, tensor: Tensor) -> Pending:
        """Start to copy `tensor` of the device into new memory of the host.

        The caller may drop the tensor, but must not change it before the copy is done.
        """
        return self._down(tensor.detach(), self.empty_like(tensor))

    def to_device(self, source: Tensor, destination: Tensor) -> Pending:
        """Start to copy `source` on the host into `destination` on the device."""
        return self._up(source.detach(), destination.detach())


# ---------------------------------------------------------------------- on a CPU
class _Lane:
    """One direction: copies in the order of their start, as fast as `pcie` allows."""

    def __init__(self, pcie: Any, name: str) -> None:
        self._pcie, self._name = pcie, name
        self._free = 0.0  # when PCIe is free, as computed: late wake-ups do not add up
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def start(self, source: Tensor, destination: Tensor) -> Pending:
        both, called = [source, destination], time.monotonic()
        call = Call(self._name, HOST, source.nbytes, peers=())
        call.begin(lambda: _Work(self._thread.submit(self._copy, both, called)))
        return Pending(call.work, destination, None, call)

    def _copy(self, both: list[Tensor], called: float) -> tuple[float, float]:
        """Copy, and sleep until PCIe would have been done; return the start and the end."""
        start, num_bytes = max(called, self._free), both[0].nbytes
        both[1].copy_(both[0])
        both.clear()  # free the tensors: the thread holds this list longer than the caller waits
        now, end, pcie = time.monotonic(), start, self._pcie
        if pcie is not None:
            end += pcie.latency + num_bytes / pcie.bandwidth
        time.sleep(max(0.0, end - now))
        self._free = max(end, now)  # `now` where the processor was slower than PCIe
        return start, time.monotonic()


@dataclass(eq=False)
class _Work:
    """A copy in a lane, with the methods of a work of torch."""

    ended: Future

    def wait(self) -> None:
        self.ended.result()

    @property
    def times(self) -> tuple[float, float] | None:
        return self.ended.result() if self.ended.done() and not self.ended.exception() else None


# ---------------------------------------------------------------------- on a GPU
def _enqueue(stream: Any, source: Tensor, destination: Tensor) -> Pending:
    """Copy on a CUDA stream, after the kernels launched so far, and beside later ones."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        destination.copy_(source, non_blocking=True)
        for tensor in (source, destination):
            if tensor.is_cuda:
                tensor.record_stream(stream)  # the allocator must not reuse it yet
    ended = stream.record_event()

    def arrive(destination: Tensor) -> Tensor:
        if destination.is_cuda:
            torch.cuda.current_stream(stream.device).wait_event(ended)
        else:
            ended.synchronize()
        return destination

    return Pending(None, destination, arrive)


# ---------------------------------------------------------------------- values of tensors
# A read waits until the GPU has finished all kernels launched before. So strategies decide by
# shapes and settings; those that need values read them here. On "meta", every other read fails.
def look(tensor: Tensor, on_meta: Any) -> Any:
    """Return the values of `tensor` as `tolist` does, or `on_meta` for a tensor without values."""
    return on_meta if tensor.is_meta else tensor.tolist()


def to_host(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU, to be saved; a meta tensor stays as it is."""
    return tensor if tensor.is_meta else tensor.cpu()


def to_device(few: Tensor, device: torch.device) -> Tensor:
    """Return `few` numbers of the host on `device`; the host does not wait."""
    if device.type == "cuda" and few.device.type == "cpu":
        few = few.pin_memory()
    return few.to(device, non_blocking=True)
