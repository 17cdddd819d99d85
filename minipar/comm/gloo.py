"""Gloo's gaps: the right order of messages, and large all-to-alls made of messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.mesh import Axis

_SLICES = 1
"""Tag of messages that make up a collective. The caller's own messages have tag 0."""
LARGE = 1 << 18
"""Bytes from which messages of ours gain more time than Python costs."""


def all_to_all(
    arrived: Tensor, sent: Tensor, axis: Axis, is_async: bool, rows: Sequence[list[int]] = ()
) -> Any:
    """Start an all-to-all of rows.

    Gloo's own posts sends before receives, so on a CPU a large one is made of messages. Not with
    uneven `rows`: a rank does not know whether the others have large ones.
    """
    is_gloo = sent.device.type == "cpu" and "gloo" in dist.get_backend(axis.group)
    if rows or sent.nbytes < LARGE or not is_gloo:
        recv_rows, send_rows = rows or (None, None)
        return dist.all_to_all_single(arrived, sent, recv_rows, send_rows, axis.group, is_async)
    n, rank = axis.size, axis.rank
    into, out = arrived.split(len(arrived) // n), sent.split(len(sent) // n)
    into[rank].copy_(out[rank])
    sends = [(out[(rank + k) % n], (rank + k) % n) for k in range(1, n)]
    recvs = [(into[(rank - k) % n], (rank - k) % n) for k in range(1, n)]
    return post(sends, recvs, axis, _SLICES)


def post(
    sends: Sequence[tuple[Tensor, int]],
    recvs: Sequence[tuple[Tensor, int]],
    axis: Axis,
    tag: int = 0,
) -> "All | None":
    """Post messages, receives first.

    Gloo tells the peer that a buffer is ready over the same connection. Behind a message that is
    leaving, this notice would wait for the end of the message.
    """
    landings = [(buffer, staged(buffer, axis)) for buffer, _ in recvs]
    ways = [(dist.irecv, b, peer) for (_, b), (_, peer) in zip(landings, recvs, strict=True)]
    ways += [(dist.isend, staged(tensor, axis), peer) for tensor, peer in sends]
    posts = [dist.P2POp(op, tensor, None, axis.group, tag, peer) for op, tensor, peer in ways]
    if any(post.tensor.is_meta for post in posts):  # meta has no backend for a batch
        return All([p.op(p.tensor, None, p.group, p.tag, p.group_peer) for p in posts])
    return All(dist.batch_isend_irecv(posts), landings) if posts else None


def staged(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor that travels as a message: for ranks that share a GPU, a copy on the host.

    These ranks talk over gloo, and gloo sends messages from memory of the host.
    """
    shared = tensor.is_cuda and axis.size > 1 and dist.get_backend(axis.group) == "gloo"
    return tensor.cpu() if shared else tensor


@dataclass(eq=False)
class All:
    """Several works that are waited for as one, and then the copies of staged buffers."""

    works: Sequence[dist.Work]
    landings: Sequence[tuple[Tensor, Tensor]] = ()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for buffer, arrived in self.landings:
            if arrived is not buffer:
                buffer.copy_(arrived)
        self.landings = ()

    @property
    def ended(self) -> torch.futures.Future:
        """Return the end of all works, where a backend tells of it apart from `wait`."""
        return torch.futures.collect_all([work.ended for work in self.works])

    @property
    def times(self) -> tuple[float, float]:
        """Return the start of the first and the end of the last, where the backend knows them."""
        times = [work.times for work in self.works]
        return min(start for start, _ in times), max(end for _, end in times)
