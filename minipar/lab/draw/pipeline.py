"""Pictures of pipeline schedules: a row per rank, a cell per action, messages from row to row.

A cell has the colour of its kind of work and, where all cells have room, the number of its
microbatch. Ticks at its foot count which of the rank's stages it belongs to (none: the first one).
Measured timelines are drawn in the same way, if their spans have names of actions. In a notebook
that imports this module, schedules draw themselves.
"""

from collections.abc import Collection, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import display, pen
from minipar.lab.draw.pen import AXIS, KIND, LEFT, MUTED, PAPER, RIGHT, WIDTH
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live
from minipar.parallel.pipeline.simulate import SPAN_KIND, Costs, bubble, simulate

LETTERS = 6.0  # points; smaller numbers are left out


def schedule(schedule: Schedule, costs: Costs | None = None, *, title: str | None = None) -> Figure:
    """Draw one schedule; `costs` are of a rank's whole share of the model.

    Raises ValueError if the schedule deadlocks.
    """
    return compare({title or schedule.name: schedule}, costs)


def compare(
    panels: Mapping[str, Schedule | tuple[Schedule, Timeline]],
    costs: Costs | None = None,
    *,
    unit: str = "F",
) -> Figure:
    """Draw schedules one below the other on one time axis, `{title: schedule}`.

    A schedule alone is simulated under `costs`; a pair (schedule, timeline) shows that timeline,
    such as a measured one. `unit` names what the axis counts: by default forwards of a rank's whole
    share, which take 1 in `Costs()`; with "ms", seconds become milliseconds.
    Raises ValueError for a deadlock.
    """
    shown = {}
    for title, panel in panels.items():
        if isinstance(panel, Schedule):
            panel = panel, simulate(panel, costs)
        spans = [span for span in panel[1] if span.name[0].isdigit()]  # named as actions
        shown[title] = panel[0], Timeline(spans, panel[1].label).shifted()
    scale = 1e3 if unit == "ms" else 1.0
    end = 1.005 * scale * max(t.duration for _, t in shown.values())
    row = min(0.34, max(0.16, 6.5 / sum(s.num_ranks for s, _ in shown.values())))  # inches
    inch = scale * (WIDTH - LEFT - RIGHT) / end  # of a unit of the timelines
    sizes = {title: _letters(t, inch, row) for title, (_, t) in shown.items()}
    heights = [row * s.num_ranks for s, _ in shown.values()]
    label = "milliseconds" if unit == "ms" else f"time, in units of {unit}"
    labels = [t.label for _, t in shown.values()]
    figure, axes = pen.stack(heights, _legend(shown.values(), max(sizes.values())), label, labels)
    for ax, (title, (plan, t)) in zip(axes, shown.items(), strict=True):
        ax.set_xlim(0, end)
        ax.set_ylim(plan.num_ranks, 0)
        _cells(ax, plan, t, scale, sizes[title])
        ticks = {rank + 0.5: f"rank {rank}" for rank in range(plan.num_ranks)}
        ax.set_yticks([*ticks], [*ticks.values()], color=MUTED, fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        length = f"{1e3 * t.duration:.0f} ms, " if unit == "ms" else ""
        pen.headline(ax, title, length + finding(plan, t))
    return figure


def finding(schedule: Schedule, timeline: Timeline) -> str:
    """Return the line of a picture: "idle 27 % of the time, 4 microbatches held"."""
    share = bubble(timeline)
    # Activations of one microbatch in 1/p of the model count as one.
    held = max(peak_live(schedule)) * schedule.num_ranks / schedule.num_stages
    live = f"{held:.3g} microbatch{'' if held == 1 else 'es'} held"
    return f"idle {100 * share / (1 + share):.0f} % of the time, {live}"


# ---------------------------------------------------------------------- rows and cells
def _letters(t: Timeline, inch: float, row: float) -> float:
    """Return the size of all numbers in points, 0 if one of them has no room that can be read.

    `inch` is the length of a unit of the timeline, `row` the height of a row in inches.
    """
    spans = [span for span in t if span.kind != "comm"]
    digits = max(len(str(Action.parse(span.name).microbatch)) for span in spans)
    size = min(8.0, 36 * row, 72 * inch * min(s.duration for s in spans) / (0.66 * digits + 0.3))
    return size if size >= LETTERS else 0.0


def _cells(ax: Axes, schedule: Schedule, timeline: Timeline, scale: float, size: float) -> None:
    for rank in range(schedule.num_ranks):
        pen.rectangle(ax, 0, rank + 0.06, scale * timeline.duration, 0.88, **pen.WAITS)
    for span in timeline:
        action, at = Action.parse(span.name), span.rank
        start, wide = scale * span.start, scale * span.duration
        if span.kind == "comm":  # from the edge of one row to the near edge of the other
            down = schedule.peer(action) > at
            ys = at + (0.94 if down else 0.06), schedule.peer(action) + (0.06 if down else 0.94)
            ax.plot([start, start + wide], ys, color=AXIS["pp"], lw=1.1, zorder=1.5)
            continue
        fill, said = KIND[SPAN_KIND[action.kind]], action.microbatch if size else ""
        pen.cell(ax, (start, at + 0.06, wide, 0.88), said, fill, size, ec=PAPER, lw=0.7, zorder=2)
        if size:
            ticks = "▪" * schedule.stages_on(at).index(action.stage)
            style = {"size": 4, "ha": "center", "color": pen.ink_on(fill)}
            pen.text(ax, start + wide / 2, at + 0.8, ticks, **style)


def _legend(shown: Collection[tuple[Schedule, Timeline]], size: float) -> list[pen.Entry]:
    seen = {Action.parse(span.name).kind for _, t in shown for span in t}
    split = " of the input" if "B" not in seen else " (of the input where split)"
    entries: dict[str, pen.Entry] = {
        "F": (KIND["forward"], "forward"),
        "B I": (KIND["backward"], "backward" + split * ("I" in seen)),
        "W": (KIND["weight_gradient"], "weight gradient"),
        "F B I W": (pen.WAITS, "waits"),
        "SF SB": (AXIS["pp"], "pp message"),
    }
    drawn = [entry for kinds, entry in entries.items() if seen & {*kinds.split()}]
    if size:
        drawn.append(("", "number: microbatch"))
        if any(len(plan.stages_on(0)) > 1 for plan, _ in shown):
            drawn.append(("", "▪ second stage of its rank, ▪▪ third ..."))
    return drawn


display.DRAWN[Schedule] = schedule
display.register()
