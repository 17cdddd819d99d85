"""What is kept is a file that stands alone and passes again; no file is overwritten."""

import math

import pytest
import torch
from torch import nn

from minipar.lab import exercises, own
from minipar.lab.exercises import CheckFailed, exercise

A_TENSOR = torch.ones(2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A notebook's folder, with the exercises of the repository."""
    known = exercises.exercises()
    monkeypatch.setattr(exercises, "exercises", lambda: known)
    monkeypatch.setattr(exercises, "passed", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", own.PIECES)
def test_an_answer_is_kept_and_passes_again_from_its_file(name, ranks, monkeypatch, capsys):
    """Catches a file that lacks an import or a helper."""
    number, called = own.PIECES[name]
    size = max(4, *exercise(number).sizes)
    monkeypatch.setattr(exercises, "_own", ranks(size, "link"))
    stored = own.piece(name)
    assert capsys.readouterr().out == f"{name}: the stored answer to exercise {number}\n"
    exercises.passed[number] = stored
    own.keep(name, stored)
    said = capsys.readouterr().out
    assert said == f"Kept: my/{name}.py, your answer to exercise {number}.\n"
    piece = own.piece(name)
    assert piece.__name__ == called and capsys.readouterr().out == f"{name}: my/{name}.py\n"
    exercises.check(number, piece)


def test_only_what_has_passed_is_kept(folder, monkeypatch):
    """Mutant: any answer is written."""

    def refuse(number, answer):
        raise CheckFailed(f"{number} is not there yet")

    monkeypatch.setattr(exercises, "check", refuse)
    with pytest.raises(CheckFailed, match="3.5 is not there yet"):
        own.keep("ddp", uses_much)
    assert not (folder / "my").exists()
    exercises.passed["3.5"] = uses_much
    own.keep("ddp", uses_much)
    assert own.piece("ddp")(1) == 3 * math.pi


def _helper(x):
    return 3 * x


def uses_much(x):
    math = x  # a local of a global's name
    return _helper(nn.Identity()(torch.tensor(math)).item()) * _pi()


def _pi():
    return math.pi


def uses_a_tensor(x):
    return x + A_TENSOR


def test_a_file_has_helpers_and_imports(monkeypatch):
    monkeypatch.setattr(uses_much, "__module__", "__main__")
    for helper in (_helper, _pi):
        monkeypatch.setattr(helper, "__module__", "__main__")
    text = own.written(uses_much, "Overlapped")
    space = {}
    exec(text, space)
    assert space["Overlapped"](2) == 6 * math.pi
    assert "import torch.nn as nn" in text and "uses_much" not in text
    with pytest.raises(ValueError, match="uses 'A_TENSOR', a Tensor of the notebook"):
        own.written(uses_a_tensor, "Overlapped")


def test_a_copy_without_answers_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(exercise("3.5"), "solution", None)
    with pytest.raises(ValueError, match="there is no my/ddp.py: first pass exercise 3.5"):
        own.piece("ddp")


def test_nothing_that_a_learner_wrote_is_lost(folder):
    """Neither edits of a file, nor another answer."""
    exercises.passed["3.5"] = uses_much
    own.keep("ddp", uses_much)
    file = folder / "my/ddp.py"
    exercises.passed["3.5"] = _helper
    with pytest.raises(ValueError, match="my/ddp.py holds another answer: rename or delete it"):
        own.keep("ddp", _helper)
    exercises.passed["3.5"] = uses_much
    own.keep("ddp", uses_much)  # again: the same file
    edited = file.read_text(encoding="utf-8") + "# mine\n"
    file.write_text(edited, encoding="utf-8")
    with pytest.raises(ValueError, match="my/ddp.py holds another answer"):
        own.keep("ddp", uses_much)
    assert file.read_text(encoding="utf-8") == edited
