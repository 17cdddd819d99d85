"""Traces beside formulas, beside those without any short cut, and rank beside rank."""

import gc
import itertools
from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest

from minipar.comm import calls as comm_calls
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.plan import Plan
from minipar.sim import trace as traces
from minipar.sim import tracer
from minipar.sim.memory import llama_activations, model_state
from minipar.sim.trace import Actor, pretend, trace
from minipar.sim.tracer import Compute, Launch, Memory, Tracer
from tests.sim.jobs import flops, sent

CONFIG = LlamaConfig(256, 64, 128, num_layers=4, num_heads=4, num_kv_heads=2)


def events_of(rank, kind):
    """Launches, or computing of a kind, without names: ranks that are alike have other layers."""
    if kind is Launch:
        return [e for e in rank.events() if type(e) is Launch]
    computing = (e for e in rank.events() if type(e) is Compute)
    return [e._replace(name="") for e in computing if e.work.work == kind]


# ---------------------------------------------------------------------- short cuts change nothing
@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "pp=2,dp=2,zero=2,microbatches=6,precision=bf16,checkpointing=full",
        "pp=2,dp=2,zero=1,microbatches=6,schedule=interleaved_1f1b",
        "pp=2,tp=2,sequence_parallel,microbatches=6,schedule=zb_h1,checkpointing=selective",
        "pp=2,microbatches=8,schedule=dualpipe",
    ],
)
def test_what_is_repeated_is_what_all_do(text, monkeypatch):
    """One microbatch for many, and shapes from memory: nothing differs.

    Mutant: the second microbatch repeated in the place of the third.
    """
    config, plan = CONFIG, Plan.parse(text)
    short = trace(config, plan, seq_len=32)
    monkeypatch.setattr(traces, "DISTINCT", 1000)
    monkeypatch.setattr(
        tracer._Known, "again", lambda known, args, kwargs: known.op(*args, **kwargs)
    )
    whole = trace(config, plan, seq_len=32)
    for place in range(plan.pp):
        own, every = (found.ranks[place] for found in (short, whole))
        for kind in ("product", "attention", Launch):
            assert events_of(own, kind) == events_of(every, kind), (place, kind)
        moved = [sum(e.work.num_bytes for e in events_of(rank, "bytes")) for rank in (own, every)]
        held = [sum(rank.at_peak().values()) for rank in (own, every)]
        assert moved[0] == pytest.approx(moved[1], rel=0.01)
        assert held[0] == pytest.approx(held[1], rel=0.01)
        # Nothing is counted that does not go, however often a microbatch is repeated.
        memory = [e for e in own.events() if type(e) is Memory and e.holding.category]
        assert sum(e.num_bytes for e in memory) == 0


# ---------------------------------------------------------------------- beside closed forms
def test_flops_are_those_of_the_formula():
    """6 N per token, and attention, whose backward has five products for the two of a forward."""
    seq_len = 64
    found = trace(CONFIG, Plan.parse("dp=4,microbatches=2"), sequences=3, seq_len=seq_len)
    tokens = 2 * 3 * seq_len
    norms = 6 * CONFIG.hidden_size * (2 * CONFIG.num_layers + 1)  # parameters, but no product
    attention = 12 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * seq_len // 2
    products = CONFIG.flops_per_token(seq_len, causal=True) - attention - norms
    assert flops(found.ranks[0]) == tokens * (products + attention * 14 // 12)


@pytest.mark.slow
def test_experts_cost_the_same_flops_grouped_as_one_by_one():
    """As one grouped product, which bf16 takes, or as a loop, which float32 needs on "meta".

    Mutant: the grouped product counted by its bytes alone.
    """
    config = replace(CONFIG, moe=MoEConfig(4, 2, 32))
    grouped, loop = (
        trace(config, Plan.parse(f"dp=2,precision={precision}"), seq_len=64).ranks[0]
        for precision in ("bf16", "float32")
    )
    assert flops(grouped) == flops(loop)
    shapes = {e.work.shape for e in events_of(grouped, "product") if e.work.op == "_grouped_mm"}
    rows = 64 * 2 // 4  # of each of 4 experts, which are 64 wide and 32 in between
    assert (4, rows, 64, 64) in shapes and (4, 64, 32, rows) in shapes
    assert not any(e.work.op == "_grouped_mm" for e in events_of(loop, "product"))


@pytest.mark.slow
def test_a_norm_is_one_operation_as_on_a_gpu():
    """Mutant: spelled out, with float32 kept."""
    rank = trace(CONFIG, Plan.parse("dp=2,precision=bf16"), seq_len=64).ranks[0]
    names = [e.work.op for e in events_of(rank, "bytes")]
    norms = 2 * CONFIG.num_layers + 1
    both = "_fused_rms_norm", "_fused_rms_norm_backward"
    assert [names.count(name) for name in both] == [norms, norms]
    assert "rsqrt" not in names


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "dp=2",
        "ep=4",
        "tp=2",  # where the MLP on a rank is as wide as the stream
        "tp=4,sequence_parallel",
        "tp=4,sequence_parallel,tp_overlap",
        "pp=2,schedule=zb_h1,microbatches=2",
    ],
)
def test_selective_repeats_no_product(text):
    """Mutants: of experts, all; of overlapped and put-off ones, the last; one for the last that is
    as wide as it."""
    plan = f"{text},precision=bf16,checkpointing="
    config = replace(CONFIG, moe=MoEConfig(4, 2, 32)) if "ep" in text else CONFIG
    once, again = (
        trace(config, Plan.parse(plan + mode), seq_len=64) for mode in ("none", "selective")
    )
    for rank in once.ranks:
        products = [[e.work.op for e in events_of(t.ranks[rank], "product")] for t in (once, again)]
        assert sorted(products[0]) == sorted(products[1])
        assert ("_grouped_mm" if "ep" in text else "mm") in products[0]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_that_of_the_closed_forms(zero):
    """Model state exactly, but for what shards are padded by; activations within 5 %."""
    config = replace(PRESETS["llama-3-8b"], num_layers=4, vocab_size=1024)
    rank = trace(config, Plan(dp=64, zero=zero), seq_len=1024).ranks[0]
    state = model_state(config.num_parameters, 64, f"zero{zero}" if zero else "ddp")
    for part in ("parameters", "gradients", "optimizer"):
        if part != "gradients" or zero != 1:  # which are whole in backward only
            assert rank.held[part] == pytest.approx(state[part], rel=0.01), part
    if zero:
        return
    layer = llama_activations(config, 1024, bytes_per_number=4, fused_norm=False)
    kept = config.num_layers * sum(layer.values())
    memory = [e for e in rank.events() if type(e) is Memory]
    changes = [e.num_bytes for e in memory if e.holding.category == "activations"]
    assert max(itertools.accumulate(changes)) == pytest.approx(kept, rel=0.1)


# ---------------------------------------------------------------------- beside other ranks
class Diary(comm_calls.Tap):
    """What a rank launches, in order: calls of each group, and messages with each other rank."""

    def __init__(self, rank):
        self.rank, self.calls = rank, defaultdict(list)

    def begin(self, call):
        peers = [call.axis.ranks[peer] for peer in call.peers or ()]
        if not peers:
            self.calls[call.axis.name, call.axis.ranks].append((call.verb, call.num_bytes))
        for peer in peers:
            ends = (peer, self.rank) if call.verb == "recv" else (self.rank, peer)
            what = call.verb if call.verb == "exchange" else ends  # which goes both ways at once
            self.calls[f"messages on {call.axis.name}", tuple(sorted(ends))].append(what)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "pp=2,dp=2,tp=2,zero=1,microbatches=4,schedule=interleaved_1f1b",
        "dp=2,cp=2,tp=2,zero=2,sequence_parallel,microbatches=2",
        "pp=4,dp=2,microbatches=8,schedule=dualpipe",
        "pp=2,ep=2,tp=2,microbatches=4,schedule=dualpipe_v,dispatch=paired",
    ],
)
def test_all_ranks_launch_in_the_same_order(text, monkeypatch):
    """Of each group the same calls with the same bytes; of two ranks the same messages.

    NCCL runs the calls of a group, and the messages of two ranks, one after the other in the order
    in which each rank launched them: ranks that disagree wait for ever. Mutant: receives ahead.
    """
    plan = Plan.parse(text)
    moe = MoEConfig(8, 2, 32, balance="batch") if plan.ep > 1 else None
    config = replace(CONFIG, num_layers=2 * max(2, plan.pp), moe=moe)
    found = defaultdict(list)
    for rank in range(plan.num_ranks):
        diary = Diary(rank)
        with pretend(plan, rank=rank) as mesh, Tracer():
            actor = Actor(config, plan, mesh, 1, 32)
            actor.step()
            monkeypatch.setattr(comm_calls, "taps", [diary])
            actor.step()
            monkeypatch.undo()
        for key, calls in diary.calls.items():
            found[key].append(calls)
    assert found
    for key, every in found.items():
        assert len(every) == len(key[1]) and all(calls == every[0] for calls in every), key


# ---------------------------------------------------------------------- the rest
def test_the_collector_looks_at_what_is_new_and_is_left_as_it_was():
    """Mutants: it looks at all, which takes longer than a small trace; at nothing; what was there
    before is never collected again."""
    frozen = []
    gc.unfreeze()  # what conftest.py has frozen
    with mock.patch.object(gc, "collect", lambda: frozen.append(gc.get_freeze_count())):
        trace(CONFIG, Plan(), seq_len=8)
    assert frozen and min(frozen) > 10_000 and gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb_v", "interleaved_1f1b"])
def test_zero_2_learns_in_which_order_stages_have_their_last_backward(schedule):
    """Each stage of a rank sends once per microbatch, though the first step has but one."""
    plan = Plan.parse(f"dp=2,pp=2,zero=2,microbatches=4,schedule={schedule}")
    for rank in trace(CONFIG, plan, seq_len=32).ranks.values():
        sums = [e for e in events_of(rank, Launch) if e.verb == "reduce_scatter"]
        assert len(sums) >= 2 * plan.microbatches


@pytest.mark.slow
def test_a_view_is_free():
    """That of a product's rows, which autograd takes for no view, too. Mutant: it moves bytes."""
    names = {e.work.op for e in trace(CONFIG, Plan.parse("tp=2"), seq_len=32).ranks[0].events()
             if type(e) is Compute}  # fmt: skip
    assert "mm" in names and not {"view", "_unsafe_view", "transpose"} & names


@pytest.mark.slow
def test_a_pipeline_sends_what_blocks_compute_in():
    """Of shards in float32 that are gathered in bf16, as of weights in bf16. Mutant: float32."""
    found = [
        trace(CONFIG, Plan.parse(f"dp=2,pp=2,zero={zero},precision=bf16"), seq_len=32)
        for zero in (2, 3)
    ]
    bytes_of = [[sent(rank)["pp"] for rank in each.ranks.values()] for each in found]
    assert bytes_of[0] == bytes_of[1]
