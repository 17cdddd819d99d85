"""What a test of seconds may blame on others, and what not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience

FILE = """
import os, time
import pytest
from tests import patience

SHARES = iter({shares})
WAS = [0.0]

def stolen():  # asked before and after each look
    if stolen.inside:
        WAS[0] += next(SHARES) * os.cpu_count() * 0.2
    stolen.inside = not stolen.inside
    return WAS[0]

stolen.inside = False

@pytest.fixture(autouse=True, scope="module")
def told(usual=patience.stolen):
    patience.stolen = stolen
    yield
    patience.stolen = usual

@pytest.mark.timed
def test_it():
    time.sleep(0.2)
    assert not {late}
"""


CASES = {
    "was_always_taken": ([0.5, 0.4, 0.3, 0.2], True, "SKIPPED"),
    "was_its_own_once": ([0.5, 0.0, 0.3, 0.2], True, "FAILED"),
    "was_in_time": ([0.5], False, "PASSED"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> str:
    """What pytest says of all cases, a file each, in a process of its own."""
    folder = tmp_path_factory.mktemp("patience")
    hooks = "from tests.conftest import pytest_collection_modifyitems, pytest_runtest_call\n"
    (folder / "conftest.py").write_text(hooks, encoding="utf-8")
    for name, (shares, late, _) in CASES.items():
        text = FILE.format(shares=shares, late=late)
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "300"}
    env.pop("MINIPAR_TESTS_TIMED", None)
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-c", "/dev/null", "--rootdir"]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=env,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_late_is_skipped_where_the_cores_were_not_its_own(said, name):
    """Mutants: one look of a busy machine is enough to skip; or the last look alone counts."""
    _, late, outcome = CASES[name]
    seen = re.findall(rf"^test_{name}\.py::test_it (\w+)", said, re.M)
    assert seen == ["RERUN"] * (3 * late) + [outcome], said
    shares = r"other virtual machines had (\d\d\.\d%, ){3}\d\d\.\d% of the cores"
    reason = rf"^test_{name}\.py::test_it SKIPPED \({shares}"
    assert (outcome == "SKIPPED") == bool(re.search(reason, said, re.M)), said


def test_what_was_stolen_is_a_share_of_all_cores(monkeypatch):
    looks, read = patience.Looks(), iter([3.0, 3.0, 5.0, 5.0 + 9.0])
    monkeypatch.setattr(patience, "stolen", lambda: next(read))
    for _ in range(2):
        with looks.one():
            pass
    assert looks.shares[0] == 0 < looks.shares[1] and not looks.say_nothing
