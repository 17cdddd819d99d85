"""The picture of a proof shows where it parts, of a long model too."""

import pytest

from minipar.lab.draw.proof import MOST, proof
from minipar.tools.prove.prove import Parting, Verdict


def verdict(count: int, at: int) -> Verdict:
    states = ["equal"] * at + ["parts here"] + ["differs"] * (count - at - 1)
    modules = [(f"layers.{i}", "Linear", state) for i, state in enumerate(states)]
    parting = Parting("3 steps", "output", 1, "x", f"layers.{at}", [1], "off by 1", 2, "zero", "")
    return Verdict("mine.py", {"dp": 2}, [], parting, modules, [])


@pytest.mark.parametrize("count, at", [(3, 0), (3, 2), (100, 0), (100, 50), (100, 99)])
def test_the_point_is_in_the_picture(count, at):
    figure = proof(verdict(count, at))
    words = [text.get_text() for text in figure.axes[0].texts]
    assert f"layers.{at}" in words and "zero, in the output" in words
    assert sum(word.startswith("layers.") for word in words) == min(count, MOST)


def test_without_a_parting_nothing_is_red():
    equal = Verdict("mine.py", {"dp": 2}, ["3 steps"], None, [("", "Net", "equal")], [])
    figure = proof(equal)
    assert "equal to one device" in figure.texts[0].get_text()
    assert "the model" in [text.get_text() for text in figure.axes[0].texts]
