"""The generated page of the book: every row that `minipar bench` and `make gpu-check` measured."""

import json
import math
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


WIDGET = "application/vnd.jupyter.widget-view+json"


def write(folder: Path) -> None:
    """Write the page into `folder`."""
    (folder / "rows.md").write_text(rows_page(), encoding="utf-8")


def inside(text: str) -> str:
    """Return the text of a page with links that lead to pages of the book."""
    text = text.replace("](../notebooks/assets/measured)", "](rows.md)")
    return text.replace("](../README.md)", "](../book/index.md)")


# ====================================================================== measured tables
def rows_page() -> str:
    """Return all rows that `minipar bench` has written, a table for each bench."""
    parts = [
        "# All measured rows",
        "`minipar bench` ran on two cores of a shared machine, `make gpu-check` on the machine "
        "that its table names. In brackets: quartiles of a ratio, the least and the largest gap.",
    ]
    for path in sorted((ROOT / "notebooks/assets/measured").glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        checks = dict.fromkeys(row.get("check") for row in rows)  # one and the same for a bench
        command = "make gpu-check" if path.stem == "gpu" else f"minipar bench {path.stem}"
        parts += [f"## {path.stem}", f"By `{command}`."]
        parts += [rows_table([row for row in rows if row.get("check") == c]) for c in checks]
        for figure in sorted(path.parent.glob(f"{path.stem}_timeline*.png")):
            words = f"One step, measured: {figure.stem}"
            parts.append(f"![{words}](../{figure.relative_to(ROOT).as_posix()})")
    return "\n\n".join(parts)


def rows_table(rows: list[dict]) -> str:
    """Return a table of the columns that differ; the others stand above it."""
    merged = [_merged(row) for row in rows]
    names = list(dict.fromkeys(name for row in merged for name in row))
    values = {name: [row.get(name, "") for row in merged] for name in names}
    same = {name: column[0] for name, column in values.items() if len(set(column)) == 1}
    shown = [name for name in names if name not in same]
    head = ", ".join(f"{_words(name)} {value}" for name, value in same.items() if value)
    if not shown:
        return f"{head[0].upper()}{head[1:]}."
    lines = [f"| {' | '.join(map(_words, shown))} |", "|" + " --- |" * len(shown)]
    lines += [f"| {' | '.join(row.get(name, '') for name in shown)} |" for row in merged]
    return f"In all rows: {head}.\n\n" + "\n".join(lines)


def _merged(row: dict) -> dict[str, str]:
    """Return a row as text, with an interval beside its number; without lists."""
    text = {k: _number(value) for k, value in row.items() if not isinstance(value, list | dict)}
    for name in [name for name in text if f"{name}_low" in text]:
        low, high = text.pop(f"{name}_low"), text.pop(f"{name}_high")
        text[name] += f" ({low} to {high})"
    return text


def _number(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return " ".join(str(value).split()).replace("|", "\\|")  # in one line, in one cell


def _words(name: str) -> str:
    return name.replace("_", " ")


# ====================================================================== notebooks
def read_notebook(text: str) -> nbformat.NotebookNode:
    """Read a notebook for the book: `%%ranks` is no syntax error, figures keep their alt text."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata.language_info["pygments_lexer"] = "ipython3"
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(WIDGET, None):
                data["text/plain"] = "Sliders: run the notebook to move them."
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell.metadata.setdefault("mystnb", {}).setdefault("image", {"alt": alt})
    return notebook
