"""Pictures of communication plans: who sends to whom in which round, and how much."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.comm.plans import Plan, Round
from minipar.lab.draw import pen
from minipar.lab.draw.pen import GRID, MUTED, SERIES

ADDED, PASSED = SERIES[0], SERIES[1]
COLUMN, ROW, GAP, LEFT = 0.3, 0.3, 0.34, 0.72  # inches


def schedules(
    plans: Mapping[str, Sequence[Plan]], *, numel: int, title: str = "", note: str = ""
) -> Figure:
    """Draw plans beside each other: `{"ring": [plan of rank 0, plan of rank 1, ...], ...}`.

    A column is a round, a row a rank, an arrow a message: the thicker, the more of `numel` elements
    it holds (half as thick where four or more arrive together). Its colour says whether the
    receiver adds it to what it has. Rounds in which all rest are left out.
    """
    plans = {name: _without_rests(each) for name, each in plans.items()}
    ranks = max(map(len, plans.values()))
    rounds = {name: len(each[0]) for name, each in plans.items()}
    wide = {name: COLUMN * max(2, count) for name, count in rounds.items()}
    width = LEFT + sum(wide.values()) + GAP * len(wide)
    height = 1.3 + ROW * (ranks - 1) + 0.55
    figure, ax = pen.sheet(max(width, 5.2), height, title, note)
    top, x = height - 1.1, LEFT
    for rank in range(ranks):
        pen.text(ax, LEFT - 0.14, top - ROW * rank, f"rank {rank}", color=MUTED, ha="right")
    for name in plans:
        pen.text(ax, x, top + 0.52, name, weight="bold")
        caption = f"{rounds[name]} round{'s' * (rounds[name] > 1)}"
        pen.text(ax, x, top + 0.31, caption, color=MUTED, size=8)
        _panel(ax, plans[name], numel, x, top)
        x += wide[name] + GAP
    pen.key(figure, [(ADDED, "added"), (PASSED, "passed on")], LEFT, 0.2)
    return figure


def _without_rests(each: Sequence[Plan]) -> list[list[Round]]:
    """Return the plans of all ranks, equally long, without the rounds in which no rank sends."""
    rounds = zip_longest(*each, fillvalue=Round())
    rounds = [steps for steps in rounds if any(step.sends for step in steps)]
    return [list(plan) for plan in zip(*rounds, strict=True)]


def _panel(ax: Axes, each: Sequence[Plan], numel: int, left: float, top: float) -> None:
    column = COLUMN if len(each[0]) > 1 else 2 * COLUMN
    for i in range(len(each[0]) + 1):
        x = left + column * i
        ax.plot([x, x], [top - ROW * (len(each) - 1), top], color=GRID, lw=0.8, zorder=1)
        ys = [top - ROW * rank for rank in range(len(each))]
        ax.plot([x] * len(ys), ys, "o", color=MUTED, ms=2.6, mew=0, zorder=3)
    for rank, plan in enumerate(each):
        for i, step in enumerate(plan):
            crowd = 1 if len(step.recvs) < 4 else 2  # or the lines would be one block of colour
            for message in step.recvs:
                if message.peer == rank:
                    continue
                adds = any(m.add and m.lo < message.hi and message.lo < m.hi for m in step.recvs)
                start = left + column * i, top - ROW * message.peer
                end = left + column * (i + 1), top - ROW * rank
                share = math.sqrt((message.hi - message.lo) / numel) / crowd
                style = {"lw": 0.3 + 2.9 * share, "color": ADDED if adds else PASSED, "zorder": 2}
                pen.arrow(ax, start, end, 4 + 7 * share, **style)
