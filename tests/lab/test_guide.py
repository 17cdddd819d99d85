"""The guide says what the planner says, and why where it says nothing."""

from pathlib import Path

import pytest

from minipar.lab import guide
from minipar.lab.draw import pen
from tests.lab.figures import texts

ROOT = Path(__file__).parents[2]


def test_a_box_bears_the_plan_that_the_planner_takes(monkeypatch):
    """Mutant: a figure with plans of its own."""
    monkeypatch.setattr(guide, "MODELS", ["llama-3.2-1b", "llama-3-70b"])
    monkeypatch.setattr(guide, "GPUS", [8, 64])
    monkeypatch.setattr(guide, "NETWORKS", {"h100-ndr": "InfiniBand"})
    found = guide.ask()
    said = texts(guide.guide(found))
    for ranked in filter(None, map(guide.simplest, found.values())):
        assert f"MFU {ranked.mfu(False):.0%}" in said
        for axis in ("dp", "tp", "pp"):
            size = getattr(ranked.job.plan, axis)
            assert size == 1 or f"{axis} {size}" in said
    assert "needs" in said and "does not fit" in said and "70B" in said and "64 GPUs" in said


@pytest.mark.slow
def test_the_committed_figure_is_the_one_of_the_planner():
    """Mutant: the planner says something else by now, and nothing was drawn again."""
    assert pen.png(guide.guide(guide.ask())) == (ROOT / guide.OUT).read_bytes()
