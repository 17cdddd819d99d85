"""`minipar bench compression`: how much every way to send less saves, and costs in accuracy.

Each method trains the same Llama on the same batches over an emulated link, several times from
different weights. Its loss is compared with the loss of fp32 from the same weights. The ledger
counts what each rank sends. The time of a step is the mean over all steps, of the slowest rank.

"fp32 disturbed" trains from weights that differ by one part in a million: a gap to fp32 that is no
larger than the gap of this method is chance. Ranks share the cores of one machine, so compressing
slows computing down; an accelerator would have time to spare. Losses are of a short run of a small
model.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis, Mesh
from minipar.emulate import link
from minipar.lab.bench import race
from minipar.model.llama import PRESETS, Llama
from minipar.observe import timeline
from minipar.parallel import compression, ddp, local_sgd
from minipar.parallel.base.strategy import Strategy
from minipar.train.corpus import load_corpus
from minipar.train.data import Batches, Sequences
from minipar.train.optim import make_optimizer, warmup_cosine
from minipar.train.step import evaluate, train_step
from minipar.train.tokenizer import ByteTokenizer

RANKS, SHAPE = 2, PRESETS["tiny"]
BATCH_SIZE, SEQ_LEN = 4, 64  # sequences per rank and step, tokens per sequence
STEPS, SEEDS = 96, 2  # of a run; runs of each method, from other weights, in another order of text
LINK = "1gbe*4"  # slowed 4 times, to sit beside cores that are slow, too
PEAK_LR = 1e-3
"""The learning rate of AdamW. With 2e-3, runs that differ by one part in a million at the start end
as far apart as methods."""
EVERY = 8  # steps; methods that do not meet in every step meet so often

# ---------------------------------------------------------------------- the methods
Attach = Callable[[nn.Module, Axis, torch.optim.Optimizer], Strategy]
"""Make a model train along an axis by some method."""


def exact(model: nn.Module, axis: Axis, *_: Any) -> Strategy:
    """Send all gradients in fp32."""
    return ddp.apply(model, axis, average=False)


def disturbed(model: nn.Module, axis: Axis, *_: Any) -> Strategy:
    """Send all gradients in fp32, from weights that are off by one part in a million."""
    stream = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data *= 1 + 1e-6 * torch.randn(p.shape, generator=stream).to(p)
    return exact(model, axis)


def by(codec: Callable[[], compression.Compressor], feedback: bool = True) -> Attach:
    """Compress gradients; error feedback corrects the bias of a codec."""

    def attach(model: nn.Module, axis: Axis, *_: Any) -> Strategy:
        reduce = compression.Compressed(codec(), error_feedback=feedback)
        return ddp.apply(model, axis, average=False, reduce=reduce)

    return attach


def seldom(method: str) -> Attach:
    """Meet every `EVERY` steps, or late."""

    def attach(model: nn.Module, axis: Axis, optimizer: torch.optim.Optimizer) -> Strategy:
        options = {} if method == "delayed gradients" else {"every": EVERY}
        return local_sgd.apply(model, axis, optimizer, average=False, method=method, **options)

    return attach


REFERENCE = "fp32"
ROUNDING, FEWER, LOW, LESS = "rounding", "fewer numbers", "low rank", "less often, or late"
METHODS: dict[str, tuple[str, Attach]] = {
    REFERENCE: ("exact", exact),
    "fp32 disturbed": ("exact", disturbed),
    "int8": (ROUNDING, by(compression.Int8)),
    "int8, no feedback": (ROUNDING, by(compression.Int8, False)),
    "sign": (ROUNDING, by(compression.Sign)),
    "sign, no feedback": (ROUNDING, by(compression.Sign, False)),
    "top-k 10 %": (FEWER, by(lambda: compression.TopK(0.1))),
    "top-k 1 %": (FEWER, by(lambda: compression.TopK(0.01))),
    "top-k 1 %, no feedback": (FEWER, by(lambda: compression.TopK(0.01), False)),
    "PowerSGD rank 4": (LOW, by(lambda: compression.PowerSGD(rank=4))),
    "PowerSGD rank 4, no feedback": (LOW, by(lambda: compression.PowerSGD(rank=4), False)),
    "PowerSGD rank 1": (LOW, by(lambda: compression.PowerSGD(rank=1))),
    "delayed gradients": (LESS, seldom("delayed gradients")),
    "local SGD": (LESS, seldom("local sgd")),
    "DiLoCo": (LESS, seldom("diloco")),
    "DiLoCo delayed": (LESS, seldom("diloco delayed")),
}
"""Every method by its name in the table: its family, and how it is attached."""


# ---------------------------------------------------------------------- the command
@dataclass(frozen=True)
class CompressionConfig:
    """Compare every way to send less: bytes, exposed communication, step time, loss beside fp32."""

    json: str = ""
    """Also write the rows to this file; notebook 04a draws them."""


def run(config: CompressionConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row per method; fp32 is the first."""
    learned: dict[str, list[Learned]] = {name: [] for name in METHODS}
    with race.pool(RANKS, LINK) as ranks:
        for seed, name in product(range(SEEDS), METHODS):  # all by one seed, then by the next
            learned[name] += ranks.run(learn, name, seed)[:1]
            loss = learned[name][-1].validation
            print(f"{name}: loss {loss:.3f} after {STEPS} steps", flush=True)
    rows = [row(name, learned) for name in METHODS]
    print("\n" + race.table(rows, COLUMNS))
    race.save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- on the ranks
class Learned(NamedTuple):
    """The result of one run of one method."""

    losses: list[float]  # of every step, nats per token
    validation: float
    num_bytes: float  # per step, sent by a rank
    seconds: float  # per step, of the slowest rank
    exposed: float  # seconds per step, mean over the ranks


def learn(name: str, seed: int) -> Learned:
    """Train by one method on real text; called on every rank."""
    axis = Mesh(dp=RANKS).dp
    model = Llama(SHAPE, seed=seed)
    optimizer = make_optimizer(model, lr=PEAK_LR, weight_decay=0.1)
    strategy = METHODS[name][1](model, axis, optimizer)
    batches = batches_of("train", axis, seed).forever()
    losses, start = [], time.monotonic()
    with race.using(LINK), timeline.record(model) as recorded:
        for at in range(STEPS):
            lr = warmup_cosine(at, peak=PEAK_LR, warmup_steps=10, total_steps=STEPS)
            for group in optimizer.param_groups:
                group["lr"] = lr
            step = train_step(model, [strategy], optimizer, next(batches), axis, max_norm=1.0)
            losses.append(step.loss.item())
        if hasattr(strategy, "state_dict"):
            strategy.state_dict()  # waits for exchanges under way: they count, too
        seconds = (time.monotonic() - start) / STEPS
    exposed = sum(overlap.exposed for overlap in recorded.overlap()) / STEPS
    seconds, exposed = zip(*all_gather_object((seconds, exposed), axis), strict=True)
    num_bytes = sum(recorded.bytes_by_axis().values()) / STEPS
    times = max(seconds), statistics.mean(exposed)
    return Learned(losses, validate(strategy, axis), num_bytes, *times)


def validate(strategy: Strategy, axis: Axis) -> float:
    """End the training; return the loss of the model that ranks agree on, on other text."""
    if isinstance(strategy, local_sgd.LocalSGD):
        strategy.finish()  # takes in the exchanges under way
    model = Llama(SHAPE)
    model.load_state_dict(strategy.full_state_dict())
    return evaluate(model, islice(batches_of("validation", axis, seed=0), 32), axis)


def batches_of(part: str, axis: Axis, seed: int) -> Batches:
    """Return this rank's batches, of the "train" or the "validation" part of the text."""
    corpus = load_corpus("stdlib", ByteTokenizer())
    sequences = Sequences(getattr(corpus, part), SEQ_LEN)
    return Batches(sequences, BATCH_SIZE * axis.size, axis.rank, axis.size, seed=seed)


# ---------------------------------------------------------------------- the table
def row(name: str, learned: dict[str, list[Learned]]) -> dict[str, Any]:
    """Compare a method with fp32 from the same weights."""
    runs, exact = learned[name], learned[REFERENCE]
    gaps = [run.validation - ref.validation for run, ref in zip(runs, exact, strict=True)]
    num_bytes = statistics.mean(run.num_bytes for run in runs)
    curve = [statistics.mean(at) for at in zip(*(run.losses for run in runs), strict=True)]
    return {
        "link": link.parse(LINK).label,
        "ranks": RANKS,
        "preset": "tiny",
        "tokens_per_step": RANKS * BATCH_SIZE * SEQ_LEN,
        "steps": STEPS,
        "method": name,
        "family": METHODS[name][0],
        "num_bytes": num_bytes,
        "share": num_bytes / statistics.mean(run.num_bytes for run in exact),
        "exposed_ms": statistics.mean(run.exposed for run in runs) * 1e3,
        "step_ms": statistics.mean(run.seconds for run in runs) * 1e3,
        "loss": statistics.mean(run.validation for run in runs),
        "gap": statistics.mean(gaps),
        "gap_low": min(gaps),
        "gap_high": max(gaps),
        "losses": [round(loss, 4) for loss in curve],
    }


COLUMNS = {
    "method": "{method}",
    "bytes/step": "{num_bytes:,.0f}",
    "of fp32": "{share:.1%}",
    "exposed": "{exposed_ms:.0f} ms",
    "step": "{step_ms:.0f} ms",
    "loss": "{loss:.3f}",
    "gap to fp32 [min, max]": "{gap:+.3f} [{gap_low:+.3f}, {gap_high:+.3f}]",
}
