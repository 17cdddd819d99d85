"""Tuning: which all-reduce is the fastest for so many bytes, from what messages cost on an axis."""

import functools
import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minipar.comm import collectives as comm
from minipar.comm import plans
from minipar.comm.mesh import Axis


@dataclass(frozen=True)
class Tuning:
    """The costs of an axis of `size` ranks: seconds per message, and per byte.

    `sharing` is the part of the bytes to several peers that queues: 1 where all go through one
    port, 1/(n-1) where each peer has a wire of its own.
    """

    size: int
    alpha: float  # a message
    beta: float  # a byte sent
    sharing: float = 1.0

    def seconds(self, algorithm: str, num_bytes: int) -> float:
        """Return the predicted time of an all-reduce of float32."""
        make, numel = plans.ALL_REDUCE[algorithm], -(-num_bytes // 4)
        every = [make(numel, rank, self.size) for rank in range(self.size)]
        return plans.seconds(every, 4, self.alpha, self.beta, self.sharing)

    @functools.cache  # noqa: B019 (a Tuning is small and lives as long as its axis)
    def best(self, num_bytes: int) -> str:
        """Return the algorithm with the smallest predicted time, the same on all ranks."""
        return min(plans.names_for(self.size), key=lambda name: self.seconds(name, num_bytes))


def tune(
    axis: Axis, sizes: Sequence[int] = (1_000, 10_000, 100_000, 1_000_000), *, rounds: int = 5
) -> Tuning:
    """Measure an axis by messages of `sizes` bytes round its ring. All ranks call it together.

    For each size the slowest rank counts, in the best of `rounds`; alpha and beta are the line
    through these times. Rank 0's numbers count for all, so that all ranks choose alike. Messages
    are in the memory of the host. Raises `ValueError` on NCCL, which chooses by itself.
    """
    if axis.size == 1:
        return Tuning(1, 0.0, 0.0)
    if "nccl" in dist.get_backend(axis.group):
        raise ValueError("tune: NCCL chooses its algorithms by itself; use gloo or link")
    left, right = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    others = [peer for peer in range(axis.size) if peer != axis.rank]
    ring = [_measure(axis, [right], [left], size, rounds) for size in sizes]
    to_all = _measure(axis, others, others, max(sizes), rounds)
    times = torch.tensor([*ring, to_all], dtype=torch.float64)
    *ring, to_all = comm.all_reduce(times, axis, op="max").tolist()
    alpha, beta = fit(sizes, ring)
    load = (to_all - alpha) / (beta * max(sizes))  # in messages, 1 to n-1
    sharing = min(max(load / (axis.size - 1), 1 / (axis.size - 1)), 1.0)
    agreed = comm.broadcast(torch.tensor([alpha, beta, sharing], dtype=torch.float64), axis)
    return Tuning(axis.size, *agreed.tolist())


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the alpha and beta of ``seconds = alpha + beta sizes``, by least squares.

    Errors count relative to the time. Else only the largest size would matter.
    """
    times = torch.tensor(seconds, dtype=torch.float64)[:, None]
    rows = torch.tensor([[1.0, size] for size in sizes], dtype=torch.float64) / times
    alpha, beta = torch.linalg.lstsq(rows, torch.ones_like(times)).solution.flatten().tolist()
    return max(alpha, 1e-9), max(beta, 1e-15)  # noise must not make a message free


def _measure(axis: Axis, to: list[int], source: list[int], num_bytes: int, rounds: int) -> float:
    """Return the seconds of the fastest exchange with these peers; the first one connects."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    sends = [(sent, peer) for peer in to]
    recvs = [(torch.empty_like(sent), peer) for peer in source]
    exchange = functools.partial(comm.exchange, sends, recvs, axis)
    barrier = functools.partial(comm.barrier, axis)
    return min(timeit.repeat(exchange, barrier, number=1, repeat=rounds + 1)[1:])
