"""Plans to hold against one device: cases, the list of legal ones, a sample of it, and `check`.

`legal_plans` lists what may be trained on four or eight ranks: `make test` takes a sample of the
list in which every two features meet, `make law` all of it.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig, routers
from minipar.parallel.base.shards import region_of
from minipar.parallel.compose import Composed
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.plan import Plan, meshes
from tests.law import models
from tests.law.harness import (
    Outcome,
    Task,
    assert_parity,
    attach_plan,
    gradients_of_plan,
    parallel,
    serial,
)

SIX = MoEConfig(6, 2, 12, balance="batch", balance_weight=0.1)
FOUR = MoEConfig(
    4,
    2,
    12,
    num_shared=1,
    balance="sequence",
    balance_weight=0.1,
    bias_speed=0.02,
)


def uneven(model: nn.Module) -> None:
    """Most tokens lean to the first expert, and none to the last."""
    with torch.no_grad():
        for _, router in routers(model):
            router.weight.mul_(20)
            router.weight[0] += 1
            router.weight[-1] = -router.weight[0]


@dataclass(frozen=True)
class Case:
    """A plan, and a model: tied or not, with experts or not, with a vocabulary that tp cuts or not.

    `backwards`: ranks that are neighbours in a mesh are far from each other in this one.
    """

    plan: Plan
    tied: bool = True
    vocab_size: int = 64
    backwards: bool = False
    moe: MoEConfig | None = None
    num_layers: int = 4

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
        shape = dict(tie_embeddings=self.tied, vocab_size=self.vocab_size, moe=self.moe)
        return partial(models.llama, num_layers=self.num_layers, **shape)

    @property
    def config(self) -> LlamaConfig:
        return _config(replace(self, plan=Plan(), backwards=False))

    @property
    def task(self) -> Task:
        """Sequences of 7 tokens, very uneven ones: five, or six for experts."""
        task = Task(self.build, num_sequences=5, steps=2, microbatches=self.plan.microbatches)
        return replace(task, num_sequences=6, fine_tune=uneven) if self.moe else task

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
def _config(case: Case) -> LlamaConfig:
    return case.build(0).config


@cache
def _reference(case: Case) -> Outcome:
    return serial(case.task)


def expected_of(case: Case) -> Outcome:
    """That of one device, for which the plan does not matter."""
    return _reference(replace(case, plan=Plan(), backwards=False))


def case(text: str, **model) -> Case:
    found = Case(Plan.parse(text), **model)
    found.plan.check(found.config)
    return found


def legal_plans(num_ranks: int, seed: int = 0) -> Iterator[Case]:
    """Every mesh of `num_ranks` with every zero, schedule, context and use of tp, tied and untied.

    What is left (accumulation, checkpointing, vocabulary, order of axes) is drawn by lot for each.
    """
    lot = random.Random(seed)
    modes = [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "tp_overlap": True}]
    for sizes in meshes(num_ranks):
        for stage, mode, where, schedule, tied in itertools.product(
            range(4),
            modes if sizes["tp"] > 1 else modes[:1],
            ("ring", "gather", "ulysses") if sizes["cp"] > 1 else ("ring",),
            SCHEDULES if sizes["pp"] > 1 else ("1f1b",),
            (True, False),
        ):
            plan = Plan(**sizes, **mode, zero=stage, context=where, schedule=schedule)
            plan = replace(
                plan,
                microbatches=lot.choice((1, 3)),
                checkpointing=lot.choice(("none", "none", "full", "selective")),
            )
            case = Case(plan, tied, lot.choice((61, 64)), lot.choice((True, False)))
            if plan.problem(case.config) is None:
                yield case


def sample(cases: list[Case], seed: int = 0) -> list[Case]:
    """Few of `cases`, in which all pairs of features meet that meet in any."""
    pairs = {case: case.pairs() for case in random.Random(seed).sample(cases, len(cases))}
    missing = set().union(*pairs.values())
    chosen: list[Case] = []
    while missing:
        chosen.append(max(pairs, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


mixture = partial(case, tied=False, vocab_size=62)


# ---------------------------------------------------------------------- training by a plan
def train(case: Case, copies: bool = True, mute: bool = False) -> Outcome:
    """Train by `case`; `copies`: every rank's must be what the whole model has."""
    held: list[Llama] = []

    def plug(model: Llama, mesh: Mesh) -> list[Composed]:
        held.append(model)
        return attach_plan(model, mesh, case.plan)

    sizes, how = case.mesh_sizes(), dict(gradients=gradients_of_plan, mute=mute)
    outcome = parallel(case.task, sizes, plug, **how)
    mine = held[0].state_dict(keep_vars=True) if copies else {}
    for name, own in mine.items():
        theirs = region_of(own).cut(outcome.after[name]).view_as(own)
        difference = (own.detach().cpu() - theirs).abs().max().item() if own.numel() else 0.0
        assert difference < 1e-12, f"this rank's copy of {name} is off by {difference:g}"
    return outcome


def many(cases: list[Case], expected: list[Outcome]) -> list[tuple]:
    """For each of them: what was wrong, and what this rank reports; called on each rank."""
    found = []
    for case, truth in zip(cases, expected, strict=True):
        wrong, reported = None, None
        try:
            outcome = train(case)
            reported = outcome.losses, outcome.num_tokens, outcome.norms
            assert_parity(outcome, truth)
        except AssertionError as error:
            wrong = str(error)
        found.append((wrong, reported))
    return found


def check(ranks, cases: list[Case]) -> None:
    """Train by all of `cases`; raise `AssertionError` if any is wrong.

    What ranks report (loss, tokens, norm, and so the factor that clips) is the same to the bit.
    """
    failures = []
    found = ranks(cases[0].plan.num_ranks).run(many, cases, [expected_of(c) for c in cases])
    for case, results in zip(cases, zip(*found, strict=True), strict=True):
        wrongs = sorted({wrong for wrong, _ in results if wrong})
        if len({str(reported) for _, reported in results}) > 1:
            wrongs.append(f"ranks report {[reported for _, reported in results]}")
        failures += [f"{case}: {wrong}" for wrong in wrongs]
    assert not failures, "\n".join(failures)
