"""Tables in shared memory, by which the ranks of an emulated link know of each other.

`Calls`, one per process group, holds who called when. `cards_of_this_job` holds until when the
network cards of the nodes are taken. Shared memory costs microseconds; gloo costs milliseconds.
"""

import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Cell = tuple[int, int, int]


class Transfer(NamedTuple):
    """When an operation starts, or one rank is ready to, and how long the wire needs for it."""

    start: float
    seconds: float
    num_bytes: int = 0  # of a message, or of the whole tensor of a collective


class Shared:
    """So many `numbers` in the memory of all `size` ranks that meet at `store`; first all are 0."""

    _threads = threading.Lock()  # the kernel's lock is between processes only

    def __init__(self, store: dist.Store, name: str, size: int, numbers: int) -> None:
        handle, mine = tempfile.mkstemp(prefix="minipar-link-")
        with open(handle, "wb") as file:
            file.write(bytes(8 * numbers))
        path = store.compare_set(name, "", mine).decode()  # that of the first rank to come
        if path != mine:
            os.unlink(mine)
        try:
            self._file = open(path, "r+b")  # noqa: SIM115, open as long as this object
        except FileNotFoundError:
            raise RuntimeError("an emulated link joins the ranks of one machine only") from None
        self.numbers = memoryview(mmap.mmap(self._file.fileno(), 0)).cast("d")
        if store.add(f"{name} opened", 1) == size:
            os.unlink(path)  # the last rank has come: the memory lives on, the file need not

    @contextmanager
    def locked(self) -> Iterator[memoryview]:
        """Give the numbers to one thread of one rank at a time. A rank that dies unlocks them."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield self.numbers
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class Calls:
    """Who called when.

    A cell is (end, src, dst): end 0 is the sender's of a message from src to dst, end 1 the
    receiver's; (0, rank, rank) is for the collectives of `rank`. A rank posts before it hands the
    operation to gloo, and reads when gloo is done: by then all that it waited for have posted.
    End 2 holds when an operation got the network cards, by the first of its ranks that asked.
    """

    SLOTS, FIELDS = 256, 4  # calls that one rank may be ahead of another; numbers per cell
    PER_TAG = 1 << 22  # messages of a tag; a tag has 31 bits, and a float keeps 53 of the product

    def __init__(self, store: dist.Store, size: int) -> None:
        self._size = size
        numbers = 3 * size * size * self.SLOTS * self.FIELDS
        self._numbers = Shared(store, "calls", size, numbers).numbers

    def post(self, cell: Cell, call: int, mine: Transfer) -> None:
        """Say that this rank is ready for operation number `call` of this cell."""
        at = self._at(cell, call)
        for field, number in enumerate(mine, start=1):
            self._numbers[at + field] = number
        self._numbers[at] = call  # last: now the cell is good

    def read(self, cell: Cell, call: int) -> Transfer | None:
        """Return what was posted, or None if that rank has not called yet."""
        at = self._at(cell, call)
        number, *transfer = self._numbers[at : at + self.FIELDS]
        return Transfer(*transfer) if number == call else None

    def latest(self, cells: Sequence[Cell], call: int, mine: Transfer) -> Transfer:
        """Return the latest start and the longest transfer, of `mine` and all that was posted."""
        posted = [mine, *filter(None, (self.read(cell, call) for cell in cells))]
        return Transfer(*map(max, zip(*posted, strict=True)))

    def on_cards(
        self, cell: Cell, call: int, mine: Transfer, lanes: Mapping[int, float]
    ) -> Transfer:
        """Start as soon as all `lanes` of network cards are free; take each for so many seconds.

        All ranks of the operation get the answer of the first one that asks.
        """
        if not lanes:
            return mine
        _, src, dst = cell
        with cards_of_this_job().locked() as free:
            given = self.read((2, src, dst), call)
            if given is None:
                given = mine._replace(start=max(mine.start, *(free[lane] for lane in lanes)))
                for lane, seconds in lanes.items():
                    free[lane] = given.start + seconds
                self.post((2, src, dst), call, given)
        return mine._replace(start=max(mine.start, given.start))

    def _at(self, cell: Cell, call: int) -> int:
        end, src, dst = cell
        row = (end * self._size + src) * self._size + dst
        # Messages of several tags may be under way at once: an odd step keeps their slots apart.
        tag, number = divmod(call, self.PER_TAG)
        return (row * self.SLOTS + (number + 159 * tag) % self.SLOTS) * self.FIELDS


_cards: "WeakKeyDictionary[dist.ProcessGroup, Shared]" = WeakKeyDictionary()
_making = threading.Lock()


def cards_of_this_job() -> Shared:
    """Return until when each lane of each card is taken, for all groups; see `Topology.lanes`."""
    with _making:
        world = dist.group.WORLD
        if world not in _cards:
            store, size = c10d._get_default_store(), dist.get_world_size()
            _cards[world] = Shared(
                store, "minipar cards", size, 2 * size
            )  # a card per rank or less
        return _cards[world]
