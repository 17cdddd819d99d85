"""`minipar bench collectives`: our collectives beside the backend's own, over sizes.

Gloo's all-reduce is a ring in C++ as well; ours is one in Python that calls C++ for every message.
Small tensors show what Python costs, large ones whether anything is lost besides. As machines
drift, contenders take turns call by call, in changing order, and what counts is the ratio within a
round: ours over the backend's, as the median of all rounds with its quartiles. A round's time is
that of its slowest rank.

``--verb`` takes another: the reduce-scatter and the all-to-all of `comm.collectives`, which post
their receives first, beside gloo's, which sends first; and an exchange with the two neighbours in
either order. On a real link that is a factor of up to 2, see `collectives.exchange`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm import algorithms, link, plans
from minipar.comm import collectives as comm
from minipar.comm.launch import Ranks
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.spans import wire_bytes
from minipar.lab.bench.race import aligned, quartiles, save

BACKEND = "backend"


def _ring_step(tensor: torch.Tensor, axis: Axis, sends_first: bool = False) -> None:
    """To the right neighbour, from the left one."""
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if sends_first:
        sent = comm.send(tensor, axis, right, async_op=True)
        comm.recv(torch.empty_like(tensor), axis, left)
        sent.wait()
    else:
        comm.exchange([(tensor, right)], [(torch.empty_like(tensor), left)], axis)


def _gloo_reduce_scatter(tensor: torch.Tensor, axis: Axis) -> None:
    mine = torch.empty_like(tensor.chunk(axis.size)[0])
    dist.reduce_scatter_single(mine, tensor, group=axis.group)


def _gloo_all_to_all(tensor: torch.Tensor, axis: Axis) -> None:
    dist.all_to_all_single(torch.empty_like(tensor), tensor, group=axis.group)


VERBS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "exchange": (partial(_ring_step, sends_first=True), _ring_step),
    "reduce_scatter": (_gloo_reduce_scatter, comm.reduce_scatter),
    "all_to_all": (_gloo_all_to_all, comm.all_to_all),
}
"""Besides all_reduce: the backend's own, and ours."""


@dataclass(frozen=True)
class CollectivesConfig:
    """Compare our collectives with the backend's own, in interleaved calls."""

    ranks: int = 4
    """Number of ranks."""
    sizes: tuple[int, ...] = (1_024, 16_384, 262_144, 1_048_576, 4_194_304, 16_777_216)
    """Bytes of the whole tensor."""
    verb: str = "all_reduce"
    """What to compare: all_reduce, exchange, reduce_scatter or all_to_all."""
    algorithms: tuple[str, ...] = tuple(plans.ALL_REDUCE)
    """Which of our all-reduces."""
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
        if self.verb not in ("all_reduce", *VERBS):
            raise ValueError(f"--verb {self.verb!r}: use all_reduce, {', '.join(VERBS)}")
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
    names = [BACKEND, *_ours(config)]
    seconds: dict[tuple[int, str], list[float]] = {}
    tuning = algorithms.tune(axis)
    gc.collect()
    gc.disable()
    for size in config.sizes:
        tensor = torch.ones(size // 4)
        for name in names:  # makes connections, touches memory
            call(name, tensor, axis, config.verb)
        for turn in range(config.rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                comm.barrier(axis)
                start = time.perf_counter()
                call(name, tensor, axis, config.verb)
                seconds.setdefault((size, name), []).append(time.perf_counter() - start)
    gc.enable()
    every = comm.all_gather_object(seconds, axis)
    slowest = {
        key: [max(times) for times in zip(*(ranks[key] for ranks in every), strict=True)]
        for key in seconds
    }
    return Measured(slowest, tuning)


def _ours(config: CollectivesConfig) -> tuple[str, ...]:
    return (config.verb,) if config.verb in VERBS else config.algorithms


def call(name: str, tensor: torch.Tensor, axis: Axis, verb: str) -> None:
    """Do `verb` by the backend, or by one of ours; both leave the input as it is."""
    if verb in VERBS:
        VERBS[verb][name != BACKEND](tensor, axis)
    elif name == BACKEND:
        comm.all_reduce(tensor, axis)
    else:
        algorithms.all_reduce(tensor, axis, name)


# ---------------------------------------------------------------------- the table
def _rows(
    config: CollectivesConfig, name: str, size: int, measured: Measured
) -> list[dict[str, Any]]:
    theirs = measured.seconds[size, BACKEND]
    cost = "send" if config.verb == "exchange" else config.verb
    sent = wire_bytes(cost, size, config.ranks)  # "bus bandwidth", as nccl-tests counts
    tuning, rows = measured.tuning, []
    wire = link.Link("as measured", tuning.alpha, 1 / tuning.beta)
    for algorithm in _ours(config):
        ours = measured.seconds[size, algorithm]
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
        low, ratio, high = quartiles(ratios)
        predicted = link.seconds(cost, size, config.ranks, wire)  # of all but all-reduces
        if config.verb not in VERBS:
            predicted = tuning.seconds(algorithm, size)
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
                "predicted_ms": predicted * 1e3,
                "picked": config.verb == "all_reduce" and tuning.best(size) == algorithm,
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
