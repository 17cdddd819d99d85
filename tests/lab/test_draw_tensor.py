"""Pictures of cut matrices show whose piece is where, and what is still a sum."""

import pytest

from minipar.lab import draw
from minipar.lab.draw import RANK
from minipar.lab.draw.tensor import SAME, Matrix, formula, heads, swap
from minipar.model.llama import PRESETS
from tests.lab.figures import boxes
from tests.lab.figures import words as texts

X, A = Matrix("x", "T", "D"), Matrix("A", "D", "F", cut="columns")
H, Y = Matrix("h", "T", "F", cut="columns"), Matrix("y", "T", "D", pending=True)
B = Matrix("B", "F", "D", cut="rows")


def patches(figure) -> list[tuple]:
    return boxes(figure, *RANK, SAME)


def test_labels_say_how_a_matrix_is_cut():
    assert X.label == "x[T, D]" and B.label == "B[F/tp, D]"
    assert H.label == "h[T, F/tp]" and Y.label == "y[T, D] {partial tp}"


def test_columns_stand_side_by_side_rows_from_top_to_bottom():
    """Mutants: the two swapped; row 0 at the bottom."""
    (first, x0, y0, w0, _), (second, x1, y1, _, _) = patches(formula([A]))
    assert (first, second) == (RANK[0], RANK[1]) and y0 == y1
    assert x1 == pytest.approx(x0 + w0)
    (_, x0, y0, _, h0), (_, x1, y1, _, h1) = patches(formula([B]))
    assert x0 == x1 and y0 == pytest.approx(y1 + h1) and h0 == h1


def test_a_pending_sum_is_a_sheet_of_full_size_per_rank():
    """Mutant: a pending sum drawn like a cut matrix, in pieces."""
    figure = formula([Y], size=3)
    sheets, whole = patches(figure), patches(formula([X]))
    assert sorted(sheet[0] for sheet in sheets) == sorted(RANK[:3])
    assert all(sheet[3:] == pytest.approx(whole[0][3:]) for sheet in sheets)
    assert "Σ" in texts(figure) and "Σ" not in texts(formula([X]))
    assert draw.pen.in_words(formula([Y], title="a sum")) == "a sum"


@pytest.mark.slow
def test_what_all_have_alike_is_grey_and_everything_fits_the_paper():
    figure = formula([X, "·", A, "=", H, "·", B, "=", Y], size=4, title="a")
    assert [patch[0] for patch in patches(figure)].count(SAME) == 1
    width, height = figure.get_size_inches()
    for _, x, y, across, down in patches(figure):
        assert min(x, y) >= 0 and x + across <= width and y + down <= height
    assert len(draw.png(figure)) < 100_000
    title = "a title of many words " * 3
    assert formula([X], title=title).get_figwidth() > 6.5
    assert heads(PRESETS["tiny"], [2], title=title).get_figwidth() > 6.5


@pytest.mark.parametrize("size, owners", [(2, (0, 0, 1, 1, 0, 1)), (4, (0, 1, 2, 3, 0, 2, 1, 3))])
def test_heads_are_those_of_the_library_copies_included(size, owners):
    """4 query heads on 2 of keys, read line by line: on 4 ranks a key head is on two of them."""
    found = sorted(patches(heads(PRESETS["tiny"], [size])), key=lambda patch: (-patch[2], patch[1]))
    assert [patch[0] for patch in found] == [RANK[i] for i in owners]


def test_blocks_go_where_the_library_sends_them():
    """4 heads, 2 of keys, on 4 ranks: key head 0 goes to ranks 0 and 1. Mutants: copies that are
    laid side by side as 0 1 0 1, numbers of heads instead of ranks."""
    figure = swap(PRESETS["tiny"], 4)
    found = sorted(patches(figure), key=lambda patch: (-round(patch[2], 3), patch[1]))
    first_row, second_row = found[:18], found[18:36]  # q, k and v | q, k and v | out
    columns = [*range(4), 0, 1, 2, 3, *[0] * 4]
    assert [p[0] for p in first_row] == [RANK[0]] * 6 + [RANK[i] for i in columns]
    assert [p[0] for p in second_row[:6]] == [RANK[1]] * 6
    numbers = [t for t in texts(figure) if t.replace(" ", "").isdigit()]
    assert numbers[:3] == ["1", "2", "3"]  # of q, what rank 0 sends
    assert {"0 1", "2 3"} <= set(numbers) and "0 2" not in numbers
