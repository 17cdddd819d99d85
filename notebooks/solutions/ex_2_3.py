"""All-gather by recursive doubling.

In round k every rank swaps all it has with the partner whose number differs from its own in bit k:
what it has doubles, and after log2 n rounds it has everything. The bytes are those of the ring,
(n-1) blocks per rank, the rounds are far fewer.
Source: Thakur, Rabenseifner & Gropp 2005, section 4.1 (recursive doubling).
"""

import math

import torch

from minipar.comm.collectives import all_gather, exchange
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "log2 n messages from each rank, n-1 blocks in all of them together"
PRAISE = "As few bytes as the ring, in log2 n rounds: each round doubles what a rank knows."
SIZES = (4, 2)

LENGTH = 3


def given(size, random):
    return [(torch.randn(LENGTH, generator=random, dtype=torch.float64),) for _ in range(size)]


def check_result(case: Case) -> None:
    joined = torch.cat([block for (block,) in case.given])
    case.expect_close([joined] * case.size, "the joined tensor")


def check_verbs(case: Case) -> None:
    verbs = {one.verb for sent in case.sent for one in sent} - {"send"}
    if verbs:
        raise CheckFailed(f"built from messages alone, please: no {', '.join(sorted(verbs))}")


def check_rounds(case: Case) -> None:
    rounds = int(math.log2(case.size))
    for rank, sent in enumerate(case.sent):
        if len(sent) != rounds:
            raise CheckFailed(f"rank {rank} sent {len(sent)} messages; expected {rounds}")


def check_bytes(case: Case) -> None:
    expected = (case.size - 1) * LENGTH * 8
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if num_bytes != expected:
            raise CheckFailed(
                f"rank {rank} sent {num_bytes} bytes; expected {expected}: all it has, and no more"
            )


def solution(block, axis):
    blocks = {axis.rank: block}
    reach = 1
    while reach < axis.size:
        partner = axis.rank ^ reach
        mine = torch.cat([blocks[rank] for rank in sorted(blocks)])
        (theirs,) = exchange([(mine, partner)], [(torch.empty_like(mine), partner)], axis)
        first = min(blocks) ^ reach  # theirs are as many, and begin there
        blocks |= {first + i: piece for i, piece in enumerate(theirs.chunk(reach))}
        reach *= 2
    return torch.cat([blocks[rank] for rank in range(axis.size)])


@fails(
    "result",
    "Each rank repeated its own block.",
)
def wrong_sends_nothing(block, axis):
    return block.repeat(axis.size)


@fails(
    "result",
    "In order of arrival: if the partner's number is smaller, its blocks come first.",
)
def wrong_joins_in_the_order_of_arrival(block, axis):
    mine, reach = block, 1
    while reach < axis.size:
        partner = axis.rank ^ reach
        (theirs,) = exchange([(mine, partner)], [(torch.empty_like(mine), partner)], axis)
        mine, reach = torch.cat([mine, theirs]), 2 * reach
    return mine


@fails(
    "verbs",
    "The library's all-gather has done it: use exchange.",
)
def wrong_asks_the_library(block, axis):
    return all_gather(block, axis)


@fails(
    "rounds",
    "This is a ring of n - 1 rounds: swap all that you have with rank ^ 1, ^ 2, ^ 4.",
)
def wrong_is_a_ring(block, axis):
    blocks = {axis.rank: block}
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    passing = block
    for step in range(1, axis.size):
        (passing,) = exchange([(passing, right)], [(torch.empty_like(block), left)], axis)
        blocks[(axis.rank - step) % axis.size] = passing
    return torch.cat([blocks[rank] for rank in range(axis.size)])


@fails(
    "bytes",
    "The whole buffer is sent, zeros included: send only the blocks that you have.",
)
def wrong_swaps_the_whole_buffer(block, axis):
    """Right, and in few rounds, but what a rank does not have yet is sent as zeros."""
    joined = block.new_zeros(axis.size * len(block))
    joined[axis.rank * len(block) :][: len(block)] = block
    reach = 1
    while reach < axis.size:
        partner = axis.rank ^ reach
        (theirs,) = exchange([(joined, partner)], [(torch.empty_like(joined), partner)], axis)
        joined, reach = joined + theirs, 2 * reach
    return joined


@fails(
    "result",
    "Only the own block is sent: in each round send all that you have so far.",
)
def wrong_sends_its_own_block_alone(block, axis):
    mine, reach = block, 1
    while reach < axis.size:
        partner = axis.rank ^ reach
        (theirs,) = exchange([(block, partner)], [(torch.empty_like(block), partner)], axis)
        mine = torch.cat([theirs, mine] if partner < axis.rank else [mine, theirs])
        reach *= 2
    return mine
