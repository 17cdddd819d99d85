"""How strong are the tests? mutants.py puts bugs in; here we see whether it can."""

from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import BROKEN, KILLED, SURVIVED, Mutant


@pytest.mark.slow
def test_every_bug_can_still_be_put_in():
    """Each edit fits in one place, leaves Python behind, and names tests that there are."""
    every = mutants.read()
    assert mutants.problems(every) == []
    assert len(every) >= 120
    files = {mutant.file for mutant in every}
    sources = {str(path.relative_to(mutants.ROOT / "minipar"))
               for part in ("comm", "observe", "emulate", "ranks", "model", "parallel",
                            "train", "sim")
               for path in (mutants.ROOT / "minipar" / part).rglob("*.py")
               if path.name != "__init__.py"}  # fmt: skip
    without = sorted(sources - files)
    assert len(without) <= len(sources) // 10, f"files without a single bug: {without}"


SOURCE = "def half(x):\n    return x // 2\n\n\ndef spare(x):\n    return x\n"
TEST = "from minipar.small import half\n\n\ndef test_half():\n    assert half(5) == 2\n"
TEST += "\n\ndef test_wrong():\n    assert half(5) == 3\n"


def small(old: str, new: str, tests: str = "test_small.py::test_half") -> Mutant:
    return Mutant("small.py", old, new, tests, "a bug")


@pytest.mark.slow
def test_killed_survived_and_broken_are_told_apart(tmp_path: Path, monkeypatch):
    """Mutants: a test that fails anyway, or that there is none of, passes for one that has seen the
    bug; a bug that stays in the copy."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # here they would only take time
    for name, text in {"minipar/small.py": SOURCE, "tests/test_small.py": TEST}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    expected = {
        small("x // 2", "x / 2"): KILLED,
        small("return x\n", "return 2 * x\n"): SURVIVED,
        small("x // 2", "x", "test_small.py::test_wrong"): BROKEN,
        small("x // 2", "x", "test_small.py -k nothing_of_the_kind"): BROKEN,
    }
    said: list[str] = []
    outcomes = mutants.run(list(expected), jobs=2, root=tmp_path, tell=said.append)
    assert outcomes == expected and len(said) == 4
    assert mutants.summary(outcomes).endswith("1 killed, 1 survived, 2 broken: 50.0% were seen")
    assert (tmp_path / "minipar/small.py").read_text(encoding="utf-8") == SOURCE


def test_what_is_wrong_with_the_list_is_said(tmp_path: Path):
    (tmp_path / "minipar").mkdir()
    (tmp_path / "minipar/small.py").write_text(SOURCE, encoding="utf-8")
    wrong = [small("x * 2", "x"), small("return", "yield"), small("x // 2", "x //")]
    found = "\n".join(mutants.problems(wrong, tmp_path))
    for said in ("'x * 2' is there 0 times", "'return' is there 2 times", "invalid syntax"):
        assert said in found
    assert found.count("there is no test_small.py::test_half") == 3
    listed = tmp_path / "list.txt"
    listed.write_text("small.py: x // 2  =>  x\n    twice as much: a.py -k b\n", encoding="utf-8")
    assert mutants.read(listed) == [Mutant("small.py", "x // 2", "x", "a.py -k b", "twice as much")]
    listed.write_text("small.py: x // 2 => x\n    twice: a.py\n", encoding="utf-8")
    with pytest.raises(ValueError, match="list.txt:1: no edit"):
        mutants.read(listed)


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * 3600)
def test_nineteen_of_twenty_bugs_are_seen():
    outcomes = mutants.run(mutants.read())
    seen = [mutant for mutant, outcome in outcomes.items() if outcome == KILLED]
    assert BROKEN not in outcomes.values(), mutants.summary(outcomes)
    assert len(seen) >= mutants.AIM * len(outcomes), mutants.summary(outcomes)
