"""All-reduce as plans: who sends which part to whom, round by round. Pure data, no processes.

Idea: a plan is the list of rounds of one rank. A round is what this rank sends and receives at the
same time. ``ring(numel, rank, size)`` can be printed, checked and timed on paper before a process
starts. `minipar.comm.algorithms` runs any plan.

Two rules make all of the algorithms from three ways to *spread* data:

*Duality.* A reduce-scatter is an all-gather run backwards, and a reduction to a root is a broadcast
run backwards: reverse the rounds, let receivers send, and add received elements (`dual`).
*Composition.* All-reduce = reduce-scatter, then all-gather: ``+`` joins the two lists of rounds.
Plans that use different links run at the same time (`together`).

    spread          rounds              its dual            both: an all-reduce
    ring            n - 1               ring                Patarasuk & Yuan 2009
    doubling        log2 n, n = 2^k     halving             Rabenseifner 2004
    tree            depth + chunks - 1  reduction tree      Sanders, Speck & Traeff 2009

Shapes: all plans work on a flat buffer; n ranks; a span ``(lo, hi)`` is elements lo .. hi-1 of it;
`parts[r]` is the span of rank r. An empty message is never sent: both ends know that it is empty.
Source: Chan, Heimlich, Purkayastha & van de Geijn 2007, "Collective communication: theory,
practice, and experience", sections 3 (duality) and 4 (composition).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

Span = tuple[int, int]

CHUNK = 1 << 20  # elements per message in trees: one chunk goes down while the next goes up


@dataclass(frozen=True, slots=True)
class Message:
    """Elements lo .. hi-1 to or from `peer`; if `add`, the receiver adds them to its own."""

    peer: int
    lo: int
    hi: int
    add: bool = False

    def __str__(self) -> str:
        return f"[{self.lo}:{self.hi}] {'+' if self.add else ''}{self.peer}"


@dataclass(frozen=True, slots=True)
class Round:
    """The messages that one rank sends and receives at the same time.

    The rank sends its elements as they were before the round.
    """

    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()

    def __str__(self) -> str:
        sends = (f"send {message}" for message in self.sends)
        recvs = (f"recv {message}" for message in self.recvs)
        return ", ".join([*sends, *recvs]) or "rest"


Plan = list[Round]


# ---------------------------------------------------------------------- spans
def cut(span: Span, pieces: int) -> list[Span]:
    """Cut into `pieces` spans in order, as even as possible: 10 into 4 spans of 3, 3, 2 and 2."""
    lo, (size, longer) = span[0], divmod(span[1] - span[0], pieces)
    bounds = [lo + i * size + min(i, longer) for i in range(pieces + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def _round(sends: Sequence[tuple[int, Span]], recvs: Sequence[tuple[int, Span]]) -> Round:
    return Round(
        tuple(Message(peer, lo, hi) for peer, (lo, hi) in sends if lo < hi),
        tuple(Message(peer, lo, hi) for peer, (lo, hi) in recvs if lo < hi),
    )


# ---------------------------------------------------------------------- making plans of plans
def dual(plan: Plan) -> Plan:
    """Reverse `plan`, and let receivers add: all-gather <-> reduce-scatter."""
    return [
        Round(step.recvs, tuple(replace(message, add=True) for message in step.sends))
        for step in reversed(plan)
    ]


def together(*plans: Plan) -> Plan:
    """Merge plans that run at the same time, round by round, and write to different elements."""
    return [
        Round(sum((step.sends for step in steps), ()), sum((step.recvs for step in steps), ()))
        for steps in zip_longest(*plans, fillvalue=Round())
    ]


# ---------------------------------------------------------------------- spreading: all-gather
def ring_gather(parts: Sequence[Span], rank: int, size: int, step: int = 1) -> Plan:
    """Send the part from the left on to the right: n-1 rounds. ``step=-1`` reverses the ring."""
    left, right = (rank - step) % size, (rank + step) % size
    at = [(rank - k * step) % size for k in range(size)]  # the parts in the order of their arrival
    return [_round([(right, parts[at[k]])], [(left, parts[at[k + 1]])]) for k in range(size - 1)]


def doubling_gather(parts: Sequence[Span], rank: int, size: int) -> Plan:
    """Swap all parts with the rank 1, 2, 4 ... places away: log2 n rounds, n a power of two."""
    if size.bit_count() != 1:
        raise ValueError(f"halving and doubling need 2, 4, 8 ... ranks, not {size}; use ring")
    plan, have = [], 1
    while have < size:
        mine, theirs = rank // have * have, (rank ^ have) // have * have
        sent, received = ((parts[i][0], parts[i + have - 1][1]) for i in (mine, theirs))
        plan.append(_round([(rank ^ have, sent)], [(rank ^ have, received)]))
        have *= 2
    return plan


# ---------------------------------------------------------------------- trees
def tree(places: range, parent: int | None = None, depth: int = 0) -> Iterator[tuple]:
    """Yield (place, parent, depth) of a binary tree in-order over `places`, the root first.

    The root is place 2^k - 1, with the largest k: all even places are leaves. If a second tree is
    shifted by one place, each rank has children in at most one of the two. Source: Sanders, Speck
    & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
    """
    if places:
        root = places[(1 << (len(places).bit_length() - 1)) - 1]
        yield root, parent, depth
        yield from tree(range(places.start, root), root, depth + 1)
        yield from tree(range(root + 1, places.stop), root, depth + 1)


def tree_broadcast(chunks: Sequence[Span], rank: int, size: int, shift: int = 0) -> Plan:
    """Pass each chunk on to the children, one round after it came from the parent.

    Rank r is at place (r + `shift`) mod n. All ranks have plans of equal length, depth + chunks - 1
    rounds. In some of these rounds a rank rests.
    """
    nodes, here = list(tree(range(size))), (rank + shift) % size
    [(parent, depth)] = [(parent, depth) for place, parent, depth in nodes if place == here]
    children = [(place - shift) % size for place, above, _ in nodes if above == here]
    sends: dict[int, list] = defaultdict(list)
    recvs: dict[int, list] = defaultdict(list)
    for number, span in enumerate(chunks):
        if parent is not None:
            recvs[number + depth - 1].append(((parent - shift) % size, span))
        sends[number + depth] += [(child, span) for child in children]
    deepest = max(depth for *_, depth in nodes)
    return [_round(sends[t], recvs[t]) for t in range(deepest + len(chunks) - 1)]


def tree_all_reduce(chunks: Sequence[Span], rank: int, size: int, shift: int = 0) -> Plan:
    """Reduce to the root, then broadcast: the first chunk goes down while the others go up."""
    up = dual(tree_broadcast(chunks[::-1], rank, size, shift))
    down = tree_broadcast(chunks, rank, size, shift)
    rests = len(up) - len(chunks) + 1  # until the first chunk is at the root
    return together(up, [Round()] * rests + down)


# ---------------------------------------------------------------------- all-reduce
def ring(numel: int, rank: int, size: int) -> Plan:
    """Reduce-scatter round the ring, then all-gather: 2(n-1) rounds, the fewest bytes."""
    spread = ring_gather(cut((0, numel), size), rank, size)
    return dual(spread) + spread


def bidirectional(numel: int, rank: int, size: int) -> Plan:
    """Run two rings in opposite directions, with half of the data each.

    Two rings are faster than one where each neighbour has its own link. On one shared port they
    cost as much as one.
    """
    halves = [cut(part, 2) for part in cut((0, numel), size)]
    spread = together(
        ring_gather([first for first, _ in halves], rank, size),
        ring_gather([second for _, second in halves], rank, size, step=-1),
    )
    return dual(spread) + spread


def halving_doubling(numel: int, rank: int, size: int) -> Plan:
    """Halve recursively, then double: 2 log2 n rounds, the ring's bytes. n is a power of two.

    Source: Rabenseifner 2004, "Optimization of collective reduction operations", section 4.
    """
    spread = doubling_gather(cut((0, numel), size), rank, size)
    return dual(spread) + spread


def double_tree(numel: int, rank: int, size: int, chunk: int = CHUNK) -> Plan:
    """Reduce and broadcast in two trees with half of the data each: 2 depth + g - 1 rounds.

    In a single tree the leaves, half of all ranks, send only half of the time. Here, a leaf of one
    tree has children in the other. g is the number of chunks per tree.
    """
    first, second = cut((0, numel), 2)
    chunks = max(1, -(-first[1] // chunk))
    return together(
        tree_all_reduce(cut(first, chunks), rank, size),
        tree_all_reduce(cut(second, chunks), rank, size, shift=1),
    )


def direct(numel: int, rank: int, size: int) -> Plan:
    """Send everything to all other ranks: one round, n-1 times the bytes.

    Each rank adds in the order of the ranks, itself included, so that all get the same bits.
    """
    whole = (0, numel)
    everyone = [(peer, whole) for peer in range(size)]
    step = _round(everyone, everyone)
    recvs = tuple(Message(m.peer, m.lo, m.hi, add=m.peer > 0) for m in step.recvs)
    return [Round(step.sends, recvs)]


_REDUCES = ring, bidirectional, double_tree, halving_doubling, direct
ALL_REDUCE: dict[str, Callable[..., Plan]] = {make.__name__: make for make in _REDUCES}


# ---------------------------------------------------------------------- what they cost
def seconds(
    plans: Sequence[Plan], itemsize: int, alpha: float, beta: float, sharing: float = 1.0
) -> float:
    """Return the seconds that the `plans` of all ranks take, one round after the other.

    A round takes ``alpha`` seconds, and ``beta`` per byte that the busiest rank sends or receives.
    `sharing` says how a rank's messages to different peers share its port. At 1 they queue (one
    network card). At 0 each peer has its own link, and the longest message counts (the emulated
    link; nearly NVSwitch). Where chunks overlap, the result is an upper bound.
    """
    total = 0.0
    for steps in zip_longest(*plans, fillvalue=Round()):
        if any(step.sends for step in steps):
            loads = (
                _load(rank, messages, sharing)
                for rank, step in enumerate(steps)
                for messages in (step.sends, step.recvs)
            )
            total += alpha + beta * itemsize * max(loads)
    return total


def _load(rank: int, messages: Sequence[Message], sharing: float) -> float:
    """Return the elements that pass the port of `rank` one after the other, given `sharing`."""
    by_peer = Counter[int]()
    for message in messages:
        by_peer[message.peer] += message.hi - message.lo
    del by_peer[rank]  # a message to oneself passes no port
    return max(0, *by_peer.values(), sharing * by_peer.total())
