"""Counts first: how many rows go to each rank, and how many come.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3.2.
"""

import torch
import torch.distributed as dist

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 15
GOOD = "both lists are right on every rank, for a few numbers on the wire"
PRAISE = "With these two lists, every row can travel in one call."
SIZES = (4, 2)

EXPERTS, SLOTS = 8, 30


def given(size, random):
    """For each rank: the experts of its slots [S], unevenly chosen, and E."""
    skew = torch.rand(size, EXPERTS, generator=random) ** 3
    chosen = torch.multinomial(skew, SLOTS, replacement=True, generator=random)
    return [(chosen[rank], EXPERTS) for rank in range(size)]


def _table(case: Case) -> list[list[int]]:
    """Rows [from][to]."""
    per_rank = EXPERTS // case.size
    return [(e // per_rank).bincount(minlength=case.size).tolist() for e, _ in case.given]


def check_result(case: Case) -> None:
    table = _table(case)
    for rank, found in enumerate(case.results):
        if not isinstance(found, tuple) or [type(rows) for rows in found] != [list, list]:
            raise CheckFailed(f"rank {rank}: expected (to send, to receive), lists, got {found!r}")
        send, receive = found
        for what, got, want in (
            ("to send", send, table[rank]),
            ("to receive", receive, [row[rank] for row in table]),
        ):
            if list(got) != want:
                raise CheckFailed(f"rank {rank}: rows {what} are {want}, not {list(got)}")


def check_traffic(case: Case) -> None:
    most = 8 * EXPERTS * (case.size - 1)
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if not 0 < num_bytes <= most:
            raise CheckFailed(f"rank {rank} sent {num_bytes} bytes; counts alone are up to {most}")


def solution(experts, num_experts, axis):
    counts = experts.bincount(minlength=num_experts)
    send = counts.view(axis.size, -1).sum(1)  # the experts of a rank lie side by side
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=axis.group)
    return send.tolist(), receive.tolist()


@fails(
    "result",
    "What comes in is taken for what goes out: exchange the counts.",
)
def wrong_receives_what_it_sends(experts, num_experts, axis):
    """True only where all ranks choose alike."""
    send = experts.bincount(minlength=num_experts).view(axis.size, -1).sum(1)
    return send.tolist(), send.tolist()


@fails(
    "result",
    "Experts are dealt out in turn: those of a rank lie side by side.",
)
def wrong_deals_experts_out_in_turn(experts, num_experts, axis):
    send = (experts % axis.size).bincount(minlength=axis.size)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=axis.group)
    return send.tolist(), receive.tolist()


@fails(
    "traffic",
    "All choices travel: send one count to each rank.",
)
def wrong_sends_all_choices(experts, num_experts, axis):
    """Right, and each rank learns every choice of every token: more bytes with every token."""
    every = experts.new_empty(axis.size, len(experts))
    dist.all_gather_single(every.view(-1), experts, group=axis.group)
    table = [(e // (num_experts // axis.size)).bincount(minlength=axis.size) for e in every]
    return table[axis.rank].tolist(), [int(row[axis.rank]) for row in table]
