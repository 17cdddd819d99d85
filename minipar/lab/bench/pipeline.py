"""`minipar bench pipeline`: our runtime beside PyTorch's, and measured beside simulated idle time.

The race: ours and `torch.distributed.pipelining` play the schedule of the same name on the same
stages, tokens and link, in turns; a step is one with its optimizer. PyTorch adds up no gradients of
embeddings tied across two ranks, so here they are not tied; nor does it tell all ranks the loss,
which ours does, with one small all-reduce more.

Idle time: every schedule there is, with stages that sleep (`pipeline_idle`), on more ranks than
there are cores.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import Axis, Mesh
from minipar.lab.bench import pipeline_idle, race
from minipar.lab.bench.race import ADAMW, StepConfig
from minipar.model.llama import PRESETS, Llama, LlamaConfig, token_loss
from minipar.parallel.pipeline import runtime, stages
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedules import make

RIVALS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Schedules of ours, and the class of `torch.distributed.pipelining` that plays the same."""


@dataclass(frozen=True)
class PipelineConfig(StepConfig):
    """Compare our pipeline with PyTorch's, and idle time of every schedule with its forecast."""

    layers: int = 8
    """Layers of the model, whatever its preset has; there are two stages per rank to share them."""
    batch_size: int = 1
    """Sequences per microbatch."""
    microbatches: int = 8
    """Microbatches per step: a multiple of the ranks, at least two for each."""
    schedules: tuple[str, ...] = tuple(RIVALS)
    """Schedules to compare with PyTorch's."""
    idle_ranks: int = 4
    """Number of ranks of the pipelines whose stages sleep; 0 leaves them out."""
    idle_runs: int = 3
    """Steps of each of those, of which the one in the middle counts."""
    out: str = ""
    """Also draw a picture of each, predicted above measured, into this folder."""

    least = {"ranks": 2, "idle_ranks": 0}

    def check(self) -> None:
        super().check()
        unknown = [name for name in self.schedules if name not in RIVALS]
        if unknown or not self.schedules:
            raise ValueError(f"--schedules {unknown}: use some of {', '.join(RIVALS)}")
        if self.layers < 2 * self.ranks:
            raise ValueError(
                f"--layers {self.layers}: --ranks {self.ranks} with two stages each need one for "
                f"each stage; use {2 * self.ranks} or {4 * self.ranks}"
            )
        if self.microbatches % self.ranks or self.microbatches < 2 * self.ranks:
            raise ValueError(
                f"--microbatches {self.microbatches}: PyTorch's schedules take a multiple of "
                f"--ranks {self.ranks}, at least two for each; use {2 * self.ranks} or "
                f"{4 * self.ranks}"
            )
        if self.idle_ranks % 2:
            raise ValueError(
                f"--idle-ranks {self.idle_ranks}: dualpipe takes an even number; use 0, 2 or 4"
            )
        if self.out and not self.idle_ranks:
            raise ValueError("--out draws what --idle-ranks 0 leaves out; use 2 or 4")
        if self.out and Path(self.out).is_file():
            raise ValueError(f"--out {self.out} is a file; name a folder for the pictures")


def run(config: PipelineConfig) -> list[dict[str, Any]]:
    """Run both comparisons, print their tables, and return the rows of both."""
    config.check()
    rows = []
    for name in config.links:
        with race.pool(config.ranks, name) as ranks:
            for schedule in config.schedules:
                measured = ranks.run(measure, config, name, schedule)[0]
                row = race.row(config, "pipeline", name, schedule, [RIVALS[schedule]], measured)
                row |= {"layers": config.layers, "microbatches": config.microbatches}
                rows.append(row)
                race.announce([row])
    print("\n" + race.table(rows))
    idle = []
    if config.idle_ranks:
        idle = pipeline_idle.measure(
            config.idle_ranks, config.microbatches, config.idle_runs, config.out
        )
        print("\n" + race.table(idle, pipeline_idle.COLUMNS))
    race.save(rows + idle, config.json)
    return rows + idle


# ---------------------------------------------------------------------- contenders
Play = Callable[[], Tensor]
"""Forward and backward of a whole batch; returns the mean loss where it is known, else 0."""


class Contender:
    """The layers of this rank, and training steps of the whole pipeline.

    `who` is "ours" or "torch".
    """

    def __init__(
        self, config: PipelineConfig, axis: Axis, name: str, who: str, shape: LlamaConfig
    ) -> None:
        self.model = Llama(shape, seed=0)
        inputs, targets = batch(config, shape)
        attach = {"ours": ours, "torch": theirs}[who]
        schedule = make(name, axis.size, config.microbatches)
        self.play = attach(self.model, axis, schedule, inputs, targets)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self) -> Tensor:
        """Take a training step; return the mean loss on a rank that knows it, else 0."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.play()
        self.optimizer.step()
        return loss


def batch(config: PipelineConfig, shape: LlamaConfig) -> list[Tensor]:
    """Inputs and targets [M B, T] of a step, the same on all ranks."""
    whole = replace(config, batch_size=config.microbatches * config.batch_size)
    return whole.tokens(shape)


def ours(model: Llama, axis: Axis, schedule: Schedule, inputs: Tensor, targets: Tensor) -> Play:
    """`minipar.parallel.pipeline`."""
    pipeline = runtime.apply(model, axis, schedule)
    m = schedule.num_microbatches
    microbatches = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))

    def play() -> Tensor:
        loss = pipeline.run(
            model, [pipeline], microbatches, weigh=lambda loss: loss / targets.numel()
        )
        pipeline.finish_backward()
        return loss / targets.numel()

    return play


def theirs(model: Llama, axis: Axis, schedule: Schedule, inputs: Tensor, targets: Tensor) -> Play:
    """`torch.distributed.pipelining`, with stages cut and placed as ours are."""
    # Imported here: it takes a while, and every command imports this file.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as rivals

    last, own = schedule.num_stages - 1, schedule.stages_on(axis.rank)
    cut = stages.balance(stages.estimate_costs(model.config), schedule.num_stages)
    parts = []
    for stage in own:
        part = stages.part_of(model, stages.layers_of(cut, stage), stage == 0, stage == last)
        parts.append(PipelineStage(part, stage, last + 1, inputs.device, group=axis.group))
    stages.keep_only(model, set(own), cut)
    kind = getattr(rivals, RIVALS[schedule.name])
    runner = kind(
        parts[0] if issubclass(kind, rivals.PipelineScheduleSingle) else parts,
        schedule.num_microbatches,
        loss_fn=lambda logits, t: token_loss(logits, t) / targets.numel(),
        scale_grads=False,
    )

    def play() -> Tensor:
        losses: list[Tensor] = []
        runner.step(
            *([inputs] if 0 in own else []),
            target=targets if last in own else None,
            losses=losses,
            return_outputs=False,
        )
        return sum(losses, torch.zeros((), device=inputs.device)).detach()

    return play


# ---------------------------------------------------------------------- on the ranks
def measure(config: PipelineConfig, link_name: str, name: str) -> dict[str, race.Measured]:
    """Let ours, called by its schedule's `name`, and its rival take turns; called on every rank."""
    axis, shape = Mesh(pp=config.ranks).pp, shape_of(config)
    field = {name: "ours", RIVALS[name]: "torch"}
    steps = {key: Contender(config, axis, name, who, shape).step for key, who in field.items()}
    return race.race(steps, axis, link_name, config.rounds)


def shape_of(config: PipelineConfig) -> LlamaConfig:
    """The model of `config`: its preset with as many layers as it asks for, and nothing tied."""
    return replace(PRESETS[config.preset], num_layers=config.layers, tie_embeddings=False)
