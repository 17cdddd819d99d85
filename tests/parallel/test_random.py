"""Dropout under tensor and data parallelism: who draws what, and who draws it again (T22)."""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minipar.comm.mesh import Axis, Mesh
from minipar.parallel.base.random import fork_rng, seed
from tests.parallel.layers import on_paper


def block(axis: Axis, masks: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """Drop half of what the ranks of `axis` have alike, and half of what each has for itself."""
    same = F.dropout(torch.ones(64), 0.5)
    with fork_rng(axis):
        own = F.dropout(torch.ones(64), 0.5)
    masks.append((same, own))
    return x * same * own


def _masks(recompute: bool) -> list[tuple[Tensor, Tensor]]:
    """Two forwards, then two backwards, as in a pipeline."""
    mesh, masks = Mesh(dp=2, tp=2), []
    seed(7, mesh.dp)
    run = partial(block, mesh.tp, masks)
    x = torch.ones(64, requires_grad=True)
    outs = [checkpoint(run, x, use_reentrant=False) if recompute else run(x) for _ in range(2)]
    for out in outs:
        out.sum().backward()
    return masks


def test_trap_22_dropout_is_alike_where_activations_are(ranks):
    """Alike for ranks of tp outside of a fork, and nowhere else; drawn again alike.

    Mutants: no fork; one seed for all ranks; a forked stream that goes on from where it was.
    """
    kept, again = (ranks(4).run(_masks, recompute) for recompute in (False, True))
    for m in range(2):
        same, own = zip(*(masks[m] for masks in kept), strict=True)  # ranks 0, 1 are one replica
        assert torch.equal(same[0], same[1]) and torch.equal(same[2], same[3])
        assert not torch.equal(same[0], same[2])
        assert not any(torch.equal(own[i], own[j]) for i in range(4) for j in range(i))
    for first, second in zip(kept, again, strict=True):
        assert not torch.equal(first[0][1], first[1][1])
        assert len(second) == 4  # it did run again
        torch.testing.assert_close(second, first + first, rtol=0, atol=0)


def test_trap_22_ranks_apart_on_two_axes_draw_apart():
    """Mutant: ranks told apart by the sum of their places, where (0, 1) and (1, 0) draw alike."""
    drawn = set()
    for dp, cp in itertools.product(range(3), repeat=2):
        seed(0, on_paper("dp", 3, dp), on_paper("cp", 3, cp))
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 9
