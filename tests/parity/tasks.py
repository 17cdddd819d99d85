"""Tasks that several strategies are held against, and what else their tests share."""

import itertools
from dataclasses import dataclass, fields
from functools import cache, partial

import torch
from torch import Tensor, nn

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose, zero
from minipar.parallel.compose import Composed
from minipar.parallel.pipeline.runtime import Pipeline
from minipar.parallel.plan import Plan
from minipar.parallel.zero import ShardedOptimizer
from tests.parity import models
from tests.parity.harness import Task, make_optimizer

TASKS = {
    "llama": Task(models.llama),
    "untied": Task(models.untied_llama),
    "recomputing": Task(models.recomputing_llama),
    "accumulating": Task(models.llama, microbatches=2, num_sequences=8),
    "uneven": Task(models.llama, microbatches=3, num_sequences=5),
    "foreign": Task(models.Foreign),
    "frozen": Task(models.untied_llama, fine_tune=models.frozen_embedding),
    "sometimes used": Task(models.SometimesUsed, num_sequences=4),
    "idle ranks": Task(models.llama, num_sequences=3),
}


def attach_zero(model: nn.Module, mesh: Mesh, stage: int, bucket_mb: float = 0.004):
    # Buckets small enough that even these models fill several.
    make = partial(ShardedOptimizer, bucket_mb=bucket_mb)
    optimizer = make_optimizer(model, make, torch.optim.AdamW, mesh.dp)
    assert len(optimizer.buckets) >= 3
    model.zero = zero.apply(model, mesh.dp, optimizer=optimizer, stage=stage, average=False)
    return [model.zero]


@dataclass(frozen=True)
class Case:
    """A plan, and a model: tied or not, with a vocabulary that tp cuts evenly or not.

    `backwards`: ranks that are neighbours in a mesh are far from each other in this one.
    """

    plan: Plan
    tied: bool = True
    vocab_size: int = 64
    backwards: bool = False

    def __str__(self) -> str:
        order = "-".join(self.mesh_sizes())
        return f"{self.plan} {'tied' if self.tied else 'untied'} V={self.vocab_size} {order}"

    def mesh_sizes(self) -> dict[str, int]:
        """Axes in the order of the plan, or in the other."""
        sizes = self.plan.mesh_sizes()
        return dict(reversed(sizes.items())) if self.backwards else sizes

    @property
    def build(self) -> partial:
        """seed -> model. Four heads on two of keys: with tp=4, two ranks share each."""
        shape = dict(tie_embeddings=self.tied, vocab_size=self.vocab_size, num_layers=4)
        return partial(models.llama, **shape)

    @property
    def config(self) -> LlamaConfig:
        return _config(self.tied, self.vocab_size)

    @property
    def task(self) -> Task:
        """Five sequences of 7 tokens, very uneven ones: nothing divides anything."""
        return Task(self.build, num_sequences=5, steps=2, microbatches=self.plan.microbatches)

    def pairs(self) -> set[tuple]:
        """Every two features that meet here, and the schedule by its name.

        To others a schedule is how many stages a rank has, which of them meet, and what it splits.
        """
        features = {field.name: getattr(self.plan, field.name) for field in fields(Plan)}
        features |= {"tied": self.tied, "vocab_size": self.vocab_size}
        name = "schedule", features.pop("schedule")
        if self.plan.pp > 1:
            schedule = self.plan.make_schedule()
            layout = len(schedule.stages_on(0)), schedule.rank_of[-1] == 0, schedule.copies
            splits = any(a.kind == "W" for row in schedule.actions for a in row)
            features |= {"layout": layout, "splits": splits}
        return {name, *itertools.combinations(features.items(), 2)}


@cache
def _config(tied: bool, vocab_size: int) -> LlamaConfig:
    return Case(Plan(), tied, vocab_size).build(0).config


def attach_plan(model: Llama, mesh: Mesh, plan: Plan) -> list[Composed]:
    model.composed = compose.apply(model, mesh, plan, make_optimizer, bucket_mb=0.004)
    return [model.composed]


def gradients_of_plan(model: Llama) -> dict[str, Tensor | None]:
    """Of all ranks together, by their names in the serial model; a collective."""
    whole = model.composed.full_gradients()
    named = dict.fromkeys(itertools.chain(*model.composed.names))  # a tied head, buffers are not
    return {name: gradient for name, gradient in whole.items() if name in named}


# ---------------------------------------------------------------------- mutants of a pipeline
def own_alone(pipeline: Pipeline, stand_ins: dict[nn.Parameter, nn.Parameter]) -> None:
    """Instead of `_add_twins`: a rank keeps the part of the sum that is its own."""
    for p, stand_in in stand_ins.items():
        p.grad = stand_in.grad


def no_copies(pipeline: Pipeline) -> dict[nn.Parameter, tuple[int, ...]]:
    """Instead of `_mark_parameters`: what several stages have counts several times."""
    twins = _mark(pipeline)
    for p in pipeline.model.parameters():
        p.is_copy = False
    return twins


_mark = Pipeline._mark_parameters
