"""Backward in two halves: the gradient of the input now, the gradients of the weights later.

Idea:   y = x Wᵀ has two gradients, dx = dy W and dW = dyᵀ x. The stage before waits for dx, but no
        rank waits for dW. So a schedule may put dW where a rank would be idle. Each half costs as
        much as a forward.
How:    Linear layers of a stage get a backward of their own. While a list for put-off work is
        open, backward returns dx and adds a job for dW, with this x and this dy, to the list; else
        it returns both. Gradients of other weights (scales of norms, the embedding) are little
        work: I computes them with dx, and the list gets the finished gradients.
Where:  Gradients reach ``p.grad`` through `torch.autograd.backward(p, dW)`. So the gradient hooks
        of data parallelism see W as the backward of a weight.
Memory: x and dy of every linear layer live until W, the rest of the graph until I.
Source: Qi et al. 2023 (2401.10241), section 2. In torch: `torch.distributed.pipelining._backward`,
        which finds the two halves in the graph of any stage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Job = tuple[nn.Parameter, Callable[[], Tensor]]


_open: list[Job] | None = None
"""The open list of put-off work; None if no list is open."""


@contextmanager
def put_off(jobs: list[Job]) -> Iterator[None]:
    """In the body, add the weight gradients of a backward to the list `jobs`, for later."""
    global _open
    _open = jobs
    try:
        yield
    finally:
        _open = None


def do(jobs: list[Job]) -> None:
    """Compute the weight gradients of a list and add them up. Free each input after its use."""
    while jobs:
        weight, job = jobs.pop(0)
        torch.autograd.backward(weight, job())


# ---------------------------------------------------------------------- layers that can wait
def weight_gradient(x: Tensor, dy: Tensor, weight: nn.Parameter) -> Tensor:
    """Return dW = dyᵀ x, summed over all tokens: [F, D] from x [..., D] and dy [..., F]."""
    dw = dy.flatten(0, -2).mT @ x.flatten(0, -2).to(dy.dtype)
    return dw.to(weight.dtype)


class _Split(torch.autograd.Function):
    """x Wᵀ; dW goes to the open list.

    The weight is not a saved tensor, because activation checkpointing would return a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_dx, needs_dw = ctx.needs_input_grad
        dx = dy @ weight.to(dy.dtype) if needs_dx else None
        if needs_dw and _open is not None:
            _open.append((weight, partial(weight_gradient, x, dy, weight)))
            needs_dw = False
        return dx, weight_gradient(x, dy, weight) if needs_dw else None


def enable(model: nn.Module) -> None:
    """Make linear layers of a Llama put off their weight gradients, in place.

    Modules with another forward stay as they are; then I computes their gradients, and W has less
    to do.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_forward, module)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return _Split.apply(x, module.weight)
