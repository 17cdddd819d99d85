"""How many gradients share a bucket: by a rule, or the best cut for measured times.

A bucket is sent once its last gradient is ready and the bucket before it is done. Each call delays
the compute after it:

    end_k = max(ready_k + calls before k, end_(k-1)) + latency + bytes_k seconds_per_byte

For any last bucket, the step ends earliest if the buckets before it end as early as possible. So
the best cut into k buckets follows from the best cuts of all prefixes into k-1 buckets (dynamic
programming), in O(k n^2) for n gradients.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

import torch
from torch import Tensor, nn

from minipar.comm import clock
from minipar.comm.collectives import all_reduce
from minipar.comm.hostcopy import look
from minipar.comm.mesh import Axis
from minipar.parallel.base.shards import gradient_bytes, in_groups

MOST_BUCKETS = 32
FINEST = 64  # a bucket ends only where another 64th of all bytes is complete


# ---------------------------------------------------------------------- by a rule
def fill_buckets(parameters: list[nn.Parameter], capacity: float) -> list[list[nn.Parameter]]:
    """Pack `parameters`, in their order, into buckets of at most `capacity` bytes each.

    The first bucket has a quarter of the capacity and the second a half, so that the link starts
    early. The last bucket has a quarter, as no compute is left to hide it. A parameter larger than
    a bucket gets its own bucket. All parameters of a bucket have the same dtype, device and ranks
    with copies.
    """
    groups = in_groups(parameters, lambda i: capacity * min(1, 2**i / 4))
    last, left = [], capacity / 4
    if groups and sum(map(gradient_bytes, groups[-1])) > left:
        while gradient_bytes(groups[-1][-1]) <= left:
            left -= gradient_bytes(groups[-1][-1])
            last.insert(0, groups[-1].pop())
    return [group for group in [*groups, last] if group]


# ---------------------------------------------------------------------- by measured times
@dataclass(frozen=True)
class Costs:
    """Seconds of an all-reduce, per call and per byte; `call` is the part that delays compute."""

    latency: float
    per_byte: float
    call: float = 0.0  # of the latency

    def end(self, ready: float, before: float, num_bytes: float, calls: int) -> float:
        """Return the end of a bucket whose gradients are `ready`, after a bucket done at `before`.

        `calls` is the number of buckets before; each has delayed the gradients by `call` seconds.
        """
        free = max(ready + calls * self.call, before)
        return free + self.latency + num_bytes * self.per_byte


def measure(axis: Axis, like: Tensor, num_bytes: int, rounds: int = 4) -> Costs:
    """Time all-reduces of one element and of `num_bytes` bytes of `like`'s dtype; a collective.

    Each rank takes its best of `rounds`. The slowest rank counts, so all ranks get the same costs.
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
                torch.accelerator.synchronize(flat.device)  # may spin: this is not in `busy`
            took = torch.tensor((clock.now() - start, busy), dtype=torch.float64)
            best[row] = torch.minimum(best[row], took)
    best = all_reduce(best.to(like.device), axis, "max")
    (latency, call), (seconds, _) = look(best, on_meta=None)
    per_byte = max(seconds - latency, 0) / (many * like.element_size())
    return Costs(latency, per_byte, min(call, latency))


def best_cut(ready: Sequence[float], num_bytes: Sequence[int], costs: Costs) -> list[int]:
    """Return the number of gradients in each bucket, so that the last bucket ends earliest.

    Args:
        ready: seconds at which each gradient may be sent, in ascending order.
        num_bytes: bytes of each gradient.
    """
    n, upto = len(ready), [0, *accumulate(num_bytes)]
    part = max(upto[-1] / FINEST, 1)
    ends = [j for j in range(1, n) if upto[j] // part > upto[j - 1] // part] + [n]
    # j -> for the first j gradients in `calls` buckets: the earliest end, and each bucket's end.
    earliest: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    best: tuple[float, list[int]] = (math.inf, [])
    for calls in range(min(MOST_BUCKETS, len(ends))):
        found = {}
        for j in ends:
            cuts = (
                (costs.end(ready[j - 1], end, upto[j] - upto[i], calls), [*cut, j])
                for i, (end, cut) in earliest.items()
                if i < j
            )
            found[j] = min(cuts, default=(math.inf, []))
        earliest = found
        end, cut = earliest[n]
        best = min(best, (max(end, ready[-1] + (calls + 1) * costs.call), cut))
    return [end - start for start, end in pairwise([0, *best[1]])]


def choose(
    axis: Axis, arrived: Tensor, rule: list[list[nn.Parameter]], costs: Costs
) -> tuple[list[list[nn.Parameter]], str]:
    """Return buckets by the best cut, and a text that compares it with `rule`; a collective.

    `arrived` [n]: the seconds at which each gradient came on this rank. The slowest rank counts,
    and a gradient that comes before its turn waits for the gradients before it.
    """
    ready = list(accumulate(look(all_reduce(arrived, axis, "max"), on_meta=None), max))
    num_bytes = [gradient_bytes(p) for bucket in rule for p in bucket]
    chosen, lines = best_cut(ready, num_bytes, costs), []
    for name, cut in ("chosen", chosen), ("rule", [*map(len, rule)]):
        end, rest, sizes = 0.0, zip(ready, num_bytes, strict=True), []
        for calls, many in enumerate(cut):
            times, own = zip(*islice(rest, many), strict=True)
            sizes.append(sum(own))
            end = costs.end(times[-1], end, sizes[-1], calls)
        megabytes = ", ".join(f"{size / 1e6:.2g}" for size in sizes)
        end = max(end, ready[-1] + len(cut) * costs.call)
        after = f"{1e3 * (end - ready[-1]):.2f} ms after the last gradient"
        lines.append(f"{name}: {after}; {megabytes} MB")
    price = f"{1e3 * costs.latency:.2f} ms and {1e9 * costs.per_byte:.2f} ms per MB"
    rest = chain(*rule)
    parts = [list(islice(rest, many)) for many in chosen]  # each is a bucket, if of one dtype
    buckets = [own for part in parts for own in in_groups(part, lambda _: math.inf)]
    return buckets, "\n".join([*lines, f"An all-reduce takes {price}."])
