"""Predictions of buckets follow the rule that is stated."""

from minipar.parallel.bucket_sizes import Costs


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
