"""`progress()`, in a notebook: all exercises, a tick at solved ones, and the trainer that grows."""

from IPython.display import Markdown

from minipar.lab import exercises, own


def progress() -> Markdown:
    """Show all exercises, a row for each notebook; solved exercises have a tick."""
    known, done = exercises.exercises(), exercises.solved()
    rows: dict[str, list[str]] = {}
    for number in known:
        mark = f"**{number} ✓**" if number in done else number
        rows.setdefault(number.split(".")[0], []).append(mark)
    left = [exercises.exercise(number) for number in known if number not in done]
    head = f"{len(known) - len(left)} of {len(known)} exercises are solved"
    rest = f", {sum(one.minutes for one in left)} minutes are left." if left else "."
    after = f" The next: {left[0].id}, {left[0].title}." if left else ""
    lines = [f"| {int(chapter):02} | {' &nbsp; '.join(row)} |" for chapter, row in rows.items()]
    return Markdown("\n".join([head + rest + after, "", "| | |", "| --- | :-- |", *lines, *_own()]))


def _own() -> list[str]:
    """Return lines on the pieces that `own.keep` has written, and on the pieces to come."""
    rows, have = [], own.kept()
    for name, (number, called) in own.PIECES.items():
        lines, state = have.get(name, ("", f"exercise {number}"))
        rows.append(f"| {name} | `{called}` | {lines} | {state} |")
    total = sum(lines for lines, _ in have.values())
    head = f"Your own trainer: {len(have)} of {len(own.PIECES)} pieces, {total} lines."
    return ["", head, "", "| piece | | lines | |", "| --- | --- | --: | :-- |", *rows]
