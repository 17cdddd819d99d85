"""Grouped-query attention by hand.

Every key/value head is repeated for the query heads that share it; scores are scaled by 1/sqrt(K);
what lies in the future gets minus infinity before the softmax.
Source: Ainslie et al. 2305.13245, section 2.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.lab.memory import LiveBytes
from minipar.model.llama import dense_core

LEVEL, MINUTES = "medium", 20
GOOD = "equal to the library's for any number of groups, without scaled_dot_product_attention"
PRAISE = "Put it into a Block's self_attn.core, and the model runs on your attention."
SIZES = (1,)

BATCH, TOKENS, HEAD_DIM = 2, 64, 8


def given(size, random):
    """Three times q [B, H, T, K] and k, v [B, G, T, K], with G of 2, H and 1."""
    triples = []
    for heads, groups in ((6, 2), (4, 4), (3, 1)):
        shapes = [(BATCH, count, TOKENS, HEAD_DIM) for count in (heads, groups, groups)]
        triples.append([torch.randn(s, generator=random, dtype=torch.float64) for s in shapes])
    return [(triples,)] * size


class Calls(TorchFunctionMode):
    """Notes the names of all functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def run(answer, axis, triples):
    """For each triple the answer's result; the functions it called; its largest tensor, bytes."""
    results, largest, names = [], [], set()
    for q, k, v in triples:
        with Calls() as calls, LiveBytes() as live:
            results.append(answer(q.clone(), k.clone(), v.clone()))
        names |= calls.names
        largest.append(live.largest)
    return results, names, largest


def check_result(case: Case) -> None:
    truth = [dense_core(q, k, v) for (q, k, v) in case.given[0][0]]
    results = [case.results[0][0]]
    Case(1, case.given, results, case.sent).expect_close([truth], "attention, case")


def check_by_hand(case: Case) -> None:
    if "scaled_dot_product_attention" in case.results[0][1]:
        raise CheckFailed("scaled_dot_product_attention did the work; write it from @ and softmax")


def bonus_no_square(case: Case) -> None:
    """No tensor of more than a quarter of all B x H x T x T scores."""
    for (q, _, _), largest in zip(case.given[0][0], case.results[0][2], strict=True):
        square = q[..., 0].numel() * TOKENS * q.element_size()
        if largest > square // 4:
            raise CheckFailed(
                f"the largest tensor has {largest:,} bytes; all scores together would have "
                f"{square:,}, and {square // 4:,} is the limit"
            )


def solution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, T, T]
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def solution_bonus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A block of queries at a time: they need the keys up to themselves only."""
    share, rows = q.shape[1] // k.shape[1], 8
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    out = []
    for start in range(0, q.shape[2], rows):
        end = start + rows
        scores = q[:, :, start:end] @ k[:, :, :end].transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + start)
        out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :, :end])
    return torch.cat(out, dim=2)


@fails(
    "result",
    "This is q itself, unchanged.",
)
def wrong_computes_nothing(q, k, v):
    return q


@fails(
    "by_hand",
    "torch has done it: write the two products and the softmax yourself.",
)
def wrong_asks_torch(q, k, v):
    return dense_core(q, k, v)


@fails(
    "result",
    "Heads 0 and 1 share keys: repeat_interleave, where repeat deals out like cards.",
)
def wrong_deals_the_heads_out_like_cards(q, k, v):
    share = q.shape[1] // k.shape[1]
    return solution(q, k.repeat(1, share, 1, 1), v.repeat(1, share, 1, 1))


@fails(
    "run",
    "k and v have fewer heads than q: repeat each of them H/G times.",
)
def wrong_forgets_the_groups(q, k, v):
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


@fails(
    "result",
    "The scores are not divided by the square root of K.",
)
def wrong_forgets_the_scale(q, k, v):
    return solution(q * q.shape[-1] ** 0.5, k, v)


@fails(
    "result",
    "Masked after the softmax, rows no longer sum to 1: mask the scores.",
)
def wrong_masks_after_the_softmax(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
    return weights.tril() @ v


@fails(
    "result",
    "A token does not see itself: triu(1) leaves the diagonal visible.",
)
def wrong_hides_the_token_itself(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu()
    return scores.masked_fill(future, -torch.inf).softmax(-1).nan_to_num() @ v


@fails(
    "result",
    "The future is visible: mask what lies above the diagonal.",
)
def wrong_sees_the_future(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


@fails(
    "result",
    "The first token sees nothing at all, hence nan: triu(1) leaves the diagonal visible.",
)
def wrong_leaves_the_first_token_nothing(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu()
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@fails(
    "result",
    "A score of 0 still gets weight in a softmax: set the future to minus infinity.",
)
def wrong_sets_the_future_to_zero(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).tril().softmax(-1) @ v


@fails(
    "result",
    "The past is hidden, and the future seen: triu(1) marks what to hide.",
)
def wrong_hides_the_past(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-1)
    return scores.masked_fill(past, -torch.inf).softmax(-1) @ v


@fails(
    "result",
    "The softmax goes over the queries: it goes over the keys, the last dim.",
)
def wrong_softmax_over_the_queries(q, k, v):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-2) @ v


@fails(
    "result",
    "The scores are divided by K: divide by its square root.",
)
def wrong_divides_by_the_head_width(q, k, v):
    return solution(q / q.shape[-1] ** 0.5, k, v)
