"""The one way in which a strategy looks at a value.

On a GPU, to look is to wait: Python stands still until all that was launched before is done. So
strategies decide by shapes and settings, and the few that cannot call `look`, or `send_to_host`
early enough that no one waits. On the meta device, where tensors have no values and all ranks are
alike, everything else that looks fails.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def look(tensor: Tensor, on_meta: Any) -> Any:
    """Wait for the values of `tensor` and return them as Python has them, as `tolist` does."""
    return on_meta if tensor.is_meta else tensor.tolist()


def to_host(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU, to be saved; a meta tensor, which has no values, as it is."""
    return tensor if tensor.is_meta else tensor.cpu()


def to_device(few: Tensor, device: torch.device) -> Tensor:
    """Return `few` numbers of the host on `device`, without waiting for what it still has to do.

    On a GPU they leave from pinned memory: the host waits for a copy from any other.
    """
    if device.type == "cuda" and few.device.type == "cpu":
        few = few.pin_memory()
    return few.to(device, non_blocking=True)


@cache
def lane(device: torch.device, purpose: str) -> "torch.cuda.Stream":
    """A stream beside the one that computes, the same for each `purpose`.

    Torch has 32 and hands them out in turn, NCCL's among them: who asks anew each time queues
    behind a collective now and then.
    """
    return torch.cuda.Stream(device)


def send_to_host(arrive: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Begin to bring what `arrive` returns from `device` to the host; returns what waits for it.

    `arrive` is the ``wait`` of a `Pending`. On a GPU a stream beside the one that computes waits
    for it, then copies: what is launched from now on waits for neither, and who takes the result
    waits for nothing that was launched later. Elsewhere `arrive` itself is returned.
    """
    if device.type != "cuda":
        return arrive
    computing, beside = torch.cuda.current_stream(device), lane(device, "to the host")
    beside.wait_stream(computing)
    with torch.cuda.stream(beside):
        there = arrive()
        here = there.to("cpu", non_blocking=True)  # in pinned memory
        landed = beside.record_event()
    return lambda: (landed.synchronize(), there, here)[-1]  # whose memory is kept until then
