"""The closed form of a step: its parts behave like hardware, and are as published."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.model.llama import PRESETS, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.pipeline import schedules, simulate
from minipar.sim import cost, hardware, planner
from minipar.sim.asked import model_config
from minipar.sim.job import Job
from tests.sim.jobs import ANY, H100, held, job

BF16 = ",precision=bf16"


def step(a: Job) -> float:
    return sum(cost.seconds(a).values())


def test_llama_3_405b_takes_what_was_published():
    """Grattafiori et al. 2024, table 4: 16,384 H100, tp 8, pp 16, dp 128: 400 TFLOP/s a device.

    Nothing is fitted to it.
    """
    plan = "dp=128,tp=8,pp=16,zero=1,sequence_parallel,microbatches=16,schedule=interleaved_1f1b"
    config, family = model_config("llama-3-405b"), hardware.software("megatron")
    seconds = step(job(plan, config=config, software=family))
    flops = config.flops_per_token(8192) * 16 * 128 * 8192
    assert flops / seconds / 16_384 == pytest.approx(400e12, rel=0.16)


PLANS = (
    "dp=64,zero=3", "dp=8,tp=8,sequence_parallel", "tp=4,pp=16,microbatches=32", "dp=16,zero=1",
    "dp=8,pp=8,zero=1,microbatches=16,schedule=interleaved_1f1b", "dp=4,cp=16", "dp=2,tp=16,pp=2",
)  # fmt: skip


@given(st.sampled_from(PLANS), st.floats(1, 4))
def test_a_better_machine_is_never_slower(plan, factor):
    """Mutants: a part that grows with a bandwidth; one that forgets the network."""
    for where, key in (
        ("between", "bandwidth"), ("inside", "bandwidth"), ("device", "memory_bandwidth"),
    ):  # fmt: skip
        part = getattr(H100, where)
        better = replace(H100, **{where: replace(part, **{key: factor * getattr(part, key)})})
        assert step(job(plan, machine=better)) <= step(job(plan)) * (1 + 1e-9)


def test_each_axis_pays_for_itself_alone():
    """Mutant: communication of an axis that has one rank."""
    for plan in PLANS:
        one, parts = job(plan), cost.seconds(job(plan))
        for axis in cost.AXES:
            size = getattr(one.plan, axis)
            assert (parts[axis] > 0) == (size > 1 or (axis == "dp" and one.plan.cp > 1)), axis
        assert (parts["bubble"] > 0) == (one.plan.pp > 1)
        assert all(part >= 0 for part in parts.values())


def test_schedules_trade_the_bubble_for_memory():
    by_name = {
        name: job(f"pp=8,microbatches=16,schedule={name}")
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")
    }
    bubble = {name: cost.seconds(one)["bubble"] for name, one in by_name.items()}
    assert bubble["zb_h2"] == 0 < bubble["zb_h1"] < bubble["1f1b"] == bubble["gpipe"]
    assert bubble["interleaved_1f1b"] < bubble["1f1b"]
    assert held(by_name["gpipe"]) > held(by_name["zb_h2"]) > held(by_name["1f1b"])
    whole, parts = job("pp=4,microbatches=64"), cost.seconds(job("pp=4,microbatches=64"))
    assert parts["bubble"] / (sum(parts.values()) - parts["bubble"]) < 3 / 64
    assert sum(whole.layers) == 32


def test_a_stage_beyond_the_node_is_sent_to_by_few_ranks():
    """Of stages of 2 ranks, 4 share a node: one message in 7 leaves it, on a port for 2, and 4
    forwards wait for it in a row. Mutants: all of them leave it; on a port for 8; none leaves it;
    a rank of two has two neighbours."""
    config = replace(PRESETS["llama-3-8b"], vocab_size=8)  # all stages are as long
    machine = hardware.load("h100-100gbe")
    one, alone, wide = (
        job(f"{mesh},microbatches=16", config=config, machine=machine)
        for mesh in ("dp=2,pp=8", "pp=8", "dp=16,pp=2")
    )
    message = 2 * one.tokens * one.config.hidden_size
    near, far = (machine.seconds_of_collective("send", message, 2, nodes) for nodes in (1, 2))
    few = replace(machine, gpus=2).seconds_of_collective("send", message, 2, 2)
    assert cost.seconds(one)["pp"] == pytest.approx(16 * (near + few) + 4 * few, rel=0.01)
    assert cost.seconds(alone)["pp"] == pytest.approx(2 * (16 + 7) * near, rel=0.2)
    assert cost.seconds(wide)["pp"] == pytest.approx((16 + 2) * far, rel=0.01)


@pytest.mark.parametrize(
    ("plan", "inner", "size", "nodes"),
    [
        ("dp=11", 1, 11, 2), ("dp=16", 1, 16, 2), ("dp=8", 1, 8, 1), ("dp=5,tp=4", 4, 5, 3),
        ("dp=12,tp=2", 2, 12, 3), ("dp=3,tp=16", 16, 3, 3), ("dp=4,cp=3", 1, 3, 2),
        ("dp=3,cp=4", 1, 4, 1), ("dp=2,cp=6", 1, 6, 2), ("dp=2,tp=2,cp=3", 2, 3, 2),
        ("tp=2,cp=3", 2, 3, 1),
    ],
)  # fmt: skip
def test_ranks_fill_one_node_after_the_other(plan, inner, size, nodes):
    """Of 8 devices; of cp=3, ranks 6 to 8 are on two. Mutants: as many ranks on each, so that 11
    of them are on 11 nodes; each group is inside a node."""
    assert job(plan).spread(inner, size) == nodes


def test_a_pipeline_on_a_shared_port_is_replayed_as_it_is_priced():
    """Mutants: its ends do not sum a tied table; replayed messages share a port for all."""
    shape, own = replace(PRESETS["llama-3.2-1b"], num_layers=6), hardware.software("minipar")
    options = dict(config=shape, machine=hardware.load("rtx4090"), software=own)
    one = job("dp=2,pp=3,zero=1,microbatches=6,precision=bf16", **options)
    assert planner.simulate(one).seconds == pytest.approx(step(one), rel=0.1)


def test_the_slowest_link_sets_the_pace_of_a_pipeline():
    """Mutants: the mean of links, though one alone leaves the node; no forwards that wait in a row
    for it, so that a third of what replay finds is missing."""
    slow, options = hardware.load("h100-pcie-1gbe"), dict(software=hardware.software("minipar"))
    for ranks in (10, 16):
        shape = replace(PRESETS["llama-3.2-1b"], num_layers=ranks)
        plan = f"pp={ranks},microbatches={2 * ranks},precision=bf16"
        one = job(plan, config=shape, machine=slow, seq=4096, **options)
        assert planner.simulate(one).seconds == pytest.approx(step(one), rel=0.05)


def test_the_head_is_where_the_last_stage_is():
    """Of a V, on the first rank. Mutant: a rank that has a head in each of two models, or none."""
    for name, ends in (("1f1b", [1, 0, 0, 1]), ("zb_v", [2, 0, 0, 0]), ("dualpipe", [2, 0, 0, 2])):
        one = job(f"pp=4,microbatches=16,schedule={name}")
        assert [sum(one.tables(stage)) for stage in range(4)] == ends
        assert sum(one.layers) == 32
    # Each half of the time, both at once: as long as one of them all the time.
    assert one.layers == one.layers[::-1]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_head_of_its_own_is_gathered_reduced_and_takes_steps(zero):
    """Behind a slow network, where nothing hides it. Mutants: an embedding alone; layers alone."""
    slow = replace(H100, between=replace(H100.between, bandwidth=1e8))
    free = replace(ANY, copies=0.0)
    own, tied = configs = [replace(PRESETS["llama-3-8b"], tie_embeddings=t) for t in (False, True)]
    options = dict(machine=slow, software=free, seq=1024)
    parts = [cost.seconds(job(f"dp=16,zero={zero}", config=c, **options)) for c in configs]
    for part, rel in (("dp", 0.01), ("optimizer", 1e-4)):
        found = parts[0][part] / parts[1][part]
        assert found == pytest.approx(own.num_parameters / tied.num_parameters, rel=rel), part


@pytest.mark.parametrize("mesh", ["dp=8", "dp=16,pp=4"])
def test_zero_2_reduces_each_microbatch(mesh):
    """As minipar.parallel.zero does. Mutant: once, beside the last backward."""
    dp = {
        (zero, m): cost.seconds(job(f"{mesh},zero={zero},microbatches={m}"))["dp"]
        for zero in (1, 2)
        for m in (1, 2, 3)
    }
    assert dp[1, 1] == dp[1, 2] == dp[1, 3] == dp[2, 1]
    assert dp[2, 3] - dp[2, 2] == pytest.approx(dp[2, 2] - dp[2, 1])
    assert dp[2, 2] > 1.3 * dp[2, 1]


@pytest.mark.parametrize("tp", [1, 2])
def test_zero_gathers_weights_beside_the_next_forward(tp):
    """As replayed, and a loss that is cut runs operation by operation. Mutants: weights are waited
    for, and a step takes 15 % longer; the loss of a rank that has all words."""
    options = dict(config=PRESETS["llama-3.2-1b"], software=hardware.software("minipar"))
    one = job(f"dp={48 // tp},tp={tp},zero=1,sequence_parallel={tp > 1}{BF16}", **options)
    waits = replace(one, software=replace(one.software, waited=1.0))
    assert planner.simulate(one).seconds == pytest.approx(step(one), rel=0.05)
    assert cost.seconds(waits)["dp"] > 3 * cost.seconds(one)["dp"]


def test_whole_experts_are_computed_on_own_tokens():
    """Cut over tp, or whole for a part of the tokens: as many FLOPs; and tp times the memory."""
    moe = replace(PRESETS["llama-3-8b"], moe=MoEConfig(64, 8, 2048))
    jobs = [
        job(f"tp=4,dp=16,sequence_parallel{cut}", config=moe)
        for cut in ("", ",expert_tensor_parallel")
    ]
    held = [one.parameters.experts for one in jobs]
    assert held[0] == 4 * held[1] > 0
    whole, cut = (cost.layer(one, False) for one in jobs)
    assert 1 < cut["compute"] / whole["compute"] < 1.4  # parts of answers, of all tokens, to write
    assert whole["tp"] == pytest.approx(cut["tp"] / 2)


def test_whole_shared_experts_are_of_own_tokens_too_and_their_gradients_a_sum():
    """Behind a slow network, where what travels tells. Mutants: what moves through memory beside
    their products, of all tokens; a sum of other experts alone; none with experts over tp."""
    moe = MoEConfig(64, 8, 2048)
    none, some = (replace(PRESETS["llama-3-8b"], moe=replace(moe, num_shared=n)) for n in (0, 4))
    slow = replace(H100, inside=replace(H100.inside, bandwidth=1e9))
    shared = 4 * 3 * 2048 * 4096
    for words in ("", ",experts_over_tp"):
        plan = f"tp=4,dp=2,sequence_parallel{words}"
        few, many = (cost.seconds(job(plan, config=c, machine=slow))["tp"] for c in (none, some))
        wire = 2 * 3 / 4 * 4 * 32 * shared / (1e9 * slow.inside.share)
        assert many - few == pytest.approx(wire, rel=0.1)
    whole, cut = (job(f"tp=4,sequence_parallel{w}", config=some) for w in ("", CUT))
    assert cost._products(whole).hidden == cost._products(cut).hidden == 2048


CUT = ",expert_tensor_parallel"
SPARSE = replace(PRESETS["llama-3-8b"], moe=MoEConfig(64, 8, 2048))


def test_experts_of_ranks_of_tp_too_travel_among_neighbours():
    """A rank in each of 8 nodes, or all ranks of them. Mutant: as far apart as ranks of dp."""
    apart, near = (
        job(f"ep=8,tp=8,sequence_parallel{words}", config=SPARSE)
        for words in ("", ",experts_over_tp")
    )
    assert (near.experts_apart, near.experts_copies) == (1, 1)
    assert (apart.experts_apart, apart.experts_copies) == (8, 1)
    assert near.parameters.experts == apart.parameters.experts / 8


def test_rows_in_8_bits_travel_there_and_in_16_back():
    """DeepSeek-V3, section 3.3.3. Mutants: in 16 bits, or in 8, both ways."""
    wide, narrow = (job("ep=64", config=SPARSE, dtype=dtype) for dtype in ("bf16", "fp8"))
    ep = [cost.layer(one, False)["ep"] for one in (wide, narrow)]
    assert 0.75 < ep[1] / ep[0] < 0.8  # more than the bytes': latency


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "dp=8,zero=1,microbatches=2",
        "dp=8,zero=3",
        "dp=2,tp=4,sequence_parallel,zero=1,microbatches=2",
        "dp=2,pp=4,zero=1,microbatches=8",
        "pp=4,dp=2,zero=1,schedule=zb_h1,microbatches=8",
        "ep=4,pp=2,zero=1,microbatches=4",
        "ep=4,tp=2,sequence_parallel",
        "ep=4,tp=2,sequence_parallel,experts_over_tp",
    ],
)
def test_the_family_minipar_is_its_own_code(plan):
    """In time and memory, as replayed. Mutants: it copies and keeps as others do; experts keep no
    rows; copies of them on tp are no sum."""
    few = replace(PRESETS["mixtral-8x7b" if "ep" in plan else "llama-3-8b"], num_layers=8)
    one = job(f"{plan},precision=bf16", config=few, software=hardware.software("minipar"))
    simulated = planner.simulate(one)
    assert -0.1 < simulated.seconds / step(one) - 1 < 0.13
    assert -0.1 < simulated.peak_bytes / held(one) - 1 < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ep=4,dp=3,zero=3", "dp=12,zero=1"])
def test_a_mixture_on_a_node_and_a_half_is_replayed_as_it_is_priced(plan):
    """Mutants: gradients of ZeRO 3 in 16 bits; a matrix of all experts in many buckets."""
    few, own = replace(PRESETS["mixtral-8x7b"], num_layers=4), hardware.software("minipar")
    one = job(f"{plan},precision=bf16", config=few, software=own, seq=4096)
    assert planner.simulate(one).seconds == pytest.approx(step(one), rel=0.15)


def test_an_all_to_all_takes_as_long_as_its_bytes_on_the_port():
    """Mutant: charged for what all ranks deal out, each waiting for ep times too long."""
    one = job("ep=64", config=SPARSE, seq=65_536)
    rows = 8 * 4096 * one.tokens  # numbers, out and back
    far = 4 * rows * 56 / 64 / (H100.between.bandwidth * H100.between.share)
    assert far < cost.layer(one, False)["ep"] < 1.6 * far  # more: latency


# ---------------------------------------------------------------------- what is fitted, and scale
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v",
                                  "dualpipe", "dualpipe_v"])  # fmt: skip
@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_bubble_is_that_of_the_schedule(name, p):
    """On paper. Mutants: as much filled with few microbatches as with many; of a smaller W, too.

    V-shaped schedules are held for zb_h1 or DualPipe, and may leave less.
    """
    for m in sorted({1, 2, p, p + 1, 2 * p, 4 * p}):
        one = job(f"pp={p},microbatches={m},schedule={name}")
        made = schedules.make(name, p, m)
        for weights in (1 / 3,) if name == "zb_h2" else (1 / 3, 0.15):
            half = (1 - weights) / 2
            costs = simulate.Costs(half, half, weights)
            spans = {}
            for _, rank, start, end in simulate.events(made, costs, False):
                low, high = spans.get(rank, (start, end))
                spans[rank] = min(low, start), max(high, end)
            step = max(high - low for low, high in spans.values())
            found = m + one.bubble(weights) * (p - 1)
            if name in ("zb_v", "dualpipe", "dualpipe_v"):
                assert 0.75 < found / step < 1.45, (m, weights)
            else:
                assert found == pytest.approx(step), (m, weights)


def test_each_bucket_pays_for_a_collective():
    """Mutant: one collective for all gradients, however many ranks a ring has."""
    whole = replace(ANY, bucket=1e12, exposed=1.0, waited=1.0)
    parts = replace(whole, bucket=1e8, bucket_dp=0.0)
    few, many = (cost.seconds(job("dp=1024,zero=1", software=s))["dp"] for s in (whole, parts))
    calls = -(-PRESETS["llama-3-8b"].num_parameters // 1e8) - 1
    latency = H100.between.launch + 127 * H100.between.latency + (1024 - 128) * H100.inside.latency
    assert many - few == pytest.approx(2 * calls * latency, rel=0.01)
    assert job("dp=1024").bucket == 1e6 * 1024 and job("dp=8").bucket == 40e6
    halves = replace(parts, bucket=4.1e9, exposed=0.0)  # beside a long backward, but for the second
    waits = [cost.seconds(job("dp=8", software=s))["dp"] for s in (halves, whole)]
    assert waits[0] == pytest.approx(waits[1] / 2, rel=0.01)


def test_tp_hides_beside_its_products_inside_a_node_alone():
    """Of tp hops one is waited for. Mutants: over nodes as well; without products to hide it."""
    core = hardware.software("megatron-core")
    alone = replace(core, beside=0.0)
    for tp, share in ((8, 1 / 8), (16, 1)):
        hidden, waited = (
            cost.layer(job(f"tp={tp}", software=s), True)["tp"] for s in (core, alone)
        )
        assert hidden == pytest.approx(share * waited)
    slow = replace(H100, inside=replace(H100.inside, bandwidth=1e9))
    one, other = (job("tp=8", software=s, machine=slow, seq=512) for s in (core, alone))
    parts = cost.layer(one, True), cost.layer(other, True)
    assert parts[1]["tp"] > parts[0]["tp"] > parts[1]["tp"] - parts[1]["compute"]


def test_a_gpt_has_no_gate_and_no_rotation_but_biases():
    """What moves through memory beside its products. Mutant: that of a Llama for all."""

    def between(name, **options):
        family = hardware.software(name)
        none = replace(family, passes=1e-9)
        times = [cost.layer(job("dp=8", software=s, **options), False) for s in (family, none)]
        return times[0]["compute"] - times[1]["compute"]

    assert between("llm-foundry", gated=False) < between("any", gated=False) < between("any")
    assert between("compiled") == pytest.approx(between("any") / 1.65)


def test_nanotron_gives_its_first_stages_the_most_layers():
    """Mutant: the fewest, as they hold the most microbatches. (16 layers, a head as 4 of them.)"""
    config = LlamaConfig(131_072, 2048, 8192, 16, 32, 32)
    one = job("pp=8,microbatches=8", config=config, software=hardware.software("nanotron"))
    assert one.layers == [3, 2, 3, 2, 3, 2, 1, 0] and sum(one.layers) == 16
    assert job("pp=8,microbatches=8", config=config).layers[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama-3-8b", "dp=32,tp=2,zero=1,sequence_parallel,microbatches=2"),
        ("llama-3-8b", "dp=512,tp=2,zero=3,sequence_parallel,microbatches=2"),
        ("llama-3-8b", "dp=256,tp=2,cp=2,zero=3,sequence_parallel,microbatches=2"),
        ("llama-3-8b", "dp=8192,tp=2,zero=1,sequence_parallel,microbatches=2"),
        ("llama-3-70b", "dp=16,tp=8,pp=4,zero=1,sequence_parallel,microbatches=8"),
        ("llama-3-70b", "dp=512,tp=8,pp=4,zero=1,sequence_parallel,microbatches=8"),
        ("llama-3-405b", "dp=256,tp=8,pp=8,zero=1,sequence_parallel,microbatches=16"),
    ],
)
def test_closed_form_and_replay_hold_together_up_to_16384_devices(model, plan):
    """The closed form ranks, so it must not be far from the code. Mutant: one bucket for all."""
    config = model_config(model)
    config = replace(config, num_layers=min(32, config.num_layers))
    one = job(f"{plan},precision=bf16", config=config)
    replayed = planner.simulate(one).seconds + one.software.fixed
    assert replayed == pytest.approx(step(one), rel=0.15)
