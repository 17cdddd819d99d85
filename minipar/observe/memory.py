"""Purposes of memory: labels by which code says what its tensors are for.

A ledger (`minipar.lab.memory.MemoryLedger`) sees every storage, but not its purpose. Nor can it
tell host from device if both are one CPU. So the code that makes a storage labels the storage:

    memory.tag("gathered", flat)
    memory.tag("parameters", master, on_host=True)
    with memory.on_host():
        optimizer.step()                       # allocates on the host
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minipar.comm.hostcopy import is_on_host
from minipar.comm.hostcopy import on_host as on_host

tags: WeakKeyDictionary[torch.UntypedStorage, bool] = WeakKeyDictionary()
"""The storages with a tag, for as long as they live: True for those of the host."""

watchers: list[Callable[[torch.UntypedStorage, str, bool], None]] = []
"""Functions that are called with every tag, its word and True for the host; one of each ledger."""


def tag(category: str, *tensors: Tensor, on_host: bool | None = None) -> None:
    """Label the storages of `tensors`: "gathered", "gradients" or any other word.

    Inside of `on_host()` the storages belong to the host, unless the argument says otherwise.
    """
    on_host = is_on_host() if on_host is None else on_host
    for tensor in tensors:
        storage = tensor.untyped_storage()
        tags[storage] = on_host
        for watch in watchers:
            watch(storage, category, on_host)


def watch_resize(notice: Callable[[torch.UntypedStorage, int], None]) -> Callable[[], None]:
    """Call ``notice(storage, bytes before)`` after every `resize_`; return a function to end this.

    This is the only patch of torch here, and lasts while a ledger is open. A strategy frees a flat
    buffer by `resize_(0)`, in a notebook as well. Torch has no hook for `resize_`.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        before = storage.nbytes()
        result = original(storage, size)
        notice(storage, before)
        return result

    torch.UntypedStorage.resize_ = resize_
    return lambda: setattr(torch.UntypedStorage, "resize_", original)
