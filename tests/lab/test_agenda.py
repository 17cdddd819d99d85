"""Agendas of notebooks/README.md hold together: clocks add up, sections exist and fit."""

import re
from pathlib import Path

import nbformat
import pytest

from minipar.lab.minutes import minutes, minutes_alone, show_minutes

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = {p.stem: nbformat.read(p, as_version=4) for p in sorted(FOLDER.glob("*.ipynb"))}
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
WHOLE = {
    name: int(re.search(rf"\]\({name}\.ipynb\) \|.*\| (\d+) \|", PAGE)[1]) for name in NOTEBOOKS
}
ALONE = {
    name: int(re.search(rf"\]\({name}\.ipynb\) \|.*\| (\d+) \| \d+ \|", PAGE)[1])
    for name in NOTEBOOKS
}
ASIDE = {
    "02b_algorithms",
    "03b_buckets",
    "05b_eight_bits",
    "06b_when_is_it_free",
    "06c_host_and_budget",
    "07b_two_links",
    "09b_long_texts",
    "10b_zero_bubble",
    "11b_more_on_experts",
    "12b_saved_late_or_dead",
    "13b_layouts_and_predictions",
    "16_problems",
}
LINK = re.compile(r"(from |up to )?\[[^\]]*\]\((\d\d\w+)\.ipynb(?:#([^)]*))?\)")
ROW = re.compile(r"^\| (\d+):(\d\d) \| (\d+) \| (.*) \|$", re.M)
TABLES = re.findall(
    r"^\*\*(.*?)\*\*(.*?)(?=^\*\*|\Z)",
    PAGE.partition("agendas\n")[2].partition("\n## ")[0],
    re.M | re.S,
)
AGENDAS = {title: rows for title, text in TABLES if (rows := ROW.findall(text))}
each_agenda = pytest.mark.parametrize("title", AGENDAS)


def anchor(heading: str) -> str:
    """The name of a heading in links, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def parts(text: str) -> list[tuple[str, str, str]]:
    """Notebooks of a row, with the headings that it goes from and up to ("": the edge)."""
    found: dict[str, list[str]] = {}
    for where, name, heading in LINK.findall(text):
        bounds = found.setdefault(name, ["", ""])
        if heading:
            bounds[where == "up to "] = heading
    return [(name, *bounds) for name, bounds in found.items()]


def test_all_agendas_are_read():
    assert len(AGENDAS) == PAGE.count("| from | minutes | |") > 0
    days = [row for title, rows in AGENDAS.items() if title.startswith("Two") for row in rows]
    assert {name for row in days for name, *_ in parts(row[-1])} == NOTEBOOKS.keys() - ASIDE


@each_agenda
def test_clocks_add_up_and_sections_fit(title):
    now = 0
    for hours, start, length, text in AGENDAS[title]:
        assert 60 * int(hours) + int(start) == now, text
        now += int(length)
        needed = sum(minutes_of(*part) for part in parts(text))
        assert needed <= int(length) + 5, (text, needed)  # marks are rounded to 5
    said = {"90 m": 90, "Half": 240}.get(title[:4])
    assert now == said if said else 400 < now < 480


def minutes_of(name: str, start: str, end: str) -> int:
    """How long the notebook itself says that a section takes."""
    marks, places = minutes(NOTEBOOKS[name]), {}
    for i, cell in enumerate(NOTEBOOKS[name].cells):
        if cell.cell_type == "markdown":
            places |= {anchor(h): i for h in re.findall(r"^#+ (.*)$", cell.source, re.M)}

    def at(heading: str, edge: int) -> int:
        if not heading:
            return edge
        return max((m for i, m in marks.items() if i <= places[heading]), default=0)

    return at(end, WHOLE[name]) - at(start, 0)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_minutes_alone_are_honest(name):
    """The page and the first cell say what reading, code, figures and guesses take: at most 75."""
    assert abs(ALONE[name] - minutes_alone(NOTEBOOKS[name])) <= 5 and ALONE[name] <= 75
    said = re.findall(r"about (\d+) minutes", NOTEBOOKS[name].cells[0].source, re.I)
    assert not said or int(said[0]) == ALONE[name]


@pytest.mark.parametrize("name", NOTEBOOKS.keys() - {"16_problems"})
def test_marks_of_minutes_rise(name):
    marks = [*minutes(NOTEBOOKS[name]).values()]
    assert len(marks) >= 3
    assert marks == sorted(set(marks)) and marks[0] > 0 and marks[-1] < WHOLE[name]
    copy = nbformat.from_dict(NOTEBOOKS[name])
    show_minutes(copy)
    text = "\n".join(cell.source for cell in copy.cells)
    assert re.findall(r"^##? .*\n\n\*Minute (\d+)\*$", text, re.M) == [*map(str, marks)]
