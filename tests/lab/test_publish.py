"""Publishing: the same file on every machine, and nothing wrong with it."""

import base64
import copy
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minipar.lab import publish

HOME = "/".join(["", "home", ""])  # in pieces: no file of ours names a path of a machine
PROJECT = "/".join(["", "work", "project"])


def code(source: str, *outputs, tags: tuple[str, ...] = (), count: int | None = 1):
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, outputs=list(outputs), metadata=metadata, execution_count=count)


def text(said: str, name: str = "stdout"):
    return new_output("stream", name=name, text=said)


def error(message: str = "no"):
    return new_output("error", ename="ValueError", evalue=message, traceback=[message])


def shown(kind: str, content: str, alt: str = ""):
    return new_output("display_data", data={kind: content}, metadata={kind: {"alt": alt}})


def png(num_bytes: int) -> str:
    return base64.b64encode(b"\x89PNG" + bytes(num_bytes - 4)).decode()


GOOD = [
    new_markdown_cell(f"# A title, and {HOME}anybody may be named in prose"),
    code("print('a')", text("[0] a\n")),
    code("1 / 0", error(), tags=("raises-exception",)),
    code("plot()", shown("image/png", png(99_999), alt="A plot")),
    code("", count=None),
]


def messy() -> nbformat.NotebookNode:
    """What a notebook looks like after somebody ran it."""
    view = {publish.WIDGET: {"model_id": "f00", "version_major": 2}, "text/plain": "Explorer()"}
    picture = shown("image/png", png(100))
    picture.metadata = {"image/png": {"alt": "Two bars. measured", "width": 3}, "seconds": 2}
    cells = [
        code("a", text("one\n"), text("two\n"), shown("text/html", "<b>"), text("three\n")),
        code("b", new_output("display_data", data=view), picture),
        code("c", error(f"File {PROJECT}/minipar/x.py, /tmp/ipykernel_12/34.py:5")),
        code("c"),
    ]
    for cell in cells:
        cell.metadata |= {"execution": {"iopub.busy": "2026-01-01"}, "scrolled": True}
    cells[0].metadata["tags"] = ["kept"]
    metadata = {
        "widgets": {"state": {}},
        "kernelspec": {"name": "mine", "display_name": "My env", "language": "python"},
        "language_info": {"name": "python", "version": "3.11.7"},
    }
    return new_notebook(cells=cells, metadata=metadata)


def test_what_depends_on_the_machine_is_taken_out():
    notebook = messy()
    publish.normalise(notebook, Path(PROJECT))
    assert notebook.metadata == {
        "kernelspec": publish.KERNEL,
        "language_info": {"name": "python"},
    }
    first, widget, failed, _ = notebook.cells
    assert first.metadata == {"tags": ["kept"]} and widget.metadata == {}
    # Text is joined where it touches, not across what stands between.
    assert [o.get("text", "html") for o in first.outputs] == ["one\ntwo\n", "html", "three\n"]
    assert set(widget.outputs[0].data[publish.WIDGET].model_id) == {"0"}
    assert widget.outputs[1].metadata == {"image/png": {"alt": "Two bars. measured"}}
    assert failed.outputs[0].evalue == "File minipar/x.py, <cell>:5"
    assert [cell.execution_count for cell in notebook.cells] == [1, 1, 1, 1]
    nbformat.validate(notebook)


def test_normalising_twice_changes_nothing():
    one = messy()
    ids = [cell.id for cell in one.cells]
    publish.normalise(one, Path(PROJECT))
    again = copy.deepcopy(one)
    publish.normalise(again, Path(PROJECT))
    assert one == again and ids == [cell.id for cell in one.cells]


def test_paths_of_packages_become_short():
    file = Path(pytest.__file__)
    for root in (Path("/nowhere"), file.parents[3]):  # packages lie in a project's own .venv
        assert publish.without_paths(f"File {file}:1", root) == "File pytest/__init__.py:1"


def test_publishing_writes_all_of_a_folder(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    path = folder / "a.ipynb"
    nbformat.write(new_notebook(cells=[code("f()", text(f"{folder}/x\n"))]), path)
    publish.main([str(folder)])
    first = path.read_bytes()
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == "notebooks/x\n"
    publish.main([str(folder)])
    assert path.read_bytes() == first


EXERCISE = '''"""A title.

How it is done.
"""
from minipar.lab.exercises import fails

def check_result(case): return _truth(case)
def _truth(case): ...
def _trick(x): return _trick_of_the_trick(x)
def _trick_of_the_trick(x): ...
def solution(x): return _trick(x)  # the trick
def solution_bonus(x): ...
@fails("result")
def wrong_is_not_right(x): ...
'''


def test_a_copy_for_handing_out_has_exercises_but_no_answers(tmp_path):
    (tmp_path / "notebooks/solutions").mkdir(parents=True)
    nbformat.write(new_notebook(cells=GOOD), tmp_path / "notebooks/02_a.ipynb")
    for name, text in (("ex_2_1.py", EXERCISE), ("slips.json", "{}"), ("problems_2.py", "1")):
        (tmp_path / "notebooks/solutions" / name).write_text(text, encoding="utf-8")
    command = [str(tmp_path / "notebooks"), "--handout", str(tmp_path / "course")]
    publish.main(command)
    copied = {str(p.relative_to(tmp_path / "course")) for p in (tmp_path / "course").rglob("*.*")}
    solutions = {f"solutions/{name}" for name in ("ex_2_1.py", "slips.json", "problems_2.py")}
    assert copied == {"02_a.ipynb"} | solutions
    copies = nbformat.read(tmp_path / "course/02_a.ipynb", as_version=4).cells
    assert any(cell.get("outputs") for cell in GOOD), "else nothing was left out"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in copies)
    text = (tmp_path / "course/solutions/ex_2_1.py").read_text(encoding="utf-8")
    assert text.startswith('"""A title."""\n') and "def check_result" in text
    assert "def _truth" in text and "trick" not in text and "How" not in text
    with pytest.raises(FileExistsError, match="course"):
        publish.main(command)
