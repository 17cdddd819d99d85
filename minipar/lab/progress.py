"""`progress()`, in a notebook: all exercises, with a tick at those that have been solved."""

from IPython.display import Markdown

from minipar.lab import exercises
from minipar.lab.solved import solved


def progress() -> Markdown:
    """Show all exercises, a row for each notebook; solved exercises have a tick."""
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
