"""Ulysses: ranks hold different tokens all through the model, but different heads in attention.

Idea.   Attention mixes tokens but not heads; the rest of the model mixes heads but not tokens. So
        each of n ranks holds T/n tokens. An all-to-all before attention gives each rank all tokens
        of H/n heads; a second one after attention undoes the first. Attention itself is unchanged.
Math.   A permutation, and its inverse in backward. Key/value head g serves query heads g H/G to
        (g+1) H/G - 1. Where n does not divide G, each key/value head is repeated until there are
        G' = lcm(G, n) of them; its gradient is the sum over its copies.
Shapes. tokens [B, T] V@cp -> [B, T/n], in plain order; q [B, H, T/n, K] V@cp -> [B, H/n, T, K];
        k, v [B, G', T/n, K] -> [B, G'/n, T, K]; parameters R@cp, their gradients P@cp.
Comms.  With A = B T K e bytes for one head of the whole sequence (e bytes per number): forward
        (n-1)/n (2 H + 2 G') A / n, backward the same; per rank and layer, in 2 + 2 calls. Falls
        with n, unlike the ring's (n-1)/n 2 G A and tensor parallelism's 2 (n-1)/n B T D e per call.
Memory. Activations divided by n. During attention: q, k, v and output of T tokens, H/n heads.
Costs you. n must divide H and T. Nothing hides the calls: attention needs all of its input. Masks
        are whole on every rank, [B, 1, T, T].
Source. Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.
In torch: none by name; `torch.distributed.tensor` redistributes from tokens to heads.
Proved by tests/parallel/test_ulysses.py and tests/law/test_law.py.

Use it as context.py shows, with ``ulysses.apply`` and ``ulysses.shard_batch``.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from minipar.comm.autograd import all_to_all
from minipar.comm.mesh import Axis
from minipar.model.llama import Core
from minipar.parallel.base.sequences import CutSequences, chunks_of_equal_length


def apply(model: nn.Module, axis: Axis) -> "Ulysses":
    """Make `model`, a Llama, work on sequences that are cut over `axis`, in place.

    Cut inputs with `shard_batch`; the model makes positions itself unless the caller passes some. A
    mask is whole, [B, 1, T, T]. The model's own attention (such as `dense_core`) computes a part of
    the heads. The strategy sends no gradients: ddp, zero or fsdp over ``mesh.joint("dp", "cp")``
    sums them.
    """
    return Ulysses(model, axis)


def shard_batch(batch: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, ...]:
    """Cut (inputs, targets[, positions[, mask]]) of whole sequences; a mask stays whole.

    A rank gets the r-th of n equal parts. Raises `ValueError` unless n divides T.
    """
    cut = partial(chunks_of_equal_length, count=axis.size, dim=-1, axis=axis)
    return tuple(x if x.ndim == 4 else cut(x)[axis.rank] for x in batch)


# ---------------------------------------------------------------------- tokens <-> heads
def heads_apart(tensors: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, ...]:
    """Swap some tokens of all heads for all tokens of some heads, of several tensors at once.

    Each [B, H, T/n, K] -> [B, H/n, T, K]. H may differ between the tensors; n must divide each.
    """
    # One message: the heads that go to rank 0 (of q, of k, of v), those that go to rank 1, ...
    pieces = [x.unflatten(1, (axis.size, -1)) for x in tensors]  # [B, n, H/n, T/n, K]
    packed = torch.cat(pieces, dim=2).flatten(1, 2)
    arrived = all_to_all(packed, axis, split_dim=1, concat_dim=2)  # V@cp tokens -> V@cp heads
    return arrived.split([x.shape[1] // axis.size for x in tensors], dim=1)


def repeated(kv: Tensor, size: int) -> Tensor:
    """Repeat key/value heads until `size` divides them: [B, G, T, K] -> [B, lcm(G, n), T, K].

    G and n divide H, so G' = lcm(G, n) divides H. So the copies of a head split its query heads
    evenly, and the r-th of n parts holds the keys of the r-th part of the query heads.
    """
    num_heads = kv.shape[1]
    return kv.repeat_interleave(math.lcm(num_heads, size) // num_heads, dim=1)


class Ulysses(CutSequences):
    """A Llama with all-to-alls around its attention; made by `apply`."""

    def own_tokens(self, whole: Tensor) -> Tensor:
        [own] = shard_batch((whole,), self.axis)
        return own

    def attend(
        self, core: Core, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Call `core` on all tokens of H/n heads; `mask` covers the whole sequence."""
        k, v = repeated(k, self.axis.size), repeated(v, self.axis.size)
        q, k, v = heads_apart((q, k, v), self.axis)
        out = core(q, k, v, mask)  # [B, H/n, T, K] V@cp heads -> [B, H, T/n, K] V@cp tokens
        return all_to_all(out, self.axis, split_dim=2, concat_dim=1)
