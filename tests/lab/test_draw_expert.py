"""Pictures of experts bear the counts of their tables, and mark the cells that are named."""

from matplotlib.colors import to_hex

from minipar.lab import choosing
from minipar.lab.draw import AXIS, INK
from minipar.lab.draw.expert import choices, heat, ink_of, journey
from tests.lab.figures import boxes, fills, texts

EXPERTS = [[[0, 3], [3, 2]], [[1, 3], [2, 3]]]  # two ranks, two tokens each; 4 experts


def test_a_slot_is_drawn_at_the_rank_of_its_expert():
    """Mutant: slots that stay where their tokens are."""
    figure = journey(EXPERTS, 4)
    said = texts(figure)
    assert "2 rows" in said and "6 rows" in said and "1 3" in said
    stripes_and_slots = 3  # a slot is a stripe at home, a row away, and a stripe at home again
    assert fills(figure).count(ink_of(3, 2)) == 4 * stripes_and_slots
    assert len({ink_of(e, 2) for e in range(4)}) == 4


def test_margins_are_sums():
    said = texts(heat({"": [[1, 2], [3, 40]]}, rows="ab", columns="cd", sums=True))
    assert all(total in said for total in ("3", "43", "4", "42"))


def test_marked_cells_are_framed_in_each_table():
    table = [[1, 0], [0, 1]]
    figure = choices({"a": table, "b": table}, marked=[(0, 1)], rows="ab", columns="cd")
    frames = [p for p in figure.axes[0].patches if to_hex(p.get_edgecolor()) == INK]
    assert len(frames) == 2


def test_the_procedure_and_the_placements_are_drawn():
    said = texts(choosing.tree())
    assert all(step in said for step in choosing.STEPS)
    figure = choosing.placements({"far": (8, 2, 48e9)})
    assert len(boxes(figure, AXIS["dp"])) == 2 and "48 GB/s each" in texts(figure)
