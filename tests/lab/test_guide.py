"""The guide says what the planner says, and why where it says nothing."""

from pathlib import Path

import pytest

from minipar.lab import guide
from minipar.lab.draw import pen
from minipar.sim import planner
from tests.lab.figures import texts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    return guide.ask(["llama-3.2-1b", "llama-3-70b"], [8, 64], ["h100-ndr"])


def test_a_box_bears_the_plan_that_the_planner_takes(found):
    """Mutant: a figure with plans of its own."""
    said = texts(guide.guide(found))
    for ranked in filter(None, map(guide.simplest, found.values())):
        assert f"MFU {ranked.mfu(False):.0%}" in said
        for axis in ("dp", "tp", "pp"):
            size = getattr(ranked.job.plan, axis)
            assert size == 1 or f"{axis} {size}" in said
    assert "needs" in said and "does not fit" in said and "70B" in said and "64 GPUs" in said


def test_the_simplest_is_legal_near_the_fastest_and_none_nearer_is_simpler(found):
    """Mutant: the fastest, with an axis more for a percent."""

    def axes(ranked):
        return sum(getattr(ranked.job.plan, axis) > 1 for axis in ("tp", "pp"))

    checked = 0
    for search in found.values():
        best, ranked = search.best(), guide.simplest(search)
        assert (best is None) == (ranked is None)
        if best is None:
            continue
        assert planner.problem(ranked.job) is None and best.step <= ranked.step
        assert ranked.step <= guide.NEAR * best.step
        near = [r for r in search.fit if r.step <= guide.NEAR * best.step]
        legal = [r for r in near if planner.problem(r.job) is None]
        assert axes(ranked) == min(map(axes, legal))
        checked += 1
    assert checked == 3  # 70B does not fit on 8


@pytest.mark.slow
def test_the_committed_figure_is_the_one_of_the_planner():
    """Mutant: the planner says something else by now, and nothing was drawn again."""
    assert pen.png(guide.guide(guide.ask())) == (ROOT / guide.OUT).read_bytes()
