"""What a run tells while it trains: a line per step in metrics.jsonl, and in TensorBoard if asked.

Keys of a line: step, loss (nats per token), lr, grad_norm, tokens (that counted), seconds (from the
end of the step before to that of this one, without validation, checkpoints, and what a recorder
does before and after a step), tokens_per_second, mfu (see peak.py), peak_memory (bytes, of rank 0
so far). And where there is something to tell: recorded (true where a recorder ran, with which a
step takes longer), hidden_fraction (in it), save_seconds (that training has waited for checkpoints
since the line before), validation_loss, and what loss scaling and the sharing out of work report.
With experts: expert_load, dropped_slots and tokens_per_expert, see `report.expert_figures`.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import Mesh

MEASURED = ["recorded", "seconds", "tokens_per_second", "mfu"]
MEASURED += ["peak_memory", "hidden_fraction", "save_seconds"]
"""Keys whose values differ between two runs that do the same."""


PATIENCE = 10.0  # seconds that a run which fails waits for the numbers of its last step
_NUMBERS = (int, float, type(None))  # null stands for infinity


class Metrics:
    """Appends lines to `path`; a run that goes on after `step` keeps the lines up to there.

    With a `tensorboard` folder, the numbers of each line go there as well.
    """

    def __init__(self, path: Path, step: int = 0, tensorboard: Path | None = None) -> None:
        kept = [line for line in read(path) if line["step"] <= step] if path.exists() else []
        write_whole(path, "".join(map(_one_line, kept)))
        self.last = (kept[-1]["step"], kept[-1].get("loss")) if kept else None  # of what was there
        self.path, self._file = path, path.open("a", encoding="utf-8")
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
        self._draw(line, line["step"])

    def add(self, figures: dict[str, Any]) -> None:
        """Put `figures` into the line that was written last."""
        self._file.close()
        *before, last = read(self.path)
        write_whole(self.path, "".join(map(_one_line, [*before, last | figures])))
        self._file = self.path.open("a", encoding="utf-8")
        self._draw(figures, last["step"])

    def _draw(self, figures: dict[str, Any], step: int) -> None:
        if self._board is not None:
            for name, value in _numbers(figures):
                self._board.add_scalar(name, value, step)
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


def say(mesh: Mesh, line: str) -> None:
    """Print on the first rank; a reader that has gone, such as `| head`, does not end a run."""
    if mesh.rank == 0:
        with suppress(BrokenPipeError):
            print(line, flush=True)


# ---------------------------------------------------------------------- a step late
def _mark(device: torch.device) -> Any:
    """This moment; on a GPU, an event: when all is done that was launched until now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Stopwatch:
    """Adds up the seconds of the bodies of its `with`; on a GPU, of the kernels they launch.

    Events on the GPU measure these, and nothing waits for them: `seconds` can be read when the
    last of them has come.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, []

    def __enter__(self) -> "Stopwatch":
        self.marks.append(_mark(self.device))
        return self

    def __exit__(self, *_: Any) -> None:
        self.marks.append(_mark(self.device))

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        if self.device.type == "cuda":
            return sum(start.elapsed_time(end) for start, end in pairs) / 1e3
        return sum(end - start for start, end in pairs)


class Telling:
    """Writes the line of each step to `metrics`, hands it to `progress`, and keeps it in `lines`.

    To read a number of a GPU is to wait until it has nothing left to do. So the numbers of a step
    are copied to the host behind it, and read when the next step is launched, or `now`, where a
    decision needs them. `complete` then adds to their line what follows from them.

    When its body fails, the step before is still told, if that is done within `PATIENCE`.
    """

    def __init__(
        self,
        device: torch.device,
        complete: Callable[[dict[str, Any]], None],
        progress: Callable[[dict[str, Any]], None],
        metrics: Metrics | None,
    ) -> None:
        self.device, self.complete = device, complete
        self.progress, self.metrics = progress, metrics
        self.lag = 1 if device.type == "cuda" else 0  # steps whose numbers may be on their way
        self.held: deque[tuple[dict[str, Any], Tensor, Any]] = deque()
        self.known: deque[dict[str, Any]] = deque()  # read, and not told
        self.lines: list[dict[str, Any]] = []

    def hold(self, line: dict[str, Any]) -> None:
        """Take in a step that was launched: its numbers are tensors, "seconds" is a stopwatch."""
        coming = [value for value in line.values() if isinstance(value, Tensor)]
        exact = [value.to(line["loss"].device, torch.float64).flatten() for value in coming]
        values = torch.cat(exact).to("cpu", non_blocking=True)
        self.held.append((line, values, _mark(self.device)))

    def read(self, *, now: bool) -> Iterator[dict[str, Any]]:
        """Yield the lines whose numbers are due: all of them, `now`. A caller who raises keeps one
        from being told.
        """
        while len(self.held) > (0 if now else self.lag):
            line, values, landed = self.held.popleft()
            if self.lag:
                landed.synchronize()
            coming = {name: value for name, value in line.items() if isinstance(value, Tensor)}
            parts = values.split([value.numel() for value in coming.values()])
            for (name, value), part in zip(coming.items(), parts, strict=True):
                line[name] = part.view(value.shape).to(value.dtype).tolist()
            line["seconds"] = line["seconds"].seconds
            self.complete(line)
            yield line
            self.known.append(line)

    def tell(self) -> None:
        """Tell of the steps whose numbers have been read."""
        while self.known:
            line = self.known.popleft()
            if self.lines:
                self.lines[-1].pop("tokens_per_expert", None)  # long, and only told of the last
            self.lines.append(dict(line))
            if self.metrics is not None:
                self.metrics.write(line)
            self.progress(line)

    def add(self, figures: dict[str, Any]) -> None:
        """Put `figures`, which came late, into the line of the step that was told last."""
        self.lines[-1] |= figures
        if self.metrics is not None:
            self.metrics.add(figures)

    def __enter__(self) -> "Telling":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and self.lag:
            with suppress(Exception):  # what has ended the run says more
                if kind is not FloatingPointError and self._have_landed():
                    deque(self.read(now=True), maxlen=0)
                self.tell()
        if self.metrics is not None:
            self.metrics.close()

    def _have_landed(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while self.held and not self.held[-1][2].query():
            if time.monotonic() > deadline:  # another rank has failed, and the GPU waits for it
                return False
            time.sleep(0.01)
        return True
