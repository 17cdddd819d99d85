"""Attention over keys that arrive block by block: the matmuls that hide a ring's messages.

Math.   With scores s = q kT / sqrt(K), a block b of keys gives  lse_b = log sum exp s  and
        out_b = sum exp(s - lse_b) v.  Two blocks merge exactly:  lse = log(exp lse_a + exp lse_b)
        and  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
Source. The merge: Milakov and Gimelshein 2018 (arXiv 1805.02867); the backward of a block: Dao
        2023, "FlashAttention-2" (arXiv 2307.08691), algorithm 2.
Proved by tests/parallel/test_context.py. Nothing here talks to another rank; context.py does.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.model import casts

aten = torch.ops.aten


class Block(NamedTuple):
    """Rows of queries and of keys. A query sees the keys of `mask`, or of its past, or all."""

    mine: slice
    theirs: slice
    mask: Tensor | None
    causal: bool


# ---------------------------------------------------------------------- one block
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the softmax over one block of keys, and the log-sum-exp to merge it with others.

    q [B, H, t, K]; k, v [B, G, s, K] -> output [B, H, t, K], log-sum-exp [B, H, t, 1]. `mask` is
    as in `dense_core`. A query that sees no key of the block gets 0 and -inf.
    """
    scores = _scores(_by_kv_head(q, k.shape[1]), k, mask, causal)  # [B, G, H/G * t, s]
    lse = scores.logsumexp(-1, keepdim=True)
    out = scores.sub_(_finite(lse)).exp_() @ v
    return out.view(q.shape), lse.view(*q.shape[:-1], 1)


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add the keys of another block to the softmax in `out` and `lse`, in place."""
    total = torch.logaddexp(lse, new_lse)
    finite = _finite(total)
    out.mul_((lse - finite).exp()).addcmul_(new_out, (new_lse - finite).exp())
    lse.copy_(total)


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *softmax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from one block.

    `softmax` is over *all* keys: out [B, H, t, K], lse [B, H, t, 1], the gradient of out.
    With p = exp(s - lse) and dot = sum(dout * out) over K, [B, H, t, 1]:
    dv = pT dout,  ds = p (dout vT - dot) / sqrt(K),  dq = ds k,  dk = dsT q.
    """
    out, lse, d_out = softmax
    dot = (d_out * out).sum(-1, keepdim=True)
    shape, num_kv_heads = q.shape, k.shape[1]
    q, lse, d_out, dot = (_by_kv_head(x, num_kv_heads) for x in (q, lse, d_out, dot))
    weights = _scores(q, k, mask, causal).sub_(_finite(lse)).exp_()  # [B, G, H/G * t, s]
    d_v = weights.mT @ d_out
    d_scores = weights * (d_out @ v.mT - dot) / math.sqrt(shape[-1])
    return (d_scores @ k).view(shape), d_scores.mT @ q, d_v


def _by_kv_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """Make heads that share keys rows of one product: [B, H, t, K] -> [B, G, H/G * t, K]."""
    return x.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return q kT / sqrt(K), -inf where a query sees nothing: [B, G, H/G * t, K] -> [..., s]."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        mask = torch.ones(2 * k.shape[2:3], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores
    by_head = scores.unflatten(2, (-1, mask.shape[-2]))  # [B, G, H/G, t, s]
    return by_head.masked_fill_(~mask.unsqueeze(-3), -math.inf).flatten(2, 3)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf, since -inf - -inf is nan; exp(-inf - finite) is the 0 we want."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


# ---------------------------------------------------------------------- torch's kernels
def fused_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Do `attend` by torch's FlashAttention for the CPU, which never holds a block of scores."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_bias(q, mask)
    )
    lse = lse.unsqueeze(-1)
    if mask is not None:  # the kernel returns 0 for a query that sees no key
        lse = lse.masked_fill(~mask.any(-1, keepdim=True), -math.inf)
    return out, lse


def fused_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *softmax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `attend_backward` by torch's FlashAttention for the CPU."""
    out, lse, d_out = softmax
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, _finite(lse).squeeze(-1), 0.0, causal, attn_mask=_bias(q, mask)
    )


def flash_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Do `attend` by torch's FlashAttention for GPUs, which takes no mask."""
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse.unsqueeze(-1)


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, *softmax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `attend_backward` by torch's FlashAttention for GPUs."""
    out, lse, d_out = softmax
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # not read without dropout
    lengths = None, None, q.shape[2], k.shape[2]  # sequences of one length need no offsets
    tensors = d_out, q, k, v, out, lse.squeeze(-1).contiguous()
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, *lengths, 0.0, causal, seed, torch.empty_like(seed[:0])
    )


def _bias(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """Turn a mask into 0 or -inf, to be added to the scores."""
    return None if mask is None else torch.where(mask, 0.0, -math.inf).to(q.dtype)


def joined(blocks: list[Block]) -> list[Block]:
    """Join the blocks of one step, unless there are masks: fewer calls, fewer merges.

    The blocks of a "zigzag" step fill a rectangle. In the first step they fill its causal part.
    """
    if len(blocks) < 2 or blocks[0].mask is not None:
        return blocks
    mine = slice(min(b.mine.start for b in blocks), max(b.mine.stop for b in blocks))
    theirs = slice(min(b.theirs.start for b in blocks), max(b.theirs.stop for b in blocks))
    return [Block(mine, theirs, None, causal=any(b.causal for b in blocks))]


def _wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, if it has fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Kernel(NamedTuple):
    """A way to compute blocks: functions like `attend` and `attend_backward`.

    A kernel with a causal mask of its own takes blocks `joined`. `inputs` casts to the dtype of the
    matmuls: "flash" takes 16 bits, sums in fp32 inside, and rounds once per block.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    arrange: Callable[[list[Block]], list[Block]] = list
    inputs: Callable[[Tensor], Tensor] = _wide


KERNELS = {
    "math": Kernel(attend, attend_backward),
    "fused": Kernel(fused_attend, fused_backward, arrange=joined),
    "flash": Kernel(flash_attend, flash_backward, arrange=joined, inputs=lambda x: x),
}


def best_kernel(q: Tensor, mask: Tensor | None) -> str:
    """Return the name of the fastest kernel for q [B, H, T/n, K]; "meta" stands for a GPU."""
    in_16_bits = q.dtype in (torch.bfloat16, torch.float16)
    fits = in_16_bits and mask is None and q.shape[-1] in range(8, 257, 8)
    if fits and q.device.type in ("cuda", "meta"):
        return "flash"
    return "fused" if q.device.type in ("cpu", "meta") else "math"


# ---------------------------------------------------------------------- all blocks as they come
class OnlineSoftmax:
    """The softmax over the keys seen so far: output [B, H, T/n, K] and lse [B, H, T/n, 1].

    In fp32 at least: if every step rounded to bf16, the error would grow with the ring.
    """

    def __init__(self, kernel: Kernel, q: Tensor) -> None:
        self.kernel, self.q = kernel, kernel.inputs(q)
        self.out = torch.zeros_like(_wide(q))
        self.lse = self.out.new_full((*q.shape[:-1], 1), -math.inf)

    def add(self, kv: Tensor, blocks: list[Block]) -> None:
        """Multiply with the keys and values [2, B, G, T/n, K] of one rank."""
        k, v = self.kernel.inputs(kv)
        with casts.off(k.device.type):  # autocast would round q and k back to bf16
            for mine, theirs, *who in self.kernel.arrange(blocks):
                keys = k[:, :, theirs], v[:, :, theirs]
                new = self.kernel.forward(self.q[:, :, mine], *keys, *who)
                merge(self.out[:, :, mine], self.lse[:, :, mine], *new)


class OnlineGradients:
    """The gradient of q from the keys seen so far, [B, H, T/n, K]; in fp32 at least."""

    def __init__(self, kernel: Kernel, q: Tensor, out: Tensor, lse: Tensor, d_out: Tensor) -> None:
        self.kernel, self.q = kernel, kernel.inputs(q)
        self.softmax = out.to(self.q.dtype), lse, kernel.inputs(d_out).contiguous()
        self.d_q = torch.zeros_like(out)

    def add(self, kv: Tensor, blocks: list[Block]) -> Tensor:
        """Multiply with one rank's keys and values; return their gradients [2, B, G, T/n, K]."""
        k, v = self.kernel.inputs(kv)
        d_k, d_v = d_kv = torch.zeros_like(kv, dtype=self.d_q.dtype)
        with casts.off(k.device.type):
            for mine, theirs, *who in self.kernel.arrange(blocks):
                own = (x[:, :, mine] for x in self.softmax)
                keys = k[:, :, theirs], v[:, :, theirs]
                found = self.kernel.backward(self.q[:, :, mine], *keys, *who, *own)
                self.d_q[:, :, mine] += found[0]
                d_k[:, :, theirs] += found[1]
                d_v[:, :, theirs] += found[2]
        return d_kv
