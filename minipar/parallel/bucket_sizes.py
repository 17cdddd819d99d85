"""The best cut of gradients into buckets, from when each is ready and what a call costs.

A cut puts neighbours in the order of arrival into one bucket. A bucket leaves once its last
gradient is there and the bucket before it is done:

    end_k = max(ready_k, end_(k-1)) + latency + bytes_k seconds_per_byte

and each call delays all that is computed after it; each byte too, where no core is left to move it
but those that compute: there, fewer calls are all that is to be gained. Whatever the last bucket
is, the step ends earliest if those before it end as early as they can: so the best cut into k
buckets follows from the best cuts of all beginnings into k-1 (dynamic programming), in O(k n^2) for
n gradients.
"""

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm import clock
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.threads import usable_cores
from minipar.comm.values import look

MOST_BUCKETS = 32
FINEST = 64  # pieces at most, between which cuts are looked for


@dataclass(frozen=True)
class Costs:
    """Seconds of an all-reduce, per call and per byte, and how many of them delay computing."""

    latency: float
    per_byte: float
    call: float  # of the latency
    moving: float = 0.0  # of `per_byte`

    def end(self, ready: Sequence[float], num_bytes: Sequence[int]) -> float:
        """Return when the last bucket is done, from when each is ready (seconds) and its bytes."""
        end = delay = 0.0
        for at, size in zip(ready, num_bytes, strict=True):
            end = max(end, at + delay) + self.latency + size * self.per_byte
            delay += self.call + size * self.moving
        return max(end, ready[-1] + delay)


def measure(axis: Axis, like: Tensor, num_bytes: int, rounds: int = 4) -> Costs:
    """Time all-reduces of next to nothing and of `num_bytes`, as the axis is now. A collective.

    The best of `rounds`, then the slowest rank: the same numbers on all.
    """
    has_cores_to_spare = like.device.type != "cpu" or usable_cores() >= 2 * _ranks_per_host()
    busy_clock = time.thread_time if has_cores_to_spare else time.process_time
    best = torch.full((2, 2), float("inf"), dtype=torch.float64)
    many = max(2, num_bytes // like.element_size())
    for row, elements in enumerate((1, many)):
        flat = like.new_zeros(elements)
        for _ in range(rounds):
            start, busy = clock.now(), busy_clock()
            all_reduce(flat, axis, out=flat)
            busy = busy_clock() - busy
            if flat.device.type != "cpu":
                torch.accelerator.synchronize(flat.device)  # which may spin, in place of computing
            took = clock.now() - start, busy
            best[row] = torch.minimum(best[row], torch.tensor(took, dtype=torch.float64))
    best = all_reduce(best.to(like.device), axis, "max")
    (latency, call), (seconds, busy) = look(best, on_meta=None)
    num_bytes = many * like.element_size()
    per_byte, moving = max(seconds - latency, 0) / num_bytes, max(busy - call, 0) / num_bytes
    return Costs(latency, per_byte, min(call, latency), min(moving, per_byte))


def best_cut(ready: Sequence[float], num_bytes: Sequence[int], costs: Costs) -> list[int]:
    """Return how many gradients each bucket takes, in the order of arrival.

    Args:
        ready: seconds at which each gradient arrives, in this order; never falling.
        num_bytes: of each gradient.
    """
    pieces = _pieces(num_bytes)
    last = [end - 1 for end in accumulate(pieces)]
    total = list(accumulate(num_bytes, initial=0))
    upto = [0, *(total[i + 1] for i in last)]
    # for each beginning, the earliest end in so many buckets, and how many pieces each then takes
    earliest: list[tuple[float, list[int]]] = [(0.0, []), *[(math.inf, [])] * len(pieces)]
    best: tuple[float, list[int]] = (math.inf, [])
    for calls in range(min(MOST_BUCKETS, len(pieces))):
        found: list[tuple[float, list[int]]] = [(math.inf, [])]
        for j, i_last in enumerate(last, 1):
            free = ready[i_last] + calls * costs.call
            ends = (
                (
                    max(end, free + upto[i] * costs.moving)
                    + costs.latency
                    + (upto[j] - upto[i]) * costs.per_byte,
                    i,
                )
                for i, (end, _) in enumerate(earliest[:j])
            )
            end, i = min(ends)
            found.append((end, [*earliest[i][1], j - i]))
        earliest = found
        end, cut = earliest[-1]
        delay = (calls + 1) * costs.call + upto[-1] * costs.moving
        best = min(best, (max(end, ready[-1] + delay), cut))
    taken = iter(pieces)
    return [sum(islice(taken, many)) for many in best[1]]


def _pieces(num_bytes: Sequence[int]) -> list[int]:
    """Join neighbours up to a `FINEST`-th of all bytes; return how many each piece has."""
    least, held, pieces = sum(num_bytes) / FINEST, 0, [0]
    for size in num_bytes:
        held += size
        pieces[-1] += 1
        if held >= least:
            pieces.append(0)
            held = 0
    return pieces if pieces[-1] else pieces[:-1]


# ---------------------------------------------------------------------- when gradients arrive
def now(device: torch.device) -> Any:
    """Return a stamp of this moment; on a GPU, of when it gets to what was launched so far."""
    if device.type != "cuda":
        return clock.now()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_since_first(stamps: Iterable[Any]) -> list[float]:
    """Return what stamps mean, in seconds after the first; waits for the last on a GPU."""
    stamps = list(stamps)
    first, last = stamps[0] if stamps else 0.0, stamps[-1] if stamps else 0.0
    if isinstance(first, float):
        return [stamp - first for stamp in stamps]
    last.synchronize()
    return [first.elapsed_time(stamp) / 1e3 for stamp in stamps]


def compare(
    ready: Sequence[float], num_bytes: Sequence[int], costs: Costs, **cuts: Sequence[int]
) -> str:
    """Return a line for each cut: when its last bucket is predicted to be done, and the sizes."""
    lines, total = [], list(accumulate(num_bytes, initial=0))
    for name, cut in cuts.items():
        bounds = list(accumulate(cut, initial=0))
        sizes = [total[end] - total[start] for start, end in pairwise(bounds)]
        after = costs.end([ready[end - 1] for end in bounds[1:]], sizes) - ready[-1]
        megabytes = ", ".join(f"{size / 1e6:.2g}" for size in sizes)
        lines.append(f"{name}: {1e3 * after:.2f} ms after the last gradient; {megabytes} MB")
    price = f"{1e3 * costs.latency:.2f} ms and {1e9 * costs.per_byte:.2f} ms per MB"
    return "\n".join([*lines, f"An all-reduce takes {price}."])


def _ranks_per_host() -> int:
    """Return how many ranks of the job this host has: torchrun says so; without it, all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
