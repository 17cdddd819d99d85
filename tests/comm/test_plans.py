"""Plans on paper: every rank's rounds are played in one process, for any number of ranks."""

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import pytest

from minipar.comm import plans
from minipar.comm.plans import Message, Plan, Round
from tests.comm.same import algorithms_for

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16]
NUMELS = [0, 1, 7, 16, 61]


def play(every: Sequence[Plan], buffers: Sequence[Sequence]) -> list[list]:
    """Run the plans of all ranks; messages between two ranks arrive in the order they were sent.

    Ranks advance as far as they can one after the other, so that nothing agrees by being in step.
    Fails where a rank waits for a message that nobody sends, or sends one that nobody waits for.
    """
    data = [list(buffer) for buffer in buffers]
    wires: dict[tuple[int, int], deque] = defaultdict(deque)
    at, posted = [0] * len(every), [-1] * len(every)

    def advance(rank: int) -> bool:
        step = every[rank][at[rank]]
        if posted[rank] < at[rank]:
            posted[rank] = at[rank]
            for m in step.sends:
                wires[rank, m.peer].append(data[rank][m.lo : m.hi])
        expected = Counter(m.peer for m in step.recvs)
        if any(len(wires[peer, rank]) < count for peer, count in expected.items()):
            return False
        for m in step.recvs:
            arrived, here = wires[m.peer, rank].popleft(), data[rank][m.lo : m.hi]
            assert len(arrived) == len(here), f"rank {rank} expects {m}, gets {len(arrived)}"
            added = [a + b for a, b in zip(here, arrived, strict=True)] if m.add else arrived
            data[rank][m.lo : m.hi] = added
        at[rank] += 1
        return True

    moving = True
    while moving:
        moving = False
        for rank, plan in enumerate(every):
            while at[rank] < len(plan) and advance(rank):
                moving = True
    assert at == [len(plan) for plan in every], f"ranks are stuck in rounds {at}"
    assert not any(wires.values()), "messages are left over"
    return data


def numbers(size: int, numel: int) -> list[list[int]]:
    generator = random.Random(100 * size + numel)
    return [[generator.randrange(1, 10**6) for _ in range(numel)] for _ in range(size)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", plans.ALL_REDUCE)
def test_every_all_reduce_for_any_number_of_ranks(name):
    """Catches: a tree of the wrong depth, uneven parts, chunk orders.

    Numbers are whole and random: a part added twice, or not at all, cannot come out right.
    """
    for size in (size for size in SIZES if name in algorithms_for(size)):
        for numel in NUMELS:
            for chunk in {} if name != "double_tree" else {"chunk": 3}, {}:
                every = [plans.ALL_REDUCE[name](numel, r, size, **chunk) for r in range(size)]
                xs = numbers(size, numel)
                total = [sum(column) for column in zip(*xs, strict=True)]
                assert play(every, xs) == [total] * size, (size, numel, chunk)


def test_two_trees():
    """Sanders et al.: two children at most, logarithmic depth, and nobody inner in both trees."""
    for size in range(1, 40):
        at = {place: (parent, depth) for place, parent, depth in plans.tree(range(size))}
        above, depths = zip(*(at[place] for place in range(size)), strict=True)
        assert all(d == (0 if p is None else depths[p] + 1) for p, d in at.values())
        assert above.count(None) == 1 and max(depths) == int(math.log2(size))
        assert max(Counter(above).values()) <= 2
        assert not any(p in above and (p + 1) % size in above for p in range(size))


# ---------------------------------------------------------------------- what they cost
def count(plan: Plan, rank: int) -> tuple[int, int, int]:
    """Rounds, messages and elements that this rank sends."""
    sent = [m for step in plan for m in step.sends if m.peer != rank]
    rounds = sum(bool(step.sends or step.recvs) for step in plan)
    return rounds, len(sent), sum(m.hi - m.lo for m in sent)


@pytest.mark.parametrize("size", range(2, 18))
def test_rounds_messages_and_bytes_are_those_of_the_table(size):
    """Formulas by hand, from `algorithms.py`. Catches: an all-gather that sends whole buffers."""
    n, s = size, 2**4 * math.lcm(*range(2, 18))  # so that all parts are even
    once = s * (n - 1) // n

    def counts(name: str, **chunk: int) -> list[tuple[int, int, int]]:
        return [count(plans.ALL_REDUCE[name](s, rank, n, **chunk), rank) for rank in range(n)]

    assert counts("ring") == [(2 * (n - 1), 2 * (n - 1), 2 * once)] * n
    assert counts("bidirectional") == [(2 * (n - 1), 4 * (n - 1), 2 * once)] * n
    assert counts("direct") == [(1, n - 1, s * (n - 1))] * n
    if "halving_doubling" in algorithms_for(n):
        lg = int(math.log2(n))
        assert counts("halving_doubling") == [(2 * lg, 2 * lg, 2 * once)] * n
    else:
        with pytest.raises(ValueError, match=f"2, 4, 8 ... ranks, not {n}; use ring"):
            counts("halving_doubling")
    for g in 1, 4:
        trees = counts("double_tree", chunk=s // 2 // g)
        assert max(rounds for rounds, _, _ in trees) <= 2 * int(math.log2(n)) + g - 1
        assert max(messages for _, messages, _ in trees) <= 4 * g
        assert sum(messages for _, messages, _ in trees) == 4 * (n - 1) * g
        assert max(sent for *_, sent in trees) <= 2 * s
        assert sum(sent for *_, sent in trees) == 2 * (n - 1) * s


def test_seconds_by_hand():
    """A message to oneself costs nothing, nor does a rest. The busiest rank may be a receiver."""
    step = Round((Message(0, 0, 9), Message(1, 0, 4)), (Message(0, 0, 9), Message(1, 0, 4)))
    assert plans.seconds([[step], [step]], 2, 0.0, 1.0) == 2 * 9
    assert plans.seconds([[step, Round()]], 2, 100.0, 1.0) == 100 + 2 * 4
    to_two = [Round((Message(2, 0, 5),))]
    both = [Round((), (Message(0, 0, 5), Message(1, 0, 5)))]
    assert plans.seconds([to_two, to_two, both], 1, 0.0, 1.0) == 10
    assert plans.seconds([to_two, to_two, both], 1, 0.0, 1.0, sharing=0) == 5
