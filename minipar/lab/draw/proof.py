"""The model of a proof in order of execution, and the point where it parts from one device."""

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, GRID, KIND, MUTED
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
    ax, parting = pen.paper(), verdict.parting
    mesh = ", ".join(f"{axis}={size}" for axis, size in verdict.sizes.items())
    title = f"{mesh}: equal to one device"
    if parting is not None:
        title = f"{mesh} parts from one device at {parting.module or 'the model'}"
    depths = [0.2 * name.count(".") for name, *_ in rows]
    named = zip(depths, rows, strict=True)
    end = max(x + 0.075 * len(name or "the model") for x, (name, *_) in named) + 0.4
    kinds = 0.075 * max(len(kind) for _, kind, _ in rows)
    for i, (x, (name, kind, state)) in enumerate(zip(depths, rows, strict=True)):
        y = -0.27 * i
        pen.rectangle(ax, x, y - 0.1, end - x, 0.2, fc=FILL[state])
        pen.text(ax, x + 0.1, y, name or "the model", color=pen.ink_on(FILL[state]))
        pen.text(ax, end + 0.1, y, kind, color=MUTED)
        if state == "parts here" and parting is not None:
            cause = f"{parting.cause}, in the {parting.stage}"
            who = f"ranks {', '.join(map(str, parting.ranks))}: {parting.words}"
            pen.text(ax, end + kinds + 0.3, y, cause, color=EXPOSED, weight="bold")
            pen.text(ax, end + kinds + 0.3, y - 0.17, who, size=8)
    shown = f"modules {start + 1} to {start + len(rows)} of {len(states)}"
    legend = [(ink, name) for name, ink in FILL.items() if name in states]
    return pen.cut(ax, title, f"{verdict.file}: {shown}", legend)
