"""Workarounds for gloo: receives before sends, and large all-to-alls made of messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.mesh import Axis

_SLICES = 1  # tag of messages that make up a collective; the caller's own messages have tag 0
LARGE = 1 << 18  # bytes from which our own messages save more time than their Python takes


def all_to_all(
    arrived: Tensor, sent: Tensor, axis: Axis, is_async: bool, rows: Sequence[list[int]] = ()
) -> Any:
    """Start an all-to-all of rows.

    Gloo's own all-to-all posts sends before receives. So on a CPU, a large one is made of messages.
    Uneven `rows` always use gloo's own: a rank does not know how large the tensors of others are.
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

    Gloo uses one connection to send messages and to tell the peer that a buffer is ready. If a send
    came first, this notice would wait until the whole message has left.
    """
    landings = [(buffer, staged(buffer, axis)) for buffer, _ in recvs]
    ways = [(dist.irecv, b, peer) for (_, b), (_, peer) in zip(landings, recvs, strict=True)]
    ways += [(dist.isend, staged(tensor, axis), peer) for tensor, peer in sends]
    posts = [dist.P2POp(op, tensor, None, axis.group, tag, peer) for op, tensor, peer in ways]
    if any(post.tensor.is_meta for post in posts):  # meta has no backend for a batch
        return All([p.op(p.tensor, None, p.group, p.tag, p.group_peer) for p in posts])
    return All(dist.batch_isend_irecv(posts), landings) if posts else None


def staged(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor for a message: a copy on the host if ranks share a GPU, else `tensor`.

    Ranks that share a GPU use gloo, and gloo sends messages from host memory.
    """
    shared = tensor.is_cuda and axis.size > 1 and dist.get_backend(axis.group) == "gloo"
    return tensor.cpu() if shared else tensor


@dataclass(eq=False)
class All:
    """Several works with one `wait`, which also copies staged buffers back to the device."""

    works: Sequence[dist.Work]
    landings: Sequence[tuple[Tensor, Tensor]] = ()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for buffer, arrived in self.landings:
            if arrived is not buffer:
                buffer.copy_(arrived)

    @property
    def ended(self) -> torch.futures.Future:
        """Return a future of the end of all works, if the backend's works have an `ended`."""
        return torch.futures.collect_all([work.ended for work in self.works])

    @property
    def times(self) -> tuple[float, float]:
        """Return the start of the first work and the end of the last, if the backend knows them."""
        times = [work.times for work in self.works]
        return min(start for start, _ in times), max(end for _, end in times)
