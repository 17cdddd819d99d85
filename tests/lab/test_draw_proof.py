"""The picture of a proof shows where it parts, of a long model too."""

import pytest

from minipar.lab.draw.proof import MOST, proof
from minipar.tools.prove.prove import Parting, Verdict
from tests.lab.figures import words


def verdict(count: int, at: int) -> Verdict:
    states = ["equal"] * at + ["parts here"] + ["differs"] * (count - at - 1)
    modules = [(f"layers.{i}", "Linear", state) for i, state in enumerate(states)]
    parting = Parting("3 steps", "output", 1, "x", f"layers.{at}", [1], "off by 1", 2, "zero", "")
    return Verdict("mine.py", {"dp": 2}, [], parting, modules, [])


@pytest.mark.parametrize("count, at", [(3, 0), (3, 2), (100, 0), (100, 50), (100, 99)])
def test_the_point_is_in_the_picture(count, at):
    figure = proof(verdict(count, at))
    said = words(figure)
    assert f"layers.{at}" in said and "zero, in the output" in said
    assert sum(word.startswith("layers.") for word in said) == min(count, MOST)


def test_without_a_parting_nothing_is_red():
    equal = Verdict("mine.py", {"dp": 2}, ["3 steps"], None, [("", "Net", "equal")], [])
    said = words(proof(equal))
    assert "dp=2: equal to one device" in said and "the model" in said
