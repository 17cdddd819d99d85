"""Make the files of executed notebooks the same on every machine (``make notebooks``).

    python -m minipar.lab.publish notebooks/            # normalise
    python -m minipar.lab.publish notebooks/ --handout course/  # copies without the answers
    python -m minipar.lab.publish notebooks/ --slips    # learn how wrong answers fail

A published notebook holds its outputs and figures, but no trace of the machine it ran on: no paths,
no times of execution, no versions, no widget state.
"""

import argparse
import ast
import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor, CoalesceStreamsPreprocessor
from nbformat import NotebookNode

from minipar.lab import exercises

WIDGET = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


# ====================================================================== normalising
def normalise(notebook: NotebookNode, root: Path) -> None:
    """Take out of a notebook, in place, what depends on the machine or the moment.

    `root` is the folder of the repository: paths below it become relative.
    """
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    # Text that arrived in several pieces is joined: where it was cut is a matter of luck.
    CoalesceStreamsPreprocessor().preprocess(notebook, {})
    for cell in notebook.cells:
        kept = ("tags", "jupyter")
        cell.metadata = NotebookNode({k: cell.metadata[k] for k in kept if k in cell.metadata})
        for output in cell.get("outputs", []):
            _normalise_output(output, root)


def _normalise_output(output: NotebookNode, root: Path) -> None:
    if "metadata" in output:
        alts = {kind: about.get("alt") for kind, about in output.metadata.items() if "/" in kind}
        output.metadata = NotebookNode({k: {"alt": alt} for k, alt in alts.items() if alt})
    if "text" in output:
        output.text = without_paths(output.text, root)
    if "traceback" in output:
        output.traceback = [without_paths(line, root) for line in output.traceback]
        output.evalue = without_paths(output.evalue, root)
    for kind, content in output.get("data", {}).items():
        if kind == WIDGET:
            content.model_id = "0" * 32  # random, and of no use without the widget's state
        elif kind.startswith("text/"):
            output.data[kind] = without_paths(content, root)


def without_paths(text: str, root: Path) -> str:
    """Return `text` with the paths of this machine shortened to what a reader elsewhere knows."""
    text = re.sub(r"/[^\s\"'<>:)]+/ipykernel_\d+/\d+\.py", "<cell>", text)
    packages = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    for folder in sorted((*packages, str(root)), key=len, reverse=True):
        text = text.replace(folder.rstrip("/") + "/", "").replace(folder, ".")
    return text


# ====================================================================== handing out
def hand_out(notebooks: Path, folder: Path) -> None:
    """Copy a folder of notebooks without outputs, with its exercises without answers.

    Problems go along as they are, and so do the sentences that a check may say of a wrong answer.
    Raises `FileExistsError` if the new `folder` is there already.
    """
    (folder / "solutions").mkdir(parents=True)
    for path in notebooks.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        ClearOutputPreprocessor().preprocess(notebook, {})
        nbformat.write(notebook, folder / path.name)
    for file in notebooks.glob("solutions/*.*"):
        text = file.read_text(encoding="utf-8")
        text = without_answers(text) if file.name.startswith("ex_") else text
        (folder / "solutions" / file.name).write_text(text, encoding="utf-8")


def learn_slips(asked: exercises.Exercise) -> dict[str, Any]:
    """Run the wrong answers of an exercise; return how each fails, and its sentence, for the file.

    The seed is the first of twenty that tells different sentences apart, else `ValueError`.
    """
    for seed in range(20):
        marks = {wrong: _failure(asked, wrong, seed) for wrong in asked.wrongs.values()}
        told = {mark: wrong.sentence for wrong, mark in marks.items()}
        if all(mark and told[mark] == wrong.sentence for wrong, mark in marks.items()):
            return {"seed": seed, "told": told}
    raise ValueError(f"exercise {asked.id}: two wrong answers fail alike; share a sentence")


def _failure(asked: exercises.Exercise, answer: Callable, seed: int) -> str:
    """Return how an answer fails on the first number of ranks that refuses it; "" if none does."""
    for size in asked.sizes:
        try:
            exercises.examine(asked, answer, size, seed, asked.checks)
        except exercises.CheckFailed as error:
            return error.fingerprint
    return ""


def without_answers(source: str) -> str:
    """Return an exercise without its answers, right or wrong; what its checks need is left.

    With them go helpers that nothing else uses, comments, and the docstring after its title.
    """
    module = ast.parse(source)
    title, *parts = module.body
    parts = [part for part in parts if not _name(part).startswith(("solution", "wrong_"))]
    while unused := [part for part in parts if _is_unused(part, parts)]:
        parts = [part for part in parts if part not in unused]
    title.value.value = ast.get_docstring(module).splitlines()[0]
    module.body = [title, *parts]
    return ast.unparse(module) + "\n"


def _name(part: ast.stmt) -> str:
    return getattr(part, "name", "")


def _is_unused(part: ast.stmt, parts: list[ast.stmt]) -> bool:
    others = (node for other in parts if other is not part for node in ast.walk(other))
    used = any(isinstance(node, ast.Name) and node.id == _name(part) for node in others)
    return _name(part).startswith("_") and not used


# ====================================================================== the command
def main(arguments: list[str] | None = None) -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", type=Path, help="a folder of notebooks")
    parser.add_argument("--handout", type=Path, help="only copy the folder, without answers")
    parser.add_argument("--slips", action="store_true", help="only learn how wrong answers fail")
    asked = parser.parse_args(arguments)
    if asked.handout is not None:
        hand_out(asked.notebooks, asked.handout)
    elif asked.slips:
        solutions = asked.notebooks / "solutions"
        known = map(exercises.Exercise, sorted(solutions.glob("ex_*.py")))
        learnt = {asked.id: learn_slips(asked) for asked in known}
        text = json.dumps(learnt, indent=1, ensure_ascii=False)
        (solutions / "slips.json").write_text(f"{text}\n", encoding="utf-8")
    else:
        for path in asked.notebooks.glob("*.ipynb"):
            notebook = nbformat.read(path, as_version=4)
            normalise(notebook, path.resolve().parents[1])
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
