"""Dropout under tensor and data parallelism: who draws what, and who draws it again (T22).

The Llama has no dropout; a block with two of them stands in for a layer of the reader's own.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar.comm.mesh import Axis, Mesh
from minipar.parallel.base.random import fork_rng, seed
from minipar.parallel.matrices import Border
from tests.parallel.layers import on_paper, random

B, T, D, HIDDEN = 2, 8, 6, 12


class Dropout(nn.Module):
    """Drops half of everything, and remembers what."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.masks.append(F.dropout(torch.ones_like(x), 0.5))
        return x * self.masks[-1]


class Block(nn.Module):
    """x + dropout(second(dropout(first(x)))), the matrices cut as in tensor.py."""

    def __init__(self, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.border = axis, Border(axis, sequence)
        first, second = (w.chunk(axis.size, dim)[axis.rank] for dim, w in enumerate(weights()))
        self.first = nn.Parameter(first.clone())
        self.second = nn.Parameter(second.clone())
        self.inside, self.outside = Dropout(), Dropout()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(self.border.enter(x), self.first)  # [B, T, F/n] V
        with fork_rng(self.axis):
            hidden = self.inside(hidden)
        out = self.border.leave(F.linear(hidden, self.second))  # [B, T, D] I, or [B, T/n, D] V
        with fork_rng(self.axis) if self.border.sequence else nullcontext():
            return x + self.outside(out)


def weights() -> tuple[Tensor, Tensor]:
    """The whole matrices, [F, D] and [D, F]."""
    return random(HIDDEN, D, seed=1), random(D, HIDDEN, seed=2)


# ---------------------------------------------------------------------- streams
def test_ranks_apart_on_two_axes_draw_apart():
    """Mutant: ranks told apart by the sum of their places, where (0, 1) and (1, 0) draw alike."""

    def drawn(dp: int, cp: int) -> float:
        seed(0, on_paper("dp", 3, dp), on_paper("cp", 3, cp))
        return torch.rand(()).item()

    assert len({drawn(dp, cp) for dp in range(3) for cp in range(3)}) == 9
    assert drawn(1, 2) == drawn(1, 2)


# ---------------------------------------------------------------------- a block with dropout
def _trained(sizes: dict[str, int], sequence: bool, recompute: bool):
    """Masks, outputs and gradients of two microbatches, whose backward comes after both forwards.

    As in a pipeline: when the first is computed again, the streams are somewhere else.
    """
    mesh = Mesh(**sizes)
    seed(7, *([mesh.dp] if "dp" in sizes else []))
    block = Block(mesh.tp, sequence)
    whole = [random(B, T, D, seed=3 + m) for m in range(2)]
    pieces = [x.chunk(mesh.tp.size, 1)[mesh.tp.rank] if sequence else x for x in whole]
    inputs = [piece.clone().requires_grad_() for piece in pieces]
    run = partial(checkpoint, block, use_reentrant=False) if recompute else block
    outs = [run(x) for x in inputs]
    for out in outs:
        out.sin().sum().backward()
    grads = [x.grad for x in inputs], block.first.grad, block.second.grad
    return {
        "inside": block.inside.masks,
        "outside": block.outside.masks,
        "outs": [out.detach() for out in outs],
        "grads": grads,
        "after": torch.rand(9),
    }


MODES = pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])


@MODES
def test_trap_22_dropout_equals_one_device_that_drops_the_same(ranks, sequence):
    """The law of parity, with the ranks' masks joined to one. Mutants: masks of the residual stream
    that differ (plain), so that each rank goes on with other activations; a missing fork."""
    results = ranks(2).run(_trained, {"tp": 2}, sequence, False)
    insides, outsides = ([r[name] for r in results] for name in ("inside", "outside"))
    for m in range(2):
        assert not torch.equal(insides[0][m], insides[1][m])
        assert torch.equal(outsides[0][m], outsides[1][m]) == (not sequence)
    assert torch.equal(results[0]["after"], results[1]["after"])  # and so will all to come
    first, second = (w.requires_grad_() for w in weights())
    for m in range(2):
        inside = torch.cat([masks[m] for masks in insides], -1)
        outside = torch.cat([masks[m] for masks in outsides], 1) if sequence else outsides[0][m]
        x = random(B, T, D, seed=3 + m).requires_grad_()
        out = x + F.linear(F.linear(x, first) * inside, second) * outside
        out.sin().sum().backward()
        for rank, result in enumerate(results):
            for ours, theirs in ((result["outs"][m], out), (result["grads"][0][m], x.grad)):
                expected = theirs.chunk(2, 1)[rank] if sequence else theirs
                torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    for rank, result in enumerate(results):
        _, grad_first, grad_second = result["grads"]
        for ours, whole, dim in ((grad_first, first, 0), (grad_second, second, 1)):
            expected = whole.grad.chunk(2, dim)[rank]
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@MODES
def test_trap_22_recomputation_restores_both_streams(ranks, sequence):
    """Mutants: a stream of this rank's own that is kept, and goes on, in a tracker; recomputation
    that draws anew."""
    kept = ranks(2).run(_trained, {"tp": 2}, sequence, False)
    computed_again = ranks(2).run(_trained, {"tp": 2}, sequence, True)
    for one, two in zip(kept, computed_again, strict=True):
        for name in ("inside", "outside"):
            assert len(one[name]) == 2 and len(two[name]) == 4  # it did run again
            for mask, again in zip(2 * one[name], two[name], strict=True):
                assert torch.equal(mask, again)
            assert not torch.equal(*one[name])
        torch.testing.assert_close(one["outs"], two["outs"], rtol=0, atol=0)
        torch.testing.assert_close(one["grads"], two["grads"], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@MODES
def test_trap_22_replicas_drop_differently(ranks, sequence):
    """dp=2, tp=2: four masks inside; outside one per replica, or four with ``sequence``. Mutant:
    the same seed on all ranks."""
    results = ranks(4).run(_trained, {"dp": 2, "tp": 2}, sequence, True)
    insides, outsides = ([r[name][0] for r in results] for name in ("inside", "outside"))

    def equal_pairs(masks: list[Tensor]) -> list[tuple[int, int]]:
        return [(i, j) for i in range(4) for j in range(i) if torch.equal(masks[i], masks[j])]

    assert equal_pairs(insides) == []
    assert equal_pairs(outsides) == ([] if sequence else [(1, 0), (3, 2)])
