"""Which exercises have been solved: `progress()`, in a notebook.

A check that passes in a notebook adds a line to ``solved.txt``, in the folder of the notebook, and
nowhere else: nothing is sent, and deleting the file starts anew.
"""

from contextlib import suppress
from pathlib import Path

from IPython import get_ipython
from IPython.display import Markdown

FILE = "solved.txt"


def note(number: str) -> None:
    """Remember that an exercise is solved. Does nothing outside of a notebook."""
    if get_ipython() is not None and number not in solved():
        with suppress(OSError), Path(FILE).open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")


def solved() -> list[str]:
    """The numbers of solved exercises, in the order in which they were."""
    path = Path(FILE)
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def progress() -> Markdown:
    """Show all exercises, a row for each notebook, those that are solved with a tick."""
    from minipar.lab import exercises  # which notes here what was solved

    known, done = exercises.exercises(), solved()
    rows: dict[str, list[str]] = {}
    for number in known:
        mark = f"**{number} ✓**" if number in done else number
        rows.setdefault(number.split(".")[0], []).append(mark)
    left = [exercises.exercise(number) for number in known if number not in done]
    head = f"{len(known) - len(left)} of {len(known)} exercises are solved"
    rest = f", {sum(one.minutes for one in left)} minutes are left." if left else "."
    after = f" The next: {left[0].id}, {left[0].title}." if left else ""
    lines = [f"| {int(chapter):02} | {' &nbsp; '.join(row)} |" for chapter, row in rows.items()]
    return Markdown("\n".join([head + rest + after, "", "| | |", "| --- | :-- |", *lines]))
