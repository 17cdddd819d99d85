"""What a check looks at, and how it refuses."""

import pytest
import torch

from minipar.lab import cases
from minipar.lab.cases import Case, CheckFailed, apart, calls_of, told_apart, whole_numbers


def test_numbers_that_look_alike_get_more_digits():
    """Mutant: "expected 3.58525, got 3.58525"."""
    assert apart(3.5, 4.25) == "expected 3.5, got 4.25"
    assert apart(0.25, 0.25 + 1e-8) == "expected 0.25, got 0.25000001; computed in float32?"
    assert told_apart(1.0, 1.0 + 1e-15) == ["1.0", "1.000000000000001"]
    assert apart(float("inf"), float("nan")) == "expected inf, got nan"


def test_a_single_number_has_no_place():
    """Mutant: "1 of 1 values are wrong, the first at []"."""
    case = Case(1, [()], [torch.tensor(2.0)], [[]])
    with pytest.raises(CheckFailed, match=r"^the loss of rank 0: the value is wrong: expected 1, "):
        case.expect_close([torch.tensor(1.0)], "the loss")
    case = Case(1, [()], [torch.tensor([1.0, 2.0])], [[]])
    with pytest.raises(CheckFailed, match=r"1 of 2 values are wrong, the first at \[1\]: expected"):
        case.expect_close([torch.tensor([1.0, 1.0])])


def test_a_tolerance_is_that_which_was_given():
    """Mutant: one of the two bounds is not passed on."""
    case = Case(1, [()], [[torch.tensor([1.001]), torch.tensor([0.01])]], [[]])
    want = [[torch.tensor([1.0]), torch.tensor([0.0])]]
    case.expect_close(want, rtol=0.01, atol=0.1)
    for bounds in ({"rtol": 0.01}, {"atol": 1e-3}):
        with pytest.raises(CheckFailed):
            case.expect_close(want, **bounds)


def test_what_is_no_list_of_whole_numbers_stays_as_it_is():
    """Mutants: whole numbers of other kinds are found in no list of int; 1.5 layers are rounded."""
    for value in ((1, 2), torch.tensor([1, 2]), torch.tensor([1, 2]).numpy()):
        for given in (value, [*value]):
            found = whole_numbers(given)
            assert found == [1, 2] and {*map(type, found)} == {int}
    for value in (None, 3, "12", [1.0], [[1, 2]], torch.tensor([1.0])):
        assert whole_numbers(value) is value


def fingerprint(criterion, message, sent=None, results=None):
    case = None if sent is None else Case(len(sent), [], results, sent)
    return CheckFailed(message, criterion, case).fingerprint


def test_noise_of_a_processor_does_not_change_a_fingerprint():
    one = fingerprint("result", "rank 0: expected 0.123456, got 1.2e-17 of 4,096 bytes")
    other = fingerprint("result", "rank 0: expected 0.123461, got -3e-18 of 4,096 bytes")
    assert one == other


def test_a_sum_that_is_what_rounding_leaves_of_nothing_does_not_count():
    """Mutant: the sum alone, whose digits are then those of one processor."""
    one, other = ([torch.tensor([1.0, -1.0 + left])] for left in (3e-8, -2e-8))
    assert fingerprint("r", "m", [[]], one) == fingerprint("r", "m", [[]], other)
    turned = fingerprint("r", "m", [[]], [torch.tensor([1.0, 1.0])])
    assert turned != fingerprint("r", "m", [[]], one)


def test_of_an_error_only_what_was_raised_counts():
    at = "rank {}:\n  File x, line {}\nTypeError: 'NoneType' has no len(), call {}"
    marks = {fingerprint("run", at.format(*where)) for where in ((0, 3, 1), (2, 88, 4))}
    assert len(marks) == 1
    assert fingerprint("run", "ValueError: another") not in marks


def test_of_silent_answers_what_they_returned_counts():
    results = [None, 1, "1", True, [1], torch.ones(2), torch.zeros(2), torch.ones(3), {"a": 1}]
    assert len({fingerprint("r", "m", [[]], result) for result in results}) == len(results)


def test_calls_are_noted_by_what_was_called():
    """Mutant: what has the same name counts, or what one of them calls itself."""
    with calls_of(apart, told_apart) as called:
        cases.apart(1.0, 2.0)
    assert called == {"apart"}

    def told_apart_by_hand():
        return "1", "2"

    told_apart_by_hand.__name__ = "told_apart"
    with calls_of(apart, told_apart) as called:
        told_apart_by_hand()
    apart(1.0, 2.0)  # after the body
    assert called == set()
