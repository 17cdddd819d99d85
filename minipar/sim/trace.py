"""The work of a rank in a step, in its order: recorded from the real code, at any size.

Idea.   On the meta device tensors have shapes and no values, and torch's "fake" process group says
        of every collective that it is done. So one process runs the training step of any rank of
        any mesh: `compose.apply`, `train_step`, clipping and optimizer are those of a real run, and
        what passes by is written down. No strategy is modelled a second time.
Trace.  A list of events in their order: see `tracer.py`.
Ranks.  One of each place on the pipeline is traced. The others of its dp, cp and tp do the same.
Steps.  One that others have gone before is recorded: the first learns orders (ddp, fsdp), and what
        one step sends may be awaited in the next (zero).

Limits: an optimizer is one pass over its bytes, as a fused one is. Elementwise operations are not
fused, but for norms. Loaders, checkpoints and what Python does between operations take no part.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from minipar.comm.calls import taps
from minipar.comm.mesh import Mesh, rank_at
from minipar.emulate import operations
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.plan import Plan
from minipar.sim.tracer import Compute, Event, Launch, Memory, Tracer
from minipar.train.optim import make_optimizer
from minipar.train.precision import Precision
from minipar.train.step import train_step


# ---------------------------------------------------------------------- what is found
@dataclass(frozen=True)
class Trace:
    """The step of one rank: its events, and what it holds before."""

    events: tuple[Event, ...]
    held: dict[str, int]  # bytes by category, between two steps

    @property
    def flops(self) -> int:
        """FLOPs of products and attention, with what is computed again."""
        return sum(e.flops for e in self.events if type(e) is Compute)

    def sent(self) -> dict[str, int]:
        """Return the bytes that this rank sends in a step, by axis."""
        totals: dict[str, int] = defaultdict(int)
        for event in self.events:
            if type(event) is Launch:
                totals[event.axis] += event.num_bytes
        return dict(totals)

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category when the rank holds the most."""
        now, highest, total = dict(self.held), dict(self.held), sum(self.held.values())
        most = total
        for event in self.events:
            if type(event) is Memory:
                now[event.category] = now.get(event.category, 0) + event.num_bytes
                total += event.num_bytes
                if total > most:
                    most, highest = total, dict(now)
        return highest


@dataclass(frozen=True)
class Traces:
    """The steps of a plan: one rank for each place on the pipeline."""

    plan: Plan
    tokens: int  # of a step, of all ranks
    ranks: dict[int, Trace]  # by place on pp

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category when the fullest rank is at its fullest."""
        peaks = [trace.at_peak() for trace in self.ranks.values()]
        return max(peaks, key=lambda held: sum(held.values()))


# ---------------------------------------------------------------------- the rank that is played
@contextmanager
def pretend(plan: Plan, rank: int = 0) -> Iterator[Mesh]:
    """Play one rank of a group with all ranks of `plan`, of which no other exists.

    Raises `ValueError` in a process that is a rank.
    """
    if dist.is_initialized():
        raise ValueError(
            "a trace plays a rank of a group that does not exist, and this process is a rank of "
            "one that does; trace in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake", too

    label, hook = Mesh.label, sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_ranks)
    try:
        yield Mesh(**plan.mesh_sizes())
    finally:
        dist.destroy_process_group()
        Mesh.label, sys.excepthook = label, hook


class Actor:
    """A model under a plan, ready to step; on meta, the model of a rank without values."""

    def __init__(
        self,
        config: LlamaConfig,
        plan: Plan,
        mesh: Mesh,
        sequences: int,
        seq_len: int,
        device: str = "meta",
        bucket_mb: float | None = None,
    ) -> None:
        with torch.device(device):
            self.model = Llama(config)
        make = partial(make_optimizer, lr=1e-4, weight_decay=0.1)
        self.strategy = compose.apply(self.model, mesh, plan, make, bucket_mb=bucket_mb)
        self.precision = Precision(plan.autocast, device)
        tokens = torch.zeros(sequences, seq_len, dtype=torch.int64, device=device)
        self.microbatch = self.strategy.shard((tokens, tokens))
        self.plan = plan

    def step(self) -> None:
        """Run one training step."""
        train_step(
            self.model,
            [self.strategy],
            self.strategy.optimizer,
            [self.microbatch] * self.plan.microbatches,
            self.strategy.axis,
            max_norm=1.0,
            precision=self.precision,
        )


# ---------------------------------------------------------------------- from a rank to its program
def trace(
    config: LlamaConfig,
    plan: Plan,
    *,
    sequences: int = 1,
    seq_len: int,
    on_cpu: bool = False,
    bucket_mb: float | None = None,
) -> Traces:
    """Trace a training step of a Llama under `plan`; weights are float32, as `minipar train` does.

    Args:
        sequences: of a microbatch, on every rank of dp; `seq_len` tokens each, before cp cuts them.
        on_cpu: norms are spelled out, as torch does there; on a GPU each is one operation.
        bucket_mb: capacity of a bucket of gradients, as in `compose.apply`.

    Raises `ValueError` for a plan that does not work, and in a process that is a rank of a group.
    """
    plan.check(config)
    if plan.dispatch == "paired":
        raise ValueError(
            f"plan {plan}: a trace replays the actions of a rank one by one, but dispatch=paired "
            f"runs two at once; take dispatch=overlapped, which cannot be faster"
        )
    if sequences < 1 or not 1 <= seq_len <= config.max_seq_len:
        raise ValueError(
            f"sequences={sequences}, seq_len={seq_len}: use 1 or more, and 1 to the "
            f"{config.max_seq_len} tokens that the model can see"
        )
    ranks, sizes = {}, plan.mesh_sizes()
    for place in range(plan.pp):
        norms = nullcontext() if on_cpu else operations.fused_norms()
        rank = rank_at({axis: place * (axis == "pp") for axis in sizes}, sizes)
        with pretend(plan, rank) as mesh, norms:
            actor = Actor(config, plan, mesh, sequences, seq_len, bucket_mb=bucket_mb)
            ranks[place] = _record(actor, Tracer())
    tokens = plan.dp * plan.ep * plan.microbatches * sequences * seq_len
    return Traces(plan, tokens, ranks)


def _record(actor: Actor, tracer: Tracer) -> Trace:
    """Return the step of a rank."""

    def step() -> None:
        tracer.begin_step()
        actor.step()

    taps.append(tracer)
    try:
        with tracer:
            step()
            if tracer.unawaited:
                step()  # so that they are what they are when orders are known
        with tracer.watching(actor.model, actor.strategy.optimizer):
            held = tracer.held()
            step()
            tracer.look_at(actor.model, actor.strategy.optimizer)
    finally:
        taps.remove(tracer)
    return Trace(tracer.traced(), held)
