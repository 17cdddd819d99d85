"""The best cut is the best of all cuts, and predictions follow the rule that is stated."""

import itertools
import random

import pytest

from minipar.parallel.bucket_sizes import FINEST, MOST_BUCKETS, Costs, best_cut


def last_end(cut, ready, num_bytes, costs):
    """By the formula of the module, bucket by bucket."""
    end, bounds = 0.0, [0, *itertools.accumulate(cut)]
    for calls, (a, b) in enumerate(itertools.pairwise(bounds)):
        free = max(ready[b - 1] + calls * costs.call, end)
        end = free + costs.latency + sum(num_bytes[a:b]) * costs.per_byte
    return max(end, ready[-1] + len(cut) * costs.call)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_ends_earlier(seed):
    """Mutants: calls that cost nothing; buckets that do not wait for one another."""
    chance = random.Random(seed)
    n = chance.randint(1, 8)
    ready = sorted(chance.random() for _ in range(n))
    num_bytes = [chance.randint(50, 100) for _ in range(n)]
    costs = Costs(chance.random() / 3, chance.random() / 300, chance.random() / 20)
    cuts = [
        [len(list(group)) for _, group in itertools.groupby(itertools.accumulate(starts))]
        for starts in itertools.product([1], *[[0, 1]] * (n - 1))
    ]
    assert len(cuts) == 2 ** (n - 1)
    cut = best_cut(ready, num_bytes, costs)
    assert sum(cut) == n
    best = min(last_end(cut, ready, num_bytes, costs) for cut in cuts)
    assert last_end(cut, ready, num_bytes, costs) == pytest.approx(best, rel=1e-12)


def test_of_many_gradients_neighbours_stay_together():
    ready, num_bytes = [i / 1e4 for i in range(2000)], [8] * 2000
    cut = best_cut(ready, num_bytes, Costs(1e-9, 1e-5))
    assert sum(cut) == 2000 and 1 < len(cut) <= MOST_BUCKETS
    assert min(cut[:-1]) >= 2000 // FINEST
