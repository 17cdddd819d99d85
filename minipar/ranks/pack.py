"""How a function and its arguments travel to a rank: by value if they are of `__main__`, pickled.

Tensors travel as their bytes. Both ends of the pipe are our own processes; nothing that comes from
elsewhere is unpickled.
"""

import ctypes
import functools
import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor


class CannotTravel(TypeError):
    """A function or an argument cannot be sent to the ranks; says which part of it, and why."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()  # in a notebook: the frames would all be those of pickle


_Cached = functools._lru_cache_wrapper


def _cached(fn: Callable, parameters: dict[str, Any]) -> Callable:
    """`fn` under a cache of its own, which is empty."""
    return functools.lru_cache(**parameters)(fn)


def _tensor(
    content: bytes,
    dtype: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    """A tensor of this content, in memory of its own, which can be resized."""
    data = torch.empty(0, dtype=torch.uint8, device="cpu")  # a user may have another default
    if content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(data.untyped_storage(), 0, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _content(tensor: Tensor) -> bytes | None:
    """The bytes from its first to its last number; None where torch knows more of the tensor."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.__dict__
    if not plain or tensor.layout != torch.strided or tensor._backward_hooks:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    if not tensor.numel():
        return b""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * tensor.element_size()
    here = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if here < num_bytes:  # fsdp has freed it
        return None
    return ctypes.string_at(tensor.data_ptr(), num_bytes)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        # cloudpickle knows modules by their exact type. torch has modules of classes of its own,
        # such as torch.compiler.config, and a function that says `torch` and `config` finds it.
        if isinstance(thing, ModuleType) and type(thing) is not ModuleType:
            return importlib.import_module, (thing.__name__,)
        # A function under functools.cache travels by name, and a rank has another __main__.
        if isinstance(thing, _Cached) and hasattr(thing, "__wrapped__"):
            where = f"{thing.__module__}.{thing.__qualname__}"
            if where.startswith("__main__.") or "<locals>" in where:
                return _cached, (thing.__wrapped__, thing.cache_parameters())
        # torch would write, and read, a whole checkpoint file for each tensor: a millisecond. And
        # what it writes of float8 it cannot read.
        if isinstance(thing, Tensor) and (content := _content(thing)) is not None:
            how = thing.dtype, thing.shape, thing.stride(), thing.requires_grad
            return _tensor, (content, *how)
        return super().reducer_override(thing)


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
        parts = [("what is called", fn), *((f"argument {i}", arg) for i, arg in enumerate(args))]
        parts += [(f"argument `{name}`", arg) for name, arg in kwargs.items()]
        seen: set[int] = set()
        reasons = [_why_not(part, thing, seen) for part, thing in parts]
        raise CannotTravel(next(filter(None, reasons), str(error))) from None


def _why_not(part: str, thing: Any, seen: set[int]) -> str:
    """Say what it is in `thing`, called `part`, that cannot be pickled; "" if it can be."""
    if id(thing) in seen:
        return ""
    seen.add(id(thing))
    try:
        pack(thing)
    except Exception as error:
        if isinstance(thing, FunctionType):
            part = part if part.endswith("which") else f"the function `{thing.__name__}`"
            for name, value in _mentioned(thing):
                if why := _why_not(f"{part} mentions `{name}`, which", value, seen):
                    return why
        return f"{part} cannot be sent to the ranks: {error}"
    return ""


def _mentioned(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reaches besides its arguments: its closure and its globals, by name."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents
    for name in _global_names(fn.__code__):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


def _global_names(code: CodeType) -> list[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [*code.co_names, *(name for each in inner for name in _global_names(each))]
