"""Agendas of notebooks/README.md hold together: clocks add up, and no notebook is forgotten."""

import re
from pathlib import Path

import nbformat
import pytest

from minipar.lab.minutes import minutes

FOLDER = Path(__file__).parents[2] / "notebooks"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+):(\d\d) \| (\d+) \| (.*) \|$", re.M)
AGENDAS = re.findall(
    r"^\*\*(.*?)\*\*(.*?)(?=^\*\*|\Z)",
    PAGE.partition("agendas\n")[2].partition("\n## ")[0],
    re.M | re.S,
)
AGENDAS = {title: rows for title, text in AGENDAS if (rows := ROW.findall(text))}


def test_clocks_add_up_and_all_notebooks_have_their_time():
    assert len(AGENDAS) == PAGE.count("| from | minutes | |") > 0
    for title, rows in AGENDAS.items():
        now = 0
        for hours, start, length, text in rows:
            assert 60 * int(hours) + int(start) == now, (title, text)
            now += int(length)
        said = {"90 m": 90, "Half": 240}.get(title[:4])
        assert now == said if said else 400 < now < 480
    days = "".join(row[-1] for title in AGENDAS if title[:3] == "Two" for row in AGENDAS[title])
    assert all(path.name in days for path in FOLDER.glob("*.ipynb"))


def test_sections_exist():
    for name, wanted in re.findall(r"\]\((\w+\.ipynb)#([^)]+)\)", PAGE):
        cells = nbformat.read(FOLDER / name, as_version=4).cells
        heads = (h for c in cells for h in re.findall(r"^#+ (.*)$", c.source, re.M))
        # The name of a heading in links, as GitHub makes it.
        names = {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in heads}
        assert wanted in names, (name, wanted)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_marks_of_minutes_rise(path):
    marks = [*minutes(nbformat.read(path, as_version=4)).values()]
    whole = int(re.search(rf"\]\({path.name}\) \|.*\| (\d+) \|", PAGE)[1])
    assert len(marks) >= 3
    assert marks == sorted(set(marks)) and marks[0] > 0 and marks[-1] < whole
