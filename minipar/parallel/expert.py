"""Expert parallelism: each rank keeps some of the experts, and tokens travel to theirs and back.

Idea.   Of E experts a token passes k. So the n ranks of an axis keep E/n of them each, and hold
        different tokens, as under data parallelism: a layer sends each token to the ranks of its
        experts (*dispatch*), which compute, and send the results back (*combine*).
Math.   That of moe.py. An expert sees the tokens of all n ranks, and backward brings it the
        gradients of all of them: its gradient is complete along this axis, and must neither be
        summed nor averaged there again. A router, like all that is dense, has seen the tokens of
        its own rank: its gradient is a part of the sum over the data axis, which contains this one.
Twice.  So the same ranks are seen twice. With dp=2, ep=2 (and cp as dp):

          rank                      0      1      2      3
          dense: copies on          all four: the data axis "dp+ep"
          experts: which            0..3   4..7   0..3   4..7     of 8, along "ep"
          experts: copies on        {0, 2} and {1, 3}: "dp"       over which gradients are summed

        `p.copies` of an expert names these, and ddp, zero and fsdp heed it (`copies_axis`).
        Which ranks may share experts? All that hold different tokens, in any number that divides
        E: those of ep, of cp, and with sequence_parallel those of tp; also fewer than cp x tp, as
        nothing asks for a least one. That is "MoE Parallel Folding", whose dp is our dp x ep. Where
        ranks of tp do not share experts, they have a part of each of them, or copies.
Shapes. tokens [N, D] V@ep; slots (token, choice) in the order of their experts [N k, D] V@ep;
        after dispatch [R, D] V@ep, R as many as the data wants; experts [E/n, ...] V@ep.
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

        Balanced, gathering sends fewer bytes where n < k: use it there. Between nodes, hierarchical
        sends U rows where all-to-all sends one for each slot, and results come back summed.
Memory. Experts, their gradients and state divided by n. Rows that arrive: R D numbers, at worst n
        times the N k D of a balanced router.
Costs you. Counts are read by the host once per layer and pass, because sizes of messages are the
        host's business: on a GPU it waits there for all that was queued before them, and the shared
        experts compute meanwhile ("overlapped" and "halves" keep these for the rows). Not so when
        "padded": with a capacity c, sizes are known; empty seats travel, and full experts drop
        tokens. The slowest rank is the one with the most rows.
Source. Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3; Rajbhandari et al. 2022,
        "DeepSpeed-MoE" (arXiv 2201.05596); DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.2, for
        one copy per node; Liu et al. 2025, "MoE Parallel Folding" (arXiv
        2504.14960), for the two views of the same ranks.
In torch: none; `torchtitan` has `ExpertParallel`.
Proved by tests/parallel/test_expert.py and tests/parity/test_expert.py; taught in
notebooks/11_expert_parallel.ipynb.

Use, before ddp, zero or fsdp over ``mesh.joint("dp", "ep")``::

    expert.apply(model, mesh.ep, copies=mesh.dp)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.autograd import all_gather, all_to_all, reduce_scatter
from minipar.comm.mesh import Axis
from minipar.comm.values import send_to_host, to_device, to_host
from minipar.model.experts import add_up
from minipar.model.moe import MoE, MoEConfig, Routing, combine, mixtures, sort_by_expert
from minipar.parallel.async_all_to_all import AsyncAllToAll
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import axes_of, check_divides, full_shape, is_part, mark
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
    """Cut the experts of `model` along `axis`, in place; the values are those of its rank 0.

    Parameters keep their names, and hold this rank's experts (`full_shape`, `shard_axes`). Apply
    it before ddp, zero or fsdp, over an axis that contains `axis` and `copies`.

    Args:
        copies: the ranks with the same experts; by default, none.
        dispatch: how tokens meet experts: "gather", "all_to_all"; "hierarchical", with one copy for
            each node; "overlapped" with the shared experts, which compute while tokens travel; in
            "halves", of which one computes while the other travels; "paired", which is "overlapped"
            for a pipeline that computes another microbatch meanwhile; or "padded" to the capacity,
            so that the host need not wait to know sizes.
        nodes: on so many nodes the ranks of `axis` are, one node after the other, each with as
            many; "hierarchical" needs to know.
        batch: the ranks that share a batch, over which the bias and the balance of the "batch"
            count; by default those of `axis` and `copies`.
        pieces: the ranks that share each sequence, which the other balances need; by default, none.

    Raises `ValueError` for a model without experts, or with experts that are spread already, or
    trained by ddp, zero or fsdp; for weights that tensor parallelism has cut along `axis`; for an
    axis that does not divide them, a bias of another shape, an unknown `dispatch`, "padded" without
    a capacity, a capacity for sequences in `pieces`, or nodes that do not divide the axis, before
    the first collective.
    """
    found = dict(mixtures(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts to spread over {axis.name}")
    if dispatch not in get_args(Dispatch):
        raise ValueError(f"dispatch={dispatch!r} is unknown; use {', '.join(get_args(Dispatch))}")
    check_nodes(nodes, axis.size, axis.name)
    for name, p in model.named_parameters():
        other = f"expert along {axes_of(p)[0].name}" if hasattr(p, "copies") else None
        if other := other or next(iter(getattr(p, "claimed_by", ())), None):
            raise ValueError(
                f"{name} is shared by {other} already; apply expert once, before ddp, zero or fsdp"
            )
        if any(is_part(a, axis) for a in axes_of(p)):
            raise ValueError(
                f"{name} is cut along {axis.name} already; apply expert before tensor parallelism"
            )
    for name, moe in found.items():
        check_sizes(moe.config, axis.size, axis.name)
        check_capacity(moe.config, dispatch, 1 if pieces is None else pieces.size)
        bias, num_experts = moe.gate.e_score_correction_bias, moe.config.num_experts
        if bias is not None and tuple(bias.shape) != (num_experts,):
            raise ValueError(
                f"{name}.gate.e_score_correction_bias has shape {tuple(bias.shape)}; a router to "
                f"num_experts={num_experts} needs ({num_experts},)"
            )
    replicate(model, axis)
    copies = copies or Axis("copies", 0, 1, (axis.ranks[axis.rank],))
    share = (batch,) if batch is not None else (axis, copies)
    return ExpertParallel(model, axis, copies, dispatch, nodes, share, pieces)


def check_whole(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `ValueError` for a state with weights of other `shapes`, such as one rank's experts."""
    for name, shape in shapes.items():
        if (found := state.get(name)) is not None and tuple(found.shape) != tuple(shape):
            raise ValueError(
                f"{name} has shape {tuple(found.shape)} in this state, and {tuple(shape)} in the "
                f"whole model: one rank's experts are no checkpoint; save full_state_dict()"
            )


def check_sizes(config: MoEConfig, n: int, name: str = "ep") -> None:
    """Raise `ValueError` unless n ranks can share the experts."""
    check_divides(name, n, "num_experts", config.num_experts)


def check_capacity(config: MoEConfig, dispatch: str, pieces: int) -> None:
    """Raise `ValueError` unless sequences are whole where a capacity counts their tokens."""
    if dispatch == "padded" and config.capacity_factor is None:
        raise ValueError("dispatch=padded fills up to a capacity; capacity_factor=None has none")
    if config.capacity_factor is not None and pieces > 1:
        raise ValueError(
            f"capacity_factor={config.capacity_factor} serves the first tokens of each sequence, "
            f"and {pieces} ranks hold pieces of one; use cp=1 without sequence_parallel"
        )


def check_nodes(nodes: int, n: int, name: str = "ep") -> None:
    """Raise `ValueError` unless n ranks can be on so many nodes, as many on each."""
    check_divides("nodes", nodes, name, n)


# ---------------------------------------------------------------------- 1. all ranks see all tokens
def gathered(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """The reference: every rank gathers all tokens, computes its experts', and results are added.

    Tokens [N, D], as many on each rank -> the same.
    """
    config = moe.config
    every = Routing(
        collectives.all_gather(routing.experts, axis),  # [n N, k]
        all_gather(routing.weights, axis, to="R"),
    )
    tokens = all_gather(x, axis, to="R")  # [n N, D] R@ep
    order, counts = sort_by_expert(every.experts, config.num_experts)
    counts = on_host(counts[None], [len(order)])[0]
    own = experts_of(axis, config.num_experts)
    order = order[counts[: own.start].sum() : counts[: own.stop].sum()]
    rows = moe.experts(tokens[order // config.top_k], counts[own], moe.how)
    summands = combine(rows, order, every, tokens)  # [n N, D] P@ep
    return moe.add(reduce_scatter(summands, axis), moe.shared(x))  # [N, D] V@ep


# ---------------------------------------------------------------------- 2. tokens go to theirs
def padded(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Each rank has as many seats at each expert, taken or not: tokens [N, D] -> the same."""
    if routing.seats is None:  # in evaluation, which drops nothing
        return exchanged(moe, axis, x, routing)

    def elsewhere(rows: Tensor) -> Tensor:  # [E, seats, D]: first to last rank
        arrived = all_to_all(rows, axis, split_dim=0, concat_dim=1)  # [E/n, n seats, D]
        return all_to_all(moe.experts.padded(arrived), axis, split_dim=1, concat_dim=0)

    return moe.add(moe.seated(x, routing, elsewhere), moe.shared(x))


def exchanged(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Each row goes to the rank of its expert, and back: tokens [N, D] -> the same."""
    trips = plan_trips(moe, axis, [routing])
    shared = moe.shared(x)  # while counts travel
    (trip,) = trips()
    return moe.add(travel(moe, axis, trip, x, routing), shared)


def travel(moe: MoE, axis: Axis, trip: "Trip", x: Tensor, routing: Routing) -> Tensor:
    """Dispatch, compute, combine: tokens [N, D] -> the weighted sums of their slots in `trip`."""
    rows = x[trip.order // moe.config.top_k]  # by expert, so by rank
    arrived = all_to_all(rows, axis, send_counts=trip.there, recv_counts=trip.here)  # [R, D]
    computed = trip.compute(moe, arrived)
    back = all_to_all(computed, axis, send_counts=trip.here, recv_counts=trip.there)
    return combine(back, trip.order, routing, x)


class Trip:
    """Who sends how many rows to whom: from a `table` [n, E], slots of each rank by expert, which
    is on the host."""

    def __init__(self, order: Tensor, table: Tensor, axis: Axis) -> None:
        self.order = order  # of the slots of this rank that travel
        by_rank = table.view(axis.size, axis.size, -1)  # [from, to, E/n]
        self.there: list[int] = by_rank[axis.rank].sum(-1).tolist()  # rows to each rank
        self.here: list[int] = by_rank[:, axis.rank].sum(-1).tolist()  # rows from each rank
        self.parts = by_rank[:, axis.rank]  # [n, E/n]: in this order they arrive

    def compute(self, moe: MoE, arrived: Tensor) -> Tensor:
        """Rows [R, D], by rank and then by expert -> what the experts make of them, as they lay."""
        n, num_own = self.parts.shape
        lengths = to_device(self.parts.flatten(), arrived.device)
        expert = torch.arange(num_own, device=arrived.device).repeat(n)
        expert = expert.repeat_interleave(lengths, output_size=len(arrived))
        by_expert = expert.argsort(stable=True)
        out = moe.experts(arrived.index_select(0, by_expert), self.parts.sum(0), moe.how)
        return torch.zeros_like(out).index_copy(0, by_expert, out)


def plan_trips(moe: MoE, axis: Axis, routings: list[Routing]) -> Callable[[], list[Trip]]:
    """Begin to let all ranks know all counts; returns what waits, and plans a trip of each part.

    A collective: (n-1) times 8 E bytes for each part.
    """
    config, parts = moe.config, len(routings)
    orders, counts = zip(
        *(sort_by_expert(routing.experts, config.num_experts) for routing in routings), strict=True
    )
    told = tell(torch.stack(counts), axis)

    def trips() -> list[Trip]:
        table = on_host(told(), [len(order) for order in orders]).view(axis.size, parts, -1)
        return [
            Trip(order[: int(theirs[axis.rank].sum())], theirs, axis)  # but for dropped slots
            for order, theirs in zip(orders, table.unbind(1), strict=True)
        ]

    return trips


def tell(counts: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Begin to gather `counts` [parts, E]; returns what waits for all of them, [n parts, E]."""
    gathering = collectives.all_gather(counts, axis, async_op=True)
    told = send_to_host(gathering.wait, counts.device)
    # NCCL lets go of `counts` as soon as a stream waits, maybe before it has read them: we do not.
    return lambda: (told(), counts)[0]


def on_host(table: Tensor, num_slots: list[int]) -> Tensor:
    """Counts where sizes of messages are decided: the one place here that waits for values.

    On "meta" there are none: all experts are used alike, by `num_slots` in each part of a rank.
    """
    if not table.is_meta:
        return to_host(table)
    even = [evenly(num, table.shape[1]) for num in num_slots]
    return torch.tensor(even, device="cpu").repeat(len(table) // len(num_slots), 1)


def evenly(num: int, parts: int) -> list[int]:
    """7 in 3 parts is 3, 2, 2."""
    return [num // parts + (part < num % parts) for part in range(parts)]


def experts_of(axis: Axis, num_experts: int) -> slice:
    """The experts of this rank."""
    per_rank = num_experts // axis.size
    return slice(axis.rank * per_rank, (axis.rank + 1) * per_rank)


# ---------------------------------------------------------------------- 3. one copy for each node
def hierarchical(moe: MoE, axis: Axis, x: Tensor, routing: Routing, nodes: int) -> Tensor:
    """A token goes once to each node with experts of it, and there on to their ranks.

    Between nodes, ranks talk to those in the same place on theirs, which add up what the experts of
    a node say before it goes back. Tokens [N, D] -> the same.
    """
    num_experts, per_node = moe.config.num_experts, moe.config.num_experts // nodes
    node, place = divmod(axis.rank, axis.size // nodes)
    touched = torch.zeros(len(x), nodes + 1, dtype=torch.bool, device=x.device)
    touched = touched.scatter(1, routing.experts // per_node, True)[:, :nodes]
    order, counts = sort_by_expert(routing.experts, num_experts)
    told = tell(torch.cat([counts, touched.sum(0)])[None], axis)
    shared, told = moe.shared(x), told()  # computed while counts travel
    table = on_host(told[:, :num_experts], [len(order)])  # [n, E] slots
    share = nodes_touched(num_experts, moe.config.top_k, nodes)
    copies = on_host(told[:, num_experts:], [round(len(x) * share)])  # [n, nodes]

    # 1. Between nodes: tokens with their choices and weights, to ranks in this place.
    there, here = [0] * axis.size, [0] * axis.size
    there[place :: axis.size // nodes] = copies[axis.rank].tolist()
    here[place :: axis.size // nodes] = copies[place :: axis.size // nodes, node].tolist()
    token = torch.nonzero_static(touched.T, size=sum(there))[:, 1]  # its size is not waited for
    across = dict(send_counts=there, recv_counts=here)
    arrived, weights = (all_to_all(t[token], axis, **across) for t in (x, routing.weights))
    chosen = collectives.all_to_all(routing.experts[token], axis, **across)
    chosen = torch.where(chosen // per_node == node, chosen, num_experts)

    # 2. Inside each: those that came are tokens like any others, with fewer choices.
    met = table.view(nodes, -1, nodes, per_node).sum(0)  # [ranks of a node, nodes, E / nodes]
    inside = torch.block_diag(*met.unbind(1))  # [n, E]
    order, _ = sort_by_expert(chosen, num_experts)
    trip = Trip(order[: int(inside[axis.rank].sum())], inside, axis)
    sums = travel(moe, axis, trip, arrived, Routing(chosen, weights))

    # 3. And back: a row for each copy.
    home = all_to_all(sums, axis, send_counts=here, recv_counts=there)
    return moe.add(add_up(home, token, len(x), nodes), shared)


def nodes_touched(num_experts: int, top_k: int, nodes: int) -> float:
    """On how many nodes a token's experts are, on average, if all are as likely."""
    elsewhere = math.comb(num_experts - num_experts // nodes, top_k)
    return nodes * (1 - elsewhere / math.comb(num_experts, top_k))


# ---------------------------------------------------------------------- 4. while others compute
def overlapped(moe: MoE, axis: Axis, x: Tensor, routing: Routing, parts: int = 1) -> Tensor:
    """As `exchanged`; what does not wait for rows computes while they travel.

    The shared experts do so. With two `parts` of the tokens, the experts do so too: for one part
    while the other is on its way. Backward runs all of it in reverse, with the same overlap.
    """
    cut = zip(*(t.tensor_split(parts) for t in (routing.experts, routing.weights)), strict=True)
    cut = [Routing(*pair) for pair in cut]
    trips, tokens = plan_trips(moe, axis, cut)(), x.tensor_split(parts)
    there = [
        AsyncAllToAll(axis, part[trip.order // moe.config.top_k], trip.there, trip.here)
        for trip, part in zip(trips, tokens, strict=True)
    ]
    shared = moe.shared(x)
    back = [
        AsyncAllToAll(axis, trip.compute(moe, flight.land()), trip.here, trip.there)
        for trip, flight in zip(trips, there, strict=True)
    ]
    outs = [
        combine(flight.land(), trip.order, own, part)
        for flight, trip, own, part in zip(back, trips, cut, tokens, strict=True)
    ]
    return moe.add(torch.cat(outs), shared)


CORES: dict[str, Callable[..., Tensor]] = {
    "gather": gathered,
    "all_to_all": exchanged,
    "padded": padded,
    "hierarchical": hierarchical,
    "overlapped": overlapped,
    "halves": partial(overlapped, parts=2),
    "paired": overlapped,  # and the pipeline does the rest
}


# ---------------------------------------------------------------------- 5. the model
class ExpertParallel(Strategy):
    """A model whose experts are spread over an axis; made by `apply`."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        copies: Axis,
        dispatch: Dispatch,
        nodes: int,
        batch: Sequence[Axis],
        pieces: Axis | None,
    ) -> None:
        super().__init__(model, axis)
        self.shard_axes, self.copies = (axis,), copies
        self.names: dict[str, slice] = {}  # of the parameters that are cut
        share_counts(model, *batch, anew=True)
        for path, moe in mixtures(model):
            if pieces is not None:
                moe.gate.sum_pieces = sum_over(pieces)
            if axis.size == 1:
                continue
            options = dict(nodes=nodes) if dispatch == "hierarchical" else {}
            moe.core = partial(CORES[dispatch], moe, axis, **options)
            for name, p in moe.experts.named_parameters():
                own = self.names[f"{path}.experts.{name}".lstrip(".")] = experts_of(axis, len(p))
                mark(p, axis)
                p.copies = copies
                p.data, p.grad = p.data[own].clone(), None
        refuse_state(model)

    # ------------------------------------------------------------------ whole again
    @torch.no_grad()
    def join(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Put the experts of all ranks together, by the names of parameters. A collective."""
        return {
            name: collectives.all_gather(tensor, self.axis)
            if name in self.names and tensor is not None
            else tensor
            for name, tensor in tensors.items()
        }

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take this rank's experts out of what `join` returned, on any number of ranks."""
        return {
            name: whole[self.names[name]].clone() if name in self.names else whole
            for name, whole in tensors.items()
        }

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.join(super().full_state_dict())

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return all gradients, named and shaped as in the serial model. A collective."""
        return self.join({name: p.grad for name, p in self.model.named_parameters()})

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_whole(state, {name: full_shape(p) for name, p in self.model.named_parameters()})
        super().load_full_state_dict(self.own(state))
