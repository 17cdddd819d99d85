"""Shard an optimizer: every parameter has an owner.

The flat version of ZeRO-1 cuts every matrix wherever the slice ends. Handing out whole parameters
needs no flat buffer, suits any optimizer, and is balanced as well as the sizes allow: the greedy
rule takes the largest parameter first and gives it to the rank that owns least.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1; the rule is Graham's, 1969.
"""

import torch
import torch.distributed as dist

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 30
GOOD = "one reduce and one broadcast per parameter and step, and owners as the greedy rule has them"
PRAISE = "This is how torch's ZeroRedundancyOptimizer divides the work, on any optimizer."
SIZES = (4, 3)

SHAPES = [(5, 4), (7,), (3, 3), (2, 6), (4, 4), (9,), (6, 5), (2, 2), (3, 7)]
STEPS = 3


def given(size, random):
    """For each rank equal parameters, and its own gradients of each step."""
    params = [torch.randn(s, generator=random, dtype=torch.float64) for s in SHAPES]
    gradients = torch.randn(size, STEPS, sum(p.numel() for p in params), generator=random).double()
    return [([p.clone() for p in params], [_cut(g, params) for g in mine]) for mine in gradients]


def _cut(flat, params):
    pieces = flat.split([p.numel() for p in params])
    return [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]


def _make(params):
    # With Adam a sum in the place of an average would hardly show: it divides the factor away.
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def run(answer, axis, params, gradients):
    """Return the parameters after all steps, which of them are owned here, and which have state."""
    optimizer = answer(params, gradients, _make, axis)
    known = [p for group in optimizer.param_groups for p in group["params"]]
    owned = [i for i, p in enumerate(params) if any(p is k for k in known)]
    with_state = [i for i in owned if optimizer.state.get(params[i])]
    return [p.detach() for p in params], owned, with_state


def check_result(case: Case) -> None:
    params = [p.clone() for p in case.given[0][0]]
    optimizer = _make(params)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.stack([gradients[step][i] for _, gradients in case.given]).mean(0)
        optimizer.step()
    found = [params for params, _, _ in case.results]
    Case(case.size, case.given, found, case.sent).expect_close([params] * case.size, "parameter")


def check_owners(case: Case) -> None:
    """Every parameter has exactly one owner, where its state is."""
    for i in range(len(SHAPES)):
        owners = [rank for rank, (_, owned, _) in enumerate(case.results) if i in owned]
        if len(owners) != 1:
            raise CheckFailed(
                f"parameter {i} is in the optimizers of ranks {owners}; one is enough"
            )
        if i not in case.results[owners[0]][2]:
            raise CheckFailed(f"parameter {i} has no state at its owner, rank {owners[0]}")


def check_balance(case: Case) -> None:
    params = case.given[0][0]
    most = max(_greedy([p.numel() for p in params], case.size)[1])
    for rank, (_, owned, _) in enumerate(case.results):
        numel = sum(params[i].numel() for i in owned)
        if numel > most:
            raise CheckFailed(
                f"rank {rank} owns {numel} numbers; by the greedy rule nobody owns more than {most}"
            )


def check_traffic(case: Case) -> None:
    expected = [
        Sent(verb, wire_bytes(verb, p.nbytes, case.size))
        for p in case.given[0][0]
        for verb in ("reduce", "broadcast")
    ]
    for rank in range(case.size):
        case.expect_sent(rank, STEPS * expected)


def _greedy(numels, size):
    """The owner of each parameter, and how many numbers each rank owns."""
    owns, owner = [0] * size, {}
    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owner[i] = owns.index(min(owns))
        owns[owner[i]] += numels[i]
    return owner, owns


def solution(params, gradients, make, axis):
    owns, owner = [0] * axis.size, {}
    for p in sorted(params, key=lambda p: -p.numel()):
        owner[p] = owns.index(min(owns))
        owns[owner[p]] += p.numel()
    optimizer = make([p for p in params if owner[p] == axis.rank])
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            dist.reduce(gradient, group=axis.group, group_dst=owner[p])
            if owner[p] == axis.rank:
                p.grad = gradient / axis.size
        optimizer.step()
        for p in params:
            dist.broadcast(p, group=axis.group, group_src=owner[p])
    return optimizer


@fails(
    "result",
    "Each rank used its own gradients: nothing was sent.",
)
def wrong_sends_nothing(params, gradients, make, axis):
    optimizer = make(params)
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            p.grad = gradient
        optimizer.step()
    return optimizer


@fails(
    "result",
    "Owners update their parameters, and do not send them to the others.",
)
def wrong_forgets_to_hand_out(params, gradients, make, axis):
    return _train(params, gradients, make, axis, hand_out=False)


@fails(
    "result",
    "Gradients are summed: the owner divides by axis.size.",
)
def wrong_adds_up_and_does_not_divide(params, gradients, make, axis):
    return _train(params, gradients, make, axis, divide_by=1)


@fails(
    "owners",
    "Every rank owns all parameters: nothing is sharded.",
)
def wrong_everybody_owns_everything(params, gradients, make, axis):
    """Plain data parallelism: right, and nothing is sharded."""
    optimizer = make(params)
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            dist.all_reduce(gradient, group=axis.group)
            p.grad = gradient / axis.size
        optimizer.step()
    return optimizer


@fails(
    "balance",
    "Owners in turn: each parameter, largest first, goes to the rank that owns least.",
)
def wrong_in_turns(params, gradients, make, axis):
    owners = [i % axis.size for i in range(len(params))]
    return _train(params, gradients, make, axis, owners)


@fails(
    "balance",
    "One rank owns nearly everything.",
)
def wrong_rank_0_owns_all_but_a_little(params, gradients, make, axis):
    owners = [max(0, i - len(params) + axis.size) for i in range(len(params))]
    return _train(params, gradients, make, axis, owners)


@fails(
    "traffic",
    "Gradients go to all ranks: dist.reduce sends them to the owner alone.",
)
def wrong_gives_gradients_to_everybody(params, gradients, make, axis):
    return _train(params, gradients, make, axis, everybody=True)


def _train(
    params, gradients, make, axis, owners=None, hand_out=True, divide_by=None, everybody=False
):
    owners = owners or _greedy([p.numel() for p in params], axis.size)[0]
    optimizer = make([p for i, p in enumerate(params) if owners[i] == axis.rank])
    for step in gradients:
        for i, (p, gradient) in enumerate(zip(params, step, strict=True)):
            if everybody:
                dist.all_reduce(gradient, group=axis.group)
            else:
                dist.reduce(gradient, group=axis.group, group_dst=owners[i])
            if owners[i] == axis.rank:
                p.grad = gradient / (divide_by or axis.size)
        optimizer.step()
        for i, p in enumerate(params):
            if hand_out:
                dist.broadcast(p, group=axis.group, group_src=owners[i])
    return optimizer


@fails(
    "result",
    "Momentum is lost in each step: make the optimizer once, before the first.",
)
def wrong_makes_an_optimizer_for_each_step(params, gradients, make, axis):
    for step in gradients:
        optimizer = _train(params, [step], make, axis)
    return optimizer


@fails(
    "balance",
    "Handed out in the order of params: the largest parameter goes first.",
)
def wrong_hands_out_unsorted(params, gradients, make, axis):
    owns, owners = [0] * axis.size, []
    for p in params:
        owners.append(owns.index(min(owns)))
        owns[owners[-1]] += p.numel()
    return _train(params, gradients, make, axis, owners)


@fails(
    "run",
    "Only owners call: every rank calls each reduce and each broadcast.",
)
def wrong_lets_owners_call_alone(params, gradients, make, axis):
    owners = _greedy([p.numel() for p in params], axis.size)[0]
    for step in gradients:
        for i, gradient in enumerate(step):
            if owners[i] == axis.rank:
                dist.reduce(gradient, group=axis.group, group_dst=owners[i])
