"""Give each notebook a first cell that installs minipar where Colab opens it.

    python book/colab.py https://github.com/OWNER/minipar      # changes notebooks/ in place

For a branch of copies alone, which `.github/workflows/book.yml` writes: nobody needs the cell
anywhere else. Colab has a Jupyter of its own, so that is left out of what is installed.
"""

import sys
import tomllib
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[1]
CELL = """\
# On Colab: install minipar, some minutes once, and see whether two ranks answer.
import os

if not os.path.isdir("solutions"):
    !git clone --quiet --depth 1 {address} minipar
    %pip install --quiet {packages}
    %pip install --quiet --no-deps ./minipar
    %cd minipar/notebooks

import torch.distributed as dist

from minipar.ranks.launch import Ranks

with Ranks(2) as two:
    print("ranks", *two.run(dist.get_rank), "answer")"""


def first_cell(address: str) -> str:
    """The source of the cell for a repository at `address`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [name for name in project["dependencies"] if not name.startswith("jupyterlab")]
    return CELL.format(address=address, packages=" ".join(f'"{name}"' for name in needed))


def main(address: str) -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, new_code_cell(first_cell(address), id="colab"))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1])
