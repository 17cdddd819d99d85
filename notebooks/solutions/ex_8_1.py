"""A norm and two matrices on tokens that are cut.

What acts on each token alone (norm, residual path) is done on the own tokens. The pair of matrices
needs all of them: gathered in front of the first, summed and cut again behind the second.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

import torch
import torch.nn.functional as F

from minipar.comm import autograd, collectives
from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "easy", 20
GOOD = (
    "output and gradients of one device, the bytes of one all-reduce forward and one backward, "
    "and one tensor of all tokens and full width that backward needs"
)
PRAISE = "The bytes of tensor parallelism, and the norm works on its own tokens only."
SIZES = (4, 2)

TOKENS, WIDTH, HIDDEN = 8, 12, 8  # of a rank, hidden units and matrices are smaller than [T, D]


def given(size, random):
    """This rank's tokens [T/n, D], scale [D] of the norm, the same on all, and its pieces."""
    shapes = [(TOKENS, WIDTH), (WIDTH,), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    x, scale, a, b = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return [
        (x.chunk(size)[r].clone(), scale.clone(), a.chunk(size, 1)[r].clone(), b.chunk(size)[r])
        for r in range(size)
    ]


def run(answer, axis, *tensors):
    """Output and gradients, and how many whole [T, D] tensors backward has asked to keep."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = answer(*leaves, axis)
    num_whole = sum(t.untyped_storage().nbytes() >= 8 * TOKENS * WIDTH for t in kept.values())
    if out.requires_grad:
        weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out) + axis.rank
        (out.sin() * weights).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return out.detach(), grads, num_whole


def _one_device(case: Case) -> list[list[torch.Tensor]]:
    """The output and the gradients of all four, as each rank should find them."""
    n = case.size
    x, a, b = (
        torch.cat([mine[i] for mine in case.given], dim) for i, dim in ((0, 0), (2, 1), (3, 0))
    )
    scale = case.given[0][1]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, scale, a, b)]
    out = _block(*leaves)
    own = torch.arange(out.numel() // n, dtype=out.dtype).view(-1, WIDTH)
    (out.sin() * torch.cat([own + rank for rank in range(n)])).sum().backward()
    x, scale, a, b = (leaf.grad for leaf in leaves)
    return [
        [out.detach().chunk(n)[r], x.chunk(n)[r], scale, a.chunk(n, 1)[r], b.chunk(n)[r]]
        for r in range(n)
    ]


def _block(x, scale, a, b):
    return x + F.silu(F.rms_norm(x, scale.shape, scale) @ a) @ b


def _with(case: Case, results: list) -> Case:
    return Case(case.size, case.given, results, case.sent)


def check_result(case: Case) -> None:
    expected = [mine[0] for mine in _one_device(case)]
    _with(case, [out for out, _, _ in case.results]).expect_close(expected, "the output")


def check_gradients(case: Case) -> None:
    scale = sum(grads[1] for _, grads, _ in case.results)  # of all ranks: a norm's is partial
    found = [[grads[0], scale, *grads[2:]] for _, grads, _ in case.results]
    expected = [mine[1:] for mine in _one_device(case)]
    _with(case, found).expect_close(
        expected, "the gradient of", names=("x", "scale (summed)", "a", "b")
    )


def check_traffic(case: Case) -> None:
    num_bytes = 8 * TOKENS * WIDTH
    one = [
        Sent(verb, wire_bytes(verb, num_bytes, case.size))
        for verb in ("all_gather", "reduce_scatter")
    ]
    for rank in range(case.size):
        case.expect_sent(rank, [*one, *one])


def check_memory(case: Case) -> None:
    for rank, (_, _, num_whole) in enumerate(case.results):
        if num_whole > 1:
            raise CheckFailed(
                f"rank {rank} keeps {num_whole} tensors of all tokens and full width for backward; "
                "one is enough, what the first matrix multiplies"
            )


def solution(x, scale, a, b, axis):
    normed = F.rms_norm(x, scale.shape, scale)  # [T/n, D] V
    hidden = F.silu(autograd.all_gather(normed, axis, to="R") @ a)  # [T, F/n] V
    return x + autograd.reduce_scatter(hidden @ b, axis)  # P -> V


@fails(
    "result",
    "Only this rank's tokens and columns: nothing was sent.",
)
def wrong_sends_nothing(x, scale, a, b, axis):
    return _block(x, scale, a, b)


@fails(
    "result",
    "The residual is counted n times: add x after the reduce-scatter.",
)
def wrong_adds_the_residual_before_the_sum(x, scale, a, b, axis):
    """Every rank adds it, so it is there n times."""
    whole = autograd.all_gather(x, axis, to="R")
    return autograd.reduce_scatter(_block(whole, scale, a, b), axis)


@fails(
    "gradients",
    "Gathered to I: each rank uses it in its own way, so it is R.",
)
def wrong_type_of_what_is_gathered(x, scale, a, b, axis):
    """To I: backward cuts, where each rank has only a part of the gradient."""
    normed = autograd.all_gather(F.rms_norm(x, scale.shape, scale), axis, to="I")
    return x + autograd.reduce_scatter(F.silu(normed @ a) @ b, axis)


@fails(
    "traffic",
    "An all-reduce, and then a cut: a reduce-scatter sends half.",
)
def wrong_sums_everywhere_and_cuts(x, scale, a, b, axis):
    normed = autograd.all_gather(F.rms_norm(x, scale.shape, scale), axis, to="R")
    whole = autograd.all_reduce(F.silu(normed @ a) @ b, axis, to="I")
    return x + autograd.cut(whole, axis)


@fails(
    "memory",
    "Gathered before the norm: gather after it, as late as possible.",
)
def wrong_normalises_all_tokens(x, scale, a, b, axis):
    """Gathered one line too early: every rank norms, and keeps, all tokens."""
    normed = F.rms_norm(autograd.all_gather(x, axis, to="R"), scale.shape, scale)
    return x + autograd.reduce_scatter(F.silu(normed @ a) @ b, axis)


@fails(
    "gradients",
    "No gradient flows through collectives: gather and scatter with autograd's functions.",
)
def wrong_gathers_without_backward(x, scale, a, b, axis):
    normed = collectives.all_gather(F.rms_norm(x, scale.shape, scale), axis)
    return x + collectives.reduce_scatter(F.silu(normed @ a) @ b, axis)


@fails(
    "result",
    "The residual path is missing: add x, this rank's tokens of it.",
)
def wrong_forgets_the_residual_path(x, scale, a, b, axis):
    return solution(x, scale, a, b, axis) - x
