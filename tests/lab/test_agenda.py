"""Agendas hold together: clocks add up, sections exist and fit into their minutes, slides show."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from minipar.lab import agenda

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = {p.stem: nbformat.read(p, as_version=4) for p in sorted(FOLDER.glob("*.ipynb"))}
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
AGENDAS = agenda.agendas(PAGE)
WHOLE = {
    name: int(re.search(rf"\]\({name}\.ipynb\) \|.*\| (\d+) \|", PAGE)[1]) for name in NOTEBOOKS
}
each_agenda = pytest.mark.parametrize("title", AGENDAS)
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def test_all_agendas_are_read():
    assert len(AGENDAS) == 6 and PAGE.count("| from | minutes | |") == 6
    assert sum(map(len, AGENDAS.values())) == len(re.findall(r"^\| \d+:\d\d \|", PAGE, re.M))


@each_agenda
def test_clocks_add_up(title):
    now = 0
    for row in AGENDAS[title]:
        assert row.start == now, row
        now += row.minutes
    said = {"90 m": 90, "Half": 240}.get(title[:4])
    assert now == said if said else 400 < now < 480


def minutes_of(name: str, start: str, end: str) -> int:
    """How long the notebook itself says that a section takes."""
    notebook = NOTEBOOKS[name]
    marks = agenda.minutes(notebook)
    places = {h: i for i, cell in enumerate(notebook.cells) for h in agenda.headings(cell)}

    def at(heading: str, edge: int) -> int:
        if not heading:
            return edge
        return max((m for i, m in marks.items() if i <= places[heading]), default=0)

    return at(end, WHOLE[name]) - at(start, 0)


@each_agenda
def test_sections_fit_into_their_minutes(title):
    for row in AGENDAS[title]:
        needed = sum(minutes_of(*part) for part in row.parts)
        assert needed <= row.minutes + 5, (row, needed)  # marks are rounded to 5


def test_two_days_have_all_notebooks():
    days = [row for title, rows in AGENDAS.items() if title.startswith("Two") for row in rows]
    assert {name for row in days for name, *_ in row.parts} == set(NOTEBOOKS)


@each_notebook
def test_marks_of_minutes_rise(name):
    marks = [*agenda.minutes(NOTEBOOKS[name]).values()]
    assert len(marks) >= 3
    assert marks == sorted(set(marks)) and marks[0] > 0 and marks[-1] < WHOLE[name]
    copy = nbformat.from_dict(NOTEBOOKS[name])
    agenda.show_minutes(copy)
    text = "\n".join(cell.source for cell in copy.cells)
    assert re.findall(r"^##? .*\n\n\*Minute (\d+)\*$", text, re.M) == [*map(str, marks)]


@each_agenda
def test_a_deck_has_a_slide_for_each_row_and_figures(title):
    rows = AGENDAS[title]
    deck = agenda.slides(title, rows, NOTEBOOKS)
    kinds = [cell.metadata.slideshow.slide_type for cell in deck.cells]
    assert kinds.count("slide") == len(rows) + 1
    figures = [cell for cell in deck.cells if cell.cell_type == "code"]
    assert len(figures) == kinds.count("subslide") > 5
    for cell in figures:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_a_row_takes_what_lies_between_its_headings():
    show = {"slideshow": {"slide_type": "slide"}}
    cells = []
    for heading in ("A: one", "B's two", "C"):
        cells += [new_markdown_cell(f"## {heading}"), new_code_cell(heading, metadata=show)]
        cells.append(new_code_cell("no slide"))
    books = {"01_x": new_notebook(cells=cells)}
    text = "[01](01_x.ipynb) from [B](01_x.ipynb#bs-two) up to [C](01_x.ipynb#c)"
    deck = agenda.slides("Title", [agenda.Row(65, 10, text)], books)
    assert [cell.source for cell in deck.cells] == [
        "# Title",
        "## 1:05 · 10 minutes\n\n01 from B up to C",
        "B's two",
    ]
    with pytest.raises(ValueError, match="no heading .'d'.; there are a-one, bs-two, c"):
        agenda.slides("Title", [agenda.Row(0, 5, "[01](01_x.ipynb#d)")], books)


def test_an_agenda_of_another_section_is_none():
    """Fails if all bold words behind the first table are taken for titles of agendas."""
    table = "\n\n| 0:00 | 10 | words |\n\n"
    page = f"## Two agendas\n\n**One.**{table}**Two.**{table}## After\n\n**Three.**{table}"
    assert list(agenda.agendas(page)) == ["One", "Two"]
