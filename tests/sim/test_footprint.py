"""The closed form of memory: what is cut shrinks, and traced code holds as much."""

from dataclasses import replace

import pytest

from minipar.model.llama import PRESETS
from minipar.model.moe import MoEConfig
from minipar.sim import footprint, hardware, planner
from tests.sim.jobs import ANY, H100, PARTLY, held, job


def test_memory_shrinks_with_what_is_cut_and_computed_again():
    stages = [held(job(f"dp=8,zero={zero}")) for zero in range(4)]
    kept = [held(job(f"dp=8,checkpointing={how}")) for how in ("none", "selective", "full")]
    assert stages == sorted(stages, reverse=True) and kept == sorted(kept, reverse=True)
    one = job("dp=8,checkpointing=full")  # inputs of 31 layers, and all of the one at work
    again = 31 * 2 * 8192 * 4096 + sum(footprint.activations(one).values())
    assert footprint.memory(one)["activations"] == pytest.approx(again)
    state = footprint.memory(job("dp=8"))
    expected = 18 * PRESETS["llama-3-8b"].num_parameters
    assert sum(state[k] for k in ("weights", "gradients", "optimizer")) == pytest.approx(
        expected, rel=0.01
    )
    # Shards of ZeRO 3 are the masters; beside them two layers, and the head where the loss is.
    c = PRESETS["llama-3-8b"]
    whole = 2 * (2 * c.num_layer_parameters + c.vocab_size * c.hidden_size)
    state = footprint.memory(job("dp=8,zero=3,microbatches=2"))
    assert sum(state[k] for k in ("weights", "gradients", "optimizer")) == pytest.approx(
        16 * c.num_parameters / 8 + whole, rel=0.01
    )


def test_a_schedule_that_cannot_be_is_left_to_those_who_say_why():
    """A search has such plans among others. Mutant: all of it ends with an error."""
    one = job("pp=3,microbatches=6,schedule=dualpipe")
    assert held(one) > 0 and "even" in one.plan.problem(one.config)


@pytest.mark.parametrize("cut", ["", ",expert_tensor_parallel"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("moe", [replace(PARTLY, first_dense=0, every=1), PARTLY])
def test_all_ranks_together_have_the_parameters_of_the_model(moe, gated, cut):
    """Shared experts are whole where others are. Mutants: all layers as the last; three matrices of
    an expert without a gate; shared experts always cut."""
    c = replace(PRESETS["llama-3-8b"], moe=moe)
    one = job(f"tp=2,ep=4{cut}", config=c, gated=gated)
    layer, experts, shared, table = one.parameters
    parts = 2 if cut else 1  # of an expert
    found = c.num_layers * (2 * (layer - experts - shared) + parts * (4 * experts + shared))
    wide = sum(9 if moe.is_sparse(n) else 1 for n in range(c.num_layers)) * 14_336
    expected = c.num_parameters - (not gated) * c.hidden_size * wide
    assert found + 4 * table == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("word", "share"), [("", 1), ("sequence_parallel", 1 / 4)])
def test_whole_experts_keep_as_much_as_a_rank_has_tokens(word, share):
    """All of a sequence, or a part. Mutant: ranks of tp without parts keep a quarter each."""
    moe = replace(PRESETS["llama-3-8b"], moe=MoEConfig(8, 2, 14_336, num_shared=1))
    alone, cut, whole = (
        job(plan, config=moe)
        for plan in ("dp=4", f"tp=4,expert_tensor_parallel,{word}", f"tp=4,{word}")
    )
    kept = [footprint.activations(one)["mlp"] for one in (alone, cut, whole)]
    rows = 2 * 2 * 8192 * 2 * 4096  # of two experts, which a rank has whole where they are cut
    assert kept[1:] == pytest.approx([(kept[0] - rows) / 4 + rows, kept[0] * share])


@pytest.mark.parametrize("name", ["gpipe", "looped_bfs"])
def test_all_forwards_first_keep_the_logits_of_all(name):
    """In float32, beside what the loss takes while it runs; or in the type that it has them in.
    Mutants: those of one microbatch; all that a loss takes, of each."""
    plan = "pp=4,dp=2,microbatches=16,checkpointing=full,schedule="
    few, many = (footprint.memory(job(f"{plan}{n}")) for n in ("1f1b", name))
    each = 8192 * PRESETS["llama-3-8b"].vocab_size
    assert (few["logits"], many["logits"]) == (12 * each, (12 + 15 * 4) * each)
    fused = replace(ANY, logits=2)
    assert footprint.memory(job(f"{plan}{name}", software=fused))["logits"] == 16 * 2 * each


def test_a_plan_may_fill_what_torch_and_nccl_leave_of_a_small_device():
    """Mutants: a share of all memory alone; what is usable alone, though it is crowded."""
    large = H100.device
    assert footprint.room(large) == footprint.HEADROOM * large.memory < large.usable_memory()
    small = replace(large, memory=8e9)
    assert footprint.room(small) == small.usable_memory() < footprint.HEADROOM * small.memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "microbatch"),
    [
        ("dp=8,zero=3", 1),
        ("dp=4,tp=2,zero=1,sequence_parallel,microbatches=2", 1),
        ("dp=8,zero=1,checkpointing=full", 1),
        ("dp=8,zero=3,checkpointing=selective", 8),
        ("pp=4,dp=2,microbatches=4", 1),
        ("dp=8,checkpointing=full", 2),
        ("pp=4,dp=2,microbatches=8,schedule=zb_h1,checkpointing=full", 4),
        ("pp=4,dp=2,microbatches=8,schedule=zb_v", 4),
        ("pp=4,dp=2,microbatches=8,schedule=gpipe,checkpointing=full", 1),
    ],
)
def test_memory_of_minipar_is_that_of_its_traced_code(plan, microbatch):
    """Mutants: masters left out; activations of a pipeline once; a buffer of ZeRO 1's gradients;
    put-off weight gradients hold nothing; logits of a microbatch alone, though all are there."""
    options = dict(config=PRESETS["llama-3.2-1b"], software=hardware.software("minipar"), seq=2048)
    one = job(f"{plan},precision=bf16", microbatch=microbatch, **options)
    peak = planner.simulate(one).peak_bytes
    assert held(one) == pytest.approx(peak, rel=0.2)
