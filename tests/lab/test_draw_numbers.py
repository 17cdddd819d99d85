"""Pictures of numbers show the bits that are there, and count what a format loses."""

import math
import struct

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minipar.lab import draw
from minipar.lab.draw import numbers as draw_numbers
from minipar.lab.draw.numbers import FORMATS, bits_of, magnitudes, smallest
from tests.lab.figures import words as texts


@pytest.mark.parametrize("value", [0.1, -3.0, 1e-7, 65504.0])
def test_bits_are_those_of_the_number(value):
    """Beside Python's own packing of IEEE 754; bf16 is the upper half of float32, rounded."""
    single = f"{struct.unpack('>I', struct.pack('>f', value))[0]:032b}"
    half = f"{struct.unpack('>H', struct.pack('>e', value))[0]:016b}"
    assert bits_of(value, torch.float32) == single
    assert bits_of(value, torch.float16) == half
    rounded = int(single[:16], 2) + (int(single[16:], 2) > 0x8000)
    assert int(bits_of(value, torch.bfloat16), 2) == rounded


@pytest.mark.parametrize("name, dtype", FORMATS.items())
def test_the_smallest_number_is_one_in_the_last_bit(name, dtype):
    assert bits_of(smallest(dtype), dtype).lstrip("0") == "1"
    assert int(bits_of(0.99 * smallest(dtype) / 2, dtype), 2) == 0


def test_every_bit_is_drawn_and_coloured_by_its_part():
    figure = draw_numbers.bits(0.1)
    boxes = [p for ax in figure.axes for p in ax.patches if p.get_height() == 0.3]
    inks = [to_hex(p.get_facecolor()) for p in boxes]
    sign, exponent, fraction = (inks.count(ink) for ink in draw_numbers._PARTS.values())
    assert (sign, exponent, fraction) == (5, 8 + 8 + 5 + 4 + 5, 23 + 7 + 10 + 3 + 2)
    assert "= 0.09997558594" in texts(figure) and "= 0.09375" in texts(figure)


def test_what_a_format_loses_is_counted_as_the_format_loses_it():
    """Mutants: a limit at the smallest number itself instead of half of it; at the largest."""
    half, largest = smallest(torch.float16) / 2, 65504.0
    tensor = torch.tensor([0.0, half, 1.01 * half, 1.0, largest, 65519.0, 65520.5, math.inf])
    rounded = tensor[:-1].half()
    assert (rounded == 0).tolist()[:3] == [True, True, False]
    assert rounded.isinf().tolist()[-2:] == [False, True]
    said = texts(magnitudes({"x": tensor.double()}, torch.float16, name="fp16"))
    assert "16.7% to zero" in said and "16.7% overflow" in said  # one of six, each
    said = texts(magnitudes({"x": torch.ones(3)}, torch.float16, name="fp16"))
    assert "none to zero" in said and "all digits of fp16" in said


def test_lost_bars_are_red():
    figure = magnitudes({"x": torch.tensor([2.0**-30, 2.0**-20, 1.0])}, torch.float16, name="x")
    inks = [
        (round(p.get_x()), to_hex(p.get_facecolor())) for ax in figure.axes for p in ax.patches
        if isinstance(p, Rectangle) and p.get_width() == 0.88
    ]  # fmt: skip
    blue = draw.KIND["backward"]
    assert inks == [(-30, draw.EXPOSED), (-20, blue), (0, blue)]
