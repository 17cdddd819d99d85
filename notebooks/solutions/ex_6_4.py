"""Hybrid sharding: shard inside of a node, replicate across nodes.

Whole tensors travel inside of the node, where links are fast. Between nodes goes only what cannot
be avoided: the gradient of this rank's shard, to the rank of the other node that holds the same.
Source: Zhao et al. 2023 (arXiv 2304.11277), section 3.2.2.
"""

import torch
import torch.distributed as dist

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, Sent, fails

LEVEL, MINUTES = "medium", 25
GOOD = "reduce-scatter in the node, all-reduce of the shard across nodes, all-gather in the node"
PRAISE = "Only a shard's gradient crosses between nodes: slow links carry as little as can be."
MESH = {"replica": 2, "node": 3}

NODES, IN_NODE, LENGTH = *MESH.values(), 24


def given(size, random):
    """For each rank: its slice of the weights [N / m], a gradient [N] of its own, and lr."""
    weights = torch.randn(IN_NODE, LENGTH // IN_NODE, generator=random, dtype=torch.float64)
    gradients = torch.randn(size, LENGTH, generator=random, dtype=torch.float64)
    lr = float(torch.rand((), generator=random)) + 0.1
    return [(weights[rank % IN_NODE].clone(), gradients[rank].clone(), lr) for rank in range(size)]


def check_result(case: Case) -> None:
    weights = torch.cat([shard for shard, _, _ in case.given[:IN_NODE]])
    mean = torch.stack([gradient for _, gradient, _ in case.given]).mean(0)
    case.expect_close([weights - case.given[0][2] * mean] * case.size, "the new weights")


def check_traffic(case: Case) -> None:
    whole = 8 * LENGTH
    expected = [
        Sent("reduce_scatter", wire_bytes("reduce_scatter", whole, IN_NODE)),
        Sent("all_reduce", wire_bytes("all_reduce", whole // IN_NODE, NODES)),
        Sent("all_gather", wire_bytes("all_gather", whole, IN_NODE)),
    ]
    for rank in range(case.size):
        case.expect_sent(rank, expected)


def solution(shard, gradient, lr, replica, node):
    mine = torch.empty_like(shard)
    dist.reduce_scatter_single(mine, gradient, group=node.group)
    dist.all_reduce(mine, group=replica.group)
    shard -= lr * mine / (node.size * replica.size)
    whole = torch.empty_like(gradient)
    dist.all_gather_single(whole, shard, group=node.group)
    return whole


@fails(
    "result",
    "Each rank used its own gradient: nothing was sent.",
)
def wrong_sends_nothing(shard, gradient, lr, replica, node):
    mine = gradient.chunk(node.size)[node.rank]
    return (shard - lr * mine).repeat(node.size)


@fails(
    "result",
    "Each node averages for itself: all-reduce the slice over the replicas.",
)
def wrong_nodes_drift_apart(shard, gradient, lr, replica, node):
    """Each node averages for itself."""
    mine = torch.empty_like(shard)
    dist.reduce_scatter_single(mine, gradient, group=node.group)
    return _gathered(shard - lr * mine / node.size, node)


@fails(
    "result",
    "The step is replica.size times too long: divide by the number of all ranks.",
)
def wrong_divides_by_the_node_alone(shard, gradient, lr, replica, node):
    mine = torch.empty_like(shard)
    dist.reduce_scatter_single(mine, gradient, group=node.group)
    dist.all_reduce(mine, group=replica.group)
    return _gathered(shard - lr * mine / node.size, node)


@fails(
    "result",
    "The step has another length: divide by the number of all ranks, node.size * replica.size.",
)
def wrong_takes_a_square_mesh_for_granted(shard, gradient, lr, replica, node):
    mine = torch.empty_like(shard)
    dist.reduce_scatter_single(mine, gradient, group=node.group)
    dist.all_reduce(mine, group=replica.group)
    return _gathered(shard - lr * mine / node.size**2, node)


@fails(
    "run",
    "Sizes do not fit: cut along node and not along replica, and give the output first.",
)
def wrong_axis_first(shard, gradient, lr, replica, node):
    """Cuts across nodes and sums inside: a slice of gradients that belongs to other weights."""
    mine = torch.empty_like(shard)
    dist.reduce_scatter_single(mine, gradient, group=replica.group)
    dist.all_reduce(mine, group=node.group)
    return _gathered(shard - lr * mine / (node.size * replica.size), node)


@fails(
    "traffic",
    "The whole gradient crosses the nodes: reduce-scatter in the node first.",
)
def wrong_crosses_first(shard, gradient, lr, replica, node):
    """The whole gradient crosses between nodes, and is cut afterwards."""
    mine = torch.empty_like(shard)
    dist.all_reduce(gradient, group=replica.group)
    dist.reduce_scatter_single(mine, gradient, group=node.group)
    return _gathered(shard - lr * mine / (node.size * replica.size), node)


@fails(
    "traffic",
    "Whole gradients are all-reduced over both axes: cut first.",
)
def wrong_cuts_last(shard, gradient, lr, replica, node):
    """Plain data parallelism on both axes: no gradient is ever cut."""
    dist.all_reduce(gradient, group=node.group)
    dist.all_reduce(gradient, group=replica.group)
    mine = gradient.chunk(node.size)[node.rank]
    return _gathered(shard - lr * mine / (node.size * replica.size), node)


def _gathered(shard, node):
    whole = shard.new_empty(len(shard) * node.size)
    dist.all_gather_single(whole, shard, group=node.group)
    return whole


@fails(
    "result",
    "A sum of gradients, where their average is asked for: divide by all ranks.",
)
def wrong_forgets_to_divide(shard, gradient, lr, replica, node):
    return solution(shard, gradient, lr * node.size * replica.size, replica, node)


@fails(
    "result",
    "The weights go uphill: subtract lr times the gradient.",
)
def wrong_adds_the_gradient(shard, gradient, lr, replica, node):
    return solution(shard, gradient, -lr, replica, node)


@fails(
    "result",
    "The gradient was gathered: gather the new weights.",
)
def wrong_gathers_the_gradient(shard, gradient, lr, replica, node):
    mine = torch.empty_like(shard)
    dist.reduce_scatter_single(mine, gradient, group=node.group)
    dist.all_reduce(mine, group=replica.group)
    return _gathered(mine, node)
