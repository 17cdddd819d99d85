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
patience.stolen = stolen

@pytest.mark.timed
def test_it():
    time.sleep(0.2)
    assert not {late}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "shares, late, said",
    [
        ([0.5, 0.4, 0.3, 0.2], True, "1 skipped"),
        ([0.5, 0.0, 0.3, 0.2], True, "1 failed"),
        ([0.5], False, "1 passed"),
    ],
)
def test_what_is_late_is_skipped_where_the_cores_were_not_its_own(tmp_path, shares, late, said):
    """Mutants: one look of a busy machine is enough to skip; or the last look alone counts."""
    hooks = "from tests.conftest import pytest_collection_modifyitems, pytest_runtest_call\n"
    (tmp_path / "conftest.py").write_text(hooks, encoding="utf-8")
    text = FILE.format(shares=shares, late=late)
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root)}
    env.pop("MINIPAR_TESTS_TIMED", None)
    command = [sys.executable, "-m", "pytest", "-rs", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, encoding="utf-8", env=env
    )
    assert said in done.stdout, done.stdout + done.stderr
    assert late == ("3 rerun" in done.stdout)
    shares = r"other virtual machines had (\d\d\.\d%, ){3}\d\d\.\d% of the cores"
    assert ("skipped" in said) == bool(re.search(shares, done.stdout)), done.stdout


def test_what_was_stolen_is_a_share_of_all_cores(monkeypatch):
    looks, read = patience.Looks(), iter([3.0, 3.0, 5.0, 5.0 + 9.0])
    monkeypatch.setattr(patience, "stolen", lambda: next(read))
    for _ in range(2):
        with looks.one():
            pass
    assert looks.shares[0] == 0 < looks.shares[1] and not looks.say_nothing
