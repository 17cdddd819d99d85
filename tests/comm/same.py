"""What tests of several files compare."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import calls, collectives
from minipar.comm.mesh import Axis
from minipar.comm.plans import ALL_REDUCE


def numbers(axis: Axis, shape: tuple, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The tensors of all ranks, no two alike: small multiples of 60, so that sums and averages
    over up to five ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(7)
    return [
        (60 * torch.randint(-4, 5, shape, generator=generator)).to(dtype) for _ in range(axis.size)
    ]


def algorithms_for(size: int) -> list[str]:
    """The all-reduces made of messages among `size` ranks."""
    return [n for n in ALL_REDUCE if n != "halving_doubling" or size.bit_count() == 1]


def fastest(call: Callable[[], object], axis: Axis, tries: int) -> float:
    """Seconds of the fastest of some calls, each that of its slowest rank."""
    best = float("inf")
    for _ in range(tries):
        collectives.barrier(axis)
        start = time.monotonic()
        call()
        took = torch.tensor([time.monotonic() - start], dtype=torch.float64)
        best = min(best, collectives.all_reduce(took, axis, "max").item())
    return best


def laid_out(tensor: Tensor, how: int) -> Tensor:
    """The same values, in another layout of memory: ranks need not agree on that."""
    if how % 3 == 1:
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if how % 3 == 2:
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 5)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor.clone()


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_disjoint(t):
    spans = [s for s in t if s.kind != "comm"]
    assert all(x.end <= y.start for x, y in zip(spans, spans[1:], strict=False))


@contextmanager
def launched_over(backend: str) -> Iterator[list[tuple]]:
    """In the body this rank takes its groups for ones of `backend`; yields (verb, peers ...)."""

    class Told(calls.Tap):
        called: list[tuple] = []

        def begin(self, call: calls.Call) -> None:
            self.called.append((call.verb, *(call.peers or ())))

    calls.taps.append(told := Told())
    try:
        with mock.patch.object(dist, "get_backend", lambda group=None: backend):
            yield told.called
    finally:
        calls.taps.remove(told)
