"""The memory of a rank as a picture: bytes over a step, beside a closed form.

The axis counts allocations, not milliseconds, and every phase of the step is equally wide.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import HELD, HELD_OTHERS, INK, MUTED, PAPER, RIGHT
from minipar.lab.draw.timelines import lanes, legend
from minipar.lab.memory import MemoryHistory
from minipar.observe.timeline import Timeline

CATEGORY = {
    "parameters": HELD["weights"],
    "buffers": HELD_OTHERS[1],
    "optimizer": HELD["optimizer state"],
    "gathered": HELD_OTHERS[0],
    "gradients": HELD["gradients"],
    "activations": HELD["activations"],
}
"""From the bottom of the stack to its top: what stays, then what comes and goes."""
NAMES = {"parameters": "weights", "optimizer": "optimizer state", "gathered": "gathered weights"}
STRIP, MOST_PHASES = 0.5, 8  # inches of a timeline above an area; more phases are not drawn


def memory(
    history: MemoryHistory,
    timeline: Timeline | None = None,
    *,
    closed_form: Mapping[str, float] | None = None,
    title: str = "",
    note: str = "",
) -> Figure:
    """Draw the memory of a rank's device as a stacked area; above it its timeline, if given.

    `closed_form` in bytes by category (`sim.memory.model_state(...).device`) is a bar at the right,
    in the colours of the area. A line of text says what the host holds.
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
    """Draw histories one below the other, with one scale of bytes: `{"ddp": ..., "zero1": ...}`.

    As `memory`, which draws one.
    """
    timelines, forms = timelines or {}, closed_forms or {}
    warped = {name: _warped(t, histories[name]) for name, t in timelines.items()}
    peaks = [history.peak for history in histories.values()]
    top = 1.08 * max([*peaks, *(sum(form.values()) for form in forms.values())])
    inks = _inks([history.device for history in histories.values()] + [*forms.values()])
    area = 1.9 if len(histories) == 1 else 1.25  # inches
    heights = [area + STRIP * (name in timelines) for name in histories]
    entries = [(inks[c], NAMES.get(c, c)) for c in reversed(inks)]
    entries += legend([*warped.values()], 1e3)
    right = 1.3 if forms else RIGHT  # inches beside the panels, for the bars
    phases = {name: _phases(history) for name, history in histories.items()}
    label = "each phase with its allocations in order"
    label = label if all(len(each) > 1 for each in phases.values()) else "% of the allocations"
    figure, axes = pen.stack(heights, entries, label, [note], right)
    for ax, (name, history) in zip(axes, histories.items(), strict=True):
        head = ax
        if name in timelines:
            head = _split(ax, area)
            lanes(head, warped[name], 1e3)
            head.set_yticks([])
            head.set_xticks([])
        _area(ax, history, top, inks)
        count = len(phases[name])
        if count > 1:  # a line between phases, and their names below the axis
            for i in range(1, count):
                ax.axvline(i / count, color=INK, lw=0.8, ls=":", zorder=4)
            words = [word.replace("optimizer", "optimizer step") for word, _ in phases[name]]
            ax.set_xticks([(i + 0.5) / count for i in range(count)], words)
        pen.headline(head, name, _finding(history))
        if name in forms:
            _bar(ax, forms[name], top, inks)
    return figure


def _inks(held: list[Mapping]) -> dict[str, str]:
    """Return the colours of all categories that are ever there, from bottom to top."""
    seen = {c: None for each in held for c, values in each.items() if np.any(values)}
    others = [category for category in seen if category not in CATEGORY]
    inks = CATEGORY | {c: HELD_OTHERS[2 + i % 2] for i, c in enumerate(others)}
    inks["activations"] = inks.pop("activations")  # on top
    return {category: ink for category, ink in inks.items() if category in seen}


# ---------------------------------------------------------------------- the axis
def _phases(history: MemoryHistory) -> list[tuple[str, int]]:
    """Return the phases of a step, such as ("forward", samples), in order; one if there are many.

    Allocations before the first forward belong to it.
    """
    found = [(name, len([*samples])) for name, samples in groupby(history.phases)]
    return found if 1 < len(found) <= MOST_PHASES else [("", len(history.seconds))]


def _places(history: MemoryHistory) -> np.ndarray:
    """Return where each sample stands on the axis, from 0 to 1."""
    phases = _phases(history)
    parts = [
        (i + np.arange(count) / count) / len(phases) for i, (_, count) in enumerate(phases) if count
    ]
    return np.concatenate(parts)


def _warped(timeline: Timeline, history: MemoryHistory) -> Timeline:
    """Return the timeline of the history's rank on the axis of its allocations, 0 to 1."""
    mine = timeline.select(rank=history.rank)
    at = partial(np.interp, xp=history.seconds, fp=_places(history), right=1.0)
    spans = [replace(s, start=float(at(s.start)), end=float(at(s.end))) for s in mine]
    return Timeline(spans, mine.label)


# ---------------------------------------------------------------------- panels
def _split(ax: Axes, area: float) -> Axes:
    """Shrink `ax` to `area` inches; return new axes in the room above it."""
    box, tall = ax.get_position(), ax.figure.get_figheight()
    ax.set_position((box.x0, box.y0, box.width, area / tall))
    low, high = box.y0 * tall + area + 0.08, STRIP - 0.08
    wide = ax.figure.get_figwidth()
    return pen.panel(ax.figure, box.x0 * wide, low, box.width * wide, high)


def _area(ax: Axes, history: MemoryHistory, top: float, inks: dict[str, str]) -> None:
    """Draw steps in megabytes; a moment that is short keeps its peak."""
    pixels = int(ax.get_position().width * ax.figure.get_figwidth() * pen.DPI)
    at, totals = _places(history), np.array(history.totals)
    order = np.lexsort((totals, (at * pixels).astype(int)))  # the highest of a pixel comes last
    last = np.diff((at[order] * pixels).astype(int), append=pixels + 1) > 0
    keep = sorted({*order[last].tolist(), 0, len(at) - 1})
    x = [*at[keep], 1.0]
    layers = [np.array(history.device[c])[keep] / 1e6 for c in inks if c in history.device]
    fills = [inks[c] for c in inks if c in history.device]
    sums = np.cumsum([[*layer, layer[-1]] for layer in layers], axis=0)
    for low, high, fill in zip([0 * sums[0], *sums], sums, fills, strict=False):
        if (high > low).any():
            style = {"step": "post", "zorder": 2, "facecolor": fill, "edgecolor": PAPER, "lw": 0.4}
            ax.fill_between(x, low, high, **style)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, top / 1e6)
    ax.grid(axis="y", color=pen.GRID, lw=0.8)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}")
    ax.text(-0.012, 1.02, "MB", transform=ax.transAxes, size=9, color=MUTED, ha="right")


def _finding(history: MemoryHistory) -> str:
    """Return the most bytes that are held, the largest part, and the bytes of the host."""
    held = history.at_peak
    largest = next(iter(held))
    said = f"at most {pen.num_bytes(history.peak)}, {pen.num_bytes(held[largest])} of it "
    said += NAMES.get(largest, largest)
    if history.host:
        host = pen.num_bytes(history.peak_of(*history.host, host=True))
        said += f"; the host holds {host}"
    return said


def _bar(beside: Axes, form: Mapping[str, float], top: float, inks: dict[str, str]) -> None:
    """Draw the closed form as a stacked bar at the right, on the scale of the area."""
    box, wide, tall = beside.get_position(), *beside.figure.get_size_inches()
    room = box.x1 * wide + 0.12, box.y0 * tall, 1.05, box.height * tall
    ax = pen.panel(beside.figure, *room)
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
