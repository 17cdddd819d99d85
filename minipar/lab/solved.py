"""Which exercises have been solved: a line for each in ``solved.txt``.

A check that passes in a notebook adds a line, in the folder of the notebook. Nothing is sent, and
deleting the file starts anew.
"""

from contextlib import suppress
from pathlib import Path

from IPython import get_ipython

FILE = "solved.txt"


def note(number: str) -> None:
    """Remember that an exercise is solved. Does nothing outside of a notebook."""
    if get_ipython() is not None and number not in solved():
        with suppress(OSError), Path(FILE).open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")


def solved() -> list[str]:
    """Return the numbers of solved exercises, in the order in which they were solved."""
    path = Path(FILE)
    return path.read_text(encoding="utf-8").split() if path.is_file() else []
