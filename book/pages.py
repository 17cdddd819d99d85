"""The pages of the book that stand nowhere else: strategies, measured tables, parts of README.

Nothing is written twice: a page of a strategy is the docstring and the source of its file, a table
is made of the rows that `minipar bench` has measured, and the guide is cut out of README.
"""

import ast
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minipar.lab import agenda  # noqa: E402

ENTRY = re.compile(r"^((?:[A-Z]\w+(?: (?:you|torch|by))?)[.:]|Proved by|In torch:) +(?=\S)", re.M)
WIDGET = "application/vnd.jupyter.widget-view+json"


def write(folder: Path) -> None:
    """Write all pages below `folder`."""
    (folder / "strategies").mkdir(exist_ok=True)
    readme = sections((ROOT / "README.md").read_text(encoding="utf-8"))
    table, _, guide = readme["Strategies"].partition("\n![")
    guide, _, end = guide.partition("\n\nEach file opens")
    names = re.findall(r"`(minipar/[\w/.]+|\w+\.py)`", table)
    sources = [path for name in names for path in of(name)]
    names = {page(path) for path in sources}
    for path in sources:
        text = strategy_page(path)
        (folder / "strategies" / f"{page(path)}.md").write_text(text, encoding="utf-8")
    listed = "\n".join(dict.fromkeys(page(path) for path in sources))
    toctree = f"```{{toctree}}\n:hidden:\n{listed}\n```\n"
    linked = re.sub(r"`((?:minipar/)?[\w/]+\.py)`", lambda m: to_page(m[1], names), table)
    index = f"# Strategies\n\n{moved(linked, '../..')}\nEach file opens{end}\n{toctree}"
    (folder / "strategies" / "index.md").write_text(index, encoding="utf-8")
    using = "".join(
        f"\n## {title}\n{readme[title]}" for title in readme if title[:3] in ("Use", "Is ")
    )
    for name, text in (
        ("guide", f"# Which plan when\n\n![{guide}"),
        ("library", f"# As a library, and as a judge\n{using}"),
        ("measured", measured_page()),
    ):
        (folder / f"{name}.md").write_text(moved(text, ".."), encoding="utf-8")


def sections(markdown: str) -> dict[str, str]:
    """What stands below each heading of the second level, by its words."""
    parts = re.split(r"^## (.*)$", markdown, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def moved(markdown: str, up: str) -> str:
    """`markdown` of README, for a page that many folders below: its links lead on."""
    markdown = markdown.replace("(notebooks/assets/measured)", "(book/measured.md)")
    markdown = markdown.replace("(notebooks/assets/pipeline_idle)", "(book/measured.md)")
    return re.sub(r"\]\((?!https?:|#)", f"]({up}/", markdown)


def inside(text: str) -> str:
    """The text of a page; what it says of README leads to the front page of the book."""
    return text.replace("](../README.md)", "](../book/index.md)")


# ====================================================================== strategies
def of(name: str) -> list[Path]:
    """The files that a row of README's table names: one, or all of a folder."""
    path = ROOT / name
    if path.is_dir():
        return [p for p in sorted(path.glob("*.py")) if p.name != "__init__.py"]
    return [path] if path.is_file() else sorted((ROOT / "minipar").glob(f"*/{name}"))


def page(path: Path) -> str:
    """The name of the page of a file: "pipeline_runtime" of .../pipeline/runtime.py."""
    folder = path.parent.name
    return path.stem if folder in ("parallel", "comm", "train") else f"{folder}_{path.stem}"


def to_page(name: str, names: set[str]) -> str:
    """The name of a file as a link to its page, if it has one."""
    found = [page(path) for path in of(name) if page(path) in names]
    return f"[`{name}`](book/strategies/{found[0]}.md)" if found else f"`{name}`"


def strategy_page(path: Path) -> str:
    """The docstring of a module as a list of definitions, its public names, its source, folded."""
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    first, _, rest = ast.get_docstring(module).partition("\n")
    parts = [f"# {path.stem}", f"**{inline(first)}**"]
    cut = ENTRY.split(rest)
    parts.append(paragraphs(cut[0]))
    for name, body in zip(cut[1::2], cut[2::2], strict=True):
        lines, _, after = body.partition("\n\n") if not _hangs(body) else (body, "", "")
        definition = textwrap.indent(paragraphs(_dedented(lines)), "  ").lstrip()
        parts += [f"{name.strip('.: ')}\n: {definition}", paragraphs(after)]
    parts.append("## What it offers")
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            told = ast.get_docstring(node) or ""
            parts += [f"```python\n{signature(node)}\n```", told and f"```text\n{told}\n```"]
    name = path.relative_to(ROOT).as_posix()
    parts.append(f"## The file\n\n<details><summary><code>{name}</code></summary>")
    parts.append(f"```python\n{source}```\n\n</details>\n")
    return "\n\n".join(part for part in parts if part)


def _hangs(body: str) -> bool:
    """Whether what follows an empty line still belongs to the entry: it is indented."""
    return all(line.startswith("   ") or not line for line in body.split("\n")[1:])


def _dedented(body: str) -> str:
    first, _, rest = body.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}"


def paragraphs(text: str) -> str:
    """Paragraphs of a docstring in Markdown; what is set in columns stays as it is."""
    made = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        columns = any(re.search(r"\S {3,}\S", line) for line in lines) or lines[-1].startswith("  ")
        made.append(f"```text\n{textwrap.dedent(block)}\n```" if columns else inline(block.strip()))
    return "\n\n".join(part for part in made if part.strip())


def inline(text: str) -> str:
    """Plain sentences of a docstring, with what Markdown would take for its own escaped."""
    pieces = re.split(r"(`+[^`]+`+)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\[\]<>$|#])", r"\\\1", piece)
        for piece in pieces
    )


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """How a function is called, or a class is made."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    arguments = [ast.unparse(node.args)]
    if len(arguments[0]) + len(node.name) > 90:
        arguments = [f"\n    {piece}," for piece in re.split(r", (?![^\[]*\])", arguments[0])]
        arguments[-1] += "\n"
    return f"def {node.name}({''.join(arguments)}) -> {ast.unparse(node.returns)}"


# ====================================================================== measured tables
def measured_page() -> str:
    """All rows that `minipar bench` has written, a table for each bench."""
    parts = [
        "# What was measured",
        "`minipar bench` ran on two cores of a shared machine, `make gpu-check` on one that is "
        "named below. In brackets: quartiles of a ratio, the least and the largest gap.",
        "![Published step times beside what the planner predicts for them]"
        "(notebooks/assets/predicted.png)",
    ]
    for path in sorted((ROOT / "notebooks/assets/measured").glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        checks = dict.fromkeys(row.get("check") for row in rows)  # one and the same for a bench
        command = "make gpu-check" if path.stem == "gpu" else f"minipar bench {path.stem}"
        parts += [f"## {path.stem}", f"By `{command}`."]
        parts += [rows_table([row for row in rows if row.get("check") == c]) for c in checks]
        if (figure := path.with_name(f"{path.stem}_timeline.png")).exists():
            words = "A step of ZeRO 3 on two ranks that share the GPU and talk through its host"
            parts.append(f"![{words}]({figure.relative_to(ROOT).as_posix()})")
    parts.append("## Idle time of each pipeline schedule: predicted above measured")
    for path in sorted((ROOT / "notebooks/assets/pipeline_idle").glob("*.png")):
        where = path.relative_to(ROOT).as_posix()
        parts.append(f"![The schedule {path.stem}, predicted above measured]({where})")
    return "\n\n".join(parts)


def rows_table(rows: list[dict]) -> str:
    """A table of what differs between rows; what is the same in all stands above it."""
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
    """A row as text, with an interval beside its number; without lists."""
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
    """Read a notebook for the book: `%%ranks` is no error of syntax, figures have their words."""
    notebook = nbformat.reads(text, as_version=4)
    agenda.show_minutes(notebook)
    notebook.metadata.language_info["pygments_lexer"] = "ipython3"
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(WIDGET, None):
                data["text/plain"] = "Sliders: run the notebook to move them."
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell.metadata.setdefault("mystnb", {}).setdefault("image", {"alt": alt})
    return notebook
