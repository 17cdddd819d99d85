"""Keep a piece, gather it again: the first matrix of a pair with 1/n of its input.

Backward needs the input of a product for the gradient of the matrix. Gathered once more from the
pieces, it need not be kept in between: an all-gather more, and nothing of [T, D] left behind.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

import time

import torch
from torch.utils.checkpoint import checkpoint

from minipar.comm import autograd, collectives
from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails
from minipar.lab.memory import LiveBytes

LEVEL, MINUTES = "hard", 30
GOOD = "gradients of one device, and between forward and backward a rank holds its own tokens only"
PRAISE = "This is what Megatron-LM does, and what the published formula counts."
SIZES = (4, 2)

TOKENS, WIDTH, HIDDEN = 32, 48, 8


def given(size, random):
    """This rank's tokens [T/n, D] and its columns [D, F/n]."""
    x = torch.randn(TOKENS, WIDTH, generator=random, dtype=torch.float64)
    a = torch.randn(WIDTH, HIDDEN, generator=random, dtype=torch.float64)
    return [(x.chunk(size)[r].clone(), a.chunk(size, 1)[r].clone()) for r in range(size)]


def run(answer, axis, x, a):
    """The product, both gradients, and the bytes that were held between forward and backward."""
    x, a = x.clone().requires_grad_(), a.clone().requires_grad_()
    with LiveBytes() as live:
        out = answer(x, a, axis)
        patience = time.monotonic() + 0.5  # threads that carried messages let go of them
        while (held := live.now - out.untyped_storage().nbytes()) > 0:
            if time.monotonic() > patience:
                break
            time.sleep(0.01)
    if out.requires_grad:
        (out.sin() * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, a)]
    return out.detach(), grads, held


def _one_device(case: Case) -> list[list[torch.Tensor]]:
    n = case.size
    x, a = (torch.cat([mine[i] for mine in case.given], i).requires_grad_() for i in (0, 1))
    out = x @ a
    weights = torch.arange(out.numel() // n, dtype=out.dtype).view(TOKENS, -1)
    (out.sin() * torch.cat([weights] * n, 1)).sum().backward()
    return [
        [out.detach().chunk(n, 1)[r], x.grad.chunk(n)[r], a.grad.chunk(n, 1)[r]] for r in range(n)
    ]


def _with(case: Case, results: list) -> Case:
    return Case(case.size, case.given, results, case.sent)


def check_result(case: Case) -> None:
    expected = [mine[0] for mine in _one_device(case)]
    _with(case, [out for out, _, _ in case.results]).expect_close(expected, "the product")


def check_gradients(case: Case) -> None:
    expected = [mine[1:] for mine in _one_device(case)]
    found = [grads for _, grads, _ in case.results]
    _with(case, found).expect_close(expected, "the gradient of", names="xa")


def check_memory(case: Case) -> None:
    whole = 8 * TOKENS * WIDTH
    for rank, (_, _, held) in enumerate(case.results):
        if held > whole // case.size:
            raise CheckFailed(
                f"rank {rank} holds {held} bytes between forward and backward, besides what it was "
                f"given and the product; its own tokens are {whole // case.size}, all are {whole}"
            )


def check_traffic(case: Case) -> None:
    verbs = ("all_gather", "all_gather", "reduce_scatter")
    sent = [Sent(verb, wire_bytes(verb, 8 * TOKENS * WIDTH, case.size)) for verb in verbs]
    for rank in range(case.size):
        case.expect_sent(rank, sent)


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, axis):
        ctx.save_for_backward(x, a)  # the own tokens, not what they were gathered to
        ctx.axis = axis
        return collectives.all_gather(x, axis) @ a

    @staticmethod
    def backward(ctx, gradient):
        x, a = ctx.saved_tensors
        whole = collectives.all_gather(x, ctx.axis)
        grad_x = collectives.reduce_scatter(gradient @ a.T, ctx.axis)
        return grad_x, whole.T @ gradient, None


def solution(x, a, axis):
    return _GatheredProduct.apply(x, a, axis)


@fails(
    "result",
    "Only this rank's tokens are multiplied: gather first.",
)
def wrong_sends_nothing(x, a, axis):
    return x @ a


@fails(
    "memory",
    "The gathered tensor is held until backward: save x, and gather again there.",
)
def wrong_lets_autograd_keep_it(x, a, axis):
    return autograd.all_gather(x, axis, to="R") @ a


class _KeepsAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, axis):
        ctx.whole, ctx.a, ctx.axis = collectives.all_gather(x, axis), a, axis
        return ctx.whole @ a

    @staticmethod
    def backward(ctx, gradient):
        collectives.all_gather(gradient.new_zeros(TOKENS // ctx.axis.size, WIDTH), ctx.axis)
        grad_x = collectives.reduce_scatter(gradient @ ctx.a.T, ctx.axis)
        return grad_x, ctx.whole.T @ gradient, None


@fails(
    "memory",
    "The gathered tensor is held until backward: save x, and gather again there.",
)
def wrong_keeps_it_on_the_side(x, a, axis):
    """Not saved by the book, and held all the same; an all-gather of nothing hides it well."""
    return _KeepsAll.apply(x, a, axis)


class _OwnTokensOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, axis):
        ctx.save_for_backward(x, a)
        ctx.axis = axis
        return collectives.all_gather(x, axis) @ a

    @staticmethod
    def backward(ctx, gradient):
        (x, a), axis = ctx.saved_tensors, ctx.axis
        grad_x = collectives.reduce_scatter(gradient @ a.T, axis)
        return grad_x, x.T @ gradient.chunk(axis.size)[axis.rank], None


@fails(
    "gradients",
    "The gradient of a knows this rank's tokens alone: gather x again in backward.",
)
def wrong_does_not_gather_again(x, a, axis):
    """The matrix learns from the own tokens, as if it were replicated."""
    return _OwnTokensOnly.apply(x, a, axis)


@fails(
    "traffic",
    "Backward sums gradients of all tokens everywhere: a reduce-scatter is enough.",
)
def wrong_sums_more_than_its_own(x, a, axis):
    def product(x, a):
        whole = autograd.all_gather(x, axis, to="I")  # I: backward cuts, so sum in front of it
        return autograd.convert(whole, axis) @ a

    return checkpoint(product, x, a, use_reentrant=False)


class _SumsNothing(_OwnTokensOnly):
    @staticmethod
    def backward(ctx, gradient):
        (x, a), axis = ctx.saved_tensors, ctx.axis
        whole = collectives.all_gather(x, axis)
        return (gradient @ a.T).chunk(axis.size)[axis.rank], whole.T @ gradient, None


@fails(
    "gradients",
    "Each rank has a part of the gradient of x: reduce-scatter the parts.",
)
def wrong_cuts_and_does_not_sum(x, a, axis):
    return _SumsNothing.apply(x, a, axis)
