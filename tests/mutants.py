"""Does any test see the bug? Puts the bugs of mutants.txt into a copy of minipar, one at a time.

    python -m tests.mutants                          # all of them, and the share that was seen
    python -m tests.mutants --only ddp --jobs 2      # those with this word in file, bug or tests
    python -m tests.mutants --check                  # only: can each edit still be made?

A bug that no test sees has *survived*: a test is missing, or the bug is none. One is *broken* when
its edit can no longer be made, or when the tests that should see it fail without it as well.
mutants.txt holds two lines per bug; fragments are of one line, and files those of minipar/:

    observe/spans.py: the old fragment, found exactly once in that file  =>  the new one
        what is wrong now: the tests that should see it, as for pytest, from tests/
"""

import argparse
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.elsewhere import PYTEST

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.txt"
AIM = 0.95  # of the bugs are to be seen
PATIENCE = 300.0  # seconds for the tests of one bug; who hangs has seen it
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info")
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"


@dataclass(frozen=True)
class Mutant:
    """One bug: an edit of one file, and the tests that should see it."""

    file: str
    old: str
    new: str
    tests: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what} [{self.tests}]"

    def applied(self, source: str) -> str:
        """The source with the bug. Raises ValueError where it does not fit, or is no Python."""
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self}: {self.old!r} is there {count} times, and must be once")
        try:
            compile(edited := source.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self}: {error}") from None
        return edited


def read(path: Path = LIST) -> list[Mutant]:
    """All bugs, in the order of the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    mutants = []
    for number, (edit, seen) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        (file, _, edit), (what, _, tests) = edit.partition(": "), seen.strip().partition(": ")
        old, is_edit, new = edit.partition("  =>")
        if not (is_edit and tests and seen.startswith("    ")):
            raise ValueError(f"{path.name}:{2 * number + 1}: no edit, or no tests that see it")
        mutants.append(Mutant(file, old, new.strip(), tests, what))
    return mutants


def problems(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What has to be mended in the list before it can be run."""
    found = [f"{mutant}: a bug twice" for mutant, count in Counter(mutants).items() if count > 1]
    for mutant in mutants:
        try:
            mutant.applied((root / "minipar" / mutant.file).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            found.append(str(error))
        for test in (word for word in shlex.split(mutant.tests) if ".py" in word):
            path, *names = test.partition("[")[0].split("::")
            file = root / "tests" / path
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            if not text or any(f"def {name}(" not in text for name in names):
                found.append(f"{mutant}: there is no {test}")
    return found


# ---------------------------------------------------------------------- running them
class Bench:
    """A copy of the repository, in which bugs can do no harm."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(root, folder, ignore=NOT_COPIED)

    @contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """In the body, the copy has the bug."""
        file = self.folder / "minipar" / mutant.file
        source = file.read_text(encoding="utf-8")
        file.write_text(mutant.applied(source), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(source, encoding="utf-8")

    def pytest(self, tests: str) -> str:
        """Run `tests`: KILLED if one fails, SURVIVED if all pass, BROKEN if there are none."""
        # Without bytecode: that of a file edited twice within a second would be taken for good.
        env = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        env["MINIPAR_TESTS_TIMED"] = "counts, whatever else runs on this machine"
        words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
        options = ("-x", "-q", "-p", "no:cacheprovider")
        process = subprocess.Popen(
            [*PYTEST, *options, *words],
            cwd=self.folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return KILLED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return {0: SURVIVED, 4: BROKEN, 5: BROKEN}.get(code, KILLED)


def run(
    mutants: Sequence[Mutant],
    jobs: int = 1,
    *,
    root: Path = ROOT,
    trust: bool = False,
    tell: Callable[[str], None] = print,
) -> dict[Mutant, str]:
    """What became of each bug. `trust`: that tests pass without any is not looked at."""
    outcomes: dict[Mutant, str] = {}
    free: queue.SimpleQueue[Bench] = queue.SimpleQueue()

    def try_all(tests: str, group: list[Mutant]) -> None:
        bench = free.get()
        is_good = trust or bench.pytest(tests) == SURVIVED
        for mutant in group:
            start = time.monotonic()
            with bench.with_bug(mutant):
                outcomes[mutant] = bench.pytest(tests) if is_good else BROKEN
            tell(f"{outcomes[mutant]:8} {time.monotonic() - start:5.1f} s  {mutant}")
        free.put(bench)

    groups = groupby(sorted(mutants, key=lambda m: m.tests), key=lambda m: m.tests)
    with tempfile.TemporaryDirectory(prefix="minipar-mutants-") as folder:
        for number in range(jobs):
            free.put(Bench(root, Path(folder, str(number))))
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(try_all, tests, list(group)) for tests, group in groups]:
                future.result()
    return outcomes


def summary(outcomes: dict[Mutant, str]) -> str:
    """Who is left, and the share that was killed of those that could be run."""
    count = Counter(outcomes.values())
    lines = [f"{o}: {m}" for m, o in outcomes.items() if o != KILLED]
    lines.append(f"{count[KILLED]} killed, {count[SURVIVED]} survived, {count[BROKEN]} broken: ")
    lines[-1] += f"{count[KILLED] / max(1, count[KILLED] + count[SURVIVED]):.1%} were seen"
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="bugs with this word in file, bug or tests")
    parser.add_argument("--file", default="", help="bugs of this file, such as parallel/ddp.py")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--list", action="store_true", help="run nothing, print them")
    parser.add_argument("--check", action="store_true", help="only see that each can be put in")
    parser.add_argument("--trust", action="store_true", help="believe that tests pass without bugs")
    asked = parser.parse_args(arguments)
    mutants = [m for m in read() if asked.only in str(m) and asked.file in ("", m.file)]
    if asked.list:
        print(*mutants, f"{len(mutants)} bugs", sep="\n")
        return 0
    if found := problems(mutants):
        print(*found, sep="\n")
        return 1
    if asked.check:
        print(f"{len(mutants)} bugs can be put in")
        return 0
    outcomes = run(mutants, asked.jobs, trust=asked.trust, tell=lambda s: print(s, flush=True))
    print(summary(outcomes))
    return int(any(outcome != KILLED for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
