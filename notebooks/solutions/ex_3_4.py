"""A loss by tokens: every token weighs the same, whichever rank and microbatch it is in.

Texts are of uneven length, so ranks and microbatches hold uneven numbers of targets. A mean of
means would give the tokens of a short one more weight. The sum of losses, divided by the number of
targets of *all* ranks and microbatches, gives each token the weight that it has on one device.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "one all-reduce per parameter, and at most two small ones for the count and the loss"
PRAISE = "Now a token counts the same on every rank, in every microbatch, on any number of ranks."
SIZES = (4, 3)

IGNORE, VOCABULARY, TOKENS, MICROBATCHES = -100, 7, 10, 2


def given(size, random):
    """For each rank the same model, and microbatches of inputs [T, 5] and targets [T]."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=random)
    ranks = []
    for rank in range(size):
        x = torch.randn(MICROBATCHES, TOKENS, 5, generator=random, dtype=torch.float64)
        targets = torch.randint(VOCABULARY, (MICROBATCHES, TOKENS), generator=random)
        targets[0, TOKENS - 3 * rank :] = IGNORE  # later ranks have shorter texts
        targets[1, 2 + rank :] = IGNORE
        if rank == size - 1:
            targets[:] = IGNORE  # and the last one has none at all
        ranks.append((copy.deepcopy(model), list(zip(x, targets, strict=True))))
    return ranks


def run(answer, axis, model, microbatches):
    loss = answer(model, microbatches, axis)
    if isinstance(loss, torch.Tensor):
        loss = loss.detach().reshape(())
    return [parameter.grad for parameter in model.parameters()], loss


def _sum_of_losses(model, x, targets):
    return nn.functional.cross_entropy(model(x), targets, ignore_index=IGNORE, reduction="sum")


def check_result(case: Case) -> None:
    model = copy.deepcopy(case.given[0][0])
    every = [microbatch for _, microbatches in case.given for microbatch in microbatches]
    loss = sum(_sum_of_losses(model, x, targets) for x, targets in every)
    loss = loss / sum((targets != IGNORE).sum() for _, targets in every)
    loss.backward()
    gradients, losses = map(list, zip(*case.results, strict=True))
    truth = [parameter.grad for parameter in model.parameters()]
    Case(case.size, case.given, gradients, case.sent).expect_close([truth] * case.size, "gradient")
    for rank, found in enumerate(losses):
        if not isinstance(found, torch.Tensor):
            raise CheckFailed(f"the loss of rank {rank}: expected a tensor, got {found!r}")
    rtol = 1e-9 if all(found.dtype == torch.float64 for found in losses) else 1e-5
    losses = [found.double() for found in losses]
    answers = Case(case.size, case.given, losses, case.sent)
    answers.expect_close([loss.detach()] * case.size, "the loss", rtol=rtol)


def check_traffic(case: Case) -> None:
    parameters = list(case.given[0][0].parameters())
    most = sum(wire_bytes("all_reduce", p.nbytes, case.size) for p in parameters)
    most += 2 * wire_bytes("all_reduce", 16, case.size)  # count and loss
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if len(sent) > len(parameters) + 2 or num_bytes > most:
            raise CheckFailed(
                f"rank {rank} made {len(sent)} calls and sent {num_bytes} bytes; "
                f"{len(parameters) + 2} calls and {most} bytes are enough"
            )


def bonus_two_calls(case: Case) -> None:
    for rank, sent in enumerate(case.sent):
        if len(sent) > 2:
            raise CheckFailed(f"rank {rank} talked {len(sent)} times; twice is enough")


def solution(model, microbatches, axis):
    count = sum((targets != IGNORE).sum() for _, targets in microbatches)
    dist.all_reduce(count, group=axis.group)
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        loss = _sum_of_losses(model, x, targets) / count
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=axis.group)
    dist.all_reduce(total, group=axis.group)
    return total


def solution_bonus(model, microbatches, axis):
    """Gradients of sums, the loss and the count in one flat tensor; the division comes last."""
    total = torch.zeros(2, dtype=torch.float64)
    for x, targets in microbatches:
        loss = _sum_of_losses(model, x, targets)
        loss.backward()
        total += torch.stack([loss.detach(), (targets != IGNORE).sum()])
    parameters = list(model.parameters())
    flat = torch.cat([*(p.grad.flatten() for p in parameters), total])
    dist.all_reduce(flat, group=axis.group)
    flat, (loss, count) = flat[:-2], flat[-2:]
    pieces = (flat / count).split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return loss / count


@fails(
    "result",
    "This is each rank's own loss: nothing was sent.",
)
def wrong_sends_nothing(model, microbatches, axis):
    count = sum((targets != IGNORE).sum() for _, targets in microbatches).clamp(min=1)
    loss = sum(_sum_of_losses(model, x, targets) for x, targets in microbatches) / count
    loss.backward()
    return loss


@fails(
    "result",
    "A mean of means: sum all losses, and divide once, by the tokens of all ranks.",
)
def wrong_mean_of_means(model, microbatches, axis):
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        count = (targets != IGNORE).sum().clamp(min=1)
        loss = _sum_of_losses(model, x, targets) / count / len(microbatches)
        loss.backward()
        total += loss.detach()
    return _average(model, total, axis)


@fails(
    "result",
    "Right within a rank, but every rank weighs alike: count the tokens of all ranks.",
)
def wrong_mean_of_the_ranks_means(model, microbatches, axis):
    """By tokens within a rank, but every rank weighs the same."""
    count = sum((targets != IGNORE).sum() for _, targets in microbatches).clamp(min=1)
    loss = sum(_sum_of_losses(model, x, targets) for x, targets in microbatches) / count
    loss.backward()
    return _average(model, loss.detach(), axis)


@fails(
    "result",
    "A mean of means: sum all losses, and divide once, by the tokens of all ranks.",
)
def wrong_nan_without_targets(model, microbatches, axis):
    """The mean of no losses is not a number, and one rank's NaN is everybody's."""
    mean = nn.CrossEntropyLoss(ignore_index=IGNORE)
    loss = sum(mean(model(x), targets) for x, targets in microbatches) / len(microbatches)
    loss.backward()
    return _average(model, loss.detach(), axis)


@fails(
    "result",
    "Gradients are n times too small: divided by all tokens, they are to be summed.",
)
def wrong_divides_by_the_ranks_too(model, microbatches, axis):
    """Already divided by the tokens of all ranks, a gradient is to be summed, not averaged."""
    loss = solution(model, microbatches, axis)
    for parameter in model.parameters():
        parameter.grad /= axis.size
    return loss


@fails(
    "traffic",
    "Gradients are sent for every microbatch: let them add up first.",
)
def wrong_reduces_every_microbatch(model, microbatches, axis):
    """The right gradients, and as many times the bytes as there are microbatches."""
    count = sum((targets != IGNORE).sum() for _, targets in microbatches)
    dist.all_reduce(count, group=axis.group)
    losses, sums = torch.zeros((), dtype=torch.float64), None
    for x, targets in microbatches:
        model.zero_grad()
        loss = _sum_of_losses(model, x, targets) / count
        loss.backward()
        losses += loss.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.group)
        grads = [p.grad.clone() for p in model.parameters()]
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
    for parameter, grad in zip(model.parameters(), sums, strict=True):
        parameter.grad = grad
    dist.all_reduce(losses, group=axis.group)
    return losses


def _average(model, loss, axis):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=axis.group)
        parameter.grad /= axis.size
    dist.all_reduce(loss, group=axis.group)
    return loss / axis.size


@fails(
    "result",
    "A mean of means: sum all losses, and divide once, by the tokens of all ranks.",
)
def wrong_adds_up_means(model, microbatches, axis):
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        loss = nn.functional.cross_entropy(model(x), targets, ignore_index=IGNORE)
        loss.backward()
        total += loss.detach()
    return _average(model, total, axis)


@fails(
    "result",
    "Sums over tokens are divided by the number of ranks: divide by the tokens of all ranks.",
)
def wrong_divides_sums_by_the_ranks(model, microbatches, axis):
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        loss = _sum_of_losses(model, x, targets)
        loss.backward()
        total += loss.detach()
    return _average(model, total, axis)


@fails(
    "result",
    "The loss is this rank's part alone: all-reduce it, as the gradients.",
)
def wrong_keeps_its_part_of_the_loss(model, microbatches, axis):
    count = sum((targets != IGNORE).sum() for _, targets in microbatches)
    dist.all_reduce(count, group=axis.group)
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        loss = _sum_of_losses(model, x, targets) / count
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=axis.group)
    return total


@fails(
    "result",
    "Targets of -100 are counted, too: they count for nothing.",
)
def wrong_counts_what_is_ignored(model, microbatches, axis):
    count = torch.tensor(sum(targets.numel() for _, targets in microbatches))
    dist.all_reduce(count, group=axis.group)
    for x, targets in microbatches:
        (_sum_of_losses(model, x, targets) / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=axis.group)
    return count
