"""Pictures of memory: they show what was measured, on one scale, in the colours of the project."""

import math

import pytest
from matplotlib.colors import to_hex

from minipar.lab import draw
from minipar.lab.draw import memory as draw_memory
from minipar.lab.draw import pen
from minipar.lab.memory import MemoryHistory
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from tests.lab.figures import texts, words

MB = 10**6
HISTORY = MemoryHistory(
    1,
    [10.0, 10.01, 10.02, 10.03],
    {
        "activations": [0, 30 * MB, 5 * MB, 0],
        "parameters": [8 * MB] * 4,
        "gradients": [0, 0, 8 * MB, 8 * MB],
        "echo": [0, 2 * MB, 0, 0],
    },
    {"optimizer": [0, 0, 16 * MB, 16 * MB]},
    ["forward", "forward", "backward", "backward"],
)
TIMELINE = Timeline(
    [
        Span("forward", "layers.0", 1, 10.0, 10.01),
        Span("backward", "layers.0", 1, 10.01, 10.03),
        Span("comm", "to_host", 1, 10.02, 10.03, "host", 8 * MB),
        Span("comm", "all_reduce", 0, 10.02, 10.06, "dp", 8 * MB),
    ],
    "measured",
)
FORM = {"parameters": 8 * MB, "gradients": 0.0, "optimizer": 16.0 * MB}


def test_the_area_is_what_was_measured():
    """Mutant: layers that are not stacked, or a peak lost between two pixels."""
    figure = draw_memory.memory(HISTORY, TIMELINE, note="measured")
    area = next(ax for ax in figure.axes if len(ax.collections) == 4)
    tops = [c.get_paths()[0].get_extents().y1 for c in area.collections]
    assert tops == pytest.approx([8, 16, 16, 40])  # parameters, + gradients, + echo, + activations
    colours = [to_hex(c.get_facecolor()[0]) for c in area.collections]
    known = draw_memory.CATEGORY
    assert colours[0] == known["parameters"] and colours[1] == known["gradients"]
    assert colours[3] == known["activations"]
    ticks = dict(
        zip((t.get_text() for t in area.get_xticklabels()), area.get_xticks(), strict=True)
    )
    assert ticks == {"forward": 0.25, "backward": 0.75}  # equally wide
    said = texts(figure)
    assert "at most 40 MB, 30 MB of it activations; the host holds 16 MB" in said
    assert "Measured." in said and "closed" not in said
    assert {"weights", "echo", "forward", "backward", "copies from and to the host, hidden"} <= {
        *words(figure)
    }


def test_the_timeline_stands_above_the_allocations_of_its_time():
    """Each phase is half of the axis, and so is its work. Mutant: milliseconds."""
    strip = next(ax for ax in draw_memory.memory(HISTORY, TIMELINE).axes if ax.get_xlim()[1] == 1e3)
    ends = {}
    for bars in strip.collections:
        for path in bars.get_paths():
            ends[to_hex(bars.get_facecolor()[0])] = path.get_extents().intervalx
    assert ends[draw.KIND["forward"]] == pytest.approx([0, 250])
    assert ends[draw.KIND["backward"]] == pytest.approx([250, 750])  # the last sample


def test_a_peak_of_a_moment_is_not_lost():
    """A thousand samples a pixel: the highest is drawn."""
    n = 200_000
    spike = [MB] * n
    spike[77_777] = 50 * MB
    history = MemoryHistory(0, [i / n for i in range(n)], {"activations": spike})
    [area] = [ax for ax in draw_memory.memory(history).axes if ax.collections]
    path = area.collections[0].get_paths()[0]
    assert path.get_extents().y1 == pytest.approx(50) and len(path.vertices) < 20_000


def test_a_closed_form_is_a_bar_on_the_same_scale():
    figure = draw_memory.memory(HISTORY, closed_form=FORM, title="ddp")
    bar = next(ax for ax in figure.axes if [p for p in ax.patches if p.get_height() == 16])
    area = next(ax for ax in figure.axes if ax.collections)
    assert bar.get_ylim() == area.get_ylim()
    assert [p.get_height() for p in bar.patches] == [8, 16]
    said = texts(figure)
    assert "24 MB" in said and "ddp" in said


def test_rungs_of_a_ladder_share_their_scales():
    small = MemoryHistory(0, [0.0, 0.005], {"parameters": [MB, MB]})
    figure = draw_memory.ladder({"ddp": HISTORY, "fsdp": small}, closed_forms={"ddp": FORM})
    areas = [ax for ax in figure.axes if ax.collections]
    assert len(areas) == 2 and areas[0].get_ylim() == areas[1].get_ylim()
    assert areas[0].get_xlim() == areas[1].get_xlim() == (0, 1)


def test_categories_can_be_told_apart():
    """In the order of the stack, where neighbours touch: also in grey print."""
    inks = [*draw_memory.CATEGORY.values()]
    assert len(set(inks)) == len(inks)

    def rgb(ink):
        return [int(ink[i : i + 2], 16) for i in (1, 3, 5)]

    for a, b in zip(inks, inks[1:], strict=False):
        assert math.dist(rgb(a), rgb(b)) > 50


def test_copies_run_in_a_lane_of_their_own():
    """Mutant: copies drawn upon the collectives that are in flight at the same time."""
    both = Timeline(
        [
            Span("forward", "0", 0, 0.0, 0.01),
            Span("comm", "all_gather", 0, 0.0, 0.02, "dp", MB),
            Span("comm", "to_host", 0, 0.0, 0.02, "host", MB),
        ]
    )
    [ax, *_] = draw.timeline(both).axes
    bands = {}
    for collection in ax.collections:
        if not len(collection.get_facecolor()):
            continue  # an outline
        for path in collection.get_paths():
            box = path.get_extents()
            bands.setdefault(to_hex(collection.get_facecolor()[0]), []).append((box.y0, box.y1))
    [copies], [collectives] = bands[pen.pale(draw.KIND["copy"])], bands[pen.pale(draw.AXIS["dp"])]
    assert copies[1] <= collectives[0]
    exposed = sorted(bands[draw.KIND["copy"]] + bands[draw.AXIS["dp"]])
    assert len(exposed) == 2 and exposed[0][1] <= exposed[1][0]
    assert exposed[1][1] <= bands[draw.KIND["forward"]][0][0]
