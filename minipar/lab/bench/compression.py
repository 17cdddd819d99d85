"""`minipar bench compression`: how much every way to send less saves, and costs in accuracy.

Two measurements. *Accuracy*: each method trains the same Llama on the same batches, several times
from different weights, as fast as this machine goes; its loss is compared with the loss of fp32
from the same weights. The ledger counts what each rank sends meanwhile. *Time*: on an emulated link
all methods take turns of a few steps, in changing order; the median of the turns counts. A turn is
as long as its slowest rank makes it.

"fp32 disturbed" trains from weights that differ by one part in a million: a gap to fp32 as small as
its own is chance. Ranks share the cores of one machine: compressing takes time from computing,
which an accelerator would have to spare. Losses are of a short run of a small model.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis, Mesh
from minipar.emulate import link
from minipar.lab.bench import race
from minipar.model.llama import PRESETS, Llama
from minipar.observe import timeline
from minipar.observe.timeline import Timeline
from minipar.parallel import ddp, local_sgd
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.compression.codecs import (
    Compressor,
    Fp8,
    Half,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from minipar.parallel.compression.feedback import Compressed
from minipar.train.corpus import load_corpus
from minipar.train.data import Batches, Sequences
from minipar.train.optim import make_optimizer, warmup_cosine
from minipar.train.step import evaluate, train_step
from minipar.train.tokenizer import ByteTokenizer

RANKS, SHAPE = 2, PRESETS["tiny"]
BATCH_SIZE, SEQ_LEN = 4, 64  # sequences per rank and step, tokens per sequence
PEAK_LR = 1e-3
"""The learning rate of AdamW. With 2e-3, runs that differ by one part in a million at the start end
as far apart as methods."""
TURN = 8  # steps; methods that do not talk in every step do so every 8, so once in a turn

# ---------------------------------------------------------------------- the methods
CODECS: dict[str, tuple[str, Callable[[], Compressor]]] = {
    "fp16": ("rounding", lambda: Half(torch.float16)),
    "bf16": ("rounding", lambda: Half(torch.bfloat16)),
    "int8": ("rounding", Int8),
    "int8 stochastic": ("rounding", lambda: Int8(stochastic=True)),
    "fp8 e4m3": ("rounding", lambda: Fp8(kind="e4m3")),
    "fp8 e5m2": ("rounding", lambda: Fp8(kind="e5m2")),
    "sign": ("rounding", Sign),
    "top-k 10 %": ("fewer numbers", lambda: TopK(0.1)),
    "top-k 1 %": ("fewer numbers", lambda: TopK(0.01)),
    "random-k 10 %": ("fewer numbers", lambda: RandomK(0.1)),
    "random-k 1 %": ("fewer numbers", lambda: RandomK(0.01)),
    "PowerSGD rank 4": ("low rank", lambda: PowerSGD(rank=4)),
    "PowerSGD rank 1": ("low rank", lambda: PowerSGD(rank=1)),
}
"""Compressors of buckets, each with what it spares."""
WITHOUT_FEEDBACK = ("int8", "fp8 e5m2", "sign", "top-k 1 %", "random-k 1 %", "PowerSGD rank 4")
"""Compressors that also train without error feedback, which mends their bias."""
SELDOM = {
    "delayed gradients": {},
    "local SGD": dict(every=TURN),
    "post-local SGD": dict(method="local sgd", every=TURN),  # the first half of the steps together
    "DiLoCo": dict(every=TURN),
    "DiLoCo delayed": dict(every=TURN),
    "DiLoCo streaming": dict(every=TURN),
}
"""Options of `local_sgd.apply`; the method is the name in small letters."""
REFERENCE, CHANCE = "fp32", "fp32 disturbed"
METHODS: dict[str, str] = {
    REFERENCE: "exact",
    CHANCE: "exact",
    **{
        name + ending: family
        for name, (family, _) in CODECS.items()
        for ending in ("", ", no feedback")[: 1 + (name in WITHOUT_FEEDBACK)]
    },
    **dict.fromkeys(SELDOM, "less often, or late"),
}
"""Every method by the name that a table shows, with its family: what it spares."""


def attach(
    name: str, model: nn.Module, axis: Axis, optimizer: torch.optim.Optimizer, steps: int
) -> Strategy:
    """Make `model` train along `axis` by the method of that name, for so many steps."""
    if name in SELDOM:
        options = {"method": name.lower(), **SELDOM[name]}
        if name == "post-local SGD":
            options["synchronous_steps"] = steps // 2
        return local_sgd.apply(model, axis, optimizer, average=False, **options)
    if name == CHANCE:
        stream = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.data *= 1 + 1e-6 * torch.randn(p.shape, generator=stream).to(p)
    if METHODS[name] == "exact":
        return ddp.apply(model, axis, average=False)
    make = CODECS[name.removesuffix(", no feedback")][1]
    feedback = False if name.endswith(", no feedback") else None  # None: where there is a bias
    reduce = Compressed(make(), error_feedback=feedback)
    return ddp.apply(model, axis, average=False, reduce=reduce)


# ---------------------------------------------------------------------- the command
@dataclass(frozen=True)
class CompressionConfig:
    """Compare every way to send less: bytes, exposed communication, step time, loss beside fp32."""

    steps: int = 96
    """Training steps before losses are compared."""
    seeds: int = 2
    """Runs of each method, from other weights and with the batches in another order."""
    turns: int = 3
    """Turns of 8 steps of each method for its time."""
    link: str = "1gbe*4"
    """The link to emulate; 1gbe*4 is slowed 4 times, to sit beside cores that are slow, too."""
    json: str = ""
    """Also write the rows to this file; notebook 04a draws them."""


def run(config: CompressionConfig, names: Sequence[str] = tuple(METHODS)) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row per method; fp32 is the first."""
    link.parse(config.link)  # an error now, and not after hours
    learned: dict[str, list[Learned]] = {}
    with race.pool(RANKS, config.link) as ranks:
        for name in names:
            learned[name] = [ranks.run(learn, config, name, s)[0] for s in range(config.seeds)]
            loss = statistics.mean(one.validation for one in learned[name])
            print(f"{name}: loss {loss:.3f} after {config.steps} steps", flush=True)
        timed = ranks.run(measure, config, names)[0]
    rows = [row(config, name, learned, timed) for name in names]
    print("\n" + table(rows) + "\n\n" + fine_print(rows))
    race.save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- on the ranks
class Trainer:
    """A model that takes training steps by one method, on real text."""

    def __init__(self, mesh: Mesh, name: str, seed: int, steps: int) -> None:
        self.axis, self.steps, self.done = mesh.dp, steps, 0
        self.model = Llama(SHAPE, seed=seed)
        self.optimizer = make_optimizer(self.model, lr=PEAK_LR, weight_decay=0.1)
        self.strategy = attach(name, self.model, mesh.dp, self.optimizer, steps)
        self.batches = batches_of("train", mesh.dp, seed).forever()

    def step(self) -> float:
        """Take a training step; return its loss in nats per token, over all ranks."""
        at, warmup = min(self.done, self.steps - 1), min(10, self.steps)
        lr = warmup_cosine(at, peak=PEAK_LR, warmup_steps=warmup, total_steps=self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parts = (self.model, [self.strategy], self.optimizer, next(self.batches), self.axis)
        self.done += 1
        return train_step(*parts, max_norm=1.0).loss.item()

    def validate(self) -> float:
        """End the training; return the loss of the model that ranks agree on, on other text."""
        if isinstance(self.strategy, local_sgd.LocalSGD | local_sgd.DiLoCo):
            self.strategy.finish()  # takes in what is still under way
        model = Llama(SHAPE)
        model.load_state_dict(self.strategy.full_state_dict())
        batches = batches_of("validation", self.axis, seed=0)
        return evaluate(model, islice(batches, 32), self.axis)


def batches_of(part: str, axis: Axis, seed: int) -> Batches:
    """Return this rank's batches, of the "train" or the "validation" part of the text."""
    sequences = Sequences(getattr(_corpus(), part), SEQ_LEN)
    return Batches(sequences, BATCH_SIZE * axis.size, axis.rank, axis.size, seed=seed)


@cache
def _corpus() -> Any:
    return load_corpus("stdlib", ByteTokenizer())


class Learned(NamedTuple):
    """The result of one run of one method."""

    losses: list[float]  # of every step, nats per token
    validation: float
    num_bytes: float  # per step, sent by a rank


def learn(config: CompressionConfig, name: str, seed: int) -> Learned:
    """Train by one method, as fast as this machine goes; called on every rank."""
    trainer = Trainer(Mesh(dp=RANKS), name, seed, config.steps)
    with timeline.record() as recorded:
        losses = [trainer.step() for _ in range(config.steps)]
        if hasattr(trainer.strategy, "state_dict"):
            trainer.strategy.state_dict()  # waits for what is under way: it counts, too
    num_bytes = sum(recorded.bytes_by_axis().values()) / config.steps
    return Learned(losses, trainer.validate(), num_bytes)


class Timed(NamedTuple):
    """Means of every turn of one method, in seconds per step."""

    step: list[float]  # of the slowest rank
    exposed: list[float]  # mean over the ranks


def measure(config: CompressionConfig, names: Sequence[str]) -> dict[str, Timed]:
    """Run all methods in turns on the emulated link; called on every rank.

    A turn begins with a step that does not count: its messages may travel while the turn begins.
    """
    mesh, steps = Mesh(dp=RANKS), 3 + (1 + TURN) * config.turns
    trainers = {name: Trainer(mesh, name, 0, steps) for name in names}
    recorded: dict[str, list[Timeline]] = {name: [] for name in names}

    def turn(name: str) -> None:
        with timeline.record(trainers[name].model) as record:
            for _ in range(TURN):
                trainers[name].step()
        recorded[name].append(record)

    lead = {name: trainer.step for name, trainer in trainers.items()}
    turns = {name: partial(turn, name) for name in names}
    measured = race.race(turns, mesh.dp, config.link, config.turns, lead=lead)
    timed = {}
    for name, one in measured.items():
        waits = [sum(o.exposed for o in record.overlap()) / TURN for record in recorded[name]]
        exposed = np.mean(all_gather_object(waits, mesh.dp), axis=0).tolist()
        timed[name] = Timed([seconds / TURN for seconds in one.seconds], exposed)
    return timed


# ---------------------------------------------------------------------- the table
def row(
    config: CompressionConfig, name: str, learned: dict[str, list[Learned]], timed: dict[str, Timed]
) -> dict[str, Any]:
    """Compare a method with fp32 from the same weights, in the same turns."""
    runs, exact, times = learned[name], learned[REFERENCE], timed[name]
    gaps = [run.validation - ref.validation for run, ref in zip(runs, exact, strict=True)]
    num_bytes = statistics.mean(run.num_bytes for run in runs)
    curve = [statistics.mean(at) for at in zip(*(run.losses for run in runs), strict=True)]
    return {
        "bench": "compression",
        "link": link.parse(config.link).label,
        "ranks": RANKS,
        "preset": "tiny",
        "tokens_per_step": RANKS * BATCH_SIZE * SEQ_LEN,
        "steps": config.steps,
        "seeds": config.seeds,
        "method": name,
        "family": METHODS[name],
        "num_bytes": num_bytes,
        "share": num_bytes / statistics.mean(run.num_bytes for run in exact),
        "exposed_ms": statistics.median(times.exposed) * 1e3,
        "step_ms": statistics.median(times.step) * 1e3,
        **race.ratios(times.step, timed[REFERENCE].step),
        "loss": statistics.mean(run.validation for run in runs),
        "gap": statistics.mean(gaps),
        "gap_low": min(gaps),
        "gap_high": max(gaps),
        "losses": [round(loss, 4) for loss in curve],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; ratios are a method's step time over that of fp32."""
    columns = {
        "method": "{method}",
        "bytes/step": "{num_bytes:,.0f}",
        "of fp32": "{share:.1%}",
        "exposed": "{exposed_ms:.0f} ms",
        "step": "{step_ms:.0f} ms",
        "ratio [quartiles]": "{ratio:.2f} [{ratio_low:.2f}, {ratio_high:.2f}]",
        f"loss after {rows[0]['steps']}": "{loss:.3f}",
        "gap to fp32 [min, max]": "{gap:+.3f} [{gap_low:+.3f}, {gap_high:+.3f}]",
    }
    exact = {"gap": None}  # nothing to compare with itself
    return race.table([row | exact if row["method"] == REFERENCE else row for row in rows], columns)


def fine_print(rows: Sequence[dict[str, Any]]) -> str:
    """Return which numbers are measured, which are emulated, and how large chance is."""
    said = [
        "Measured: bytes that a rank sends; losses in nats per token on text not trained on.",
        f"Emulated: the link, {rows[0]['link']}. Ranks share one machine.",
    ]
    for row in (row for row in rows if row["method"] == CHANCE):
        chance = max(abs(row["gap_low"]), abs(row["gap_high"]))
        said.append(f"A gap as small as that of {CHANCE}, up to {chance:.4f}, is chance.")
    return "\n".join(said)
