"""The learning rate, and AdamW.

Proved by: tests/train/test_optim.py.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from minipar.parallel.base.shards import full_shape


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1
) -> float:
    """Return the learning rate of `step` (from 0): a line up to `peak`, half a cosine down.

    Exactly peak / warmup_steps at step 0 (never zero: that step would be wasted), peak at step
    warmup_steps - 1 (with warmup_steps=0: at step 0), peak * final_fraction at step
    total_steps - 1 and after. A warm-up as long as the run ends at peak.

    Source: Loshchilov & Hutter, SGDR (arXiv 1608.03983), eq. 5, one period. Raises `ValueError` for
    numbers that do not fit together.
    """
    for good, says in (
        (step >= 0, f"step={step} is negative; the first step is 0"),
        (0 < peak < math.inf, f"peak={peak} is no learning rate; use a number such as 3e-4"),
        (total_steps >= 1, f"total_steps={total_steps} must be 1 or more"),
        (0 <= warmup_steps <= total_steps, f"warmup_steps={warmup_steps}: use 0 to {total_steps}"),
        (0 <= final_fraction <= 1, f"final_fraction={final_fraction} is not in [0, 1]; try 0.1"),
    ):
        if not good:
            raise ValueError(says)
    top = max(warmup_steps - 1, 0)  # the step that has the peak
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    if step == top:
        return peak
    progress = min((step - top) / max(total_steps - 1 - top, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2
    return peak * (final_fraction + (1 - final_fraction) * height)


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """Return AdamW over the parameters that learn: matrices with weight decay, vectors without.

    Vectors are norm scales and biases, and decay costs them quality. A strategy that stores a
    matrix as a flat piece keeps its shape in `param.full_shape`. A tied parameter appears once, a
    frozen one not at all. `make` is called as the class would be: a `ShardedOptimizer` of zero.py,
    say. Raises `ValueError` when nothing is left to train.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), alg. 2.
    """
    decayed, plain = [], []
    for param in model.parameters():  # yields a tied parameter once
        if param.requires_grad:
            is_matrix = len(full_shape(param)) >= 2
            (decayed if is_matrix else plain).append(param)
    if not decayed and not plain:
        raise ValueError("the model has no parameter to train: all of them are frozen")
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # one kernel per group instead of a dozen per parameter, where torch has one
    fused = all(param.device.type in ("cpu", "cuda") for param in decayed + plain)
    return make(groups, lr=lr, betas=betas, eps=eps, fused=fused)
