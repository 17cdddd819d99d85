"""The memory of a rank as a picture: what it holds over a step, and what a closed form says."""

import math
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, INK, KIND, LEFT, MUTED, PAPER, RIGHT, WIDTH
from minipar.lab.draw.timelines import lanes, legend
from minipar.lab.memory import MemoryHistory
from minipar.observe.timeline import Timeline

# A category has the colour of the work that makes it, or that it waits for.
CATEGORY = {
    "parameters": "#98988f",
    "buffers": AXIS["ep"],
    "optimizer": KIND["optimizer"],
    "gathered": AXIS["dp"],
    "gradients": KIND["backward"],
    "activations": KIND["forward"],
    "unseen": KIND["idle"],
}
"""From the bottom of the stack to its top: what stays, then what comes and goes."""
OTHERS = [AXIS["tp"], AXIS["pp"], AXIS["cp"]]  # categories that a strategy made up
NAMES = {"optimizer": "optimizer state", "gathered": "gathered blocks"}


def memory(
    history: MemoryHistory,
    timeline: Timeline | None = None,
    *,
    closed_form: Mapping[str, float] | None = None,
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw the memory of a rank's device as a stacked area over time; its timeline above, if given.

    `closed_form` in bytes by category (`sim.memory.model_state(...).device`) is a bar at the right,
    in the colours of the area. What a host holds is told in a line of text. Raises ValueError for
    a history without a sample, and for one whose device holds nothing.
    """
    timelines = {} if timeline is None else {title: timeline}
    forms = {title: closed_form} if closed_form else {}
    return ladder({title: history}, timelines, closed_forms=forms, note=note)


def ladder(
    histories: Mapping[str, MemoryHistory],
    timelines: Mapping[str, Timeline] | None = None,
    *,
    closed_forms: Mapping[str, Mapping[str, float]] | None = None,
    note: str = "",
) -> Figure:
    """Histories one below the other, with one scale of bytes: `{"ddp": ..., "zero1": ...}`.

    As `memory`, which draws one. Each has its own clock, from its first sample or, with a timeline,
    from its first span of this rank.
    """
    for name, history in histories.items():
        if not history.seconds:
            raise ValueError(f"the history of {name or 'this rank'} has no sample")
        if not history.peak:
            raise ValueError(
                f"the device of {name or 'this rank'} holds nothing in its history; open the "
                f"ledger before tensors are made, or give it the model"
            )
    timelines, closed_forms = timelines or {}, closed_forms or {}
    mine = {name: _of_rank(t, histories[name].rank) for name, t in timelines.items()}
    spans = {name: (h.seconds[0], h.seconds[-1]) for name, h in histories.items()}
    spans |= {name: (t.start, t.end) for name, t in mine.items()}
    longest = max(end - start for start, end in spans.values())
    peaks = [history.peak for history in histories.values()]
    forms = [sum(form.values()) for form in closed_forms.values()]
    top = 1.08 * max([*peaks, *forms])
    seen = _categories([*histories.values()], closed_forms)
    others = [category for category in seen if category not in CATEGORY]
    known = CATEGORY | {c: OTHERS[i % len(OTHERS)] for i, c in enumerate(others)}
    inks = {category: known[category] for category in seen}

    head, area, row, gap = 0.44, 1.9 if len(histories) == 1 else 1.25, 0.42, 0.12  # inches
    key = _key({c: inks[c] for c in reversed(seen)}, [t.shifted() for t in mine.values()])
    foot = 0.62 + 0.22 * len(pen.flow(key))
    total = foot + len(histories) * (head + area) + sum(row + gap for _ in mine)
    labels = dict.fromkeys(t.label for t in timelines.values() if t.label)
    figure = pen.figure(WIDTH, total, note=note or "; ".join(labels))
    right = 1.1 if closed_forms else 0.0  # room for the bars
    wide = WIDTH - LEFT - RIGHT - right
    y = total
    for i, (name, history) in enumerate(histories.items()):
        start, _ = spans[name]
        y -= head
        if name in mine:
            y -= row
            rows = pen.panel(figure, LEFT, y, wide, row)
            lanes(rows, mine[name].shifted(mine[name].start - start), (0, 1e3 * longest))
            rows.set_yticks([])
            rows.set_xticks([])
            y -= gap
        y -= area
        ax = pen.panel(figure, LEFT, y, wide, area)
        _area(ax, history, spans[name], 1e3 * longest, top, inks)
        ax.tick_params(labelbottom=i == len(histories) - 1)
        said = y + area + (row + gap if name in mine else 0) + 0.1
        _headline(figure, name, history, said / total)
        if name in closed_forms:
            beside = pen.panel(figure, LEFT + wide + 0.12, y, right - 0.12, area)
            _bar(beside, closed_forms[name], top, inks)
    pen.label(ax, "milliseconds", labelpad=1)
    pen.key(figure, key, LEFT, 0.32)
    return figure


def _key(inks: dict[str, str], shown: list[Timeline]) -> list[tuple[str, str]]:
    """A legend of what is held and of the work above it: what shares a colour, in one entry."""
    work = dict(legend(shown, (0.0, math.inf)))
    held = {ink: NAMES.get(category, category) for category, ink in inks.items()}
    both = {ink: f"{work[ink]}: {name}" if ink in work else name for ink, name in held.items()}
    return [*both.items(), *((ink, name) for ink, name in work.items() if ink not in held)]


def _of_rank(timeline: Timeline, rank: int) -> Timeline:
    chosen = timeline.select(rank=rank)
    if not chosen.spans:
        raise ValueError(f"the timeline has no span of rank {rank}; it has ranks {timeline.ranks}")
    return chosen


def _categories(
    histories: list[MemoryHistory], closed_forms: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """All that is ever there, from the bottom of the stack to its top."""
    seen = {c for history in histories for c, values in history.device.items() if any(values)}
    seen |= {c for form in closed_forms.values() for c, num_bytes in form.items() if num_bytes}
    order = [*CATEGORY]
    at = order.index("activations")
    order[at:at] = sorted(seen - CATEGORY.keys())
    return [category for category in order if category in seen]


def _area(
    ax: Axes,
    history: MemoryHistory,
    window: tuple[float, float],
    longest: float,
    top: float,
    inks: dict[str, str],
) -> None:
    """Steps, in milliseconds of the window and megabytes; a moment that is short keeps its peak."""
    at = [1e3 * (second - window[0]) for second in history.seconds]
    end = 1e3 * (window[1] - window[0])
    pixels = int(ax.get_position().width * ax.figure.get_figwidth() * pen.DPI)
    keep = [i for i in _most(at, history.totals, longest / pixels) if at[i] <= end]
    x = [*(at[i] for i in keep), end]
    order = [c for c in inks if c in history.device and any(history.device[c])]
    layers = [[history.device[c][i] / 1e6 for i in keep] for c in order]
    stack = ax.stackplot(
        x,
        [[*layer, layer[-1]] for layer in layers],
        colors=[inks[c] for c in order],
        step="post",
        lw=0,
        zorder=2,
    )
    for area in stack:
        area.set_edgecolor("face")
    sums = np.cumsum([[*layer, layer[-1]] for layer in layers], axis=0)
    for line in sums[:-1]:
        ax.step(x, line, where="post", color=PAPER, lw=0.5, zorder=3)
    ax.set_xlim(0, longest)
    ax.set_ylim(0, top / 1e6)
    pen.quiet(ax)
    ax.grid(axis="y", color=pen.GRID, lw=0.8)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_locator(MaxNLocator(10))
    ax.text(-0.012, 1.02, "MB", transform=ax.transAxes, size=9, color=MUTED, ha="right")


def _most(at: list[float], totals: list[int], pixel: float) -> list[int]:
    """The samples to draw: of those that fall on one pixel, the highest, and the last."""
    keep: dict[int, tuple[int, int]] = {}
    for i, moment in enumerate(at):
        column = int(moment / pixel) if moment > 0 else -1
        if column < 0:  # before the window: only the last counts
            keep[column] = (i, i)
            continue
        highest, _ = keep.get(column, (i, i))
        keep[column] = (i if totals[i] >= totals[highest] else highest, i)
    return sorted({i for pair in keep.values() for i in pair})


def _headline(figure: Figure, name: str, history: MemoryHistory, y: float) -> None:
    """The finding: how much at most, and what most of it is; beside it what the host holds."""
    held = history.at_peak
    largest = next(iter(held))
    said = f"at most {pen.num_bytes(history.peak)}, {pen.num_bytes(held[largest])} of it "
    said += NAMES.get(largest, largest)
    if history.host:
        host = pen.num_bytes(history.peak_of(*history.host, host=True))
        said += f"; the host holds {host}"
    width = figure.get_figwidth()
    if name:
        style = {"size": 12, "weight": "bold", "color": INK, "va": "bottom"}
        figure.text(LEFT / width, y, name, **style)
        figure.text(
            1 - RIGHT / width, y, said, gid=pen.FINDING, size=10, color=INK, va="bottom", ha="right"
        )
    else:
        figure.text(LEFT / width, y, said, size=12, weight="bold", color=INK, va="bottom")


def _bar(ax: Axes, form: Mapping[str, float], top: float, inks: dict[str, str]) -> None:
    """The closed form as a stacked bar on the scale of the area."""
    pen.quiet(ax)
    parts = {c: form[c] / 1e6 for c in inks if form.get(c)}
    for (category, height), end in zip(parts.items(), accumulate(parts.values()), strict=True):
        ax.bar(0, height, 0.9, end - height, color=inks[category], edgecolor=PAPER, lw=0.6)
    total = sum(form.values())
    ax.set_xlim(-0.5, 1.6)
    ax.set_ylim(0, top / 1e6)
    ax.set_xticks([])
    ax.set_yticks([])
    label = f"closed\nform of\nstate:\n{pen.num_bytes(int(total))}"
    ax.text(0.56, total / 1e6, label, size=8, color=INK, va="top" if total > top / 3 else "bottom")
