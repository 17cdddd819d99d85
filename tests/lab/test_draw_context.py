"""Pictures of attention on ranks show the blocks that are multiplied, when, and who waits."""

import pytest
import torch
from matplotlib.colors import to_hex

from minipar.lab import draw
from minipar.lab.draw import KIND, RANK
from minipar.lab.draw.context import causal, mask, orders, pieces, quarters, steps
from minipar.model.masks import document_mask
from tests.lab.figures import boxes, texts, words

CAUSAL = torch.ones(24, 24, dtype=torch.bool).tril()


@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_cover_what_is_visible_exactly_once(size, order):
    """Mutants: keys of rank + step; positions of the second chunk taken for those of the first."""
    covered = torch.zeros(24, 24, dtype=torch.int64)
    for piece in pieces(size, order, CAUSAL):
        assert (
            len(piece.queries) == len(piece.keys) == 24 // size // (2 if order == "zigzag" else 1)
        )
        assert (piece.queries.diff() == 1).all() and (piece.keys.diff() == 1).all()
        covered[piece.queries[:, None], piece.keys] += 1
    assert covered.max() == 1 and (covered[CAUSAL] == 1).all()


def test_work_is_counted_in_quarters_of_a_block():
    """Mutant: a block of "zigzag" counted like one of "plain", which is four times as large."""
    assert quarters(4, "plain", causal(4)) == [[4.0] * (r + 1) + [0.0] * (3 - r) for r in range(4)]
    assert quarters(4, "zigzag", causal(4)) == [[3.0, 2.0, 2.0, 2.0]] * 4
    halves = document_mask(torch.arange(24)[None] // 12)[0, 0]
    assert quarters(4, "plain", halves) == [[4, 0, 0, 0], [4, 4, 0, 0]] * 2


def test_a_triangle_is_coloured_by_the_rank_that_multiplies():
    """Mutants: coloured by who has the keys; zigzag drawn in the order of the shards."""
    figure = mask(2, "zigzag", torch.ones(8, 8, dtype=torch.bool).tril())
    [image] = figure.axes[0].images
    colours = [[to_hex(cell) for cell in row] for row in image.get_array()]
    assert [row[0] for row in colours] == [RANK[r] for r in (0, 0, 1, 1, 1, 1, 0, 0)]
    assert colours[0][7] == KIND["idle"]  # nobody multiplies it
    assert colours[0][1] not in (RANK[0], KIND["idle"])  # multiplied and masked: pale
    numbers = [word for word in words(figure) if word.isdigit()]
    assert sorted(numbers) == sorted("0" * 6 + "1" * 4)


def test_every_step_lasts_as_long_as_its_slowest_rank():
    """Mutant: ranks that do not wait for each other, each at its own sum."""
    figure = steps({"a": [[1.0, 4.0], [3.0, 1.0]]})
    (_, x0, _, first, _), (_, x1, _, second, _) = boxes(figure, RANK[0])
    (_, y0, _, own, _), (_, y1, *_) = boxes(figure, RANK[1])
    assert x0 == y0 and x1 == pytest.approx(y1) == pytest.approx(x0 + own)
    assert own == pytest.approx(3 * first) and second == pytest.approx(4 * first)
    assert "7 ms" in words(figure)


def test_plain_waits_and_zigzag_does_not():
    said = texts(orders(4))
    assert "16 quarters of a block" in said and "| 9 quarters of a block" in said
    assert "plain" in said and "zigzag" in said


@pytest.mark.slow
def test_pictures_fit_the_paper():
    drawn = [mask(6, "plain", title="a"), orders(4, title="c"), steps({"d": [[1.0]]})]
    for figure in drawn:
        width, height = figure.get_size_inches()
        for patch in figure.axes[0].patches:
            x, y = patch.get_xy()
            assert x >= 0 and x + patch.get_width() <= width
            assert y >= 0 and y + patch.get_height() <= height
        assert len(draw.png(figure)) < 100_000
