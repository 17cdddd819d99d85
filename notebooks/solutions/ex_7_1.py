"""Columns, then rows: two matrices with one sum.

The first matrix is cut by columns, so that what lies between the two is cut as well and never
leaves its rank. The second is cut by rows, and its results are summands: one all-reduce adds them.
What is whole, such as the last bias, is added once, after the sum.
Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3.
"""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from minipar.comm.collectives import all_gather, all_reduce, wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "easy", 20
GOOD = "1/n of the multiplications on each rank, one all-reduce of [T, D], each bias added once"
PRAISE = "Hidden units never leave their rank: one sum joins two matrices."
SIZES = (4, 2)

TOKENS, WIDTH, HIDDEN = 5, 6, 8


def given(size, random):
    """The same on every rank: x, A and its bias, B and its bias."""
    shapes = [(TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,)]
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return [tuple(tensor.clone() for tensor in drawn) for _ in range(size)]


def run(answer, axis, *tensors):
    with FlopCounterMode(display=False) as counter:
        result = answer(*tensors, axis)
    return result, counter.get_total_flops()


def check_result(case: Case) -> None:
    x, a, a_bias, b, b_bias = case.given[0]
    expected = F.silu(x @ a + a_bias) @ b + b_bias
    found = [result for result, _ in case.results]
    Case(case.size, case.given, found, case.sent).expect_close([expected] * case.size)


def check_traffic(case: Case) -> None:
    num_bytes = wire_bytes("all_reduce", 8 * TOKENS * WIDTH, case.size)
    for rank in range(case.size):
        case.expect_sent(rank, [Sent("all_reduce", num_bytes)])


def check_work(case: Case) -> None:
    share = 2 * 2 * TOKENS * WIDTH * HIDDEN // case.size
    for rank, (_, flops) in enumerate(case.results):
        if flops > share:
            raise CheckFailed(f"rank {rank} spent {flops} FLOPs on products; its share is {share}")


def solution(x, a, a_bias, b, b_bias, axis):
    a_piece = a.chunk(axis.size, 1)[axis.rank]
    hidden = F.silu(x @ a_piece + a_bias.chunk(axis.size)[axis.rank])
    part = hidden @ b.chunk(axis.size, 0)[axis.rank]
    return all_reduce(part, axis) + b_bias


@fails(
    "traffic",
    "Every rank computes everything, and nothing is sent: use your own pieces.",
)
def wrong_computes_everything_everywhere(x, a, a_bias, b, b_bias, axis):
    return F.silu(x @ a + a_bias) @ b + b_bias


@fails(
    "result",
    "The last bias is counted n times: add it after the sum.",
)
def wrong_adds_the_bias_on_every_rank(x, a, a_bias, b, b_bias, axis):
    """Before the sum: n times."""
    return solution(x, a, a_bias, b, torch.zeros_like(b_bias), axis) + axis.size * b_bias


@fails(
    "result",
    "a was cut by rows, but silu of a part is not a part of silu: columns first.",
)
def wrong_rows_first(x, a, a_bias, b, b_bias, axis):
    """silu of a part is no part of the silu."""
    n, r = axis.size, axis.rank
    part = F.silu(x.tensor_split(n, 1)[r] @ a.tensor_split(n, 0)[r] + a_bias / n)
    return all_reduce(part, axis) @ b + b_bias


@fails(
    "traffic",
    "Hidden units are gathered: your rows of b need your own only.",
)
def wrong_gathers_what_lies_between(x, a, a_bias, b, b_bias, axis):
    n, r = axis.size, axis.rank
    hidden = F.silu(x @ a.chunk(n, 1)[r] + a_bias.chunk(n)[r])
    hidden = all_gather(hidden, axis, 1)
    return all_reduce(hidden.chunk(n, 1)[r] @ b.chunk(n, 0)[r], axis) + b_bias


@fails(
    "work",
    "Every rank multiplies everything and divides by n: cut the matrices.",
)
def wrong_divides_instead_of_cutting(x, a, a_bias, b, b_bias, axis):
    """The right result, and every rank does all of the work."""
    return all_reduce(F.silu(x @ a + a_bias) @ b / axis.size, axis) + b_bias


@fails(
    "result",
    "The sum is thrown away: collectives.all_reduce returns it, and leaves its input as it was.",
)
def wrong_throws_the_sum_away(x, a, a_bias, b, b_bias, axis):
    n, r = axis.size, axis.rank
    part = F.silu(x @ a.chunk(n, 1)[r] + a_bias.chunk(n)[r]) @ b.chunk(n, 0)[r]
    all_reduce(part, axis)
    return part + b_bias
