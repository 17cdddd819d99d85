"""The law of parity, over all rows of table.py: five tests, and nothing else.

1. A strategy computes what one device computes, to 1e-10.
2. Without communication it does not: the comparison can fail.
3. It sends the bytes, and keeps the optimizer state, that its docstring promises.
4. On a link that is as unforgiving as a GPU it has no race.
5. A run goes on under any other plan: test_plans.py.
"""

import pytest

from minipar.emulate import strict
from tests.law.harness import Outcome, assert_parity, parallel, reference
from tests.law.table import ROWS, Row, numbers_of


def train(row: str, mute: bool = False, watch: bool = False) -> Outcome:
    """Train by a row; called on each rank. `watch`: races raise."""
    own = ROWS[row]
    how = dict(mute=mute, cut=own.cut)
    if not watch:
        return parallel(own.task, own.sizes, own.attach, **how)
    with strict.watching():  # losses, norms and weights say enough
        return parallel(own.task, own.sizes, own.attach, gradients=lambda model: {}, **how)


def chosen(condition) -> list:
    """Names of the rows for which `condition` holds; all but the quick ones are slow."""
    rows = [row for row in ROWS.values() if condition(row)]
    return [pytest.param(r.name, marks=() if r.quick else pytest.mark.slow) for r in rows]


@pytest.mark.parametrize("row", chosen(lambda row: True))
def test_equals_one_device_sends_and_holds_what_it_says(ranks, row):
    """Losses, tokens, norms, every gradient, weights; then bytes and optimizer state."""
    own = ROWS[row]
    for outcome in ranks(own.num_ranks).run(train, row):
        assert_parity(outcome, reference(own.task), own.rtol)
        if own.sent is not None:
            expected = own.sent(own.task, own.num_ranks)
            assert outcome.sent == {k: pytest.approx(v, abs=own.slack) for k, v in expected.items()}
        if own.state is not None:
            check_state(outcome, own)


def check_state(outcome: Outcome, row: Row) -> None:
    """Raise `AssertionError` unless this rank keeps as many numbers of optimizer state as said.

    Flat buffers are padded, and one rank of a small model may have more of them than another.
    """
    expected = row.state(numbers_of(row.task)[0], row.num_ranks)
    assert outcome.state == pytest.approx(expected, rel=0.1), (outcome.state, expected)


@pytest.mark.parametrize("row", chosen(lambda row: row.mute))
def test_without_communication_parity_is_violated(ranks, row):
    """The mutant of every strategy: what the harness compares must notice it."""
    own = ROWS[row]
    for outcome in ranks(own.num_ranks).run(train, row, mute=True):
        with pytest.raises(AssertionError, match=own.mute):
            assert_parity(outcome, reference(own.task))


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.name for row in ROWS.values() if row.strict])
def test_has_no_race(ranks, row):
    """On the strict link a result that is used early, or a buffer that is touched, raises."""
    own, expected = ROWS[row], reference(ROWS[row].task)
    for found in ranks(own.num_ranks, "link").run(train, row, watch=True):
        found.gradients = expected.gradients
        assert_parity(found, expected)
