"""The one way in which a strategy looks at a value.

On a GPU, to look is to wait: Python stands still until all that was launched before is done. So
strategies decide by shapes and settings, and the few that cannot call `look`. On the meta device,
where tensors have no values and all ranks are alike, everything else that looks fails.
"""

from typing import Any

from torch import Tensor


def look(tensor: Tensor, on_meta: Any) -> Any:
    """Wait for the values of `tensor` and return them as Python has them, as `tolist` does."""
    return on_meta if tensor.is_meta else tensor.tolist()


def to_host(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU, to be saved; a meta tensor, which has no values, as it is."""
    return tensor if tensor.is_meta else tensor.cpu()
