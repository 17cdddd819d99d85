"""A picture of a mechanism: every box is there, and an arrow goes from edge to edge."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minipar.lab.draw import pen
from minipar.lab.draw.mechanism import Box, mechanism

BOXES = {
    "g": Box("a gradient", 0, 0, "gradients"),
    "sum": Box("all-reduce", 1, 0, "dp"),
    "step": Box("a step", 1, 1),
}


def drawn():
    return mechanism(BOXES, [("g", "sum"), ("sum", "step", "then")], title="A step")


def patches(kind):
    return [p for ax in drawn().axes for p in ax.patches if isinstance(p, kind)]


def test_a_box_has_the_colour_of_what_it_holds_or_of_its_axis():
    inks = [to_hex(p.get_facecolor()) for p in patches(FancyBboxPatch)]
    assert inks == [pen.HELD["gradients"], pen.AXIS["dp"], pen.PAPER]


def test_an_arrow_runs_between_the_facing_edges_of_its_boxes():
    g, total, step = (p.get_bbox() for p in patches(FancyBboxPatch))
    across, down = (p._posA_posB for p in patches(FancyArrowPatch))
    assert g.x1 < across[0][0] < across[1][0] < total.x0
    assert total.y0 > down[0][1] > down[1][1] > step.y1


def test_who_cannot_see_it_hears_every_box():
    said = pen.in_words(drawn())
    assert all(box.said in said for box in BOXES.values())


def test_an_arrow_to_nowhere_is_named():
    with pytest.raises(ValueError, match="stepp; boxes are g, sum, step"):
        mechanism(BOXES, [("g", "stepp")])
