"""What the ranks of an emulated link tell each other, in memory that they share.

Who called when (`Calls`, one per process group), and until when the network cards of the nodes are
taken (`Cards`, one per job). This costs microseconds, while asking over gloo costs milliseconds.
"""

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Cell = tuple[int, int, int]


class Transfer(NamedTuple):
    """When an operation starts, or one rank is ready to, and how long the wire needs for it."""

    start: float
    seconds: float
    num_bytes: int = 0  # of a message, or of the whole tensor of a collective


class Calls:
    """Who called when.

    A cell is (end, src, dst): end 0 is the sender's of a message from src to dst, end 1 the
    receiver's; (0, rank, rank) is for the collectives of `rank`. A rank posts before it hands the
    operation to gloo, and reads when gloo is done: by then all that it waited for have posted. In
    end 2 stands when an operation got the network cards, by the first rank of it that asked.
    """

    SLOTS, FIELDS = 256, 4  # calls that one rank may be ahead of another; numbers per cell
    PER_TAG = 1 << 22  # messages of a tag; a tag has 31 bits, and a float keeps 53 of the product

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._size = size
        if rank == 0:
            store.set("calls", _new_file(3 * size * size * self.SLOTS * self.FIELDS))
        path = store.get("calls").decode()
        self._numbers = _numbers(path)
        if store.add("opened", 1) == size:
            os.unlink(path)  # the last to come: the memory lives on, the file need not

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
        """The last to be ready, the longest and the largest transfer, among me and who posted."""
        posted = [mine, *filter(None, (self.read(cell, call) for cell in cells))]
        return Transfer(*map(max, zip(*posted, strict=True)))

    def on_cards(
        self, cell: Cell, call: int, mine: Transfer, lanes: Mapping[int, float]
    ) -> Transfer:
        """Start no sooner than all `lanes` of network cards are free, and keep them busy for so
        many seconds each. All ranks of the operation get the same answer.
        """
        if not lanes:
            return mine
        _, src, dst = cell
        with Cards.of_this_job().locked() as free:
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


class Cards:
    """Until when each lane of each network card is taken; see `link.Topology.lanes`.

    The lock is the kernel's: a rank that dies gives it back. What a rank has reserved stays taken
    for as long as the transfer would have lasted. Ranks that join anew get a table of their own.
    """

    _made: "weakref.WeakKeyDictionary[dist.ProcessGroup, Cards]" = weakref.WeakKeyDictionary()
    _threads = threading.Lock()  # the kernel's lock is between processes

    @classmethod
    def of_this_job(cls) -> "Cards":
        """Return the table that all groups of these ranks share; made when first asked for."""
        with cls._threads:
            world = dist.group.WORLD
            if world not in cls._made:
                cls._made[world] = cls(c10d._get_default_store(), dist.get_world_size())
            return cls._made[world]

    def __init__(self, store: dist.Store, size: int) -> None:
        mine = _new_file(2 * size)  # a card per rank at most
        path = store.compare_set("minipar cards", "", mine).decode()
        self._free = _numbers(path)
        self._file = open(path, "rb")  # noqa: SIM115, open as long as this table
        if path != mine:
            os.unlink(mine)
        if store.add("minipar cards opened", 1) == size:
            os.unlink(path)

    @contextmanager
    def locked(self) -> Iterator[memoryview]:
        """Give the table to one thread of one rank at a time."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield self._free
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _new_file(numbers: int) -> str:
    """Make a file for so many numbers, all 0; return its path.

    Raises `OSError` on a full disk. No hole: who writes into one there is killed.
    """
    handle, path = tempfile.mkstemp(prefix="minipar-link-")
    try:
        with open(handle, "wb") as file:
            file.write(bytes(8 * numbers))
    except OSError as error:
        os.unlink(path)
        raise OSError(f"{path}: {error.strerror} for what an emulated link notes") from None
    return path


def _numbers(path: str) -> memoryview:
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
    except FileNotFoundError:
        raise RuntimeError("an emulated link joins the ranks of one machine only") from None
