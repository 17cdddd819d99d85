"""The best cut is the best of all cuts, and predictions follow the rule that is stated."""

import itertools
import random

import pytest

from minipar.parallel.bucket_sizes import FINEST, MOST_BUCKETS, Costs, best_cut


def end(cut, ready, num_bytes, costs):
    bounds = [0, *itertools.accumulate(cut)]
    sizes = [sum(num_bytes[a:b]) for a, b in itertools.pairwise(bounds)]
    return costs.end([ready[b - 1] for b in bounds[1:]], sizes)


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
    best = min(end(cut, ready, num_bytes, costs) for cut in cuts)
    assert end(cut, ready, num_bytes, costs) == pytest.approx(best, rel=1e-12)


def test_of_many_gradients_neighbours_stay_together():
    ready, num_bytes = [i / 1e4 for i in range(2000)], [8] * 2000
    cut = best_cut(ready, num_bytes, Costs(1e-9, 1e-5, 0.0))
    assert sum(cut) == 2000 and 1 < len(cut) <= MOST_BUCKETS
    assert min(cut[:-1]) >= 2000 // FINEST


def test_buckets_leave_one_after_the_other():
    """By hand: ready at 1, 2, 3; each takes 1 + 2; calls cost 0.5, and may take longer."""
    assert Costs(1.0, 0.02, 0.5).end([1, 2, 3], [100, 100, 100]) == 1 + 3 * 3
    assert Costs(0.0, 0.001, 0.5).end([1, 2, 3], [100, 100, 100]) == 3 + 3 * 0.5


def test_the_smaller_number_is_said_to_be_the_better():
    costs = Costs(0.01, 1e-8, 0.0)
    said = costs.describe([0.1, 0.2], [10**6, 10**6]), costs.describe([0.2], [2 * 10**6])
    assert said[0] == "20.00 ms after the last gradient; 1, 1 MB"
    assert said[1] == "30.00 ms after the last gradient; 2 MB"
    assert str(costs) == "An all-reduce takes 10.00 ms and 10.00 ms per MB."
