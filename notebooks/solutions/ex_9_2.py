"""Zigzag: deal out the tokens so that nobody waits.

A late chunk of queries looks at many chunks of keys, an early one at few. Whoever holds the r-th
from the front also holds the r-th from the back: then all ranks multiply equally many pairs, and
do so in each single step of the ring.
Source: ring-flash-attention, issue 2; Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from collections import Counter

import torch

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 20
GOOD = "every causal pair once, with the keys at hand, and equally many on all ranks in each step"
PRAISE = "Nearly twice as fast as the obvious order, and not one more byte is sent."
SIZES = (1,)


def given(size, random):
    """Numbers of ranks: two, and two more of them."""
    more = (torch.randperm(4, generator=random)[:2] + 3).sort().values.tolist()
    return [([2, *more],)] * size


def run(answer, axis, numbers):
    """For each number of ranks: what every rank holds, and what it multiplies in each step."""
    return [[answer(rank, size) for rank in range(size)] for size in numbers]


def _answers(case: Case) -> list[tuple[int, list, list]]:
    """(number of ranks, chunks of each rank, steps of each rank)."""
    found = []
    for size, rows in zip(case.given[0][0], case.results[0], strict=True):
        try:
            held = [tuple(map(int, chunks)) for chunks, _ in rows]
            steps = [[[(int(q), int(k)) for q, k in step] for step in made] for _, made in rows]
        except (TypeError, ValueError):
            raise CheckFailed(f"{size} ranks: expected (chunks, steps), got {rows[0]!r}") from None
        found.append((size, held, steps))
    return found


def check_order(case: Case) -> None:
    for size, held, _ in _answers(case):
        if sorted(c for chunks in held for c in chunks) != list(range(2 * size)) or any(
            len(chunks) != 2 for chunks in held
        ):
            raise CheckFailed(
                f"{size} ranks hold the chunks {held}; each of 0 to {2 * size - 1} belongs to one "
                "rank, two to each"
            )


def check_pairs(case: Case) -> None:
    for size, held, steps in _answers(case):
        for rank in range(size):
            if len(steps[rank]) != size:
                raise CheckFailed(f"{size} ranks: a ring of {size} steps, not {len(steps[rank])}")
            for step, pairs in enumerate(steps[rank]):
                source = (rank - step) % size
                for query, key in pairs:
                    if query not in held[rank] or key not in held[source]:
                        raise CheckFailed(
                            f"{size} ranks, rank {rank}, step {step}: queries of {held[rank]} meet "
                            f"keys of {held[source]}; ({query}, {key}) is no such pair"
                        )
        made = Counter(pair for made in steps for pairs in made for pair in pairs)
        wanted = Counter((q, k) for q in range(2 * size) for k in range(q + 1))
        if made != wanted:
            missing, needless = sorted(wanted - made), sorted(made - wanted)
            raise CheckFailed(
                f"{size} ranks: {len(missing)} pairs that look back are missing {missing[:3]}, and "
                f"{len(needless)} are of no use, or made twice {needless[:3]}"
            )


def check_balance(case: Case) -> None:
    for size, _, steps in _answers(case):
        for step in range(size):
            counts = [len(made[step]) for made in steps]
            if len(set(counts)) > 1:
                raise CheckFailed(
                    f"{size} ranks, step {step}: the ranks multiply {counts} pairs; all of them "
                    f"wait for the one with {max(counts)}"
                )


def solution(rank, size):
    def chunks_of(rank):
        return rank, 2 * size - 1 - rank

    steps = [
        [(q, k) for q in chunks_of(rank) for k in chunks_of((rank - step) % size) if k <= q]
        for step in range(size)
    ]
    return chunks_of(rank), steps


def _with(chunks_of, rank, size, direction=-1, looks=lambda q, k: k <= q):
    steps = [
        [
            (q, k)
            for q in chunks_of(rank)
            for k in chunks_of((rank + direction * step) % size)
            if looks(q, k)
        ]
        for step in range(size)
    ]
    return chunks_of(rank), steps


def _zigzag(size):
    return lambda rank: (rank, 2 * size - 1 - rank)


@fails(
    "order",
    "No rank holds anything.",
)
def wrong_holds_nothing(rank, size):
    return (), [[] for _ in range(size)]


@fails(
    "order",
    "One off at the back: the last chunk has the number 2 * size - 1.",
)
def wrong_forgets_the_middle(rank, size):
    """One off at the end: nobody holds the last chunk, and two ranks hold one in the middle."""
    return _with(lambda rank: (rank, 2 * size - 2 - rank), rank, size)


@fails(
    "balance",
    "This is the plain order: each rank holds two neighbouring chunks.",
)
def wrong_is_plain(rank, size):
    return _with(lambda rank: (2 * rank, 2 * rank + 1), rank, size)


@fails(
    "balance",
    "Chunks r and r + size: closer, but the last rank still has more.",
)
def wrong_deals_like_cards(rank, size):
    """Closer, and still the last rank has more than the first."""
    return _with(lambda rank: (rank, rank + size), rank, size)


@fails(
    "pairs",
    "Keys of the future are multiplied: only k <= q.",
)
def wrong_multiplies_the_future(rank, size):
    return _with(_zigzag(size), rank, size, looks=lambda q, k: True)


@fails(
    "pairs",
    "The diagonal is missing: a chunk looks at itself, too.",
)
def wrong_leaves_out_the_diagonal(rank, size):
    return _with(_zigzag(size), rank, size, looks=lambda q, k: k < q)


@fails(
    "pairs",
    "The keys at hand are those of rank - step.",
)
def wrong_looks_the_other_way(rank, size):
    """With the keys of rank + step, which are not at hand."""
    return _with(_zigzag(size), rank, size, direction=+1)
