"""Buckets by size: few calls, none of them too large.

A call per parameter pays the latency of the link once per parameter; a single call for all cannot
start before the last gradient is there. Buckets of a given capacity are the way between: take the
parameters last first, as backward finishes them, and begin a new bucket whenever the next
parameter would not fit.
Source: Li et al. 2020, section 3.2.3.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 25
GOOD = "one all-reduce per bucket, in the order in which backward finishes the parameters"
PRAISE = "A handful of calls carries the same bytes, and latency is paid a handful of times."
SIZES = (4, 3)

CAPACITY = 280  # bytes: 35 numbers, which the first bucket and the last just fill


def given(size, random):
    """For each rank the same model and another batch: x [B, 6], y [B, 3]."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 2), nn.Linear(2, 3)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=random)
    model[4].bias.requires_grad_(False)  # a frozen parameter has no gradient to average
    batches = torch.randn(size, 2, 9, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(model), batch[:, :6], batch[:, 6:]) for batch in batches]


def run(answer, axis, model, x, y):
    _backward(model, x, y)
    answer(model, axis, CAPACITY)
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def _backward(model, x, y):
    nn.functional.mse_loss(model(x), y).backward()


def _buckets(model, capacity):
    return _filled(reversed([p for p in model.parameters() if p.requires_grad]), capacity)


def _filled(parameters, capacity, is_full=lambda num_bytes, room: num_bytes > room):
    buckets, room = [], 0
    for parameter in parameters:
        if not buckets or is_full(parameter.nbytes, room):
            buckets.append([])
            room = capacity
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def check_result(case: Case) -> None:
    every = []
    for model, x, y in case.given:
        model = copy.deepcopy(model)
        _backward(model, x, y)
        every.append([p.grad for p in model.parameters() if p.requires_grad])
    mean = [torch.stack(grads).mean(0) for grads in zip(*every, strict=True)]
    case.expect_close([mean] * case.size, "gradient")


def check_buckets(case: Case) -> None:
    expected = [
        Sent("all_reduce", wire_bytes("all_reduce", sum(p.nbytes for p in bucket), case.size))
        for bucket in _buckets(case.given[0][0], CAPACITY)
    ]
    for rank, sent in enumerate(case.sent):
        case.expect_sent(rank, expected)
        if sent != expected:
            raise CheckFailed(
                f"rank {rank} sent the right buckets in another order: {', '.join(map(str, sent))}"
                "; the parameters that backward finishes first should go first"
            )


def solution(model, axis, capacity):
    buckets, room = [], 0
    for parameter in reversed([p for p in model.parameters() if p.grad is not None]):
        if parameter.nbytes > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        dist.all_reduce(flat, group=axis.group)
        flat /= axis.size
        pieces = flat.split([parameter.numel() for parameter in bucket])
        for parameter, piece in zip(bucket, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


@fails(
    "result",
    "Each rank divided its own gradient: no sum was taken.",
)
def wrong_sends_nothing(model, axis, capacity):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= axis.size


@fails(
    "result",
    "Gradients are as they were: torch.cat copies, so give the pieces back to p.grad.",
)
def wrong_forgets_to_hand_out(model, axis, capacity):
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    dist.all_reduce(torch.cat(grads), group=axis.group)


@fails(
    "result",
    "The last bucket was never sent.",
)
def wrong_drops_the_last_bucket(model, axis, capacity):
    for bucket in _buckets(model, capacity)[:-1]:
        _reduce(bucket, axis)


@fails(
    "buckets",
    "One call per parameter: put several into a bucket, up to its capacity.",
)
def wrong_one_call_per_parameter(model, axis, capacity):
    for parameter in reversed(list(model.parameters())):
        if parameter.grad is not None:
            _reduce([parameter], axis)


@fails(
    "buckets",
    "One call for everything: begin a new bucket where the next would not fit (count bytes).",
)
def wrong_one_call_for_everything(model, axis, capacity):
    _reduce([p for p in model.parameters() if p.grad is not None], axis)


@fails(
    "buckets",
    "What just fits belongs into the bucket: begin a new one only where it would not fit.",
)
def wrong_leaves_no_bucket_full(model, axis, capacity):
    learning = reversed([p for p in model.parameters() if p.grad is not None])
    for bucket in _filled(learning, capacity, lambda num_bytes, room: num_bytes >= room):
        _reduce(bucket, axis)


@fails(
    "buckets",
    "A frozen parameter has no gradient, and takes no room in a bucket.",
)
def wrong_makes_room_for_what_is_frozen(model, axis, capacity):
    for bucket in _filled(reversed(list(model.parameters())), capacity):
        if learning := [p for p in bucket if p.grad is not None]:
            _reduce(learning, axis)


@fails(
    "buckets",
    "In another order than backward finishes gradients: the last parameters go first.",
)
def wrong_first_parameter_first(model, axis, capacity):
    for bucket in _filled([p for p in model.parameters() if p.grad is not None], capacity):
        _reduce(bucket, axis)


@fails(
    "buckets",
    "In another order than backward finishes gradients: the last parameters go first.",
)
def wrong_order_of_buckets(model, axis, capacity):
    for bucket in reversed(_buckets(model, capacity)):
        _reduce(bucket, axis)


def _reduce(bucket, axis):
    flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
    dist.all_reduce(flat, group=axis.group)
    flat /= axis.size
    pieces = flat.split([parameter.numel() for parameter in bucket])
    for parameter, piece in zip(bucket, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


@fails(
    "result",
    "Exactly n times the average: did you divide by axis.size?",
)
def wrong_forgets_to_divide(model, axis, capacity):
    solution(model, axis, capacity)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= axis.size


@fails(
    "run",
    "A frozen parameter has grad None: leave it out of every bucket.",
)
def wrong_flattens_what_is_frozen(model, axis, capacity):
    for bucket in _filled(reversed(list(model.parameters())), capacity):
        _reduce(bucket, axis)


@fails(
    "buckets",
    "The room is not set anew: each bucket begins with the whole capacity.",
)
def wrong_never_sets_the_room_anew(model, axis, capacity):
    buckets, used = [[]], 0
    for parameter in reversed([p for p in model.parameters() if p.grad is not None]):
        if buckets[-1] and used + parameter.nbytes > capacity:
            buckets.append([])
        buckets[-1].append(parameter)
        used += parameter.nbytes
    for bucket in buckets:
        _reduce(bucket, axis)


@fails(
    "buckets",
    "A bucket is closed when it is too full already: ask before you put one more in.",
)
def wrong_asks_too_late(model, axis, capacity):
    buckets, used = [[]], 0
    for parameter in reversed([p for p in model.parameters() if p.grad is not None]):
        if used >= capacity:
            buckets.append([])
            used = 0
        buckets[-1].append(parameter)
        used += parameter.nbytes
    for bucket in buckets:
        _reduce(bucket, axis)
