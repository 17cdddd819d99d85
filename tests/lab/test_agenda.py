"""Agendas of notebooks/README.md hold together: their clocks add up, and minutes are honest."""

import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = {p.stem: nbformat.read(p, as_version=4) for p in sorted(FOLDER.glob("*.ipynb"))}
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
TIMES = re.findall(r"\]\((\w+)\.ipynb\) \|.*\| (\d+) \| (\d+) \|", PAGE)
ALONE = {name: int(alone) for name, alone, _ in TIMES}
ROW = re.compile(r"^\| (\d+):(\d\d) \| (\d+) \| (.*) \|$", re.M)
TABLES = re.findall(
    r"^\*\*(.*?)\*\*(.*?)(?=^\*\*|\Z)",
    PAGE.partition("agendas\n")[2].partition("\n## ")[0],
    re.M | re.S,
)
AGENDAS = {title: rows for title, text in TABLES if (rows := ROW.findall(text))}


def test_all_agendas_are_read():
    assert len(AGENDAS) == PAGE.count("| from | minutes | |") > 0


@pytest.mark.parametrize("title", AGENDAS)
def test_clocks_add_up(title):
    now = 0
    for hours, start, length, text in AGENDAS[title]:
        assert 60 * int(hours) + int(start) == now, text
        now += int(length)
    said = {"90 m": 90, "Half": 240}.get(title[:4])
    assert now == said if said else 400 < now < 480


def minutes_alone(notebook: nbformat.NotebookNode) -> float:
    """Minutes of a careful reader: 120 words or ten lines of code each, one per figure and guess.

    Exercises, their hints, and the quiz are not counted.
    """
    total = 0.0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            text = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S)
            text = re.sub(r"(?m)^(> ?)?### Exercise .*|## Quiz.*", "", text, flags=re.S)
            total += len(text.split()) / 120 + text.count("**Predict")
        elif not any(tag.startswith(("exercise-", "raises")) for tag in tags):
            total += sum(bool(line.strip()) for line in cell.source.splitlines()) / 10
            total += sum("image/png" in output.get("data", {}) for output in cell.outputs)
    return total


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_minutes_alone_are_honest(name):
    """The page and the first cell say what reading, code, figures and guesses take: at most 75."""
    assert abs(ALONE[name] - minutes_alone(NOTEBOOKS[name])) <= 5 and ALONE[name] <= 75
    said = re.findall(r"about (\d+) minutes", NOTEBOOKS[name].cells[0].source, re.I)
    assert not said or int(said[0]) == ALONE[name]
