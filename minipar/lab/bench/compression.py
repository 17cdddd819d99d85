"""`minipar bench compression`: what every way to send less saves, and what it costs in accuracy.

Two measurements. *Accuracy*: each method trains the same Llama on the same batches, several times
from different weights, as fast as this machine goes; its loss is compared with that of fp32 from
the same weights. The ledger counts what each rank sends meanwhile. *Time*: on an emulated link all
methods take turns of a few steps, in changing order, as machines drift; what counts is the median
of the turns. A turn is as long as its slowest rank makes it.

How much is chance? "fp32 disturbed" trains from weights that differ by one part in a million: a gap
to fp32 as small as its own says nothing.

Limits. Times are those of ranks that share the cores of one machine: compressing takes time from
computing, which an accelerator would have to spare. Losses are those of a short run of a small
model: enough to tell what hurts from what does not, not to promise that a long run is unharmed.
"""

import gc
import math
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from minipar.comm import backends, link, timeline
from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.launch import Ranks
from minipar.comm.mesh import Mesh
from minipar.lab import draw
from minipar.lab.bench.compression_methods import CHANCE, METHODS, REFERENCE, TURN
from minipar.lab.bench.race import aligned, in_turns, quartiles, save
from minipar.lab.draw import compression as draw_compression
from minipar.model.llama import PRESETS, Llama
from minipar.parallel import local_sgd
from minipar.train.corpus import ByteTokenizer, Corpus, load_corpus
from minipar.train.data import Batches, Sequences
from minipar.train.optim import make_optimizer, warmup_cosine
from minipar.train.step import evaluate, train_step


@dataclass(frozen=True)
class CompressionConfig:
    """Compare every way to send less: bytes, exposed communication, step time, loss beside fp32."""

    ranks: int = 2
    """Number of ranks."""
    preset: str = "tiny"
    """The model."""
    batch_size: int = 4
    """Sequences per rank and step."""
    seq_len: int = 64
    """Tokens per sequence."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods; fp32 is always among them."""
    steps: int = 96
    """Training steps before losses are compared."""
    seeds: int = 2
    """Runs of each method, from other weights and with the batches in another order."""
    lr: float = 1e-3
    """Learning rate of AdamW at its peak. With 2e-3 chance grows: runs that differ by one part in a
    million at first end up as far apart as most methods are."""
    turns: int = 3
    """Turns of 8 steps of each method for its time."""
    link: str = "1gbe*4"
    """The link to emulate; 1gbe*4 is slowed 4 times, to sit beside cores that are slow, too."""
    json: str = ""
    """Also write the rows to this file."""
    out: str = ""
    """Draw accuracy against bytes into this file, .png or .svg."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        if self.ranks < 2:
            raise ValueError(f"--ranks {self.ranks}: it takes at least 2 to talk")
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        for name in ("batch_size", "seq_len", "steps", "seeds", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be >= 1")
        if not self.lr > 0:
            raise ValueError(f"--lr {self.lr} must be above 0")
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            known = ", ".join(f'"{name}"' for name in METHODS)
            raise ValueError(f"--methods {unknown}: use some of {known}")
        longest = PRESETS[self.preset].max_seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"--seq-len {self.seq_len} is longer than {self.preset} sees; use up to {longest}"
            )
        link.parse(self.link)
        for flag, path in (("json", self.json), ("out", self.out)):
            if path and not Path(path).parent.is_dir():
                raise ValueError(f"--{flag} {path}: there is no folder {Path(path).parent}")
        if self.out and Path(self.out).suffix not in (".png", ".svg"):
            raise ValueError(f"--out {self.out} must end with .png or .svg")

    @property
    def names(self) -> list[str]:
        """The methods to compare, what they are compared with first."""
        return list(dict.fromkeys([REFERENCE, *self.methods]))


def run(config: CompressionConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row per method."""
    config.check()
    learned: dict[str, list[Learned]] = {}
    with Ranks(config.ranks, backend="link", sink=None) as ranks:
        for name in config.names:
            learned[name] = [ranks.run(learn, config, name, s)[0] for s in range(config.seeds)]
            loss = statistics.mean(one.validation for one in learned[name])
            print(f"{name}: loss {loss:.3f} after {config.steps} steps", flush=True)
        timed = ranks.run(measure, config)[0]
    rows = [_row(config, name, learned, timed) for name in config.names]
    print("\n" + table(rows) + "\n\n" + fine_print(rows))
    save(rows, config.json)
    if config.out:
        draw.save(draw_compression.accuracy(rows), config.out)
    return rows


# ---------------------------------------------------------------------- on the ranks
class Contender:
    """A model that takes training steps by one method."""

    def __init__(self, config: CompressionConfig, mesh: Mesh, name: str, seed: int, steps: int):
        self.config, self.mesh, self.steps, self.step_number = config, mesh, steps, 0
        self.device = backends.device_of(mesh.rank)
        self.model = Llama(PRESETS[config.preset], seed=seed).to(self.device)
        self.optimizer = make_optimizer(self.model, lr=config.lr, weight_decay=0.1)
        self.strategy = METHODS[name].attach(self.model, mesh.dp, self.optimizer, steps)
        self.batches = self._batches("train", seed).forever()

    def step(self) -> float:
        """Take a training step; return its loss in nats per token, over all ranks."""
        lr = warmup_cosine(
            min(self.step_number, self.steps - 1),
            peak=self.config.lr,
            warmup_steps=min(10, self.steps),
            total_steps=self.steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch, axis = self._here(next(self.batches)), self.mesh.dp
        result = train_step(self.model, [self.strategy], self.optimizer, batch, axis, max_norm=1.0)
        self.step_number += 1
        return result.loss.item()

    def validate(self) -> float:
        """End the training; return the loss of the model that ranks agree on, on other text."""
        if isinstance(self.strategy, local_sgd.LocalSGD | local_sgd.DiLoCo):
            self.strategy.finish()  # takes in what is still under way
        model = Llama(PRESETS[self.config.preset]).to(self.device)
        model.load_state_dict(self.strategy.full_state_dict())
        batches = zip(range(32), self._batches("validation", seed=0), strict=False)
        return evaluate(model, (self._here(batch) for _, batch in batches), self.mesh.dp)

    def _batches(self, part: str, seed: int) -> Batches:
        sequences = Sequences(getattr(_corpus(), part), self.config.seq_len)
        axis = self.mesh.dp
        return Batches(
            sequences, self.config.batch_size * axis.size, axis.rank, axis.size, seed=seed
        )

    def _here(self, batch: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [(x.to(self.device), y.to(self.device)) for x, y in batch]


@cache
def _corpus() -> Corpus:
    return load_corpus("stdlib", ByteTokenizer())


@dataclass
class Learned:
    """What one run of one method comes to."""

    losses: list[float]  # of every step, nats per token
    validation: float
    num_bytes: float  # per step, sent by a rank


def learn(config: CompressionConfig, name: str, seed: int) -> Learned:
    """Train by one method, as fast as this machine goes; called on every rank."""
    mesh = Mesh(dp=config.ranks)
    link.use("none")
    contender = Contender(config, mesh, name, seed, config.steps)
    with timeline.record() as recorded:
        losses = [contender.step() for _ in range(config.steps)]
        if hasattr(contender.strategy, "state_dict"):
            contender.strategy.state_dict()  # waits for what is under way: it counts, too
    num_bytes = sum(recorded.bytes_by_axis().values()) / config.steps
    return Learned(losses, contender.validate(), num_bytes)


@dataclass
class Timed:
    """Means of every turn of one method, in seconds per step."""

    step: list[float] = field(default_factory=list)  # of the slowest rank
    communication: list[float] = field(default_factory=list)  # mean over the ranks
    exposed: list[float] = field(default_factory=list)


def measure(config: CompressionConfig) -> dict[str, Timed]:
    """Let all methods take turns on the emulated link; called on every rank."""
    mesh = Mesh(dp=config.ranks)
    link.use(link.parse(config.link))
    link.check_calls(False)  # time is the topic
    steps = 3 + (1 + TURN) * config.turns
    field = {name: Contender(config, mesh, name, 0, steps) for name in config.names}
    for contender in field.values():
        for _ in range(3):  # the first one is a rehearsal for buckets
            contender.step()
    gc.collect()
    gc.disable()
    mine: dict[str, list[tuple[float, float, float]]] = {name: [] for name in field}
    for name in in_turns(list(field), config.turns):
        barrier(mesh.dp)
        field[name].step()  # leaves on the way what the last step of the turn will leave there
        start = time.perf_counter()
        with timeline.record(field[name].model) as recorded:
            for _ in range(TURN):
                field[name].step()
        seconds = time.perf_counter() - start
        overlaps = recorded.overlap()
        total, exposed = sum(o.total for o in overlaps), sum(o.exposed for o in overlaps)
        mine[name].append((seconds / TURN, total / TURN, exposed / TURN))
    gc.enable()
    link.use("none")
    link.check_calls(True)
    timed = {name: Timed() for name in field}
    for name, every in timed.items():
        for turn in zip(*(rank[name] for rank in all_gather_object(mine, mesh.dp)), strict=True):
            seconds, total, exposed = zip(*turn, strict=True)
            every.step.append(max(seconds))
            every.communication.append(statistics.mean(total))
            every.exposed.append(statistics.mean(exposed))
    return timed


# ---------------------------------------------------------------------- the table
def _row(
    config: CompressionConfig, name: str, learned: dict[str, list[Learned]], timed: dict[str, Timed]
) -> dict[str, Any]:
    runs, exact, times = learned[name], learned[REFERENCE], timed[name]
    gaps = [run.validation - ref.validation for run, ref in zip(runs, exact, strict=True)]
    ratios = [a / b for a, b in zip(times.step, timed[REFERENCE].step, strict=True)]
    low, ratio, high = quartiles(ratios)
    num_bytes = statistics.mean(run.num_bytes for run in runs)
    return {
        "bench": "compression",
        "link": link.parse(config.link).label,
        "ranks": config.ranks,
        "preset": config.preset,
        "tokens_per_step": config.ranks * config.batch_size * config.seq_len,
        "steps": config.steps,
        "seeds": config.seeds,
        "method": name,
        "family": METHODS[name].family,
        "num_bytes": num_bytes,
        "share": num_bytes / statistics.mean(run.num_bytes for run in exact),
        "communication_ms": statistics.median(times.communication) * 1e3,
        "exposed_ms": statistics.median(times.exposed) * 1e3,
        "step_ms": statistics.median(times.step) * 1e3,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "loss": statistics.mean(run.validation for run in runs),
        "gap": statistics.mean(gaps),
        "gap_low": min(gaps),
        "gap_high": max(gaps),
        "losses": [
            round(statistics.mean(at), 4) for at in zip(*(r.losses for r in runs), strict=True)
        ],
    }


def chance(rows: Sequence[dict[str, Any]]) -> float:
    """Return how large a gap, in nats per token, may be by chance; nan if that was not measured."""
    gaps = [max(abs(r["gap_low"]), abs(r["gap_high"])) for r in rows if r["method"] == CHANCE]
    return gaps[0] if gaps else math.nan


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; ratios are a method's step time over that of fp32."""
    head = ("method", "bytes/step", "of fp32", "on the link", "exposed", "step")
    head += ("ratio [quartiles]", f"loss after {rows[0]['steps']}", "gap to fp32 [min, max]")
    lines = [head]
    for row in rows:
        gap = f"{row['gap']:+.3f} [{row['gap_low']:+.3f}, {row['gap_high']:+.3f}]"
        lines.append(
            (
                row["method"],
                f"{row['num_bytes']:,.0f}",
                f"{row['share']:.1%}",
                f"{row['communication_ms']:.0f} ms",
                f"{row['exposed_ms']:.0f} ms",
                f"{row['step_ms']:.0f} ms",
                f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]",
                f"{row['loss']:.3f}",
                "-" if row["method"] == REFERENCE else gap,
            )
        )
    return aligned(lines)


def fine_print(rows: Sequence[dict[str, Any]]) -> str:
    """Return what of the table is measured, what emulated, and how much of it may be chance."""
    first = rows[0]
    said = [
        "Measured: bytes that a rank sends, from the ledger; losses in nats per token on text not "
        f"trained on, of runs from {first['seeds']} initial weights, each beside fp32 from the "
        f"same; times of {first['ranks']} ranks that share one machine, where compressing competes "
        f"with computing for the cores. Emulated: the link, {first['link']}.",
        f"A small model after {first['steps']} steps: what hurts here hurts; what does not might "
        "in a longer run.",
    ]
    if not math.isnan(chance(rows)):
        said.insert(
            1,
            f'"{CHANCE}" began from weights off by one part in a million: a gap as small as its '
            f"own, up to {chance(rows):.4f}, is chance.",
        )
    return "\n".join(textwrap.fill(sentence, 100) for sentence in said)
