"""Figures of the core (colours, timelines, meshes, curves): where things stand, and how long."""

import io
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch
from PIL import Image

from minipar.comm import collectives
from minipar.comm.mesh import Mesh
from minipar.comm.plans import ALL_REDUCE
from minipar.lab import draw
from minipar.lab.draw import meshes, pen
from minipar.observe.timeline import Span, Timeline
from tests.lab.figures import shapes, step, words


def bars_of(figure):
    """Bars of timelines by their fill; outlines by their edge: (left, low, right, top)."""
    found = defaultdict(list)
    for bars in (bars for ax in figure.axes for bars in ax.collections):
        inks = bars.get_facecolor() if len(bars.get_facecolor()) else bars.get_edgecolor()
        found[to_hex(inks[0])] += [path.get_extents().extents for path in bars.get_paths()]
    return found


def drawn(figure):
    """Milliseconds of bars by colour, over all panels and ranks."""
    found = bars_of(figure).items()
    return {ink: round(float(sum(b[2] - b[0] for b in of)), 3) for ink, of in found}


# ---------------------------------------------------------------------- colours
def test_a_name_has_one_colour():
    """Mutant: one colour for the axis replica, and for all ranks beside it in a legend."""
    assert draw.colour("dp+cp") == draw.AXIS["dp"] and draw.colour("tp") == draw.AXIS["tp"]
    assert draw.colour("my_group") == draw.AXIS["world"] == draw.colour("replica+dp")
    assert draw.colour("replica") != draw.colour("replica+dp")
    parts = {"AdamW": "optimizer state", "parameters": "weights", "gradient": "gradients"}
    assert all(pen.held(name) == pen.HELD[part] for name, part in parts.items())
    assert pen.held("weight_gradient") is None  # a kind of work


def test_numbers_are_written_out():
    """Mutants: 1e+03 for 999.7, and for 999,700 bytes 1e+03 kB: a unit chosen before rounding."""
    numbers = {0.0123: "0.0123", 12.34: "12.3", 999.4: "999", 999.7: "1,000", 1234.5: "1,234"}
    assert all(draw.pen.number(value) == said for value, said in numbers.items())
    sizes = (999, 1500, 999_400, 999_700, 999_700_000, 2_500_000_000_000)
    said = ["999 B", "1.5 kB", "999 kB", "1 MB", "1 GB", "2,500 GB"]
    assert [*map(draw.pen.num_bytes, sizes)] == said


# ---------------------------------------------------------------------- timelines
def test_bars_are_as_long_as_the_work():
    """By hand from `step`. Catches exposed drawn as hidden, ranks left out, lost spans."""
    naive, overlapped = drawn(draw.timeline(step(False))), drawn(draw.timeline(step(True)))
    for bars in (naive, overlapped):
        of_kind = [bars[draw.KIND[kind]] for kind in ("forward", "backward", "optimizer")]
        assert of_kind == [4 * 40, 4 * 80, 4 * 10]
    dp, waits = draw.AXIS["dp"], pen.WAITS["fc"]
    assert naive[draw.EXPOSED] == naive[dp] == naive[waits] == 4 * 60
    assert overlapped[draw.EXPOSED] == overlapped[dp] == overlapped[waits] == 4 * 15
    assert not naive[pen.pale(dp)] and overlapped[pen.pale(dp)] == 4 * 45

    # One collective is cut where computing ends.
    t = Timeline([Span("compute", "x", 0, 0, 0.02), Span("comm", "send", 0, 0.01, 0.05, "pp")])
    bars = drawn(draw.timeline(t))
    assert (bars[pen.pale(draw.AXIS["pp"])], bars[draw.EXPOSED]) == (10, 30)


def test_ranks_that_wait_longer_than_others_are_the_finding():
    slow = [Span("forward", "x", rank, 0, 1.0 if rank == 2 else 0.4) for rank in range(3)]
    assert draw.finding(Timeline(slow), "") == "1000 ms, ranks 0 and 1 wait 60 % of it"
    assert draw.finding(Timeline(slow[1:]), "") == "1000 ms, rank 1 waits 60 % of it"


def test_panels_share_the_time_axis():
    figure = draw.before_after({"a": step(False), "b": step(True)})
    said = "a. 190 ms a step, nothing hidden. b. 145 ms"
    assert pen.in_words(figure).startswith(said)
    a, b = (ax for ax in figure.axes if ax.collections)
    assert a.get_xlim() == b.get_xlim() and a.get_xlim()[1] >= 190
    ticks = dict(zip((t.get_text() for t in a.get_yticklabels()), a.get_yticks(), strict=True))
    assert [*ticks] == [f"rank {r}" for r in range(4)]
    assert ticks["rank 0"] > ticks["rank 3"]  # rank 0 on top


def test_copies_run_in_a_lane_of_their_own():
    """Mutant: copies drawn upon the collectives that are in flight at the same time."""
    talk = [("all_gather", "dp"), ("to_host", "host")]
    both = [Span("comm", name, 0, 0.0, 0.02, axis, 10**6) for name, axis in talk]
    bars = bars_of(draw.timeline(Timeline([Span("forward", "0", 0, 0.0, 0.01), *both])))
    work, dp, copy = draw.KIND["forward"], draw.AXIS["dp"], draw.KIND["copy"]
    for lower, upper in ((pen.pale(copy), pen.pale(dp)), (copy, dp), (dp, work)):
        assert max(b[3] for b in bars[lower]) <= min(b[1] for b in bars[upper])


def test_all_blocks_have_a_number_or_none():
    """Mutants: numbers where they fit; a short call after a block takes its number away."""
    calls = [Span("forward", "forward", 0, 1e-3 * t, 1e-3 * t + 1e-5) for t in (10, 20)]
    for spans in (step(True, ranks=1).spans, [*step(True, ranks=1).spans, *calls]):
        said = words(draw.timeline(Timeline(spans)))
        assert [w for w in said if w.isdigit()] == list("01233210") and "number: layer" in said
    short = Span("forward", "layers.9", 0, 0.141, 0.143)
    crowded = words(draw.timeline(Timeline([*step(True, ranks=1).spans, short])))
    assert not [w for w in crowded if w.isdigit()] and "number: layer" not in crowded


@pytest.mark.slow
def test_a_hundred_thousand_kernels_are_drawn_as_what_can_be_seen():
    """Catches a drawing of every kernel by itself, and a merging that loses their time."""
    kernels = [Span("forward", "gemm", 0, i * 1e-5, i * 1e-5 + 0.95e-5) for i in range(50_000)]
    figure = draw.timeline(Timeline(kernels))
    assert sum(map(len, bars_of(figure).values())) < 2000
    assert drawn(figure)[draw.KIND["forward"]] == pytest.approx(500, rel=0.01)


def test_messages_are_bars_of_their_own_however_short():
    """Mutants: neighbours of one size are joined; half a pixel is drawn, or not, as it falls."""
    work = [Span("forward", "0", 0, 0.0, 0.1), Span("backward", "0", 0, 0.1, 0.4)]
    ends = [0.06 + 0.006 * i for i in range(6)]  # one after the other, of the same bytes
    queue = [Span("comm", "all_reduce", 0, e - 0.006, e, "dp", 20_000_000) for e in ends]
    starts = np.linspace(0.11, 0.39, 14)
    short = [Span("comm", "all_reduce", 0, s, s + 1e-5, "dp", 9) for s in starts]
    dp = pen.colour("dp")
    for spans, ink in ((queue, pen.pale(dp)), (short, pen.readable(dp))):
        picture = Image.open(io.BytesIO(pen.png(draw.timeline(Timeline(work + spans)))))
        near = np.abs(np.array(picture.convert("RGB")) / 255 - to_rgb(ink)).max(-1) < 0.15
        rows = (np.diff(near.astype(int), axis=1) == 1).sum(1)
        assert rows.max() == len(spans)


# ---------------------------------------------------------------------- meshes, collectives
def _run_verb(verb, inputs):
    mesh = Mesh(dp=4)
    result = getattr(collectives, verb)(torch.tensor(inputs[mesh.rank]), mesh.dp)
    return None if result is None else result.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("verb", meshes.SENTENCE)
def test_pictures_of_collectives_tell_the_truth(ranks, verb):
    """Runs the verb on 4 real ranks and compares with every cell of the picture.

    Block b of rank r holds 10 ** r * (b + 1): sums of ranks show as digits. Catches a transposed
    all-to-all, a wrong root, a block in the wrong slot.
    """
    before, after = meshes.blocks_of(verb, 4)

    def number(cell):
        sources, block = cell
        return sum(10**r for r in sources) * (block + 1)

    inputs = [[number(slots[b]) if b in slots else 0 for b in range(4)] for slots in before]
    if verb in ("all_gather", "gather"):
        inputs = [[number(cell) for cell in slots.values()] for slots in before]
    results = ranks(4).run(_run_verb, verb, inputs)
    for rank, (slots, got) in enumerate(zip(after, results, strict=True)):
        if slots:
            assert got == [number(slots[b]) for b in sorted(slots)], (rank, slots)
    cells = sum(len(slots) for side in (before, after) for slots in side)
    assert sum(w.lstrip("Σ").isdigit() for w in words(draw.collective(verb, 4))) == cells


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_every_message_is_a_line(name):
    """Mutants: a message of a rank to itself is drawn; empty rounds are counted."""
    each = [ALL_REDUCE[name](24, rank, 4) for rank in range(4)]
    figure = meshes.schedules({name: each}, numel=24)
    sent = [m for rank, plan in enumerate(each) for s in plan for m in s.sends if m.peer != rank]
    assert len(shapes(figure, FancyArrowPatch)) == len(sent)
    busy = sum(any(one.sends for one in each) for each in zip(*each, strict=True))
    assert f"{busy} round{'s' * (busy > 1)}" in words(figure)


# ---------------------------------------------------------------------- curves and bars
def names_of(figure) -> dict[str, float]:
    """The height of each name at the end of a curve."""
    return {t.get_text(): t.get_position()[1] for t in figure.axes[0].texts}


def test_curves_name_themselves_and_do_not_hide_each_other():
    loss = [3.0 / (i + 1) for i in range(20)]
    losses = {"one device": loss, "4 ranks": loss, "no sync": [v + 1 for v in loss]}
    figure = draw.loss_curves(losses)
    widths = [line.get_linewidth() for line in figure.axes[0].get_lines()]
    assert widths == sorted(set(widths), reverse=True)  # each is seen beside the next
    at = names_of(figure)
    assert abs(at["one device"] - at["4 ranks"]) > 0.04  # pushed apart
    assert at["no sync"] > at["4 ranks"]


def test_a_curve_that_ends_in_nan_keeps_its_name():
    """Beside its last point that can be seen. Mutant: a name at NaN, which is not drawn, and which
    lets the names after it cover each other."""
    nan, falls = math.nan, [3.0, 2.0, 1.0]
    losses = {"lost": [3.0, 2.0, nan], "never": [nan] * 3, "a": falls, "b": falls}
    figure = draw.loss_curves(losses)
    heights = names_of(figure)
    assert all(0 <= heights[name] <= 1.2 for name in losses)
    assert heights["lost"] > heights["b"] and abs(heights["a"] - heights["b"]) > 0.04
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_ls() == ":")
    assert line.get_xdata()[0] < 0.6  # from where the curve is lost
