"""Backward in two halves: the gradient of the input now, those of the weights later.

Idea:   y = x Wᵀ has two gradients, dx = dy W and dW = dyᵀ x. The stage before waits for dx, none
        for dW: a schedule may put it where a rank would be idle. Each half costs as much as
        a forward.
How:    Linear layers and embeddings of a stage get a backward of their own. As long as a list is
        open for put-off work, it returns dx and adds "dW, from this x and this dy" to the list;
        else it returns both. What other layers have (the scales of norms) is no work worth moving:
        their gradients are computed with dx, and join the list as they are.
Where:  Gradients reach ``p.grad`` through `torch.autograd.backward(p, dW)`. So code that waits for
        them there with hooks, as data parallelism does, sees W as the backward of a weight.
Memory: x and dy of every linear layer live until W, the rest of the graph until I.
Source: Qi et al. 2023 (2401.10241), section 2. In torch: `torch.distributed.pipelining._backward`,
        which finds the two halves in the graph of any stage.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Job = tuple[nn.Parameter, Callable[[], Tensor]]
Used = dict[nn.Module, list[Tensor]]


class PutOff:
    """Weight gradients to be computed later, in lists named by the caller."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, list[Job]] = {}
        self._open: list[Job] | None = None
        self._used: Used | None = None

    @contextmanager
    def watch(self) -> Iterator[Used]:
        """In the body, note which weights modules use, if `enable` has seen to it.

        They need not be those that a module has at rest: fsdp lends it others for each forward.
        """
        self._used = used = {}
        try:
            yield used
        finally:
            self._used = None

    def note(self, module: nn.Module, *_: Any) -> None:
        """A hook: `module` has run forward."""
        if self._used is not None:
            self._used[module] = weights_in(module)

    @contextmanager
    def to(self, *name: Hashable) -> Iterator[None]:
        """In the body, backward puts off weight gradients into the list of that name."""
        self._open = self._lists.setdefault(name, [])
        try:
            yield
        finally:
            self._open = None

    def take(self, weight: nn.Parameter, job: Callable[[], Tensor]) -> Tensor | None:
        """Called by backward: put `job` off and return None, or do it if no list is open."""
        if self._open is None:
            return job()
        self._open.append((weight, job))
        return None

    def do(self, *name: Hashable) -> None:
        """Compute all of a list and add it to the gradients. Frees each input at its turn.

        Weights that came into the graph together, as those of a block from fsdp, get theirs
        together: the stage that lent them out waits for all, and is told once.
        """
        groups: dict[Any, list[Job]] = {}
        for weight, job in self._lists.pop(name, []):
            groups.setdefault(weight.grad_fn or weight, []).append((weight, job))
        for key in list(groups):
            weights, jobs = zip(*groups.pop(key), strict=True)
            torch.autograd.backward(weights, [job() for job in jobs])

    def clear(self) -> None:
        """Forget all of it, after a backward that an exception cut short."""
        self._lists.clear()

    @property
    def waiting(self) -> list[Hashable]:
        """The lists that have not been done. The optimizer must not step before."""
        return list(self._lists)


def weights_in(module: nn.Module) -> list[Tensor]:
    """Weights that `module` itself has now, and that want a gradient."""
    return [p for p in module._parameters.values() if p is not None and p.requires_grad]


# ---------------------------------------------------------------------- layers that can wait
def split_linear(x: Tensor, dy: Tensor, weight: nn.Parameter) -> Tensor:
    """dW = dyᵀ x, summed over all tokens: [F, D] from x [..., D] and dy [..., F]."""
    dw = dy.flatten(0, -2).mT @ x.flatten(0, -2).to(dy.dtype)
    return dw.to(weight.dtype)


def split_embedding(tokens: Tensor, dy: Tensor, weight: nn.Parameter) -> Tensor:
    """dW: row v is the sum of dy [..., D] where the token is v; [V, D]."""
    dw = torch.zeros_like(weight)
    return dw.index_add_(0, tokens.flatten(), dy.flatten(0, -2).to(weight.dtype))


class _Linear(torch.autograd.Function):
    """x Wᵀ. The weight is no saved tensor: activation checkpointing would hand out a copy of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, put_off: PutOff) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.put_off = weight, put_off
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        dx = dy @ weight.to(dy.dtype) if needs_dx else None
        dw = ctx.put_off.take(weight, partial(split_linear, x, dy, weight)) if needs_dw else None
        return dx, dw, None


class _Embedding(torch.autograd.Function):
    """Rows of W."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: nn.Parameter, put_off: PutOff) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.put_off = weight, put_off
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        return None, ctx.put_off.take(weight, partial(split_embedding, tokens, dy, weight)), None


def enable(model: nn.Module, put_off: PutOff) -> None:
    """Let linear layers and embeddings of `model` put off their weight gradients, in place.

    So do modules whose `multiply` is torch's, such as those of tensor parallelism. Others
    (with a forward of their own) stay as they are: right, but W has less to do, and a gradient of
    theirs, as large as the weight, waits for it.
    """
    for module in model.modules():
        if module._parameters:
            module.register_forward_hook(put_off.note)
        if "forward" in vars(module):  # other code has changed what it does
            continue
        if getattr(module, "multiply", None) is F.linear:
            module.multiply = partial(_multiply, put_off)
        elif type(module) is nn.Linear:
            module.forward = partial(_forward_linear, module, put_off)
        elif type(module) is nn.Embedding and module.padding_idx is None and not module.max_norm:
            module.forward = partial(_forward_embedding, module, put_off)


def _multiply(put_off: PutOff, x: Tensor, weight: nn.Parameter) -> Tensor:
    return _Linear.apply(x, weight, put_off)


def _forward_linear(module: nn.Linear, put_off: PutOff, x: Tensor) -> Tensor:
    y = _multiply(put_off, x, module.weight)
    return y if module.bias is None else y + module.bias


def _forward_embedding(module: nn.Embedding, put_off: PutOff, tokens: Tensor) -> Tensor:
    return _Embedding.apply(tokens, module.weight, put_off)
