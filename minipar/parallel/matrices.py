"""Matrices that are cut over an axis: who has which piece; columns and rows, vocabulary and loss.

Types along the axis as in comm/autograd.py. Parts of tensor.py, which puts them into a model."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.autograd import all_gather, all_reduce, convert, reduce_scatter
from minipar.comm.mesh import Axis
from minipar.model.llama import IGNORE_INDEX


@dataclass(frozen=True)
class Pieces:
    """How a tensor is cut: rank r has ``start, stop = spans[r]`` of `dim`; equals are copies.

    Where two matrices lie one above the other along `dim`, it has that of each of these `blocks`.
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    blocks: int = 1

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of the piece of `rank`."""
        start, stop = self.spans[rank]
        rows = whole.movedim(self.dim, 0).unflatten(0, (self.blocks, -1))[:, start:stop]
        return rows.flatten(0, 1).movedim(0, self.dim).clone(memory_format=torch.contiguous_format)

    def ranges(self, length: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Return where along `dim`, of `length`, the piece of `rank` comes from: once per block."""
        (start, stop), block = self.spans[rank], length // self.blocks
        return tuple((at + start, at + stop) for at in range(0, length, block))

    def join(self, piece: Tensor, axis: Axis) -> Tensor:
        """Put the pieces of all ranks together, V -> I; they may be of different width."""
        if self.blocks > 1:
            parts = piece.chunk(self.blocks, self.dim)
            one = replace(self, blocks=1)
            return torch.cat([one.join(part, axis) for part in parts], self.dim)
        piece = piece.movedim(self.dim, 0)
        widest = max(stop - start for start, stop in self.spans)
        padding = piece.new_zeros(widest - len(piece), *piece.shape[1:])
        rows = all_gather(torch.cat([piece, padding]), axis, to="I").unflatten(0, (axis.size, -1))
        first_of_each = dict(zip(self.spans, rows, strict=True))
        joined = [row[: stop - start] for (start, stop), row in first_of_each.items()]
        return torch.cat(joined).movedim(0, self.dim).contiguous()


def evenly(dim: int, length: int, n: int) -> Pieces:
    """Cut `length` into n pieces; where n does not divide it, their widths differ by one."""
    return Pieces(dim, tuple((r * length // n, (r + 1) * length // n) for r in range(n)))


def by_heads(dim: int, num_heads: int, head_dim: int, n: int) -> Pieces:
    """Cut into n pieces of whole heads; with fewer heads than ranks, neighbours have the same."""
    if n <= num_heads:
        return evenly(dim, num_heads * head_dim, n)
    heads = [r * num_heads // n for r in range(n)]
    return Pieces(dim, tuple((head * head_dim, (head + 1) * head_dim) for head in heads))


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


class RowLinear(nn.Module):
    """The second of two matrices. Its bias, which is whole, is added once: after the sum (T14).

    The first needs no class: a linear layer with fewer rows does the same on less.
    """

    multiply = staticmethod(F.linear)  # a pipeline's puts the gradient of the weight off

    def __init__(self, linear: nn.Linear, border: Border) -> None:
        super().__init__()
        self.weight, self.bias, self.border = linear.weight, linear.bias, border

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, F/n] V -> [B, T, D] I, or [B, T/n, D] V."""
        out = self.border.leave(self.multiply(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabEmbedding(nn.Module):
    """Rows of the table: the words from `start` on. Any other word is another rank's."""

    def __init__(self, embedding: nn.Embedding, start: int, border: Border) -> None:
        super().__init__()
        self.weight, self.start, self.border = embedding.weight, start, border

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] I -> [B, T, D] I, or [B, T/n, D] V."""
        rows, own = local_words(tokens, self.start, len(self.weight), self.border.axis)
        found = F.embedding(rows, self.weight).masked_fill(~own[..., None], 0)  # [B, T, D] P
        return self.border.leave(found)


class VocabHead(nn.Module):
    """Logits of this rank's words; of all words, where no gradient is wanted."""

    multiply = staticmethod(F.linear)  # as of `RowLinear`

    def __init__(self, linear: nn.Linear, words: Pieces, border: Border) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.words, self.border = words, border

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] I, or [B, T/n, D] V -> [B, T, V/n] V, or [B, T, V] I under `no_grad`."""
        logits = self.multiply(self.border.enter(x), self.weight)
        logits = logits if self.bias is None else logits + self.bias
        return logits if torch.is_grad_enabled() else self.words.join(logits, self.border.axis)


def local_words(words: Tensor, start: int, count: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Rows of a table that holds `count` words from `start` on, and which of `words` it has.

    What is no word at all is left to the first and the last rank, whose look-up then fails as it
    would on one device, instead of finding nothing anywhere.
    """
    own = torch.ones_like(words, dtype=torch.bool)
    if axis.rank > 0:
        own &= words >= start
    if axis.rank < axis.size - 1:
        own &= words < start + count
    return (words - start).masked_fill(~own, 0), own


def vocab_loss(
    logits: Tensor, targets: Tensor, axis: Axis, start: int, *, z_loss: float = 0.0
) -> Tensor:
    """Sum of the cross entropies for logits [..., V/n] V of the words from `start` on: a scalar I.

    No rank ever sees all logits. With m the largest of them (it only keeps exp from overflowing),
    -log p = log(sum exp(logit - m)) - (logit_target - m): ranks exchange m, the sum of exponentials
    and the target's logit, which one rank has and the others count as zero. In fp32 at least, of
    which there is one copy of the logits: the exponentials.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = collectives.all_reduce(wide.detach().amax(-1), axis, "max")
    ignored = targets == IGNORE_INDEX
    rows, own = local_words(targets.masked_fill(ignored, 0), start, logits.shape[-1], axis)
    # Not by `gather`, whose backward would want the logits as they are now.
    tokens = torch.arange(rows.numel(), device=rows.device)
    found = wide.reshape(-1, wide.shape[-1])[tokens, rows.flatten()].view_as(rows) - largest
    subtract = wide.sub if wide is logits else wide.sub_  # the caller's stay as they are
    exponentials = subtract(largest[..., None]).exp_()
    parts = torch.stack([exponentials.sum(-1), found.masked_fill(~own, 0)])  # [2, ...] P
    sum_exp, target_logit = all_reduce(parts, axis, to="I")
    log_sum = sum_exp.log()
    losses = log_sum - target_logit + z_loss * (log_sum + largest).square()
    return losses.masked_fill(ignored, 0).sum()
