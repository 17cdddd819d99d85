"""The rank that hangs a job: did not come, or is behind; everybody else is a victim.

The inputs are what each rank remembers of its last calls, as PyTorch's flight recorder does. The
truth is known from the way in which each case is made, and not from the rule.
Source: torch.distributed's flight recorder; the rule is the one of `minipar/observe/hang.py`.
"""

import random as dice

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 20
GOOD = "who did not come and who is behind are named, in each case, and nobody else"
PRAISE = "You have written the heart of `minipar hang`."
SIZES = (1,)
MISSING, BEHIND = "did not come", "is behind"


def given(size, random):
    """Cases (memories, truth): what each rank remembers, and {rank: what it did}."""
    lots = dice.Random(int(random.initial_seed()))
    kinds = [_all_ended, _all_wait, _some_missing, _some_behind, _both] * 8
    return [([kind(lots) for kind in kinds],)] * size


def _remembered(last: int, num_open: int, keep: int) -> list[tuple[int, str, bool]]:
    """Return the last `keep` calls of a rank, up to `last`; the last `num_open` have not ended."""
    verbs = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    calls = range(max(0, last - keep + 1), last + 1)
    return [(n, verbs[n % 4], n <= last - num_open) for n in calls]


def _some(lots, size: int) -> set[int]:
    """Return some ranks, but not all."""
    return set(lots.sample(range(size), lots.randint(1, max(1, size // 2))))


def _case(lots, culprit, size=None):
    """Return a case: ranks wait in call k, and `culprit(rank, k)` is what a rank does instead."""
    size, k = size or lots.randint(2, 8), lots.randint(12, 60)
    memories, truth = [], {}
    for rank in range(size):
        word, last, num_open = culprit(rank, k, size) or (None, k, 1)
        if word is None and num_open == 1 and lots.random() < 0.4:
            last, num_open = last + 1, 2  # the next call was launched already, asynchronously
        if word:
            truth[rank] = word
        memories.append(_remembered(last, num_open, lots.randint(6, 10)))
    return memories, truth


def _all_ended(lots):
    return _case(lots, lambda rank, k, size: (None, k, 0))


def _all_wait(lots):
    return _case(lots, lambda rank, k, size: None)


def _some_missing(lots):
    size = lots.randint(2, 8)
    who = _some(lots, size)
    return _case(lots, lambda rank, k, _: (MISSING, k - 1, 0) if rank in who else None, size)


def _some_behind(lots):
    size = lots.randint(2, 8)
    who, ahead = _some(lots, size), lots.randint(0, 1)
    # A rank that is behind may have launched as many calls as the others.
    return _case(
        lots, lambda rank, k, _: (BEHIND, k - 1 + ahead, 1 + ahead) if rank in who else None, size
    )


def _both(lots):
    size = lots.randint(3, 8)
    behind, missing = lots.sample(range(size), 2)
    does = {behind: (BEHIND, -1, 1), missing: (MISSING, -1, 0)}

    def culprit(rank, k, _):
        return (does[rank][0], k - 1, does[rank][2]) if rank in does else None

    return _case(lots, culprit, size)


def run(answer, axis, cases):
    """Return what the answer says of each case."""
    return [answer([list(one) for one in memories]) for memories, _ in cases]


def _answers(case: Case):
    for (memories, truth), found in zip(case.given[0][0], case.results[0], strict=True):
        if not isinstance(found, dict):
            raise CheckFailed(f"a dict of ranks and words; got {found!r}")
        yield memories, truth, found


def _shown(memories) -> str:
    """Tell in a line where each rank is."""
    told = []
    for rank, calls in enumerate(memories):
        still = ", ".join(f"#{n}" for n, _, ended in calls if not ended)
        told.append(f"rank {rank} " + (f"waits in {still}" if still else f"ended #{calls[-1][0]}"))
    return "; ".join(told)


def check_quiet(case: Case) -> None:
    for memories, truth, found in _answers(case):
        if not truth and found:
            raise CheckFailed(f"nobody is missing or behind in: {_shown(memories)}; got {found}")


def check_victims(case: Case) -> None:
    for memories, truth, found in _answers(case):
        if accused := sorted(set(found) - set(truth)):
            raise CheckFailed(f"rank {accused[0]} is a victim in: {_shown(memories)}; got {found}")


def check_missing(case: Case) -> None:
    _named(case, MISSING)


def check_behind(case: Case) -> None:
    _named(case, BEHIND)


def _named(case: Case, word: str) -> None:
    for memories, truth, found in _answers(case):
        for rank, is_so in truth.items():
            if is_so == word and found.get(rank) != word:
                raise CheckFailed(f"rank {rank} {word} in: {_shown(memories)}; got {found}")


def solution(memories):
    still = [min((n for n, _, ended in calls if not ended), default=None) for calls in memories]
    last = [calls[-1][0] for calls in memories]
    ended = [n - 1 if n is not None else end for n, end in zip(still, last, strict=True)]
    waited = [n for n in still if n is not None]
    found = {}
    for rank, n in enumerate(still):
        if n is not None and n <= max(ended):
            found[rank] = "is behind"
        elif n is None and waited and last[rank] < max(waited):
            found[rank] = "did not come"
    return found


@fails("quiet", "Who waits is a victim. Look for the rank that the others wait for.")
def wrong_names_who_waits(memories):
    return {
        rank: "is behind" for rank, calls in enumerate(memories) if not all(c[2] for c in calls)
    }


@fails("quiet", "A rank with a call fewer may wait like the others: look at calls that are open.")
def wrong_takes_the_fewest_calls(memories):
    last = [calls[-1][0] for calls in memories]
    return {r: "did not come" for r, n in enumerate(last) if n == min(last) < max(last)}


@fails("quiet", "A rank with a call fewer may wait like the others: look at calls that are open.")
def wrong_compares_launched_calls(memories):
    last = [calls[-1][0] for calls in memories]
    waits = [not calls[-1][2] for calls in memories]
    return {
        rank: "is behind" if waits[rank] else "did not come"
        for rank, n in enumerate(last)
        if n < max(last)
    }


@fails("victims", "Ranks that wait in the oldest open call may be victims: has another ended it?")
def wrong_blames_the_oldest_open_call(memories):
    still = [min((n for n, _, ended in calls if not ended), default=None) for calls in memories]
    oldest = min((n for n in still if n is not None), default=None)
    found = solution(memories)
    return {r: found.get(r, "is behind") for r, n in enumerate(still) if found and n == oldest}


@fails("behind", "A rank that is still in a call that others have ended is behind.")
def wrong_knows_only_missing_ranks(memories):
    return {r: word for r, word in solution(memories).items() if word == "did not come"}


@fails("quiet", "A rank may have launched more calls: its oldest open call counts, not its last.")
def wrong_looks_at_the_last_call(memories):
    still = [max((n for n, _, ended in calls if not ended), default=None) for calls in memories]
    ended = [calls[-1][0] if n is None else n - 1 for n, calls in zip(still, memories, strict=True)]
    return {r: "is behind" for r, n in enumerate(still) if n is not None and n <= max(ended)}


@fails("missing", "A rank without an open call, where others have one, did not come.")
def wrong_knows_only_ranks_behind(memories):
    return {r: word for r, word in solution(memories).items() if word == "is behind"}
