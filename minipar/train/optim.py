"""Learning-rate schedules and AdamW.

Proved by: tests/train/test_optim.py.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from minipar.parallel.base.shards import full_shape

# ------------------------------------------------------------------------------------- schedules


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1
) -> float:
    """Learning rate of `step` (from 0): a straight line up to `peak`, half a cosine down.

    Exactly peak / warmup_steps at step 0 (never zero: that step would be wasted), peak at step
    warmup_steps - 1 (with warmup_steps=0: at step 0), peak * final_fraction at step
    total_steps - 1 and after. A warm-up as long as the run ends at peak.

    Source: Loshchilov & Hutter, SGDR (arXiv 1608.03983), eq. 5, one period; raises ValueError.
    """
    _check(step, peak, warmup_steps, total_steps, final_fraction)
    top = max(warmup_steps - 1, 0)  # the step that has the peak
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    if step == top:
        return peak
    progress = min((step - top) / max(total_steps - 1 - top, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2
    return peak * (final_fraction + (1 - final_fraction) * height)


def warmup_stable_decay(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
    final_fraction: float = 0.1,
) -> float:
    """Learning rate of `step` (from 0): a line up to `peak`, a plateau, a line down at the end.

    The plateau does not depend on total_steps: a run can be prolonged from any point of it, and a
    decay branched off wherever a finished model is wanted. Exactly peak / warmup_steps at step 0,
    peak from step warmup_steps - 1 to step total_steps - decay_steps - 1, peak * final_fraction at
    step total_steps - 1 and after. With decay_steps=0 the plateau has no end.

    Source: MiniCPM (arXiv 2404.06395), section 4; it leaves the shape of the decay open, and a
    straight line is the simplest. Raises ValueError.
    """
    _check(step, peak, warmup_steps, total_steps, final_fraction)
    if decay_steps < 0 or warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"decay_steps={decay_steps} does not fit beside warmup_steps={warmup_steps} into "
            f"total_steps={total_steps}; use 0 to {total_steps - warmup_steps}"
        )
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    steps_down = step - (total_steps - decay_steps - 1)
    if decay_steps == 0 or steps_down <= 0:
        return peak
    progress = min(steps_down / decay_steps, 1.0)
    return peak * (final_fraction * progress + (1 - progress))


def _check(
    step: int, peak: float, warmup_steps: int, total_steps: int, final_fraction: float
) -> None:
    if step < 0:
        raise ValueError(f"step={step} is negative; the first step is 0")
    if not 0 < peak < math.inf:
        raise ValueError(f"peak={peak} is no learning rate; use a positive number such as 3e-4")
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be 1 or more")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} does not fit into total_steps={total_steps}; "
            f"use 0 to {total_steps}"
        )
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction} is not in [0, 1]; try 0.1")


# ------------------------------------------------------------------------------------- optimizer


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """AdamW over the parameters that learn: matrices with weight decay, vectors without.

    Norm scales and biases are vectors; pulling them towards zero costs quality and regularises
    nothing. A strategy that stores a matrix as a flat piece says what it was in
    `param.full_shape`. A tied parameter appears once, a frozen one not at all. Raises ValueError
    when nothing is left to train. `make` is called as the class would be: a `ShardedOptimizer` of
    zero.py, say.

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


def names_in_order(model: nn.Module) -> list[str]:
    """Return the names of the parameters in the order in which `make_optimizer` counts them."""
    names = {param: name for name, param in model.named_parameters()}
    groups = make_optimizer(model, lr=1.0, weight_decay=0.0).param_groups
    return [names[param] for group in groups for param in group["params"]]
