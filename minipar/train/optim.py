"""Learning-rate schedules, AdamW, and the gradient norm of a model that is spread over a mesh.

**The norm.** Clipping scales every gradient by one number that comes from the norm of *all*
gradients. A rank sees only a part, and there are two ways to get the sum of squares wrong: to leave
out pieces that other ranks hold (tensor, pipeline, expert and fully sharded parameters), or to add
up copies (replicated parameters counted once per rank). So each parameter says over which axes its
gradient is cut into pieces:

    param.shard_axes = (mesh.tp,)            set by the strategy that cut it; absent: replicated

and its sum of squares is added over exactly these axes, no others. A parameter that is whole here
but exists on this pipeline stage only is a piece along `pp`.

**Comms.** One all-reduce of 2^(k-1) numbers per axis, for k axes. The caller names the axes
(`axes=(mesh.tp, mesh.pp)`), and the calls depend on these alone: a rank that holds no parameter or
no gradient of some kind issues the same calls in the same order as all others, so it cannot leave
them waiting.

In torch: `torch.nn.utils.clip_grad_norm_`, which for plain tensors sees one rank alone.
Proved by: tests/train/test_optim.py.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis

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
            is_matrix = len(getattr(param, "full_shape", param.shape)) >= 2
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


# ------------------------------------------------------------------------- norm over the mesh


def grad_norm(parameters: Iterable[Tensor], axes: Iterable[Axis] = ()) -> Tensor:
    """2-norm of all gradients of the model, a float64 scalar on their device, equal on all ranks.

    `axes`: every axis over which any rank's parameter is cut (more do no harm), in the same order
    on all ranks; collective over them. A parameter without gradient adds nothing, one listed twice
    counts once, and no gradient at all is a norm of 0. A parameter with `param.is_copy` adds
    nothing either: it stands for one that another rank of the same axis counts, as the tied
    embedding on the last pipeline stage does for the one on the first.

    Raises ValueError when a parameter is cut over an axis that `axes` does not name.
    """
    parameters, axes = _unique(parameters), tuple(axes)
    device = parameters[0].device if parameters else torch.device("cpu")
    grads: dict[tuple, list[Tensor]] = defaultdict(list)
    for param in parameters:
        if param.grad is not None and not getattr(param, "is_copy", False):
            # squares of half precision are summed in float32
            dtype = torch.promote_types(param.grad.dtype, torch.float32)
            grads[_is_cut(param, axes), dtype].append(param.grad)

    # sums[1, 0]: cut over the first axis, whole along the second. Always float64, because all ranks
    # must send the same type, and one without parameters could not guess it.
    sums = torch.zeros((2,) * len(axes), dtype=torch.float64, device=device)
    for (is_cut, dtype), tensors in grads.items():
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
        sums[is_cut] += norms.double().square().sum()
    for dim, axis in enumerate(axes):
        cut = sums.select(dim, 1)  # the half of the table that is cut over this axis
        cut.copy_(all_reduce(cut.contiguous(), axis))
    return sums.sum().sqrt()


def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, axes: Iterable[Axis] = ()
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; the norm before.

    `parameters`, `axes` and errors as in `grad_norm`. The factor comes from the global norm, so it
    is the same on every rank. A norm that is not finite is returned as it is and the gradients stay
    untouched, so that the caller can skip the step (torch would turn all of them into NaN).
    `max_norm=math.inf` only measures. Never waits for the device.

    Source: Pascanu, Mikolov & Bengio (arXiv 1211.5063), algorithm 1. Raises ValueError for a
    max_norm that is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; use math.inf not to clip")
    parameters = _unique(parameters)
    norm = grad_norm(parameters, axes)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch: no division by zero
    factor = torch.where(norm.isfinite(), factor, 1.0)
    grads: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for param in parameters:
        if param.grad is not None:
            grads[param.grad.dtype].append(param.grad)
    for dtype, tensors in grads.items():
        torch._foreach_mul_(tensors, factor.to(torch.promote_types(dtype, torch.float32)))
    return norm


def _unique(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, by identity (`==` of tensors compares elements)."""
    return list({id(param): param for param in parameters}.values())


def _is_cut(param: Tensor, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """One 1 or 0 for each of `axes`: is the gradient of this parameter cut over it?"""
    names = {axis.name for axis in getattr(param, "shard_axes", ()) if axis.size > 1}
    if unknown := names - {axis.name for axis in axes}:
        raise ValueError(
            f"a gradient of shape {tuple(param.shape)} is cut over {', '.join(sorted(unknown))}; "
            "name each such axis in axes= on all ranks"
        )
    return tuple(int(axis.name in names) for axis in axes)
