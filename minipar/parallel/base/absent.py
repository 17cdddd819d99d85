"""Parameters that are elsewhere at the moment: what would compute with one waits, or is refused.

Idea.   Under ZeRO weights travel while the next step begins, and under fsdp a rank has them only
        while their block runs. A parameter stays in the model meanwhile, and what its memory holds
        is no weight. So it changes its class: each function of torch that is given it as an
        `Absent` calls its `on_use` first. That of zero waits until the weights are here; that of
        fsdp raises, and names the block that they belong to.
Costs you. A dispatch through Python for each use, while it is away. A parameter of a class of its
        own cannot change it, and is waited for at once, or not watched.
Source. https://pytorch.org/docs/stable/notes/extending.html, `__torch_function__`.
In torch: `fully_shard` puts a DTensor in its place, which computes with pieces.
Proved by tests/parallel/test_misuse.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Absent(nn.Parameter):
    """The class of a parameter whose values are on their way, or with other ranks.

    `leave` makes it so, `come_back` undoes it. What computes with it calls `p.on_use` first, which
    waits or raises; its shape, dtype and gradient may be looked at.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__") and func.__self__ not in _VALUES
        if not (is_attribute or name in _HARMLESS):
            for p in tree_leaves((args, kwargs)):
                if type(p) is Absent:
                    p.on_use()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        self.on_use()
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.on_use()
        return nn.Parameter.__reduce_ex__(self, protocol)


_VALUES = Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag
_HARMLESS = {
    "__hash__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size",
    "requires_grad_",
}  # fmt: skip


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """From now on, what uses one of `parameters` calls its `on_use` first."""
    for p in parameters:
        p.__class__ = Absent


def come_back(parameters: Iterable[nn.Parameter]) -> None:
    """The values of `parameters` are here."""
    for p in parameters:
        p.__class__ = nn.Parameter


def can_leave(p: nn.Parameter) -> bool:
    """Whether nothing would be lost: a parameter of a class of its own stays what it is."""
    return type(p) is nn.Parameter
