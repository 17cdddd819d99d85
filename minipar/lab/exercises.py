"""Exercises that check themselves: ``check("2.1", ring_all_reduce)``.

A check runs the learner's function on real ranks with fresh random inputs. It compares the results
with the truth, and counts what every rank sent. A function with right results from too many bytes,
or from none, does not pass. Nor does a race that gloo would forgive (`emulate/strict.py`). A check
that fails raises `CheckFailed`, and never only prints.

An exercise is one file, ``notebooks/solutions/ex_2_1.py``, with these names:

    \"\"\"Title, in the first line of the docstring.\"\"\"
    LEVEL, MINUTES = "medium", 30
    GOOD = "what counts as good"
    PRAISE = "what the learner has just built"           # shown by a check that passes
    SIZES = (4, 3)                                       # numbers of ranks; (4,) if not given
    MESH = {"replica": 2, "node": 2}                     # or a mesh: then the answer gets its axes
    SECONDS = 60                                         # for a run, where `TIME_LIMIT` is short

    def given(size, random): ...        # -> for each rank, the arguments of the learner's function
    def check_result(case): ...         # every check_* raises CheckFailed, in the order of the file
    def check_traffic(case): ...
    def bonus_one_message(case): ...    # asked for by check("2.1", fn, bonus=True) only
    def solution(tensor, axis): ...     # the learner's function gets the Axis as its last argument
    def solution_bonus(tensor, axis): ...                # where there are bonus targets
    @fails("traffic", "All is sent.")   # which check refuses it; the words for answers like it
    def wrong_sends_everything(tensor, axis): ...
    def run(answer, axis, *given): ...  # optional: what surrounds the call of the answer on a rank
    def drawn(case): ...                # optional: a figure of the answer at work, once it passes
    BUGS = {"no overlap": "", "...": "What speaks against it."}  # optional, see `check`; "": it is

The tests prove every file found there: the solution passes, each wrong answer fails as it says.
"""

import dis
import importlib.util
import json
import math
import re
import secrets
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from IPython.display import display

from minipar.comm.collectives import standing_for
from minipar.comm.mesh import Axis, groups_along, make_group
from minipar.emulate import device, link, link_group, strict
from minipar.lab import cells
from minipar.lab.cases import Case, CheckFailed, Sent
from minipar.lab.shell import code_of
from minipar.ranks import worker
from minipar.ranks.launch import RankError, Ranks

TIME_LIMIT = 15.0  # seconds for one run of a learner's function: endless loops end, too


def fails(criterion: str, sentence: str) -> Callable[[Callable], Callable]:
    """Say of a wrong answer which check refuses it: "result" for ``check_result``.

    `sentence` tells a learner whose answer behaves in the same way what may be wrong.
    """

    def mark(answer: Callable) -> Callable:
        answer.fails, answer.sentence = criterion, sentence
        return answer

    return mark


# ====================================================================== finding exercises
class Exercise:
    """One file of ``notebooks/solutions``, with its parts by name."""

    def __init__(self, file: Path) -> None:
        module = load(file)
        part = vars(module).get  # or None, or the default, where the file has no such part
        self.id, self.title = id_of(file), (module.__doc__ or "").splitlines()[0].rstrip(".")
        self.level, self.minutes = module.LEVEL, module.MINUTES
        self.good, self.praise = module.GOOD, module.PRAISE
        self.mesh: dict[str, int] = part("MESH", {})
        size = math.prod(self.mesh.values()) if self.mesh else 4
        self.sizes: tuple[int, ...] = part("SIZES", (size,))
        self.given, self.run, self.drawn = module.given, part("run", _run), part("drawn")
        # A host may have left the answers out.
        self.solution, self.solution_bonus = part("solution"), part("solution_bonus")
        self.seconds: float | None = part("SECONDS")
        self.bugs: dict[str, str] = part("BUGS", {})
        self.checks, self.bonuses = _named(module, "check_"), _named(module, "bonus_")
        self.wrongs = _named(module, "wrong_")
        known = json.loads(file.with_name("slips.json").read_text(encoding="utf-8"))
        self.slips: dict[str, Any] = known.get(self.id, {"seed": 0, "told": {}})


def _run(answer: Callable, axis: Axis | list[Axis], *given: Any) -> Any:
    return answer(*given, *(axis if isinstance(axis, list) else [axis]))


def _named(module: ModuleType, prefix: str) -> dict[str, Callable]:
    """Return the functions with names that begin with `prefix`, in the order of the file."""
    return {n.removeprefix(prefix): f for n, f in vars(module).items() if n.startswith(prefix)}


def load(file: Path) -> ModuleType:
    """Import a file of answers, so that its functions can be sent to ranks."""
    name = f"minipar_solutions_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # the ranks cannot import it by this name
    return module


def exercises() -> dict[str, Path]:
    """Return the file of each exercise, by id. Raises `FileNotFoundError` if there are none."""
    package = Path(__file__).resolve().parents[2]
    for folder in (Path.cwd(), Path.cwd() / "notebooks", package / "notebooks"):
        if files := {id_of(file): file for file in folder.glob("solutions/ex_*.py")}:
            # 10.2 comes after 9.1.
            return dict(sorted(files.items(), key=lambda item: [*map(int, item[0].split("."))]))
    raise FileNotFoundError("no exercises found; run the notebook from the notebooks folder")


def id_of(file: Path) -> str:
    """Return "10.2" for ``ex_10_2.py``."""
    return file.stem.removeprefix("ex_").replace("_", ".")


_read = cache(Exercise)  # by file


def exercise(number: str) -> Exercise:
    """Return an exercise by its id, "2.1". Raises `ValueError` if there is none such."""
    files = exercises()
    if number not in files:
        raise ValueError(f"there is no exercise {number!r}; there are {', '.join(files)}")
    return _read(files[number])


# ====================================================================== what a learner calls
passed: dict[str, Callable] = {}  # the answer that passed last, by exercise, for `own.keep`


def check(
    number: str, answer: Callable | str, *, bonus: bool = False, seed: int | None = None
) -> None:
    """Try `answer` on fresh random inputs; with `bonus` against the harder targets as well.

    In an exercise with `BUGS`, `answer` may be the name of the bug.

    Raises `CheckFailed` with what was expected and what came; it names the `seed` to get the same
    inputs again.
    """
    asked = exercise(number)
    if asked.bugs and isinstance(answer, str):
        return _diagnose(asked, answer)
    if not callable(answer):
        how = f'where your function is f, write  check("{number}", f)'
        raise CheckFailed(f"This is no function: {_short(answer)}; {how}", "written")
    seed = secrets.randbelow(10**6) if seed is None else seed
    name = getattr(answer, "__name__", "your_function")
    criteria = asked.checks | asked.bonuses if bonus else asked.checks
    for size in asked.sizes:
        try:
            case = examine(asked, answer, size, seed, criteria)
        except CheckFailed as error:
            if error.criterion == "written":
                raise
            again = f'check("{number}", {name}, seed={seed})'
            guess = _looks_like(asked, answer, size, error)
            raise CheckFailed(
                f"Exercise {number}{_on((size,))}: not there yet ({error.criterion}).\n{error}\n"
                f"{guess}What counts as good: {asked.good}.\nThe same inputs again: {again}",
                error.criterion,
            ) from None
    passed[number] = answer
    print(f"Exercise {number} passed{_on(asked.sizes)}: {', '.join(criteria)}.\n{asked.praise}")
    if asked.drawn is not None:
        display(asked.drawn(case))
    if asked.bonuses and not bonus:
        harder = f'check("{number}", {name}, bonus=True)'
        print(f"Want more? {harder}: {', '.join(asked.bonuses)}")


def _diagnose(asked: Exercise, name: str) -> None:
    """Say that `name` is the bug, or raise `CheckFailed` with what speaks against it."""
    if name not in asked.bugs:
        names = "\n".join(f"    {known}" for known in asked.bugs)
        raise CheckFailed(f"Exercise {asked.id}: which of these is it?\n{names}", "written")
    if against := asked.bugs[name]:
        raise CheckFailed(f"Exercise {asked.id}: not {name}. {against}", "bug")
    print(f"Exercise {asked.id}: yes, {name}. Now mend it.")


GUESSES = {  # by patterns of error messages
    r"NameError: name '\w+' is not": "A cell of %%ranks defines its names on the ranks only.",
    r"\b(got|returned|says) None\b": "Is a `return` missing?",
    r"(called|waits in) return\b": "Does a rank return early, or skip a call that others make?",
    r"in vain|not done after": "Does each call have group=axis.group? Does each loop end?",
}


def _looks_like(asked: Exercise, answer: Callable, size: int, error: CheckFailed) -> str:
    """Return the sentence of the wrong answer that fails alike on the same inputs, or ""."""
    general = next((guess for said, guess in GUESSES.items() if re.search(said, str(error))), "")
    if error.criterion != "run":  # else it may have taken long, and inputs hardly matter
        try:
            with redirect_stdout(StringIO()):  # it has said once which pieces it is made of
                examine(asked, answer, size, asked.slips["seed"], asked.checks)
        except CheckFailed as known:
            error = known
    sentence = asked.slips["told"].get(error.fingerprint) or general
    return f"A guess: {sentence}\n" if sentence else ""


def _on(sizes: tuple[int, ...]) -> str:
    """Say on how many ranks, where there is more than one."""
    return "" if sizes == (1,) else f" on {' and '.join(map(str, sizes))} ranks"


def examine(
    asked: Exercise, answer: Callable, size: int, seed: int, criteria: dict[str, Callable]
) -> Case:
    """Run `answer` and apply `criteria`, by name. Raises `CheckFailed` for the first that fails."""
    case = play(asked, answer, size, seed)
    for name, criterion in criteria.items():
        try:
            criterion(case)
        except CheckFailed as error:
            raise CheckFailed(str(error), name, case) from None
        except Exception as error:
            why = f"{_short(case.results[0])} ({type(error).__name__}: {error})"
            raise CheckFailed(f"this is no answer: {why}", name) from error
    return case


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:70]} ..., a {type(value).__name__}"


# ====================================================================== running an answer
def play(asked: Exercise, answer: Callable, size: int, seed: int) -> Case:
    """Run `answer` once on the first `size` ranks. Raises `CheckFailed` if it does not return."""
    if _is_stub(answer):  # seen without ranks, which take a while
        write = f"Write the function above ({asked.level}, about {asked.minutes} minutes)"
        todo = f"{write}, run its cell, then this one again."
        raise waiting(f"Exercise {asked.id}", asked.title, todo)
    given = asked.given(size, torch.Generator().manual_seed(seed))
    ranks = _pool(size)
    sizes = asked.mesh or {"dp": size}
    calls = [(answer, asked.run, sizes, mine) for mine in given]
    calls += [(answer, asked.run, sizes, ())] * (ranks.size - size)
    with ranks.lock:
        before, ranks.time_limit = ranks.time_limit, asked.seconds or TIME_LIMIT
        try:
            answers = ranks.run_each(_play, calls)[:size]
        except (RankError, TypeError, TimeoutError) as error:
            reports = error.reports() if isinstance(error, RankError) else [str(error)]
            raise CheckFailed("\n\n".join(reports), "run") from error
        finally:
            ranks.time_limit = before
    results, sent = zip(*answers, strict=True)
    return Case(size, given, [*results], [*sent])


def _is_stub(answer: Callable) -> bool:
    """True if a call of the function, or of the class, can only raise `NotImplementedError`."""
    code = code_of(answer)
    steps = [step.opname for step in dis.get_instructions(code)] if code else [""]
    forks = any("JUMP" in step or step.startswith(("RETURN", "YIELD", "FOR")) for step in steps)
    return steps[-1] == "RAISE_VARARGS" and not forks and "NotImplementedError" in code.co_names


def waiting(what: str, title: str, todo: str) -> CheckFailed:
    """Return the error for an exercise, or a problem, that has not been tried yet."""
    end = "" if title.endswith("?") else "."
    return CheckFailed(f"{what} is waiting for you: {title}{end}\n{todo}", "written")


_END = "return"  # how messages call the barrier after a learner's function
_own: cells.Watched | None = None


def _pool(size: int) -> Ranks:
    """Return ranks for checks, kept for the next one; a failure does not touch the notebook's."""
    global _own
    if _own is None or _own.closed or _own.size < size:
        if _own is not None:
            _own.close()
        size = 1 if size == 1 else max(4, size)
        _own = cells.Watched(size, backend="link")
    return _own


def _play(answer: Callable, run: Callable, sizes: dict, given: tuple) -> Any:
    """Run `answer` on a rank, with axes of its own; note the messages that go over them."""
    axes = [axis for name in sizes if (axis := _own_axis(name, sizes)) is not None]
    if not axes:
        return None
    axis = axes[0] if len(sizes) == 1 else axes
    sent: list[Sent] = []
    returned = ""  # what the answer returned, in words: a later error is due to its result

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal returned
        result = answer(*args, **kwargs)
        returned = "None" if result is None else f"a {type(result).__name__}"
        return result

    def note(work: link_group.LinkWork) -> None:
        if work.verb not in ("recv", "barrier", _END) and work.exception() is None:
            sent.append(Sent(work.verb, work.num_bytes, work.peer))

    link.observers.append(note)
    try:
        try:
            with strict.watching():
                result = run(watched, axis, *given)
        except strict.Race:
            raise
        except Exception as error:
            file = getattr(code_of(answer), "co_filename", None)
            frames = traceback.extract_tb(error.__traceback__)
            if returned and all(frame.filename != file for frame in frames):
                went = f"your function returned {returned}. The check went on with this, and met"
                error.report = f"{went}\n{type(error).__name__}: {error}"
            raise
        try:  # wait until all are through, so that nothing is under way any more
            for one in axes:
                standing_for(_END, dist.barrier, one.group)
        except Exception as error:  # the ranks that are still in the function know its line
            error.report = str(error)
            raise
    finally:
        worker.shield()  # an interrupted clean-up would leave torch with half a group
        link.observers.remove(note)
        link.use("none")  # an exercise may have used another, and a device
        device.use(None)
        for one in axes:
            with suppress(ValueError):  # the answer may have destroyed it
                dist.destroy_process_group(one.group)
    return result, sent


def _own_axis(name: str, sizes: dict[str, int]) -> Axis | None:
    """Make the groups along one axis, on all ranks; None on those that the mesh leaves out."""
    mine = None
    for ranks in groups_along([name], sizes):
        group = make_group(name, ranks)
        if dist.get_rank() in ranks:
            mine = Axis(name, ranks.index(dist.get_rank()), len(ranks), ranks, group)
    return mine
