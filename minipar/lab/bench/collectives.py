"""`minipar bench collectives`: our all-reduce beside the backend's own, over sizes.

Gloo's all-reduce is a ring in C++ as well; ours is one in Python that calls C++ for every message.
Small tensors show what Python costs, large ones whether anything is lost besides. As machines
drift, contenders take turns call by call, in changing order, and what counts is the ratio within a
round: ours over the backend's, as the median of all rounds with its quartiles. A round's time is
that of its slowest rank.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minipar.comm import algorithms, link, plans
from minipar.comm import collectives as comm
from minipar.comm.launch import Ranks
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.spans import wire_bytes
from minipar.lab.bench.race import aligned, quartiles, save

BACKEND = "backend"


@dataclass(frozen=True)
class CollectivesConfig:
    """Compare all-reduce algorithms with the backend's own, in interleaved calls."""

    ranks: int = 4
    """Number of ranks."""
    sizes: tuple[int, ...] = (1_024, 16_384, 262_144, 1_048_576, 4_194_304, 16_777_216)
    """Bytes to reduce."""
    algorithms: tuple[str, ...] = tuple(plans.ALL_REDUCE)
    """Which of ours."""
    links: tuple[str, ...] = ("gloo",)
    """Where: gloo, as fast as this machine goes, or emulated links such as 1gbe or 1gbe*4."""
    rounds: int = 15
    """Calls of each contender per size."""
    json: str = ""
    """Also write the rows to this file."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        if self.ranks < 2:
            raise ValueError(f"--ranks {self.ranks}: it takes at least 2 to talk")
        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds} must be >= 1")
        if not self.sizes or min(self.sizes) < 4:
            raise ValueError(f"--sizes {self.sizes}: give bytes, 4 (one float) or more")
        unknown = [name for name in self.algorithms if name not in plans.ALL_REDUCE]
        if unknown or not self.algorithms:
            raise ValueError(f"--algorithms {unknown}: use some of {', '.join(plans.ALL_REDUCE)}")
        if not self.links:
            raise ValueError("--links needs at least one, such as gloo")
        for name in self.links:
            if name != "gloo":
                link.parse(name)
        if self.json and not Path(self.json).parent.is_dir():
            raise ValueError(f"--json {self.json}: there is no folder {Path(self.json).parent}")


def run(config: CollectivesConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row per link, size and algorithm.

    A row's "ratio" is our time over the backend's, below 1 where ours is faster.
    """
    config.check()
    rows: list[dict[str, Any]] = []
    for name in config.links:
        backend = "gloo" if name == "gloo" else "link"
        with Ranks(config.ranks, backend=backend, sink=None) as ranks:
            measured = ranks.run(measure, config, name)[0]
        rows += [row for size in config.sizes for row in _rows(config, name, size, measured)]
    print(table(rows))
    save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- on the ranks
@dataclass
class Measured:
    """Seconds of every round by (size, contender), and what `algorithms.tune` found."""

    seconds: dict[tuple[int, str], list[float]]
    tuning: algorithms.Tuning


def measure(config: CollectivesConfig, link_name: str) -> Measured:
    """Let all contenders take turns; called on every rank."""
    axis = Mesh(dp=config.ranks).dp
    if link_name != "gloo":
        link.use(link.parse(link_name))
        link.check_calls(False)  # time is the topic
    names = [BACKEND, *config.algorithms]
    seconds: dict[tuple[int, str], list[float]] = {}
    tuning = algorithms.tune(axis)
    gc.collect()
    gc.disable()
    for size in config.sizes:
        tensor = torch.ones(size // 4)
        for name in names:  # makes connections, touches memory
            call(name, tensor, axis)
        for turn in range(config.rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                comm.barrier(axis)
                start = time.perf_counter()
                call(name, tensor, axis)
                seconds.setdefault((size, name), []).append(time.perf_counter() - start)
    gc.enable()
    every = comm.all_gather_object(seconds, axis)
    slowest = {
        key: [max(times) for times in zip(*(ranks[key] for ranks in every), strict=True)]
        for key in seconds
    }
    return Measured(slowest, tuning)


def call(name: str, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All-reduce by the backend, or by one of our algorithms; both leave the input as it is."""
    if name == BACKEND:
        return comm.all_reduce(tensor, axis)
    return algorithms.all_reduce(tensor, axis, name)


# ---------------------------------------------------------------------- the table
def _rows(
    config: CollectivesConfig, name: str, size: int, measured: Measured
) -> list[dict[str, Any]]:
    theirs = measured.seconds[size, BACKEND]
    sent = wire_bytes("all_reduce", size, config.ranks)  # "bus bandwidth", as nccl-tests counts
    rows = []
    for algorithm in config.algorithms:
        ours = measured.seconds[size, algorithm]
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
        low, ratio, high = quartiles(ratios)
        rows.append(
            {
                "bench": "collectives",
                "link": "gloo, this machine" if name == "gloo" else link.parse(name).label,
                "ranks": config.ranks,
                "num_bytes": size,
                "algorithm": algorithm,
                "ours_ms": statistics.median(ours) * 1e3,
                "backend_ms": statistics.median(theirs) * 1e3,
                "ours_mb_per_s": sent / statistics.median(ours) / 1e6,
                "backend_mb_per_s": sent / statistics.median(theirs) / 1e6,
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "predicted_ms": measured.tuning.seconds(algorithm, size) * 1e3,
                "picked": measured.tuning.best(size) == algorithm,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text, the algorithm that `tune` picks marked with a star."""
    head = ("link", "bytes", "algorithm", "ours", "predicted", "backend", "ratio [quartiles]")
    head += ("ours MB/s", "backend MB/s")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["link"],
                f"{row['num_bytes']:,}",
                row["algorithm"] + (" *" if row["picked"] else ""),
                f"{row['ours_ms']:.2f} ms",
                f"{row['predicted_ms']:.2f} ms",
                f"{row['backend_ms']:.2f} ms",
                f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]",
                f"{row['ours_mb_per_s']:.0f}",
                f"{row['backend_mb_per_s']:.0f}",
            )
        )
    return aligned(lines)
