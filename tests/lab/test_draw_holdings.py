"""A picture of who holds what fills as many boxes as ranks hold slices."""

import pytest
from matplotlib.colors import to_hex

from minipar.lab.draw import pen
from minipar.lab.draw.holdings import PARTS, Phase, holdings
from tests.lab.figures import boxes, shapes, words

SIZE = 4


def filled(*phases: Phase) -> dict[str, int]:
    """Count the boxes of each part that are filled in its full colour, without the legend."""
    drawn = holdings({"a step": phases}, SIZE)
    inks = [to_hex(p.get_facecolor()) for p in shapes(drawn) if p.get_fill() and not p.get_hatch()]
    return {part: inks.count(pen.HELD[part]) for part in PARTS}


@pytest.mark.parametrize(
    ("word", "boxes"),
    [
        ("whole", SIZE * SIZE),
        ("own", SIZE),
        ("block", SIZE),  # the others are pale
        ("summands", 0),
        ("block of summands", SIZE),
        ("nothing", 0),
    ],
)
def test_a_box_is_filled_for_each_slice_that_a_rank_holds(word, boxes):
    assert filled(Phase("forward", word, "nothing", "whole")) == {
        "weights": boxes,
        "gradients": 0,
        "optimizer state": SIZE * SIZE,
    }


def test_an_unknown_word_is_named():
    with pytest.raises(ValueError, match=r"'all' is none of whole, own"):
        filled(Phase("backward", "all", "nothing", "own"))


def test_what_travels_has_a_name():
    drawn = holdings({"a step": [Phase("step", "whole", "own", "own", "reduce-scatter")]}, SIZE)
    assert "reduce-scatter" in words(drawn)


def test_the_own_slices_of_all_ranks_lie_on_a_diagonal():
    drawn = holdings({"a step": [Phase("step", "own", "nothing", "nothing")]}, SIZE)
    _, x, y, *_ = zip(*boxes(drawn, pen.HELD["weights"]), strict=True)
    assert len({*x}) == len({*y}) == len(x) == SIZE
