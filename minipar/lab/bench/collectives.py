"""`minipar bench collectives`: our collectives beside the backend's own, over sizes.

Gloo's all-reduce is a ring in C++ as well; ours is one in Python that calls C++ for every message.
What bounds it is a contender of its own: *the messages alone*, one round after the other, posted
straight to torch, with nothing copied, added or entered in a ledger. Small messages cost gloo more
than they carry, and on two cores every byte is moved by those that also add. How contenders take
turns, call by call, and what is counted: see `race.py`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm import algorithms, plans
from minipar.comm import collectives as comm
from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.tuning import Tuning, tune
from minipar.lab.bench import race

BACKEND = "backend"


@dataclass(frozen=True)
class CollectivesConfig(race.BenchConfig):
    """Compare our collectives with the backend's own, in interleaved calls."""

    ranks: int = 4
    """Number of ranks."""
    sizes: tuple[int, ...] = (1_024, 16_384, 262_144, 1_048_576, 4_194_304, 16_777_216)
    """Bytes of the whole tensor."""
    algorithms: tuple[str, ...] = tuple(plans.ALL_REDUCE)
    """Which of our all-reduces."""
    links: tuple[str, ...] = ("gloo",)
    """Where: gloo, as fast as this machine goes, or emulated links such as 1gbe or 1gbe*4."""
    rounds: int = 15
    """Calls of each contender per size."""

    least = {"ranks": 2, "sizes": 4}  # bytes of one float

    def check(self) -> None:
        super().check()
        unknown = [name for name in self.algorithms if name not in plans.ALL_REDUCE]
        if unknown:
            raise ValueError(f"--algorithms {unknown}: use some of {', '.join(plans.ALL_REDUCE)}")


def run(config: CollectivesConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row per link, size and algorithm.

    A row's "ratio" is our time over the backend's, below 1 where ours is faster.
    """
    config.check()
    rows: list[dict[str, Any]] = []
    for name in config.links:
        found = race.on_ranks(measure, config, name)
        rows += [row for size in config.sizes for row in _rows(config, name, size, *found)]
    print(table(rows))
    race.save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- on the ranks
def measure(
    config: CollectivesConfig, link_name: str
) -> tuple[dict[int, dict[str, race.Measured]], Tuning]:
    """Let all contenders take turns at every size; called on every rank.

    Returns also what `tune` finds out about the link.
    """
    axis, measured = Mesh(dp=config.ranks).dp, {}
    with race.emulated(link_name):
        tuning = tune(axis)
    for size in config.sizes:
        tensor = torch.ones(size // 4)
        steps = {name: partial(call, name, tensor, axis) for name in (BACKEND, *config.algorithms)}
        for name in config.algorithms:
            steps[messages_of(name)] = partial(only_messages, name, tensor, axis)
        measured[size] = race.race(steps, axis, link_name, config.rounds)
    return measured, tuning


def call(name: str, tensor: torch.Tensor, axis: Axis) -> None:
    """All-reduce by the backend, or by one of ours; both leave the input as it is."""
    if name == BACKEND:
        comm.all_reduce(tensor, axis)
    else:
        algorithms.all_reduce(tensor, axis, name)


def messages_of(algorithm: str) -> str:
    """Return the name of the contender that only sends that algorithm's messages."""
    return f"messages of {algorithm}"


def only_messages(algorithm: str, tensor: torch.Tensor, axis: Axis) -> None:
    """Send and receive as the algorithm does for [D], and no more: what arrives is not used."""
    arrived = torch.empty_like(tensor)
    plan = plans.ALL_REDUCE[algorithm](
        len(tensor), axis.rank, axis.size, plans.CHUNK_BYTES // tensor.element_size()
    )
    for step in plan:
        ways = [(dist.irecv, arrived[m.lo : m.hi], m.peer) for m in step.recvs]
        ways += [(dist.isend, tensor[m.lo : m.hi], m.peer) for m in step.sends]
        ways = [way for way in ways if way[2] != axis.rank]
        posts = [dist.P2POp(op, part, None, axis.group, 0, peer) for op, part, peer in ways]
        for work in dist.batch_isend_irecv(posts) if posts else ():
            work.wait()


# ---------------------------------------------------------------------- the table
def _rows(
    config: CollectivesConfig,
    name: str,
    size: int,
    measured: dict[int, dict[str, race.Measured]],
    tuning: Tuning,
) -> list[dict[str, Any]]:
    theirs, rows = measured[size][BACKEND].seconds, []
    sent = wire_bytes("all_reduce", size, config.ranks)  # "bus bandwidth", as nccl-tests counts
    for algorithm in config.algorithms:
        ours = measured[size][algorithm].seconds
        messages = measured[size][messages_of(algorithm)].seconds
        rows.append(
            {
                "bench": "collectives",
                "link": race.label(name),
                "ranks": config.ranks,
                "num_bytes": size,
                "algorithm": algorithm,
                "ours_ms": statistics.median(ours) * 1e3,
                "backend_ms": statistics.median(theirs) * 1e3,
                "ours_mb_per_s": sent / statistics.median(ours) / 1e6,
                "backend_mb_per_s": sent / statistics.median(theirs) / 1e6,
                **race.ratios(ours, theirs),
                "messages_ms": statistics.median(messages) * 1e3,
                "messages_ratio": race.ratios(messages, theirs)["ratio"],
                "predicted_ms": tuning.seconds(algorithm, size) * 1e3,
                "picked": tuning.best(size) == algorithm,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text, the algorithm that `tune` picks marked with a star."""
    columns = [
        ("link", "{link}"),
        ("bytes", "{num_bytes:,}"),
        ("algorithm", "{algorithm}{star}"),
        ("ours", "{ours_ms:.2f} ms"),
        ("predicted", "{predicted_ms:.2f} ms"),
        ("backend", "{backend_ms:.2f} ms"),
        ("ratio [quartiles]", "{ratio:.2f} [{ratio_low:.2f}, {ratio_high:.2f}]"),
        ("its messages alone", "{messages_ms:.2f} ms, {messages_ratio:.2f}"),
        ("ours MB/s", "{ours_mb_per_s:.0f}"),
        ("backend MB/s", "{backend_mb_per_s:.0f}"),
    ]
    return race.table([row | {"star": " *" if row["picked"] else ""} for row in rows], columns)
