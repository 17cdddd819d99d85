"""Top-k routing: each token chooses k experts, and how much of each.

Source: Jiang et al. 2024, "Mixtral of Experts" (arXiv 2401.04088), section 2.
"""

from dataclasses import replace

import torch

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "easy", 10
GOOD = "the k best experts of each token, with weights in their favour that sum to one"
PRAISE = "This is Mixtral's router, all of it."
SIZES = (1,)

TOKENS, EXPERTS, K = 12, 6, 2


def given(size, random):
    """Logits [N, E] and k."""
    return [(3 * torch.randn(TOKENS, EXPERTS, generator=random, dtype=torch.float64), K)] * size


def run(answer, axis, logits, k):
    """The experts, and a table [N, E] of weights, 0 for experts that were not chosen."""
    experts, weights = answer(logits, k)
    return experts, torch.zeros_like(logits).scatter(1, experts, weights.to(logits))


def check_sum(case: Case) -> None:
    sums = case.results[0][1].sum(1)
    if not torch.allclose(sums, torch.ones_like(sums)):
        raise CheckFailed(f"the weights of the first token sum to {sums[0]:.4f}, not to 1")


def check_result(case: Case) -> None:
    logits, k = case.given[0]
    best = logits.topk(k).indices
    among = torch.full_like(logits, -torch.inf).scatter(1, best, logits.gather(1, best))
    weights = [table for _, table in case.results]
    replace(case, results=weights).expect_close([among.softmax(-1)], "the weights")


def check_order(case: Case) -> None:
    logits, k = case.given[0]
    for best, experts in zip(
        logits.topk(k).indices.tolist(), case.results[0][0].tolist(), strict=True
    ):
        if experts != best:
            raise CheckFailed(f"the experts of a token are {best}, best first; got {experts}")


def solution(logits, k):
    best, experts = logits.topk(k, dim=-1)
    return experts, best.softmax(-1)


@fails(
    "sum",
    "Shares of all experts, of which k are kept: take the softmax over those k.",
)
def wrong_keeps_shares_of_all(logits, k):
    """Shares of all experts, of which k are kept, sum to less than one."""
    weights, experts = logits.softmax(-1).topk(k, dim=-1)
    return experts, weights


@fails(
    "result",
    "All k weigh alike: their logits say how much.",
)
def wrong_weighs_alike(logits, k):
    experts = logits.topk(k, dim=-1).indices
    return experts, torch.full_like(experts, 1 / k, dtype=logits.dtype)


@fails(
    "result",
    "Logits over their sum may be negative: take a softmax.",
)
def wrong_divides_logits(logits, k):
    """They sum to one, and may be negative."""
    best, experts = logits.topk(k, dim=-1)
    return experts, best / best.sum(-1, keepdim=True)


@fails(
    "order",
    "The worst of the k comes first: sort them from the best down, as topk does.",
)
def wrong_puts_the_worst_first(logits, k):
    experts, weights = solution(logits, k)
    return experts.flip(-1), weights.flip(-1)


@fails(
    "run",
    "topk returns values first: return the experts, then their weights.",
)
def wrong_exchanges_the_two(logits, k):
    return solution(logits, k)[::-1]
