"""`minipar bench mixture`: a mixture of experts beside the dense model that costs as many FLOPs.

Both train on the same batches of real text: the mixture, its experts spread over all ranks, and a
Llama whose MLP is as wide as the experts that one token passes. They take turns of a fifth of the
FLOPs each (`--points`). Loss on other text is noted after equal FLOPs, by
`LlamaConfig.flops_per_token`, which counts active experts and the router. Seconds are told as well:
what few FLOPs cost in time on this machine is another matter.

What to expect: a gain, if the training is long enough. With `--ranks 1 --seq-len 128 --batch-size
16 --steps 1000`, which is 2.05 million tokens, the losses in nats per token were

    of 10,986 GFLOP    1/5     2/5     3/5     4/5     all
    mixture           1.837   1.548   1.411   1.314   1.274
    dense             1.861   1.582   1.456   1.351   1.313

and the mixture took 1.2 times as long. With ``--seed 1`` and 2 it ended 0.016 ahead, at 1.325 and
1.363, in 1.3 to 1.4 times the time. After 205,000 tokens, in sequences of 64 on one rank, it was
still 0.03 behind: a short training does not show the gain.

Source of the comparison: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), figure 1.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Mesh
from minipar.lab.bench import race
from minipar.lab.bench.expert import check_shape
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.plan import Plan
from minipar.train.config import SMALLEST
from minipar.train.optim import make_optimizer
from minipar.train.step import evaluate, train_step

COLUMNS = (
    ("GFLOP", "{gflop:,.0f}"),
    ("loss: mixture", "{mixture:.3f}"),
    ("dense", "{dense:.3f}"),
    ("seconds: mixture", "{mixture_seconds:.0f}"),
    ("dense", "{dense_seconds:.0f}"),
)


@dataclass(frozen=True)
class MixtureConfig(race.ModelConfig):
    """Compare a mixture of experts with a dense model of its active size: loss per FLOP."""

    preset: str = "tiny-moe"
    """The mixture: tiny-moe or small-moe."""
    batch_size: int = 8
    """Sequences per rank and step."""
    steps: int = 300
    """Training steps of the mixture; the dense model trains until it has used as many FLOPs."""
    points: int = 5
    """How often losses are compared."""
    lr: float = 2e-3
    """Learning rate of AdamW at its peak, of both."""
    seed: int = 0
    """Of the weights, and of the order of the text."""

    least = {"lr": SMALLEST}

    def check(self) -> None:
        super().check()
        check_shape(self)
        if self.points > self.steps:
            raise ValueError(f"--points {self.points} are more than --steps {self.steps}")


def run(config: MixtureConfig) -> list[dict[str, Any]]:
    """Train both, print their losses after equal FLOPs, and return a row for each point."""
    config.check()
    rows = race.on_ranks(measure, config, "gloo")
    print(race.table(rows, COLUMNS))
    last = rows[-1]
    print(
        f"\nper FLOP, the mixture's loss is {last['mixture'] - last['dense']:+.3f} nats per token "
        f"beside the dense model's; it took {last['mixture_seconds'] / last['dense_seconds']:.1f} "
        f"times as long here"
    )
    race.save(rows, config.json)
    return rows


def dense_like(shape: LlamaConfig) -> LlamaConfig:
    """The Llama without experts in which a token passes as many hidden units."""
    moe = shape.moe
    wide = (moe.top_k + moe.num_shared) * moe.expert_size
    return replace(shape, moe=None, intermediate_size=wide)


class Learner:
    """A model in training, for as many steps as `flops` allow; those done, and their seconds."""

    def __init__(self, config: MixtureConfig, mesh: Mesh, plan: Plan, shape: LlamaConfig, flops):
        self.config = config
        model = Llama(shape, seed=config.seed)
        optimizer = partial(make_optimizer, lr=config.lr, weight_decay=0.1)
        self.strategy = compose.apply(model, mesh, plan, optimizer)
        self.batches = config.text("train", self.strategy.axis, config.seed).forever()
        num_tokens = config.ranks * config.batch_size * config.seq_len
        self.flops_per_step = shape.flops_per_token(config.seq_len) * num_tokens
        self.steps = max(1, int(flops / self.flops_per_step))
        self.done, self.seconds = 0, 0.0

    def train(self, flops: float) -> None:
        """Go on for as long as a whole step remains within `flops`."""
        strategy, schedule = self.strategy, dict(peak=self.config.lr, warmup=self.steps // 10)
        barrier(strategy.axis)
        start = time.monotonic()
        while (self.done + 1) * self.flops_per_step <= flops * (1 + 1e-9):
            race.anneal(strategy.optimizer, self.done, self.steps, **schedule)
            step = strategy.model, [strategy], strategy.optimizer
            train_step(*step, next(self.batches), strategy.axis, max_norm=1.0)
            self.done += 1
        barrier(strategy.axis)
        self.seconds += time.monotonic() - start

    def validate(self) -> float:
        """Loss on other text, nats per token."""
        batches = self.config.text("validation", self.strategy.axis, self.config.seed)
        return evaluate(self.strategy.model, islice(batches, 16), self.strategy.axis)


def measure(config: MixtureConfig, _: str) -> list[dict[str, float]]:
    """Train both, in turns that last from one point to the next; called on every rank."""
    sparse = PRESETS[config.preset]
    num_tokens = config.ranks * config.batch_size * config.seq_len
    flops = config.steps * sparse.flops_per_token(config.seq_len) * num_tokens
    n = config.ranks
    learners = {
        "mixture": Learner(config, Mesh(dp=1, ep=n), Plan(ep=n), sparse, flops),
        "dense": Learner(config, Mesh(dp=n), Plan(dp=n), dense_like(sparse), flops),
    }
    rows = []
    for point in range(1, config.points + 1):
        row = {"gflop": flops * point / config.points / 1e9}
        for name, learner in learners.items():
            learner.train(flops * point / config.points)
            row |= {name: learner.validate(), f"{name}_seconds": learner.seconds}
        rows.append(row)
    return rows
