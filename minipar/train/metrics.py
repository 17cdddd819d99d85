"""What a run tells while it trains: a line per step in metrics.jsonl, and in TensorBoard if asked.

Keys of a line: step, loss (nats per token), lr, grad_norm, tokens (that counted), seconds,
tokens_per_second, mfu (see peak.py), peak_memory (bytes, of rank 0 so far). And where there is
something to tell: recorded (true for such a step, which takes longer), hidden_fraction (in it),
save_seconds (that training has waited for checkpoints since the line before), validation_loss, and
what loss scaling and the sharing out of work report. With experts: expert_load, dropped_slots and
tokens_per_expert, see `report.expert_figures`.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEASURED = ["recorded", "seconds", "tokens_per_second", "mfu"]
MEASURED += ["peak_memory", "hidden_fraction", "save_seconds"]
"""Keys whose values differ between two runs that do the same."""


_NUMBERS = (int, float, type(None))  # null stands for infinity


class Metrics:
    """Appends lines to `path`; a run that goes on after `step` keeps the lines up to there.

    With a `tensorboard` folder, the numbers of each line go there as well.
    """

    def __init__(self, path: Path, step: int = 0, tensorboard: Path | None = None) -> None:
        kept = [line for line in read(path) if line["step"] <= step] if path.exists() else []
        write_whole(path, "".join(map(_one_line, kept)))
        self._file = path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard is not None:
            # Of what a run that was killed wrote there after `step`, nothing is to be seen.
            self._board = summary_writer()(tensorboard, purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; `line` has at least the key "step".

        Infinity and NaN, which JSON has no word for, become null: so does the gradient norm of a
        step that loss scaling left out.
        """
        self._file.write(_one_line(line))
        self._file.flush()
        if self._board is not None:
            for name, value in _numbers(line):
                self._board.add_scalar(name, value, line["step"])
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`; after a kill there is what was before, or all of it."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def summary_writer() -> type:
    """Return torch's writer for TensorBoard. Raises `ValueError` where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard needs the tensorboard package, which is not installed; "
            "pip install tensorboard, or leave the flag out: metrics.jsonl has the same numbers"
        ) from None
    return SummaryWriter


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path`; one that a kill cut short at the end is left out.

    Raises `ValueError` for a line that is none of ours.
    """
    lines = []
    for number, text in enumerate(
        path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), start=1
    ):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
            if type(line["step"]) is not int or type(line.get("loss", 0.0)) not in _NUMBERS:
                raise TypeError("step or loss is no number")
            _one_line(line)  # it can be written again
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is no line of metrics: {error}") from None
        lines.append(line)
    return lines


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What of `line` can be drawn; tokens per expert by layer and number."""
    for name, value in line.items():
        if name == "tokens_per_expert":
            for layer, slots in value.items():
                yield from ((f"{name}/{layer}/{i}", num) for i, num in enumerate(slots))
        elif name != "step" and isinstance(value, int | float):
            yield name, value


def _one_line(line: dict[str, Any]) -> str:
    lost = [name for name, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
    return json.dumps(line | dict.fromkeys(lost), allow_nan=False) + "\n"
