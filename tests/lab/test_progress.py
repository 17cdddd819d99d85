"""What is solved is remembered in a notebook, and nowhere else."""

import pytest

from minipar.lab import exercises
from minipar.lab.progress import progress


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """As in a notebook of this folder, which has the exercises of the repository."""
    monkeypatch.setattr(exercises, "get_ipython", lambda: "a shell")
    known = exercises.exercises()
    monkeypatch.setattr(exercises, "exercises", lambda: known)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_check_that_passes_is_remembered_once(notebook):
    answer = exercises.exercise("1.2").solution
    for _ in range(2):
        exercises.check("1.2", answer)
    assert (notebook / "solved.txt").read_text(encoding="utf-8") == "1.2\n"
    with pytest.raises(exercises.CheckFailed):
        exercises.check("0.1", lambda tensor, axis: tensor)
    assert exercises.solved() == ["1.2"]


def test_progress_has_a_tick_for_what_is_solved(notebook, monkeypatch):
    before = progress().data
    assert before.startswith("0 of ") and "✓" not in before and "The next: 0.1" in before
    exercises.note("0.1")
    after = progress().data
    assert after.startswith("1 of ") and "**0.1 ✓**" in after and "The next: 0.2" in after
    first, one = (int(text.split(", ")[1].split()[0]) for text in (before, after))
    assert first - one == exercises.exercise("0.1").minutes
    monkeypatch.setattr(exercises, "get_ipython", lambda: None)
    exercises.note("0.2")  # outside of a notebook
    assert exercises.solved() == ["0.1"]
