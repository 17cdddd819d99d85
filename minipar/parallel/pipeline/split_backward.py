"""Backward in two halves: the gradient of the input now, the gradients of the weights later.

Idea:   y = x Wᵀ has two gradients, dx = dy W and dW = dyᵀ x. The stage before waits for dx, no rank
        for dW: a schedule may put dW where a rank would be idle. Each half costs as much as
        a forward.
How:    Linear layers and embeddings of a stage get a backward of their own. While a list for
        put-off work is open, backward returns dx and adds a job for dW, with this x and this dy, to
        the list; else it returns both. Other weights (the scales of norms) are too little work to
        move: their gradients are computed with dx and join the list as they are.
Where:  Gradients reach ``p.grad`` through `torch.autograd.backward(p, dW)`. So hooks on gradients,
        as data parallelism has them, see W as the backward of a weight.
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
"""The list of put-off work that is open, if one is."""


@contextmanager
def put_off(jobs: list[Job]) -> Iterator[None]:
    """Put weight gradients of a backward off into the list `jobs`, in the body."""
    global _open
    _open = jobs
    try:
        yield
    finally:
        _open = None


def do(jobs: list[Job]) -> None:
    """Compute the weight gradients of a list and add them up. Frees each input at its turn."""
    groups: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}
    for weight, job in jobs:  # a tied weight has two jobs
        groups.setdefault(weight, []).append(job)
    jobs.clear()
    for weight in list(groups):
        found = [job() for job in groups.pop(weight)]
        torch.autograd.backward([weight] * len(found), found)


# ---------------------------------------------------------------------- layers that can wait
def split_linear(x: Tensor, dy: Tensor, weight: nn.Parameter) -> Tensor:
    """Return dW = dyᵀ x, summed over all tokens: [F, D] from x [..., D] and dy [..., F]."""
    dw = dy.flatten(0, -2).mT @ x.flatten(0, -2).to(dy.dtype)
    return dw.to(weight.dtype)


def split_embedding(tokens: Tensor, dy: Tensor, weight: nn.Parameter) -> Tensor:
    """Return dW [V, D]: row v is the sum of dy [..., D] where the token is v."""
    dw = torch.zeros_like(weight)
    return dw.index_add_(0, tokens.flatten(), dy.flatten(0, -2).to(weight.dtype))


class _Split(torch.autograd.Function):
    """x Wᵀ, or rows of W; dW goes to the open list.

    The weight is not a saved tensor, because activation checkpointing would return a copy.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.weight = function, weight
        return function(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        _, needs_dx, needs_dw = ctx.needs_input_grad  # tokens need none
        gradient = split_linear if ctx.function is F.linear else split_embedding
        dx = dy @ weight.to(dy.dtype) if needs_dx else None
        if needs_dw and _open is not None:
            _open.append((weight, partial(gradient, x, dy, weight)))
            needs_dw = False
        return None, dx, gradient(x, dy, weight) if needs_dw else None


def enable(model: nn.Module) -> None:
    """Make linear layers and embeddings of a Llama put off their weight gradients, in place.

    Modules with another forward stay as they are; then I computes their gradients, and W has less
    to do.
    """
    functions = {nn.Linear: F.linear, nn.Embedding: F.embedding}
    for module in model.modules():
        function = functions.get(type(module))
        if function is not None and "forward" not in vars(module):
            module.forward = partial(_forward, partial(_Split.apply, function), module)


def _forward(function: Callable, module: nn.Module, x: Tensor) -> Tensor:
    return function(x, module.weight)
