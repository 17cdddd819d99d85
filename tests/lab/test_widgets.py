"""Widgets without a browser: moving a slider by hand is setting its value."""

import pytest
from matplotlib.figure import Figure

from minipar.lab import widgets

PNG = b"\x89PNG"


def picture(box) -> bytes:
    """What the widget shows now."""
    return bytes(box.image.value)


def bars(height: int = 4, colour: str = "black"):
    """A drawing function as a notebook has it."""
    figure = Figure(figsize=(2, 1))
    figure.subplots().bar([0], [height], color=colour)
    return figure, f"height {height}"


def test_picture_and_text_follow_the_sliders():
    """A widget that draws once and never again would fail."""
    box = widgets.explore(bars, height=(1, 32), colour=["black", "red"])
    assert repr(box) == str(box) == "Controls, in Jupyter only: height, colour"
    first = picture(box)
    assert first.startswith(PNG) and box.text.value == "height 4"
    box.sliders["height"].value = 12
    second = picture(box)
    assert second != first and box.text.value == "height 12"
    box.sliders["colour"].value = "red"
    assert picture(box) != second
    box.sliders["height"].value, box.sliders["colour"].value = 4, "black"
    assert picture(box) == first


def test_an_error_while_drawing_is_seen():
    """Front ends drop what a callback raises: it would look as if the slider did nothing."""

    def fragile(height=1):
        if height > 2:
            raise ValueError("too high")
        return bars(height)

    box = widgets.explore(fragile, height=(1, 5))
    before = picture(box)
    box.sliders["height"].value = 3
    assert isinstance(box.error, ValueError) and box.text.value == "ValueError: too high"
    assert picture(box) == before
    box.sliders["height"].value = 2
    assert box.error is None and box.text.value == "height 2"
    with pytest.raises(ValueError, match="too high"):  # the first drawing raises in the cell itself
        widgets.explore(fragile, height=(3, 5))
