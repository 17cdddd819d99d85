"""Pictures of the model say what its configuration says."""

from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle, Wedge

from minipar.lab import draw
from minipar.lab.draw import llama as draw_llama
from minipar.model.llama import PRESETS
from tests.lab.figures import words as texts

TINY = PRESETS["tiny"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_are_the_whole(name):
    """A part that is forgotten, or tied embeddings counted twice, makes another sum."""
    config = PRESETS[name]
    parts = draw_llama.parameters(config)
    assert sum(parts.values()) == config.num_parameters
    assert parts.keys() == draw_llama.PARTS.keys()


def test_the_model_shows_its_numbers():
    said = texts(draw_llama.model(TINY))
    assert {"4 · 49,152", "4 · 132,096", "32,768", "same as embed", "a layer, 4 times"} <= set(said)
    assert any("758,912" in text for text in said)
    untied = texts(draw_llama.model(replace(TINY, tie_embeddings=False)))
    assert untied.count("32,768") == 2


def test_dials_turn_by_the_frequencies():
    """Pair 0 turns by one radian per token; a dial that forgets the position would not."""
    figure = draw_llama.rotations(TINY)
    wedges = [p.theta2 for ax in figure.axes for p in ax.patches if isinstance(p, Wedge)]
    assert wedges[:4] == pytest.approx([0, 57.2958, 114.5916, 171.8873], abs=1e-3)
    assert wedges[16:20] == pytest.approx([0, 5.72958, 11.45916, 17.18873], abs=1e-3)  # pair 4


def test_the_mask_is_causal_and_heads_share():
    figure = draw_llama.attention(TINY)
    cells = [p for ax in figure.axes for p in ax.patches if isinstance(p, Rectangle)]
    seen = [p for p in cells if to_hex(p.get_facecolor()) != draw.KIND["idle"]]
    assert len(cells) == 64 and len(seen) == 36
    said = texts(figure)
    assert {"q0", "q3", "k0  v0", "k1  v1"} <= set(said) and "q4" not in said
    lines = [line.get_xdata()[0] for ax in figure.axes for line in ax.lines]
    assert lines[0] == lines[1] != lines[2] == lines[3]
