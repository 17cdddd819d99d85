"""Expert parallelism: each rank keeps some experts; tokens travel to their experts and back.

Idea.   A token passes k of E experts. So each of the n ranks of an axis keeps E/n experts, and the
        ranks hold different tokens, as under data parallelism. A layer sends each token to the
        ranks of its experts (*dispatch*). They compute and send the results back (*combine*).
Math.   As in moe.py. An expert sees the tokens of all n ranks, and backward brings it the gradients
        of all n ranks. So its gradient is complete along this axis: a sum or mean over the axis
        would be wrong. The router and all dense weights see the tokens of their own rank: their
        gradients are summed over the data axis, which contains this axis.
Twice.  So the same ranks have two roles. With dp=2, ep=2 (and cp as dp):

          rank                      0      1      2      3
          dense: copies on          all four: the data axis "dp+ep"
          experts: which            0..3   4..7   0..3   4..7     of 8, along "ep"
          experts: copies on        {0, 2} and {1, 3}: "dp"       over which gradients are summed

        `p.copies` of an expert names these ranks; ddp, zero and fsdp read it (`copies_axis`). Any
        ranks that hold different tokens may share experts, if their number divides E: ranks of ep,
        and with sequence_parallel of tp ("MoE Parallel Folding"). Where ranks of tp do not share
        experts, they have a part of each expert, or copies.
Shapes. tokens [N, D] V@ep; slots (token, choice) in the order of their experts [N k, D] V@ep;
        after dispatch [R, D] V@ep, where R depends on the data; experts [E/n, ...] V@ep.
Comms.  Per layer, rank and direction. M of the N k slots have an expert elsewhere: (n-1)/n of them
        on average. Rows of D numbers of e bytes.

          gather      forward and backward: 2 (n-1) N D e each; routing, 3 (n-1) N k numbers in all
          all-to-all  forward: M D e there, M' D e back, for M' rows of others; backward the
                      same; and once (n-1) 8 E bytes of counts

          hierarchical, on nodes of several ranks: U tokens of this rank have experts on another
                      node, once for each such node, and U' come from others'; V and V' slots then
                      go on inside the node and arrive there. Forward and backward:
                      2 (U + U' + V + V') D e, for weights (U + U') k e, for choices 8 U k;
                      and once (n-1) 8 (E + nodes) bytes of counts

          padded      forward and backward: 2 (n-1) C B E/n D e each, and no counts; B sequences of
                      T tokens have C B = B ceil(c k T / E) seats for each expert

        Balanced, gathering sends fewer bytes where n < k. Between nodes, hierarchical sends U rows
        where all-to-all sends one per slot, and results come back summed.
Memory. Experts, their gradients and state divided by n. Rows that arrive: R D numbers, at worst n
        times the N k D of a balanced router.
Costs you. The host reads the counts once per layer and pass (halves: twice), because the host sets
        the sizes of messages. On a GPU the host then waits for all queued work. "padded" takes the
        sizes from the capacity c: the host reads no counts, ranks send empty seats, too, and full
        experts drop tokens.
Source. Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3; DeepSeek-AI 2024 (arXiv
        2412.19437), section 3.2.2, for one copy per node; Liu et al. 2025, "MoE Parallel Folding"
        (arXiv 2504.14960), for the two roles. In torch: none; `torchtitan` has `ExpertParallel`.
Proved by tests/parallel/test_expert.py and tests/law/test_expert.py.

Use, before ddp, zero or fsdp over ``mesh.joint("dp", "ep")``::

    expert.apply(model, mesh.ep, copies=mesh.dp)
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.autograd import all_gather, all_to_all, reduce_scatter, start_all_to_all
from minipar.comm.hostcopy import to_device, to_host
from minipar.comm.mesh import Axis
from minipar.model.experts import add_up
from minipar.model.moe import MoE, MoEConfig, Routing, combine, mixtures, sort_by_expert
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import axes_of, check_divides, mark, region_of
from minipar.parallel.base.strategy import Strategy, refuse_state, share_counts, sum_over

Dispatch = Literal[
    "gather", "all_to_all", "hierarchical", "overlapped", "halves", "paired", "padded"
]


def apply(
    model: nn.Module,
    axis: Axis,
    *,
    copies: Axis | None = None,
    dispatch: Dispatch = "all_to_all",
    nodes: int = 1,
    batch: Axis | None = None,
    pieces: Axis | None = None,
) -> "ExpertParallel":
    """Cut the experts of `model` along `axis`, in place; the values come from its rank 0.

    Parameters keep their names, and hold this rank's experts (`region`, `shard_axes`). Then
    apply ddp, zero or fsdp over an axis that contains `axis` and `copies`.

    Args:
        copies: the ranks with the same experts; by default, none.
        dispatch: how tokens meet experts: "gather"; "all_to_all"; "hierarchical", with one copy for
            each node; "overlapped", where shared experts compute while tokens travel; "halves",
            where one half computes while the other travels; "paired", where a pipeline computes
            another microbatch meanwhile; or "padded" to the capacity, so that the host knows sizes.
        nodes: number of nodes, for "hierarchical"; ranks 0 to n/nodes - 1 of `axis` are on node 0,
            and so on.
        batch: the ranks that share a batch, over which routers count tokens for the bias and the
            balance "batch"; by default the ranks of `axis` and `copies`.
        pieces: the ranks that share each sequence, for the other balances; by default, none.

    Raises `ValueError` for experts that another strategy has already, and as `check_sizes`.
    """
    for name, p in model.named_parameters():
        if axes_of(p) or hasattr(p, "claimed_by"):
            raise ValueError(
                f"{name} is shared already; apply expert once, before tensor, ddp, zero and fsdp"
            )
    alone = Axis("alone", 0, 1, (axis.ranks[axis.rank],))
    copies, pieces = copies or alone, pieces or alone
    for _, moe in mixtures(model):
        check_sizes(moe.config, axis, dispatch, nodes, pieces.size)
        moe.gate.sum_pieces = sum_over(pieces)
    replicate(model, axis)
    share_counts(model, *((axis, copies) if batch is None else (batch,)))
    return ExpertParallel(model, axis, copies, dispatch, nodes)


def check_sizes(config: MoEConfig, axis: Axis, dispatch: str, nodes: int, pieces: int) -> None:
    """Raise `ValueError` unless numbers divide, and a capacity counts tokens of whole sequences."""
    check_divides("nodes", nodes, axis.name, axis.size)
    check_divides(axis.name, axis.size, "num_experts", config.num_experts)
    if dispatch == "padded" and config.capacity_factor is None:
        raise ValueError("dispatch=padded fills up to a capacity; capacity_factor=None has none")
    if config.capacity_factor is not None and pieces > 1:
        raise ValueError(
            f"capacity_factor={config.capacity_factor} serves the first tokens of each sequence, "
            f"and {pieces} ranks hold pieces of one; use cp=1 without sequence_parallel"
        )


# ---------------------------------------------------------------------- 1. all ranks see all tokens
def gathered(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Gather all tokens on all ranks, compute this rank's experts, and sum the results.

    Tokens [N, D], equally many on each rank -> [N, D].
    """
    config = moe.config
    every = Routing(
        collectives.all_gather(routing.experts, axis),  # [n N, k]
        all_gather(routing.weights, axis, to="R"),
    )
    tokens = all_gather(x, axis, to="R")  # [n N, D] R@ep
    order, counts = sort_by_expert(every.experts, config.num_experts)
    counts = on_host(counts[None], len(order))[0]
    own = experts_of(axis, config.num_experts)
    order = order[counts[: own.start].sum() : counts[: own.stop].sum()]
    rows = moe.experts(tokens[order // config.top_k], counts[own])
    summands = combine(rows, order, every, tokens)  # [n N, D] P@ep
    return moe.add(reduce_scatter(summands, axis), moe.shared(x))  # [N, D] V@ep


def experts_of(axis: Axis, num_experts: int) -> slice:
    """Return the numbers of this rank's experts."""
    per_rank = num_experts // axis.size
    return slice(axis.rank * per_rank, (axis.rank + 1) * per_rank)


# ---------------------------------------------------------------------- 2. tokens go to experts
class DispatchPlan:
    """The rows that this rank sends and receives, from the slots of all ranks by expert [n, E]."""

    def __init__(self, order: Tensor, counts: Tensor, axis: Axis) -> None:
        by_rank = counts.view(axis.size, axis.size, -1)  # [from, to, E/n], on the host
        self.send: list[int] = by_rank[axis.rank].sum(-1).tolist()  # rows to each rank
        self.receive: list[int] = by_rank[:, axis.rank].sum(-1).tolist()  # rows from each rank
        self.received = by_rank[:, axis.rank]  # [n, E/n]: rows arrive in this order
        self.order = order[: sum(self.send)]  # this rank's slots by expert; dropped slots are last

    def compute(self, moe: MoE, rows: Tensor) -> Tensor:
        """Pass rows [R, D], sorted by rank and then by expert, through the experts; keep the order.

        An expert has rows of each rank. Sort by expert, compute, undo the sorting.
        """
        n, num_own = self.received.shape
        lengths = to_device(self.received.flatten(), rows.device)
        expert = torch.arange(num_own, device=rows.device).repeat(n)
        expert = expert.repeat_interleave(lengths, output_size=len(rows))
        by_expert = expert.argsort(stable=True)
        out = moe.experts(rows.index_select(0, by_expert), self.received.sum(0))
        return torch.zeros_like(out).index_copy(0, by_expert, out)


def exchanged(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Send each row to the rank of its expert, and back: tokens [N, D] -> [N, D]."""
    plan = plan_dispatch(moe, axis, routing)
    return moe.add(dispatch_and_combine(moe, axis, plan, x, routing), moe.shared(x))


def dispatch_and_combine(
    moe: MoE, axis: Axis, plan: DispatchPlan, x: Tensor, routing: Routing
) -> Tensor:
    """Send, compute, send back, add up: tokens [N, D] -> the weighted sums of their slots."""
    rows = x[plan.order // moe.config.top_k]  # by expert, so by rank
    arrived = start_all_to_all(rows, axis, plan.send, plan.receive)()  # [R, D]
    computed = plan.compute(moe, arrived)
    back = start_all_to_all(computed, axis, plan.receive, plan.send)()
    return combine(back, plan.order, routing, x)


def plan_dispatch(moe: MoE, axis: Axis, routing: Routing) -> DispatchPlan:
    """Tell all ranks how many slots of this rank each expert has: (n-1) times 8 E bytes."""
    order, counts = sort_by_expert(routing.experts, moe.config.num_experts)
    table = collectives.all_gather(counts[None], axis)  # [n, E]
    return DispatchPlan(order, on_host(table, len(order)), axis)


def on_host(table: Tensor, num_slots: int) -> Tensor:
    """Return counts on the host, which sets the sizes of messages; the host waits for them.

    "meta" has no values: there `num_slots` of each rank are spread evenly over the experts.
    """
    if not table.is_meta:
        return to_host(table)
    num_experts = table.shape[1]
    even = [(num_slots + e) // num_experts for e in range(num_experts)]
    return torch.tensor(even, device="cpu").repeat(len(table), 1)


# ---------------------------------------------------------------------- 3. sizes that are known
def padded(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Send all seats of each expert, taken or empty: tokens [N, D] -> [N, D]."""
    if routing.seats is None:  # evaluation drops nothing
        return exchanged(moe, axis, x, routing)

    def compute(rows: Tensor) -> Tensor:  # [E, seats, D]: experts of the first to the last rank
        arrived = all_to_all(rows, axis, split_dim=0, concat_dim=1)  # [E/n, n seats, D]
        return all_to_all(moe.experts(arrived), axis, split_dim=1, concat_dim=0)

    return moe.add(moe.seated(x, routing, compute), moe.shared(x))


# ---------------------------------------------------------------------- 4. one copy for each node
def hierarchical(moe: MoE, axis: Axis, x: Tensor, routing: Routing, nodes: int) -> Tensor:
    """Send a token once to each node that has some of its experts, and there on to their ranks.

    Between nodes, a rank exchanges rows with the ranks in the same place on other nodes. Each of
    these adds up the results of its node's experts, and sends one row back. [N, D] -> [N, D].
    """
    num_experts, per_node = moe.config.num_experts, moe.config.num_experts // nodes
    node, place = divmod(axis.rank, axis.size // nodes)
    peers = slice(place, None, axis.size // nodes)  # ranks in this place, one on each node
    touched = torch.zeros(len(x), nodes + 1, dtype=torch.bool, device=x.device)
    touched = touched.scatter(1, routing.experts // per_node, True)[:, :nodes]
    order, counts = sort_by_expert(routing.experts, num_experts)
    table = collectives.all_gather(torch.cat([counts, touched.sum(0)])[None], axis)
    slots = on_host(table[:, :num_experts], len(order))  # [n, E]
    # "meta" has no counts: there each token has experts on all nodes.
    copies = on_host(table[:, num_experts:], nodes * len(x))  # [n, nodes]

    # 1. Between nodes: tokens with their choices and weights, to the peers.
    send, receive = [0] * axis.size, [0] * axis.size
    send[peers], receive[peers] = copies[axis.rank].tolist(), copies[peers, node].tolist()
    token = torch.nonzero_static(touched.T, size=sum(send))[:, 1]  # the host knows this size
    across = dict(axis=axis, send_counts=send, recv_counts=receive)
    arrived, weights = (start_all_to_all(t[token], **across)() for t in (x, routing.weights))
    chosen = collectives.all_to_all(routing.experts[token], **across)
    chosen = torch.where(chosen // per_node == node, chosen, num_experts)

    # 2. Inside each node: the copies are tokens like any others, with fewer choices.
    met = slots.view(nodes, -1, nodes, per_node).sum(0)  # [ranks of a node, nodes, E / nodes]
    inside = torch.block_diag(*met.unbind(1))  # [n, E]
    plan = DispatchPlan(sort_by_expert(chosen, num_experts)[0], inside, axis)
    sums = dispatch_and_combine(moe, axis, plan, arrived, Routing(chosen, weights))

    # 3. And back: one row for each copy.
    home = start_all_to_all(sums, axis, receive, send)()
    return moe.add(add_up(home, token, len(x), nodes), moe.shared(x))


# ---------------------------------------------------------------------- 5. while others compute
def overlapped(moe: MoE, axis: Axis, x: Tensor, routing: Routing, parts: int = 1) -> Tensor:
    """Exchange rows as `exchanged` does, and compute while they travel.

    With one part, the shared experts compute meanwhile. With two `parts` of the tokens, experts
    compute one part while the other travels. Backward has the same overlap, in reverse.
    """
    tokens, *cut = (t.tensor_split(parts) for t in (x, routing.experts, routing.weights))
    routings = [Routing(*pair) for pair in zip(*cut, strict=True)]
    plans = [plan_dispatch(moe, axis, own) for own in routings]
    there, back, outs = [], [], []
    for plan, part in zip(plans, tokens, strict=True):
        by_expert = plan.order // moe.config.top_k
        there.append(start_all_to_all(part[by_expert], axis, plan.send, plan.receive))
    shared = moe.shared(x)
    for plan, wait in zip(plans, there, strict=True):
        back.append(start_all_to_all(plan.compute(moe, wait()), axis, plan.receive, plan.send))
    for wait, plan, own, part in zip(back, plans, routings, tokens, strict=True):
        outs.append(combine(wait(), plan.order, own, part))
    return moe.add(torch.cat(outs), shared)


CORES: dict[str, Callable[..., Tensor]] = {
    "gather": gathered,
    "all_to_all": exchanged,
    "padded": padded,
    "hierarchical": hierarchical,
    "overlapped": overlapped,
    "halves": partial(overlapped, parts=2),
    "paired": overlapped,  # the pipeline computes another microbatch meanwhile
}


# ---------------------------------------------------------------------- 6. the model
class ExpertParallel(Strategy):
    """A model with its experts spread over an axis; made by `apply`."""

    def __init__(
        self, model: nn.Module, axis: Axis, copies: Axis, dispatch: Dispatch, nodes: int
    ) -> None:
        super().__init__(model, axis)
        self.shard_axes, self.copies = (axis,), copies
        options = dict(nodes=nodes) if dispatch == "hierarchical" else {}
        for _, moe in mixtures(model) if axis.size > 1 else ():
            moe.core = partial(CORES[dispatch], moe, axis, **options)
            for p in moe.experts.parameters():
                own, region = experts_of(axis, len(p)), region_of(p)
                spans = ((own.start, own.stop),), *region.spans[1:]
                mark(p, axis, region._replace(spans=spans))
                p.copies = copies
                p.data, p.grad = p.data[own].clone(), None
        refuse_state(model)
