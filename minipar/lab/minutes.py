"""Minutes of a notebook: of a reader alone, and beside its headings for hosts of workshops.

A cell tagged ``minute-20`` begins 20 minutes after its notebook does, where a host leads through
it, exercises not counted. Needs no torch: the book is built without it.
"""

import re

from nbformat import NotebookNode

WORDS, LINES = 120, 10
"""Words of prose and lines of code that a careful reader takes in per minute."""


def minutes_alone(notebook: NotebookNode) -> float:
    """Return the minutes of a careful reader: prose, code, a minute per figure and prediction.

    Exercises, their hints, and the quiz are not counted.
    """
    total = 0.0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            text = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S)
            text = re.sub(r"(?m)^(> ?)?### Exercise .*|## Quiz.*", "", text, flags=re.S)
            total += len(text.split()) / WORDS + text.count("**Predict")
        elif not any(tag.startswith(("exercise-", "raises")) for tag in tags):
            lines = [line for line in cell.source.splitlines() if line.strip()]
            total += len(lines) / LINES
            total += sum("image/png" in output.get("data", {}) for output in cell.outputs)
    return total


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
