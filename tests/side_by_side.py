"""Run the tests in three processes, side by side: much of the time of each is spent asleep.

    python -m tests.side_by_side                     # everything, as `make test` does
    python -m tests.side_by_side -k ddp --maxfail 3  # arguments are those of pytest

One pytest collects all tests, which takes half a minute, and then forks. Each process runs those
files that no other has begun: one goes through them from the front, one from the back, one from the
middle on, until they meet. Each notebook counts as a file of its own. They are in front: while the
processes of a notebook sleep as long as an emulated device would take, the other tests have the
cores.

Tests marked `timed` hold what they measure against bounds of a quiet machine: the first process
runs them at the end, when the others have left.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from tests.elsewhere import PYTEST
from tests.patience import carriers

FOLDER = "MINIPAR_TESTS_FOLDER"
SAID = "said"  # and a number: what all but the first process say
PROCESSES = 3
ROOT = Path(__file__).resolve().parents[1]
LONGEST = "tests/lab/test_exercises.py"


# ---------------------------------------------------------------------- in pytest: a plugin
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Instead of pytest's own loop: be several, and run the files that are still free."""
    if session.config.option.collectonly or session.testsfailed:
        return None
    folder = Path(os.environ[FOLDER])
    every = files([each for each in session.items if not is_timed(each)])
    orders = every, every[::-1], every[len(every) // 2 :] + every[: len(every) // 2]
    number, others = fork(session.config, folder)
    free = (items for name, items in orders[number] if not taken(folder / name))
    try:
        run(session, (item for items in free for item in items))
    finally:
        failed = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    if number == 0:
        run(session, filter(is_timed, session.items))
    session.testsfailed += any(failed)  # of which only the exit code of the first will tell
    return True


def fork(config: pytest.Config, folder: Path) -> tuple[int, list[int]]:
    """Return which of the processes this is, and in the first one the ids of the others."""
    pids = []
    sys.stdout.flush()
    for number in range(1, PROCESSES):
        pid = os.fork()
        if pid == 0:
            capturing = config.pluginmanager.getplugin("capturemanager")
            capturing.stop_global_capturing()
            with (folder / f"{SAID} {number}").open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            capturing.start_global_capturing()
            capturing.suspend_global_capture()
            return number, []
        pids.append(pid)
    return 0, pids


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
        # Hundreds of processes start here, and would each compile what they import.
        env = os.environ | {FOLDER: folder, "PYTHONDONTWRITEBYTECODE": ""}
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # after CUDA's own, no fork could use a GPU
        first = subprocess.Popen(command, cwd=ROOT, env=env)
        try:
            first.wait()
        finally:  # Ctrl-C has reached all
            failed = first.wait()
            for path in sorted(Path(folder).glob(f"{SAID} *")):
                text = path.read_text(encoding="utf-8", errors="replace")
                print("\nBeside it:", text, sep="\n")
            # What serves a process that has ended sees the end a moment later.
            _, alive = psutil.wait_procs(carriers(FOLDER, folder), timeout=10)
            for process in alive:
                print(f"Still running, and it took time from what was timed: {process}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
