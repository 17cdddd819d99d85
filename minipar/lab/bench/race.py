"""`minipar bench ddp`, and so on: a strategy of ours beside PyTorch's own, in one run.

Both train the same model on the same tokens and the same link. Machines drift, so the contenders
take turns step by step, in changing order. The ratio of a round is our time over PyTorch's; a row
shows the median of all rounds and its quartiles. A step takes as long as its slowest rank.

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
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
import tyro

from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis
from minipar.emulate import link
from minipar.ranks.launch import Ranks
from minipar.text import aligned


@dataclass(frozen=True)
class RaceConfig:
    """Compare a strategy of ours with PyTorch's own: the time of a training step on two ranks."""

    strategy: Annotated[
        Literal["ddp", "fsdp", "tensor", "context", "pipeline"], tyro.conf.Positional
    ] = "ddp"
    """The strategy; "fsdp" includes ZeRO 1 and 2."""
    links: tuple[str, ...] = ("gloo", "10gbe", "1gbe")
    """Where to compare: gloo, as fast as this machine goes, or emulated links; 1gbe*4 is slowed 4
    times."""
    rounds: int = 12
    """Steps of each contender on each link."""
    json: str = ""
    """Also write the rows to this file; the book shows those of notebooks/assets/measured."""


def label(link_name: str) -> str:
    """Return the name of a link in a table; raise `ValueError` if there is none of that name."""
    return "gloo, this machine" if link_name == "gloo" else link.parse(link_name).label


# ---------------------------------------------------------------------- the race
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
) -> dict[str, list[float]]:
    """Run steps of "ours" and of "torch" in turns; return seconds of the slowest rank.

    Called on every rank. Weights and gradients of one step may still travel when the step ends. So
    every turn begins with a step of the same contender that does not count.
    """
    steps, turns = {"ours": ours, "torch": torchs}, []
    with using("none" if link_name == "gloo" else link_name):
        for step in steps.values():
            for _ in range(3):  # the first steps allocate, and measure what calls cost
                step()
        for i in range(rounds):
            for name in sorted(steps, reverse=i % 2 == 1):
                barrier(axis)
                steps[name]()
                start = time.monotonic()
                steps[name]()
                turns.append((name, time.monotonic() - start))
                barrier(axis)  # messages on their way arrive before the next turn
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for same in zip(*all_gather_object(turns, axis), strict=True):  # the same turn on all ranks
        name, slowest = max(same)
        seconds[name].append(slowest)
    return seconds


# ---------------------------------------------------------------------- rows and tables
def row(
    link_name: str, ours: str, torchs: str, seconds: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Compare a contender "ours" with "torch", by their names in the table."""
    ratios = np.divide(seconds["ours"], seconds["torch"])  # of each round
    low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    found = {"link": label(link_name), "ours": ours, "torch": torchs}
    found |= {"ratio": ratio, "ratio_low": low, "ratio_high": high}
    return found | {f"{who}_ms": 1e3 * statistics.median(own) for who, own in seconds.items()}


COLUMNS = {
    "link": "{link}",
    "ours": "{ours}",
    "our step": "{ours_ms:.0f} ms",
    "PyTorch's": "{torch}",
    "its step": "{torch_ms:.0f} ms",
    "ours / PyTorch's [quartiles]": "{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]",
}


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] = COLUMNS) -> str:
    """Return the rows as text: `columns` have a template by their head, filled with a row."""
    lines = [[template.format_map(row) for template in columns.values()] for row in rows]
    return "\n".join(aligned([[*columns], *lines]))


def save(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write the rows as JSON, a line for each; an empty `path` writes nothing."""
    if path:
        lines = ",\n".join(json.dumps(row) for row in rows)
        Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
