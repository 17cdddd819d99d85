"""Autocast, also on the meta device, for which torch has none.

A simulated step has no values, but its times and bytes depend on the dtypes. So on meta the same
matmuls are cast as in a real step. Norms, softmax and losses stay in float32: torch's autocast has
a list of them, and our models compute them in float32 by themselves.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.mm}


def autocast(device: str, dtype: torch.dtype) -> AbstractContextManager:
    """Compute the matmuls of the body in `dtype`; cast each weight once."""
    return _OnMeta(dtype) if device == "meta" else torch.autocast(device, dtype)


def product_dtype(device: str) -> torch.dtype | None:
    """Return the dtype to which matmuls are cast now; None outside of `autocast`."""
    if device == "meta":
        return None if _OnMeta.current is None else _OnMeta.current.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def as_multiplied(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast operands of a matmul that autocast does not know; like autocast, keep float64."""
    dtype = product_dtype(tensors[0].device.type)
    return tuple(t if dtype is None or t.itemsize > 4 else t.to(dtype) for t in tensors)


def off(device: str) -> AbstractContextManager:
    """Switch autocast off in the body."""
    if device != "meta":
        return torch.autocast(device, enabled=False)
    return nullcontext() if _OnMeta.current is None else _OnMeta(torch.float32)


def same_again() -> AbstractContextManager:
    """Use the current `autocast` in a recomputation, too. On real devices torch does so itself."""
    return nullcontext() if _OnMeta.current is None else _OnMeta(_OnMeta.current.dtype)


class _OnMeta(TorchFunctionMode):
    current: "_OnMeta | None" = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.weights, self.outer = dtype, {}, None

    def __enter__(self) -> "_OnMeta":
        self.outer, _OnMeta.current = _OnMeta.current, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _OnMeta.current = self.outer
        self.weights.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and _OnMeta.current is self:  # not an outer autocast
            args = [self.cast(arg) for arg in args]
        return func(*args, **(kwargs or {}))

    def cast(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or not x.is_meta:
            return x
        if x not in self.weights:
            cast = x.to(self.dtype)
            if not isinstance(x, nn.Parameter):
                return cast
            self.weights[x] = cast
        return self.weights[x]
