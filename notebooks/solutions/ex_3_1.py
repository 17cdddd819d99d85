"""Naive data parallel: average the gradients.

Every rank has run backward on a batch of its own. One all-reduce per parameter later, all of them
hold the gradient of the mean loss over all batches, and take the same step.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "easy", 15
GOOD = "after backward, one all-reduce per parameter that has a gradient"
PRAISE = "Your ranks now take one and the same step: that is data parallelism."
SIZES = (4, 3)


def given(size, random):
    """For each rank the same model and another batch: x [B, 6], y [B, 3]."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=random)
    model[0].bias.requires_grad_(False)  # a frozen parameter has no gradient to average
    batches = torch.randn(size, 2, 9, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(model), batch[:, :6], batch[:, 6:]) for batch in batches]


def run(answer, axis, model, x, y):
    _backward(model, x, y)
    answer(model, axis)
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def _backward(model, x, y):
    nn.functional.mse_loss(model(x), y).backward()


def check_result(case: Case) -> None:
    every = []
    for model, x, y in case.given:
        model = copy.deepcopy(model)
        _backward(model, x, y)
        every.append([p.grad for p in model.parameters() if p.requires_grad])
    mean = [torch.stack(grads).mean(0) for grads in zip(*every, strict=True)]
    case.expect_close([mean] * case.size, "gradient")


def check_traffic(case: Case) -> None:
    trained = [p for p in case.given[0][0].parameters() if p.requires_grad]
    bytes_each = [wire_bytes("all_reduce", p.nbytes, case.size) for p in trained]
    for rank, sent in enumerate(case.sent):
        if len(sent) > len(trained) or sum(one.num_bytes for one in sent) > sum(bytes_each):
            case.expect_sent(rank, [Sent("all_reduce", num_bytes) for num_bytes in bytes_each])


def bonus_one_all_reduce(case: Case) -> None:
    for rank, sent in enumerate(case.sent):
        if len(sent) != 1:
            raise CheckFailed(f"rank {rank} talked {len(sent)} times; once is enough")


def solution(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=axis.group)
            parameter.grad /= axis.size


def solution_bonus(model, axis):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    bucket = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(bucket, group=axis.group)
    bucket /= axis.size
    for grad, mean in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


@fails(
    "result",
    "Each rank divided its own gradient: no sum was taken.",
)
def wrong_sends_nothing(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= axis.size


@fails(
    "result",
    "Exactly n times the average: did you divide by axis.size?",
)
def wrong_forgets_to_divide(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=axis.group)


@fails(
    "result",
    "Gradients are as they were: did you average p.data in place of p.grad?",
)
def wrong_averages_the_weights(model, axis):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, group=axis.group)
        parameter.data /= axis.size


@fails(
    "run",
    "A frozen parameter has grad None: skip it.",
)
def wrong_ignores_frozen_parameters(model, axis):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=axis.group)
        parameter.grad /= axis.size


@fails(
    "traffic",
    "All gradients are gathered, then averaged: an all-reduce sends less.",
)
def wrong_gathers_everything(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            every = [torch.empty_like(parameter.grad) for _ in range(axis.size)]
            dist.all_gather(every, parameter.grad, group=axis.group)
            parameter.grad = torch.stack(every).mean(0)


@fails(
    "traffic",
    "Each gradient is sent twice.",
)
def wrong_does_it_twice(model, axis):
    for _ in range(2):
        solution(model, axis)


@fails(
    "result",
    "Gradients are as they were: all_reduce returns the sum, so give it to p.grad.",
)
def wrong_drops_the_result(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, axis, "avg")


@fails(
    "run",
    "dist.all_reduce changes its tensor in place, and returns nothing.",
)
def wrong_divides_what_is_returned(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad, group=axis.group) / axis.size


@fails(
    "run",
    "dist.all_reduce changes its tensor in place, and returns nothing.",
)
def wrong_keeps_what_is_returned(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad, group=axis.group)
            parameter.grad /= axis.size


@fails(
    "run",
    "Ask `p.grad is not None`: a tensor of several numbers is neither true nor false.",
)
def wrong_asks_whether_a_tensor_is_true(model, axis):
    for parameter in model.parameters():
        if parameter.grad:
            dist.all_reduce(parameter.grad, group=axis.group)
            parameter.grad /= axis.size


@fails(
    "run",
    "The axis is not a process group: group=axis.group.",
)
def wrong_takes_the_axis_for_a_group(model, axis):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=axis)
            parameter.grad /= axis.size
