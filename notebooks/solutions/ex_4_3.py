"""PowerSGD: two thin all-reduces, and what they leave out comes later.

P is the sum over the ranks of M_r Q, made orthonormal; the new Q is the sum of M_r^T P; the average
is P Q^T / n. Both sums are linear in the gradients, so all-reduces take them. M_r is the gradient
of a rank plus what it kept back before, and each step starts from the Q of the last one.
Source: Vogels et al. 2019 (arXiv 1905.13727), algorithms 1 and 2.
"""

import torch

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.lab import draw
from minipar.lab.exercises import Case, Sent, fails

LEVEL, MINUTES = "hard", 35
GOOD = "the textbook's averages in every step, and two all-reduces per step, of P and of Q"
PRAISE = "Any matrix now travels as two thin ones, and what they leave out is only late."
SIZES = (4, 3)

STEPS, ROWS, COLUMNS, RANK = 8, 12, 8, 2


def given(size, random):
    """For each rank a gradient [R, C] for each of STEPS steps, in float64, and the first Q [C, r].

    All have something in common, whose singular values fall by 0.7 from one to the next.
    """

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    u, v = (torch.linalg.qr(normal(n, COLUMNS)).Q for n in (ROWS, COLUMNS))
    common = 8 * u @ torch.diag(0.7 ** torch.arange(COLUMNS, dtype=torch.float64)) @ v.T
    gradients, q = common + 0.1 * normal(size, STEPS, ROWS, COLUMNS), normal(COLUMNS, RANK)
    return [(list(mine), q) for mine in gradients]


def run(answer, axis, gradients, q):
    residue, averages = torch.zeros_like(gradients[0]), []
    for gradient in gradients:
        average, residue, q = answer(gradient.clone(), residue.clone(), q.clone(), axis)
        averages.append(average)
    return averages


def _textbook(case: Case, feedback: bool = True) -> list[torch.Tensor]:
    """The averages of all steps, from the sums of all ranks: PowerSGD is linear in them."""
    q, residue, averages = case.given[0][1], 0, []
    for gradients in zip(*(mine for mine, _ in case.given), strict=True):
        total = sum(gradients) + residue
        p = torch.linalg.qr(total @ q).Q
        q = total.T @ p
        residue = total - p @ q.T if feedback else 0
        averages.append(p @ q.T / case.size)
    return averages


def _compare(case: Case, steps: range) -> None:
    textbook = _textbook(case)
    for step in steps:
        results = [averages[step] for averages in case.results]
        one = Case(case.size, case.given, results, case.sent)
        one.expect_close([textbook[step]] * case.size, f"step {step}: the average")


def check_first_step(case: Case) -> None:
    _compare(case, range(1))


def check_later_steps(case: Case) -> None:
    """What was left out comes back, and Q is as good as the last step made it."""
    _compare(case, range(1, STEPS))


def check_traffic(case: Case) -> None:
    thin = [8 * rows * RANK for rows in (ROWS, COLUMNS)]
    sent = [Sent("all_reduce", wire_bytes("all_reduce", n, case.size)) for n in thin]
    for rank in range(case.size):
        case.expect_sent(rank, STEPS * sent)


def _way_off(case: Case, averages: list[torch.Tensor]) -> list[float]:
    """After each step, how far the sum of what arrived is from the sum of all gradients."""
    steps = zip(*(mine for mine, _ in case.given), strict=True)
    truth = torch.stack([sum(gradients) / case.size for gradients in steps]).cumsum(0)
    arrived = torch.stack(averages).cumsum(0)
    return ((arrived - truth).norm(dim=(1, 2)) / truth.norm(dim=(1, 2))).tolist()


def drawn(case: Case):
    steps = range(1, STEPS + 1)
    return draw.curves(
        {
            "without feedback": (steps, _way_off(case, _textbook(case, feedback=False))),
            "yours": (steps, _way_off(case, case.results[0])),
        },
        xlabel="steps",
        ylabel="what has arrived, relative error",
        title="Your PowerSGD: what is missing arrives later",
        note=f"matrices of {ROWS} x {COLUMNS} as rank {RANK}, {case.size} ranks, computed",
    )


def solution(gradient, residue, q, axis):
    matrix = gradient + residue
    p = torch.linalg.qr(all_reduce(matrix @ q, axis)).Q
    q = all_reduce(matrix.T @ p, axis)
    average = p @ q.T / axis.size
    return average, matrix - average, q


@fails(
    "first_step",
    "Each rank approximates its own gradient: nothing was sent.",
)
def wrong_sends_nothing(gradient, residue, q, axis):
    matrix = gradient + residue
    p = torch.linalg.qr(matrix @ q).Q
    q = matrix.T @ p
    return p @ q.T, matrix - p @ q.T, q


@fails(
    "first_step",
    "Each rank has its own P: sum P over the ranks before you make it orthonormal.",
)
def wrong_own_directions(gradient, residue, q, axis):
    matrix = gradient + residue
    p = torch.linalg.qr(matrix @ q).Q
    q = all_reduce(matrix.T @ p, axis)
    average = p @ q.T / axis.size
    return average, matrix - average, q


@fails(
    "first_step",
    "Q is that of one rank's gradient: it is a sum over the ranks, as P is.",
)
def wrong_own_coordinates(gradient, residue, q, axis):
    matrix = gradient + residue
    p = torch.linalg.qr(all_reduce(matrix @ q, axis)).Q
    q = matrix.T @ p
    return p @ q.T, matrix - p @ q.T, q


@fails(
    "first_step",
    "P is not orthonormal: torch.linalg.qr(p).Q, after the sum.",
)
def wrong_not_orthonormal(gradient, residue, q, axis):
    matrix = gradient + residue
    p = all_reduce(matrix @ q, axis)
    q = all_reduce(matrix.T @ p, axis)
    average = p @ q.T / axis.size
    return average, matrix - average, q


@fails(
    "first_step",
    "P is not orthonormal: torch.linalg.qr(p).Q, after the sum.",
)
def wrong_orthonormal_before_the_sum(gradient, residue, q, axis):
    """A sum of orthonormal matrices is not one."""
    matrix = gradient + residue
    p = all_reduce(torch.linalg.qr(matrix @ q).Q, axis)
    q = all_reduce(matrix.T @ p, axis)
    average = p @ q.T / axis.size
    return average, matrix - average, q


@fails(
    "first_step",
    "Exactly n times the average: divide by axis.size.",
)
def wrong_a_sum(gradient, residue, q, axis):
    average, residue, q = solution(gradient, residue, q, axis)
    return average * axis.size, residue, q


@fails(
    "later_steps",
    "No feedback: add the residue to the gradient before anything else.",
)
def wrong_no_feedback(gradient, residue, q, axis):
    return solution(gradient, torch.zeros_like(residue), q, axis)


@fails(
    "later_steps",
    "The residue forgets the one before: it is gradient + residue, less what was sent.",
)
def wrong_keeps_the_last_rest_only(gradient, residue, q, axis):
    average, _, q = solution(gradient, residue, q, axis)
    return average, gradient - average, q


@fails(
    "later_steps",
    "Every step starts from the first Q: return the new one, it is the better start.",
)
def wrong_cold_start(gradient, residue, q, axis):
    average, residue, _ = solution(gradient, residue, q, axis)
    return average, residue, q


@fails(
    "traffic",
    "The whole matrix travels: send the thin products, all_reduce(matrix @ q).",
)
def wrong_sends_the_matrix(gradient, residue, q, axis):
    matrix = gradient + residue
    mean = all_reduce(matrix, axis, "avg")
    p = torch.linalg.qr(mean @ q).Q
    q = mean.T @ p
    return p @ q.T, matrix - p @ q.T, q


@fails(
    "first_step",
    "The sums were not used: all_reduce returns them.",
)
def wrong_drops_the_sums(gradient, residue, q, axis):
    matrix = gradient + residue
    p = matrix @ q
    all_reduce(p, axis)
    p = torch.linalg.qr(p).Q
    q = matrix.T @ p
    all_reduce(q, axis)
    average = p @ q.T / axis.size
    return average, matrix - average, q


@fails(
    "run",
    "torch.linalg.qr returns Q and R: take .Q.",
)
def wrong_takes_q_and_r(gradient, residue, q, axis):
    matrix = gradient + residue
    p = torch.linalg.qr(all_reduce(matrix @ q, axis))
    return all_reduce(matrix.T @ p, axis)
