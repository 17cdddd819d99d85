"""Broadcast as a binary tree from send and recv.

In every round whoever has the tensor sends it to one rank that has not: one rank has it, then two,
four, eight. After ceil(log2 n) rounds all have it, and each but the source got it exactly once.
Source: Chan, Heimlich, Purkayastha & van de Geijn 2007, section 4 (minimum spanning tree).
"""

import math

import torch

from minipar.comm.collectives import broadcast, recv, send
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "n-1 messages in all, each a whole tensor, in ceil(log2 n) rounds, from any source"
PRAISE = "A thousand ranks are ten rounds away: small tensors travel along trees."
SIZES = (4, 3)

LENGTH = 6


def given(size, random):
    src = 1 + int(torch.randint(size - 1, (), generator=random))  # rank 0 as the source is easy
    tensors = torch.randn(size, LENGTH, generator=random, dtype=torch.float64)
    return [(tensor, src) for tensor in tensors]


def check_result(case: Case) -> None:
    _, src = case.given[0]
    case.expect_close([case.given[src][0]] * case.size, "the tensor")


def check_verbs(case: Case) -> None:
    verbs = {one.verb for sent in case.sent for one in sent} - {"send"}
    if verbs:
        raise CheckFailed(f"built from send and recv alone, please: no {', '.join(sorted(verbs))}")


def check_messages(case: Case) -> None:
    messages = [one for sent in case.sent for one in sent]
    if len(messages) != case.size - 1:
        raise CheckFailed(f"{len(messages)} messages in all; {case.size - 1} are enough")
    num_bytes = sum(one.num_bytes for one in messages)
    if num_bytes != (case.size - 1) * LENGTH * 8:
        raise CheckFailed(f"{num_bytes} bytes in all; expected {(case.size - 1) * LENGTH * 8}")


def check_rounds(case: Case) -> None:
    _, src = case.given[0]
    took, needed = _rounds(src, case), math.ceil(math.log2(case.size))
    if took > needed:
        raise CheckFailed(
            f"the last rank has the tensor after {took} rounds, and {needed} are enough: "
            "let every rank that has it already send, the longest branch first"
        )


def _rounds(rank: int, case: Case) -> int:
    """Rounds until all below `rank` have the tensor."""
    below = [_rounds(one.peer, case) for one in case.sent[rank]]  # in the order of sending
    return max((number + rounds for number, rounds in enumerate(below, start=1)), default=0)


def solution(tensor, src, axis):
    result, place = tensor.clone(), (axis.rank - src) % axis.size  # the source is at place 0
    have = 1  # places 0 to have-1 have the tensor
    while have < axis.size:
        if place < have and place + have < axis.size:
            send(result, axis, (axis.rank + have) % axis.size)
        elif have <= place < 2 * have:
            recv(result, axis, (axis.rank - have) % axis.size)
        have *= 2
    return result


@fails(
    "result",
    "Each rank kept its own tensor.",
)
def wrong_sends_nothing(tensor, src, axis):
    return tensor


@fails(
    "result",
    "The tensor is that of another rank than src.",
)
def wrong_takes_another_source(tensor, src, axis):
    return solution(tensor, (src + 1) % axis.size, axis)


@fails(
    "result",
    "The tensor is that of rank 0, whatever src is: count places from src on.",
)
def wrong_roots_every_tree_at_rank_0(tensor, src, axis):
    return solution(tensor, 0, axis)


@fails(
    "verbs",
    "The library's broadcast has done it: use send and recv.",
)
def wrong_asks_the_library(tensor, src, axis):
    return broadcast(tensor, axis, src)


@fails(
    "messages",
    "More than n - 1 messages: some rank gets what it has already.",
)
def wrong_sends_to_those_who_have_it(tensor, src, axis):
    """The tree, and then everybody thanks the source by sending it back."""
    result = solution(tensor, src, axis)
    if axis.rank != src:
        send(result, axis, src)
        return result
    for rank in range(axis.size):
        if rank != src:
            recv(torch.empty_like(result), axis, rank)
    return result


@fails(
    "rounds",
    "The source sends to all others itself: a rank that has received must send, too.",
)
def wrong_source_does_it_all(tensor, src, axis):
    result = tensor.clone()
    if axis.rank != src:
        return recv(result, axis, src)
    for rank in range(axis.size):
        if rank != src:
            send(result, axis, rank)
    return result


@fails(
    "rounds",
    "It goes along a chain: in each round, all that have it should send.",
)
def wrong_passes_it_along_a_chain(tensor, src, axis):
    result, place = tensor.clone(), (axis.rank - src) % axis.size
    if place > 0:
        recv(result, axis, (axis.rank - 1) % axis.size)
    if place < axis.size - 1:
        send(result, axis, (axis.rank + 1) % axis.size)
    return result


@fails(
    "rounds",
    "The longest branch must be served first.",
)
def wrong_serves_the_longest_branch_last(tensor, src, axis):
    """The right tree, but every rank sends first to the one that has nobody to send to."""
    result, place = tensor.clone(), (axis.rank - src) % axis.size
    if place > 0:
        recv(result, axis, (axis.rank - 2 ** (place.bit_length() - 1)) % axis.size)
    for reach in reversed([2**k for k in range(axis.size.bit_length())]):
        if place < reach < axis.size - place:
            send(result, axis, (axis.rank + reach) % axis.size)
    return result


@fails(
    "result",
    "What arrived was not kept: recv(buffer, ...) fills the buffer, and returns it.",
)
def wrong_keeps_nothing(tensor, src, axis):
    place, have = (axis.rank - src) % axis.size, 1
    while have < axis.size:
        if place < have and place + have < axis.size:
            send(tensor, axis, (axis.rank + have) % axis.size)
        elif have <= place < 2 * have:
            recv(torch.empty_like(tensor), axis, (axis.rank - have) % axis.size)
        have *= 2
    return tensor
