"""The memory of a rank as a picture: bytes over a step, beside a closed form.

The axis counts allocations, not milliseconds, and every phase of the step is equally wide.
"""

from collections.abc import Mapping
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.lab.draw import pen
from minipar.lab.draw.pen import HELD, HELD_OTHERS, INK, MUTED, PAPER
from minipar.lab.memory import MemoryHistory

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


def ladder(
    histories: Mapping[str, MemoryHistory],
    *,
    closed_forms: Mapping[str, Mapping[str, float]] | None = None,
    note: str = "",
) -> Figure:
    """Draw the memory of a rank as a stacked area, for each history: `{"ddp": ..., "zero1": ...}`.

    All have one scale of bytes. A closed form in bytes by category
    (`sim.memory.model_state(...)`) is a bar at the right, in the colours of the area. A line
    of text says what the host holds.
    """
    forms = closed_forms or {}
    peaks = [history.peak for history in histories.values()]
    top = 1.08e-6 * max([*peaks, *(sum(form.values()) for form in forms.values())])  # megabytes
    inks = _inks([history.device for history in histories.values()] + [*forms.values()])
    legend = [(inks[c], NAMES.get(c, c)) for c in reversed(inks)]
    heights = [1.9 if len(histories) == 1 else 1.25] * len(histories)  # inches
    label = "each phase with its allocations in order"
    figure, axes = pen.stack(heights, legend, label, [note])
    end = 1.18 if forms else 1.0  # the step is from 0 to 1; on its right stands the closed form
    for ax, (name, history) in zip(axes, histories.items(), strict=True):
        ax.set(xlim=(0, end), ylim=(0, top))
        _area(ax, history, inks)
        pen.headline(ax, name, _finding(history))
        if name in forms:
            _bar(ax, forms[name], inks)
    return figure


def _inks(held: list[Mapping]) -> dict[str, str]:
    """Return the colours of all categories that are ever there, from bottom to top."""
    seen = {c for each in held for c, values in each.items() if np.any(values)}
    return {c: CATEGORY[c] for c in sorted(seen, key=[*CATEGORY].index)}


# ---------------------------------------------------------------------- the axis
def _phases(history: MemoryHistory) -> list[tuple[str, int]]:
    """Return the phases of a step, such as ("forward", samples), in order.

    Allocations before the first forward belong to it.
    """
    return [(name, len([*samples])) for name, samples in groupby(history.phases)]


def _places(history: MemoryHistory) -> np.ndarray:
    """Return where each sample stands on the axis, from 0 to 1."""
    phases = _phases(history)
    parts = [(i + np.arange(count) / count) / len(phases) for i, (_, count) in enumerate(phases)]
    return np.concatenate(parts)


# ---------------------------------------------------------------------- panels
def _area(ax: Axes, history: MemoryHistory, inks: dict[str, str]) -> None:
    """Draw steps in megabytes; a moment that is short keeps its peak."""
    at = _places(history)
    pixel = (at * pen.inches_of(ax)[0] * pen.DPI).astype(int)
    order = np.lexsort((history.totals, pixel))  # the highest of a pixel comes last
    keep = np.sort(order[np.flatnonzero(np.diff(pixel[order], append=-1))])
    low = np.zeros(len(keep) + 1)
    for category in (c for c in inks if c in history.device):
        held = np.array(history.device[category])[keep] / 1e6
        high = low + [*held, held[-1]]
        if (high > low).any():
            style = {"step": "post", "facecolor": inks[category], "edgecolor": PAPER, "lw": 0.4}
            ax.fill_between([*at[keep], 1.0], low, high, zorder=2, **style)
        low = high
    ax.grid(axis="y", color=pen.GRID, lw=0.8)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    phases = [name.replace("optimizer", "optimizer step") for name, _ in _phases(history)]
    for i in range(1, len(phases)):  # a line between phases, and their names below the axis
        ax.axvline(i / len(phases), color=INK, lw=0.8, ls=":", zorder=4)
    ax.set_xticks([(i + 0.5) / len(phases) for i in range(len(phases))], phases)
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


def _bar(ax: Axes, form: Mapping[str, float], inks: dict[str, str]) -> None:
    """Draw the closed form as a stacked bar at the right, on the scale of the area."""
    low = 0.0
    for category in (c for c in inks if form.get(c)):
        style = {"color": inks[category], "edgecolor": PAPER, "lw": 0.6, "zorder": 2}
        ax.bar(1.05, form[category] / 1e6, 0.06, low, **style)
        low += form[category] / 1e6
    label = f"closed\nform of\nstate:\n{pen.num_bytes(int(sum(form.values())))}"
    style = {"va": "top" if 3 * low > ax.get_ylim()[1] else "bottom", "size": 8}
    ax.text(1.09, low, label, color=INK, **style)
