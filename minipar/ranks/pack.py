"""Pickles for ranks: a function travels by value if it is of `__main__`, else by name.

Both ends of the pipe are our own processes. Nothing that comes from elsewhere is unpickled.
"""

import functools
import importlib
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor


class CannotTravel(TypeError):
    """A function or an argument cannot be sent to the ranks; says why."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()  # in a notebook; all frames would be frames of pickle


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        # cloudpickle knows modules by their exact type. torch has modules of classes of its own,
        # such as torch.compiler.config, and a function that says `torch` and `config` finds it.
        if isinstance(thing, ModuleType) and type(thing) is not ModuleType:
            return importlib.import_module, (thing.__name__,)
        # A function under functools.cache travels by name, and a rank has another __main__.
        if isinstance(thing, functools._lru_cache_wrapper):
            where = f"{thing.__module__}.{thing.__qualname__}"
            if where.startswith("__main__.") or "<locals>" in where:
                return _cached, (thing.__wrapped__, thing.cache_parameters())
        # torch would write a checkpoint file for each tensor, with all that a view is a part of.
        if type(thing) is Tensor and _is_plain(thing):
            numbers = thing.detach().contiguous().view(-1)
            content = numbers.view(torch.uint8).numpy().tobytes() if thing.numel() else b""
            return _tensor, (content, thing.dtype, thing.shape, thing.requires_grad)
        return super().reducer_override(thing)


def _cached(fn: Callable, parameters: dict[str, Any]) -> Callable:
    """Put `fn` under a cache of its own, which is empty."""
    return functools.lru_cache(**parameters)(fn)


def _is_plain(tensor: Tensor) -> bool:
    """True if the tensor is its numbers and nothing else."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_complex():
        return False
    is_freed = tensor.untyped_storage().nbytes() == 0 < tensor.numel()
    return not (is_freed or tensor.is_quantized or tensor.__dict__ or tensor._backward_hooks)


def _tensor(content: bytes, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    """Make the tensor of these bytes."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # a user may have another default
    if content:
        numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8).copy_(numbers)
    return tensor.requires_grad_(requires_grad)


def pack(thing: Any) -> bytes:
    """Return `thing` pickled. Raises what pickle raises, mostly `TypeError`."""
    file = io.BytesIO()
    _Pickler(file).dump(thing)
    return file.getvalue()


unpack = cloudpickle.loads


def pack_call(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> bytes:
    """Return the call ``fn(*args, **kwargs)`` pickled. Raises `CannotTravel`."""
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        raise CannotTravel(
            "the function, something that it mentions, or an argument cannot be sent to the ranks: "
            f"{error}"
        ) from None
