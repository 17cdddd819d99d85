"""Agendas of workshops: read from the host's page, laid beside the notebooks, shown as slides.

The tables of `notebooks/README.md` are the one source. A row whose words link to a notebook, "[06]
from [Rung 3](06_x.ipynb#rung-3) up to [the host](06_x.ipynb#the-host)", means those sections of it;
the slides of a row are the cells there that are marked as slides, in their order. A cell tagged
``minute-20`` begins that many minutes after its notebook does, exercises not counted.

Needs no torch: the book is built without it.
"""

import copy
import re
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

LINK = re.compile(r"(from |up to )?\[[^\]]*\]\((\d\d\w+)\.ipynb(?:#([^)]*))?\)")


@dataclass(frozen=True)
class Row:
    """A line of an agenda: minutes after its start, how many it takes, and what is done."""

    start: int
    minutes: int
    text: str

    @property
    def parts(self) -> list[tuple[str, str, str]]:
        """Notebooks that it is about, with the headings it goes from and up to ("": all)."""
        found: dict[str, list[str]] = {}
        for where, name, heading in LINK.findall(self.text):
            bounds = found.setdefault(name, ["", ""])
            if heading:
                bounds[where == "up to "] = heading
        return [(name, *bounds) for name, bounds in found.items()]


def agendas(page: str) -> dict[str, list[Row]]:
    """The agendas of the host's page by their titles."""
    tables = page.partition("agendas\n")[2].partition("\n## ")[0]
    found = {}
    for title, rest in re.findall(r"^\*\*(.*?)\*\*(.*?)(?=^\*\*|\Z)", tables, re.M | re.S):
        rows = [
            Row(60 * int(hours) + int(minutes), int(length), text.strip())
            for hours, minutes, length, text in re.findall(
                r"^\| (\d+):(\d\d) \| (\d+) \| (.*) \|$", rest, re.M
            )
        ]
        if rows:
            found[title.rstrip(".")] = rows
    return found


def anchor(heading: str) -> str:
    """The name under which a heading can be linked to, as GitHub and the book make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(cell: NotebookNode) -> list[str]:
    """The anchors of a cell's headings."""
    if cell.cell_type != "markdown":
        return []
    return [anchor(words) for words in re.findall(r"^#+ (.*)$", cell.source, re.M)]


def section(notebook: NotebookNode, start: str, end: str) -> list[NotebookNode]:
    """The cells from the heading `start` up to the heading `end`; "" is the edge of the notebook.

    Raises `ValueError` if there is no such heading.
    """
    places = {name: i for i, cell in enumerate(notebook.cells) for name in headings(cell)}
    if missing := {start, end} - places.keys() - {""}:
        raise ValueError(f"no heading {sorted(missing)}; there are {', '.join(places)}")
    return notebook.cells[places.get(start, 0) : places.get(end, len(notebook.cells))]


def slides(title: str, rows: list[Row], notebooks: dict[str, NotebookNode]) -> NotebookNode:
    """A notebook of an agenda's slides: a title, then for each row its words and its cells."""
    cells = [_slide(f"# {title}")]
    for row in rows:
        clock = f"{row.start // 60}:{row.start % 60:02}"
        cells.append(_slide(f"## {clock} · {row.minutes} minutes\n\n{_unlinked(row.text)}"))
        for name, start, end in row.parts:
            for cell in section(notebooks[name], start, end):
                if cell.metadata.get("slideshow", {}).get("slide_type") in ("slide", "subslide"):
                    cells.append(copy.deepcopy(cell))
                    cells[-1].metadata.slideshow = {"slide_type": "subslide"}
    return new_notebook(cells=cells)


def _slide(text: str) -> NotebookNode:
    return new_markdown_cell(text, metadata={"slideshow": {"slide_type": "slide"}})


def _unlinked(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def minutes(notebook: NotebookNode) -> dict[int, int]:
    """By the number of a cell, the minute at which it begins, for cells that are tagged so."""
    tags = (
        (i, tag) for i, cell in enumerate(notebook.cells) for tag in cell.metadata.get("tags", [])
    )
    return {i: int(tag.removeprefix("minute-")) for i, tag in tags if tag.startswith("minute-")}


def show_minutes(notebook: NotebookNode) -> None:
    """Write the minute, in place, under the first heading of each cell that is tagged so."""
    for i, minute in minutes(notebook).items():
        cell = notebook.cells[i]
        mark = rf"\1\n\n*Minute {minute}*"
        cell.source = re.sub(r"^(##? .*)$", mark, cell.source, count=1, flags=re.M)


def read(folder: Path) -> dict[str, list[Row]]:
    """The agendas of the notebooks in `folder`."""
    return agendas((folder / "README.md").read_text(encoding="utf-8"))
