"""Plans equal one device: all strategies together, every schedule, experts, from plan to plan."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import get_args

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.emulate import strict
from minipar.model.moe import MoEConfig
from minipar.parallel import compose, expert
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.plan import Plan, meshes
from minipar.train.step import train_step
from tests.law import models
from tests.law.harness import Outcome, Task, assert_parity, make_optimizer
from tests.law.plans import (
    FOUR,
    SIX,
    Case,
    case,
    check,
    expected_of,
    legal_plans,
    mixture,
    sample,
    train,
)


# ---------------------------------------------------------------------- equal to one device
@cache
def sampled() -> list[Case]:
    return sample(list(legal_plans(4)))


CHUNKS = 6


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_two_features_together_equal_one_device(ranks, chunk):
    """Losses, tokens, norms to the bit on all ranks; gradients, weights; copies that stay equal."""
    check(ranks, sampled()[chunk::CHUNKS])


@pytest.mark.slow
def test_the_sample_has_all_that_there_is():
    """Mutants: a rule that refuses too much; a sample without a schedule, or a mesh."""
    seen = set().union(*(found.pairs() for found in sampled()))
    assert {name for kind, name in (p for p in seen if p[0] == "schedule")} == set(SCHEDULES)
    for axis in ("dp", "tp", "pp", "cp"):
        for stage in range(4):
            assert ((axis, 4), ("zero", stage)) in seen and ((axis, 2), ("zero", stage)) in seen
    assert (("sequence_parallel", True), ("tied", True)) in seen
    assert len(sampled()) <= 60


EIGHT = [
    case("dp=2,tp=2,pp=2,zero=1,sequence_parallel,microbatches=3"),
    case("pp=2,cp=2,tp=2,sequence_parallel,schedule=zb_v", tied=False),
    case("dp=2,cp=2,tp=2,zero=3,checkpointing=full", vocab_size=61),
    case("pp=4,cp=2,zero=2,schedule=dualpipe,microbatches=4"),
]


@pytest.mark.slow
def test_eight_ranks_equal_one_device(ranks):
    check(ranks, EIGHT)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("chunk", range(12))
def test_all_legal_plans_equal_one_device(ranks, num_ranks, chunk):
    cases = list(legal_plans(num_ranks))[chunk::12]
    for start in range(0, len(cases), 10):
        check(ranks, cases[start : start + 10])


@pytest.mark.slow
@pytest.mark.parametrize("pp, microbatches", [(2, 1), (2, 3), (3, 5), (4, 5)])
def test_every_schedule_equals_one_device(ranks, pp, microbatches):
    """More microbatches than sequences, too: some are padding only."""
    names = [name for name in SCHEDULES if name != "dualpipe" or pp % 2 == 0]
    plans = [Plan(pp=pp, schedule=name, microbatches=microbatches) for name in names]
    check(ranks, [Case(plan, num_layers=8 if pp > 2 else 4) for plan in plans])


def test_a_plan_without_communication_is_not_equal(ranks):
    """The mutant of all tests here."""
    for text in ("pp=2,microbatches=2", "dp=2,zero=1"):
        chosen = case(text, tied=False)
        for found in ranks(2).run(train, chosen, False, True):
            with pytest.raises(AssertionError, match="of step 0"):
                assert_parity(found, expected_of(chosen))


# ---------------------------------------------------------------------- experts
PAIRED = "pp=2,ep=2,schedule=dualpipe_v,dispatch=paired"
FOLDED = [
    "dp=2,ep=2",
    "ep=4,dispatch=hierarchical,expert_nodes=2",
    "ep=4,zero=1,dispatch=halves",
    "dp=2,ep=2,zero=2,microbatches=3",
    "dp=2,ep=2,zero=3,dispatch=overlapped",
    "cp=2,ep=2,zero=1",
    "cp=2,ep=2,context=ulysses",
    "ep=2,tp=2",
    "ep=2,tp=2,sequence_parallel,zero=1",
    "ep=2,tp=2,expert_tensor_parallel",
    "ep=2,tp=2,expert_tensor_parallel,sequence_parallel,zero=2",
    "ep=2,tp=2,sequence_parallel,experts_over_tp",
    "tp=4,sequence_parallel,experts_over_tp,dispatch=hierarchical,expert_nodes=2",
    "dp=2,tp=2,sequence_parallel,experts_over_tp,zero=3,dispatch=overlapped",
    "cp=2,tp=2,sequence_parallel,tp_overlap,experts_over_tp,zero=2",
    "pp=2,tp=2,sequence_parallel,experts_over_tp,schedule=zb_v,dispatch=halves,microbatches=2",
    "pp=2,ep=2,schedule=zb_v,zero=2,microbatches=2",
    "pp=2,ep=2,zero=3,checkpointing=full,dispatch=halves,microbatches=2",
    f"{PAIRED},zero=1,microbatches=4",
    # A forward again, with dispatches of its own, inside of the backward of a pair:
    f"{PAIRED},zero=2,checkpointing=full,microbatches=3",
]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(5))
def test_experts_folded_with_all_else(ranks, chunk):
    """The balance is of each sequence, so neither cuts nor microbatches may change it."""
    check(ranks, [mixture(text, moe=FOUR) for text in FOLDED[chunk::5]])


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 3])
def test_experts_alone(ranks, ep):
    """Several experts on each rank; balance over the batch of all ranks."""
    kinds = "gather", "all_to_all", "overlapped", "halves"
    check(ranks, [mixture(f"ep={ep},dispatch={kind}", moe=SIX, num_layers=3) for kind in kinds])


WITH_CAPACITY = [
    "dp=2,ep=2,dispatch=padded,microbatches=2",
    "ep=4,zero=3",
    "dp=4",
    "ep=2,tp=2,expert_tensor_parallel,dispatch=padded",
    "pp=2,ep=2,dispatch=halves,microbatches=2",
    "dp=2,pp=2,zero=3,microbatches=4",
    "pp=2,ep=2,zero=3,dispatch=padded,checkpointing=full,microbatches=2",
]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(2))
def test_a_capacity_drops_what_one_device_drops(ranks, chunk):
    """Each sequence has room of its own, wherever it is. Mutant: room for all that a rank has."""
    moe = replace(FOUR, capacity_factor=0.75)
    check(ranks, [mixture(text, moe=moe) for text in WITH_CAPACITY[chunk::2]])


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_every_legal_plan_of_experts_on_four_ranks(ranks):
    flags = "experts_over_tp", "sequence_parallel", "expert_tensor_parallel"
    for moe in (FOUR, replace(FOUR, capacity_factor=0.75)):
        config, plans = Case(Plan(), tied=False, vocab_size=62, moe=moe).config, []
        for sizes, context, *options in itertools.product(
            meshes(4),
            ("ring", "ulysses"),
            range(4),
            get_args(expert.Dispatch),
            *[(False, True)] * len(flags),
        ):
            words = dict(zip(("zero", "dispatch", *flags), options, strict=True))
            words["expert_nodes"] = 2 if words["dispatch"] == "hierarchical" else 1
            if words["dispatch"] == "paired":
                words["schedule"] = "dualpipe_v"
            plan = Plan(**sizes, **words, context=context, microbatches=4 if sizes["pp"] > 1 else 1)
            if plan.problem(config) is None:
                plans.append(Case(plan, tied=False, vocab_size=62, moe=moe))
        assert len(plans) > 100
        for start in range(0, len(plans), 10):
            check(ranks, plans[start : start + 10])


# ---------------------------------------------------------------------- no race
STRICT = [
    case("pp=4,microbatches=4"),
    case("pp=2,dp=2,zero=1,microbatches=4,schedule=zb_h1"),
    mixture("dp=2,ep=2,dispatch=overlapped", moe=FOUR),
]


def watched(case: Case) -> Outcome:
    with strict.watching():
        return train(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", STRICT, ids=str)
def test_has_no_race(ranks, case):
    """On the strict link a result that is used early, or a buffer that is touched, raises."""
    for found in ranks(4, "link").run(watched, case):
        assert_parity(found, expected_of(case))


@pytest.mark.slow
def test_trap_12_norms_are_summed_over_tp_wherever_their_gradients_lie(ranks):
    """In pieces of the optimizer, and in shards. Mutant: a sum over what is not there."""
    check(ranks, [case(f"dp=2,tp=2,sequence_parallel,zero={stage}") for stage in (1, 3)])


# ---------------------------------------------------------------------- from plan to plan
JOURNEY = [
    "dp=4",
    "tp=2,pp=2,schedule=zb_v,microbatches=2",
    "dp=1",
    "dp=2,cp=2,zero=3",
    "dp=2,tp=2,zero=1,sequence_parallel",
    "dp=2,pp=2,zero=2,schedule=interleaved_1f1b,microbatches=2",
    "tp=4",
    "dp=1,zero=3",
]


MIXED_JOURNEY = [
    "ep=2,zero=1",
    "ep=2,cp=2,zero=2",
    "dp=2,zero=1",
    "dp=2,ep=2,zero=1",
    "ep=2,tp=2,zero=1,sequence_parallel,experts_over_tp",
    "ep=2,zero=3",
    "ep=4,zero=2",
    "dp=1",
]
"""Ranks that have the same experts are fewer than those that have the same of all else."""


def leg(plan: Plan, task: Task, step: int, state: dict | None) -> dict:
    """One step by `plan`, from what another plan has left; what this one leaves."""
    mesh = Mesh(**plan.mesh_sizes())
    torch.manual_seed(1000 + mesh.rank)
    model = task.build(mesh.rank).double()
    composed = compose.apply(model, mesh, plan, make_optimizer)
    if state is not None:
        composed.load_full_state_dict(state["weights"])
        composed.load_full_optimizer_state(state["optimizer"])
    readers = mesh.joint("dp", "ep")
    whole = replace(task, microbatches=plan.microbatches)
    batch = [composed.shard(m) for m in whole.microbatches_of(step, readers.rank, readers.size)]
    result = train_step(
        model, [composed], composed.optimizer, batch, composed.axis, max_norm=task.max_norm
    )
    left = dict(weights=composed.full_state_dict(), optimizer=composed.full_optimizer_state())
    return left | dict(loss=result.loss.item(), norm=result.grad_norm.item())


def serial_states(task: Task, steps: int) -> Iterator[dict]:
    """The state of torch's own optimizer on one device, after each step."""
    model = task.build(0).double()
    optimizer = make_optimizer(model)
    for step in range(steps):
        batch = task.microbatches_of(step, 0, 1)
        result = train_step(model, [], optimizer, batch, Mesh().dp, max_norm=task.max_norm)
        left = dict(weights=model.state_dict(), optimizer=optimizer.state_dict())
        yield left | dict(loss=result.loss.item(), norm=result.grad_norm.item())


def assert_same_state(found: dict, expected: dict) -> None:
    for what in ("loss", "norm", "weights"):
        torch.testing.assert_close(found[what], expected[what], rtol=1e-9, atol=1e-11)
    ours, theirs = found["optimizer"], expected["optimizer"]
    groups = [dict(group) for group in ours["param_groups"]]
    named = [name for group in groups for name in group.pop("param_names")]
    assert groups == theirs["param_groups"] and set(named) <= expected["weights"].keys()
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-8, atol=1e-13)


def travel(ranks, task: Task, journey: list[str]) -> None:
    """A step by each plan, from what the one before has left; as on one device."""
    state = None
    for step, expected in enumerate(serial_states(task, len(journey))):
        plan = Plan.parse(journey[step])
        if plan.num_ranks == 1:
            states = [leg(plan, task, step, state)]
        else:
            states = ranks(plan.num_ranks).run(leg, plan, task, step, state)
        for state in states:
            assert_same_state(state, expected)


also_untied = pytest.mark.parametrize(
    "tied", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)


@pytest.mark.slow
@also_untied
def test_a_run_goes_on_under_any_other_plan(ranks, tied):
    """A step by each of many plans is as many steps on one device; after each, weights and state of
    the optimizer are what torch's own would have.

    Mutants: moments of one stage only; a piece that another rank cut; moments of tied embeddings
    under two names; a count of steps that starts anew, which Adam's bias correction shows.
    """
    travel(ranks, Case(Plan(), tied=tied).task, JOURNEY)


@pytest.mark.slow
@also_untied
def test_trap_34_a_run_of_a_mixture_goes_on_under_any_other_plan(ranks, tied):
    """Mutant: moments are asked for among those that have the same experts, one rank perhaps."""
    experts = MoEConfig(4, 2, 12, balance="batch", balance_weight=0.1)
    build = partial(models.llama, moe=experts, tie_embeddings=tied, vocab_size=64)
    travel(ranks, Task(build, num_sequences=8, seq_len=8), MIXED_JOURNEY)
