"""Do all ranks gather and reduce the same, in the same order? A part of fsdp.py."""

import zlib
from collections import deque
from collections.abc import Callable

from torch import Tensor

from minipar.comm.values import look, send_to_host

SAME_ORDER = (
    "fsdp: all ranks must run the same blocks in the same order, and in this step or, on GPUs, the "
    "one before they did not: a rank chose among blocks, had fewer microbatches, or ran the model "
    "alone. Put what a rank chooses from into one block (blocks=), or call all blocks on every rank"
)


class Ledger:
    """What this rank has gathered and reduced since the last step: must be the same on all."""

    def __init__(self) -> None:
        self.digest = 0
        self.latest: deque[str] = deque(maxlen=8)
        self.told: tuple[Callable[[], Tensor], str] | None = None  # by `tell`, and `latest` then

    def note(self, what: str) -> None:
        """Append to what this rank did."""
        self.digest = zlib.crc32(what.encode(), self.digest)
        self.latest.append(what)

    def close(self) -> list[int]:
        """Begin anew; return 8 bytes, for `tell` of the greatest of each over the ranks.

        The digest and its complement: where ranks differ, both are greater than those of one rank.
        """
        own, self.digest = [*self.digest.to_bytes(4)], 0
        return [*own, *(255 - byte for byte in own)]

    def tell(self, greatest: Tensor) -> None:
        """Take what `close` returned, of all ranks, and check it; of a GPU, what was told a step
        before, which has long arrived."""
        self.check()
        self.told = send_to_host(lambda: greatest, greatest.device), ", ".join(self.latest)
        if greatest.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise `RuntimeError`, on all ranks, if they did not do the same when they last told."""
        if self.told is None:
            return
        (arrive, latest), self.told = self.told, None
        told = look(arrive(), on_meta=[])
        half = len(told) // 2
        if any(a + b != 255 for a, b in zip(told[:half], told[half:], strict=True)):
            raise RuntimeError(f"{SAME_ORDER}. Here the last were: {latest}")
