"""Place the axes of a mesh on nodes.

Ranks are numbered in row-major order, the last axis fastest. So the order of the axes decides which
groups lie inside of a node, and which leave it. An axis that cannot fit into a node anyway should
not take the room of one that can, however much it sends.
Source: Narayanan et al. 2021 (arXiv 2104.04473), section 3, for "tensor inside of a node".
"""

import itertools
import math

import torch

from minipar.comm.mesh import groups_along
from minipar.emulate.link import LINKS, Link, Topology
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 20
GOOD = "the least time on links of all orders, whichever axis it is that sends the most"
PRAISE = "The same bytes, the same model: numbering ranks well costs nothing."
SIZES = (1,)

SHAPES = [  # sizes of the axes, nodes, ranks per node
    ({"dp": 2, "tp": 2, "pp": 2}, 2, 4),
    ({"tp": 4, "pp": 2, "dp": 2}, 4, 4),
    ({"tp": 4, "dp": 4, "cp": 2}, 16, 2),  # tp will not fit
    ({"tp": 2, "cp": 4, "pp": 2}, 2, 8),
]
WIRE = [(LINKS["nvlink4"], LINKS["ib-ndr"]), (LINKS["nvlink5"], LINKS["100gbe"])]


def given(size, random):
    """Triples (bytes by axis, sizes by axis, topology)."""
    cases = []
    for i, (sizes, nodes, ranks_per_node) in enumerate(SHAPES):
        axes = list(sizes)
        for heaviest in axes:  # each axis sends the most in one of the cases
            sent = {axis: int(torch.randint(10, 1000, (), generator=random)) for axis in axes}
            sent[heaviest] = max(sent.values()) * 4
            num_bytes = {axis: 1_000_000 * amount for axis, amount in sent.items()}
            wire = Topology(nodes, ranks_per_node, *WIRE[i % 2])
            cases.append((num_bytes, sizes, wire))
    return [(cases,)] * size


def run(answer, axis, cases):
    """The order of the axes in each case."""
    return [list(answer(dict(sent), dict(sizes), wire)) for sent, sizes, wire in cases]


def _seconds(order: list[str], num_bytes: dict, sizes: dict, topology: Topology) -> float:
    """Time on links of one step, one axis after the other."""
    placed = {axis: sizes[axis] for axis in order}
    total = 0.0
    for axis in order:
        links: set[Link] = {topology.between(ranks) for ranks in groups_along([axis], placed)}
        total += num_bytes[axis] / min(link.bandwidth for link in links)
    return total


def check_order(case: Case) -> None:
    for (_, sizes, _), order in zip(case.given[0][0], case.results[0], strict=True):
        if sorted(order) != sorted(sizes):
            raise CheckFailed(f"the axes {list(sizes)} in another order, please; got {order}")


def check_time(case: Case) -> None:
    for asked, order in zip(case.given[0][0], case.results[0], strict=True):
        best = min(itertools.permutations(asked[1]), key=lambda order, a=asked: _seconds(order, *a))
        took, least = _seconds(order, *asked), _seconds(best, *asked)
        if took > least * (1 + 1e-9):
            num_bytes, sizes, wire = asked
            raise CheckFailed(
                f"bytes {num_bytes} on a mesh {sizes}, {wire}:\n"
                f"{order} takes {1e3 * took:.2f} ms on the links, and {least / took:.0%} of that "
                f"would be enough"
            )


def solution(num_bytes, sizes, topology):
    def seconds(order):
        total, inner = 0.0, 1  # inner: ranks between two neighbours along this axis
        for axis in reversed(order):
            inner *= sizes[axis]
            inside = inner <= topology.ranks_per_node
            link = topology.intra if inside else topology.inter
            total += num_bytes[axis] / link.bandwidth
        return total

    assert math.prod(sizes.values()) == topology.nodes * topology.ranks_per_node
    return min(itertools.permutations(sizes), key=seconds)


@fails(
    "order",
    "The list is empty.",
)
def wrong_says_nothing(num_bytes, sizes, topology):
    return []


@fails(
    "time",
    "A fixed order by name: the bytes decide.",
)
def wrong_has_a_fixed_order(num_bytes, sizes, topology):
    """What one reads everywhere: pp outside, tp inside. Bytes depend on model and batch."""
    usual = ["pp", "dp", "cp", "tp"]
    return [axis for axis in usual if axis in sizes]


@fails(
    "time",
    "The most bytes are outermost: the last axis is the one inside of a node.",
)
def wrong_puts_the_most_bytes_outside(num_bytes, sizes, topology):
    """Takes the first axis for the fastest one."""
    return sorted(sizes, key=lambda axis: -num_bytes[axis])


@fails(
    "time",
    "By bytes alone: an axis longer than a node crosses wherever it stands.",
)
def wrong_looks_at_bytes_alone(num_bytes, sizes, topology):
    """The most bytes innermost, also where that axis is longer than a node."""
    return sorted(sizes, key=lambda axis: num_bytes[axis])


@fails(
    "time",
    "By sizes alone: the bytes that cross are what counts.",
)
def wrong_looks_at_sizes_alone(num_bytes, sizes, topology):
    """As many axes as possible inside of a node, whatever they send."""
    return sorted(sizes, key=lambda axis: -sizes[axis])
