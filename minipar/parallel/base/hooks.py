"""Hooks on gradients under which a strategy and its model can be freed.

torch keeps the hooks of a parameter where Python's garbage collector does not look. Were a method
of a strategy one of them, the strategy would stay, and its model with it: one more with each run of
a cell of a notebook.
"""

import weakref
from collections.abc import Callable

from torch import nn


def on_gradient(p: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
    """Let autograd call ``method(p)`` when ``p.grad`` (accumulated over microbatches) is there.

    The object whose method it is lives as long as `p` does, and not longer.
    """
    p.register_post_accumulate_grad_hook(_Hook(method))
    vars(p).setdefault("hooked_by", _Owners()).append(method.__self__)


class _Hook:
    """What torch keeps; it is equal to the method."""

    def __init__(self, method: Callable[[nn.Parameter], None]) -> None:
        self.method = weakref.WeakMethod(method)

    def __call__(self, p: nn.Parameter) -> None:
        self.method()(p)

    def __eq__(self, other: object) -> bool:
        return self.method() == other


class _Owners(list):
    """What an attribute keeps; where the parameter is pickled, they stay behind."""

    def __reduce__(self) -> tuple:
        return _Owners, ()
