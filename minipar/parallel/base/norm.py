"""The gradient norm of a model that is spread over a mesh.

Idea.   Clipping scales every gradient by one number, which comes from the norm of *all* gradients.
        Two mistakes are easy: to leave out the shards of other ranks, and to add up copies. So each
        parameter names the axes over which it is cut (``shard_axes``), and its sum of squares is
        added over exactly these. A parameter of one pipeline stage is a shard along `pp`.
Comms.  One all-reduce of 2^(k-1) numbers per axis, for k axes. The calls depend on the named axes
        alone: a rank without a parameter of some kind makes the same calls.
In torch: `torch.nn.utils.clip_grad_norm_`, which for plain tensors sees one rank alone.
Source. Pascanu, Mikolov & Bengio (arXiv 1211.5063), algorithm 1.
Proved by tests/train/test_optim.py.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.parallel.base.shards import axes_of


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    axes: Iterable[Axis] = (),
    device: torch.device | str = "cpu",
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    The norm is the 2-norm of all gradients of the model: a float64 scalar, equal on all ranks.
    Where it is not finite, gradients stay as they are.

    Args:
        parameters: a parameter listed twice counts once. A parameter with `is_copy` adds nothing to
            the norm: another rank of the same axis counts its numbers.
        max_norm: positive; ``math.inf`` only measures.
        axes: every axis over which any rank's parameter is cut, in the same order on all ranks.
        device: the device that computes; parameters may be offloaded.

    A collective over `axes`. Raises `ValueError` for a parameter that is cut over another axis, and
    unless `max_norm` is positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; use math.inf not to clip")
    parameters, axes, grads = list(dict.fromkeys(parameters)), tuple(axes), defaultdict(list)
    for param in parameters:
        if param.grad is not None:
            is_copy = getattr(param, "is_copy", False)
            kind = cut_over(param, axes), is_copy, param.grad.dtype, param.grad.device
            grads[kind].append(param.grad)

    # sums[1, 0]: cut over the first axis, whole along the second. Always float64: all ranks must
    # send the same dtype, and a rank without parameters cannot know another one.
    sums = torch.zeros((2,) * len(axes), dtype=torch.float64, device=device)
    for (is_cut, is_copied, dtype, _), tensors in grads.items():
        if not is_copied:  # squares of half precision are summed in float32
            norms = torch._foreach_norm(tensors, 2, dtype=torch.promote_types(dtype, torch.float32))
            sums[is_cut] += torch.stack(norms).double().square().sum().to(device)
    for dim, axis in enumerate(axes):
        cut = sums.select(dim, 1)  # the half of the table that is cut over this axis
        cut.copy_(all_reduce(cut.contiguous(), axis))
    norm = sums.sum().sqrt()

    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch: no division by zero
    factor = torch.where(norm.isfinite(), factor, 1.0)
    for (*_, dtype, home), tensors in grads.items():
        torch._foreach_mul_(tensors, factor.to(home, torch.promote_types(dtype, torch.float32)))
    note_reduced(parameters)
    return norm


# ---------------------------------------------------------------------- shards that others changed
def note_reduced(parameters: Iterable[Tensor]) -> None:
    """Remember the version of each shard's gradient: it counts the writes so far."""
    for param in parameters:
        if axes_of(param):
            param.reduced = None if param.grad is None else param.grad._version


def check_unchanged(parameters: Iterable[Tensor]) -> None:
    """Raise `RuntimeError` if a gradient was written to after `note_reduced`.

    torch's `clip_grad_norm_` does so: it clips by the norm of this rank's shards alone.
    """
    for param in parameters:
        noted = getattr(param, "reduced", None)
        if noted is not None and param.grad is not None and noted != param.grad._version:
            how = "clip them by strategy.clip_grad_norm_, or call note_reduced() after your change"
            raise RuntimeError(f"shards of gradients have changed since finish_backward(): {how}")


def cut_over(param: Tensor, axes: Collection[Axis]) -> tuple[int, ...]:
    """Return 1 for each of `axes` over which the gradient of `param` is cut, else 0.

    Raises `ValueError` if the gradient is cut over another axis.
    """
    names = {axis.name for axis in axes_of(param) if axis.size > 1}
    if unknown := names - {axis.name for axis in axes}:
        over = ", ".join(sorted(unknown))
        raise ValueError(f"a gradient is cut over {over}; name each such axis in axes= of all")
    return tuple(int(axis.name in names) for axis in axes)
