"""Pipelines equal one device: every schedule, ranks, stages per rank, with and without ddp."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object, wire_bytes
from minipar.comm.mesh import Mesh
from minipar.model.llama import token_loss
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import ddp, fsdp, tensor, zero
from minipar.parallel.pipeline import runtime, split_backward
from minipar.parallel.pipeline.schedules import make
from tests.law import models
from tests.law.harness import (
    Outcome,
    Task,
    assert_parity,
    gradients_of,
    parallel,
    reference,
)
from tests.law.plans import no_copies, own_alone


def deep(seed: int, num_layers: int = 4, **changes):
    """As many layers as two ranks with two stages each need."""
    return models.llama(seed, num_layers=num_layers, **changes)


def recomputing(seed: int):
    model = deep(seed)
    checkpoint_activations(model, "full")
    return model


def frozen_layers(model) -> None:
    for layer in (0, 2, 3):
        model.model.layers[layer].requires_grad_(False)


TASKS = {
    "tied": Task(deep, steps=2),
    "untied": Task(partial(deep, tie_embeddings=False), steps=2),
    "recomputing": Task(recomputing, steps=2),
    "one step": Task(deep, steps=1),
    "frozen": Task(partial(deep, tie_embeddings=False), steps=2, fine_tune=models.frozen_embedding),
    "frozen layers": Task(partial(deep, tie_embeddings=False), steps=2, fine_tune=frozen_layers),
}


def attach(model, mesh, schedule, data=None, **options):
    model.pp = mesh.pp  # for `gradients`
    pipeline = runtime.apply(model, mesh.pp, schedule, **options)
    if data is None:
        return [pipeline]
    return [ddp.apply(model, mesh.dp, average=False, bucket_mb=0.004, version=data), pipeline]


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


def many(task: Task, schedules: list, dp: int, expected: Outcome, options: dict) -> list[str]:
    """Train by each of them, and say what was wrong; called on each rank."""
    wrong = []
    for schedule in schedules:
        outcome = one(task, schedule, dp, **options)
        try:
            assert_parity(outcome, expected)
        except AssertionError as error:
            wrong.append(f"{error}, by\n{schedule}")
    return wrong


def one(task: Task, schedule, dp: int = 1, mute: bool = False, **options) -> Outcome:
    return parallel(
        replace(task, microbatches=schedule.num_microbatches),
        {"pp": schedule.num_ranks, "dp": dp},
        partial(attach, schedule=schedule, **options),
        gradients=gradients,
        mute=mute,
    )


def check(ranks, name: str, schedules: list, dp: int = 1, **options) -> None:
    pool = ranks(schedules[0].num_ranks * dp)
    for wrong in pool.run(many, TASKS[name], schedules, dp, reference(TASKS[name]), options):
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_more_steps_equal_one_device(ranks):
    """Tied embeddings on two ranks, on one rank, and in two copies stay what they are."""
    check(ranks, "tied", [make("zb_h1", 2, 3), make("zb_v", 2, 2), make("dualpipe", 2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied", "recomputing", "frozen"])
def test_other_models_equal_one_device(ranks, name):
    names = ["1f1b", "interleaved_zb", "zb_v", "dualpipe_v"]
    check(ranks, name, [make(schedule, 2, 4) for schedule in names])


@pytest.mark.slow
def test_any_cut_equals_one_device(ranks):
    """A cut of the user's own; the first stage is the embedding alone, the last the head alone."""
    check(ranks, "tied", [make("zb_h1", 3, 4)], cut=(0, 4, 0))
    check(ranks, "frozen", [make("1f1b", 3, 4)], cut=(1, 3, 0))


def sharding(model, mesh, schedule, how: str, paired: bool = False):
    """Tensor parallelism before the split; or ZeRO 1 or 2, or fsdp, of what it leaves on a rank."""
    inner = tensor.apply(model, mesh.tp) if how == "tensor" else None
    pipeline = runtime.apply(model, mesh.pp, schedule, paired=paired)
    if how == "fsdp":
        inner = fsdp.apply(model, mesh.dp, average=False)
    elif inner is None:
        optimizer = zero.ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, mesh.dp, lr=0.02, weight_decay=0.1
        )
        stage = int(how[-1])
        inner = zero.apply(model, mesh.dp, optimizer=optimizer, stage=stage, average=False)
        inner.optimizer = optimizer
    pipeline.full_state_dict = _both(pipeline, inner)
    return [inner, pipeline]


def _both(pipeline, inner):
    return lambda: pipeline.join(inner.full_state_dict())


def sharded(
    task: Task, schedules: list, how: str, expected: Outcome, paired: bool = False
) -> list[str]:
    """Gradients are in pieces: the norm, the loss and the weights after two steps tell."""
    wrong, axis = [], "tp" if how == "tensor" else "dp"
    for schedule in schedules:
        outcome = parallel(
            replace(task, microbatches=schedule.num_microbatches),
            {"pp": schedule.num_ranks, axis: 2},
            partial(sharding, schedule=schedule, how=how, paired=paired),
            gradients=lambda model: {},
        )
        outcome.gradients = expected.gradients
        try:
            assert_parity(outcome, expected)
        except AssertionError as error:
            wrong.append(f"{error}, by\n{schedule}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero 2", "fsdp"])
def test_trap_15_with_other_strategies_equals_one_device(ranks, how):
    """Tied embeddings are added before they are reduce-scattered. Mutant: the other way round."""
    names = {"tied": ["1f1b", "interleaved_zb", "zb_v", "dualpipe"]}
    if how == "fsdp":  # where no weight is on several ranks
        names = {"untied": ["1f1b", "interleaved_1f1b"], "frozen": ["1f1b"]}
        names |= {"frozen layers": ["interleaved_1f1b"]}
    for name, own in names.items():
        schedules = [make(schedule, 2, 3) for schedule in own]
        for wrong in ranks(4).run(sharded, TASKS[name], schedules, how, reference(TASKS[name])):
            assert not wrong, "\n".join(wrong)


def test_pairs_side_by_side_equal_one_device(ranks):
    """Without experts there is nothing to hand over for, and messages have another order."""
    check(ranks, "one step", [make("dualpipe_v", 2, 5), make("dualpipe", 2, 5)], paired=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero 2", "tensor"])
def test_pairs_with_other_strategies_equal_one_device(ranks, how):
    task, schedules = TASKS["tied"], [make("dualpipe_v", 2, 4), make("dualpipe", 2, 5)]
    for wrong in ranks(4).run(sharded, task, schedules, how, reference(task), True):
        assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------- mutants


def _mutant(task: Task, schedule, target, attribute: str, replacement) -> Outcome:
    original = getattr(target, attribute)
    setattr(target, attribute, replacement)
    try:
        return one(task, schedule)
    finally:
        setattr(target, attribute, original)


_last_input: list[Tensor] = []


def _other_input(x: Tensor, dy: Tensor, weight) -> Tensor:
    """The gradient of a weight from the input of whichever microbatch came last."""
    _last_input[:] = [x] if not _last_input or _last_input[0].shape != x.shape else _last_input
    return dy.flatten(0, -2).mT @ _last_input[0].flatten(0, -2)


MUTANTS = {
    "test_trap_15": (
        "1f1b",
        runtime.Pipeline,
        "_add_twins",
        own_alone,
        "gradient of step 0",
    ),
    "test_trap_09": (
        "1f1b",
        runtime.Pipeline,
        "_mark_parameters",
        no_copies,
        "gradient of step 0",
    ),
    "copies": ("dualpipe", runtime.Pipeline, "_add_twins", own_alone, "gradient of step 0"),
    "test_trap_25": ("zb_h1", split_backward, "split_linear", _other_input, "gradient of step 0"),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_parity_notices_what_is_left_out(ranks, mutant):
    """T15: tied embeddings not summed. T9: a copy counted twice in the norm. T25: W of another
    microbatch's input. And the two copies of the model not summed."""
    name, *how, says = MUTANTS[mutant]
    for outcome in ranks(2).run(_mutant, TASKS["tied"], make(name, 2, 3), *how):
        with pytest.raises(AssertionError, match=says):
            assert_parity(outcome, reference(TASKS["tied"]))


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
