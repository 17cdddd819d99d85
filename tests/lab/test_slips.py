"""Fingerprints of failures: the same for the same mistake, another one for another."""

import torch

from minipar.lab import slips


def test_noise_of_a_processor_does_not_change_a_fingerprint():
    one = slips.fingerprint("result", "rank 0: expected 0.123456, got 1.2e-17 of 4,096 bytes")
    other = slips.fingerprint("result", "rank 0: expected 0.123461, got -3e-18 of 4,096 bytes")
    assert one == other


def test_a_sum_that_is_what_rounding_leaves_of_nothing_does_not_count():
    """Mutant: the sum alone, whose digits are then those of one processor."""
    one, other = ([torch.tensor([1.0, -1.0 + left])] for left in (3e-8, -2e-8))
    assert slips.fingerprint("r", "m", [[]], one) == slips.fingerprint("r", "m", [[]], other)
    turned = slips.fingerprint("r", "m", [[]], [torch.tensor([1.0, 1.0])])
    assert turned != slips.fingerprint("r", "m", [[]], one)


def test_of_an_error_only_what_was_raised_counts():
    at = "rank {}:\n  File x, line {}\nTypeError: 'NoneType' has no len(), call {}"
    marks = {slips.fingerprint("run", at.format(*where)) for where in ((0, 3, 1), (2, 88, 4))}
    assert len(marks) == 1
    assert slips.fingerprint("run", "ValueError: another") not in marks


def test_of_silent_answers_what_they_returned_counts():
    results = [None, 1, "1", True, [1], torch.ones(2), torch.zeros(2), torch.ones(3), {"a": 1}]
    assert len({slips.fingerprint("r", "m", [[]], result) for result in results}) == len(results)
