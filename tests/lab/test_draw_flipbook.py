"""Flipbooks: every combination is a frame, small, harmless, and with something to fall back on.

That they move in a browser is seen by `book/test_book.py`.
"""

import json
import re
from xml.etree import ElementTree

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from minipar.lab import draw
from minipar.lab.draw import pen
from minipar.lab.draw.flipbook import flip


def bars(height=2, name="a"):
    return draw.bars({name: height, "b": 1}, unit="ms", title=f"{name}: {height} ms")


def book_of(html: str) -> dict:
    """What the script of a flipbook is given."""
    return json.loads(re.search(r"const book = (.*);\n", html)[1])


def svg(book: dict, number: int) -> str:
    return "\n".join(book["lines"][line] for line in book["frames"][number])


def test_there_is_a_frame_for_each_combination_in_the_order_that_the_script_counts():
    book = book_of(flip(bars, height=[1, 2, 3], name=["x", "y"]).html)
    assert book["choices"] == [["height", ["1", "2", "3"]], ["name", ["x", "y"]]]
    assert book["start"] == {"height": 1, "name": 0}  # the default, or else the first
    for i, height in enumerate((1, 2, 3)):
        for j, name in enumerate("xy"):
            frame = i * 2 + j  # `at.reduce(...)` of the script
            assert f"{name}: {height} ms" in svg(book, frame)
            assert book["words"][frame] == f"{name}: {height} ms"


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", '"><img src=x>', "a\\u"])
def test_names_and_values_are_text(hostile):
    html = flip(lambda what: bars(name=what), what=[hostile]).html
    assert html.count("<script>") == html.count("</script>") == 1
    assert html.count("<img") == 0
    book = book_of(html)
    assert book["choices"] == [["what", [hostile]]]
    text = "".join(ElementTree.fromstring(svg(book, 0)).itertext())
    assert hostile in text, "escaped in the picture, too"


def test_a_notebook_shows_the_first_frame_and_then_the_book():
    """The frame of the defaults. Mutant: the frame of the least values."""
    book = flip(bars, height=range(1, 8))
    assert book.html == flip(bars, height=range(1, 8)).html  # to the byte
    InteractiveShell.instance()
    with capture_output() as shown:
        book._ipython_display_()
    still, moving = (output.data for output in shown.outputs)
    assert "text/html" not in still and "image/png" not in moving
    assert moving["text/html"] == book.html
    assert still["image/png"] == pen.png(bars(height=2))
    assert (
        shown.outputs[0].metadata["image/png"]["alt"].startswith("One of 7 pictures, height = 2: ")
    )
