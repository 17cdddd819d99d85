"""The picture of what compression keeps shows the numbers that are there, and the error of all."""

import pytest
import torch

from minipar.lab import draw
from minipar.lab.draw import compression
from minipar.lab.draw.compression import kept
from tests.lab.figures import boxes
from tests.lab.figures import words as texts

TRUTH = torch.tensor([3.0, -1.0, 0.5, 0.0, 2.0, 40.0])


@pytest.fixture(autouse=True)
def five_numbers(monkeypatch):
    monkeypatch.setattr(compression, "COUNT", 5)


def test_bars_are_the_numbers_and_red_is_what_became_zero():
    """Mutants: all versions drawn as the truth, or red where the truth itself is zero."""
    largest = torch.tensor([3.0, 0.0, 0.0, 0.0, 2.0, 0.0])
    figure = kept({"truth": TRUTH, "largest": largest})
    blue, red = (
        [height for *_, height in boxes(figure, ink)]
        for ink in (draw.KIND["backward"], draw.EXPOSED)
    )
    assert blue == pytest.approx((0.46 / 3 * largest[:5]).tolist())
    assert red == pytest.approx([0, -0.46 / 3, 0.23 / 3, 0, 0])


def test_the_error_is_that_of_all_numbers_not_of_those_shown():
    almost = TRUTH.clone()
    almost[-1] = 0
    said = texts(kept({"truth": TRUTH, "almost": almost}))
    assert f"{100 * 40 / TRUTH.norm().item():.2g} % off" in said
    assert "6 numbers" in said
