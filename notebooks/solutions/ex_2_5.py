"""All-reduce on two levels: only a slice of each rank crosses from node to node.

Reduce-scatter inside of the node, all-reduce of the own slice across nodes, all-gather inside. A
tensor that the ranks of a node do not divide is padded with zeros first.
Source: Thakur, Rabenseifner & Gropp 2005 (the two halves); Jia et al. 2018 (arXiv 1807.11205),
section 3.2 (the levels).
"""

import torch

from minipar.comm.collectives import all_gather, all_reduce, reduce_scatter, wire_bytes
from minipar.lab.exercises import Case, Sent, fails

LEVEL, MINUTES = "medium", 20
GOOD = "the sum on all ranks, for any length, and one slice of each rank between nodes"
PRAISE = "Every card of a node carries its own slice: this is how clusters add up gradients."
MESH = {"across": 2, "inside": 3}

NODES, IN_NODE, LENGTH = *MESH.values(), 25
WHOLE = 8 * (LENGTH + -LENGTH % IN_NODE)  # bytes, with padding


def given(size, random):
    """A tensor [N] for each rank; neither two ranks divide N nor three."""
    return [(one,) for one in torch.randn(size, LENGTH, generator=random, dtype=torch.float64)]


def check_result(case: Case) -> None:
    case.expect_close([torch.stack([one for (one,) in case.given]).sum(0)] * case.size, "the sum")


def check_traffic(case: Case) -> None:
    expected = [
        Sent("reduce_scatter", wire_bytes("reduce_scatter", WHOLE, IN_NODE)),
        Sent("all_reduce", wire_bytes("all_reduce", WHOLE // IN_NODE, NODES)),
        Sent("all_gather", wire_bytes("all_gather", WHOLE, IN_NODE)),
    ]
    for rank in range(case.size):
        case.expect_sent(rank, expected)


def solution(tensor, across, inside):
    mine = reduce_scatter(_padded(tensor, inside), inside)
    return all_gather(all_reduce(mine, across), inside)[: len(tensor)]


def _padded(tensor, inside):
    return torch.nn.functional.pad(tensor, (0, -len(tensor) % inside.size))


@fails(
    "result",
    "Each rank used its own tensor: nothing was sent.",
)
def wrong_sends_nothing(tensor, across, inside):
    return tensor * (across.size * inside.size)


@fails(
    "result",
    "Each node has a sum of its own: all-reduce the slice across before you gather.",
)
def wrong_stays_inside(tensor, across, inside):
    mine = reduce_scatter(_padded(tensor, inside), inside)
    return all_gather(mine, inside)[: len(tensor)]


@fails(
    "result",
    "The padding is still there: cut the result to the length of the tensor.",
)
def wrong_keeps_the_padding(tensor, across, inside):
    mine = reduce_scatter(_padded(tensor, inside), inside)
    return all_gather(all_reduce(mine, across), inside)


@fails(
    "result",
    "The end of the tensor is lost: pad it to a multiple of the ranks inside.",
)
def wrong_drops_the_rest(tensor, across, inside):
    even = len(tensor) - len(tensor) % inside.size
    mine = reduce_scatter(tensor[:even], inside)
    return torch.cat([all_gather(all_reduce(mine, across), inside), tensor[even:]])


@fails(
    "run",
    "The ranks inside cut the tensor: pad it to a multiple of their number.",
)
def wrong_pads_for_the_other_axis(tensor, across, inside):
    mine = reduce_scatter(_padded(tensor, across), inside)
    return all_gather(all_reduce(mine, across), inside)[: len(tensor)]


@fails(
    "run",
    "The ranks inside cut the tensor: pad it to a multiple of their number.",
)
def wrong_does_not_pad(tensor, across, inside):
    return all_gather(all_reduce(reduce_scatter(tensor, inside), across), inside)


@fails(
    "traffic",
    "Whole tensors are all-reduced on both levels: cut inside of the node first.",
)
def wrong_never_cuts(tensor, across, inside):
    return all_reduce(all_reduce(tensor, inside), across)


@fails(
    "traffic",
    "The whole tensor crosses between nodes: sum the slices across before you gather.",
)
def wrong_gathers_too_early(tensor, across, inside):
    whole = all_gather(reduce_scatter(_padded(tensor, inside), inside), inside)
    return all_reduce(whole, across)[: len(tensor)]


@fails(
    "traffic",
    "The axes are exchanged: cut inside of the node, and add up the slices across.",
)
def wrong_exchanges_the_levels(tensor, across, inside):
    mine = reduce_scatter(_padded(tensor, across), across)
    return all_gather(all_reduce(mine, inside), across)[: len(tensor)]


@fails(
    "result",
    "The sum across was not used: all_reduce returns it.",
)
def wrong_drops_the_sum_across(tensor, across, inside):
    mine = reduce_scatter(_padded(tensor, inside), inside)
    all_reduce(mine, across)
    return all_gather(mine, inside)[: len(tensor)]
