"""The learning rate, and AdamW."""

import math
from collections.abc import Callable

import torch
from torch import nn

from minipar.parallel.base.shards import region_of

FINAL = 0.1  # of the peak: the learning rate at the end


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 0): a line up to `peak`, half a cosine down.

    The rate is exactly peak / warmup_steps at step 0 (0 would waste that step), peak at step
    warmup_steps - 1 (with warmup_steps=0: at step 0), and a tenth of the peak at step
    total_steps - 1 and after. A warm-up as long as the run ends at peak.

    Source: Loshchilov & Hutter, SGDR (arXiv 1608.03983), eq. 5, one period.
    """
    top = max(warmup_steps - 1, 0)  # the step that has the peak
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    progress = min((step - top) / max(total_steps - 1 - top, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2
    return peak * (FINAL + (1 - FINAL) * height)


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """Return AdamW over the parameters that learn: matrices with weight decay, vectors without.

    Vectors are norm scales and biases, and decay costs them quality. A strategy that stores a
    matrix as a flat piece keeps its shape in `param.region`. A tied parameter appears once, a
    frozen one not at all. `make` takes the arguments of the class and returns an optimizer, such as
    a `ShardedOptimizer` of zero.py. Raises `ValueError` when nothing is left to train.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), alg. 2.
    """
    decayed, plain = [], []
    for param in model.parameters():  # yields a tied parameter once
        if param.requires_grad:
            is_matrix = len(region_of(param).shape) >= 2
            (decayed if is_matrix else plain).append(param)
    both = (decayed, weight_decay), (plain, 0.0)
    groups = [{"params": params, "weight_decay": decay} for params, decay in both if params]
    if not groups:
        raise ValueError("the model has no parameter to train: all of them are frozen")
    # A fused step is one kernel per group, instead of a dozen kernels per parameter.
    fused = all(param.device.type in ("cpu", "cuda") for param in decayed + plain)
    return make(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)
