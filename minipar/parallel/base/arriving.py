"""Weights on their way: each module waits for its own before it runs.

Who reads weights elsewhere waits by `OnItsWay`; torch.compile makes no graph of such parameters.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Wait = Callable[[], None]


class OnItsWay(nn.Parameter):
    """A parameter that ranks hand out: who reads or writes its numbers first waits for them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) not in (Tensor.grad, Tensor.device):
            for p in tree_leaves((args, kwargs)):
                if type(p) is cls:
                    p.__class__ = nn.Parameter
                    if hasattr(p, "arrives"):  # else it is a copy, made when all were there
                        p.arrives()
        return super().__torch_function__(func, types, args, kwargs or {})


def let_modules_wait(model: nn.Module, waits: Mapping[nn.Parameter, Wait]) -> None:
    """Make each module call ``waits[p]`` for its parameters p, before it runs.

    A weight may be used without a call of its module, as `nn.MultiheadAttention` uses `out_proj`.
    So `model` itself waits for the weights of modules that were never called. States are read when
    all weights are there: a rank's own slices lie in the buffers that are filled.
    """
    needs: WeakKeyDictionary[nn.Module, list[Wait]] = WeakKeyDictionary()
    for module in model.modules():
        needs[module] = [waits[p] for p in module.parameters(recurse=False) if p in waits]
    never_called = WeakKeyDictionary(needs)

    # One hook for all modules, or torch.compile would make a graph for each layer.
    def wait(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # inside of a graph no module is called
            never_called.pop(module, None)
            for arrives in needs.get(module, ()):  # none of a deep copy
                arrives()

    def wait_for_uncalled(module: nn.Module, _: Any) -> None:  # evaluation may call others
        for arrives in chain(*never_called.values()) if module.training else waits.values():
            arrives()

    def wait_for_all(*_: Any) -> None:
        for arrives in waits.values():
            arrives()

    model.register_forward_pre_hook(torch.compiler.disable(wait_for_uncalled))
    for module in needs:
        module.register_forward_pre_hook(wait)
    model.register_state_dict_pre_hook(wait_for_all)
