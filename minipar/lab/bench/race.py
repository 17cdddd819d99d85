"""Contenders take turns: what all comparisons of training steps have in common.

Machines drift, so contenders that do the same work take turns step by step, in changing order. What
counts is the ratio within a round of turns: ours over theirs, as the median of all rounds with its
quartiles. A step takes as long as that of its slowest rank. Beside it stands the ratio of processor
time, of the busiest rank and all its threads: it hardly notices who else uses the machine. Bytes
are those of the emulated link, which sees what anybody sends; on bare gloo nobody counts them.
"""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minipar.comm import link
from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis
from minipar.model.llama import PRESETS


@dataclass(frozen=True)
class StepConfig:
    """What every comparison of training steps can be told."""

    ranks: int = 2
    """Number of ranks."""
    preset: str = "small"
    """The model."""
    batch_size: int = 2
    """Sequences per rank and step."""
    seq_len: int = 128
    """Tokens per sequence."""
    links: tuple[str, ...] = ("gloo", "10gbe", "1gbe", "1gbe*4")
    """Where to compare: gloo, as fast as this machine goes, or emulated links; 1gbe*4 is slowed 4
    times."""
    rounds: int = 15
    """Steps of each contender per link."""
    json: str = ""
    """Also write the rows to this file."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        for name in ("ranks", "batch_size", "seq_len", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be >= 1")
        if not self.links:
            raise ValueError("--links needs at least one value")
        for name in self.links:
            if name != "gloo":
                link.parse(name)
        longest = PRESETS[self.preset].max_seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"--seq-len {self.seq_len} is longer than {self.preset} sees; use up to {longest}"
            )
        if self.json and not Path(self.json).parent.is_dir():
            raise ValueError(f"--json {self.json}: there is no folder {Path(self.json).parent}")


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield all names `rounds` times, beginning with another one in every round."""
    stride = max(1, len(names) // rounds)
    for turn in range(rounds):
        shift = turn * stride % len(names)
        yield from [*names[shift:], *names[:shift]]


@dataclass
class Measured:
    """What every step of a contender came to."""

    seconds: list[float] = field(default_factory=list)  # of the slowest rank
    processor: list[float] = field(default_factory=list)  # seconds of the busiest rank
    num_bytes: list[int] = field(default_factory=list)  # sent by whoever sends most


def race(
    steps: Mapping[str, Callable[[], Any]], axis: Axis, link_name: str, rounds: int
) -> dict[str, Measured]:
    """Let `steps`, by the names of the contenders, take turns; called on every rank."""
    sent: list[int] = []

    def note(work: Any) -> None:  # figures only: its tensors are to be freed, and used again
        sent.append(work.num_bytes)

    for step in steps.values():
        for _ in range(2):  # the first step allocates, and learns who sends what
            step()
    if link_name != "gloo":
        link.use(link.parse(link_name))
        link.check_calls(False)  # time is the topic
    link.observers.append(note)
    turns: list[tuple[str, float, float, int]] = []
    gc.collect()
    gc.disable()
    for name in in_turns(list(steps), rounds):
        barrier(axis)
        sent.clear()
        start, busy = time.perf_counter(), time.process_time()
        steps[name]()
        seconds, processor = time.perf_counter() - start, time.process_time() - busy
        barrier(axis)  # what is on its way arrives before anything else takes time
        turns.append((name, seconds, processor, sum(sent)))
        gc.collect(0)
    gc.enable()
    link.observers.remove(note)
    link.use("none")
    link.check_calls(True)
    measured = {name: Measured() for name in steps}
    for ranks in zip(*all_gather_object(turns, axis), strict=True):
        (name, *_), seconds, processor, num_bytes = zip(*ranks, strict=True)
        measured[name].seconds.append(max(seconds))
        measured[name].processor.append(max(processor))
        measured[name].num_bytes.append(max(num_bytes))
    return measured


# ---------------------------------------------------------------------- rows
def row(
    config: StepConfig,
    bench: str,
    link_name: str,
    ours: str,
    rivals: Sequence[str],
    measured: Mapping[str, Measured],
) -> dict[str, Any]:
    """Compare `ours` with the fastest of `rivals`; ratios to all of them stand beside it."""

    def milliseconds(name: str) -> float:
        return statistics.median(measured[name].seconds) * 1e3

    def megabytes(name: str) -> float | None:
        return None if link_name == "gloo" else statistics.median(measured[name].num_bytes) / 1e6

    def ratios(rival: str, what: str = "seconds") -> tuple[float, float, float]:
        pairs = zip(getattr(measured[ours], what), getattr(measured[rival], what), strict=True)
        return quartiles([mine / theirs for mine, theirs in pairs])

    fastest = min(rivals, key=milliseconds)
    low, ratio, high = ratios(fastest)
    return {
        "bench": bench,
        "link": link.parse(link_name).label if link_name != "gloo" else "gloo, this machine",
        "ranks": config.ranks,
        "preset": config.preset,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "rounds": config.rounds,
        "ours": ours,
        "torch": fastest,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "processor_ratio": ratios(fastest, "processor")[1],
        "ours_ms": milliseconds(ours),
        "torch_ms": milliseconds(fastest),
        "ours_megabytes": megabytes(ours),
        "torch_megabytes": megabytes(fastest),
        "rivals": {rival: ratios(rival)[1] for rival in rivals},
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def hidden_share(step: float, compute: float, communication: float) -> float:
    """Return the part of the communication that does not show in the time of a step.

    Judged from outside, alike for every contender: a step longer than computing alone by as much
    as the link is busy hides nothing. All in seconds; nan where nobody knows how long that is.
    """
    if not communication:
        return math.nan
    return min(max(1 - (step - compute) / communication, 0.0), 1.0)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as text; ratios are ours over PyTorch's, below 1 where ours is faster."""
    head = ("link", "ours", "step", "PyTorch's fastest of its kind", "step", "ratio [quartiles]")
    lines = [(*head, "processor time", "MB sent: ours", "torch")]
    for row in rows:
        lines.append(
            (
                row["link"],
                row["ours"],
                f"{row['ours_ms']:.0f} ms",
                row["torch"],
                f"{row['torch_ms']:.0f} ms",
                f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]",
                f"{row['processor_ratio']:.3f}",
                *("-" if row[mb] is None else f"{row[mb]:.2f}" for mb in _MEGABYTES),
            )
        )
    return aligned(lines)


_MEGABYTES = ("ours_megabytes", "torch_megabytes")


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, in columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def percent(share: float) -> str:
    """Return 0.5 as "50%", and what nobody knows as "-"."""
    return "-" if math.isnan(share) else f"{share:.0%}"


def save(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write the rows as JSON, a line for each; to nowhere, if `path` is empty."""
    if path:
        lines = ",\n".join(json.dumps(row) for row in rows)
        Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
