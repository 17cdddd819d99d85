"""Who does how much in the next step of a run: the size of the batch, and each rank's part of it.

The flags of `minipar train` put together what `batch_size.py`, `balance.py` and `straggler.py`
hold, each for itself. What is decided here depends on reduced or gathered numbers only, so that all
ranks decide alike.
"""

from typing import Any

import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.comm.values import look
from minipar.parallel import ddp
from minipar.train.balance import Balancer
from minipar.train.batch_size import (
    GrowingBatch,
    NoiseScale,
    lr_factor,
    microbatches_of,
    parse_ramp,
    ramped,
)
from minipar.train.config import TrainConfig
from minipar.train.data import Batches
from minipar.train.step import StepResult
from minipar.train.straggler import Pace, parse_slow


class Workload:
    """Deals out the batches of a run, and learns from each step how to deal the next.

    Made before a strategy takes the model, whose pace it may have to slow or to measure.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, mesh: Mesh) -> None:
        self.config, self.axis = config, mesh.joint("dp", "ep")
        self.ramp = parse_ramp(config.batch_ramp)
        self.first = config.batch_size  # the batch that --lr is for
        self.slow = parse_slow(config.slow, mesh.size)
        self.device = next(model.parameters()).device
        self.pace = self.noise = self.growth = self.balancer = None
        if self.slow or config.rebalance_every:
            self.pace = Pace(model, self.slow.get(mesh.rank, 1.0))
        if config.grow_batch_to:
            self.noise = NoiseScale()
            self.growth = GrowingBatch(config.batch_size, config.grow_batch_to)
        if config.rebalance_every:
            self.balancer = Balancer(mesh.dp, config.rebalance_every)
        parts = {"growth": self.growth, "noise": self.noise, "balance": self.balancer}
        self._saved = {name: part for name, part in parts.items() if part is not None}

    def watch(self, reduce: ddp.Reduce | None) -> ddp.Reduce | None:
        """Return what reduces buckets, given what would without the noise to measure."""
        return reduce if self.noise is None else self.noise.watch(reduce)

    def deal(self, step: int, batches: Batches) -> None:
        """Set the size of the batch of `step`, and the microbatches of each rank."""
        config, num_ranks = self.config, self.axis.size
        size = ramped(step, config.batch_size, self.ramp)
        if self.growth is not None:
            size = self.growth.size
        each = microbatches_of(size, config.batch_size, config.microbatches, num_ranks)
        shares = [each] * num_ranks
        if self.balancer is not None:
            shares = self.balancer.shares(each * num_ranks)
        batches.deal(size, shares)

    def lr_factor(self, batches: Batches) -> float:
        """What to multiply the learning rate by that belongs to the batch at the beginning."""
        return lr_factor(self.config.batch_lr, batches.batch_size, self.first)

    def learn(self, result: StepResult, batches: Batches) -> dict[str, Any]:
        """Take in a step that was dealt; return what belongs into its metrics. A collective."""
        line: dict[str, Any] = {}
        if self.changes:
            line["batch_size"] = batches.batch_size
        if self.noise is not None:
            # The size of the next batch hangs on these: the one place where a step is waited for.
            coming = [result.noise, result.num_tokens[None], result.grad_norm[None]]
            *sums, num_tokens, grad_norm = look(torch.cat([t.double() for t in coming]), None)
            self.noise.update(sums, num_tokens, grad_norm)
            line["noise_scale"] = self.noise.tokens
            self.growth.update(self.noise.tokens / self.config.seq_len)
        if self.balancer is not None:
            line["shares"] = batches.shares
            seconds, self.pace.seconds = self.pace.seconds, 0.0
            self.balancer.update(batches.shares[self.axis.rank], seconds, self.device)
        return line

    @property
    def changes(self) -> bool:
        """Whether batches do not stay as they are at the beginning."""
        return len(self.ramp) > 0 or self.growth is not None

    @property
    def label(self) -> str:
        """What a picture of the run must say; empty if no rank was slowed."""
        return "".join(
            f", rank {rank} slowed {factor:g} times on purpose"
            for rank, factor in self.slow.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; equal on all ranks."""
        state = {name: part.state_dict() for name, part in self._saved.items()}
        return state | ({"first": self.first} if self.changes else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; what it lacks begins anew."""
        if self.changes:
            self.first = state.get("first", self.first)
        for name, part in self._saved.items():
            if name in state:
                part.load_state_dict(state[name])
