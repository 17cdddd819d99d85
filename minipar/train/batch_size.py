"""The batch size of a step: from a given ramp, or from the measured noise of the gradients.

Idea.   The gradient of a batch is the gradient of all data plus noise, which shrinks as the batch
        grows. While most of the gradient is noise, twice the batch is worth nearly two steps. Once
        noise is small, a larger batch only costs time. The true gradient fades during training and
        noise stays, so the batch that pays off grows.
Math.   For a batch of B tokens, E|G_B|^2 = |G|^2 + tr(S)/B, with G the true gradient and S the
        covariance of the gradient of one token. Two sizes of batch give two equations, and data
        parallelism has both sizes: each rank's own gradient, and the sum over ranks. The *noise
        scale* tr(S) / |G|^2 is a number of tokens: the batch at which noise and signal are equal.
        Rank r has n_r of the N tokens of a step. Its gradient, already divided by N, is g_r, so
        G_r = g_r N/n_r is its own mean, and over the k ranks that have any tokens
            sum_r (n_r/N) |G_r|^2 = sum_r (N/n_r) |g_r|^2,  of expectation |G|^2 + tr(S) k/N:
        the value for a batch of N/k tokens, exactly, even with uneven shares.
Assumed. Samples of all ranks are drawn alike, and gradients are summed exactly: compression adds an
        error of its own to the larger batch.
Comms.  No call of its own: `train_step` sends two more numbers in the all-reduce of the loss, 16
        bytes per step. ddp sums the gradients of other ranks into this rank's gradient in place, so
        `NoiseScale.watch` computes the norm of a bucket just before ddp sends the bucket.
Rate.   Adam divides a gradient by its own size, noise included; so the learning rate grows with
        the square root of the batch. For SGD it is linear, up to the noise scale.
Source. McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162),
        section 2.2 and appendix A.1. Square root: Malladi et al. 2022, "On the SDEs and Scaling
        Rules for Adaptive Gradient Algorithms" (arXiv 2205.10343). Linear: Goyal et al. 2017
        (arXiv 1706.02677).
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from minipar.comm.calls import Pending
from minipar.comm.collectives import Op
from minipar.comm.mesh import Axis, whole_number
from minipar.parallel import ddp

Ramp = list[tuple[int, int]]  # (step, the batch size from there on), in order of the steps
RateRule = Literal["sqrt", "linear", "fixed"]
_POWERS = {"sqrt": 0.5, "linear": 1.0, "fixed": 0.0}


# ---------------------------------------------------------------------- 1. by a ramp
def parse_ramp(text: str) -> Ramp:
    """Return [(100, 64), (200, 128)] for "64@100,128@200".

    Raises `ValueError` unless `text` is a list of such pairs with steps that rise from 1 up.
    """
    ramp: Ramp = []
    for part in text.replace(" ", "").split(","):
        size, _, step = part.partition("@")
        pair = whole_number(step), whole_number(size)
        previous = ramp[-1][0] if ramp else 0
        if None in pair or pair[1] < 1 or pair[0] <= previous:
            raise ValueError(f"ramp {text!r}: {part!r} is not like 64@100, with rising steps")
        ramp.append(pair)
    return ramp


def ramped(step: int, batch_size: int, ramp: Ramp) -> int:
    """Return the batch size of `step` (from 0) of a run that begins with `batch_size`."""
    return [batch_size, *(size for start, size in ramp if start <= step)][-1]


def lr_factor(rule: RateRule, batch_size: int, first: int) -> float:
    """Return the factor for a learning rate that fits batches of `first` sequences."""
    return (batch_size / first) ** _POWERS[rule]


def microbatches_of(batch_size: int, first: int, first_microbatches: int, num_ranks: int) -> int:
    """Return the number of microbatches of each rank that keeps their size as at the beginning.

    At first, a step has `first` sequences, in `first_microbatches` on each of `num_ranks` ranks.
    """
    rows = math.ceil(first / (num_ranks * first_microbatches))  # of one microbatch
    return math.ceil(batch_size / (num_ranks * rows))


# ---------------------------------------------------------------------- 2. by the noise
class NoiseScale:
    """Estimates the gradient noise scale from what data parallelism computes anyhow::

        noise = NoiseScale()
        strategy = ddp.apply(model, mesh.dp, average=False, reduce=noise.watch())
        result = train_step(..., noise=noise)
        noise.update(result.noise.tolist(), result.num_tokens.item(), result.grad_norm.item())
        noise.tokens                   # the noise scale

    The estimate of one step is noisy. So numerator and denominator are averaged over steps, each by
    itself, with weights that fall by the factor `decay` per step. The ratio of the two averages has
    no bias to first order; an average of ratios has one (appendix A.1).
    """

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.signal = self.trace = 0.0  # averages of |G|^2 and of tr(S)
        self._own_square: Tensor | float = 0.0

    def watch(self) -> ddp.Reduce:
        """Return a `reduce` for `ddp.apply` that notes a bucket's norm, then all-reduces it."""

        def watched(bucket: ddp.Bucket, axis: Axis, op: Op) -> Pending:
            dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
            norm = torch.linalg.vector_norm(bucket.flat, dtype=dtype)
            self._own_square = self._own_square + norm.double().square()
            return ddp.all_reduce_bucket(bucket, axis, op)

        return watched

    def own_numbers(self, own_tokens: Tensor, num_tokens: Tensor, loss_scale: Tensor) -> Tensor:
        """Return the numbers to add up over the ranks, [2]: N/n |g|^2, and 1; zeros without tokens.

        The watched gradients are still multiplied by `loss_scale`; here it is divided out.
        """
        square = self._own_square / loss_scale.double().square()
        self._own_square = 0.0
        has_tokens = (own_tokens > 0).double()
        weight = num_tokens.double() / own_tokens.clamp(min=1) * has_tokens
        return torch.stack([weight * square, has_tokens])

    def update(self, sums: Sequence[float], num_tokens: float, grad_norm: float) -> None:
        """Take in a step: the summed `own_numbers`, its tokens, its norm before clipping.

        A step that tells nothing (one rank had all tokens, or a gradient overflowed) is left out.
        """
        small_square, num_ranks = sums
        large_square = grad_norm**2
        if num_ranks < 2 or not math.isfinite(small_square + large_square):
            return
        small, large = num_tokens / num_ranks, num_tokens
        signal = (large * large_square - small * small_square) / (large - small)
        trace = (small_square - large_square) / (1 / small - 1 / large)
        # Both start at 0 and so are too small at first, by the same factor: their ratio is right.
        self.signal += (1 - self.decay) * (signal - self.signal)
        self.trace += (1 - self.decay) * (trace - self.trace)

    @property
    def tokens(self) -> float:
        """Return the noise scale in tokens; nan while an estimated average is not positive."""
        return self.trace / self.signal if self.signal > 0 and self.trace > 0 else math.nan
