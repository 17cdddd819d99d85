"""Hangs: ranks over the numbers of their collectives; who waits, who called otherwise, who is gone.

Drawn from `minipar.observe.hang`, for `minipar hang --out`.
"""

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, GRID, INK, KIND, MUTED, PAPER, WIDTH
from minipar.observe.hang import Group, Report, odd_ones

COLUMNS, ROWS, ROW = 10, 16, 0.27  # the last calls, and the first ranks, of a group; inches
GROUPS = 4
LEGEND = [(KIND["forward"], "ended"), (EXPOSED, "waits"), (GRID, "has not come")]
ODD = {"fc": "none", "ec": INK, "lw": 1.4}, "unlike the others"


def hang(report: Report, *, title: str = "") -> Figure:
    """Draw a row per rank and a column per collective, for groups in which a call is open.

    The title is the first finding, unless you give one. The groups of the culprits come first.
    Ranks of which nothing is known have question marks. Messages are not drawn.
    """
    shown = [group for group in report.groups if group.oldest]
    shown.sort(key=lambda group: not {*group.ranks} & {*report.culprits})
    ax, top = pen.paper(), 0.0
    if not shown:
        pen.text(ax, 0, top, "no collective is open; messages are not drawn")
    for group in shown[:GROUPS]:
        _panel(ax, group, report, top)
        top -= ROW * min(ROWS, len(group.ranks)) + 0.75
    said = report.findings[0].rstrip(".") if report.findings else "no hang"
    title = title or (said if len(said) < 90 else said[:87] + "...")
    return pen.cut(ax, title, legend=[*LEGEND, ODD])


def _panel(ax: pen.Axes, group: Group, report: Report, top: float) -> None:
    numbers, first = sorted(group.calls), min(entry.number for entry in group.oldest.values())
    numbers = numbers[: numbers.index(first) + 3][-COLUMNS:]  # two behind the oldest open one
    wide = min(1.1, (WIDTH - 1.75) / len(numbers))
    pen.text(ax, 0, top, f"on {group.name}", weight="bold")
    for row, rank in enumerate(group.ranks[:ROWS]):
        known = rank in report.recordings
        name = f"rank {rank}" + " · no dump" * (not known)
        y, color = top - 0.4 - ROW * (row + 0.5), INK if known else MUTED
        pen.text(ax, 1.25, y, name, ha="right", size=8, color=color)
    ended = KIND["forward"]
    inks = {"in": EXPOSED, "past": ended, "came": ended, "absent": GRID, "unknown": PAPER}
    for column, number in enumerate(numbers):
        here, x = group.calls[number], 1.35 + wide * column
        pen.text(ax, x + wide / 2, top - 0.25, f"#{number}", ha="center", color=MUTED, size=8)
        odd = {rank for what in ("verb", "data") for rank in odd_ones(here, what)[1]}
        for row, rank in enumerate(group.ranks[:ROWS]):
            y = top - 0.4 - ROW * (row + 1)
            place = group.place(rank, number, report.recordings.get(rank))
            word = here[rank].verb.replace("_", "-").strip("-") if rank in here else ""
            word = "?" if place == "unknown" else word[: int(13 * wide)]
            pen.cell(ax, (x + 0.02, y + 0.02, wide - 0.04, ROW - 0.04), word, inks[place], 7)
            if rank in odd:
                pen.rectangle(ax, x + 0.035, y + 0.035, wide - 0.07, ROW - 0.07, **ODD[0])
