"""What tests of several files compare."""

import torch
from torch import Tensor


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
