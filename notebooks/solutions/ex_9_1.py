"""The online softmax: merge what was computed from different keys.

Of each block of keys an output and the log-sum-exp of its scores are enough, one number per query:
from these follows what share of the whole softmax a block has.
Source: Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

import torch

from minipar.lab.exercises import Case, fails

LEVEL, MINUTES = "easy", 20
GOOD = "the softmax over all keys, for scores of any size, and for queries that see nothing"
PRAISE = "This merge is what FlashAttention does in a GPU, and ring attention between GPUs."
SIZES = (1,)

HEADS, QUERIES, WIDTH = 2, 6, 4
BLIND, HALF_BLIND = 1, 4  # queries: one sees no key at all, one none of the second block


def given(size, random):
    """Scores [H, t, s] in blocks, values [H, s, K] in blocks; -inf where a query may not look."""
    widths = (torch.randperm(4, generator=random) + 1).tolist()
    scores = 2 * torch.randn(HEADS, QUERIES, sum(widths), generator=random, dtype=torch.float64)
    scores += 2000 * torch.randn(HEADS, QUERIES, 1, generator=random, dtype=torch.float64)
    scores[:, BLIND] = -torch.inf
    scores[:, HALF_BLIND, widths[0] : widths[0] + widths[1]] = -torch.inf
    values = torch.randn(HEADS, sum(widths), WIDTH, generator=random, dtype=torch.float64)
    return [(list(scores.split(widths, -1)), list(values.split(widths, -2)))] * size


def _attend(scores, values):
    """Output and log-sum-exp of one block; 0 and -inf for a query that sees nothing."""
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp().nan_to_num(0.0) @ values, lse


def run(answer, axis, scores, values):
    out, lse = answer([_attend(*block) for block in zip(scores, values, strict=True)])
    return out, lse


def _expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    scores, values = (
        torch.cat(blocks, dim) for blocks, dim in zip(case.given[0], (-1, -2), strict=True)
    )
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1, keepdim=True)


def _expect(case: Case, rows: list[int], where: str) -> None:
    for i, what in enumerate(("the output", "the log-sum-exp")):
        found = case.results[0][i]
        found = found[:, rows] if isinstance(found, torch.Tensor) and found.ndim == 3 else found
        expected = _expected(case)[i][:, rows]
        Case(1, case.given, [found], case.sent).expect_close([expected], f"{what} {where}")


def check_result(case: Case) -> None:
    seeing = [row for row in range(QUERIES) if row not in (BLIND, HALF_BLIND)]
    _expect(case, seeing, "of queries that look at every block,")


def check_blind(case: Case) -> None:
    _expect(case, [HALF_BLIND], "of the query that sees nothing in one block,")
    _expect(case, [BLIND], "of the query that sees nothing at all,")


def solution(parts):
    out, lse = parts[0]
    for new_out, new_lse in parts[1:]:
        total = torch.logaddexp(lse, new_lse)
        finite = total.clamp(min=torch.finfo(total.dtype).min)
        out = (lse - finite).exp() * out + (new_lse - finite).exp() * new_out
        lse = total
    return out, lse


@fails(
    "result",
    "Only the first part counts.",
)
def wrong_keeps_the_first(parts):
    return parts[0]


@fails(
    "result",
    "Outputs are averaged: weigh each by exp(lse - total).",
)
def wrong_averages(parts):
    """As if all blocks had equal shares."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return torch.stack([out for out, _ in parts]).mean(0), lse


@fails(
    "result",
    "The old output is not weighed anew: it takes exp(lse - total), too.",
)
def wrong_leaves_the_old_output(parts):
    """The new block is weighed, what came before is not weighed anew."""
    out, lse = parts[0]
    for new_out, new_lse in parts[1:]:
        total = torch.logaddexp(lse, new_lse)
        out, lse = out + (new_lse - total).exp() * new_out, total
    return out, lse


@fails(
    "result",
    "exp of a large score is infinite: logaddexp, and exp of differences only.",
)
def wrong_takes_exponentials(parts):
    """Right on paper: exp of a score of 2000 is infinite."""
    sums = [lse.exp() for _, lse in parts]
    out = sum(weight * out for weight, (out, _) in zip(sums, parts, strict=True)) / sum(sums)
    return out, sum(sums).log()


@fails(
    "result",
    "The larger of two log-sum-exps is not that of both: torch.logaddexp.",
)
def wrong_adds_maxima(parts):
    """The largest of the log-sum-exps is not their log-sum-exp."""
    out, lse = parts[0]
    for new_out, new_lse in parts[1:]:
        total = torch.maximum(lse, new_lse)
        out = (lse - total).exp() * out + (new_lse - total).exp() * new_out
        lse = total
    return out, lse


@fails(
    "blind",
    "-inf less -inf is NaN, where a query sees nothing: clamp the total.",
)
def wrong_subtracts_infinities(parts):
    """Nothing merged with nothing: -inf less -inf is nan."""
    out, lse = parts[0]
    for new_out, new_lse in parts[1:]:
        total = torch.logaddexp(lse, new_lse)
        out = (lse - total).exp() * out + (new_lse - total).exp() * new_out
        lse = total
    return out, lse
