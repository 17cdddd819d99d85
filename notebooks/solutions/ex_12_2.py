"""The norm of gradients that are cut over some axes and copied over others.

A piece counts on every rank that has one; a copy counts once. So squares are added up along exactly
those axes over which a gradient is cut.
Source: `minipar.train.optim.grad_norm`, which does this for any mesh.
"""

import torch
import torch.distributed as dist

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "the norm of one device on every rank, for at most 128 bytes sent; gradients stay at home"
PRAISE = "A clip factor from this norm is the same on all ranks, and the right one."
MESH = {"dp": 3, "tp": 2}

CUTS = [(), ("tp",), ("dp",), ("dp", "tp"), ("tp",)]  # as of norms, tp, zero, both
ENOUGH = 128  # bytes; four numbers over both axes are 75


def given(size, random):
    """For each rank: pairs (gradient, names of the axes that cut it); pieces may be empty."""
    ranks = [[] for _ in range(size)]
    for cut in CUTS:
        length = int(torch.randint(3, 9, (), generator=random))
        scale = float(torch.rand((), generator=random)) + 0.5
        pieces: dict[tuple, torch.Tensor] = {}
        for rank, mine in enumerate(ranks):
            place = {"dp": rank // MESH["tp"], "tp": rank % MESH["tp"]}
            key = tuple(place[axis] for axis in cut)
            if key not in pieces:
                own = length if cut != ("dp", "tp") or any(key) else 0
                made = torch.randn(own, generator=random, dtype=torch.float64)
                pieces[key] = made * scale
            mine.append((pieces[key].clone(), cut))
    return [(mine,) for mine in ranks]


def _truth(case: Case) -> torch.Tensor:
    total = 0.0
    for i, cut in enumerate(CUTS):
        seen = set()
        for rank, (mine,) in enumerate(case.given):
            place = {"dp": rank // MESH["tp"], "tp": rank % MESH["tp"]}
            key = tuple(place[axis] for axis in cut)
            if key not in seen:
                total += mine[i][0].square().sum()
                seen.add(key)
    return total.sqrt()


def check_result(case: Case) -> None:
    case.expect_close([_truth(case)] * case.size, "the norm")


def check_traffic(case: Case) -> None:
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if num_bytes > ENOUGH:
            raise CheckFailed(
                f"rank {rank} sent {num_bytes} bytes; a norm is one number, {ENOUGH} are plenty"
            )


def solution(gradients, dp, tp):
    squares = torch.zeros(2, 2, dtype=torch.float64)  # cut over dp or not, cut over tp or not
    for gradient, cut in gradients:
        squares[int("dp" in cut), int("tp" in cut)] += gradient.square().sum()
    for cut, axis in ((squares[1], dp), (squares[:, 1], tp)):
        total = cut.clone()
        dist.all_reduce(total, group=axis.group)
        cut.copy_(total)
    return squares.sum().sqrt()


def _sum(squares, *axes):
    squares = squares.clone()
    for axis in axes:
        dist.all_reduce(squares, group=axis.group)
    return squares


@fails(
    "result",
    "This is each rank's own norm: nothing was sent.",
)
def wrong_is_my_own_norm(gradients, dp, tp):
    """What torch's clip_grad_norm_ computes: it sees one rank. Nothing is sent."""
    return torch.cat([gradient for gradient, _ in gradients]).norm()


@fails(
    "result",
    "Everything is summed over both axes: copies count several times.",
)
def wrong_counts_copies(gradients, dp, tp):
    """Everything over both axes: copies count twice, three or six times."""
    squares = sum(gradient.square().sum() for gradient, _ in gradients)
    return _sum(squares, dp, tp).sqrt()


@fails(
    "result",
    "Divided by all ranks: right for copies, too small for pieces.",
)
def wrong_divides_by_all_ranks(gradients, dp, tp):
    """Right for copies, and too small for pieces."""
    squares = sum(gradient.square().sum() for gradient, _ in gradients)
    return (_sum(squares, dp, tp) / (dp.size * tp.size)).sqrt()


@fails(
    "result",
    "Divided by the wrong axis: a gradient that dp does not cut has dp.size copies.",
)
def wrong_divides_by_the_other_axis(gradients, dp, tp):
    """A square mesh would not show it."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient, cut in gradients:
        copies = (1 if "dp" in cut else tp.size) * (1 if "tp" in cut else dp.size)
        total += gradient.square().sum() / copies
    return _sum(total, dp, tp).sqrt()


@fails(
    "result",
    "Summed over tp alone: pieces that are cut over dp are missing.",
)
def wrong_sums_over_tp_alone(gradients, dp, tp):
    """Forgets what an optimizer that is sharded over dp keeps apart."""
    squares = [
        _sum(gradient.square().sum(), tp) if "tp" in cut else gradient.square().sum()
        for gradient, cut in gradients
    ]
    return sum(squares).sqrt()


@fails(
    "result",
    "Norms were added: add squares, and take the root at the end.",
)
def wrong_adds_norms(gradients, dp, tp):
    """The norm of a whole is not the sum of the norms of its pieces."""
    total = 0.0
    for gradient, cut in gradients:
        axes = [axis for axis in (dp, tp) if axis.name in cut]
        total = total + _sum(gradient.norm(), *axes).square()
    return total.sqrt()


@fails(
    "traffic",
    "Whole gradients travel: four sums of squares are enough.",
)
def wrong_sends_gradient_by_gradient(gradients, dp, tp):
    """The right norm, from whole gradients that travel to everybody."""
    total = 0.0
    for gradient, cut in gradients:
        padded = torch.zeros(16, dtype=torch.float64)
        padded[: len(gradient)] = gradient
        pieces = [padded]
        for axis in (dp, tp):
            if axis.name in cut:
                gathered = torch.empty(axis.size * len(pieces), 16, dtype=torch.float64)
                dist.all_gather_single(gathered, torch.stack(pieces), group=axis.group)
                pieces = list(gathered)
        total = total + torch.stack(pieces).square().sum()
    return total.sqrt()
