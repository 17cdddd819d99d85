"""A hierarchical all-reduce in alpha and beta, beside a flat ring.

Reduce-scatter inside each node, all-reduce across nodes among GPUs with the same place, all-gather
inside. Across nodes each GPU sends for its own piece of the tensor only, and takes few steps. A
flat ring takes all its steps in lockstep, so that the slowest link rules each of them.
Source: Thakur, Rabenseifner & Gropp 2005, section 4.5; Jia et al. 2018 (arXiv 1807.11205), section
3.3, for the hierarchy.
"""

import torch

from minipar.lab.cases import apart
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "both times right to nine digits, for small tensors and for large ones"
PRAISE = "Now you can say from which size on a hierarchy pays, before anything is bought."
SIZES = (1,)


def given(size, random):
    """(bytes, GPUs of a node, nodes, inside, between), the last two (latency, bandwidth)."""
    cases = []
    for num_bytes in (1e3, 1e6, 1e9):
        for nodes in (2, 8, 64):
            gpus = 2 ** int(torch.randint(1, 4, (), generator=random))
            r = torch.rand(4, generator=random, dtype=torch.float64).tolist()
            inside = 1e-6 * (1 + r[0]), 1e11 * (1 + 4 * r[1])
            between = 1e-5 * (1 + r[2]), 1e10 * (1 + 4 * r[3])
            cases.append((num_bytes, gpus, nodes, inside, between))
    return [(cases,)] * size


def run(answer, axis, cases):
    """The pair of each case."""
    return [tuple(map(float, answer(*case))) for case in cases]


def _answers(case: Case):
    return zip(case.given[0][0], case.results[0], strict=True)


def _check(case: Case, which: int, name: str) -> None:
    for asked, times in _answers(case):
        want = _seconds(*asked)[which]
        if not abs(times[which] - want) <= 1e-9 * want:
            raise CheckFailed(
                f"{asked[0]:.0e} bytes, {asked[1]} GPUs on each of {asked[2]} nodes, inside "
                f"{asked[3]}, between {asked[4]}: {name}, microseconds: "
                f"{apart(1e6 * want, 1e6 * times[which])}"
            )


def check_hierarchical(case: Case) -> None:
    _check(case, 0, "the hierarchical one")


def check_flat(case: Case) -> None:
    _check(case, 1, "the flat ring")


def _seconds(num_bytes, gpus, nodes, inside, between):
    piece, n = num_bytes / gpus, gpus * nodes
    near = 2 * (gpus - 1) * (inside[0] + piece / inside[1])
    far = 2 * (nodes - 1) * (between[0] + piece / nodes / between[1])
    step = max(latency + num_bytes / n / bandwidth for latency, bandwidth in (inside, between))
    return near + far, 2 * (n - 1) * step


def solution(num_bytes, gpus, nodes, inside, between):
    (a, b), (c, d) = inside, between
    piece, n = num_bytes / gpus, gpus * nodes
    scatter = (gpus - 1) * (a + piece / b)
    across = 2 * (nodes - 1) * (c + piece / nodes / d)
    gather = scatter
    flat = 2 * (n - 1) * max(a + num_bytes / n / b, c + num_bytes / n / d)
    return scatter + across + gather, flat


@fails(
    "hierarchical",
    "The whole tensor crosses between nodes: after the reduce-scatter a GPU has a piece of it.",
)
def wrong_sends_the_whole_tensor_across(num_bytes, gpus, nodes, inside, between):
    """After the reduce-scatter a GPU has a piece, and that is what it sends."""
    whole = 2 * (nodes - 1) * (between[0] + num_bytes / nodes / between[1])
    near = 2 * (gpus - 1) * (inside[0] + num_bytes / gpus / inside[1])
    return near + whole, _seconds(num_bytes, gpus, nodes, inside, between)[1]


@fails(
    "hierarchical",
    "One step is missing: the all-gather inside the node, at the end.",
)
def wrong_never_gathers(num_bytes, gpus, nodes, inside, between):
    hierarchical, flat = _seconds(num_bytes, gpus, nodes, inside, between)
    return hierarchical - (gpus - 1) * (inside[0] + num_bytes / gpus / inside[1]), flat


@fails(
    "hierarchical",
    "One latency for each ring: every step of a ring waits for a message.",
)
def wrong_pays_one_latency_for_each_part(num_bytes, gpus, nodes, inside, between):
    """Each step of a ring waits for a message."""
    hierarchical, flat = _seconds(num_bytes, gpus, nodes, inside, between)
    return hierarchical - 2 * (gpus - 2) * inside[0] - 2 * (nodes - 2) * between[0], flat


@fails(
    "flat",
    "Only some steps of the flat ring are slow here: all GPUs step together, so every step is.",
)
def wrong_has_a_flat_ring_that_is_slow_between_nodes_only(num_bytes, gpus, nodes, inside, between):
    """All GPUs take a step together: those inside wait for those between."""
    n, hierarchical = gpus * nodes, _seconds(num_bytes, gpus, nodes, inside, between)[0]
    steps = [latency + num_bytes / n / bandwidth for latency, bandwidth in (inside, between)]
    share = (gpus - 1) / gpus
    return hierarchical, 2 * (n - 1) * (share * steps[0] + (1 - share) * steps[1])


@fails(
    "flat",
    "The flat ring has the bandwidth of the fast link: its slowest hop decides both.",
)
def wrong_mixes_the_worse_latency_with_the_better_bandwidth(
    num_bytes, gpus, nodes, inside, between
):
    n, hierarchical = gpus * nodes, _seconds(num_bytes, gpus, nodes, inside, between)[0]
    return hierarchical, 2 * (n - 1) * (between[0] + num_bytes / n / inside[1])
