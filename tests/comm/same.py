"""What tests of several files compare."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import calls


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

    class Told:
        called: list[tuple] = []

        def launched(self, number, verb, axis, num_bytes, peers, result) -> None:
            self.called.append((verb, *peers))

        def waited(self, number) -> None:
            pass

    calls.observers.append(told := Told())
    try:
        with mock.patch.object(dist, "get_backend", lambda group=None: backend):
            yield told.called
    finally:
        calls.observers.remove(told)
