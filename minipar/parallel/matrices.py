"""Cut matrices: the piece of each rank, the borders around them, the vocabulary and its loss.

tensor.py puts these parts into a Llama. V, R, I and P are the types of comm/autograd.py, along the
axis that cuts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.autograd import all_gather, all_reduce, convert, reduce_scatter
from minipar.comm.mesh import Axis
from minipar.model.llama import IGNORE_INDEX, LlamaConfig
from minipar.parallel.base.shards import check_divides

Spans = tuple[tuple[int, int], ...]
"""(start, stop) of each rank's piece along one dim; ranks with equal spans have copies."""


def evenly(length: int, n: int) -> Spans:
    """Cut `length` into n spans; where n does not divide it, their widths differ by one."""
    return tuple((r * length // n, (r + 1) * length // n) for r in range(n))


def by_heads(num_heads: int, head_dim: int, n: int) -> Spans:
    """Cut into n spans of whole heads; with fewer heads than ranks, neighbours share a head."""
    if n <= num_heads:
        return evenly(num_heads * head_dim, n)
    heads = [r * num_heads // n for r in range(n)]
    return tuple((head * head_dim, (head + 1) * head_dim) for head in heads)


def check_sizes(config: LlamaConfig, n: int, name: str = "tp", experts: bool = False) -> None:
    """Raise `ValueError` unless n ranks can share the matrices of such a Llama, and `experts`."""
    check_divides(name, n, "num_heads", config.num_heads)
    if config.moe is None or not all(map(config.moe.is_sparse, range(config.num_layers))):
        check_divides(name, n, "intermediate_size", config.intermediate_size)
    if config.num_kv_heads % n and n % config.num_kv_heads:
        heads = f"num_kv_heads={config.num_kv_heads}"
        raise ValueError(f"{name}={n} neither divides {heads} nor is a multiple of it")
    if experts and config.moe is None:
        raise ValueError(f"{name}={n} cuts experts, and this Llama has none (moe=None)")
    if experts:
        check_divides(name, n, "expert_size", config.moe.expert_size)


@dataclass(frozen=True)
class Border:
    """How activations enter a region of cut matrices, and how they leave it."""

    axis: Axis
    sequence: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """[B, T, D] I -> R, or [B, T/n, D] V -> [B, T, D] R."""
        return all_gather(x, self.axis, 1, to="R") if self.sequence else convert(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """[B, T, D] P -> I, or P -> [B, T/n, D] V."""
        if self.sequence:
            return reduce_scatter(x, self.axis, 1)
        return all_reduce(x, self.axis, to="I")


# ---------------------------------------------------------------------- the vocabulary
class VocabEmbedding(nn.Module):
    """The table's rows from word `start` on. Other ranks have the rows of all other words."""

    def __init__(self, embedding: nn.Embedding, start: int, border: Border) -> None:
        super().__init__()
        self.weight, self.start, self.border = embedding.weight, start, border

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] I -> [B, T, D] I, or [B, T/n, D] V."""
        rows, own = local_words(tokens, self.start, len(self.weight), self.border.axis)
        found = F.embedding(rows, self.weight).masked_fill(~own[..., None], 0)  # [B, T, D] P
        return self.border.leave(found)


def local_words(words: Tensor, start: int, count: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return row numbers in a table of `count` words from `start` on, and which `words` it has.

    The first rank also takes words below 0, the last rank words beyond the vocabulary. So their
    look-up fails as on one device. Otherwise all ranks would add zero, without an error.
    """
    own = torch.ones_like(words, dtype=torch.bool)
    if axis.rank > 0:
        own &= words >= start
    if axis.rank < axis.size - 1:
        own &= words < start + count
    return (words - start).masked_fill(~own, 0), own


def vocab_loss(logits: Tensor, targets: Tensor, axis: Axis, start: int) -> Tensor:
    """Sum the cross entropies for logits [..., V/n] V of the words from `start` on: a scalar I.

    No rank ever sees all logits. With m the largest logit, so that exp does not overflow,
    -log p = log(sum exp(logit - m)) - (logit_target - m). So ranks exchange three numbers per
    token: m, the sum of exponentials, and the target's logit (zero on ranks without the target).
    Ranks compute in fp32 at least. The only copy of the logits holds the exponentials.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = collectives.all_reduce(wide.detach().amax(-1), axis, "max")
    ignored = targets == IGNORE_INDEX
    rows, own = local_words(targets.masked_fill(ignored, 0), start, logits.shape[-1], axis)
    # An index, and not `gather`: the backward of `gather` would keep the logits.
    tokens = torch.arange(rows.numel(), device=rows.device)
    found = wide.reshape(-1, wide.shape[-1])[tokens, rows.flatten()].view_as(rows) - largest
    subtract = wide.sub if wide is logits else wide.sub_  # the caller's logits stay as they are
    exponentials = subtract(largest[..., None]).exp_()
    parts = torch.stack([exponentials.sum(-1), found.masked_fill(~own, 0)])  # [2, ...] P
    sum_exp, target_logit = all_reduce(parts, axis, to="I")
    return (sum_exp.log() - target_logit).masked_fill(ignored, 0).sum()
