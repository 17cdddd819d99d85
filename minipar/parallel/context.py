"""Context parallelism: every rank holds a part of each sequence; keys and values travel in a ring.

Idea.   A Llama computes each token alone, except in attention. So n ranks can share T tokens.
        In attention a query needs the keys and values of all tokens before it. Keys and values
        travel around a ring, one rank further in each step, while each rank computes with the
        block that it has. The softmax over all keys is merged from the blocks.
Math.   blockwise.py has the exact merge of softmaxes, and the matmuls of one block.
Order.  Attention masks the future, so a rank skips blocks in which no query sees a key. In "plain"
        order rank r holds the r-th of n pieces: the last rank multiplies n blocks, the first rank
        one, and the others wait. In "zigzag" order rank r holds chunks r and 2n-1-r of 2n: each
        rank multiplies 2n+1 pairs of chunks, three in the first step and two in every other. At
        n=4 that is 9 quarters of a block; the last rank of "plain" has 16.

            plain, n=2   0 0 0 0 1 1 1 1         zigzag, n=2   0 0 1 1 1 1 0 0

Shapes. tokens [B, T] V@cp -> [B, T/n]; hidden [B, T/n, D] V@cp; q [B, H, T/n, K], k and v
        [B, G, T/n, K] V@cp; parameters R@cp, their gradients P@cp: the data strategy sums them.
Comms.  A = 2 B G T K e bytes of all keys and values (G kv heads, never repeated; e bytes per
        number). Forward (n-1)/n A. Backward (n-1)/n (A + A'), where A' are the gradients of keys
        and values, in fp32 at least. Per rank and layer, for "ring" and "gather" alike.
Memory. Activations divided by n. Attention saves q, k, v, its output and lse, all of T/n tokens.
        In flight: two more blocks of k and v, for "gather" all n. The kernel "math" also holds one
        block of scores: [B, H, T/n, T/n] for "plain", a quarter of that for "zigzag".
Costs you. n must divide T, for "zigzag" 2n. A mask has T/n x T entries. Computing T/n times T/n
        scores must take longer than sending T/n keys, or the ring is exposed: long sequences only.
Source. Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889);
        "gather": Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), section
        3.3.2. In torch: `torch.distributed.tensor.experimental.context_parallel`.
Proved by tests/parallel/test_context.py and tests/law/test_law.py.

Use. Ranks of `cp` hold different tokens, as ranks of `dp` do. So the loss and the data strategy see
both as one axis::

    data_axis = mesh.joint("dp", "cp")
    strategies = [context.apply(model, mesh.cp), ddp.apply(model, data_axis, average=False)]
    batch = context.shard_batch((inputs, targets), mesh.cp)      # targets are shifted already
    train_step(model, strategies, optimizer, [batch], data_axis)
"""

import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minipar.comm.autograd import outside_of_graphs
from minipar.comm.collectives import Pending, all_gather, connect, exchange, reduce_scatter
from minipar.comm.hostcopy import look
from minipar.comm.mesh import Axis
from minipar.model.llama import Core
from minipar.parallel import blockwise
from minipar.parallel.base.sequences import CutSequences, chunks_of_equal_length
from minipar.parallel.base.strategy import device_of
from minipar.parallel.blockwise import KERNELS, Block, Kernel, OnlineGradients, OnlineSoftmax

Order = Literal["zigzag", "plain"]
Exchange = Literal["ring", "gather"]


def apply(
    model: nn.Module, axis: Axis, *, order: Order = "zigzag", exchange: Exchange = "ring"
) -> "ContextParallel":
    """Make `model`, a Llama, work on sequences that are cut over `axis`, in place.

    Args:
        order: which tokens a rank holds, "zigzag" or "plain", as in `shard`.
        exchange: "ring" passes keys and values from rank to rank during the matmuls; "gather"
            collects them first, in one call that nothing hides.

    Cut inputs with `shard`; the model makes positions itself unless the caller passes some. Cut a
    mask (see masks.py) along its queries: [B, 1, T/n, T]. The strategy sends no gradients: ddp,
    zero or fsdp over ``mesh.joint("dp", "cp")`` sums them.
    """
    strategy = ContextParallel(model, axis)  # refuses before any message
    strategy.order, strategy.attention = order, EXCHANGES[exchange]
    connect(axis, device_of(model))
    return strategy


# ---------------------------------------------------------------------- who holds which tokens
ORDERS = {"zigzag": 2, "plain": 1}
"""Chunks of a sequence that each rank holds."""


def chunks_of(rank: int, size: int, order: Order = "zigzag") -> tuple[int, ...]:
    """Return the numbers of the chunks that `rank` holds, of ``ORDERS[order] * size`` in all."""
    return (rank, 2 * size - 1 - rank) if order == "zigzag" else (rank,)


def shard(tensor: Tensor, axis: Axis, order: Order = "zigzag", dim: int = -1) -> Tensor:
    """Cut this rank's tokens out of `dim`: [..., T] -> [..., T/n]. Sends nothing.

    Shift targets before you cut them: the target of a chunk's last token is another chunk's token.

    Raises `ValueError` unless T is divisible by n, for "zigzag" by 2n.
    """
    chunks = chunks_of_equal_length(tensor, ORDERS[order] * axis.size, dim, axis)
    return torch.cat([chunks[c] for c in chunks_of(axis.rank, axis.size, order)], dim)


def shard_batch(
    batch: tuple[Tensor, ...], axis: Axis, order: Order = "zigzag"
) -> tuple[Tensor, ...]:
    """Cut (inputs, targets[, positions[, mask]]) of whole sequences; a mask along its queries."""
    return tuple(shard(x, axis, order, dim=-2 if x.ndim == 4 else -1) for x in batch)


def blocks_of(mask: Tensor | None, q: Tensor, axis: Axis, order: Order) -> list[list[Block]]:
    """Return the blocks to multiply in each step of the ring: all in which a query sees a key.

    `mask` [B, 1, T/n, T], or None for causal; q [B, H, T/n, K] tells T/n.
    """
    per_rank, length = ORDERS[order], q.shape[2]
    if mask is not None and mask.shape[2:] != (length, length * axis.size):
        shape = f"[B, 1, {length}, {length * axis.size}], as context.shard_batch cuts it"
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit: it must be {shape}")
    width = length // per_rank
    rows = [slice(i * width, (i + 1) * width) for i in range(per_rank * axis.size)]
    shown = None
    if mask is not None:  # [chunks here, chunks in all]: True if any query sees any key
        tiles = mask.unflatten(3, (-1, width)).unflatten(2, (-1, width))
        shown = look(tiles.any(5).any(3).flatten(0, 1).any(0), on_meta=None)
    own, steps = chunks_of(axis.rank, axis.size, order), []
    for step in range(axis.size):  # this rank has the keys of rank - step
        source = chunks_of((axis.rank - step) % axis.size, axis.size, order)
        steps.append([])
        for (i, mine), (j, theirs) in itertools.product(enumerate(own), enumerate(source)):
            if shown[i][theirs] if shown else theirs <= mine:
                seen = None if mask is None else mask[:, :, rows[i], rows[theirs]]
                causal = mask is None and mine == theirs
                steps[-1].append(Block(rows[i], rows[j], seen, causal))
    return steps


# ---------------------------------------------------------------------- all blocks, in a ring
def pass_on(tensor: Tensor, axis: Axis) -> Pending:
    """Start to send `tensor` to the next rank; ``wait()`` returns the tensor of the rank before."""
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    buffer = torch.empty_like(tensor)
    return exchange([(tensor, to)], [(buffer, source)], axis, async_op=True)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to all keys; each step brings the keys of another rank."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        axis: Axis,
        order: Order,
        kernel: Kernel,
    ) -> Tensor:
        """q [B, H, T/n, K]; k, v [B, G, T/n, K] -> [B, H, T/n, K]."""
        softmax = OnlineSoftmax(kernel, q)
        kv = own_kv = torch.stack((k, v))  # one message: [2, B, G, T/n, K]
        steps = blocks_of(mask, q, axis, order)
        for step, blocks in enumerate(steps):
            is_last = step == axis.size - 1
            arriving = None if is_last else pass_on(kv, axis)  # post
            softmax.add(kv, blocks)  # compute, merge
            kv = kv if is_last else arriving.wait()[0]  # wait
        ctx.axis, ctx.steps, ctx.kernel = axis, steps, kernel
        ctx.save_for_backward(q, own_kv, softmax.out, softmax.lse)
        return softmax.out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradients of keys and values around a second ring, to the rank of the keys."""
        q, kv, out, lse = ctx.saved_tensors
        axis = ctx.axis
        gradients = OnlineGradients(ctx.kernel, q, out, lse, d_out)
        d_arriving = None
        for step, blocks in enumerate(ctx.steps):
            is_last = step == axis.size - 1
            arriving = None if is_last else pass_on(kv, axis)
            d_kv = gradients.add(kv, blocks)
            if step == 0:
                own_d_kv = d_kv  # stays here; the sum of the other ranks arrives at the end
            else:
                if d_arriving is not None:
                    d_kv += d_arriving.wait()[0]
                d_arriving = pass_on(d_kv, axis)
            kv = kv if is_last else arriving.wait()[0]
        d_k, d_v = own_d_kv + d_arriving.wait()[0]
        return gradients.d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), *[None] * 4


class GatherAttention(torch.autograd.Function):
    """The steps of `RingAttention` after one all-gather of all keys, which backward repeats."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        mask, ctx.axis, order, ctx.kernel = how
        ctx.steps = blocks_of(mask, q, ctx.axis, order)
        softmax = OnlineSoftmax(ctx.kernel, q)
        own_kv = torch.stack((k, v))
        everyone = all_gather(own_kv[None], ctx.axis)  # [n, 2, B, G, T/n, K]
        for step, blocks in enumerate(ctx.steps):
            softmax.add(everyone[ctx.axis.rank - step], blocks)
        ctx.save_for_backward(q, own_kv, softmax.out, softmax.lse)
        return softmax.out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce-scatter the gradients of all keys to the ranks that hold the keys."""
        q, own_kv, out, lse = ctx.saved_tensors
        gradients = OnlineGradients(ctx.kernel, q, out, lse, d_out)
        everyone = all_gather(own_kv[None], ctx.axis)
        d_everyone = torch.empty_like(everyone, dtype=out.dtype)
        for step, blocks in enumerate(ctx.steps):
            source = ctx.axis.rank - step
            d_everyone[source] = gradients.add(everyone[source], blocks)
        [(d_k, d_v)] = reduce_scatter(d_everyone, ctx.axis)
        return gradients.d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), *[None] * 4


EXCHANGES = {"ring": RingAttention, "gather": GatherAttention}


# ---------------------------------------------------------------------- the model
class ContextParallel(CutSequences):
    """A Llama that attends to the keys of other ranks; made by `apply`."""

    order: Order
    attention: type[torch.autograd.Function]
    kernel: str | None = None  # one of `KERNELS`; None: the fastest that fits

    def own_tokens(self, whole: Tensor) -> Tensor:
        return shard(whole, self.axis, self.order)

    def attend(
        self, core: Core, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend block by block instead of by `core`; `mask` has this rank's queries only."""
        kernel = KERNELS[self.kernel or blockwise.best_kernel(q, mask)]
        args = q, k, v, mask, self.axis, self.order, kernel
        return outside_of_graphs(self.attention.apply, *args)
