"""What buckets of gradients cost: when the last one is done, from when each is ready.

A bucket leaves once its last gradient is there and the bucket before it is done, and each call
delays what is computed after it:

    end_k = max(ready_k + calls before k, end_(k-1)) + latency + bytes_k seconds_per_byte
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minipar.comm import clock
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.values import look


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
