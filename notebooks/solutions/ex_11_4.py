"""Balance without a loss: a bias that steers the choice, from the load of all ranks.

Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664), algorithm 1.
"""

import torch
import torch.distributed as dist

from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "easy", 15
GOOD = "the same bias on every rank, from one sum of counts, which stay what they were"
PRAISE = "No gradient is bent, and experts find their balance."
SIZES = (4, 2)

EXPERTS = 8


def given(size, random):
    """For each rank: the bias [E], its own counts [E], and the speed."""
    bias = torch.randn(EXPERTS, generator=random, dtype=torch.float64)
    counts = torch.randint(100, (size, EXPERTS), generator=random)
    return [(bias.clone(), counts[rank].clone(), 0.01) for rank in range(size)]


def run(answer, axis, bias, counts, speed):
    mine = counts.clone()
    return answer(bias, mine, speed, axis), mine


def check_result(case: Case) -> None:
    load = sum(counts for _, counts, _ in case.given).double()
    bias, _, speed = case.given[0]
    want = bias + speed * (load.mean() - load).sign()
    found = [result for result, _ in case.results]
    # Counts in float32 make a float32 of the speed, too: 0.01 is then off by 2e-10.
    answers = Case(case.size, case.given, found, case.sent)
    answers.expect_close([want] * case.size, "the bias", atol=1e-8)


def check_counts(case: Case) -> None:
    for rank, (_, after) in enumerate(case.results):
        if not torch.equal(after, case.given[rank][1]):
            raise CheckFailed(f"rank {rank}: its own counts were overwritten by the sum")


def check_traffic(case: Case) -> None:
    most = wire_bytes("all_reduce", 8 * EXPERTS, case.size)
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if len(sent) != 1 or num_bytes > most:
            raise CheckFailed(
                f"rank {rank} made {len(sent)} calls and sent {num_bytes} bytes; one sum of "
                f"{EXPERTS} counts is enough, {most} bytes"
            )


def solution(bias, counts, speed, axis):
    load = counts.clone()
    dist.all_reduce(load, group=axis.group)
    load = load.double()
    return bias + speed * (load.mean() - load).sign()


@fails(
    "result",
    "Each rank steers by its own counts: sum them over all ranks.",
)
def wrong_counts_for_itself(bias, counts, speed, axis):
    """Every rank steers its own way, and routers drift apart."""
    load = counts.double()
    return bias + speed * (load.mean() - load).sign()


@fails(
    "result",
    "The bias goes the wrong way: up where the load is below the mean.",
)
def wrong_steers_the_other_way(bias, counts, speed, axis):
    return 2 * bias - solution(bias, counts, speed, axis)


@fails(
    "counts",
    "counts was changed in place: sum a clone.",
)
def wrong_sums_in_place(bias, counts, speed, axis):
    dist.all_reduce(counts, group=axis.group)
    load = counts.double()
    return bias + speed * (load.mean() - load).sign()
