"""Run the tests in three processes, side by side: much of the time of each is spent asleep.

    python -m tests.side_by_side                     # everything, as `make test` does
    python -m tests.side_by_side -k ddp --maxfail 3  # arguments are those of pytest

Each process is a whole pytest, which collects all tests and runs those files that no other has
begun: one goes through them from the front, one from the back, one from the middle on, until they
meet. Each notebook counts as a file of its own. They are in front: while the processes of a
notebook sleep as long as an emulated device would take, the other tests have the cores.

Tests marked `timed` hold what they measure against bounds of a quiet machine: the first process
runs them at the end, when the others have left.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from tests.elsewhere import PYTEST

FOLDER, NUMBER = "MINIPAR_TESTS_FOLDER", "MINIPAR_TESTS_NUMBER"
LEFT = "the others have left"
PROCESSES = 3
ROOT = Path(__file__).resolve().parents[1]
LONGEST = "tests/lab/test_exercises.py"


# ---------------------------------------------------------------------- in each pytest: a plugin
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Instead of pytest's own loop: run the files that are still free."""
    if session.config.option.collectonly or session.testsfailed:
        return None
    folder, number = Path(os.environ[FOLDER]), int(os.environ[NUMBER])
    every = files([each for each in session.items if not is_timed(each)])
    orders = every, every[::-1], every[len(every) // 2 :] + every[: len(every) // 2]
    free = (items for name, items in orders[number] if not taken(folder / name))
    run(session, (item for items in free for item in items))
    if number == 0:
        while not (folder / LEFT).exists():
            time.sleep(0.1)
        run(session, filter(is_timed, session.items))
    return True


def run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """As pytest does it."""
    item = next(items, None)
    while item is not None:
        after = next(items, None)  # of another file: only then what this one has set up is ended
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = after


def is_timed(item: pytest.Item) -> bool:
    return item.get_closest_marker("timed") is not None


def files(items: list[pytest.Item]) -> list[tuple[str, list[pytest.Item]]]:
    """Return what is run without a break: (a name for it, its tests).

    Notebooks first. The longest file is the last, with which one process begins: begun in the end,
    it would leave that process alone.
    """

    def place(item: pytest.Item) -> tuple[bool, bool, str]:
        is_notebook = item.get_closest_marker("notebook") is not None
        name = item.nodeid if is_notebook else item.nodeid.partition("::")[0]
        return not is_notebook, name.endswith(LONGEST), name.replace("/", "-")

    groups = groupby(sorted(items, key=place), place)
    return [(name, list(group)) for (_, _, name), group in groups]


def taken(claim: Path) -> bool:
    """Whether another process has these tests; else they are now ours."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


# ---------------------------------------------------------------------- around them
def main(arguments: list[str]) -> int:
    """Return 0 if all tests pass. What the others say is shown when all are done."""
    with tempfile.TemporaryDirectory(prefix="minipar-tests-") as folder:
        command = [*PYTEST, "-p", "tests.side_by_side", *arguments]
        command += ["-p", "no:cacheprovider"]
        said = [Path(folder, f"said {number}") for number in range(1, PROCESSES)]
        # Hundreds of processes start here, and would each compile what they import.
        env = os.environ | {FOLDER: folder, "PYTHONDONTWRITEBYTECODE": ""}
        with ExitStack() as stack:
            outs = [None, *(stack.enter_context(path.open("wb")) for path in said)]
            first, *others = (
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env | {NUMBER: str(number)},
                    stdout=out,
                    stderr=out and subprocess.STDOUT,
                )
                for number, out in enumerate(outs)
            )
        try:
            for other in others:
                other.wait()
            Path(folder, LEFT).touch()
            first.wait()
        finally:  # Ctrl-C has reached all
            failed = any([each.wait() for each in (first, *others)])
            for path in said:
                text = path.read_text(encoding="utf-8", errors="replace")
                print("\nBeside it:", text, sep="\n")
            for process in left_over(folder):
                print(f"Still running, and it took time from what was timed: {process}")
    return int(failed)


def left_over(folder: str) -> list[psutil.Process]:
    """Processes that tests have started and not ended: their environment names the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(FOLDER) == folder:
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
