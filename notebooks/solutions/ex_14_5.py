"""Run E: the watchdog, and a run that does not end.

Ranks have to agree on what they skip. With stochastic depth each of them drops layers of its own
choice, and a dropped layer has no gradient. A rank that skips the call for it sends its next layer
into the others' sum, as calls are told apart by their number alone. It ends one call early, and
only there the others wait.
Source: Huang et al. 2016 (1603.09382); `find_unused_parameters` of torch's DistributedDataParallel.
"""

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "hard", 25
GOOD = "the mean of all ranks, None where no rank has a gradient, and one small call to agree"
PRAISE = "All ranks make the same calls in the same order, whatever each of them has skipped."

BUGS = {
    "a rank that has died": "A process that has died does not say where it is. Rank 2 answers.",
    "a rank that is late": "A late rank makes all of its calls, later. Rank 2 is done, and has "
    "made one call less.",
    "calls in another order": "In another order each call comes once, somewhere. Rank 2 never "
    "calls for layer 2.",
    "a rank that skips a call": "",
    "a cable that was pulled": "Then all would wait in a call that all have reached. This one rank "
    "2 has not reached.",
}

LAYERS, WIDTH = 6, 5


def given(size, random):
    """For each rank the gradients of its layers; some are None, and one is so on all ranks."""
    dropped = torch.zeros(size, LAYERS, dtype=torch.bool)
    by_all, by_first, by_third, *_ = torch.randperm(LAYERS, generator=random).tolist()
    dropped[:, by_all] = dropped[0, by_first] = dropped[2, by_third] = True
    draws = torch.randn(size, LAYERS, WIDTH, generator=random, dtype=torch.float64)
    return [
        ([None if dropped[rank, i] else draws[rank, i].clone() for i in range(LAYERS)],)
        for rank in range(size)
    ]


def run(answer, axis, grads):
    parameters = [nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64)) for _ in grads]
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    answer(parameters, axis)
    return [p.grad for p in parameters]


def _expected(case: Case):
    """For each layer the mean, or None where no rank has a gradient."""
    mean = []
    for layer in range(LAYERS):
        grads = [own[layer] for (own,) in case.given if own[layer] is not None]
        mean.append(sum(grads) / case.size if grads else None)
    return mean


def check_result(case: Case) -> None:
    for rank, grads in enumerate(case.results):
        for layer, want in enumerate(_expected(case)):
            got = grads[layer]
            if want is None:
                continue
            if got is None:
                raise CheckFailed(f"rank {rank}: layer {layer} has no gradient; others have one")
            if not torch.allclose(got, want):
                raise CheckFailed(
                    f"rank {rank}: layer {layer} has {got[0].item():.4g} at the front, and the "
                    f"mean over {case.size} ranks is {want[0].item():.4g}"
                )


def check_none(case: Case) -> None:
    for rank, grads in enumerate(case.results):
        for layer, want in enumerate(_expected(case)):
            if want is None and grads[layer] is not None:
                raise CheckFailed(
                    f"rank {rank}: nobody has used layer {layer}, and its gradient is not None: "
                    "Adam would move it by its momentum"
                )


def check_traffic(case: Case) -> None:
    used = sum(want is not None for want in _expected(case))
    layer = Sent("all_reduce", wire_bytes("all_reduce", 8 * WIDTH, case.size))
    for rank, sent in enumerate(case.sent):
        rest = list(sent)
        for _ in range(used):
            if layer not in rest:
                raise CheckFailed(f"rank {rank}: expected {used} all-reduces of a layer, {layer}")
            rest.remove(layer)
        most = 8 * LAYERS * (case.size - 1)  # every rank's numbers, gathered
        if len(rest) > 1 or sum(one.num_bytes for one in rest) > most:
            raise CheckFailed(
                f"rank {rank} sent {len(rest)} more messages, {sum(o.num_bytes for o in rest)} "
                f"bytes; one of {LAYERS} numbers is enough to agree on"
            )


def drawn(case: Case):
    """Who brought which layer to which call."""
    from minipar.lab.draw import pen  # takes long to import, and no rank needs it

    skips = [[grad is None for grad in own] for (own,) in case.given]
    used = [layer for layer in range(LAYERS) if not all(own[layer] for own in skips)]
    before = [[f"layer {i}" for i in range(LAYERS) if not own[i]] for own in skips]
    after = [["agree", *(f"layer {i}" for i in used)]] * case.size
    wide, row = 1.05, 0.3
    height = 2 * (case.size * row + 0.55) + 0.75
    figure = pen.figure(
        pen.WIDTH,
        height,
        "Each column is one sum: orange where it mixes layers",
        "the inputs of this check; pale: dropped on this rank, and sent as zeros",
    )
    ax = pen.canvas(figure)
    top = height - 0.5
    for title, calls in (("As it was", before), ("Yours", after)):
        pen.text(ax, 0.15, top - 0.15, title, weight="bold")
        for rank, own in enumerate(calls):
            y = top - 0.35 - row * (rank + 1)
            pen.text(ax, 1.35, y + row / 2, f"rank {rank}", ha="right", size=8)
            for column, name in enumerate(own):
                same = len({other[column] for other in calls if column < len(other)}) == 1
                zeros = name[-1].isdigit() and skips[rank][int(name[-1])]
                fill = pen.KIND["forward"] if same else pen.AXIS["dp"]
                fill = pen.GRID if zeros else fill
                x = 1.5 + wide * column
                pen.rectangle(ax, x + 0.02, y + 0.02, wide - 0.04, row - 0.04, fc=fill)
                pen.text(ax, x + wide / 2, y + row / 2, name, ha="center", size=8)
        top -= case.size * row + 0.55
    return figure


def solution(parameters, axis):
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(used, group=axis.group)
    for p, users in zip(parameters, used.tolist(), strict=True):
        if not users:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=axis.group)
        p.grad /= axis.size


@fails(
    "none",
    "Zeros for everybody: what no rank has used keeps grad=None, as on one device.",
)
def wrong_sends_zeros_always(parameters, axis):
    """What many programs do: it cannot hang, and Adam moves weights that nobody has used."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=axis.group)
        p.grad /= axis.size


@fails(
    "run",
    "A rank decides alone what it skips: ask all ranks first.",
)
def wrong_leaves_it_as_it_was(parameters, axis):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad, group=axis.group)
            p.grad /= axis.size


@fails(
    "result",
    "Divided by those who used the layer: one device would divide by all.",
)
def wrong_divides_by_the_users(parameters, axis):
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(used, group=axis.group)
    for p, users in zip(parameters, used.tolist(), strict=True):
        if users:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=axis.group)
            p.grad /= users


@fails(
    "result",
    "A layer that one rank has dropped is dropped by all: its gradient is lost.",
)
def wrong_takes_what_all_have(parameters, axis):
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(used, op=dist.ReduceOp.MIN, group=axis.group)
    for p, everybody in zip(parameters, used.tolist(), strict=True):
        if everybody:
            dist.all_reduce(p.grad, group=axis.group)
            p.grad /= axis.size
        else:
            p.grad = None


@fails(
    "traffic",
    "A call for each layer to agree on it: ask for all layers at once.",
)
def wrong_asks_for_each(parameters, axis):
    for p in parameters:
        used = torch.tensor([float(p.grad is not None)])
        dist.all_reduce(used, group=axis.group)
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=axis.group)
            p.grad /= axis.size


@fails(
    "result",
    "Nothing was sent.",
)
def wrong_sends_nothing(parameters, axis):
    return None
