"""Pictures of pipelines: what is in them, by asking the figure itself."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from minipar.lab import draw
from minipar.lab.draw import pen
from minipar.lab.draw import pipeline as draw_pipeline
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.simulate import Costs, simulate
from tests.lab.figures import words as texts


def panels(figure):
    return [ax for ax in figure.axes if any(t.get_text() == "rank 0" for t in ax.get_yticklabels())]


def cells(ax):
    """Units of time covered by each colour, over all ranks, waiting left out."""
    total = {}
    for bars in ax.collections:
        if isinstance(bars, LineCollection):
            continue
        for path in bars.get_paths():
            fill, x = to_hex(bars.get_facecolor()[0]), path.vertices[:, 0]
            total[fill] = total.get(fill, 0) + x.max() - x.min()
    total.pop(pen.WAITS["fc"], None)
    return {fill: round(float(time), 6) for fill, time in total.items()}


def test_cells_cover_the_work_of_every_rank():
    """p M F and so on, whatever v is. Catches costs taken per stage, and lost cells."""
    names = {name: make(name, 4, 8) for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")}
    figure = draw_pipeline.compare(names, Costs(1.0, 1.5, 0.5))
    for name, ax in zip(names, panels(figure), strict=True):
        found = cells(ax)
        assert found[draw.KIND["forward"]] == 4 * 8
        if name in ("1f1b", "interleaved_1f1b"):
            assert found[draw.KIND["backward"]] == 4 * 8 * 2 and len(found) == 2
        else:
            assert found[draw.KIND["backward"]] == 4 * 8 * 1.5
            assert found[draw.KIND["weight_gradient"]] == 4 * 8 * 0.5
    assert len({ax.get_xlim() for ax in panels(figure)}) == 1


def test_a_cell_says_its_microbatch_and_stands_where_it_runs():
    """1F1B on two ranks by hand. Catches rows upside down and times of another unit."""
    (ax,) = panels(draw_pipeline.schedule(make("1f1b", 2, 2)))
    found = {(t.get_text(), *np.round(t.get_position(), 2)) for t in ax.texts}
    rank_0 = {("0", 0.5, 0.49), ("1", 1.5, 0.49), ("0", 5.0, 0.49), ("1", 8.0, 0.49)}
    rank_1 = {("0", 1.5, 1.49), ("0", 3.0, 1.49), ("1", 4.5, 1.49), ("1", 6.0, 1.49)}
    assert rank_0 | rank_1 <= found
    assert ax.get_ylim() == (2, 0)  # rank 0 on top


def test_the_finding_and_only_what_occurs():
    words = texts(draw_pipeline.compare({"First": make("gpipe", 4, 8), "Then": make("1f1b", 4, 8)}))
    assert {"First", "Then", "forward", "backward", "waits", "Simulated."} <= set(words)
    assert "idle 27 % of the time, 8 microbatches held" in words
    assert "idle 27 % of the time, 4 microbatches held" in words
    assert "number: microbatch" in words
    assert not any("weight" in w or "message" in w or "stage" in w for w in words)
    words = texts(draw_pipeline.schedule(make("zb_v", 2, 4)))
    assert {"weight gradient", "backward of the input", "zb_v"} <= set(words)
    assert any(w.startswith("▪ second stage") for w in words)
    assert ", 5 microbatches held" in draw_pipeline.finding(
        make("dualpipe", 4, 8), simulate(make("dualpipe", 4, 8))
    )  # PP + 1: each of two stages is a whole share


def test_messages_run_from_rank_to_rank_where_they_take_time():
    figure = draw_pipeline.schedule(make("gpipe", 3, 2), Costs(message=0.5))
    (ax,) = panels(figure)
    lines = [s for c in ax.collections if isinstance(c, LineCollection) for s in c.get_segments()]
    lines = [s for s in lines if s[0][0] != 0 and len(s) == 2 and s[0][1] % 1 != 0]
    down = [s for s in lines if s[1][1] > s[0][1]]
    assert len(lines) == 2 * 2 * 2 and len(down) == 4
    assert all(s[1][0] - s[0][0] == pytest.approx(0.5) for s in lines)
    assert "pp message" in texts(figure)


def test_ticks_count_the_stages_of_a_rank():
    """v = 3: one cell in three has one tick, one has two."""
    (ax,) = panels(draw_pipeline.schedule(make("looped_bfs", 2, 2, 3)))
    assert sum(len(line.get_xdata()) for line in ax.lines) == 2 * 2 * 2 * (0 + 1 + 2)


def test_a_forward_and_the_backward_beside_it_share_a_frame():
    """Catches frames around all neighbours, or around two actions of one stage."""

    def frames(plan):
        figure = draw_pipeline.schedule(plan, pairs=True)
        boxes = [box for box in panels(figure)[0].patches if box.get_linewidth() > 1]
        return sorted((round(box.get_x(), 3), round(box.get_width(), 3)) for box in boxes)

    assert frames(make("1f1b", 2, 4)) == []  # a stage per rank
    plan = Schedule.parse("a: microbatches 1; stages on ranks 0 0\nrank 0: 0F0 1F0 1B0 0B0")
    assert frames(plan) == []
    text = "a: microbatches 2; stages on ranks 0 0\nrank 0: 0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1"
    assert frames(Schedule.parse(text)) == [(1.0, 1.5)]  # 0F1 1B0


def test_predicted_above_measured():
    """A timeline of any clock, with other spans in it, drawn on the axis of the simulation."""
    plan = make("1f1b", 2, 2)
    slower = Costs(0.011, 0.012, 0.013)
    measured = Timeline(
        [*simulate(plan, slower).shifted(100.0), Span("optimizer", "AdamW", 0, 101, 102)]
    )
    measured.label = "measured"
    predicted = simulate(plan, Costs(0.01, 0.01, 0.01))
    figure = draw_pipeline.compare({"a": (plan, predicted), "b": (plan, measured)}, unit="ms")
    first, second = panels(figure)
    assert cells(first)[draw.KIND["forward"]] == pytest.approx(40)
    assert cells(second)[draw.KIND["forward"]] == pytest.approx(44)
    assert draw.KIND["optimizer"] not in cells(second)
    assert "Simulated. Measured." in texts(figure) and "milliseconds" in second.get_xlabel()


def test_memory_against_bubble_has_a_point_per_schedule():
    names = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "interleaved_zb")
    plans = {name: make(name, 4, 8) for name in names}
    figure = draw_pipeline.memory_against_bubble(plans, title="a")
    front, *dots = figure.axes[0].lines
    points = {(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots}
    assert [*zip(*front.get_data(), strict=True)] == [(4, 6.25)]
    assert points == {(8, 37.5), (4, 37.5), (4, 12.5), (7, 12.5), (4, 6.25)}
    assert "zb v, interleaved zb" in texts(figure)


def test_a_deadlock_is_said():
    stuck = "x: microbatches 1; stages on ranks 0 1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0"
    with pytest.raises(ValueError, match="deadlock"):
        draw_pipeline.schedule(Schedule.parse(stuck))


@pytest.mark.slow
def test_schedules_draw_themselves_and_equal_ones_equally():
    assert draw.DRAWN[Schedule] is draw_pipeline.schedule
    plan = make("dualpipe_v", 2, 4)
    assert draw.png(draw_pipeline.schedule(plan)) == draw.png(draw_pipeline.schedule(plan))
    draw_pipeline.schedule(make("naive", 1, 1))
