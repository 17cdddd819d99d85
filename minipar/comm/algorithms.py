"""All-reduce from scratch: ring, trees, halving and doubling, from sends and receives alone.

Idea:   A plan (`minipar.comm.plans`) says which rank sends which elements to whom, and when. This
        file runs plans. Each round of a plan is one `collectives.exchange`. So the ledger shows
        one span per round.
Math:   A message of b bytes takes alpha + beta b seconds (Hockney 1994). With n ranks, S bytes on
        each, and lg = log2 n, an all-reduce costs the busiest rank:

        algorithm          rounds    messages   bytes sent        seconds
        ring               2(n-1)    2(n-1)     2 S (n-1)/n       2(n-1) alpha + 2 (n-1)/n S beta
        bidirectional      2(n-1)    4(n-1)     2 S (n-1)/n       the same; half the bytes where
                                                                  each neighbour has its own wire
        halving_doubling   2 lg      2 lg       2 S (n-1)/n       2 lg alpha + 2 (n-1)/n S beta
                                                                  (n = 2^k alone)
        double_tree        2d+g-1    <= 4 g     <= 2 S            <= (2d+g-1) (alpha + 2 S/g beta)
        direct             1         n-1        S (n-1)           alpha + (n-1) S beta
        hierarchical       the sum of its three steps; across nodes only S / (ranks inside)

        (g chunks; d the depth of a tree, floor(log2 n).)
        Small tensors want few rounds, large ones few bytes. `plans.seconds` computes the last
        column from the plans.
Bits:   All ranks end with the same bits: each element is added up in one place, or in one order.
Costs you: Python between rounds, and scratch memory for the elements received in a round.
Limits: Nothing else may exchange messages along an axis while a call runs on it. Run on gloo and on
        the emulated link; never tried on NCCL.
In torch: gloo's ring and NCCL's ring, tree and NVLS, chosen by NCCL's own alpha-beta table.
Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in
        MPICH"; Patarasuk & Yuan 2009; Sanders, Speck & Traeff 2009.
"""

import torch
from torch import Tensor

from minipar.comm import plans
from minipar.comm.collectives import exchange
from minipar.comm.mesh import Axis
from minipar.comm.plans import Plan, cut


def all_reduce(tensor: Tensor, axis: Axis, algorithm: str = "ring") -> Tensor:
    """Add up over all ranks; each gets the sum: [D, ...] -> [D, ...], any shape.

    `algorithm` is a key of `plans.ALL_REDUCE`. Raises `ValueError` for halving and doubling among
    ranks that are no power of two.
    """
    make, data = plans.ALL_REDUCE[algorithm], tensor.detach().flatten().clone()
    execute(make(data.numel(), axis.rank, axis.size), data, axis)
    return data.view(tensor.shape)


def hierarchical_all_reduce(tensor: Tensor, inner: Axis, across: Axis) -> Tensor:
    """Add up over both axes: reduce-scatter inside a node, all-reduce across, all-gather inside.

    With m ranks inside and k nodes, each rank sends 2 S (m-1)/m inside, where links are fast, and
    only 2 S/m (k-1)/k across. All three steps are rings.
    """
    data = tensor.detach().flatten().clone()
    parts = cut((0, data.numel()), inner.size)
    gather = plans.ring_gather(parts, inner.rank, inner.size)
    execute(plans.dual(gather), data, inner)
    mine = data[slice(*parts[inner.rank])]
    execute(plans.ring(mine.numel(), across.rank, across.size), mine, across)
    execute(gather, data, inner)
    return data.view(tensor.shape)


# ---------------------------------------------------------------------- running a plan
@torch.no_grad()
def execute(plan: Plan, data: Tensor, axis: Axis) -> None:
    """Carry out this rank's `plan` on the flat buffer `data`."""
    for step in plan:
        sends = [(data[m.lo : m.hi], m.peer) for m in step.sends if m.peer != axis.rank]
        # Receive into clones: a send may still read the target. A message to self is its clone.
        arriving = [(data[m.lo : m.hi].clone(), m) for m in step.recvs]
        recvs = [(landing, m.peer) for landing, m in arriving if m.peer != axis.rank]
        if sends or recvs:
            exchange(sends, recvs, axis)
        for landing, message in arriving:
            target = data[message.lo : message.hi]
            if message.add:
                target += landing
            else:
                target.copy_(landing)
