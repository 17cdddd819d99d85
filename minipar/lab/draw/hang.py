"""Hangs: ranks over the numbers of their collectives; who waits, who called otherwise, who is gone.

Drawn from `minipar.tools.hang`, for `minipar hang --out`.
"""

from collections import defaultdict

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, EXPOSED, GRID, INK, KIND, MUTED, PAPER, WIDTH
from minipar.tools.hang import Group, Report

COLUMNS, ROWS, ROW = 10, 16, 0.27  # the last calls, and the first ranks, of a group; inches
GROUPS = 4
LEGEND = [(KIND["forward"], "ended"), (EXPOSED, "waits"), (GRID, "has not come")]
ODD = AXIS["dp"], "waits, unlike the others"
MIXED = {"fc": "none", "ec": EXPOSED, "lw": 1.4}, "ranks call different things"


def hang(report: Report, *, title: str = "") -> Figure:
    """Draw a row per rank and a column per collective, for groups in which a call is open.

    The title is the first finding, unless you give one. The groups of the culprits come first.
    Where all calls have ended, all groups are drawn, unless messages wait. Ranks of which nothing
    is known have question marks. Below, messages that wait.
    """
    called = [group for group in report.groups if group.calls]
    shown = [group for group in called if any(map(group.open_calls, group.ranks))]
    shown.sort(key=lambda group: not {*group.ranks} & {*report.culprits})
    messages = [wait for wait in report.waits if wait.is_message][:ROWS]
    shown = (shown or ([] if messages else called))[:GROUPS]
    ax, top = pen.paper(), 0.0
    for group in shown:
        _panel(ax, group, report, top)
        top -= ROW * min(ROWS, len(group.ranks)) + 0.75
    if messages:
        pen.text(ax, 0, top, "messages", weight="bold")
    for row, wait in enumerate(messages):
        y, call = top - 0.15 - ROW * (row + 1), f"{wait.call} on {wait.group}"
        pen.text(ax, 1.25, y + ROW / 2, f"rank {wait.rank}", ha="right", size=8)
        pen.rectangle(ax, 1.37, y + 0.02, WIDTH - 1.79, ROW - 0.04, fc=EXPOSED, ec=PAPER)
        pen.text(ax, 1.45, y + ROW / 2, call[:90], size=7, color=pen.ink_on(EXPOSED))
    said = report.findings[0].rstrip(".") if report.findings else "no hang"
    title = title or (said if len(said) < 90 else said[:87] + "...")
    rest = len(report.findings) - 1
    more = f"and {rest} more finding{'s' * (rest > 1)}" if rest > 0 else ""
    legend = LEGEND + [ODD] * any(group.odd for group in shown)
    return pen.cut(ax, title, more, legend + [MIXED] * any(map(_mixed, shown)))


def _panel(ax: pen.Axes, group: Group, report: Report, top: float) -> None:
    numbers = sorted({n for calls in group.calls.values() for n in calls})
    open_calls = [n for rank in group.ranks for n in group.open_calls(rank)]
    end = next((i for i, n in enumerate(numbers) if n >= min(open_calls, default=0)), 0)
    numbers = numbers[: end + 3][-COLUMNS:] if open_calls else numbers[-COLUMNS:]
    wide = min(1.1, (WIDTH - 1.75) / max(1, len(numbers)))
    pen.text(ax, 0, top, f"on {group.name}", weight="bold")
    for column, number in enumerate(numbers):
        x = 1.35 + wide * (column + 0.5)
        pen.text(ax, x, top - 0.25, f"#{number}", ha="center", color=MUTED, size=8)
    mixed = _mixed(group)
    for row, rank in enumerate(group.ranks[:ROWS]):
        y = top - 0.4 - ROW * (row + 1)
        recording = report.recordings.get(rank)
        known = report.knows(rank)
        host = recording.host[:10] if known else "not heard" if recording else "no dump"
        name = f"rank {rank}" + (f" · {host}" if host else "")
        pen.text(ax, 1.25, y + ROW / 2, name, ha="right", size=8, color=INK if known else MUTED)
        for column, number in enumerate(numbers):
            entry = group.calls.get(rank, {}).get(number)
            place = group.place(rank, number, recording)
            waits = ODD[0] if (rank, number) in group.odd else EXPOSED
            inks = {"in": waits, "past": KIND["forward"], "absent": GRID, "unknown": PAPER}
            word = entry.verb.replace("_", "-").strip("-") if entry else ""
            word = "?" if place == "unknown" else word[: int(13 * wide)]
            x = 1.35 + wide * column
            pen.cell(ax, (x + 0.02, y + 0.02, wide - 0.04, ROW - 0.04), word, inks[place], 7)
            if number in mixed and entry:
                pen.rectangle(ax, x + 0.035, y + 0.035, wide - 0.07, ROW - 0.07, **MIXED[0])


def _mixed(group: Group) -> set[int]:
    """Return the numbers of the collectives that ranks call by different names."""
    verbs = defaultdict(set)
    for calls in group.calls.values():
        for number, entry in calls.items():
            verbs[number].add(entry.verb)
    return {number for number, names in verbs.items() if len(names) > 1}
