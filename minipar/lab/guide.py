"""Which strategy when? The figure in README: `python -m minipar.lab.guide`.

Questions in the order in which they are asked; the first "yes" decides. On every "yes" stands what
was measured of that choice, read from the rows that `minipar bench ... --json` has written to
`notebooks/assets/measured/`. So the figure says nothing that a command has not printed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minipar.lab.draw import pen

MEASURED = Path("notebooks/assets/measured")
Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by the name of their file


@dataclass(frozen=True)
class Choice:
    """One question, and what to do if the answer is yes."""

    question: str
    strategy: str
    flags: str  # of `minipar train`
    axis: str  # of the mesh, which gives the colour
    fact: Callable[[Rows], str]  # two lines at most


def _row(rows: Rows, file: str, **where: Any) -> Mapping[str, Any]:
    """The one row of a file with these values. Raises `LookupError` if there is none."""
    for row in rows[file]:
        if all(row.get(key) == value for key, value in where.items()):
            return row
    raise LookupError(f"{file}.json has no row with {where}; measure it again")


def _ddp(rows: Rows) -> str:
    row = _row(rows, "ddp", link="emulated 1 GbE")
    return f"{row['ours_hidden']:.0%} of communication\nhidden on 1 GbE"


def _less(rows: Rows) -> str:
    int8, local = (_row(rows, "compression", method=name) for name in ("int8", "DiLoCo streaming"))
    return (
        f"a step in {int8['ratio']:.2f} of the time, loss {int8['gap']:+.3f};\n"
        f"DiLoCo: in {local['ratio']:.2f}, loss {local['gap']:+.3f}"
    )


def _zero(rows: Rows) -> str:
    whole = _row(rows, "ddp", link="emulated 1 GbE")
    cut = _row(rows, "fsdp", link="emulated 1 GbE", ours="ZeRO-2")
    return f"{cut['ours_megabytes']:.1f} MB a step,\nby ddp {whole['megabytes']:.1f}"


def _fsdp(rows: Rows) -> str:
    row = _row(rows, "fsdp", link="emulated 1 GbE", ours="FSDP")
    kept = _row(rows, "fsdp", link="emulated 1 GbE", ours="FSDP, weights kept")
    megabytes = f"{row['ours_megabytes']:.1f} MB a step, not {kept['ours_megabytes']:.1f};"
    return f"{megabytes}\n{row['ours_peak_mb']:.0f} MB at most, not {kept['ours_peak_mb']:.0f}"


def _context(rows: Rows) -> str:
    row = _row(rows, "context", bench="context, order")
    times = f"{row['ratio']:.1f}x as fast"
    return f"{row['ranks']} ranks: attention {times}\nin zigzag as in plain order"


def _tensor(rows: Rows) -> str:
    inside = _row(rows, "tensor", link="gloo, this machine", ours="sequence")
    across = _row(rows, "tensor", link="emulated 1 GbE", ours="sequence")
    return (
        f"a step of {inside['ours_ms']:.0f} ms inside a machine,\n"
        f"{across['ours_ms']:.0f} ms across 1 GbE"
    )


def _pipeline(rows: Rows) -> str:
    where = dict(bench="pipeline, idle")
    gpipe, zero = (
        _row(rows, "pipeline", **where, schedule=name) for name in ("1f1b", "interleaved_zb")
    )
    return (
        f"{gpipe['ranks']} ranks, {gpipe['microbatches']} microbatches: idle\n"
        f"{gpipe['measured']:.0%} in 1F1B, {zero['measured']:.0%} in zero bubble"
    )


CHOICES = (
    Choice(
        "Does training fit on one device,\nand can the link keep up?",
        "data parallel",
        "--mesh dp=8",
        "dp",
        _ddp,
    ),
    Choice(
        "Does it fit on one device,\nbut the link cannot keep up?",
        "compress, or meet less often",
        "--compress int8",
        "dp",
        _less,
    ),
    Choice(
        "Do weights fit, but not gradients\nand optimizer state beside them?",
        "ZeRO-1, ZeRO-2",
        "--zero 1, --zero 2",
        "dp",
        _zero,
    ),
    Choice("Does one block at a time fit?", "fully sharded (FSDP)", "--zero 3", "dp", _fsdp),
    Choice(
        "Are the activations of one long\nsequence what does not fit?",
        "context parallel",
        "--mesh dp=2,cp=4",
        "cp",
        _context,
    ),
    Choice(
        "Is a layer too large, or are there\nmore devices than sequences?",
        "tensor + sequence parallel,\ninside a node",
        "--mesh dp=2,tp=4",
        "tp",
        _tensor,
    ),
    Choice(
        "Are there several nodes, with a\nslow link between them?",
        "pipeline parallel, across nodes",
        "--mesh pp=2,dp=2,tp=4",
        "pp",
        _pipeline,
    ),
)


def read(folder: Path = MEASURED) -> dict[str, list[dict[str, Any]]]:
    """Read all rows that were measured, by the name of their file without its ending."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def guide(rows: Rows) -> Figure:
    """Draw the questions, top to bottom, and what to do at the first yes.

    Raises `LookupError` where a choice was not measured.
    """
    pitch, half = 0.98, 0.3  # inches from one question to the next; half a box
    height = pitch * len(CHOICES) + 0.75
    figure = pen.figure(pen.WIDTH, height)
    ax = pen.canvas(figure, pen.WIDTH, height)
    pen.title(figure, "Which strategy when: the first yes decides, and large jobs combine them")
    left, right, width = 0.15, 6.35, 2.95
    middle = left + width / 2
    for i, choice in enumerate(CHOICES):
        y = height - 0.95 - pitch * i
        ink = pen.colour(choice.axis)
        _box(ax, left, y, width, half, pen.PAPER, pen.MUTED)
        pen.text(ax, middle, y, choice.question, ha="center", size=10)
        _box(ax, right, y, pen.WIDTH - 0.15 - right, half, ink + "38", ink)
        name = (right + pen.WIDTH - 0.15) / 2
        pen.text(ax, name, y + 0.09, choice.strategy, ha="center", size=10, weight="bold")
        lower = y - (0.2 if "\n" in choice.strategy else 0.13)
        flags = {"ha": "center", "size": 8, "color": pen.MUTED, "family": "monospace"}
        pen.text(ax, name, lower, choice.flags, **flags)
        _arrow(ax, (left + width, y), (right, y), ink)
        centre = (left + width + right) / 2
        pen.text(ax, left + width + 0.1, y + 0.1, "yes", size=8.5, color=pen.MUTED)
        style = {"ha": "center", "size": 8.5, "linespacing": 1.35}
        pen.text(ax, centre, y + 0.12, choice.fact(rows), va="bottom", **style)
        if i < len(CHOICES) - 1:
            _arrow(ax, (middle, y - half), (middle, y - pitch + half), pen.MUTED)
            no = middle + 0.1, y - pitch / 2
            pen.text(ax, *no, "no", size=8.5, color=pen.MUTED)
        else:
            last = "no: recompute activations, or keep optimizer state on the host"
            pen.text(ax, left, y - half - 0.17, last, size=8.5, color=pen.MUTED)
    pen.footnote(figure, "measured on emulated links by minipar bench", height)
    return figure


def _box(ax: Any, x: float, y: float, width: float, half: float, fill: str, edge: str) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": fill, "edgecolor": edge}
    ax.add_patch(FancyBboxPatch((x, y - half), width, 2 * half, **style, lw=1.1))


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], ink: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, color=ink, lw=1.3, **style))


@dataclass(frozen=True)
class Guide:
    """Draw which strategy to choose when, with what was measured of each."""

    out: str = "notebooks/assets/guide.png"
    """Where to draw."""


def main() -> None:
    """Draw the figure from what was measured."""
    print(pen.save(guide(read()), tyro.cli(Guide).out))


if __name__ == "__main__":
    main()
