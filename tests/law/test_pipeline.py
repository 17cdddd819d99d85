"""Pipelines beside those of plans: frozen weights, cuts, pairs, bytes, forward alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object, wire_bytes
from minipar.comm.mesh import Mesh
from minipar.model.llama import token_loss
from minipar.parallel.pipeline import runtime
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.plan import Plan
from tests.law import models
from tests.law.harness import (
    Outcome,
    Task,
    assert_parity,
    attach_plan,
    gradients_of,
    parallel,
    reference,
)
from tests.law.plans import case
from tests.law.plans import check as check_plans


def deep(seed: int, num_layers: int = 4, **changes):
    """As many layers as two ranks with two stages each need."""
    return models.llama(seed, num_layers=num_layers, **changes)


def frozen_layers(model) -> None:
    for layer in (0, 2, 3):
        model.model.layers[layer].requires_grad_(False)


untied = partial(deep, tie_embeddings=False)
TASKS = {
    "tied": Task(deep, steps=2),
    "untied": Task(untied, steps=2),
    "one step": Task(deep, steps=1),
    "frozen": Task(untied, steps=2, fine_tune=models.frozen_embedding),
    "frozen layers": Task(untied, steps=2, fine_tune=frozen_layers),
}


def attach(model, mesh, schedule, **options):
    model.pp = mesh.pp  # for `gradients`
    return [runtime.apply(model, mesh.pp, schedule, **options)]


def gradients(model) -> dict[str, Tensor | None]:
    """Those of all stages. A tied head is the embedding: found equal, and named once."""
    merged: dict[str, Tensor | None] = {}
    for own in all_gather_object(gradients_of(model), model.pp):
        if model.config.tie_embeddings and "lm_head.weight" in own:
            own["model.embed_tokens.weight"] = own.pop("lm_head.weight")
        for name, grad in own.items():
            before = merged.setdefault(name, grad)
            if (before is None) != (grad is None) or not (
                before is grad or torch.equal(before, grad)
            ):
                merged[name + ", another copy"] = grad  # which parity will find too much
    return merged


def one(task: Task, schedule, **options) -> Outcome:
    return parallel(
        replace(task, microbatches=schedule.num_microbatches),
        {"pp": schedule.num_ranks},
        partial(attach, schedule=schedule, **options),
        gradients=gradients,
    )


def check(ranks, name: str, schedules: list, **options) -> None:
    for schedule in schedules:
        for outcome in ranks(schedule.num_ranks).run(
            partial(one, **options), TASKS[name], schedule
        ):
            assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
def test_frozen_weights_equal_one_device(ranks):
    names = ["1f1b", "interleaved_zb", "zb_v", "dualpipe_v"]
    check(ranks, "frozen", [make(schedule, 2, 4) for schedule in names])


@pytest.mark.slow
def test_any_cut_equals_one_device(ranks):
    """A cut of the user's own; the first stage is the embedding alone, the last the head alone."""
    check(ranks, "tied", [make("zb_h1", 3, 4)], cut=(0, 4, 0))
    check(ranks, "frozen", [make("1f1b", 3, 4)], cut=(1, 3, 0))


def test_pairs_side_by_side_equal_one_device(ranks):
    """Without experts there is nothing to hand over for, and messages have another order."""
    check(ranks, "one step", [make("dualpipe_v", 2, 5), make("dualpipe", 2, 5)], paired=True)


# ---------------------------------------------------------------------- with other strategies
@pytest.mark.slow
def test_trap_15_with_other_strategies_equals_one_device(ranks):
    """Tied embeddings are added before they are reduce-scattered. Mutant: the other way round."""
    names = ["1f1b", "interleaved_zb", "zb_v", "dualpipe"]
    text = "dp=2,pp=2,zero=2,microbatches=3,schedule="
    check_plans(ranks, [case(text + name) for name in names])


def sharded(task: Task, plan: Plan) -> Outcome:
    """Gradients are in pieces: the norm, the loss and the weights after two steps tell."""
    plug = partial(attach_plan, plan=plan)
    return parallel(task, plan.mesh_sizes(), plug, gradients=lambda model: {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen", "frozen layers"])
def test_frozen_weights_in_shards_equal_one_device(ranks, name):
    """Mutant: a stage without a gradient that waits for the backward of fsdp."""
    plan = Plan.parse("dp=2,pp=2,zero=3,microbatches=3,schedule=interleaved_1f1b")
    for outcome in ranks(4).run(sharded, replace(TASKS[name], microbatches=3), plan):
        outcome.gradients = reference(TASKS[name]).gradients
        assert_parity(outcome, reference(TASKS[name]))


# ---------------------------------------------------------------------- bytes
def crossings(schedule) -> int:
    """Messages one way of all microbatches: neighbouring stages that are on different ranks."""
    return sum(
        schedule.rank_of[stage] != schedule.rank_of[stage + 1]
        for i in range(schedule.num_microbatches)
        for stage in schedule.path(i)[:-1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_sends_what_the_docstring_says(ranks, name):
    p, m = 3, 2
    task = replace(TASKS[name], build=partial(TASKS[name].build, num_layers=6), steps=1)
    schedules = [make("1f1b", p, m), make("interleaved_zb", p, m), make("zb_v", p, m)]
    for schedule in schedules:
        outcomes = ranks(p).run(one, task, schedule)
        message = 3 * 7 * 16 * 8  # [B, T, D] in float64
        expected = 2 * crossings(schedule) * message
        if name == "tied" and schedule.rank_of[0] != schedule.rank_of[-1]:
            expected += 2 * 61 * 16 * 8  # [V, D] each way
        expected += 2 * p * wire_bytes("all_reduce", 8, p)  # the loss; the trainer's norm
        assert sum(outcome.sent["pp"] for outcome in outcomes) == expected
    assert crossings(schedules[0]) == m * (p - 1) and crossings(schedules[1]) == m * (2 * p - 1)
    assert crossings(schedules[2]) == m * (2 * p - 2)  # a V turns around within a rank


# ---------------------------------------------------------------------- forward only
def _forward(name: str, schedule) -> tuple[Tensor, list]:
    """On ranks with seeds of their own: the loss, and whatever gradients there are."""
    mesh = Mesh(pp=schedule.num_ranks)
    model = TASKS[name].build(mesh.rank).double()
    tokens, targets = TASKS[name].batch(0)
    pipeline = runtime.apply(model, mesh.pp, schedule)
    loss = pipeline.evaluate([(tokens[i : i + 2], targets[i : i + 2]) for i in range(0, 6, 2)])
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "dualpipe"])
def test_forward_equals_one_device(ranks, name):
    """Mutant: ranks that keep the weights they were born with."""
    model = deep(0).double()
    tokens, targets = TASKS["tied"].batch(0)
    with torch.no_grad():
        expected = token_loss(model(tokens), targets)
    for loss, gradients_left in ranks(2).run(_forward, "tied", make(name, 2, 4)):
        torch.testing.assert_close(loss, expected.double(), rtol=1e-10, atol=1e-12)
        assert not gradients_left
