"""The best cut of gradients into buckets, from when each is ready and what a call costs.

A bucket leaves once its last gradient is there and the bucket before it is done, and each call
delays the computing after it:

    end_k = max(ready_k + calls before k, end_(k-1)) + latency + bytes_k seconds_per_byte

Whatever the last bucket is, the step ends earliest if the buckets before it end as early as they
can. So the best cut into k buckets follows from the best cuts of all beginnings into k-1 (dynamic
programming), in O(k n^2) for n gradients.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from minipar.comm import clock
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.values import look

MOST_BUCKETS = 32
FINEST = 64  # a bucket ends only where another 64th of all bytes is complete


@dataclass(frozen=True)
class Costs:
    """Seconds of an all-reduce, per call and per byte, and how many of them delay computing."""

    latency: float
    per_byte: float
    call: float  # of the latency

    def end(self, ready: Sequence[float], num_bytes: Sequence[int]) -> float:
        """Return when the last bucket is done, from when each is ready (seconds) and its bytes."""
        end = 0.0
        for calls, (at, size) in enumerate(zip(ready, num_bytes, strict=True)):
            end = max(end, at + calls * self.call) + self.latency + size * self.per_byte
        return max(end, ready[-1] + len(ready) * self.call)

    def describe(self, ready: Sequence[float], num_bytes: Sequence[int]) -> str:
        """Return a line: when the last bucket is predicted to be done, and the sizes of all."""
        after = self.end(ready, num_bytes) - ready[-1]
        megabytes = ", ".join(f"{size / 1e6:.2g}" for size in num_bytes)
        return f"{1e3 * after:.2f} ms after the last gradient; {megabytes} MB"

    def __str__(self) -> str:
        price = f"{1e3 * self.latency:.2f} ms and {1e9 * self.per_byte:.2f} ms per MB"
        return f"An all-reduce takes {price}."


def measure(axis: Axis, like: Tensor, num_bytes: int, rounds: int = 4) -> Costs:
    """Time all-reduces of next to nothing and of `num_bytes`, as the axis is now. A collective.

    The best of `rounds`, then the slowest rank: the same numbers on all.
    """
    best = torch.full((2, 2), math.inf, dtype=torch.float64)
    many = max(2, num_bytes // like.element_size())
    for row, elements in enumerate((1, many)):
        flat = like.new_zeros(elements)
        for _ in range(rounds):
            start, busy = clock.now(), time.thread_time()
            all_reduce(flat, axis, out=flat)
            busy = time.thread_time() - busy
            if flat.device.type != "cpu":
                torch.accelerator.synchronize(flat.device)  # which may spin, in place of computing
            took = torch.tensor((clock.now() - start, busy), dtype=torch.float64)
            best[row] = torch.minimum(best[row], took)
    best = all_reduce(best.to(like.device), axis, "max")
    (latency, call), (seconds, _) = look(best, on_meta=None)
    per_byte = max(seconds - latency, 0) / (many * like.element_size())
    return Costs(latency, per_byte, min(call, latency))


def best_cut(ready: Sequence[float], num_bytes: Sequence[int], costs: Costs) -> list[int]:
    """Return how many gradients each bucket takes.

    Args:
        ready: seconds at which each gradient may be sent; never falling.
        num_bytes: of each gradient.
    """
    n, upto = len(ready), [0, *accumulate(num_bytes)]
    part = max(upto[-1] / FINEST, 1)
    ends = [j for j in range(1, n) if upto[j] // part > upto[j - 1] // part] + [n]
    # For the first j gradients in so many buckets: the earliest end, and where each bucket ends.
    earliest: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    best: tuple[float, list[int]] = (math.inf, [])
    for calls in range(min(MOST_BUCKETS, len(ends))):
        found = {}
        for j in ends:
            free = ready[j - 1] + calls * costs.call
            cuts = (
                (max(end, free) + costs.latency + (upto[j] - upto[i]) * costs.per_byte, [*cut, j])
                for i, (end, cut) in earliest.items()
                if i < j
            )
            found[j] = min(cuts, default=(math.inf, []))
        earliest = found
        end, cut = earliest[n]
        best = min(best, (max(end, ready[-1] + (calls + 1) * costs.call), cut))
    return [end - start for start, end in pairwise([0, *best[1]])]
