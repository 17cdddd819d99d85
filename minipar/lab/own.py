"""A trainer of the learner's own, piece by piece: ``keep("ddp", Overlapped)``.

Some exercises are a strategy in its smallest form. `keep` writes an answer that has passed into
``my/ddp.py`` beside the notebook, with the imports and helpers that the answer needs. `piece` gives
it to another notebook, or the stored answer where nothing was kept.
"""

import ast
import dis
import linecache
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from minipar.lab import exercises

FOLDER = Path("my")
PIECES = {  # by the name of the file: the exercise, and the name of the answer in the file
    "ddp": ("3.5", "Overlapped"),
    "sharded": ("6.5", "Sharded"),
    "tensor": ("7.5", "cut_layer"),
    "ring": ("9.3", "ring"),
    "pipeline": ("10.6", "run_stage"),
    "experts": ("11.2", "dispatch_and_combine"),
    "trainer": ("12.4", "Trainer"),
}


def keep(piece: str, answer: Callable) -> None:
    """Write an answer into ``my/``.

    An answer that did not pass its check yet is checked first. Raises `CheckFailed` if it does not
    pass, and `ValueError` where the file holds another answer.
    """
    number, name = PIECES[piece]
    file = FOLDER / f"{piece}.py"
    if exercises.passed.get(number) is not answer:
        exercises.check(number, answer)
    text = f'"""{name}: exercise {number}, which it has passed."""\n\n{written(answer, name)}'
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{file.as_posix()} holds another answer: rename or delete it first")
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"Kept: {file.as_posix()}, your answer to exercise {number}.")


def piece(name: str) -> Any:
    """Return a piece that was kept, or else the stored answer. Say which.

    Raises `ValueError` where nothing was kept and a host has left the stored answer out.
    """
    number, called = PIECES[name]
    file, stored = FOLDER / f"{name}.py", exercises.exercise(number).solution
    if file.is_file():
        print(f"{name}: {file.as_posix()}")
        return getattr(exercises.load(file), called)
    if stored is None:
        raise ValueError(
            f"there is no {file.as_posix()}: first pass exercise {number}, and keep it"
        )
    print(f"{name}: the stored answer to exercise {number}")
    return stored


# ---------------------------------------------------------------------- source
def written(answer: Callable, name: str) -> str:
    """Return a file that defines `answer` as `name`: its imports, its helpers, the answer.

    Raises `ValueError` for a global that is no module, function or class.
    """
    imports: set[str] = set()
    parts: dict[str, str] = {}
    _add(answer, name, imports, parts)
    return "\n\n\n".join(["\n".join(sorted(imports)), *parts.values()]).lstrip() + "\n"


def _add(thing: Callable, name: str, imports: set[str], parts: dict[str, str]) -> None:
    text, space = _source(thing)
    for other in dict.fromkeys(_globals_of(compile(text, "<kept>", "exec"))):
        if other in (name, thing.__name__, *parts) or other not in space or other[:2] == "__":
            continue
        value = space[other]
        module = str(getattr(value, "__module__", ""))
        called = "" if getattr(value, "__name__", "") == other else f" as {other}"
        if isinstance(value, ModuleType):
            imports.add(f"import {value.__name__}{called}")
        elif not hasattr(value, "__qualname__"):
            what = f"{thing.__name__} uses {other!r}, a {type(value).__name__} of the notebook"
            raise ValueError(f"{what}: make it an argument, or create it inside")
        elif module == "__main__" or module.startswith("minipar_solutions_"):
            _add(value, other, imports, parts)
        else:
            imports.add(f"from {module} import {value.__name__}{called}")
    parts[name] = re.sub(rf"\b{thing.__name__}\b", name, text)


def _source(thing: Callable) -> tuple[str, dict[str, Any]]:
    """Return the text of a function or class, and the globals that its names are looked up in."""
    method = thing
    if isinstance(thing, type):
        method = next(m for m in vars(thing).values() if hasattr(m, "__code__"))
    file = method.__code__.co_filename
    lines = linecache.getlines(file)  # `inspect` finds no class of a notebook
    nodes = [n for n in ast.parse("".join(lines)).body if getattr(n, "name", "") == thing.__name__]
    if not nodes:
        raise ValueError(f"{thing.__name__} is not defined at the top of a cell or a file")
    return "".join(lines[nodes[-1].lineno - 1 : nodes[-1].end_lineno]).rstrip(), method.__globals__


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names that `code` and the functions inside of it look up as globals."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)
