"""Numbers in the prose of notebooks are carried: by a cell near them, or by arithmetic that holds.

A number with a unit, or of thousands, has to stand in the source or the output of a code cell near
it. What follows from given numbers stands in claims.txt instead, with what it follows from:

    03: 60.8 = 38 * 1.6  # latency of 38 calls

Quotations, problems from papers, hidden answers, formulas and code are not read.
"""

import ast
import functools
import math
import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat import NotebookNode

from minipar.emulate.link import LINKS
from minipar.model.llama import PRESETS
from minipar.sim.footprint import HEADROOM
from minipar.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KNOWN = {"math": math, "torch": torch, "LINKS": LINKS, "PRESETS": PRESETS}
KNOWN |= {"HEADROOM": HEADROOM, "TrainConfig": TrainConfig}
NEAR = 12  # cells before and after

NOT_READ = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|<details>.*?</details>|## Quiz.*"
    r"|\b\d{4}\.\d{5}\b",
    re.DOTALL,
)
UNIT = r"%|times\b|bytes|[kMGT]i?B\b|[mµ]?s\b|seconds|minutes|tokens|numbers|parameters|calls|steps"
CLAIM = re.compile(
    rf"(?<![\w.,^/=])(?:(\d+(?:\.\d+)?)\s?(?={UNIT})|(\d{{1,3}}(?:,\d{{3}})+)(?![\d.]*\d))"
)
NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?")


def claims(text: str) -> list[str]:
    """Numbers of a prose cell that something must carry: no small counts, no powers of two."""
    found = [first or second for first, second in CLAIM.findall(NOT_READ.sub(" ", text))]
    return [c for c in found if not c.isdigit() or int(c) > 16 and int(c) & (int(c) - 1)]


def is_close(value: float, claim: str) -> bool:
    """Whether `value` is `claim` to the digits shown: 35,333 is 35,000, and 0.0123 is 1.2 %."""
    digits = claim.replace(",", "")
    unit = 10.0 ** -len(digits.partition(".")[2])
    if "." not in digits:
        unit *= 10 ** (len(digits) - len(digits.rstrip("0")))
    off = (abs(value * scale - float(digits)) for scale in (1, 1e2, 1e3, 1e-3, 1e-6, 1e-9))
    return min(off) <= 0.5 * unit * (1 + 1e-9)


@functools.cache
def numbers(text: str) -> frozenset[float]:
    return frozenset(float(n.replace(",", "").replace("_", "")) for n in NUMBER.findall(text))


def shown(cell: NotebookNode) -> str:
    """The source of a code cell and what it printed, with the words for its figures."""
    texts = [cell.source]
    for output in cell.outputs:
        texts += [output.get("text", ""), output.get("evalue", "")]
        texts += [part for kind, part in output.get("data", {}).items() if kind[:5] == "text/"]
        texts += [str(known) for known in output.get("metadata", {}).values()]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(texts))


def derived(notebook: str) -> dict[str, str]:
    """What claims.txt says of a notebook: number -> expression."""
    lines = (ROOT / "tests/claims.txt").read_text(encoding="utf-8").splitlines()
    parts = [re.fullmatch(r"(\d\d[a-z]?): (\S+) = (.+?)  # (.+)", line) for line in lines]
    assert all(parts), [line for line, part in zip(lines, parts, strict=True) if not part]
    return {part[2]: part[3] for part in parts if part[1] == notebook}


def without_carrier(cells: list[NotebookNode]) -> list[tuple[int, str]]:
    """Claims that no cell near them carries, with the numbers of their cells."""
    found = []
    for at, cell in enumerate(cells):
        if cell.cell_type != "markdown" or cell.source.startswith(("# ", "### Problem")):
            continue
        near = [c for c in cells[max(0, at - NEAR) : at + NEAR + 1] if c.cell_type == "code"]
        values = frozenset().union(*(numbers(shown(c)) for c in near))
        found += [(at, c) for c in claims(cell.source) if not any(is_close(v, c) for v in values)]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_numbers_in_prose_are_carried(path):
    cells = nbformat.read(path, as_version=4).cells
    known = derived(path.stem.partition("_")[0])
    found = without_carrier(cells)
    bare = [f"cell {at}: {claim}" for at, claim in found if claim not in known]
    assert not bare, f"no cell near carries {bare}: show them, or add to claims.txt"
    idle = known.keys() - {c for cell in cells for c in claims(cell.source)}
    assert not idle, f"claims.txt: {idle} are not in the prose of {path.stem} any more"
    for claim, expression in known.items():
        value = eval(compile(ast.parse(expression, mode="eval"), claim, "eval"), dict(KNOWN))
        assert is_close(value, claim), f"{claim}, but {expression} is {value}"


def test_a_number_that_nothing_carries_is_found():
    cell = nbformat.v4.new_code_cell("print(1234)")
    cell.outputs = [nbformat.v4.new_output("stream", text="17.25 ms, 12,288 bytes, 0.043\n")]
    prose = "It takes 17.3 ms for 12,288 bytes: 4.3 % of $99$ % and `98 ms`, 3 times."
    assert without_carrier([cell, nbformat.v4.new_markdown_cell(prose)]) == []
    for claim, other in (("17.3", "17.4"), ("12,288", "12,289"), ("4.3", "4.4")):
        wrong = nbformat.v4.new_markdown_cell(prose.replace(claim, other))
        assert without_carrier([cell, wrong]) == [(1, other)]
    far = [nbformat.v4.new_markdown_cell("")] * NEAR
    assert len(without_carrier([cell, *far, nbformat.v4.new_markdown_cell(prose)])) == 3
