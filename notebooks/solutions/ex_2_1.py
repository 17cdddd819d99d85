"""Ring all-reduce from send and recv.

The tensor is cut into n pieces. For n-1 rounds every rank passes a piece to its right and adds
what comes from its left: then each rank holds one piece summed over all. For n-1 more rounds the
sums are passed on. Every rank sends 2(n-1) messages of 1/n of the tensor, whatever n is: that is
what makes the ring the algorithm of choice for large tensors.
Source: Patarasuk & Yuan 2009, section 3.
"""

import torch
import torch.distributed as dist

from minipar.comm.collectives import exchange
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 30
GOOD = "every rank sends 2(n-1) messages of 1/n of the tensor, all of them to its right"
PRAISE = (
    "This is how large tensors travel: each rank sends less than two of them, "
    "however many ranks there are."
)
SIZES = (4, 3)

LENGTH = 24  # divisible by every size


def given(size, random):
    return [(torch.randn(LENGTH, generator=random, dtype=torch.float64),) for _ in range(size)]


def check_result(case: Case) -> None:
    total = sum(tensor for (tensor,) in case.given)
    case.expect_close([total] * case.size, "the sum")


def check_verbs(case: Case) -> None:
    verbs = {one.verb for sent in case.sent for one in sent} - {"send"}
    if verbs:
        raise CheckFailed(f"built from send and recv alone, please: no {', '.join(sorted(verbs))}")


def check_messages(case: Case) -> None:
    piece = LENGTH // case.size * 8
    for rank in range(case.size):
        right = (rank + 1) % case.size
        case.expect_sent(rank, [Sent("send", piece, right)] * (2 * (case.size - 1)))


def solution(tensor, axis):
    blocks = list(tensor.chunk(axis.size))
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for step in range(2 * (axis.size - 1)):
        out, into = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        buffer = torch.empty_like(blocks[into])
        (arrived,) = exchange([(blocks[out], right)], [(buffer, left)], axis)
        # The first half adds up, the second passes finished sums on.
        blocks[into] = blocks[into] + arrived if step < axis.size - 1 else arrived
    return torch.cat(blocks)


@fails(
    "result",
    "Each rank multiplied its own numbers: nothing was sent.",
)
def wrong_sends_nothing(tensor, axis):
    return tensor * axis.size


@fails(
    "result",
    "Each rank has one finished block: in the second half these are passed around.",
)
def wrong_stops_half_way(tensor, axis):
    pieces = list(tensor.clone().chunk(axis.size))
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for step in range(axis.size - 1):
        out, into = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        arriving = torch.empty_like(pieces[into])
        sending = dist.isend(pieces[out], group=axis.group, group_dst=right)
        dist.recv(arriving, group=axis.group, group_src=left)
        sending.wait()
        pieces[into] = pieces[into] + arriving
    return torch.cat(pieces)


@fails(
    "verbs",
    "The library's all-reduce has done it: use exchange alone.",
)
def wrong_asks_the_library(tensor, axis):
    result = tensor.clone()
    dist.all_reduce(result, group=axis.group)
    return result


@fails(
    "messages",
    "Whole tensors travel: cut into n blocks, and pass one block per round.",
)
def wrong_passes_whole_tensors(tensor, axis):
    total, passing = tensor.clone(), tensor
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for _ in range(axis.size - 1):
        arriving = torch.empty_like(passing)
        sending = dist.isend(passing, group=axis.group, group_dst=right)
        dist.recv(arriving, group=axis.group, group_src=left)
        sending.wait()
        total, passing = total + arriving, arriving
    return total


@fails(
    "messages",
    "The bytes are right, but every rank talks to all: send to the right neighbour only.",
)
def wrong_is_no_ring(tensor, axis):
    """As many bytes as the ring, but every rank talks to every other."""
    pieces = list(tensor.clone().chunk(axis.size))
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    mine = pieces[axis.rank].clone()
    works = [dist.isend(pieces[other], group=axis.group, group_dst=other) for other in others]
    for other in others:
        arriving = torch.empty_like(mine)
        dist.recv(arriving, group=axis.group, group_src=other)
        mine += arriving
    works += [dist.isend(mine, group=axis.group, group_dst=other) for other in others]
    pieces[axis.rank] = mine
    for other in others:
        pieces[other] = torch.empty_like(mine)
        dist.recv(pieces[other], group=axis.group, group_src=other)
    for work in works:
        work.wait()
    return torch.cat(pieces)


def _two_halves(tensor, axis, first, adds):
    """The loop of `ring_round`, then a second one that sends block rank - first - step."""
    blocks = list(tensor.chunk(axis.size))
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for offset, add in ((1, True), (first, adds)):
        for step in range(axis.size - 1):
            out = (axis.rank - offset - step) % axis.size
            into = (out - 1) % axis.size
            buffer = torch.empty_like(blocks[into])
            (arrived,) = exchange([(blocks[out], right)], [(buffer, left)], axis)
            blocks[into] = blocks[into] + arrived if add else arrived
    return torch.cat(blocks)


@fails(
    "result",
    "The second half still adds: a finished sum replaces the block that was there.",
)
def wrong_adds_in_the_second_half(tensor, axis):
    return _two_halves(tensor, axis, 0, True)


@fails(
    "result",
    "The second half begins with a wrong block: send the one that you have finished, block r.",
)
def wrong_passes_on_what_is_not_finished(tensor, axis):
    return _two_halves(tensor, axis, 1, False)
