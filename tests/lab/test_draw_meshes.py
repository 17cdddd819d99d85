"""Pictures of plans show every message once, in its round, and nothing else."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch

from minipar.comm import plans
from minipar.comm.plans import ALL_REDUCE
from minipar.lab.draw.meshes import ADDED, PASSED, schedules
from tests.lab.figures import shapes, words


def lines(figure):
    """(colour, width) of each arrow."""
    arrows = shapes(figure, FancyArrowPatch)
    return [(to_hex(arrow.get_edgecolor()), arrow.get_linewidth()) for arrow in arrows]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_every_message_is_a_line(name, size):
    """Mutants: a message of a rank to itself is drawn; empty rounds are counted."""
    each = [ALL_REDUCE[name](24, rank, size) for rank in range(size)]
    figure = schedules({name: each}, numel=24)
    sent = [m for rank, plan in enumerate(each) for s in plan for m in s.sends if m.peer != rank]
    assert len(lines(figure)) == len(sent)
    busy = sum(any(step.sends for step in steps) for steps in zip(*each, strict=True))
    assert f"{busy} round{'s' * (busy > 1)}" in words(figure)


def test_colour_says_what_is_added_and_width_how_much_there_is():
    ring = lines(schedules({"ring": [plans.ring(8, r, 4) for r in range(4)]}, numel=8))
    assert [ink for ink, _ in ring].count(ADDED) == [ink for ink, _ in ring].count(PASSED) == 12
    halving = [plans.halving_doubling(8, r, 4) for r in range(4)]
    widths = sorted({round(width, 3) for _, width in lines(schedules({"h": halving}, numel=8))})
    assert len(widths) == 2 and widths[0] == pytest.approx(ring[0][1], abs=1e-3)
