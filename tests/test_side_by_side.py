"""Several pytests share the tests: none is left out, none runs twice, and no failure is lost."""

from collections import Counter
from pathlib import Path

import pytest

from tests import side_by_side

FILE = """
import pytest

def note(what):
    with open({log!r}, "a", encoding="utf-8") as log:
        log.write("{name}" + what + " ")

@pytest.fixture(scope="module", autouse=True)
def once():
    note("+")
    yield
    note("-")

@pytest.mark.parametrize("number", [1, 2, 3])
def test_it(number):
    note(str(number))
    assert {good}
"""


@pytest.mark.mostly_slow
@pytest.mark.parametrize("bad", ["", "a", "e"])
def test_every_test_runs_once_and_every_failure_counts(tmp_path: Path, monkeypatch, capfd, bad):
    """Mutants: the exit code of one process alone; a file that is torn down in its middle."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # here they would only take time
    log = tmp_path / "log"
    for name in "abcde":
        text = FILE.format(log=str(log), name=name, good=name != bad)
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    code = side_by_side.main(["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)])
    said = capfd.readouterr().out
    assert code == (1 if bad else 0), said
    assert Counter(log.read_text(encoding="utf-8").split()) == {
        f"{name}{what}": 1 for name in "abcde" for what in "+123-"
    }
    assert said.count("3 failed") == len(bad)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("bad", [False, True])
def test_what_is_timed_runs_once_when_all_else_is_done(tmp_path: Path, monkeypatch, capfd, bad):
    """Mutants: each process runs it; its failure is lost; it runs beside the others."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    log = tmp_path / "log"
    for name in "abcd":
        text = FILE.format(log=str(log), name=name, good=name != "a" or not bad)
        timed = "pytestmark = pytest.mark.timed\n" if name == "a" else ""
        (tmp_path / f"test_{name}.py").write_text(text + timed, encoding="utf-8")
    code = side_by_side.main(["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)])
    assert code == bad, capfd.readouterr().out
    ran = log.read_text(encoding="utf-8").split()
    assert ran[-5:] == ["a+", "a1", "a2", "a3", "a-"] and len(ran) == 20 == len({*ran})


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_all_compute_with_threads_of_their_own(tmp_path: Path, monkeypatch):
    """Mutant: some had computed when tests were collected; after the fork each process waits for
    them in vain."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = (
        "import torch\nx = torch.ones(10**6)\ntwice = (x + x).sum()\n"
        "def test_it(): assert torch.get_num_threads() == 2 and (x + x).sum() == twice\n"
    )
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    hooks = "from tests.conftest import pytest_collection, pytest_collection_finish  # noqa: F401\n"
    (tmp_path / "conftest.py").write_text(hooks, encoding="utf-8")
    arguments = ["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    assert side_by_side.main(arguments) == 0


@pytest.mark.slow
def test_what_a_test_has_left_running_is_named(tmp_path: Path, monkeypatch, capfd):
    """It would take both cores from what is timed, and the test that did it is green."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    start = "def test_it():\n    import subprocess\n    subprocess.Popen(['sleep', '20'])\n"
    (tmp_path / "test_a.py").write_text(start, encoding="utf-8")
    side_by_side.main(["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)])
    said = capfd.readouterr().out
    assert said.count("Still running") == 1 and "name='sleep'" in said
