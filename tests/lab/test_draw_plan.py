"""Pictures of plans say what `explain` says, and which axes leave a node."""

from itertools import pairwise

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Arc, FancyBboxPatch

from minipar.emulate.link import Topology
from minipar.lab.draw import AXIS, EXPOSED, GRID
from minipar.lab.draw.plan import PIECE, crossing, explanation, families, label_of, placement
from minipar.model.llama import PRESETS
from minipar.parallel.explain import explain
from minipar.parallel.plan import Plan
from tests.lab.figures import fills, shapes
from tests.lab.figures import words as texts

NODES = Topology(2, 4)


def explained(text):
    return explain(Plan.parse(text), PRESETS["tiny"])


THREE = explained("pp=2,dp=2,tp=2,zero=1,sequence_parallel,microbatches=2")


def test_families_have_every_parameter_once():
    """Mutant: a family of equal names with other cuts."""
    found = families(THREE)
    assert sum(map(len, found)) == len(THREE.rows)
    labels = [label_of(family) for family in found]
    assert labels[:2] == ["embedding", "9 x norm"] and "8 x k, v" in labels
    assert "4 x o" in labels, "o is cut along its columns, q along its rows"


def test_a_box_in_the_colour_of_the_axis_is_a_sum():
    """Mutant: boxes of what is cut in place of what is summed."""
    figure = explanation(THREE)
    colours = fills(figure, FancyBboxPatch)
    assert colours.count(AXIS["dp"]) == len(families(THREE))  # of every parameter
    assert colours.count(AXIS["tp"]) == colours.count(AXIS["pp"]) == 1  # norms; the embedding
    said = texts(figure)
    assert "all-reduce\n2,304 bytes" in said  # 9 norms of 128 numbers of 4 bytes, cut over dp = 2
    assert said.count("a piece each") == len(families(THREE)) - 1
    assert said.count("on one stage") == len(families(THREE)) - 1


def test_copies_that_are_alike_need_nothing():
    """Without sequence parallelism all ranks of tp have the same gradient of a norm."""
    figure = explanation(explained("dp=2,tp=2"))
    assert fills(figure, FancyBboxPatch).count(GRID) == 1 and "the same on all" in texts(figure)


@pytest.mark.slow
def test_the_piece_is_as_large_a_part_of_the_picture_as_of_the_matrix():
    """Mutants: rows and columns exchanged; the piece at the bottom."""
    figure = explanation(explained("dp=2,tp=4"))
    pairs = [(a, b) for a, b in pairwise(shapes(figure)) if to_hex(b.get_facecolor()) == PIECE]
    shares = {
        label_of(family): (b.get_height() / a.get_height(), b.get_width() / a.get_width())
        for family, (a, b) in zip(families(explained("dp=2,tp=4")), pairs, strict=True)
    }
    assert shares["embedding"] == shares["4 x q"] == pytest.approx((0.25, 1))
    assert shares["4 x o"] == pytest.approx((1, 0.25)) and shares["9 x norm"] == (1, 1)
    assert shares["8 x k, v"] == pytest.approx((0.5, 1))  # two heads of keys for four ranks
    for a, b in pairs:
        assert b.get_y() + b.get_height() == pytest.approx(a.get_y() + a.get_height())


@pytest.mark.parametrize(
    "sizes, out",
    [
        ({"pp": 2, "dp": 2, "tp": 2}, "pp"),
        ({"tp": 2, "dp": 2, "pp": 2}, "tp"),
        ({"dp": 8}, "dp"),
        ({"dp": 2, "tp": 4}, "dp"),
    ],
)
def test_the_axis_that_leaves_a_node_is_loud(sizes, out):
    """Mutant: columns of the mesh numbered the other way round."""
    assert [axis for axis, crosses in crossing(sizes, NODES).items() if crosses] == [out]
    figure = placement(sizes, NODES)
    bows = [to_hex(bow.get_edgecolor()) for bow in shapes(figure, Arc)]
    assert bows.count(EXPOSED) == 8 // sizes[out] * (sizes[out] - 1)
    for axis, size in sizes.items():  # the colour of a bow is its axis, inside of a node or not
        assert bows.count(AXIS[axis]) == 8 // size * (size - 1)
    assert texts(figure).count("leaves the node") == 1
