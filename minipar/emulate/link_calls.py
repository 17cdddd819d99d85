"""Who called when: the table of calls that all ranks of an emulated link share."""

import math
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist


class Transfer(NamedTuple):
    """Start of an operation, or of one rank's part, and the seconds that the wire needs."""

    start: float
    seconds: float
    num_bytes: int = 0  # of a message


Cell = tuple[int, int, int]
"""(end, src, dst) of a message from src to dst: end 0 is the sender's end, end 1 the receiver's.
(0, rank, rank) is for the collectives of `rank`."""


class Calls:
    """The times of all calls of one process group, in memory that its ranks share.

    A rank posts before gloo starts the operation, and reads after gloo has ended it. By then, all
    other ranks of the call have posted. Shared memory costs microseconds, gloo milliseconds.
    """

    SLOTS, FIELDS = 256, 4  # calls that one rank may be ahead of another; numbers per cell

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        shape = 2, size, size, self.SLOTS, self.FIELDS
        if rank == 0:
            with tempfile.NamedTemporaryFile(prefix="minipar-link-", delete=False) as file:
                file.truncate(8 * math.prod(shape))
            store.set("calls", file.name)
        path = store.get("calls").decode()  # a local file: all ranks of a link are on this machine
        self._numbers, self._posted = np.memmap(path, "f8", "r+", shape=shape), Counter[Cell]()
        if store.add("calls opened", 1) == size:
            os.unlink(path)  # all ranks have mapped the file, so they no longer need its name

    def post(self, cell: Cell, mine: Transfer) -> int:
        """Post that this rank is ready for the cell's next operation; return the call's number."""
        self._posted[cell] += 1
        call = self._posted[cell]
        numbers = self._numbers[cell][call % self.SLOTS]
        numbers[1:] = mine
        numbers[0] = call  # written last: now the other numbers are valid
        return call

    def read(self, cell: Cell, call: int) -> Transfer | None:
        """Return the transfer posted for `call`, or None if the cell's rank has not called yet."""
        number, *transfer = self._numbers[cell][call % self.SLOTS].tolist()
        return Transfer(*transfer) if number == call else None

    def latest(self, cells: Sequence[Cell], call: int, mine: Transfer) -> Transfer:
        """Return the latest start and the longest transfer, of `mine` and all posted transfers."""
        posted = [mine, *filter(None, (self.read(cell, call) for cell in cells))]
        return Transfer(*map(max, zip(*posted, strict=True)))
