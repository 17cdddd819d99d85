"""How many tokens each expert gets: evenly many, as measured, or drawn from a skewed law.

A rank of an axis of experts has as many of them as any other, one after the other, so that the
ranks' loads differ as those of their experts do, and all wait for the busiest one.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from minipar.model.llama import LlamaConfig
from minipar.parallel import expert

Load = tuple[float, ...]
"""Tokens of each expert, in any unit; empty: all get as many."""


def skewed(num_experts: int, exponent: float, seed: int = 0) -> Load:
    """Return a load by Zipf's law, in an order that is drawn: the i-th gets 1 / i^exponent."""
    found = [place**-exponent for place in range(1, num_experts + 1)]
    random.Random(seed).shuffle(found)
    return tuple(found)


def check(load: Sequence[float], config: LlamaConfig) -> Load:
    """Return the load; raise `ValueError` for one that the experts of a model cannot have."""
    num_experts = config.moe.num_experts if config.moe else 0
    if load and (
        len(load) != num_experts
        or not all(0 <= tokens < math.inf for tokens in load)
        or not 0 < sum(load) < math.inf
    ):
        raise ValueError(
            f"tokens of {len(load)} experts, {sum(load):g} in all: the model has {num_experts} "
            f"experts, each of 0 tokens or more, and all together some"
        )
    return tuple(load)


def busiest(load: Load, num_ranks: int) -> tuple[int, float]:
    """Return which of so many ranks has the most to do, and how many times the mean."""
    if not load:
        return 0, 1.0
    each = max(1, len(load) // num_ranks)  # of more ranks than experts, a plan's `problem` says so
    sums = [sum(load[at : at + each]) for at in range(0, len(load), each)]
    return sums.index(max(sums)), max(sums) * num_ranks / sum(load)


@contextmanager
def assumed(load: Load) -> Iterator[None]:
    """In the body, experts get their shares of `load`, since a trace has no values to route by."""

    def shared_out(num: int, parts: int) -> list[int]:
        if parts != len(load):
            return evenly(num, parts)
        ends = [round(num * sum(load[: at + 1]) / sum(load)) for at in range(parts)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    evenly: Callable[[int, int], list[int]] = expert.evenly
    expert.evenly = shared_out
    try:
        yield
    finally:
        expert.evenly = evenly
