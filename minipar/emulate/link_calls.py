"""Who called when: the table of calls that all ranks of an emulated link share."""

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Part = Sequence[float]
"""One rank's part of an operation: time of the call, seconds on the wire, bytes of a message."""
Cell = tuple[int, int, int]
"""(is_recv, rank, peer) of a message that `rank` sends to `peer`, or receives from `peer`.
(0, rank, rank) is for the collectives of `rank`."""


class Calls:
    """The times of all calls of one process group, in memory that its ranks share.

    A rank posts before gloo starts the operation, and reads after gloo has ended it. By then, all
    other ranks of the call have posted. Shared memory costs microseconds, gloo milliseconds.
    """

    SLOTS, FIELDS = 1024, 4  # calls that one rank may be ahead of another; numbers per call

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        if rank == 0:
            with tempfile.NamedTemporaryFile(prefix="minipar-link-", delete=False) as file:
                store.set("calls", file.name)
        path = store.get("calls").decode()  # a local file: all ranks of a link are on this machine
        shape = 2, size, size, self.SLOTS, self.FIELDS
        table = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.float64)
        self._table, self._posted = table.numpy().reshape(shape), Counter[Cell]()
        if store.add("calls opened", 1) == size:
            os.unlink(path)  # all ranks have mapped the file, so they no longer need its name

    def post(self, cell: Cell, mine: Part, others: Sequence[Cell]) -> Callable[[], list[Part]]:
        """Post this rank's part of the cell's next operation.

        Return a function: it returns this part, and the parts that `others` have posted so far.
        """
        self._posted[cell] += 1
        number = self._posted[cell]
        slot = number % self.SLOTS
        self._table[cell][slot, 1:] = mine
        self._table[cell][slot, 0] = number  # written last: now the other numbers are valid

        def posted() -> list[Part]:
            rows = [self._table[other][slot].tolist() for other in others]
            return [mine, *(row[1:] for row in rows if row[0] == number)]

        return posted
