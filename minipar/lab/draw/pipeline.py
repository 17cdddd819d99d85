"""Pictures of pipeline schedules: a row per rank, a cell per action, messages from row to row.

A cell has the colour of its kind of work and the number of its microbatch; ticks at its foot count
which of the rank's stages it belongs to (none: the first one). Measured timelines whose spans are
named as actions are drawn in the same way, so that predicted and measured stand one above another.
Where this module is imported in a notebook, schedules draw themselves.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import display, pen
from minipar.lab.draw.charts import label_points
from minipar.lab.draw.pen import AXIS, GRID, INK, KIND, LEFT, MUTED, PAPER, RIGHT, WIDTH
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live
from minipar.parallel.pipeline.simulate import SPAN_KIND, Costs, bubble, simulate


def schedule(
    schedule: Schedule, costs: Costs | None = None, *, title: str | None = None, pairs: bool = False
) -> Figure:
    """One schedule under `costs`, which are those of a rank's whole share of the model.

    With `pairs`, a forward and the whole backward of another stage right after it share a frame.
    Raises ValueError if the schedule deadlocks.
    """
    figure = compare({title or schedule.name: schedule}, costs)
    if pairs:
        _frame_pairs(figure.axes[0], simulate(schedule, (costs or Costs()).per_rank(schedule)))
    return figure


def _frame_pairs(ax: Axes, timeline: Timeline) -> None:
    for rank in timeline.ranks:
        row = [span for span in timeline.select(rank=rank).spans if span.kind != "comm"]
        for one, other in pairwise(row):
            f, b = _action(one), _action(other)
            touch = other.start - one.end < 1e-9
            if touch and (f.kind, b.kind) == ("F", "B") and f.stage != b.stage:
                box = one.start, rank + 0.06, other.end - one.start, 0.88
                pen.rectangle(ax, *box, fc="none", ec=INK, lw=1.3, zorder=5)


def compare(
    panels: Mapping[str, Schedule | tuple[Schedule, Timeline]],
    costs: Costs | None = None,
    *,
    unit: str = "F",
) -> Figure:
    """Schedules one below the other on one time axis, `{title: schedule}`.

    A schedule alone is simulated under `costs`; a pair (schedule, timeline) shows that timeline,
    such as a measured one. `unit` names what the axis counts: by default forwards of a rank's whole
    share, which take 1 in `Costs()`; with "ms", seconds become milliseconds.
    Raises ValueError for no panels, for a deadlock, and for a timeline without spans of actions.
    """
    if not panels:
        raise ValueError("there is no schedule to draw")
    shown = {}
    for title, panel in panels.items():
        if isinstance(panel, Schedule):
            panel = panel, simulate(panel, (costs or Costs()).per_rank(panel))
        shown[title] = panel[0], _actions(panel[1], title)
    scale = 1e3 if unit == "ms" else 1.0
    end = max(t.duration for _, t in shown.values()) * scale
    row = min(0.34, max(0.16, 6.5 / sum(s.num_ranks for s, _ in shown.values())))  # inches
    heights = [row * s.num_ranks for s, _ in shown.values()]
    label = "milliseconds" if unit == "ms" else f"time, in units of {unit}"
    labels = [t.label for _, t in shown.values()]
    figure, axes = pen.stack(heights, _legend(shown.values()), label, labels)
    for ax, (title, (plan, t)) in zip(axes, shown.items(), strict=True):
        ax.set_xlim(0, 1.005 * end)
        ax.set_ylim(plan.num_ranks, 0)
        _cells(ax, plan, t, scale)
        ranks = range(plan.num_ranks)
        names = [f"rank {rank}" for rank in ranks]
        ax.set_yticks([rank + 0.5 for rank in ranks], names, color=MUTED, fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        place = {"va": "bottom", "clip_on": False, "color": INK}
        ax.text(0, -0.1, title, size=12, weight="bold", **place)
        said = finding(plan, t)
        said = f"{1e3 * t.duration:.0f} ms, {said}" if unit == "ms" else said
        ax.text(1.005 * end, -0.1, said, gid=pen.FINDING, size=10, ha="right", **place)
    return figure


def finding(schedule: Schedule, timeline: Timeline) -> str:
    """Return the line of a picture: "idle 27 % of the time, 4 microbatches held"."""
    share = bubble(timeline)
    held = _held(schedule)
    live = f"{held:.3g} microbatch{'' if held == 1 else 'es'} held"
    return f"idle {100 * share / (1 + share):.0f} % of the time, {live}"


def memory_against_bubble(
    schedules: Mapping[str, Schedule], *, title: str = "Activations held against idle time"
) -> Figure:
    """One point per schedule: activations held at most, and its bubble in percent.

    Activations of one microbatch in 1/p of the model are one. Raises ValueError for no schedules.
    """
    if not schedules:
        raise ValueError("there is no schedule to draw")
    points: dict[tuple[float, float], list[str]] = {}
    for name, plan in schedules.items():
        t = simulate(plan, Costs().per_rank(plan))
        points.setdefault((_held(plan), round(100 * bubble(t), 6)), []).append(name)
    width, height = 7.2, 4.4
    figure = pen.figure(width, height, title)
    ax = pen.panel(figure, 0.75, 0.62, width - 1.0, height - 1.3)
    ax.grid(color=GRID, lw=0.8)
    ax.set_xlim(0, 1.32 * max(x for x, _ in points))
    ax.set_ylim(0, 1.12 * max(y for _, y in points) or 1.0)
    for x, y in points:
        ax.plot(x, y, "o", color=KIND["backward"], ms=7, mec=PAPER, mew=1, zorder=4, clip_on=False)
    label_points(
        ax, [*points], [", ".join(names) for names in points.values()], [INK] * len(points)
    )
    held = "activations held, in microbatches of a rank's share of the model"
    pen.label(ax, held, "bubble, % of computing", above=1.03)
    return figure


def _held(schedule: Schedule) -> float:
    """Peak activations in units of one microbatch in 1/p of the model."""
    return max(peak_live(schedule)) * schedule.num_ranks / schedule.num_stages


# ---------------------------------------------------------------------- rows and cells
def _actions(timeline: Timeline, title: str) -> Timeline:
    """The spans that are actions, from 0 s on."""
    spans = [span for span in timeline if _action(span) is not None]
    if not any(span.kind != "comm" for span in spans):
        raise ValueError(f"{title} has no spans named as actions, such as 2F0")
    return Timeline(spans, timeline.label).shifted()


def _action(span: Span) -> Action | None:
    try:
        return Action.parse(span.name)
    except ValueError:
        return None


def _cells(ax: Axes, schedule: Schedule, timeline: Timeline, scale: float) -> None:
    p = schedule.num_ranks
    ax.broken_barh([(0, scale * timeline.duration)], (0.06, p - 0.12), facecolor=KIND["idle"], lw=0)
    ax.hlines(range(1, p), 0, scale * timeline.duration, color=PAPER, lw=4, zorder=1)
    inches = (WIDTH - LEFT - RIGHT) / ax.get_xlim()[1]  # of a unit of time
    size = _label_size(timeline, scale * inches, pen.inches_of(ax) / p)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    ticks, lines = [], []
    narrowest = scale * inches * min(s.duration for s in timeline if s.kind != "comm")
    has_room = 0.045 * max(len(schedule.stages_on(rank)) for rank in range(p)) < narrowest
    for span in timeline:
        action = _action(span)
        start, wide = scale * span.start, scale * span.duration
        if span.kind == "comm":
            target = schedule.peer(action)
            # From the edge of one row to the near edge of the other.
            down = target > span.rank
            ys = (span.rank + 0.94, target + 0.06) if down else (span.rank + 0.06, target + 0.94)
            lines.append([(start, ys[0]), (start + wide, ys[1])])
            continue
        kind = SPAN_KIND[action.kind]
        bars.setdefault((span.rank, kind), []).append((start, wide))
        label = str(action.microbatch)
        if wide * inches > 0.99 * _inches_of(label, size):
            middle = start + wide / 2, span.rank + 0.49
            style = {"size": size, "ha": "center", "va": "center", "clip_on": True}
            ax.text(*middle, label, color=pen.ink_on(KIND[kind]), **style)
        chunk = schedule.stages_on(span.rank).index(action.stage)
        for k in range(chunk if has_room else 0):  # in all cells or in none: no tick means first
            x = start + wide / 2 + (k - (chunk - 1) / 2) * 0.045 / inches
            ticks.append((x, span.rank + 0.8, pen.ink_on(KIND[kind])))
    for (rank, kind), pieces in bars.items():
        ax.broken_barh(
            pieces, (rank + 0.06, 0.88), facecolor=KIND[kind], edgecolor=PAPER, lw=0.7, zorder=2
        )
    for ink in sorted({ink for *_, ink in ticks}):
        xy = [(x, y) for x, y, own in ticks if own == ink]
        ax.plot(*zip(*xy, strict=True), "s", ms=1.9, color=ink, mew=0, zorder=4)
    ax.add_collection(LineCollection(lines, colors=AXIS["pp"], lw=1.1, zorder=5))


def _label_size(timeline: Timeline, inches: float, row: float) -> float:
    """Points, one size for all numbers: as large as the narrowest cell allows, if that can be read.

    `inches` of a second and of a row.
    """
    cells = [span for span in timeline if span.kind != "comm"]
    fits = (s.duration * inches / _inches_of(str(_action(s).microbatch), 1.0) for s in cells)
    return max(4.5, min(8.0, 36 * row, *fits))


def _inches_of(label: str, size: float) -> float:
    return (0.66 * len(label) + 0.3) * size / 72


def _legend(shown: Iterable[tuple[Schedule, Timeline]]) -> list[tuple[str, str]]:
    shown = list(shown)
    seen = {_action(span).kind for _, t in shown for span in t}
    entries = [(KIND["forward"], "forward")]
    if seen & {"B", "I"}:
        split = " of the input" if "B" not in seen else " (of the input where split)"
        entries.append((KIND["backward"], "backward" + (split if "I" in seen else "")))
    if "W" in seen:
        entries.append((KIND["weight_gradient"], "weight gradient"))
    entries.append((KIND["idle"], "idle"))
    if seen & {"SF", "SB"}:
        entries.append((AXIS["pp"], "message"))
    if any(len(plan.stages_on(0)) > 1 for plan, _ in shown):
        entries.append((PAPER, "▪ second stage of its rank, ▪▪ third ..."))
    return entries


display.register(Schedule, schedule)
