"""Which strategy when? The figure in README: `python -m minipar.lab.guide`.

Questions in the order in which they are asked; the first "yes" decides. On every "yes" stands what
was measured of that choice, read from the rows that `minipar bench ... --json` has written to
`notebooks/assets/measured/`. So the figure says nothing that a command has not printed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

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
    template: str  # of the fact: two lines at most, with rows by name
    rows: dict[str, dict[str, Any]]  # which rows: their "file", and values that they have

    def fact(self, rows: Rows) -> str:
        """Return the fact in numbers. Raises `LookupError` where they were not measured."""
        return self.template.format(
            **{name: _row(rows, **where) for name, where in self.rows.items()}
        )


def _row(rows: Rows, file: str, **where: Any) -> Mapping[str, Any]:
    """The one row of a file with these values. Raises `LookupError` if there is none."""
    for row in rows[file]:
        if all(row.get(key) == value for key, value in where.items()):
            return row
    raise LookupError(f"{file}.json has no row with {where}; measure it again")


WIRE = {"link": "emulated 1 GbE"}
WHOLE = {"file": "ddp", **WIRE}
CUT = {"file": "fsdp", **WIRE}
LESS = {"file": "compression"}
SEQUENCE = {"file": "tensor", "ours": "sequence"}
IDLE = {"file": "pipeline", "bench": "pipeline, idle"}
CHOICES = (
    Choice(
        "Does training fit on one device,\nand can the link keep up?",
        "data parallel",
        "--mesh dp=8",
        "dp",
        "{ddp[ours_hidden]:.0%} of communication\nhidden on 1 GbE",
        {"ddp": WHOLE},
    ),
    Choice(
        "Does it fit on one device,\nbut the link cannot keep up?",
        "compress, or meet less often",
        "--compress int8",
        "dp",
        "a step in {int8[ratio]:.2f} of the time, loss {int8[gap]:+.3f};\n"
        "DiLoCo: in {local[ratio]:.2f}, loss {local[gap]:+.3f}",
        {"int8": {**LESS, "method": "int8"}, "local": {**LESS, "method": "DiLoCo streaming"}},
    ),
    Choice(
        "Do weights fit, but not gradients\nand optimizer state beside them?",
        "ZeRO-1, ZeRO-2",
        "--zero 1, --zero 2",
        "dp",
        "{cut[ours_megabytes]:.1f} MB sent a step,\nin place of {ddp[megabytes]:.1f} by ddp",
        {"cut": {**CUT, "ours": "ZeRO-2"}, "ddp": WHOLE},
    ),
    Choice(
        "Does one block at a time fit?",
        "fully sharded (FSDP)",
        "--zero 3",
        "dp",
        "{cut[ours_peak_mb]:.0f} MB of memory in place of {kept[ours_peak_mb]:.0f},\n"
        "for {cut[ours_megabytes]:.1f} MB sent in place of {kept[ours_megabytes]:.1f}",
        {"cut": {**CUT, "ours": "FSDP"}, "kept": {**CUT, "ours": "FSDP, weights kept"}},
    ),
    Choice(
        "In any case: do activations\nof one long sequence not fit?",
        "context parallel",
        "--mesh dp=2,cp=4",
        "cp",
        "{order[ranks]} ranks: attention {order[ratio]:.1f}x as fast\nin zigzag as in plain order",
        {"order": {"file": "context", "bench": "context, order"}},
    ),
    Choice(
        "Is a layer too large, or are there\nmore devices than sequences?",
        "tensor + sequence parallel,\ninside a node",
        "--mesh dp=2,tp=4",
        "tp",
        "a step of {inside[ours_ms]:.0f} ms inside a machine,\n"
        "{across[ours_ms]:.0f} ms across 1 GbE",
        {"inside": {**SEQUENCE, "link": "gloo, this machine"}, "across": {**SEQUENCE, **WIRE}},
    ),
    Choice(
        "Are there several nodes, with a\nslow link between them?",
        "pipeline parallel, across nodes",
        "--mesh pp=2,dp=2,tp=4",
        "pp",
        "{plain[ranks]} ranks, {plain[microbatches]} microbatches: idle\n"
        "{plain[measured]:.0%} in 1F1B, {zero[measured]:.0%} in zero bubble",
        {"plain": {**IDLE, "schedule": "1f1b"}, "zero": {**IDLE, "schedule": "interleaved_zb"}},
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
    title = "Which strategy when: the first yes decides; long sequences are a question of their own"
    figure, ax = pen.sheet(pen.WIDTH, height, title, "measured on emulated links by minipar bench")
    left, right, width = 0.15, 6.35, 2.95
    middle = left + width / 2
    for i, choice in enumerate(CHOICES):
        y = height - 0.95 - pitch * i
        ink = pen.colour(choice.axis)
        box = {"height": 2 * half, "radius": 0.08, "lw": 1.1}
        pen.rounded(ax, left, y - half, width, **box, fc=pen.PAPER, ec=pen.MUTED)
        pen.text(ax, middle, y, choice.question, ha="center", size=10)
        pen.rounded(ax, right, y - half, pen.WIDTH - 0.15 - right, **box, fc=ink + "38", ec=ink)
        name = (right + pen.WIDTH - 0.15) / 2
        pen.text(ax, name, y + 0.09, choice.strategy, ha="center", size=10, weight="bold")
        lower = y - (0.2 if "\n" in choice.strategy else 0.13)
        flags = {"ha": "center", "size": 8, "color": pen.MUTED, "family": "monospace"}
        pen.text(ax, name, lower, choice.flags, **flags)
        pen.arrow(ax, (left + width, y), (right, y), 12, color=ink, lw=1.3)
        centre = (left + width + right) / 2
        pen.text(ax, left + width + 0.1, y + 0.1, "yes", size=8.5, color=pen.MUTED)
        style = {"ha": "center", "size": 8.5, "linespacing": 1.35}
        pen.text(ax, centre, y + 0.12, choice.fact(rows), va="bottom", **style)
        if i < len(CHOICES) - 1:
            down = (middle, y - half), (middle, y - pitch + half)
            pen.arrow(ax, *down, 12, color=pen.MUTED, lw=1.3)
            no = middle + 0.1, y - pitch / 2
            pen.text(ax, *no, "no", size=8.5, color=pen.MUTED)
        else:
            last = "no: recompute activations, or keep optimizer state on the host"
            pen.text(ax, left, y - half - 0.17, last, size=8.5, color=pen.MUTED)
    return figure


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
