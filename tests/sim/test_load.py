"""Experts that get more tokens than others: the rank that has them does more, and all wait."""

from dataclasses import replace

import pytest

from minipar.emulate.link import Link
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.plan import Plan
from minipar.sim import cost, emulate, footprint, load, planner
from minipar.sim.asked import load_of
from minipar.sim.planner import PlanConfig
from minipar.sim.replay import replay
from minipar.sim.trace import trace
from minipar.sim.tracer import Launch

MOE = MoEConfig(8, 2, 64, num_shared=1)
CONFIG = LlamaConfig(64, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, moe=MOE)
UNEVEN = (1, 1, 1, 1, 5, 3, 2, 2)  # of 4 ranks, the third has twice the mean


def traced(plan, experts=()):
    return trace(CONFIG, Plan.parse(plan), seq_len=64, experts=experts)


def rows(step):
    """Bytes of the first all-to-all: sent, and what arrives."""
    found = [e for e in step.events() if type(e) is Launch and e.verb == "all_to_all"]
    return found[0].num_bytes, found[0].arriving


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "factor"),
    [("ep=4", 2.0), ("ep=4,dispatch=halves", 2.0), ("dp=2,ep=2,tp=2,expert_tensor_parallel", 1.5)],
)
def test_the_busiest_rank_is_traced(plan, factor):
    """It computes the rows that are its own. Mutants: the first rank; every expert gets more."""
    even, alike, uneven = (traced(plan, x) for x in ((), (3,) * 8, UNEVEN))
    assert load.busiest(UNEVEN, Plan.parse(plan).ep)[1] == factor
    assert even.ranks[0].flops == alike.ranks[0].flops
    assert rows(alike.ranks[0])[0] == rows(alike.ranks[0])[1] == rows(even.ranks[0])[0]
    cut = 2 if "tp" in plan else 1
    experts = 3 * 6 * 64 * 64 * 64 * MOE.top_k * CONFIG.num_layers // cut  # both directions
    assert uneven.ranks[0].flops - even.ranks[0].flops == (factor - 1) * experts
    assert rows(uneven.ranks[0])[1] == factor * rows(even.ranks[0])[0]
    held = [sum(found.ranks[0].at_peak().values()) for found in (even, uneven)]
    assert held[0] < held[1]


@pytest.mark.slow
def test_all_wait_for_what_arrives_at_the_busiest_rank():
    """Of a slow network: both trips take twice as long. Mutant: what that rank sends alone, which
    is less there, as it keeps more."""
    slow = emulate.Emulated(emulate.device("h100"), Link("slow", 0.0, 1e6))
    even, uneven = (replay(traced("ep=4", x), slow) for x in ((), UNEVEN))
    trips = [
        sum(s.duration for s in step.timeline.select(rank=0, kind="comm") if "to_all" in s.name)
        for step in (even, uneven)
    ]
    assert trips[1] == pytest.approx(2 * trips[0], rel=0.01)
    # Nothing else travels meanwhile: axes of all ranks have one process group.
    assert uneven.seconds - even.seconds == pytest.approx(trips[0], rel=0.01)


def test_the_closed_form_takes_the_load_of_the_busiest_rank():
    """Time of trips and of experts, and what they keep; nothing where all ranks have all experts,
    or fill up to a capacity."""
    model = PlanConfig(model="mixtral-8x7b", hardware="h100-ndr", gpus=8)
    base = planner.base_of(model)
    uneven = planner.base_of(PlanConfig(**{**vars(model), "experts": "1,1,1,1,5,3,2,2"}))
    assert uneven.experts == UNEVEN and not base.experts

    def parts(job, plan):
        job = replace(job, plan=Plan.parse(plan))
        return cost.seconds(job), footprint.memory(job)

    (time, held), (more, fuller) = (parts(job, "ep=8,microbatches=8") for job in (base, uneven))
    assert 2.2 < more["ep"] / time["ep"] < 2.5  # but for latency
    assert more["compute"] > 1.5 * time["compute"] and fuller["activations"] > held["activations"]
    for plan in ("dp=8", "ep=8,dispatch=padded"):
        assert parts(base, plan) == parts(uneven, plan)


@pytest.mark.slow
def test_more_ranks_than_experts_are_refused_with_a_load_as_without():
    """8 experts on 16 ranks of ep and tp. Mutant: they are priced first, and a rank has no expert;
    so no plan is found, nor a change with which one fits."""
    config = PlanConfig(model="mixtral-8x7b", gpus=16, global_batch=64, seq=4096, experts="zipf=1")
    assert planner.answer(config)[1]
    with pytest.raises(planner.NothingFits, match="would do"):
        planner.answer(replace(config, gpus=8, hardware="a100-40", fix="checkpointing=full,cp=1"))


def test_a_load_is_drawn_or_given_or_refused():
    found = load.skewed(64, 1.0)
    assert sorted(found)[-2:] == [0.5, 1.0] and found != load.skewed(64, 1.0, seed=1)
    assert load.busiest(load.skewed(64, 0.0), 8)[1] == 1 < load.busiest(found, 8)[1] < 8
    assert load_of("zipf=1", CONFIG) == load.skewed(8, 1.0) and load_of("", CONFIG) == ()
    for text, match in (
        ("1,2", "2 experts.* has 8"),
        ("1,1,1,1,1,1,1,-1", "0 tokens or more"),
        ("0,0,0,0,0,0,0,0", "all together some"),
        ("zipf=x", "write numbers"),
        ("nan,1,1,1,1,1,1,1", "0 tokens or more"),
    ):
        with pytest.raises(ValueError, match=match):
            load_of(text, CONFIG)
    with pytest.raises(ValueError, match="has 0 experts"):
        load_of("1,2", PRESETS["llama-3-8b"])
    with pytest.raises(ValueError, match="one trip"):
        traced("ep=4,dispatch=hierarchical,expert_nodes=2", UNEVEN)
