"""Words for people: tables of columns, errors in one line, names that a terminal can show."""

import re
from collections.abc import Sequence
from typing import Any

FOREIGN = re.compile(
    r"(^|/)(torch|(site|dist)-packages)/|nn\.Module|^<(frozen|built-in)"
    r"|(^|/)(threading|runpy|contextlib|typing_extensions)\.py\b"
)
"""Lines of a stack that are no code of the job, as "torch/autograd/function.py(581): apply"."""


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Return lines of columns as wide as their widest cell.

    The first `left` columns (None: all) are flush left, the others flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if left is None or i < left else str.rjust for i in range(len(widths))]
    return [
        "  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def one_line(error: BaseException, most: int = 500) -> str:
    """Return the message of `error` in one line of at most `most` letters."""
    return " ".join(str(error).split())[:most]


def printable(text: Any) -> str:
    """Return a name out of a file, fit for terminals and pictures: other letters become `?`."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def names(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2": at most eight of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
