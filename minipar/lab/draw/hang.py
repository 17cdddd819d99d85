"""Hangs: ranks over the numbers of their collectives; who waits, who called otherwise, who is gone.

Drawn from `minipar.tools.hang`, for `minipar hang --out`.
"""

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.lab.draw.pen import AXIS, EXPOSED, GRID, INK, KIND, MUTED, PAPER, WIDTH
from minipar.tools.hang import Group, Report, Wait

COLUMNS, ROWS, ROW = 10, 40, 0.27  # the last calls, and the first ranks, of a group; inches
LEGEND = [
    (KIND["forward"], "ended"),
    (EXPOSED, "waits"),
    (AXIS["dp"], "waits, unlike the others"),
    (GRID, "has not come"),
]


def hang(report: Report) -> Figure:
    """A row per rank, a column per collective: each group in which a call has not ended.

    Without any, all groups, unless messages wait. At most `ROWS` ranks and `COLUMNS` calls of each.
    A rank of which nothing is known has question marks. Below, a row per message that waits.
    """
    called = [g for g in report.groups if g.calls]
    shown = [g for g in called if any(not e.done for c in g.calls.values() for e in c.values())]
    messages = [wait for wait in report.waits if wait.is_message][:ROWS]
    shown = (shown or ([] if messages else called))[:8]
    heights = [ROW * min(ROWS, len(g.ranks)) + 0.5 for g in shown]
    total = sum(heights) + 1.1 + (ROW * len(messages) + 0.5) * bool(messages)
    said = report.findings[0].rstrip(".") if report.findings else "no hang"
    title = said if len(said) < 90 else said[:87] + "..."
    rest = len(report.findings) - 1
    more = f"and {rest} more finding{'s' * (rest > 1)}" if rest > 0 else ""
    figure, ax = pen.sheet(WIDTH, total, title, more)
    top = total - 0.45
    for group, height in zip(shown, heights, strict=True):
        _panel(ax, group, report, top)
        top -= height
    if messages:
        _messages(ax, messages, top)
    pen.key(figure, LEGEND, 1.5, 0.32)
    return figure


def _panel(ax: pen.Axes, group: Group, report: Report, top: float) -> None:
    numbers = sorted({n for calls in group.calls.values() for n in calls})
    open_calls = [n for c in group.calls.values() for n, e in c.items() if not e.done]
    end = next((i for i, n in enumerate(numbers) if n >= min(open_calls, default=0)), 0)
    numbers = numbers[: end + 3][-COLUMNS:] if open_calls else numbers[-COLUMNS:]
    wide = min(1.1, (WIDTH - 1.75) / max(1, len(numbers)))
    pen.text(ax, 0.15, top - 0.1, f"on {group.name}", weight="bold")
    for column, number in enumerate(numbers):
        x = 1.5 + wide * (column + 0.5)
        pen.text(ax, x, top - 0.1, f"#{number}", ha="center", color=MUTED, size=8)
    for row, rank in enumerate(group.ranks[:ROWS]):
        y = top - 0.25 - ROW * (row + 1)
        recording = report.recordings.get(rank)
        known = report.knows(rank)
        host = recording.host[:10] if known else "not heard" if recording else "no dump"
        name = f"rank {rank}" + (f" · {host}" if host else "")
        pen.text(ax, 1.4, y + ROW / 2, name, ha="right", size=8, color=INK if known else MUTED)
        last = max(group.calls.get(rank, {}), default=0)
        for column, number in enumerate(numbers):
            entry = group.calls.get(rank, {}).get(number)
            odd, gone = (rank, number) in group.odd, entry is None and number > last
            waits = AXIS["dp"] if odd else EXPOSED
            fill = GRID if gone else KIND["forward"] if entry is None or entry.done else waits
            fill = PAPER if gone and not known else fill
            x = 1.5 + wide * column
            pen.rectangle(ax, x + 0.02, y + 0.02, wide - 0.04, ROW - 0.04, fc=fill, ec=PAPER)
            word = entry.verb.replace("_", "-").strip("-") if entry else "" if known else "?"
            style = {"ha": "center", "size": 7, "color": pen.ink_on(fill)}
            pen.text(ax, x + wide / 2, y + ROW / 2, word[: int(13 * wide)], **style)


def _messages(ax: pen.Axes, waits: list[Wait], top: float) -> None:
    pen.text(ax, 0.15, top - 0.1, "messages", weight="bold")
    for row, wait in enumerate(waits):
        y = top - 0.25 - ROW * (row + 1)
        pen.text(ax, 1.4, y + ROW / 2, f"rank {wait.ranks[0]}", ha="right", size=8)
        pen.rectangle(ax, 1.52, y + 0.02, WIDTH - 1.79, ROW - 0.04, fc=EXPOSED, ec=PAPER)
        pen.text(ax, 1.6, y + ROW / 2, wait.call[:90], size=7, color=pen.ink_on(EXPOSED))
