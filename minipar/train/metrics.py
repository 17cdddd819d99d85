"""metrics.jsonl: one line of JSON per step, on disk as soon as the step is over."""

import json
import math
import os
from pathlib import Path
from typing import Any


class Metrics:
    """Appends lines to `path`; a run that goes on after `step` keeps the lines up to there."""

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = [line for line in read(path) if line["step"] <= step] if path.exists() else []
        fresh = path.with_name(path.name + ".new")  # a kill while copying must not cost any line
        fresh.write_text("".join(map(_one_line, kept)))
        os.replace(fresh, path)
        self._file = path.open("a")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; `line` has at least the key "step".

        Infinity and NaN, which JSON has no word for, become null: so does the gradient norm of a
        step that loss scaling left out.
        """
        self._file.write(_one_line(line))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path`; one that a kill cut short at the end is left out.

    Raises `ValueError` for a line that is none of ours.
    """
    lines = []
    for number, text in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if not text.endswith("\n"):
            break
        try:
            lines.append(json.loads(text))
            lines[-1]["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no line of metrics: {error}") from None
    return lines


def _one_line(line: dict[str, Any]) -> str:
    finite = {k: None if _is_lost(value) else value for k, value in line.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _is_lost(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
