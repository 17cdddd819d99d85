"""The one place where a strategy reads values of tensors.

A read waits until the GPU has finished all kernels launched before. So strategies decide by shapes
and settings. The few strategies that need values call `look` or `to_host`. On the meta device,
tensors have no values, and every other read fails.
"""

from typing import Any

import torch
from torch import Tensor


def look(tensor: Tensor, on_meta: Any) -> Any:
    """Return the values of `tensor` as `tolist` does, or `on_meta` for a tensor without values."""
    return on_meta if tensor.is_meta else tensor.tolist()


def to_host(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU, to be saved; a meta tensor stays as it is."""
    return tensor if tensor.is_meta else tensor.cpu()


def to_device(few: Tensor, device: torch.device) -> Tensor:
    """Return `few` numbers of the host on `device`; the host does not wait."""
    if device.type == "cuda" and few.device.type == "cpu":
        few = few.pin_memory()
    return few.to(device, non_blocking=True)
