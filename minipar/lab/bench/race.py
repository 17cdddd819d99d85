"""`minipar bench ddp`, and so on: a strategy of ours beside PyTorch's own, in one run.

Both train the same model on the same tokens and the same link. Machines drift, so the contenders
take turns step by step, in changing order. The ratio of a round is our time over PyTorch's; a row
shows the median of all rounds and its quartiles. A step takes as long as its slowest rank.

The emulated link counts the bytes of every library alike; the bare backend ("gloo") counts none.
All ranks compute on the CPU. Who races against whom: strategies.py.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from unittest import mock

import numpy as np
import tyro

from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis
from minipar.emulate import link
from minipar.model.llama import PRESETS
from minipar.ranks.launch import Ranks
from minipar.text import aligned
from minipar.train.config import check_numbers


@dataclass(frozen=True)
class RaceConfig:
    """Compare a strategy of ours with PyTorch's own: time of a training step, and bytes sent."""

    strategy: Annotated[
        Literal["ddp", "fsdp", "tensor", "context", "pipeline"], tyro.conf.Positional
    ] = "ddp"
    """The strategy; "fsdp" includes ZeRO 1 and 2."""
    links: tuple[str, ...] = ("gloo", "10gbe", "1gbe")
    """Where to compare: gloo, as fast as this machine goes, or emulated links; 1gbe*4 is slowed 4
    times."""
    rounds: int = 12
    """Steps of each contender on each link."""
    ranks: int = 2
    """Number of ranks."""
    preset: str = "small"
    """The model."""
    batch_size: int = 2
    """Sequences per rank and step; of a pipeline, sequences per microbatch."""
    seq_len: int = 0
    """Tokens per sequence; 0 is 128, for tensor 256, for context 2,048."""
    json: str = ""
    """Also write the rows to this file."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        check_numbers(self, {"ranks": 2, "rounds": 1, "batch_size": 1})
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        for name in self.links:
            label(name)


def label(link_name: str) -> str:
    """Return the name of a link in a table; raise `ValueError` if there is none of that name."""
    return "gloo, this machine" if link_name == "gloo" else link.parse(link_name).label


# ---------------------------------------------------------------------- the race
class Measured(NamedTuple):
    """All steps of one contender."""

    seconds: list[float]  # of the slowest rank
    num_bytes: list[int]  # sent by the rank that sends most


@contextmanager
def pool(num_ranks: int, link_name: str) -> Iterator[Ranks]:
    """Open ranks on gloo, or on an emulated link; GPUs are hidden from them: all rows are alike."""
    backend = "gloo" if link_name == "gloo" else "link"
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        Ranks(num_ranks, backend=backend, sink=None) as ranks,
    ):
        yield ranks


@contextmanager
def using(link_name: str) -> Iterator[None]:
    """Use an emulated link, without its checks of calls, which cost time."""
    link.use(link_name)
    link.check_calls(False)
    yield
    link.check_calls(True)
    link.use("none")


def race(
    ours: Callable[[], Any], torchs: Callable[[], Any], axis: Axis, link_name: str, rounds: int
) -> dict[str, Measured]:
    """Run steps of "ours" and of "torch" in turns; called on every rank.

    Weights and gradients of one step may still travel when the step ends. So every turn begins
    with a step of the same contender that does not count.
    """
    steps, turns = {"ours": ours, "torch": torchs}, []
    sent: list[tuple[float, int]] = []  # when a call was issued, and its bytes

    def note(work: Any) -> None:  # numbers only: the call's tensors are to be freed
        sent.append((work.t_issue, work.num_bytes))

    with using("none" if link_name == "gloo" else link_name):
        for step in steps.values():
            for _ in range(3):  # the first steps allocate, and measure what calls cost
                step()
        link.observers.append(note)
        for i in range(rounds):
            for name in sorted(steps, reverse=i % 2 == 1):
                barrier(axis)
                steps[name]()
                start = time.monotonic()
                steps[name]()
                turns.append((name, start, time.monotonic()))
                barrier(axis)  # messages on their way arrive before the next turn
        link.observers.remove(note)
    mine = [(end - start, bytes_of(sent, start, end)) for _, start, end in turns]
    measured = {name: Measured([], []) for name in steps}
    for (name, *_), *ranks in zip(turns, *all_gather_object(mine, axis), strict=True):
        seconds, num_bytes = zip(*ranks, strict=True)
        measured[name].seconds.append(max(seconds))
        measured[name].num_bytes.append(max(num_bytes))
    return measured


def bytes_of(sent: Sequence[tuple[float, int]], start: float, end: float) -> int:
    """Return the bytes of all calls that this rank issued in a step."""
    return sum(num_bytes for issued, num_bytes in sent if start <= issued < end)


# ---------------------------------------------------------------------- rows
def row(
    config: RaceConfig, link_name: str, ours: str, torchs: str, measured: Mapping[str, Measured]
) -> dict[str, Any]:
    """Compare a contender "ours" with "torch", by their names in the table."""
    ratios = np.divide(measured["ours"].seconds, measured["torch"].seconds)  # of each round
    low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    found = {"bench": config.strategy, "link": label(link_name)}
    for name in ("ranks", "preset", "batch_size", "seq_len", "rounds"):
        found[name] = getattr(config, name)
    found |= {"ours": ours, "torch": torchs}
    found |= {"ratio": ratio, "ratio_low": low, "ratio_high": high}
    for who, one in measured.items():
        megabytes = statistics.median(one.num_bytes) / 1e6
        found[f"{who}_ms"] = 1e3 * statistics.median(one.seconds)
        found[f"{who}_megabytes"] = None if link_name == "gloo" else megabytes
    return found


# ---------------------------------------------------------------------- tables and files
COLUMNS = {
    "link": "{link}",
    "ours": "{ours}",
    "our step": "{ours_ms:.0f} ms",
    "PyTorch's": "{torch}",
    "its step": "{torch_ms:.0f} ms",
    "ours / PyTorch's [quartiles]": "{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]",
    "MB sent: ours": "{ours_megabytes:.2f}",
    "its": "{torch_megabytes:.2f}",
}


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] = COLUMNS) -> str:
    """Return the rows as text: `columns` have a template by their head, filled with a row.

    Ratios are ours over theirs: below 1 where ours is faster. None in a row is shown as "-".
    """

    def cell(template: str, row: Mapping[str, Any]) -> str:
        try:
            return template.format_map(row)
        except TypeError:  # None, in the place of a number
            return "-"

    lines = [[cell(template, row) for template in columns.values()] for row in rows]
    return "\n".join(aligned([[*columns], *lines]))


def save(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write the rows as JSON, a line for each; an empty `path` writes nothing."""
    if path:
        lines = ",\n".join(json.dumps(row) for row in rows)
        Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
