"""Live bytes: what tensors hold at every moment of a computation, counted and not estimated.

    with LiveBytes() as live:
        loss = model(x).sum()                # live.now: what backward will need
        loss.backward()
    live.peak, live.samples                  # in bytes

Every operation passes by; a storage that is new is added, and taken off when its last owner lets
go. The counts depend on the program alone, not on the allocator, and are the same on every run. On
the meta device nothing is allocated, and counted all the same.

In torch: `torch.cuda.max_memory_allocated`, and `torch.profiler` with `profile_memory=True`.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in its body, for as long as they live.

    What an operation makes and drops inside of itself is not seen, nor what existed before.
    `largest` is the size of the largest single storage that was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.largest = 0
        self.samples: list[int] = [0]  # after every allocation and release
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @property
    def peak(self) -> int:
        """Bytes at the highest point."""
        return max(self.samples)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = op(*args, **kwargs)
        for storage in _storages(result):
            # A view, or the result of an in-place operation, lives in a storage that was given.
            if id(storage) not in given and storage not in self._storages:
                num_bytes = storage.nbytes()
                self._storages.add(storage)
                self._change(num_bytes)
                self.largest = max(self.largest, num_bytes)
                weakref.finalize(storage, self._change, -num_bytes)
        return result

    def _change(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.samples.append(self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
