"""The roofline of one layer: how long it takes at least, and what memory holds up.

A product of [m, k] and [k, n] costs 2 m k n FLOPs, and must at least read both matrices and write
the result. Whichever takes longer rules it; and that is asked of each product by itself, since a
device does one after the other.
Source: Williams, Waterman & Patterson 2009, "Roofline" (doi 10.1145/1498765.1498785).
"""

import torch

from minipar.lab.cases import apart
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "easy", 15
GOOD = "seconds right to nine digits, and the products that memory holds up, by name"
PRAISE = "Two numbers of a data sheet, and you know where a layer cannot be fast."
SIZES = (1,)


def given(size, random):
    """Products by name as (m, k, n), FLOP/s and bytes/s: of layers, for few tokens and for many."""
    cases = []
    for tokens in (1, 16, 512, 8192):
        width, hidden = (64 * int(torch.randint(16, 256, (), generator=random)) for _ in range(2))
        shapes = {
            "queries": (tokens, width, width),
            "keys": (tokens, width, width // 4),
            "up": (tokens, width, hidden),
            "down": (tokens, hidden, width),
            "router": (tokens, width, 8),  # of a mixture of experts
        }
        bandwidth = 1e12 * int(torch.randint(1, 8, (), generator=random))
        # With many tokens, computing holds up queries, and memory the router.
        flops = bandwidth * int(torch.randint(20, 450, (), generator=random))
        cases.append((shapes, flops, bandwidth))
    return [(cases,)] * size


def run(answer, axis, cases):
    """The pair of each case."""
    return [tuple(answer(*case)) for case in cases]


def _times(shape, flops, bandwidth) -> tuple[float, float]:
    m, k, n = shape
    return 2 * m * k * n / flops, 2 * (m * k + k * n + m * n) / bandwidth


def _answers(case: Case):
    return zip(case.given[0][0], case.results[0], strict=True)


def check_seconds(case: Case) -> None:
    for asked, (seconds, _) in _answers(case):
        want = sum(max(_times(shape, *asked[1:])) for shape in asked[0].values())
        if not abs(float(seconds) - want) <= 1e-9 * want:
            raise CheckFailed(
                f"{asked[0]} at {asked[1]:.3g} FLOP/s and {asked[2]:.3g} bytes/s, seconds: "
                f"{apart(want, float(seconds))}"
            )


def check_names(case: Case) -> None:
    for (shapes, flops, bandwidth), (_, names) in _answers(case):
        want = set()
        for name, shape in shapes.items():
            computing, moving = _times(shape, flops, bandwidth)
            if moving > computing:
                want.add(name)
        if set(names) != want:
            raise CheckFailed(f"{shapes}: memory holds up {sorted(want)}; got {sorted(names)}")


def solution(products, flops, bandwidth):
    seconds, held_up = 0.0, set()
    for name, (m, k, n) in products.items():
        computing = 2 * m * k * n / flops
        moving = 2 * (m * k + k * n + m * n) / bandwidth
        seconds += max(computing, moving)
        if moving > computing:
            held_up.add(name)
    return seconds, held_up


@fails(
    "seconds",
    "Sums over all products are compared: each has its own limit, FLOPs or bytes.",
)
def wrong_takes_the_larger_of_two_sums(products, flops, bandwidth):
    """As if one product's bytes could travel under another's FLOPs."""
    times = [_times(shape, flops, bandwidth) for shape in products.values()]
    return max(map(sum, zip(*times, strict=True))), solution(products, flops, bandwidth)[1]


@fails(
    "seconds",
    "Only the weights' bytes are counted: inputs and results travel, too.",
)
def wrong_counts_the_weights_alone(products, flops, bandwidth):
    """With many tokens, inputs and results are most of the bytes."""
    seconds = sum(
        max(2 * m * k * n / flops, 2 * k * n / bandwidth) for m, k, n in products.values()
    )
    return seconds, solution(products, flops, bandwidth)[1]


@fails(
    "seconds",
    "Half the FLOPs: a multiplication and its addition are two.",
)
def wrong_counts_a_multiplication_and_its_addition_as_one(products, flops, bandwidth):
    return solution(products, 2 * flops, bandwidth)[0], set()


@fails(
    "seconds",
    "Both times are added: bytes travel while numbers are computed, so the longer counts.",
)
def wrong_adds_both_times(products, flops, bandwidth):
    times = [_times(shape, flops, bandwidth) for shape in products.values()]
    return sum(map(sum, times)), solution(products, flops, bandwidth)[1]


@fails(
    "names",
    "These are held up by computing: the question is which are held up by memory.",
)
def wrong_names_what_computes_longest(products, flops, bandwidth):
    seconds, held_up = solution(products, flops, bandwidth)
    return seconds, set(products) - held_up
