"""Gradients of norms, when each rank has normalised a part of the tokens.

With sequence parallelism a norm weight is whole on every rank, yet it has met the rank's own tokens
only: its gradient is a summand. Matrices that are cut have seen all tokens, and must be left alone.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

import torch
from torch import nn

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 20
GOOD = "norms have the gradient of all tokens, matrices keep theirs, for one all-reduce in all"
PRAISE = "A replicated weight on varying tokens has a partial gradient: summed once, all together."
SIZES = (4, 3)

WIDTH, HIDDEN = 6, 3
SHAPES = {
    "model.layers.0.input_layernorm.weight": (WIDTH,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, WIDTH),
    "model.layers.0.post_attention_layernorm.weight": (WIDTH,),
    "model.layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
    "model.layers.1.input_layernorm.weight": (WIDTH,),  # frozen
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (HIDDEN, WIDTH),
}
FROZEN = "model.layers.1.input_layernorm.weight"


def given(size, random):
    """The gradients of each rank's parameters by name; None where one is frozen."""
    return [
        (
            {
                name: None
                if name == FROZEN
                else torch.randn(shape, generator=random, dtype=torch.float64)
                for name, shape in SHAPES.items()
            },
        )
        for _ in range(size)
    ]


def run(answer, axis, gradients):
    params = {}
    for name, gradient in gradients.items():
        shape = SHAPES[name]
        params[name] = p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        p.grad = None if gradient is None else gradient.clone()
    answer(params, axis)
    return {name: p.grad for name, p in params.items()}


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _grads(case: Case, wanted) -> Case:
    names = [n for n in SHAPES if n != FROZEN and wanted(n)]
    for rank, found in enumerate(case.results):
        for name in names:
            if found[name] is None:
                raise CheckFailed(f"rank {rank} has lost the gradient of {name}")
    results = [[found[name] for name in names] for found in case.results]
    return Case(case.size, [tuple(names)] * case.size, results, case.sent)


def check_norms(case: Case) -> None:
    norms = _grads(case, _is_norm)
    sums = [sum(mine[0][name] for mine in case.given) for name in norms.given[0]]
    norms.expect_close([sums] * case.size, "gradient of norm")
    for rank, found in enumerate(case.results):
        if found[FROZEN] is not None:
            raise CheckFailed(f"rank {rank}: a frozen norm has got a gradient")


def check_matrices(case: Case) -> None:
    matrices = _grads(case, lambda name: not _is_norm(name))
    expected = [[mine[0][name] for name in matrices.given[0]] for mine in case.given]
    matrices.expect_close(expected, "gradient of matrix")


def check_traffic(case: Case) -> None:
    num_bytes = wire_bytes("all_reduce", 8 * 3 * WIDTH, case.size)
    for rank in range(case.size):
        case.expect_sent(rank, [Sent("all_reduce", num_bytes)])


def solution(params, axis):
    grads = [p.grad for n, p in params.items() if n.endswith("norm.weight") and p.grad is not None]
    flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), axis)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


@fails(
    "norms",
    "Norms keep the gradient of their own tokens: sum it over the ranks.",
)
def wrong_sends_nothing(params, axis):
    pass


@fails(
    "norms",
    "Norms are averaged: sum them, as the loss is that of all tokens.",
)
def wrong_averages(params, axis):
    """As in data parallelism; but the loss is that of all tokens already."""
    for name, p in params.items():
        if _is_norm(name) and p.grad is not None:
            p.grad = all_reduce(p.grad, axis, "avg")


@fails(
    "norms",
    "The last norm is missing: its name ends with norm.weight alone.",
)
def wrong_forgets_the_last_norm(params, axis):
    for name, p in params.items():
        if name.endswith("layernorm.weight") and p.grad is not None:
            p.grad = all_reduce(p.grad, axis)


@fails(
    "matrices",
    "Matrices are summed, too: each rank holds another piece of them.",
)
def wrong_sums_everything(params, axis):
    for p in params.values():
        if p.grad is not None:
            p.grad = all_reduce(p.grad, axis)


@fails(
    "traffic",
    "One call per norm: join their gradients into one tensor.",
)
def wrong_one_by_one(params, axis):
    for name, p in params.items():
        if _is_norm(name) and p.grad is not None:
            p.grad = all_reduce(p.grad, axis)


@fails(
    "norms",
    "The sums are thrown away: copy each piece back into its p.grad.",
)
def wrong_throws_the_sums_away(params, axis):
    norms = [p.grad for name, p in params.items() if _is_norm(name) and p.grad is not None]
    all_reduce(torch.cat(norms), axis)
