"""Pictures of one lesson show what the library does: whose piece is where, when, and who waits."""

import struct

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minipar.lab.draw import EXPOSED, KIND, RANK, compression, llama, pen, pipeline
from minipar.lab.draw import memory as memory_of
from minipar.lab.draw.context import mask, pieces
from minipar.lab.draw.holdings import PARTS, Phase, holdings
from minipar.lab.draw.mechanism import mechanism
from minipar.lab.draw.numbers import bits_of
from minipar.lab.draw.tensor import SAME, Matrix, formula
from minipar.lab.memory import MemoryHistory
from minipar.model.llama import PRESETS
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.simulate import Costs
from tests.lab.figures import boxes, fills, shapes, texts, words
from tests.lab.test_pictures import BOXES, HISTORY, MB

# ---------------------------------------------------------------------- compression
TRUTH = torch.tensor([3.0, -1.0, 0.5, 0.0, 2.0, 40.0])


def test_red_is_what_became_zero_and_the_error_is_that_of_all_numbers(monkeypatch):
    """Mutants: all versions drawn as the truth; red where the truth itself is zero."""
    monkeypatch.setattr(compression, "COUNT", 5)
    largest = torch.tensor([3.0, 0.0, 0.0, 0.0, 2.0, 0.0])
    figure = compression.kept({"truth": TRUTH, "largest": largest})
    blue, red = ([tall for *_, tall in boxes(figure, ink)] for ink in (KIND["backward"], EXPOSED))
    assert blue == pytest.approx((0.46 / 3 * largest[:5]).tolist())
    assert red == pytest.approx([0, -0.46 / 3, 0.23 / 3, 0, 0])
    error = (TRUTH - largest).norm() / TRUTH.norm()
    assert f"{100 * error:.2g} % off" in texts(figure) and "6 numbers" in texts(figure)


# ---------------------------------------------------------------------- context parallel
@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_cover_what_is_visible_exactly_once(size, order):
    """Mutants: keys of rank + step; positions of the second chunk taken for those of the first."""
    visible = torch.ones(24, 24, dtype=torch.bool).tril()
    covered = torch.zeros(24, 24, dtype=torch.int64)
    length = 24 // size // (2 if order == "zigzag" else 1)
    for piece in pieces(size, order, visible):
        assert len(piece.queries) == len(piece.keys) == length
        assert (piece.queries.diff() == 1).all() and (piece.keys.diff() == 1).all()
        covered[piece.queries[:, None], piece.keys] += 1
    assert covered.max() == 1 and (covered[visible] == 1).all()


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


# ---------------------------------------------------------------------- who holds what
SIZE = 4


@pytest.mark.parametrize(
    ("word", "filled"),  # the others of a block are pale
    [("whole", 16), ("own", 4), ("block", 4), ("summands", 0)]
    + [("block of summands", 4), ("nothing", 0)],
)
def test_a_box_is_filled_for_each_slice_that_a_rank_holds(word, filled):
    figure = holdings({"a step": [Phase("forward", word, "nothing", "whole")]}, SIZE)
    inks = [to_hex(p.get_facecolor()) for p in shapes(figure) if p.get_fill() and not p.get_hatch()]
    assert [inks.count(pen.HELD[part]) for part in PARTS] == [filled, 0, SIZE * SIZE]


def test_the_own_slices_of_all_ranks_lie_on_a_diagonal():
    figure = holdings({"a step": [Phase("step", "own", "nothing", "nothing")]}, SIZE)
    _, x, y, *_ = zip(*boxes(figure, pen.HELD["weights"]), strict=True)
    assert len({*x}) == len({*y}) == len(x) == SIZE


# ---------------------------------------------------------------------- the model
@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_are_the_whole(name):
    """A part that is forgotten, or tied embeddings counted twice, makes another sum."""
    parts = llama.parameters(PRESETS[name])
    assert sum(parts.values()) == PRESETS[name].num_parameters
    assert parts.keys() == llama.PARTS.keys()


# ---------------------------------------------------------------------- mechanisms
def test_a_box_has_the_colour_of_what_it_holds_and_arrows_run_between_facing_edges():
    figure = mechanism(BOXES, [("g", "sum"), ("sum", "step", "then")], title="A step")
    inks = [pen.HELD["gradients"], pen.AXIS["dp"], pen.PAPER]
    assert fills(figure, FancyBboxPatch) == inks
    g, total, step = (p.get_bbox() for p in shapes(figure, FancyBboxPatch))
    across, down = (p._posA_posB for p in shapes(figure, FancyArrowPatch))
    assert g.x1 < across[0][0] < across[1][0] < total.x0
    assert total.y0 > down[0][1] > down[1][1] > step.y1
    assert all(box.said in pen.in_words(figure) for box in BOXES.values())


# ---------------------------------------------------------------------- memory
def test_the_area_is_what_was_measured():
    """Mutant: layers that are not stacked."""
    (area,) = (ax for ax in memory_of.ladder({"": HISTORY}).axes if ax.collections)
    tops = [c.get_paths()[0].get_extents().y1 for c in area.collections]
    assert tops == pytest.approx([8, 10, 16, 40])  # weights, + gathered, + gradients, + activations
    inks = [to_hex(c.get_facecolor()[0]) for c in area.collections]
    known = memory_of.CATEGORY
    assert inks == [known[c] for c in ("parameters", "gathered", "gradients", "activations")]
    names = (tick.get_text() for tick in area.get_xticklabels())
    ticks = dict(zip(names, area.get_xticks(), strict=True))
    assert ticks == {"forward": 0.25, "backward": 0.75}  # equally wide


def test_a_peak_of_a_moment_is_not_lost():
    """A thousand samples a pixel: the highest is drawn."""
    n = 200_000
    spike = [MB] * n
    spike[77_777] = 50 * MB
    history = MemoryHistory({"activations": spike}, phases=["forward"] * n)
    [area] = [ax for ax in memory_of.ladder({"": history}).axes if ax.collections]
    path = area.collections[0].get_paths()[0]
    assert path.get_extents().y1 == pytest.approx(50) and len(path.vertices) < 20_000


# ---------------------------------------------------------------------- numbers
@pytest.mark.parametrize("value", [0.1, -3.0, 1e-7, 65504.0])
def test_bits_are_those_of_the_number(value):
    """Beside Python's own packing of IEEE 754; bf16 is the upper half of float32, rounded."""
    single = f"{struct.unpack('>I', struct.pack('>f', value))[0]:032b}"
    half = f"{struct.unpack('>H', struct.pack('>e', value))[0]:016b}"
    assert bits_of(value, torch.float32) == single
    assert bits_of(value, torch.float16) == half
    rounded = int(single[:16], 2) + (int(single[16:], 2) > 0x8000)
    assert int(bits_of(value, torch.bfloat16), 2) == rounded


# ---------------------------------------------------------------------- pipelines
def panels(figure):
    return [ax for ax in figure.axes if any(t.get_text() == "rank 0" for t in ax.get_yticklabels())]


def cells(ax):
    """Units of time covered by each colour, over all ranks, waiting left out."""
    total = {}
    for bar in ax.patches:
        fill = to_hex(bar.get_facecolor())
        total[fill] = round(total.get(fill, 0) + bar.get_width(), 6)
    total.pop(pen.WAITS["fc"])
    return total


def test_cells_cover_the_work_of_every_rank():
    """p M F and so on, whatever v is. Catches costs taken per stage, and lost cells."""
    names = {name: make(name, 4, 8) for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")}
    figure = pipeline.compare(names, Costs(1.0, 1.5, 0.5))
    whole = {KIND["forward"]: 32, KIND["backward"]: 64}
    split = {KIND["forward"]: 32, KIND["backward"]: 48, KIND["weight_gradient"]: 16}
    for name, ax in zip(names, panels(figure), strict=True):
        assert cells(ax) == (split if name.startswith("zb") else whole)
    assert len({ax.get_xlim() for ax in panels(figure)}) == 1


def test_a_cell_says_its_microbatch_and_stands_where_it_runs():
    """1F1B on two ranks by hand. Catches rows upside down and times of another unit."""
    (ax,) = panels(pipeline.schedule(make("1f1b", 2, 2)))
    found = {(t.get_text(), *np.round(t.get_position(), 1)) for t in ax.texts}
    rank_0 = {("0", 0.5, 0.5), ("1", 1.5, 0.5), ("0", 5.0, 0.5), ("1", 8.0, 0.5)}
    rank_1 = {("0", 1.5, 1.5), ("0", 3.0, 1.5), ("1", 4.5, 1.5), ("1", 6.0, 1.5)}
    assert rank_0 | rank_1 <= found
    assert ax.get_ylim() == (2, 0)  # rank 0 on top


# ---------------------------------------------------------------------- cut matrices
def patches(figure) -> list[tuple]:
    return boxes(figure, *RANK, SAME)


def test_columns_stand_side_by_side_rows_from_top_to_bottom():
    """Mutants: the two swapped; row 0 at the bottom."""
    columns = formula([Matrix("A", "D", "F", cut="columns")])
    (first, x0, y0, w0, _), (second, x1, y1, _, _) = patches(columns)
    assert (first, second) == (RANK[0], RANK[1]) and y0 == y1
    assert x1 == pytest.approx(x0 + w0)
    rows = formula([Matrix("B", "F", "D", cut="rows")])
    (_, x0, y0, _, h0), (_, x1, y1, _, h1) = patches(rows)
    assert x0 == x1 and y0 == pytest.approx(y1 + h1) and h0 == h1
