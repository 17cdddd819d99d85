"""The missing all-reduce, found by type.

Every value of the forward pass is right, and one gradient is not: an invariant tensor goes into
matrices of which each rank has another piece, so each rank finds a part of its gradient. The types
say where: I meets V, and I -> R has to stand between. What goes around the matrices stays I.
Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3: the functions f and g.
"""

import torch
import torch.nn.functional as F

from minipar.comm import collectives
from minipar.comm.autograd import all_reduce, convert
from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, Sent, fails

LEVEL, MINUTES = "medium", 20
GOOD = "all gradients are those of one device, for one all-reduce forward and one backward"
PRAISE = "I meets V: that is where convert belongs, once, and not around the residual path."
SIZES = (4, 2)

TOKENS, WIDTH, HIDDEN = 5, 4, 8


def given(size, random):
    """x [T, D] and scale [D], the same on all ranks; pieces of gate, up and down."""
    shapes = [(TOKENS, WIDTH), (WIDTH,), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    x, scale, gate, up, down = (
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes
    )
    return [
        (
            x.clone(),
            scale.clone(),
            gate.chunk(size, 1)[rank].clone(),
            up.chunk(size, 1)[rank].clone(),
            down.chunk(size, 0)[rank].clone(),
        )
        for rank in range(size)
    ]


def run(answer, axis, *tensors):
    """The output and the gradients of all five, of a loss that every rank computes alike."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = answer(*leaves, axis)
    if out.requires_grad:
        (out.sin() * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return out.detach(), grads


def _one_device(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, scale = case.given[0][:2]
    gate, up = (torch.cat([mine[i] for mine in case.given], 1) for i in (2, 3))
    down = torch.cat([mine[4] for mine in case.given], 0)
    return run(_block, None, x, scale, gate, up, down)


def _block(x, scale, gate, up, down, axis):
    normed = x * scale
    return x + (F.silu(normed @ gate) * (normed @ up)) @ down


def _of(case: Case, index: int) -> Case:
    return Case(case.size, case.given, [result[index] for result in case.results], case.sent)


def check_result(case: Case) -> None:
    _of(case, 0).expect_close([_one_device(case)[0]] * case.size, "the output")


def check_gradients(case: Case) -> None:
    x, scale, gate, up, down = _one_device(case)[1]
    expected = [
        [
            x,
            scale,
            gate.chunk(case.size, 1)[rank],
            up.chunk(case.size, 1)[rank],
            down.chunk(case.size, 0)[rank],
        ]
        for rank in range(case.size)
    ]
    _of(case, 1).expect_close(
        expected, "the gradient of", names=("x", "scale", "gate", "up", "down")
    )


def check_traffic(case: Case) -> None:
    one = Sent("all_reduce", wire_bytes("all_reduce", 8 * TOKENS * WIDTH, case.size))
    for rank in range(case.size):
        case.expect_sent(rank, [one, one])


def solution(x, scale, gate, up, down, axis):
    normed = convert(x * scale, axis)
    part = (F.silu(normed @ gate) * (normed @ up)) @ down
    return x + all_reduce(part, axis, to="I")


@fails(
    "result",
    "The output is this rank's summand: an all-reduce is missing forward.",
)
def wrong_sends_nothing(x, scale, gate, up, down, axis):
    return _block(x, scale, gate, up, down, axis)


@fails(
    "gradients",
    "Still as given: normed is I, and meets cut matrices without convert.",
)
def wrong_as_given(x, scale, gate, up, down, axis):
    normed = x * scale
    return x + all_reduce((F.silu(normed @ gate) * (normed @ up)) @ down, axis, to="I")


@fails(
    "gradients",
    "The residual path is converted, too: its gradient comes n times.",
)
def wrong_converts_the_residual_path_too(x, scale, gate, up, down, axis):
    """The gradient around the matrices is whole on every rank, and is added up n times."""
    return solution_at(convert(x, axis), scale, gate, up, down, axis)


def solution_at(x, scale, gate, up, down, axis):
    normed = x * scale
    return x + all_reduce((F.silu(normed @ gate) * (normed @ up)) @ down, axis, to="I")


@fails(
    "gradients",
    "The sum is of type R: where all ranks compute the same loss, it is I.",
)
def wrong_type_of_the_sum(x, scale, gate, up, down, axis):
    """to="R": the loss is the same on every rank, so gradients come n times too large."""
    normed = convert(x * scale, axis)
    return x + all_reduce((F.silu(normed @ gate) * (normed @ up)) @ down, axis, to="R")


@fails(
    "traffic",
    "Converted once for each matrix: convert once, and use the result twice.",
)
def wrong_converts_for_each_matrix(x, scale, gate, up, down, axis):
    normed = x * scale
    hidden = F.silu(convert(normed, axis) @ gate) * (convert(normed, axis) @ up)
    return x + all_reduce(hidden @ down, axis, to="I")


@fails(
    "gradients",
    "collectives.all_reduce has no backward: take that of minipar.comm.autograd.",
)
def wrong_sums_without_backward(x, scale, gate, up, down, axis):
    normed = convert(x * scale, axis)
    return x + collectives.all_reduce((F.silu(normed @ gate) * (normed @ up)) @ down, axis)
