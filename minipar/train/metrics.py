"""The metrics of a run: a line of JSON per step in metrics.jsonl.

Keys of a line: step, loss (nats per token), lr, grad_norm, tokens (that counted), seconds (of the
step, without validation and checkpoints), tokens_per_second, mfu (see peak.py), peak_memory (bytes,
of rank 0 so far). Some lines have recorded (true where a recorder made the step slower),
validation_loss, and what loss scaling reports.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar.comm import clock
from minipar.comm.mesh import Mesh


class Log:
    """Writes the line of each step to `path`, when the next step has been launched.

    Reading a number from a GPU waits until the GPU has finished all its work. So the numbers of a
    step are read one step later, while the GPU computes the next step, or by `flush`.

    `complete` is called with every line whose numbers have been read. If it raises, the line is not
    written. `progress` is called with every line that is written. A run that goes on after `step`
    keeps the lines of the steps up to `step`. Without a `path`, as on all ranks but one, nothing is
    written.
    """

    def __init__(
        self,
        path: Path | None,
        step: int,
        device: torch.device,
        complete: Callable[[dict[str, Any]], None],
        progress: Callable[[dict[str, Any]], None],
    ) -> None:
        self.path, self.device, self.complete, self.progress = path, device, complete, progress
        self.lines: list[dict[str, Any]] = []
        self.held: tuple[dict[str, Any], Tensor] | None = None  # a line, and its numbers
        if path is not None:
            kept = [line for line in read(path) if line["step"] <= step] if path.exists() else []
            write_whole(path, "".join(map(_one_line, kept)))
        self.restart_clock()

    def write(self, line: dict[str, Any]) -> None:
        """Take in the line of a step, in which numbers are tensors; write the line before."""
        values = [value for value in line.values() if isinstance(value, Tensor)]
        device = line["loss"].device
        numbers = torch.stack([value.to(device, torch.float64) for value in values])
        numbers = numbers.to("cpu", non_blocking=True)
        began, self.began = self.began, clock.stamp(self.device)
        line["seconds"] = began, self.began
        self.flush()
        self.held = line, numbers

    def flush(self) -> None:
        """Write the line that is held, once its numbers have come."""
        if self.held is None:
            return
        (line, numbers), self.held = self.held, None
        began, ended = line["seconds"]
        line["seconds"] = clock.between(began, ended)  # the end follows the copy of the numbers
        read = iter(numbers.tolist())
        for name, value in line.items():
            if isinstance(value, Tensor):
                line[name] = int(next(read)) if value.dtype == torch.int64 else next(read)
        self.complete(line)
        self.lines.append(dict(line))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_one_line(line))
        self.progress(line)

    def add(self, **figures: Any) -> None:
        """Put `figures` into the line that is held."""
        self.held[0].update(figures)

    def restart_clock(self) -> None:
        """Begin to time the next step now; leave out what came before, such as a validation."""
        self.began = clock.stamp(self.device)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: a kill leaves the old text, or all of the new one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path`, without those that a kill or a full disk cut short."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _one_line(line: dict[str, Any]) -> str:
    """Return JSON, in which infinity and NaN are null: JSON has no word for them."""
    lost = [name for name, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
    return json.dumps(line | dict.fromkeys(lost), allow_nan=False) + "\n"


def say(mesh: Mesh, line: str) -> None:
    """Print on the first rank."""
    if mesh.rank == 0:
        print(line, flush=True)
