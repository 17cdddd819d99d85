"""Weights in flight: the first use of a weight waits for its all-gather."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minipar.parallel.base.strategy import find_blocks


class OnItsWay(nn.Parameter):
    """A parameter in flight: its first read or write waits for the all-gather of its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) not in (Tensor.grad, Tensor.device):
            for p in tree_leaves((args, kwargs)):
                if type(p) is cls:
                    p.__class__ = nn.Parameter
                    if hasattr(p, "arrives"):  # else `p` is a copy, made after the all-gather
                        p.arrives()
        return super().__torch_function__(func, types, args, kwargs or {})


def let_blocks_wait(model: nn.Module) -> None:
    """Make each block wait for its parameters before it runs.

    A block may be compiled, and torch.compile makes no graph of an `OnItsWay`.
    """

    @torch.compiler.disable
    def wait(block: nn.Module, _: Any) -> None:
        for p in block.parameters():
            if hasattr(p, "arrives"):  # a deep copy has other parameters
                p.arrives()

    for block in find_blocks(model):
        block.register_forward_pre_hook(wait)
