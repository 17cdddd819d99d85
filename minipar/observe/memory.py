"""Whose memory is it? A few words by which code says what its tensors are for.

A ledger (`minipar.lab.memory.MemoryLedger`) sees every storage come and go, but not its purpose:
that a flat buffer holds the gathered weights of a block, or that a tensor is the host's although
host and device are the same CPU. Code that makes such a tensor says so here:

    memory.tag("gathered", flat)
    memory.tag("parameters", master, on_host=True)
    with memory.on_host():
        optimizer.step()                       # what this allocates is the host's

It costs an entry in a dictionary, which goes when the tensor goes. A parameter that may be several
tensors in turn lists them all in `param.homes`.
"""

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minipar.comm.hostcopy import is_on_host, on_host

__all__ = ["Tag", "is_on_host", "on_host", "tag", "tags", "watch_resize", "watchers"]


class Tag(NamedTuple):
    """The purpose of a storage, in one word, and its device."""

    category: str
    on_host: bool


tags: WeakKeyDictionary[torch.UntypedStorage, Tag] = WeakKeyDictionary()
"""The storages whose purpose was told, for as long as they live."""

watchers: list[Callable[[torch.UntypedStorage, Tag], None]] = []
"""Called with every tag: ledgers that are open."""


def tag(category: str, *tensors: Tensor, on_host: bool | None = None) -> None:
    """Say what the storages of `tensors` are for: "gathered", "gradients" or any other word.

    They are taken to be the host's inside of `on_host()`, unless the argument says otherwise.
    """
    word = Tag(category, is_on_host() if on_host is None else on_host)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        tags[storage] = word
        for watch in watchers:
            watch(storage, word)


def watch_resize(notice: Callable[[torch.UntypedStorage, int], None]) -> Callable[[], None]:
    """Call ``notice(storage, bytes before)`` when one is resized: nothing is dispatched then.

    Returns what ends it.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        before = storage.nbytes()
        result = original(storage, size)
        notice(storage, before)
        return result

    torch.UntypedStorage.resize_ = resize_
    return lambda: setattr(torch.UntypedStorage, "resize_", original)
