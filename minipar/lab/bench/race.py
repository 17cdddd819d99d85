"""One race for all benches: contenders take turns, rows compare them, a table shows the rows.

Machines drift, so contenders that do the same work take turns step by step, in changing order. What
counts is the ratio within a round of turns: ours over theirs, as the median of all rounds with its
quartiles. A step takes as long as that of its slowest rank. All compute on the CPU: GPUs are
hidden from them. Beside it stands the ratio of processor time, of the busiest rank and all its
threads: it hardly notices who else uses the machine. Bytes and seconds on the wire are those of the
emulated link, which sees what every library sends, and belong to the step that issued them; bare
gloo counts neither.
"""

import gc
import json
import math
import os
import statistics
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis
from minipar.emulate import link
from minipar.model.llama import PRESETS, LlamaConfig, loss_of
from minipar.ranks.launch import Ranks
from minipar.text import aligned
from minipar.train.config import check_numbers
from minipar.train.corpus import Corpus, load_corpus
from minipar.train.data import Batches, Sequences
from minipar.train.optim import warmup_cosine
from minipar.train.tokenizer import ByteTokenizer

ADAMW: dict[str, Any] = dict(lr=1e-4, fused=True)
"""The optimizer of all contenders that are timed."""


# ---------------------------------------------------------------------- what a bench can be told
@dataclass(frozen=True)
class BenchConfig:
    """What every bench can be told. `check` goes by the names of the fields."""

    ranks: int = 2
    """Number of ranks."""
    json: str = ""
    """Also write the rows to this file."""

    least = {}  # by the name of a field: its smallest number, where that is not 1

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        check_numbers(self, dict.fromkeys(vars(self), 1) | self.least)
        for name, value in vars(self).items():
            flag = f"--{name.replace('_', '-')}"
            if value == ():
                raise ValueError(f"{flag} needs at least one value")
            if name in ("json", "out") and value and not Path(value).parent.is_dir():
                raise ValueError(f"{flag} {value}: there is no folder {Path(value).parent}")
            if name == "link":
                link.parse(value)
            if name == "links":
                for one in value:
                    label(one)


@dataclass(frozen=True)
class ModelConfig(BenchConfig):
    """What a bench that trains can be told besides."""

    preset: str = "small"
    """The model."""
    batch_size: int = 2
    """Sequences per rank and step."""
    seq_len: int = 128
    """Tokens per sequence."""

    def check(self) -> None:
        super().check()
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        longest = PRESETS[self.preset].max_seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"--seq-len {self.seq_len} is longer than {self.preset} sees; use up to {longest}"
            )

    def tokens(self, shape: LlamaConfig, seed: int = 0) -> list[Tensor]:
        """Return random inputs and targets [B, T]; ranks that pass the same seed have the same."""
        stream = torch.Generator().manual_seed(seed)
        size = (self.batch_size, self.seq_len + 1)
        tokens = torch.randint(shape.vocab_size, size, generator=stream)
        return [tokens[:, :-1], tokens[:, 1:].contiguous()]

    def text(self, part: str, axis: Axis, seed: int) -> Batches:
        """Return this rank's batches of real text, of the "train" or the "validation" part."""
        sequences = Sequences(getattr(_corpus(), part), self.seq_len)
        return Batches(sequences, self.batch_size * axis.size, axis.rank, axis.size, seed=seed)


@cache
def _corpus() -> Corpus:
    return load_corpus("stdlib", ByteTokenizer())


@dataclass(frozen=True)
class StepConfig(ModelConfig):
    """What every comparison of training steps can be told."""

    links: tuple[str, ...] = ("gloo", "10gbe", "1gbe")
    """Where to compare: gloo, as fast as this machine goes, or emulated links; 1gbe*4 is slowed 4
    times."""
    rounds: int = 15
    """Steps of each contender per link."""


def label(link_name: str) -> str:
    """Return what a table calls a link; raise `ValueError` if there is none of that name."""
    return "gloo, this machine" if link_name == "gloo" else link.parse(link_name).label


@dataclass
class Attached:
    """A model under some method: what is called, its optimizer, and what follows backward."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = lambda: None
    shares: int = 1  # by how many the loss is to be divided, where gradients are summed


def training(attached: Attached, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """A training step on these tokens; it returns their loss, in nats per token."""

    def step() -> Tensor:
        attached.optimizer.zero_grad(set_to_none=True)
        outputs = attached.forward(inputs)
        loss = loss_of(attached.forward)(outputs, targets) / targets.numel()
        (loss / attached.shares).backward()
        attached.finish()
        attached.optimizer.step()
        return loss.detach()

    return step


def anneal(
    optimizer: torch.optim.Optimizer, step: int, steps: int, *, peak: float, warmup: int
) -> None:
    """Set the learning rate of a step: a warm-up, then a cosine; behind the last step it stays."""
    last = min(step, steps - 1)
    lr = warmup_cosine(last, peak=peak, warmup_steps=warmup, total_steps=steps)
    for group in optimizer.param_groups:
        group["lr"] = lr


# ---------------------------------------------------------------------- the race
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
    num_bytes: list[int] = field(default_factory=list)  # sent by the rank that sends most
    communication: list[float] = field(default_factory=list)  # seconds, mean over the ranks


class Sent(NamedTuple):
    """What went over the link in one call: moments in seconds of `time.monotonic`."""

    issued: float
    start: float
    end: float
    num_bytes: int


@contextmanager
def pool(num_ranks: int, link_name: str, **options: Any) -> Iterator[Ranks]:
    """Open ranks that compute on the CPU, for gloo or for an emulated link; `options` of `Ranks`.

    Their GPUs are hidden, also from libraries: rows of one table are to be of one device, and
    neither gloo nor the kernels that take part here are meant for tensors of a GPU.
    """
    backend = "gloo" if link_name == "gloo" else "link"
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        Ranks(num_ranks, backend=backend, sink=None, **options) as ranks,
    ):
        yield ranks


@contextmanager
def emulated(link_name: str) -> Iterator[None]:
    """Have this rank's messages take as long as on that link, "gloo" for no longer than here."""
    if link_name != "gloo":
        link.use(link.parse(link_name))
    link.check_calls(False)  # time is the topic
    yield
    link.use("none")
    link.check_calls(True)


def on_ranks(measure: Callable[..., Any], config: BenchConfig, link_name: str, *args: Any) -> Any:
    """Return what `measure(config, link_name, *args)` tells on the first of ranks on that link."""
    with pool(config.ranks, link_name) as ranks:
        return ranks.run(measure, config, link_name, *args)[0]


def race(
    steps: Mapping[str, Callable[[], Any]],
    axis: Axis,
    link_name: str,
    rounds: int,
    lead: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Measured]:
    """Let `steps`, by the names of the contenders, take turns; called on every rank.

    With a `lead`, each turn begins with that contender's step from it, which does not count.
    """
    sent: list[Sent] = []

    def note(work: Any) -> None:  # figures only: its tensors are to be freed, and used again
        sent.append(Sent(work.t_issue, *work.times, work.num_bytes))

    turns: list[tuple[str, float, float, float]] = []
    with emulated(link_name):
        for step in (lead or steps).values():
            for _ in range(3):  # the first allocate, and learn who sends what and what it costs
                step()
        link.observers.append(note)
        gc.collect()
        gc.disable()
        for name in in_turns(list(steps), rounds):
            barrier(axis)
            if lead:
                lead[name]()
            start, busy = time.monotonic(), time.process_time()
            steps[name]()
            turns.append((name, start, time.monotonic(), time.process_time() - busy))
            barrier(axis)  # what is on its way arrives before anything else takes time
            gc.collect(0)
    gc.enable()
    link.observers.remove(note)
    mine = [(*_sums(sent, start, end), processor) for _, start, end, processor in turns]
    measured = {name: Measured() for name in steps}
    for (name, *_), *ranks in zip(turns, *all_gather_object(mine, axis), strict=True):
        seconds, communication, num_bytes, processor = zip(*ranks, strict=True)
        measured[name].seconds.append(max(seconds))
        measured[name].processor.append(max(processor))
        measured[name].num_bytes.append(max(num_bytes))
        measured[name].communication.append(statistics.mean(communication))
    return measured


def _sums(sent: Sequence[Sent], start: float, end: float) -> tuple[float, float, int]:
    """Return seconds, seconds on the wire and bytes of a step of this rank."""
    own = [one for one in sent if start <= one.issued < end]
    return end - start, sum(one.end - one.start for one in own), sum(one.num_bytes for one in own)


# ---------------------------------------------------------------------- rows
ALONE = "alone"
"""A contender that does not communicate: it tells how long computing takes."""


def row(
    config: StepConfig,
    bench: str,
    link_name: str,
    ours: str,
    rivals: Sequence[str],
    measured: Mapping[str, Measured],
    memory: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Compare `ours` with the fastest of `rivals`, of which the first is PyTorch's as it comes.

    Hidden communication is told where `ALONE` took part; `memory` is in bytes.
    """

    def seconds(name: str) -> float:
        return statistics.median(measured[name].seconds)

    def of(who: str, name: str) -> dict[str, Any]:
        one, wired = measured[name], link_name != "gloo"
        told: dict[str, Any] = {"ms": seconds(name) * 1e3}
        told["megabytes"] = statistics.median(one.num_bytes) / 1e6 if wired else None
        if ALONE in measured:
            busy = statistics.median(one.communication) if wired else 0.0
            told["communication_ms"] = busy * 1e3 if wired else None
            told["hidden"] = hidden_share(seconds(name), seconds(ALONE), busy)
        if memory:
            told["peak_mb"] = memory[name] / 1e6
        return {f"{who}_{key}": value for key, value in told.items()}

    fastest = min(rivals, key=seconds)
    mine, theirs = measured[ours], measured[fastest]
    return {
        "bench": bench,
        "link": label(link_name),
        "ranks": config.ranks,
        "preset": config.preset,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "rounds": config.rounds,
        "ours": ours,
        "torch": fastest,
        **ratios(mine.seconds, theirs.seconds),
        "processor_ratio": ratios(mine.processor, theirs.processor)["ratio"],
        **of("ours", ours),
        **of("torch", fastest),
        **({"compute_ms": seconds(ALONE) * 1e3} if ALONE in measured else {}),
        **({"memory_ratio": memory[ours] / memory[fastest]} if memory else {}),
        "ratio_as_it_comes": ratios(mine.seconds, measured[rivals[0]].seconds)["ratio"],
        "rivals": {name: ratios(mine.seconds, measured[name].seconds)["ratio"] for name in rivals},
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return ours over theirs, round by round: the median of that, and its quartiles."""
    low, ratio, high = quartiles([mine / their for mine, their in zip(ours, theirs, strict=True)])
    return {"ratio": ratio, "ratio_low": low, "ratio_high": high}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def hidden_share(step: float, compute: float, communication: float) -> float:
    """Return the part of the communication that does not show in the time of a step.

    Judged from outside, alike for every contender: a step longer than computing alone by as much
    as the link is busy hides nothing. All in seconds; nan where the link's time is not known.
    """
    if not communication:
        return math.nan
    return min(max(1 - (step - compute) / communication, 0.0), 1.0)


# ---------------------------------------------------------------------- tables and files
Columns = Sequence[tuple[str, str]]
"""Heads of columns, each with a template for what of a row stands below."""

RATIO = ("ratio [quartiles]", "{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]")
STEPS: Columns = (
    ("link", "{link}"),
    ("ours", "{ours}"),
    ("step", "{ours_ms:.0f} ms"),
    ("PyTorch's fastest of its kind", "{torch}"),
    ("step", "{torch_ms:.0f} ms"),
    RATIO,
)
SENT: Columns = (
    ("processor time", "{processor_ratio:.3f}"),
    ("MB sent: ours", "{ours_megabytes:.2f}"),
    ("torch", "{torch_megabytes:.2f}"),
)
HIDDEN: Columns = (
    ("hidden: ours", "{ours_hidden:.0%}"),
    ("torch", "{torch_hidden:.0%}"),
    ("memory ratio", "{memory_ratio:.3f}"),
)


def table(rows: Sequence[Mapping[str, Any]], columns: Columns = (*STEPS, *SENT)) -> str:
    """Return the rows as text, in columns; ratios are ours over theirs, below 1 where ours wins.

    What is not known, None or nan in the row, is shown as "-".
    """

    def cell(row: Mapping[str, Any], template: str) -> str:
        shown = [row[name] for _, name, _, _ in string.Formatter().parse(template) if name]
        unknown = any(value is None or value != value for value in shown)
        return "-" if unknown else template.format_map(row)

    lines = [[head for head, _ in columns]]
    lines += [[cell(row, template) for _, template in columns] for row in rows]
    return "\n".join(aligned(lines))


def announce(rows: Sequence[Mapping[str, Any]], what: str = "") -> None:
    """Print the ratios of rows of one link, as soon as they are known."""
    told = ", ".join(f"{row['ours']} {row['ratio']:.3f}" for row in rows)
    print(f"{rows[0]['link']}{what}: {told}", flush=True)


def save(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write the rows as JSON, a line for each; to nowhere, if `path` is empty."""
    if path:
        lines = ",\n".join(json.dumps(row) for row in rows)
        Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
