"""Problems from real clusters: each is complete, its solution passes, its slips are told apart."""

import re
from pathlib import Path

import nbformat
import pytest

from minipar.lab import problems
from minipar.lab.exercises import CheckFailed
from minipar.lab.problems import Problem, check_number, worked

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks/16_problems.ipynb"
CELLS = nbformat.read(PAGE, as_version=4).cells
ALL = {n: p for number in range(15) for n, p in problems.problems(str(number)).items()}
each = pytest.mark.parametrize("number", ALL)


def refused(number: str, answer: object) -> str:
    with pytest.raises(CheckFailed) as caught:
        check_number(number, answer)
    return str(caught.value)


@pytest.mark.mostly_slow
@each
def test_the_worked_solution_is_right(number, capsys):
    asked = ALL[number]
    for share in (1, 1 + 0.9 * asked.within, 1 - 0.9 * asked.within):
        check_number(number, asked.right * share)
    said = capsys.readouterr().out
    assert said.count(f"Problem {number} is right: ") == 3 and asked.lesson in said
    assert "return" in worked(number).data
    assert "off" not in refused(number, ...) and "is waiting for you" in refused(number, ...)


@each
def test_slips_are_refused_each_with_its_sentence(number):
    """Mutant: a slip whose value lies within the tolerance, or that another one hides."""
    asked = ALL[number]
    assert asked.slips
    for sentence, value in asked.slips.items():
        assert sentence in refused(number, value)
        assert sentence[-1] in ".?" and len(sentence) <= 90


@each
def test_a_problem_is_complete(number):
    """With its unit, its source with a link, its numbers; it stands in the notebook as it is."""
    assert len(ALL) == 15 * 5
    asked = ALL[number]
    text = " ".join(asked.work.__doc__.split())
    assert asked.title and asked.unit and asked.hint and 0 <= asked.within <= 0.05
    assert re.search(r"\]\(https://[^)]+\)", asked.source)
    assert "?" in text and len(re.findall(r"\d", text)) >= 2 and len(text.split()) <= 110
    (at,) = [i for i, cell in enumerate(CELLS) if cell.source == f'check_number("{number}", ...)']
    shown = CELLS[at - 1].source
    within = f"to within {100 * asked.within:g} %" if asked.within else "exactly"
    assert shown.startswith(f"### Problem {number}: {asked.title}\n\n{text}\n\n")
    assert f"**Asked:** {asked.unit}, {within}. **Source:** {asked.source}.\n" in shown
    assert f"\n\n{asked.hint}\n</details>" in shown
    assert "raises-exception" in CELLS[at].metadata.tags


def test_what_is_no_number_gets_a_sentence(capsys):
    assert refused("P6.1", "16 GB") == "'16 GB' is no number; give it in GB per GPU"
    assert "is no number" in refused("P6.1", None)
    assert "above zero" in refused("P6.1", -16.6) and "above zero" in refused("P6.1", 0)
    assert "It is no number." in refused("P6.1", float("nan"))
    check_number("P6.1", "16.6")


def test_an_answer_that_is_wrong_in_its_own_way_is_told_by_how_much():
    """A guess for everything would be none."""
    strange = Problem("A title", "GB", "", "", {}, lambda: 10.0)
    assert strange.why(31) == "About 3.1 times too large."
    assert strange.why(3) == "About 3.3 times too small."
    assert strange.why(80) == "Exactly 8 times too large: bits or bytes?"
