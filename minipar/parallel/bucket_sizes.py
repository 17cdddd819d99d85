"""How many gradients share a bucket: by a rule, or the best cut for measured times.

A bucket leaves once its last gradient is there and the bucket before it is done:

    end_k = max(ready_k, end_(k-1)) + latency + bytes_k seconds_per_byte

Whatever the last bucket is, the step ends earliest if the buckets before it end as early as they
can. So the best cut of n gradients follows from the best cuts of all beginnings (dynamic
programming), in O(n^2).
"""

from collections.abc import Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import clock
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.values import look
from minipar.parallel.base.shards import gradient_bytes, in_groups

FINEST = 64  # a bucket ends only where another 64th of all bytes is complete


# ---------------------------------------------------------------------- by a rule
def fill_buckets(parameters: list[nn.Parameter], capacity: float) -> list[list[nn.Parameter]]:
    """Pack `parameters`, in their order, into buckets of at most `capacity` bytes each.

    The first is a quarter of that and the second a half, so that the link has something to do early
    and never waits long for more; the last is a quarter, as no computation is left to hide it. A
    parameter larger than a bucket has one to itself. Different dtypes, devices or ranks with copies
    do not mix.
    """
    groups = in_groups(parameters, lambda i: capacity * min(1, 2**i / 4))
    last, left = [], capacity / 4
    if groups and sum(map(gradient_bytes, groups[-1])) > left:
        while gradient_bytes(groups[-1][-1]) <= left:
            left -= gradient_bytes(groups[-1][-1])
            last.insert(0, groups[-1].pop())
    return [group for group in [*groups, last] if group]


# ---------------------------------------------------------------------- by measured times
class Costs(NamedTuple):
    """Seconds of an all-reduce: per call, and per byte."""

    latency: float
    per_byte: float

    def end(self, ready: float, before: float, num_bytes: float) -> float:
        """Return the end of a bucket whose gradients are `ready`, after one that ends `before`."""
        return max(ready, before) + self.latency + num_bytes * self.per_byte


def measure(axis: Axis, like: Tensor, num_bytes: int, rounds: int = 4) -> Costs:
    """Time all-reduces of one element and of `num_bytes` bytes of `like`'s dtype; a collective.

    The best of `rounds`, then the slowest rank: the same numbers on all.
    """
    best, many = [], max(2, num_bytes // like.element_size())
    for elements in (1, many):
        flat, seconds = like.new_zeros(elements), []
        for _ in range(rounds):
            start = clock.now()
            all_reduce(flat, axis, out=flat)
            if flat.device.type != "cpu":
                torch.accelerator.synchronize(flat.device)
            seconds.append(clock.now() - start)
        best.append(min(seconds))
    slowest = all_reduce(torch.tensor(best, dtype=torch.float64, device=like.device), axis, "max")
    latency, longest = look(slowest, on_meta=None)
    return Costs(latency, max(longest - latency, 0) / (many * like.element_size()))


def best_cut(ready: Sequence[float], num_bytes: Sequence[int], costs: Costs) -> list[int]:
    """Return the number of gradients in each bucket with which the last is done first.

    Args:
        ready: seconds at which each gradient may be sent; never falling.
        num_bytes: of each gradient.
    """
    n, upto = len(ready), [0, *accumulate(num_bytes)]
    part = max(upto[-1] / FINEST, 1)
    ends = [j for j in range(1, n) if upto[j] // part > upto[j - 1] // part] + [n]
    # For the first j gradients: the earliest end, and where each bucket ends.
    earliest: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for j in ends:
        earliest[j] = min(
            (costs.end(ready[j - 1], before, upto[j] - upto[i]), [*cut, j])
            for i, (before, cut) in earliest.items()
        )
    return [end - start for start, end in pairwise([0, *earliest[n][1]])]


def choose(
    axis: Axis, arrived: Tensor, rule: list[list[int]], costs: Costs
) -> tuple[list[int], str]:
    """Return the best cut, and a text that compares it with `rule`: bytes by bucket; a collective.

    `arrived` [n]: the seconds at which each gradient came on this rank. The slowest rank counts,
    and a gradient that comes before its turn waits for the gradients before it.
    """
    ready = list(accumulate(look(all_reduce(arrived, axis, "max"), on_meta=None), max))
    num_bytes = [*chain(*rule)]
    chosen, lines = best_cut(ready, num_bytes, costs), []
    for name, cut in ("chosen", chosen), ("rule", [*map(len, rule)]):
        end, rest, sizes = 0.0, zip(ready, num_bytes, strict=True), []
        for many in cut:
            times, own = zip(*islice(rest, many), strict=True)
            sizes.append(sum(own))
            end = costs.end(times[-1], end, sizes[-1])
        megabytes = ", ".join(f"{size / 1e6:.2g}" for size in sizes)
        after = f"{1e3 * (end - ready[-1]):.2f} ms after the last gradient"
        lines.append(f"{name}: {after}; {megabytes} MB")
    price = f"{1e3 * costs.latency:.2f} ms and {1e9 * costs.per_byte:.2f} ms per MB"
    return chosen, "\n".join([*lines, f"An all-reduce takes {price}."])
