"""Every notebook runs and shows what it shows in the repository; none leaves a process behind.

nbval runs each notebook in a pytest of its own, in a subprocess: its report of the cell that
failed is the message here, and whatever the kernel has started can be told by a mark in its
environment, also when its parent is gone.
"""

import os
import re
import subprocess
import uuid
from pathlib import Path

import nbformat
import pytest

from minipar.lab import publish
from tests.elsewhere import PYTEST, environment
from tests.patience import carriers, until

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SANITIZE = ROOT / "notebooks" / "sanitize.cfg"
MARK = "MINIPAR_TEST_RUN"
MACHINE = re.compile(r"(?<![\w.])(?:/home/|/root/|/Users/|/tmp/|/var/folders/)")  # paths of one

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


def left_over(mark: str, patience: float = 10.0) -> list[str]:
    """End the processes that carry the mark; return those that were still there after a while."""
    until(lambda: not carriers(MARK, mark), patience)
    found = carriers(MARK, mark)
    names = [f"{process.pid} {process.name()}" for process in found]
    for process in found:
        process.kill()
    return names


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
    for cell in notebook.cells:
        outputs, tags = cell.get("outputs", []), cell.metadata.get("tags", [])
        raised = any(output.output_type == "error" for output in outputs)
        assert raised == ("raises-exception" in tags), cell.source
        assert cell.cell_type != "code" or cell.execution_count or not cell.source, cell.source
        for output in outputs:
            data, about = output.get("data", {}), output.get("metadata", {})
            assert output.get("name") != "stderr" and not MACHINE.search(str(output)), cell.source
            if png := data.get("image/png"):
                assert len(png) * 3 / 4 < 100_000 and about["image/png"]["alt"], cell.source
    before = nbformat.writes(notebook)
    publish.normalise(notebook, ROOT)
    assert nbformat.writes(notebook) == before, "not normalised: run `make notebooks`"
