"""The cost of an operation, by its shapes alone: bytes, and seconds on a device.

The simulator (`sim/`) and the emulated device (`device.py`) use the same costs. The cost of matmuls
and attention depends on their shapes. The cost of all other operations depends on the bytes that
they read and write. An optimizer step costs one pass over weights, gradients and state, like a
fused optimizer. Views and empty memory are free.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.library import _scoped_library
from torch.utils._pytree import tree_leaves

_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "set_"}
_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm"}
_UNREAD = {"copy_": 0, "_foreach_copy_": 0, "zero_": 0, "_foreach_zero_": 0, "fill_": 0}
_UNREAD |= {"normal_": 0, "uniform_": 0, "nll_loss_backward": 1}
"""The index of an argument that the operation does not read, such as one that it overwrites."""
_LOOKUPS = {"embedding", "index", "index_select", "gather", "nll_loss_forward"}
"""Operations that read as much of their first argument as they return."""


class Work(NamedTuple):
    """The facts that the time of one operation depends on."""

    op: str
    work: str  # "product", "attention", or "bytes"
    # product: batch, m, n, k; attention: batch, heads, queries, keys, K, causal
    shape: tuple[int, ...]
    dtype: str  # of the result; an optimizer step has none
    num_bytes: int  # read and written


def work_of(op: Any, given: Sequence[Tensor], made: Sequence[Tensor], args: Any) -> Work | None:
    """Return the work of `op`, which read the tensors `given` and returned `made`, if any."""
    name, work, shape = op._opname, "bytes", ()
    if not made and op._schema.is_mutable:
        made = tensors(args[:1])
    if not made or name in _FREE:
        return None
    num_out = sum(argument.is_out for argument in op._schema.arguments)  # they come last
    a, given = made[0], given[: len(given) - num_out]
    if name in _PRODUCTS:
        (a, b), work = given[-2:], "product"
        shape = (math.prod(a.shape[:-2]), *a.shape[-2:-1], b.shape[-1], a.shape[-1])
    elif name == "_grouped_mm":  # per expert: its rows @ its weights, or the weights' gradient
        (a, b), work = given[:2], "product"
        (m, k), n = a.shape, b.shape[-1]
        if b.ndim == 3:
            shape = (len(b), math.ceil(m / len(b)), n, k)
        else:
            shape = (len(made[0]), m, n, math.ceil(k / len(made[0])))
    elif name.startswith("_scaled_dot_product_"):
        causal = any(arg is True for arg in args)
        a, k = given[1:3] if "backward" in name else given[:2]
        work, shape = "attention", (*a.shape[:-1], k.shape[-2], a.shape[-1], int(causal))
    num_read, num_made = (sum(t.nbytes for t in some) for some in (given, made))
    if name in _LOOKUPS:
        num_read += num_made - given[0].nbytes
    if name in _UNREAD:
        num_read -= sum(t.nbytes for t in tensors(args[_UNREAD[name]]))
    dtype = str(a.dtype).removeprefix("torch.")
    return Work(name, work, tuple(shape), dtype, num_read + num_made)


def seconds_of(work: Any, device: Any) -> float:
    """Return seconds of a `Work` on a device: `device.Device`, or one of `sim.hardware`."""
    if hasattr(device, "played"):
        work, device = device.played(work), device.sheet
    if work.work == "product":
        batch, *mnk = work.shape
        return device.seconds_of_matmul(*mnk, work.dtype, batch=batch)
    if work.work == "attention":
        *sizes, causal = work.shape
        how = {"causal": bool(causal), "backward": "backward" in work.op}
        return device.seconds_of_attention(*sizes, work.dtype, **how)
    return device.seconds_of_bytes(work.num_bytes)


def step_of(parameters: Sequence[Tensor], state: Any) -> Work:
    """Return the work of a step, which reads weights, gradients, state; writes weights, state."""
    num_bytes = 3 * sum(p.nbytes for p in parameters) + 2 * sum(t.nbytes for t in tensors(state))
    return Work("step", "bytes", (), "", num_bytes)


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors in nested lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def key_of(value: Any) -> Any:
    """Return a key for `value`, with all properties on which the shape of a result depends."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    return type(value), value


@cache
def is_view(op: Any) -> bool:
    """True if the result of `op` shares memory with an argument, as a view does."""
    returns = [value.alias_info for value in op._schema.returns]
    is_alias = any(alias is not None and not alias.is_write for alias in returns)
    return is_alias or op.name() == "aten::_unsafe_view"


# ---------------------------------------------------------------------- norms, as GPUs do them
@contextmanager
def fused_norms() -> Iterator[None]:
    """Make `F.rms_norm` one operation in the body, and its gradient one, as torch does on CUDA.

    On a CPU torch runs a dozen operations, which keep float32 copies of 16-bit tensors. CUDA does
    so too if weight and input differ in dtype. Values are the same, up to rounding.
    """
    norm = decomposition_table[torch.ops.aten._fused_rms_norm.default]
    backward = decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]
    with _scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", norm, "CPU")
        library.m.impl("_fused_rms_norm", "Meta", norm)  # `library.impl` refuses this key
        library.impl("_fused_rms_norm_backward", backward, "CPU")
        yield
