"""Minutes beside the headings of a notebook, for hosts of workshops.

A cell tagged ``minute-20`` begins 20 minutes after its notebook does, exercises not counted. Needs
no torch: the book is built without it.
"""

import re

from nbformat import NotebookNode


def minutes(notebook: NotebookNode) -> dict[int, int]:
    """Return the minute at which a tagged cell begins, by the number of the cell."""
    tags = (
        (i, tag) for i, cell in enumerate(notebook.cells) for tag in cell.metadata.get("tags", [])
    )
    return {i: int(tag.removeprefix("minute-")) for i, tag in tags if tag.startswith("minute-")}


def show_minutes(notebook: NotebookNode) -> None:
    """Write the minute, in place, under the first heading of each tagged cell."""
    for i, minute in minutes(notebook).items():
        cell = notebook.cells[i]
        mark = rf"\1\n\n*Minute {minute}*"
        cell.source = re.sub(r"^(##? .*)$", mark, cell.source, count=1, flags=re.M)
