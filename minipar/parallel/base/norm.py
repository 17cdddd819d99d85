"""The gradient norm of a model that is spread over a mesh.

Clipping scales every gradient by one number that comes from the norm of *all*
gradients. A rank sees only a part, and there are two ways to get the sum of squares wrong: to leave
out pieces that other ranks hold (tensor, pipeline, expert and fully sharded parameters), or to add
up copies (replicated parameters counted once per rank). So each parameter says over which axes its
gradient is cut into pieces:

    param.shard_axes = (mesh.tp,)            set by the strategy that cut it; absent: replicated

and its sum of squares is added over exactly these axes, no others. A parameter that is whole here
but exists on this pipeline stage only is a piece along `pp`.

Comms.  One all-reduce of 2^(k-1) numbers per axis, for k axes. The caller names the axes
(`axes=(mesh.tp, mesh.pp)`), and the calls depend on these alone: a rank that holds no parameter or
no gradient of some kind issues the same calls in the same order as all others, so it cannot leave
them waiting.

In torch: `torch.nn.utils.clip_grad_norm_`, which for plain tensors sees one rank alone.
Proved by: tests/train/test_optim.py.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.parallel.base.shards import axes_of, is_copy


def grad_norm(
    parameters: Iterable[Tensor],
    axes: Iterable[Axis] = (),
    device: torch.device | None = None,
) -> Tensor:
    """2-norm of all gradients of the model, a float64 scalar on `device`, equal on all ranks.

    `axes`: every axis over which any rank's parameter is cut (more do no harm), in the same order
    on all ranks; collective over them. A parameter without gradient adds nothing, one listed twice
    counts once, and no gradient at all is a norm of 0. A parameter with `param.is_copy` adds
    nothing either: it stands for one that another rank of the same axis counts, as the tied
    embedding on the last pipeline stage does for the one on the first.

    `device`: that which computes and sends; by default the parameters', but these may be offloaded.

    Raises ValueError when a parameter is cut over an axis that `axes` does not name.
    """
    parameters, axes = _unique(parameters), tuple(axes)
    if device is None:
        device = parameters[0].device if parameters else torch.device("cpu")
    grads: dict[tuple, list[Tensor]] = defaultdict(list)
    for param in parameters:
        if param.grad is not None and not is_copy(param):
            # squares of half precision are summed in float32
            dtype = torch.promote_types(param.grad.dtype, torch.float32)
            grads[cut_over(param, axes), dtype, param.grad.device].append(param.grad)

    # sums[1, 0]: cut over the first axis, whole along the second. Always float64, because all ranks
    # must send the same type, and one without parameters could not guess it.
    sums = torch.zeros((2,) * len(axes), dtype=torch.float64, device=device)
    for (is_cut, dtype, _), tensors in grads.items():
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
        sums[is_cut] += norms.double().square().sum().to(device)
    for dim, axis in enumerate(axes):
        cut = sums.select(dim, 1)  # the half of the table that is cut over this axis
        cut.copy_(all_reduce(cut.contiguous(), axis))
    return sums.sum().sqrt()


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    axes: Iterable[Axis] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; the norm before.

    `parameters`, `axes`, `device` and errors as in `grad_norm`. The factor comes from the global
    norm, so it is the same on every rank. A norm that is not finite is returned as it is and the
    gradients stay untouched, so that the caller can skip the step (torch would turn all of them
    into NaN). `max_norm=math.inf` only measures. Waits for the device only where gradients are
    elsewhere.

    Source: Pascanu, Mikolov & Bengio (arXiv 1211.5063), algorithm 1. Raises ValueError for a
    max_norm that is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; use math.inf not to clip")
    parameters = _unique(parameters)
    norm = grad_norm(parameters, axes, device)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch: no division by zero
    factor = torch.where(norm.isfinite(), factor, 1.0)
    grads: dict[tuple, list[Tensor]] = defaultdict(list)
    for param in parameters:
        if param.grad is not None:
            grads[param.grad.device, param.grad.dtype].append(param.grad)
    for (home, dtype), tensors in grads.items():
        torch._foreach_mul_(tensors, factor.to(home, torch.promote_types(dtype, torch.float32)))
    note_reduced(parameters)
    return norm


# ---------------------------------------------------------------------- shards that others changed
def note_reduced(parameters: Iterable[Tensor]) -> None:
    """Remember how often the gradient of each shard has been written to by now."""
    for param in parameters:
        if axes_of(param):
            param.reduced = None if param.grad is None else param.grad._version


def check_unchanged(parameters: Iterable[Tensor]) -> None:
    """Raise `RuntimeError` where a gradient has been written to since `note_reduced`.

    Such as by torch's `clip_grad_norm_`, which takes the norm of this rank's shard for the norm.
    """
    for param in parameters:
        if param.grad is not None and getattr(param, "reduced", None) not in (
            None,
            param.grad._version,
        ):
            raise RuntimeError(
                "gradients have changed since finish_backward(), and this rank has shards of them: "
                "torch's clip_grad_norm_ would see these alone, so use strategy.clip_grad_norm_; "
                "with GradScaler, call strategy.unscale_(scaler, optimizer) before its step; after "
                "a change that looks at each number alone, call strategy.note_reduced()"
            )


def _unique(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, by identity (`==` of tensors compares elements)."""
    return list({id(param): param for param in parameters}.values())


def cut_over(param: Tensor, axes: Collection[Axis]) -> tuple[int, ...]:
    """One 1 or 0 for each of `axes`: is the gradient of this parameter cut over it?

    Raises `ValueError` where it is cut over another.
    """
    names = {axis.name for axis in axes_of(param) if axis.size > 1}
    if unknown := names - {axis.name for axis in axes}:
        raise ValueError(
            f"a gradient of shape {tuple(param.shape)} is cut over {', '.join(sorted(unknown))}; "
            "name each such axis in axes= on all ranks"
        )
    return tuple(int(axis.name in names) for axis in axes)
