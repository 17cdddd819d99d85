"""Cross entropy over a vocabulary that is cut, and logits that nobody gathers.

A rank has the logits of its own words. Three numbers per token are enough from the others: the
largest logit, the sum of exponentials, and the logit of the target, which one rank has.
Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3.
"""

import torch
import torch.nn.functional as F

from minipar.comm import autograd, collectives
from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 30
GOOD = "loss and gradient of one device for any logits and ignored targets, 3 numbers per token"
PRAISE = "Three numbers per token stand for the whole vocabulary."
SIZES = (4, 3)

TOKENS, IGNORED = 7, -100


def given(size, random):
    """This rank's logits [T, V/n], not equally many on all, targets [T], and its first word."""
    num_words = 5 * size + 1
    logits = 3 * torch.randn(TOKENS, num_words, generator=random, dtype=torch.float64)
    logits += 2000 * torch.randn(TOKENS, 1, generator=random, dtype=torch.float64)  # per token
    targets = torch.randint(num_words, (TOKENS,), generator=random)
    targets[int(torch.randint(TOKENS, (), generator=random))] = IGNORED
    starts = [5 * rank for rank in range(size)]
    pieces = logits.tensor_split(starts[1:], 1)
    return [
        (piece.contiguous(), targets.clone(), start)
        for piece, start in zip(pieces, starts, strict=True)
    ]


def run(answer, axis, logits, targets, start):
    logits = logits.clone().requires_grad_()
    loss = answer(logits, targets, start, axis)
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), torch.zeros_like(logits) if logits.grad is None else logits.grad


def _one_device(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.cat([mine[0] for mine in case.given], 1).requires_grad_()
    loss = F.cross_entropy(logits, case.given[0][1], reduction="sum")
    loss.backward()
    return loss.detach(), logits.grad


def _of(case: Case, index: int) -> Case:
    return Case(case.size, case.given, [result[index] for result in case.results], case.sent)


def check_result(case: Case) -> None:
    _of(case, 0).expect_close([_one_device(case)[0]] * case.size, "the loss")


def check_gradient(case: Case) -> None:
    widths = [mine[0].shape[1] for mine in case.given]
    pieces = list(_one_device(case)[1].split(widths, 1))
    _of(case, 1).expect_close(pieces, "the gradient of the logits")


def check_traffic(case: Case) -> None:
    most = 3 * wire_bytes("all_reduce", 8 * TOKENS, case.size) + 2  # each call rounds down
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if num_bytes > most:
            raise CheckFailed(
                f"rank {rank} sent {num_bytes} bytes, forward and backward; an all-reduce of three "
                f"numbers per token takes {most}"
            )


def solution(logits, targets, start, axis):
    largest = collectives.all_reduce(logits.detach().amax(1), axis, "max")
    logits = logits - largest[:, None]
    own = (targets >= start) & (targets < start + logits.shape[1])
    rows = (targets - start).where(own, 0)
    found = logits.gather(1, rows[:, None])[:, 0].where(own, 0.0)
    parts = torch.stack([logits.exp().sum(1), found])
    sum_exp, target = autograd.all_reduce(parts, axis, to="I")
    return (sum_exp.log() - target)[targets != -100].sum()


def _parts(logits, targets, start, largest):
    logits = logits - largest[:, None]
    own = (targets >= start) & (targets < start + logits.shape[1])
    rows = (targets - start).where(own, 0)
    found = logits.gather(1, rows[:, None])[:, 0].where(own, 0.0)
    return torch.stack([logits.exp().sum(1), found])


@fails(
    "result",
    "A softmax over this rank's words alone: sum over the ranks.",
)
def wrong_own_words_only(logits, targets, start, axis):
    """A softmax over the own words: probabilities add up to n."""
    sum_exp, target = _parts(logits, targets, start, logits.detach().amax(1))
    return (sum_exp.log() - target)[targets != IGNORED].sum()


@fails(
    "result",
    "exp overflows: subtract the largest logit first.",
)
def wrong_without_the_largest(logits, targets, start, axis):
    parts = _parts(logits, targets, start, logits.new_zeros(len(logits)))
    sum_exp, target = autograd.all_reduce(parts, axis, to="I")
    return (sum_exp.log() - target)[targets != IGNORED].sum()


@fails(
    "result",
    "Each rank subtracts a maximum of its own: take that of all ranks.",
)
def wrong_largest_of_its_own(logits, targets, start, axis):
    """Every rank takes another maximum off, and the sums no longer belong together."""
    parts = _parts(logits, targets, start, logits.detach().amax(1))
    sum_exp, target = autograd.all_reduce(parts, axis, to="I")
    return (sum_exp.log() - target)[targets != IGNORED].sum()


@fails(
    "gradient",
    "The sum is of type R: all ranks compute the same loss, so it is I.",
)
def wrong_type_of_the_sum(logits, targets, start, axis):
    largest = collectives.all_reduce(logits.detach().amax(1), axis, "max")
    parts = _parts(logits, targets, start, largest)
    sum_exp, target = autograd.all_reduce(parts, axis, to="R")
    return (sum_exp.log() - target)[targets != IGNORED].sum()


@fails(
    "traffic",
    "The logits are gathered: three numbers per token are enough.",
)
def wrong_gathers_the_logits(logits, targets, start, axis):
    padded = F.pad(logits, (0, 6 - logits.shape[1]), value=-torch.inf)
    whole = autograd.all_gather(padded, axis, 1, to="I")
    return F.cross_entropy(whole[:, whole[0] > -torch.inf], targets, reduction="sum")


@fails(
    "result",
    "Targets of -100 are counted: leave those tokens out.",
)
def wrong_counts_ignored_targets(logits, targets, start, axis):
    largest = collectives.all_reduce(logits.detach().amax(1), axis, "max")
    sum_exp, target = autograd.all_reduce(_parts(logits, targets, start, largest), axis, to="I")
    return (sum_exp.log() - target).sum()
