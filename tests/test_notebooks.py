"""Every notebook runs and shows what it shows in the repository; none leaves a process behind.

nbval runs each notebook in a pytest of its own, in a subprocess: its report of the cell that
failed is the message here, and whatever the kernel has started can be told by a mark in its
environment, also when its parent is gone.
"""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from minipar.lab import publish
from tests.elsewhere import PYTEST, environment

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SANITIZE = ROOT / "notebooks" / "sanitize.cfg"
MARK = "MINIPAR_TEST_RUN"

pytestmark = pytest.mark.notebook
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def run(path: Path, cell_timeout: int = 120, limit: int = 900) -> tuple[bool, str, list[str]]:
    """Run a notebook through nbval: whether it passed, the report, and processes left over."""
    mark = uuid.uuid4().hex
    env = environment() | {MARK: mark}
    command = [*PYTEST, "--nbval", "-q", "-x", "-c", os.devnull]
    for plugin in ("cacheprovider", "timeout", "hypothesispytest"):
        command += ["-p", f"no:{plugin}"]
    command += ["--rootdir", str(path.parent)]
    command += [f"--nbval-sanitize-with={SANITIZE}", f"--nbval-cell-timeout={cell_timeout}"]
    done = subprocess.run(
        [*command, str(path)],
        env=env,
        cwd=path.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        encoding="utf-8",
    )
    return done.returncode == 0, done.stdout + done.stderr, left_over(mark)


def left_over(mark: str, patience: float = 5.0) -> list[str]:
    """End the processes that carry the mark; return those that were still there after a while."""
    limit = time.monotonic() + patience
    while (found := marked(mark)) and time.monotonic() < limit:
        time.sleep(0.1)
    names = [f"{process.pid} {process.name()}" for process in found]
    for process in found:
        process.kill()
    return names


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that inherited the mark, children of whomever."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


# ---------------------------------------------------------------------- the notebooks
@pytest.mark.trains
@pytest.mark.timeout(900)
@pytest.mark.flaky(reruns=1)  # its cells hold times against bounds, while other tests run beside it
@each_notebook
def test_a_notebook_shows_what_it_showed(path):
    passed, report, left = run(path)
    assert passed, report[-8000:]
    assert not left


@each_notebook
def test_a_notebook_is_published(path):
    """Outputs are there, without errors, warnings, paths of a machine, or too large figures."""
    notebook = nbformat.read(path, as_version=4)
    assert publish.complaints(notebook) == []
    before = nbformat.writes(notebook)
    publish.normalise(notebook, ROOT)
    assert nbformat.writes(notebook) == before, "not normalised: run `make notebooks`"


# ---------------------------------------------------------------------- the test of the test
START = "from minipar.lab.cells import Ranks\nranks = Ranks(2)"
GOOD = "%%ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('took 3 ms')\nx"
OOPS = "%%ranks\nif rank == 1: raise ValueError('oops')\ndist.barrier()"


def written(folder: Path, *cells: str, tags: tuple[str, ...] = ()) -> Path:
    """Write a notebook of these cells, executed; `tags` are those of the last one."""
    path = folder / "throwaway.ipynb"
    made = [new_code_cell(cell) for cell in cells]
    made[-1].metadata["tags"] = list(tags)
    nbformat.write(new_notebook(cells=made), path)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A notebook that starts ranks, uses them, and survives an error that it expects."""
    path = written(tmp_path_factory.mktemp("nb"), START, GOOD, OOPS, tags=("raises-exception",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        assert publish.publish(path) == []
    return path


@pytest.mark.exhaustive  # our own notebooks are such
@pytest.mark.timeout(300)
def test_a_good_notebook_passes_three_times_in_a_row(good):
    for _ in range(3):
        passed, report, left = run(good)
        assert passed, report
        assert not left


def edited(good: Path, folder: Path, number: int, source: str) -> Path:
    """Write the good notebook with the source of one cell exchanged, outputs as they were."""
    notebook = nbformat.read(good, as_version=4)
    notebook.cells[number].source = source
    notebook.cells[-1].metadata = {"tags": []} if number == 2 else notebook.cells[-1].metadata
    path = folder / "throwaway.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "source", "says"),
    [
        (1, GOOD.replace("ones(1)", "zeros(1)"), r"tensor\(\[2\.\]\)"),  # shows something else
        pytest.param(1, OOPS, "oops", marks=pytest.mark.exhaustive),  # fails
        (2, "%%ranks\nwhile True: pass", "imeout|Interrupt"),  # hangs
    ],
    ids=["other output", "error", "hang"],
)
def test_a_bad_notebook_fails_and_leaves_nothing_behind(good, tmp_path, number, source, says):
    """A runner that swallows what the ranks raise, or waits for ever, would fail here."""
    patience = 10 if "while" in source else 120
    passed, report, left = run(edited(good, tmp_path, number, source), cell_timeout=patience)
    assert not passed and re.search(says, report), report
    assert not left


def test_what_is_left_over_is_found():
    """Otherwise "nothing left" would always be true: a process that outlives its parent is seen."""
    mark = uuid.uuid4().hex
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    parent = f"import subprocess, sys; subprocess.Popen({child})"
    subprocess.run([sys.executable, "-c", parent], env={**os.environ, MARK: mark}, check=True)
    assert len(left_over(mark, patience=0.5)) == 1
    assert left_over(mark, patience=2.0) == []
