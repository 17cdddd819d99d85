"""Dispatch and combine: send each token to its experts, and bring it home.

Sort the slots by expert, tell each rank how many rows come, send the rows, compute, send the
results back, and add up what belongs to one token.
Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3.2.
"""

import torch
import torch.distributed as dist

from minipar.comm import collectives
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "hard", 40
GOOD = "equal to one device on every rank; rows, choices and counts on the wire, no more"
PRAISE = "That is expert parallelism: two all-to-alls with a sort around them."
SIZES = (4, 2)

EXPERTS, K, TOKENS, WIDTH = 8, 2, 10, 32
ROW = 8 * WIDTH  # bytes in float64


def given(size, random):
    """For each rank: tokens [N, D], their experts and weights [N, k], and the expert's matrices."""
    x = torch.randn(size, TOKENS, WIDTH, generator=random, dtype=torch.float64)
    skew = torch.rand(size, TOKENS, EXPERTS, generator=random) ** 3 + 1e-3
    experts = torch.multinomial(skew.flatten(0, 1), K, generator=random).view(size, TOKENS, K)
    weights = torch.rand(size, TOKENS, K, generator=random, dtype=torch.float64)
    weights /= weights.sum(-1, keepdim=True)
    matrices = torch.randn(EXPERTS, WIDTH, WIDTH, generator=random, dtype=torch.float64)
    return [(x[rank], experts[rank], weights[rank], matrices) for rank in range(size)]


def run(answer, axis, x, experts, weights, matrices):
    """The answer, with experts that compute on their own rank alone."""
    per_rank = EXPERTS // axis.size

    def compute(rows, expert):
        away = expert[expert // per_rank != axis.rank]
        if len(away):
            raise ValueError(f"expert {int(away[0])} is not on rank {axis.rank}")
        if len(rows) != len(expert):
            raise ValueError(f"{len(rows)} rows, and experts for {len(expert)}")
        return torch.einsum("rd,rde->re", rows, matrices[expert])

    return answer(x.clone(), experts.clone(), weights.clone(), compute, EXPERTS, axis)


def check_result(case: Case) -> None:
    expected = []
    for x, experts, weights, matrices in case.given:
        every = torch.einsum("nd,nkde->nke", x, matrices[experts])
        expected.append((weights[..., None] * every).sum(1))
    case.expect_close(expected, "the tokens")


def check_traffic(case: Case) -> None:
    per_rank = EXPERTS // case.size
    table = [(e // per_rank).flatten().bincount(minlength=case.size) for _, e, *_ in case.given]
    for rank, sent in enumerate(case.sent):
        leave = int(table[rank].sum() - table[rank][rank])
        return_ = int(sum(row[rank] for row in table) - table[rank][rank])
        rows = (leave + return_) * ROW
        extra = 8 * leave + 8 * EXPERTS * (case.size - 1)  # choices, and counts
        num_bytes = sum(one.num_bytes for one in sent)
        if not rows <= num_bytes <= rows + extra:
            raise CheckFailed(
                f"rank {rank} of {case.size} sent {num_bytes} bytes; {leave} rows leave and "
                f"{return_} go back, {rows} bytes, with at most {extra} for choices and counts"
            )


def counts_of(expert, num_experts, axis):
    """Return how many rows this rank sends to each rank, and receives from each."""
    send = expert.bincount(minlength=num_experts).view(axis.size, -1).sum(1)
    receive = collectives.all_to_all(send, axis)
    return send.tolist(), receive.tolist()


def exchange(rows, send, receive, axis):
    """Send rows to each rank, and return what arrives."""
    return collectives.all_to_all(rows, axis, send_counts=send, recv_counts=receive)


def solution(x, experts, weights, compute, num_experts, axis):
    # 1. Sort the slots by expert, and so by rank.
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # [N k]
    token, expert = order // k, experts.flatten()[order]  # [N k] each
    # 2. Tell each rank how many rows come.
    send, receive = counts_of(expert, num_experts, axis)
    # 3. Dispatch: the rows, and the expert that each of them wants.
    arrived = exchange(x[token], send, receive, axis)  # [R, D]
    wanted = exchange(expert, send, receive, axis)  # [R]
    # 4. Compute.
    out = compute(arrived, wanted)  # [R, D]
    # 5. Combine: back, weigh, and add up what belongs to one token.
    back = exchange(out, receive, send, axis)  # [N k, D], in the order of the slots
    weighed = back * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, weighed)  # [N, D]


def _five_steps(x, experts, weights, compute, num_experts, axis, **slip):
    """The solution, with a slip in one of its steps."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    token, expert = order // k, experts.flatten()[order]
    send, receive = counts_of(expert, num_experts, axis)
    rows = x[token] if "rows" not in slip else x.repeat_interleave(k, 0)
    out = compute(exchange(rows, send, receive, axis), exchange(expert, send, receive, axis))
    back = exchange(out, receive, send, axis)
    if slip.get("unsorted"):
        return (back.view(-1, k, x.shape[1]) * weights[..., None]).sum(1)
    w = weights.flatten()[order] if "weigh" not in slip else weights.flatten()
    w = torch.ones_like(w) if slip.get("weigh") == "none" else w
    if slip.get("overwrites"):
        out = torch.zeros_like(x)
        out[token] = back * w[:, None]
        return out
    return torch.zeros_like(x).index_add(0, token, back * w[:, None])


@fails(
    "result",
    "Rows leave in the order of tokens, counts in the order of experts: send x[token].",
)
def wrong_sends_unsorted_rows(*given):
    return _five_steps(*given, rows="unsorted")


@fails(
    "result",
    "Rows come back in the order of experts: put them into the order of tokens.",
)
def wrong_leaves_the_results_sorted(*given):
    return _five_steps(*given, unsorted=True)


@fails(
    "result",
    "Weights lie in the order of tokens, rows in the order of experts: sort both.",
)
def wrong_weighs_in_the_order_of_tokens(*given):
    return _five_steps(*given, weigh="unsorted")


@fails(
    "result",
    "The results are added without their weights.",
)
def wrong_forgets_the_weights(*given):
    return _five_steps(*given, weigh="none")


@fails(
    "result",
    "One of a token's results overwrites the others: add them up, with index_add.",
)
def wrong_overwrites_the_other_expert(*given):
    return _five_steps(*given, overwrites=True)


@fails(
    "result",
    "Only the experts of this rank have computed: the other slots have to travel.",
)
def wrong_stays_at_home(x, experts, weights, compute, num_experts, axis):
    """Nothing is sent."""
    order = experts.flatten().argsort(stable=True)
    here = order[experts.flatten()[order] // (num_experts // axis.size) == axis.rank]
    token = here // experts.shape[1]
    out = compute(x[token], experts.flatten()[here]) * weights.flatten()[here, None]
    return torch.zeros_like(x).index_add(0, token, out)


@fails(
    "run",
    "An expert got rows that are another rank's: experts 0 to E/n - 1 are on rank 0, and so on.",
)
def wrong_deals_experts_out_in_turn(x, experts, weights, compute, num_experts, axis):
    n = axis.size
    dealt = experts % n * (num_experts // n) + experts // n
    order = dealt.flatten().argsort(stable=True)
    send, receive = counts_of(dealt.flatten()[order], num_experts, axis)
    expert = experts.flatten()[order]
    return compute(
        exchange(x[order // experts.shape[1]], send, receive, axis),
        exchange(expert, send, receive, axis),
    )


@fails(
    "traffic",
    "All tokens go to all ranks: send each row to the rank of its expert alone.",
)
def wrong_gathers_all_tokens(x, experts, weights, compute, num_experts, axis):
    """Right, and a rank sends every token to every other rank."""

    def gathered(t):
        every = t.new_empty(axis.size * len(t), *t.shape[1:])
        dist.all_gather_single(every, t.contiguous(), group=axis.group)
        return every

    every, chosen, weighs = gathered(x), gathered(experts).flatten(), gathered(weights).flatten()
    here = (chosen // (num_experts // axis.size) == axis.rank).nonzero()[:, 0]
    token = here // experts.shape[1]
    out = compute(every[token], chosen[here]) * weighs[here, None]
    sums = torch.zeros_like(every).index_add(0, token, out)
    dist.all_reduce(sums, group=axis.group)
    return sums.view(axis.size, *x.shape)[axis.rank]
