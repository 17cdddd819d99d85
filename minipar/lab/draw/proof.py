"""The model of a proof in order of execution, and the point where it parts from one device."""

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, GRID, INK, KIND, MUTED
from minipar.tools.prove.prove import Verdict

MOST = 24  # rows
FILL = {"equal": KIND["forward"], "differs": KIND["compute"], "parts here": EXPOSED}
FILL |= {"no parameters": GRID, "not compared": GRID}


def proof(verdict: Verdict) -> Figure:
    """Draw a row per module, the first to run on top; the point where it parts is red.

    Of many modules, those around this point.
    """
    states = [state for *_, state in verdict.modules]
    at = states.index("parts here") if "parts here" in states else 0
    start = max(0, min(at - MOST // 2, len(states) - MOST))
    rows = verdict.modules[start : start + MOST]
    parting, row = verdict.parting, 0.27
    cause = who = ""
    if parting is not None:
        cause = f"{parting.cause}, in the {parting.stage}"
        who = f"ranks {', '.join(map(str, parting.ranks))}: {parting.words}"
    names = ["the model", *(name for name, *_ in rows)]
    wide = 0.5 + max(0.075 * len(name) + 0.2 * name.count(".") for name in names)
    beside = 0.2 + wide + 0.2 + 0.075 * max((len(kind) for _, kind, _ in rows), default=0)
    width = max(beside + 0.3 + max(0.085 * len(cause), 0.068 * len(who)), 7.2)
    height = 1.3 + row * len(rows)
    mesh = ", ".join(f"{axis}={size}" for axis, size in verdict.sizes.items())
    title = f"{mesh}: equal to one device"
    if parting is not None:
        title = f"{mesh} parts from one device at {parting.module or 'the model'}"
    shown = f"modules {start + 1} to {start + len(rows)} of {len(states)}"
    figure, ax = pen.sheet(width, height, title, f"{verdict.file}: {shown}")
    for i, (name, kind, state) in enumerate(rows):
        x, y = 0.2 + 0.2 * name.count("."), height - 0.75 - row * i
        pen.rectangle(ax, x, y - 0.1, 0.2 + wide - x, 0.2, fc=FILL[state])
        pen.text(ax, x + 0.1, y, name or "the model", color=pen.ink_on(FILL[state]))
        pen.text(ax, wide + 0.32, y, kind, color=MUTED)
        if state == "parts here" and parting is not None:
            pen.text(ax, beside, y, cause, color=EXPOSED, weight="bold")
            pen.text(ax, beside, y - 0.17, who, color=INK, size=8)
    legend = [(ink, name) for name, ink in FILL.items() if name in states]
    pen.key(figure, legend, 0.2, 0.3, width - 0.4)
    return figure
