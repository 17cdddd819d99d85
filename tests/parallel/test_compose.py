"""Plans: read, refused by a rule, explained; parity is in tests/law/."""

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.model.llama import IGNORE_INDEX, Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.parallel import compose
from minipar.parallel.explain import explain
from minipar.parallel.plan import Plan, meshes
from minipar.train.step import train_step
from tests.law import models
from tests.law.harness import Task, make_optimizer
from tests.law.plans import Case
from tests.on_ranks import on_ranks

TIED = LlamaConfig(64, 16, 24, num_layers=4, num_heads=4, num_kv_heads=2, tie_embeddings=True)
UNTIED = replace(TIED, tie_embeddings=False)
ODD = replace(TIED, vocab_size=61)
TWELVE = replace(TIED, num_heads=12, num_kv_heads=4, head_dim=4)
MIXED = replace(TIED, moe=MoEConfig(6, 2, 9))
SEATED = replace(TIED, moe=MoEConfig(6, 2, 9, capacity_factor=1.0))


# ---------------------------------------------------------------------- text
@pytest.mark.parametrize(
    "text, plan",
    [
        ("dp=2,tp=2", Plan(dp=2, tp=2)),
        (" pp=2 , schedule=zb_v, microbatches=4", Plan(pp=2, schedule="zb_v", microbatches=4)),
        ("tp=2,sequence_parallel", Plan(tp=2, sequence_parallel=True)),
        ("tp=2,sequence-parallel=false,zero=3", Plan(tp=2, zero=3)),
        ("", Plan()),
    ],
)
def test_a_plan_is_read_and_printed(text, plan):
    assert Plan.parse(text) == plan
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["dp", "dp=2,dp=2", "zp=2", "dp=x", "dp=-1", "zero", "schedule"])
def test_what_is_no_plan_is_refused_and_named(text):
    with pytest.raises(ValueError, match=text.split(",")[-1]):
        Plan.parse(text)


def test_meshes_are_all_there_are():
    assert len(list(meshes(4))) == 15 and len(list(meshes(8))) == 35
    assert {"pp": 1, "dp": 2, "cp": 1, "ep": 1, "tp": 3} in list(meshes(6))
    assert Plan(tp=2, pp=2).mesh_sizes() == {"pp": 2, "tp": 2}  # ranks of tp are neighbours
    assert Plan().mesh_sizes() == {"dp": 1}


# ---------------------------------------------------------------------- what cannot be
REFUSED = [
    ("dp=0", TIED, "dp=0 must be 1 or more"),
    ("tp=3", TIED, "tp=3 does not divide num_heads=4; use one of 1, 2, 4"),
    ("tp=4", replace(TIED, intermediate_size=22), "does not divide intermediate_size=22; use "),
    ("tp=3", TWELVE, "tp=3 neither divides num_kv_heads=4 nor is a multiple of it"),
    ("dp=2,zero=4", TIED, "zero=4 is not one of 0, 1, 2, 3"),
    ("dp=2,sequence_parallel", TIED, "needs several ranks of tp, and there is one: tp=1"),
    ("tp=2,tp_overlap", TIED, "set both"),
    ("dp=2,context=ulysses", TIED, "there is one: cp=1"),
    ("cp=4,tp=2,context=ulysses", TIED, "cp=4 does not divide heads_per_rank=2; use one of 1, 2"),
    ("dp=2,schedule=zb_v", TIED, "needs several ranks of pp"),
    ("pp=8", TIED, "8 stages, each with a layer, and there are num_layers=4"),
    ("dp=2,tp=2,zero=1,sequence_parallel", ODD, "pad the vocabulary to 62 words"),
    ("dp=2,pp=2,zero=3", TIED, "tie_embeddings=False (this is True)"),
    ("dp=2,pp=2,zero=3,schedule=zb_h1", UNTIED, "a schedule of F and B"),
    ("pp=2,ep=2,dispatch=paired", MIXED, "schedule=1f1b is not made of pairs; use dualpipe"),
    ("pp=2,schedule=dualpipe_v,dispatch=paired", MIXED, "with ep=1 none do"),
    ("ep=4", MIXED, "ep=4 does not divide num_experts=6; use one of 1, 2, 3, 6"),
    ("ep=2", TIED, "spreads experts, and this Llama has none"),
    ("ep=2,tp=2,sequence_parallel,experts_over_tp", MIXED, "ep+tp=4 does not divide num_"),
    ("ep=2,tp=2,experts_over_tp", MIXED, "needs other tokens on each rank of tp"),
    ("dp=2,dispatch=halves", MIXED, "with ep=1 none do"),
    ("pp=2,schedule=dualpipe,microbatches=4", MIXED, "two copies of every router"),
    ("tp=2,expert_tensor_parallel", TIED, "tp=2 cuts experts, and this Llama has "),
    ("ep=3,tp=2,expert_tensor_parallel", MIXED, "tp=2 does not divide expert_size=9; use one of"),
    ("ep=3,expert_nodes=3", MIXED, "no other dispatch uses them"),
    ("ep=2,dispatch=padded", MIXED, "fills up to a capacity; capacity_factor=None has none"),
    ("cp=2,ep=2", SEATED, "and 2 ranks hold pieces of one; use cp=1 without sequence_parallel"),
    ("ep=3,dispatch=hierarchical,expert_nodes=2", MIXED, "nodes=2 does not divide ep=3"),
]


@pytest.mark.parametrize("text, config, says", REFUSED, ids=[text for text, *_ in REFUSED])
def test_what_cannot_be_is_refused_by_its_rule(text, config, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        Plan.parse(text).check(config)


@pytest.mark.parametrize(
    "text, config",
    [
        ("tp=4", TIED),
        ("dp=2,tp=2,zero=3,sequence_parallel", TIED),
        ("dp=2,pp=2,zero=3,schedule=gpipe", UNTIED),
        ("pp=4,schedule=dualpipe,zero=2,microbatches=8", TIED),
        ("dp=2,pp=2,schedule=interleaved_1f1b,stages_per_rank=2", TIED),
        ("tp=2,zero=1", ODD),  # no two ranks share a key head, so no gradient is summed over tp
    ],
)
def test_what_can_be_is_not_refused(text, config):
    Plan.parse(text).check(config)


@on_ranks(2)
def test_another_mesh_is_refused_before_the_first_collective():
    with timeline.record() as recorded, pytest.raises(ValueError, match="for the mesh {'tp': 2}"):
        compose.apply(Llama(TIED), Mesh(dp=2), Plan(tp=2), make_optimizer)
    assert not recorded.spans


def _composed(plan: Plan) -> compose.Composed:
    model = models.llama(0, num_layers=4, vocab_size=64, max_seq_len=8)
    return compose.apply(model, Mesh(**plan.mesh_sizes()), plan, make_optimizer)


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,zero=3",
        "tp=2,sequence_parallel,tp_overlap",
        "cp=2,checkpointing=full",
        "ep=2",
        "pp=2,microbatches=4,schedule=zb_h1",
    ],
)
@on_ranks(2)
def test_what_is_dropped_is_gone(text):
    """Mutant: a hook on a parameter that holds what has this parameter."""
    plan = Plan.parse(text)
    moe = MoEConfig(4, 2, 8) if plan.ep > 1 else None

    def train() -> list[weakref.ref]:
        model = models.llama(0, num_layers=4, vocab_size=64, moe=moe)
        strategy = compose.apply(model, Mesh(**plan.mesh_sizes()), plan, make_optimizer)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        batch = [strategy.shard((tokens, tokens))] * plan.microbatches
        train_step(strategy.model, [strategy], strategy.optimizer, batch, strategy.axis)
        return [*map(weakref.ref, (strategy, strategy.optimizer, *strategy.model.parameters()))]

    left = train()
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


def _sharded(text: str, seq_len: int) -> tuple[torch.Tensor, ...]:
    composed = _composed(Plan.parse(text))
    tokens = torch.arange(seq_len).expand(3, seq_len)
    with pytest.raises(ValueError, match="do not divide 5 tokens; pad them to 8"):  # yourself
        composed.shard((tokens[:, :5], tokens[:, :5], torch.arange(5)))
    return composed.shard((tokens, tokens + 1))


def test_sequences_are_padded_with_what_does_not_count(ranks):
    """Mutants: padding that has a target; positions of the shard, from 0 on every rank."""
    first, second = ranks(2).run(_sharded, "cp=2", 6)
    for (inputs, targets, positions), own in ((first, [0, 1, 6, 7]), (second, [2, 3, 4, 5])):
        assert positions.tolist() == own and inputs.shape == targets.shape == (3, 4)
        assert inputs[0].tolist() == [n if n < 6 else 0 for n in own]
        assert targets[2].tolist() == [n + 1 if n < 6 else IGNORE_INDEX for n in own]


@pytest.mark.parametrize("text", ["pp=2", "cp=2"])
@on_ranks(2)
def test_sequences_longer_than_the_model_allows_are_refused_on_every_rank(text):
    """Where tokens are cut, positions are given, and no model looks at their number."""
    composed = _composed(Plan.parse(text))
    with pytest.raises(ValueError, match="a sequence of 12 tokens is longer than max_seq_len=8"):
        composed.shard((torch.zeros(1, 12, dtype=torch.int64),) * 2)


# ---------------------------------------------------------------------- what comes of it
def test_a_plan_explains_itself():
    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,sequence_parallel,microbatches=4")
    explained = explain(plan, TIED)
    rows = {row.name: row for row in explained.rows}
    assert list(rows) == [name for name, _ in models.llama(0, num_layers=4).named_parameters()]
    table = rows["model.embed_tokens.weight"]  # cut by words; on the first and the last stage
    assert table.full_shape == (64, 16) and table.shape == (32, 16) and table.stage_ranks == (0, 1)
    assert table.summed == {"dp": "reduce-scatter", "pp": "exchange"}
    assert table.sent == {"dp": 32 * 16 * 4 // 2, "pp": 32 * 16 * 4}
    norm = rows["model.layers.3.input_layernorm.weight"]
    assert norm.shape == (16,) and norm.stage_ranks == (1,) and norm.cut_over == ("pp",)
    assert norm.summed == {"dp": "reduce-scatter", "tp": "all-reduce"}
    assert norm.sent == {"dp": 32, "tp": 32}  # of its 64 bytes; half of it, there and back
    assert norm.num_bytes == {"weights": 64, "gradients": 64, "optimizer": 64}
    text = str(explained)
    assert len(text.splitlines()) == 2 + 1 + 9 + 9 + 1  # title and header; per stage, a layer
    assert "model.layers.2-3.self_attn.q_proj.weight" in text
    assert "dp (reduce-scatter), tp (all-reduce)" in text
    with pytest.raises(ValueError, match="does not divide num_heads"):
        explain(replace(plan, tp=3), TIED)


def _by_rank(text: str, tied: bool) -> tuple[int, dict, dict, list]:
    """What a rank has, and what it sends in the second step."""
    plan = Plan.parse(text)
    task = Task(Case(plan, tied).build, num_sequences=12, microbatches=plan.microbatches)
    mesh = Mesh(**plan.mesh_sizes())
    model = task.build(mesh.rank).double()
    composed = compose.apply(model, mesh, plan, make_optimizer)
    has = {
        name: (tuple(p.shape), tuple(axis.name for axis in getattr(p, "shard_axes", ())))
        for name, p in model.named_parameters()
    }
    for step in range(2):
        batch = [composed.shard(m) for m in task.microbatches_of(step, mesh.dp.rank, mesh.dp.size)]
        with timeline.record() as recorded:
            train_step(model, [composed], composed.optimizer, batch, composed.axis)
            if hasattr(composed.optimizer, "synchronize"):
                composed.optimizer.synchronize()
    spans = [(span.axis, span.num_bytes) for span in recorded.spans if span.kind == "comm"]
    return mesh.pp.rank, has, recorded.bytes_by_axis(), spans


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, tied",
    [
        ("dp=2,tp=2,sequence_parallel", True),
        ("dp=2,pp=2,microbatches=3", True),
        ("dp=2,pp=2,zero=1,microbatches=3,schedule=zb_h1", False),
        ("dp=2,tp=2,zero=2,microbatches=3", False),
        ("tp=4", False),
    ],
)
def test_trap_17_a_plan_says_what_ranks_hold_and_send(ranks, text, tied):
    """Mutants: gradients that are reduced after every microbatch; copies counted as pieces."""
    plan = Plan.parse(text)
    config = replace(TIED, tie_embeddings=tied)
    explained = explain(plan, config, torch.float64)
    rows = {row.name: row for row in explained.rows}
    for stage, has, sent, spans in ranks(4).run(_by_rank, text, tied):
        own = {name for name, row in rows.items() if stage in row.stage_ranks}
        for name, (shape, axes) in has.items():
            name = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
            own.remove(name)
            assert axes == rows[name].cut_over, name
            assert plan.tp > 1 or shape == rows[name].shape, name
        assert not own
        promised = explained.sent_by(stage)
        for axis in ("tp", "pp"):  # among all that is sent there for other reasons
            if axis in promised:
                assert (axis, promised[axis]) in spans
        if "dp" in promised:
            weights = sum(row.num_bytes["weights"] for row in rows.values() if row.name in has)
            expected = promised["dp"] + (weights // 2 if plan.zero else 0)
            assert expected <= sent["dp"] <= 1.12 * expected, text
