"""Mistakes that spread experts invite, each refused: traps 24 to 34, and pairs of a pipeline."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from minipar.comm import calls
from minipar.comm.mesh import Mesh
from minipar.model.moe import MoEConfig, mixtures, routers
from minipar.parallel import ddp, expert, fsdp, zero
from minipar.parallel.compose import apply
from minipar.parallel.pipeline import pairs
from minipar.parallel.pipeline.actions import slots
from minipar.parallel.plan import Plan
from minipar.train.step import forward_backward, train_step
from tests.law import models
from tests.law.harness import (
    Outcome,
    Task,
    assert_parity,
    attach_plan,
    gradients_of_plan,
    make_optimizer,
    parallel,
    serial,
)
from tests.law.plans import FOUR, SIX, uneven


def nobody_but_two(model: nn.Module) -> None:
    """All tokens choose the first two experts: all others, and their ranks, get none."""
    for _, router in routers(model):
        router._choose = lambda scores: torch.arange(2).expand(len(scores), 2)


def task_of(moe: MoEConfig, microbatches: int = 1, fine_tune: Callable = uneven, **changes) -> Task:
    shape = dict(tie_embeddings=False, vocab_size=62) | changes
    build = partial(models.llama, moe=moe, **shape)
    return Task(build, steps=2, microbatches=microbatches, fine_tune=fine_tune)


@cache
def expected(moe: MoEConfig, fine_tune: Callable, changes: tuple) -> Outcome:
    return serial(task_of(moe, fine_tune=fine_tune, **dict(changes)))


def train(plan: Plan, task: Task, **options) -> Outcome:
    plug = partial(attach_plan, plan=plan)
    return parallel(task, plan.mesh_sizes(), plug, gradients=gradients_of_plan, **options)


def run(
    ranks, text: str, moe: MoEConfig = FOUR, fine_tune: Callable = uneven, mute=False, **changes
) -> list[Outcome]:
    """Raise `AssertionError` unless all ranks of a plan train as one device."""
    plan = Plan.parse(text)
    if plan.pp > 1:
        changes["num_layers"] = 4
    task = task_of(moe, plan.microbatches, fine_tune, **changes)
    found = ranks(plan.num_ranks).run(partial(train, plan, task, mute=mute))
    for outcome in found:
        assert_parity(outcome, expected(moe, fine_tune, tuple(changes.items())))
    return found


@pytest.mark.slow
def test_the_balance_of_a_batch_does_not_hang_on_the_schedule(ranks):
    """A pipeline begins microbatches before others end: each is balanced by itself, over all ranks.

    Mutant: counts of the microbatches so far are added.
    """
    task = task_of(replace(FOUR, balance="batch"), 4, num_layers=4)
    run(ranks, "dp=2,ep=2", replace(FOUR, balance="batch"))
    plain, piped = (
        ranks(size).run(partial(train, Plan.parse(f"dp=2,microbatches=4{more}"), task))
        for size, more in ((2, ""), (4, ",pp=2"))
    )
    for outcome in piped:
        assert_parity(outcome, plain[0])


def test_without_communication_nothing_is_equal(ranks):
    """The mutant of all tests above."""
    with pytest.raises((AssertionError, RuntimeError)):
        run(ranks, "ep=2", mute=True)


# ---------------------------------------------------------------------- pairs of a pipeline
def _turns(plan: Plan, task: Task) -> int:
    """Train, and count how often one of a pair lets the other run."""
    take_turn, turns = pairs._Pair.take_turn, []

    def counted(pair: pairs._Pair, me: int) -> None:
        turns.append(me)
        take_turn(pair, me)

    with mock.patch.object(pairs._Pair, "take_turn", counted):
        train(plan, task)
    return len(turns)


@pytest.mark.slow
def test_turns_change_as_often_as_rows_travel(ranks):
    """A forward and a backward of a layer have four journeys; in no other plan there are turns."""
    plan = Plan.parse("pp=2,ep=2,schedule=dualpipe_v,dispatch=paired,microbatches=4")
    task = task_of(FOUR, plan.microbatches, num_layers=4)
    rows = plan.make_schedule().actions
    num_pairs = sum(len(slot) == 2 for slot in slots(rows[0], paired=True))
    assert min(ranks(4).run(_turns, plan, task)) >= 4 * num_pairs * task.steps > 0
    assert ranks(4).run(_turns, replace(plan, dispatch="overlapped"), task) == [0] * 4


# ---------------------------------------------------------------------- traps
@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2,ep=2", "ep=4"])
def test_trap_24_the_data_group_of_experts_is_not_the_dense_one(ranks, text):
    """Summed over the ranks with the same experts; over all data ranks, experts would be mixed."""
    run(ranks, text)


def _averaged(how: str) -> dict[str, Tensor]:
    """Gradients of the mean over two ranks of dp and two of ep, by a strategy that averages."""
    mesh = Mesh(dp=2, ep=2)
    model = models.llama(mesh.rank, moe=replace(FOUR, balance="none")).double()
    expert.apply(model, mesh.ep, copies=mesh.dp)
    data = mesh.joint("dp", "ep")
    if how == "fsdp":
        shards = fsdp.apply(model, data)
    elif how == "zero":
        optimizer = make_optimizer(model, zero.ShardedOptimizer, torch.optim.AdamW, data)
        shards = model.zero = zero.apply(model, data, optimizer=optimizer)
    else:
        shards = ddp.apply(model, data, version=how)
    own = Task(partial(models.llama), num_sequences=4).microbatches_of(0, data.rank, data.size)
    forward_backward(model, [shards], own, weigh=lambda loss: loss / 7, autocast=nullcontext)
    shards.finish_backward()
    return shards.full_gradients()


@pytest.mark.mostly_slow
@pytest.mark.parametrize("how", ["naive", "overlapped", "zero", "fsdp"])
def test_trap_26_a_mean_over_ranks_is_one_for_experts_too(ranks, how):
    """Gradients, which Adam would hide: over all data ranks, though few have copies."""
    model = models.llama(0, moe=replace(FOUR, balance="none")).double()
    batch = Task(partial(models.llama), num_sequences=4).microbatches_of(0, 0, 1)
    forward_backward(model, [], batch, weigh=lambda loss: loss / 28, autocast=nullcontext)
    for found in ranks(4).run(_averaged, how):
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)


def _norm_without_some(rank_without: int) -> tuple[float, float]:
    mesh = Mesh(dp=1, ep=4)
    model = models.llama(0, moe=FOUR).double()
    composed = apply(model, mesh, Plan(ep=4), make_optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if mesh.rank == rank_without:
        for _, moe in mixtures(model):
            for p in moe.experts.parameters():
                p.grad = None
    norm = composed.clip_grad_norm_(1e9)
    missing = sum(p.numel() for _, m in mixtures(model) for p in m.experts.parameters())
    return norm.item() ** 2, missing


def test_trap_27_the_norm_counts_each_expert_once_and_waits_for_nobody(ranks):
    """Also where a rank has no gradient of any expert."""
    numel = sum(p.numel() for p in models.llama(0, moe=FOUR).parameters())
    for squared, missing in ranks(4).run(_norm_without_some, 2):
        assert squared == pytest.approx(numel - missing, rel=1e-12)
    for squared, _ in ranks(4).run(_norm_without_some, 9):
        assert squared == pytest.approx(numel, rel=1e-12)


class _Waits(calls.Tap):
    """What a step does first: its forward, or wait for the call that it launched first."""

    def __init__(self) -> None:
        self.first, self.seen = None, []

    def begin(self, call: calls.Call) -> None:
        self.first = self.first or call

    def wait(self, call: calls.Call) -> None:
        self.seen += ["tokens are counted"] * (call is self.first)


def _step_of_a_mixture() -> list[str]:
    axis, waits, task = Mesh(dp=2).dp, _Waits(), task_of(FOUR)
    model = models.llama(0, moe=FOUR).double()
    data, optimizer = ddp.apply(model, axis, average=False), make_optimizer(model)
    model.register_forward_hook(lambda *_: waits.seen.append("forward"))
    with mock.patch.object(calls, "taps", [waits]):
        train_step(model, [data], optimizer, task.microbatches_of(0, axis.rank, 2), axis)
    assert all(router.loss_weight is None for _, router in routers(model))
    return waits.seen[:2]


def test_no_forward_waits_for_the_number_of_tokens(ranks):
    """Its call may have to wait for weights on their way. Mutants: balancing losses are weighed
    in the forward; the model is left with what cannot be copied or sent."""
    assert ranks(2).run(_step_of_a_mixture) == [["forward", "tokens are counted"]] * 2


def test_trap_28_the_gradient_of_a_router_is_whole(ranks):
    """That of the tokens of all ranks, through the weights, for each way to dispatch."""
    truth = expected(SIX, uneven, ())
    gates = [name for name in truth.before if name.endswith("gate.weight")]
    assert all(truth.gradients[0][name].abs().max() > 1e-4 for name in gates)
    for outcome in run(ranks, "ep=2,dispatch=gather", SIX):
        assert all(outcome.gradients[0][name] is not None for name in gates)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("text", ["ep=3", "ep=3,zero=1", "ep=3,dispatch=gather", "ep=3,zero=3"])
def test_trap_29_ranks_without_a_token_decay_their_weights_all_the_same(ranks, text):
    """Experts of two ranks are chosen by nobody: zero gradients, as on one device, not none."""
    for outcome in run(ranks, text, SIX, nobody_but_two):
        for name, gradient in outcome.gradients[-1].items():
            if ".experts." in name:
                assert gradient[2:].abs().max() == 0 < gradient[:2].abs().max()
                decayed = outcome.after[name][2:] / outcome.before[name][2:]
                torch.testing.assert_close(decayed, torch.full_like(decayed, (1 - 0.002) ** 2))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "text", ["dp=2", "ep=2,microbatches=3", "cp=2", "tp=2,sequence_parallel", "tp=2", "pp=2"]
)
def test_trap_30_the_balancing_loss_is_the_same_however_the_batch_is_cut(ranks, text):
    """And it flows: it dominates here."""
    heavy = replace(FOUR, balance_weight=500.0)
    light = expected(FOUR, uneven, (("num_layers", 4),))
    found = run(ranks, text, heavy, num_layers=4)[0]
    ours, theirs = (o.gradients[0]["model.layers.3.mlp.gate.weight"] for o in (found, light))
    assert (ours - theirs).abs().max() > 0.2 * theirs.abs().max()
