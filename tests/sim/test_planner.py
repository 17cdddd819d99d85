"""`minipar plan`: what it recommends is legal, fits and is the fastest; why not, in words."""

import json
import shlex
import time
from dataclasses import replace

import pytest
import torch

from minipar.cli import commands, main
from minipar.model.hf import config_json
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.plan import Plan
from minipar.sim import asked, cost, footprint, hardware, planner
from minipar.sim.planner import NothingFits, PlanConfig
from minipar.train.config import TrainConfig

EIGHT = PlanConfig(gpus=8, global_batch=64)


@pytest.fixture(scope="module")
def found():
    """Eight billion parameters on eight devices."""
    return planner.search(planner.base_of(EIGHT), 8, 64)


def best(config):
    return planner.answer(config)[1][0]


def test_what_is_recommended_is_legal_and_fits_and_is_the_fastest(found):
    plans = found.top(20)
    assert len(plans) > 5 and [p.step for p in plans] == sorted(p.step for p in plans)
    for ranked in plans:
        ranked.job.plan.check(ranked.job.config)
        assert sum(ranked.memory.values()) <= found.limit < 66.5e9
        assert ranked.job.plan.num_ranks == 8
        assert ranked.job.plan.dp * ranked.job.plan.microbatches * ranked.job.microbatch == 64
    legal = [r for r in found.fit if planner.problem(r.job) is None]
    assert plans[0].step == min(r.step for r in legal)


def test_no_legal_mesh_is_left_out(found):
    """Mutant: a filter of `candidates` that drops what `Plan.problem` allows."""
    seen = {tuple(getattr(r.job.plan, a) for a in ("dp", "tp", "pp", "cp"))
            for r in (*found.fit, *found.too_large)}  # fmt: skip
    for dp in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 4, 8):
                cp = 8 // (dp * tp * pp)
                if dp * tp * pp * cp == 8:
                    assert (dp, tp, pp, cp) in seen


def test_never_slower_than_the_rule_of_thumb(found):
    """Least tp x pp, then the largest microbatch that fits."""
    legal = [r for r in found.fit if planner.problem(r.job) is None]
    thumb = min(legal, key=lambda r: (r.job.plan.tp * r.job.plan.pp, -r.job.microbatch))
    assert found.best().step <= thumb.step


@pytest.mark.slow
@pytest.mark.mostly_slow
@pytest.mark.parametrize("better", ["nic=800", "nvlink=900", "memory=141", "gpus=16"])
def test_a_better_machine_is_never_slower(found, better):
    config = replace(EIGHT, model="llama-3.2-1b", hardware="rtx4090", seq=2048)
    steps = [best(replace(config, what_if=what)).step for what in ("", better)]
    assert steps[1] <= steps[0] * (1 + 1e-9)


@pytest.mark.slow
def test_the_words_say_why(found):
    text, plans = planner.answer(replace(EIGHT, gpus=16, global_batch=16))
    for words in (
        "The best, by part:",
        "Why:",
        "Others:",
        "To paste:",
        "slower:",
        "MFU",
        "error 15%: 90 % of published runs, and more, are within 15%",
    ):
        assert words in text
    assert "nothing fits:" in planner.lost(found, found.best(), _whole)
    for ranked in plans:
        assert str(ranked) in text
    shown = planner.where_time_goes(plans)
    assert len(shown) == len(plans) and all(sum(parts.values()) > 0 for parts in shown.values())
    assert any("tp stays inside a node" in line for line in planner.reasons(found, _with_tp()))


def _whole(ranked):
    return ranked.job.plan.dp == 8 and ranked.job.plan.zero == 0


def _with_tp():
    base = planner.base_of(replace(EIGHT, gpus=16, global_batch=16))
    job = replace(base, plan=Plan(dp=2, tp=8, sequence_parallel=True))
    return planner.Ranked(job, cost.seconds(job), footprint.memory(job))


def test_flags_are_read_by_our_own_training_and_come_in_pairs():
    for plan in (
        "dp=2,tp=2,zero=1,sequence_parallel",
        "dp=2,pp=3,zero=1,schedule=interleaved_1f1b,microbatches=3",
    ):
        base = planner.base_of(replace(EIGHT, model="small", gpus=4, seq=512))
        job = replace(base, plan=Plan.parse(plan), microbatch=2)
        given = planner.flags(job)
        name, config = commands.parse(
            ["train", "--preset", "small", *shlex.split(given["minipar train"])]
        )
        assert isinstance(config, TrainConfig) and name == "train"
        assert config.as_plan() == job.plan and config.seq_len == 512
        assert config.batch_size == job.plan.dp * job.plan.microbatches * 2
        assert "--tensor-model-parallel-size" in given["Megatron-LM"]
        words = given["torchtitan"].split()
        assert words[0::2] == [w for w in words if w.startswith("--")]


FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("project", "plan", "words"),
    [
        ("minipar train", "pp=8,schedule=zb_h1,microbatches=64", "schedule=zb_h1"),
        ("torchtitan", "pp=8,schedule=zb_h1,microbatches=64", "cannot: it has no schedule zb_h1"),
        ("Megatron-LM", "pp=8,schedule=zb_h1,microbatches=64", "cannot: it has no schedule zb_h1"),
        ("Megatron-LM", "dp=8,zero=2", "cannot: its --use-distributed-optimizer is zero=1"),
        ("Megatron-LM", "dp=8,zero=1", "--bf16 --use-distributed-optimizer"),
        ("Megatron-LM", "dp=8,precision=fp16", "--fp16"),
        ("torchtitan", "dp=8,precision=fp16", "cannot: it has no fp16"),
        ("torchtitan", "dp=8,zero=3", "--training.mixed_precision_param bfloat16"),
        ("torchtitan", "dp=8,precision=float32", "--training.mixed_precision_param float32"),
        ("Megatron-LM", "dp=8,zero=3", FSDP),
        ("Megatron-LM", "dp=4,ep=2,zero=3", "cannot: its --use-torch-fsdp2 goes with no pp"),
        ("Megatron-LM", "dp=4,pp=2,zero=3", "cannot: its --use-torch-fsdp2 goes with no pp"),
        ("Megatron-LM", "dp=8,zero=3,precision=fp16", "cannot: its --use-torch-fsdp2 goes with"),
        ("Megatron-LM", "dp=4,ep=2,precision=fp16", "cannot: its ep goes with no fp16"),
        ("Megatron-LM", "pp=3,microbatches=3", "cannot: its stages have the same number"),
        ("Megatron-LM", "pp=2,microbatches=4,schedule=interleaved_1f1b,stages_per_rank=3",
         "cannot: its stages have the same number"),
        ("Megatron-LM", "pp=4,microbatches=6,schedule=interleaved_1f1b",
         "cannot: its interleaved pipeline takes a multiple of pp=4 microbatches"),
        ("Megatron-LM", "pp=4,microbatches=8,schedule=interleaved_1f1b",
         "--num-virtual-stages-per-pipeline-rank 2"),
        ("torchtitan", "dp=2,tp=4", "cannot: its DDP (zero=0, on 2 ranks) goes with no other"),
        ("torchtitan", "dp=2,pp=4,microbatches=4", "cannot: its DDP (zero=0, on 2 ranks)"),
        ("torchtitan", "dp=2,tp=2,cp=2,sequence_parallel", "data_parallel_replicate_degree 2"),
        ("torchtitan", "dp=2,tp=4,zero=1", "cannot: its tp cuts norms and residual streams"),
        ("torchtitan", "dp=2,ep=2,tp=2,zero=1,sequence_parallel",
         "cannot: its tp cuts every expert, too"),
        ("torchtitan", "dp=2,ep=2,tp=2,zero=1,sequence_parallel,expert_tensor_parallel",
         "tensor_parallel_degree 2"),
        ("torchtitan", "tp=8", "cannot: its tp and pp compute in float32, not bf16"),
        ("torchtitan", "dp=4,ep=2", "cannot: its ep is a multiple of cp=1 and divides"),
        ("torchtitan", "cp=4,ep=2,zero=1", "cannot: its ep is a multiple of cp=4"),
        ("torchtitan", "dp=4,ep=2,zero=1", "expert_parallel_degree 2"),
        ("torchtitan", "pp=2,cp=2,microbatches=4,schedule=interleaved_1f1b,stages_per_rank=4",
         "cannot: its ranks of interleaved_1f1b have 2 stages, and the plan's have 4"),
        ("torchtitan", "dp=8,zero=3,checkpointing=selective", "mode selective "
         "--activation_checkpoint.selective_ac_option op"),
        ("Megatron-LM", "cp=8", "--cp-comm-type p2p"),
        ("Megatron-LM", "cp=8,context=ulysses", "--cp-comm-type a2a"),
        ("Megatron-LM", "cp=8,context=gather", "cannot: context=gather has no flag"),
        ("torchtitan", "cp=8", "context_parallel_rotate_method alltoall"),
        ("torchtitan", "cp=8,context=gather", "context_parallel_rotate_method allgather"),
        ("torchtitan", "cp=8,context=ulysses", "cannot: its context parallelism passes keys"),
        ("Megatron-LM", "tp=8,sequence_parallel,tp_overlap", "--tp-comm-overlap"),
        ("torchtitan", "dp=2,tp=4,zero=1,sequence_parallel,tp_overlap", "cannot: tp_overlap=True"),
        ("Megatron-LM", "dp=8,compression=int8", "cannot: compression=int8 has no flag"),
        ("torchtitan", "dp=4,ep=2,zero=1,dispatch=halves", "cannot: dispatch=halves has no flag"),
    ],
)  # fmt: skip
def test_what_another_project_refuses_at_its_start_is_said(project, plan, words):
    """Mutants: flags that it refuses, or ignores; a plan that it takes, refused here."""
    base = planner.base_of(EIGHT)
    config = replace(base.config, moe=MoEConfig(8, 2, 14_336) if "ep=" in plan else None)
    given = planner.flags(replace(base, config=config, plan=_in_bf16(plan)))[project]
    assert words in given and words.startswith("cannot") == given.startswith("cannot")


@pytest.mark.parametrize("software", ["any", "megatron"])
def test_selective_recomputation_of_megatron_is_its_own(software):
    """Mutants: a plan that fits as another one alone; refused where it is priced as it is."""
    base = planner.base_of(replace(EIGHT, software=software))
    plan = _in_bf16("dp=8,checkpointing=selective")
    given = planner.flags(replace(base, plan=plan))["Megatron-LM"]
    words = {"any": "cannot: its selective", "megatron": "--recompute-granularity selective"}
    assert words[software] in given


def test_fsdp_of_megatron_unties_embeddings():
    """Mutant: another model than asked for, of more weights."""
    tied = replace(planner.base_of(replace(EIGHT, model="llama-3.2-1b")), plan=_in_bf16("dp=8"))
    given = [planner.flags(replace(tied, plan=replace(tied.plan, zero=n))) for n in (1, 3)]
    assert [g["Megatron-LM"].startswith("cannot: its --use-torch-") for g in given] == [False, True]


def _in_bf16(plan):
    return Plan.parse(plan if "precision" in plan else f"{plan},precision=bf16")


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (101, "dp=8"),
        (8190, "dp=4,cp=2,zero=1"),
        (8190, "dp=2,tp=4,zero=1,sequence_parallel"),
        (8184, "tp=4,cp=2,sequence_parallel"),
    ],
)
def test_sequences_that_only_we_pad_are_no_ones_else(tokens, plan):
    """Mutants: a plan that is refused, though `Composed.shard` pads; one that others get."""
    job = replace(planner.base_of(EIGHT), plan=_in_bf16(plan), seq_len=tokens)
    assert planner.problem(job) is None
    given = planner.flags(job)
    assert "cannot: its seq_len is a multiple" in given["torchtitan"]
    assert ("cannot: its seq-length is a" in given["Megatron-LM"]) == (plan != "dp=8")


def test_words_without_a_price_are_said():
    """Mutant: the numbers of a plan without them, as if they were its own."""
    for plan, is_priced in (("dp=8", True), ("dp=8,compression=int8", False)):
        text = planner.answer(replace(EIGHT, explain=plan))[0]
        assert ("does not price compression=int8:" in text) != is_priced


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "fix",
    [
        "context=ulysses,cp=2",
        "schedule=zb_h1,pp=2",
        "stages_per_rank=4,pp=2",
        "tp_overlap",
        "compression=int8",
        "microbatch=64",
        "pp=2,zero=3",
        "tp=2,sequence_parallel=false",
        "dp=8,microbatches=1",
    ],
)
def test_words_that_no_search_varies_can_be_fixed(fix):
    """Mutant: every candidate has them as usual, and so none is left."""
    options = dict(model="llama-3.2-1b", seq=2048, global_batch=512)
    if "microbatches" in fix:  # 64 sequences each, on a device that has room for them
        options |= dict(seq=256)
    if "zero=3" in fix:  # which goes with no table that two stages have
        options |= dict(model="llama-3-8b")
    for ranked in planner.answer(replace(EIGHT, fix=fix, **options))[1]:
        assert all(
            {"microbatch": ranked.job.microbatch}.get(word, getattr(ranked.job.plan, word, None))
            == value
            for word, value in asked.fixed(fix).items()
        )


def test_words_to_fix_are_read_as_those_of_a_plan():
    """Mutant: a name with a hyphen, or a blank behind it, is looked up as it was typed."""
    assert asked.fixed("tp = 2,sequence-parallel") == {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize("fix", ["dp=3", "microbatch=3", "precision=fp16", "ep=2"])
def test_words_that_no_candidate_has_are_said(fix):
    """Mutant: it is the batch that no dp divides."""
    with pytest.raises(NothingFits, match=f"8 devices: no candidate has --fix {fix}"):
        planner.answer(replace(EIGHT, fix=fix))


def test_tp_is_timed_among_its_own_ranks():
    """Mutant: among all of a node."""
    base = planner.base_of(replace(EIGHT, gpus=16, global_batch=16))
    job = replace(base, plan=Plan(dp=8, tp=2, sequence_parallel=True))
    ranked = planner.Ranked(job, cost.seconds(job), footprint.memory(job))
    n = 2 * job.tokens * job.config.hidden_size
    inside, across = (job.machine.seconds_of_collective("all_reduce", n, 2, k) for k in (1, 2))
    line = planner.reasons(planner.Search(0.0, [], []), ranked)[-1]
    assert f"takes {inside * 1e3:.2f} ms there, {across * 1e3:.2f} ms over two" in line


@pytest.mark.parametrize(
    "gpus, software, said",
    [
        (8, "minipar", ["halves"]),
        (16, "minipar", ["halves", "hierarchical,expert_nodes=2"]),
        (16, "megatron-core", ["halves"]),  # which sends a token once to each node as it is
    ],
)
def test_other_ways_to_experts_are_priced(gpus, software, said):
    """Mutants: a node of its own is one to send to; what software does anyway is advised."""
    base = planner.base_of(
        replace(EIGHT, model="mixtral-8x7b", gpus=gpus, software=software, global_batch=gpus)
    )
    job = replace(base, config=replace(base.config, moe=MoEConfig(16, 2, 4096)))
    job = replace(job, plan=Plan.parse(f"ep={gpus},zero=2"))
    ranked = planner.Ranked(job, cost.seconds(job), footprint.memory(job))
    lines = planner.reasons(planner.Search(0.0, [], []), ranked)
    words = [line.split("with dispatch=")[1] for line in lines if "with dispatch=" in line]
    assert [word.split(", ep would")[0] for word in words] == said
    for word in words:
        plan = Plan.parse(f"{job.plan},dispatch={word.split(', ep')[0]}")
        waits = cost.seconds(replace(job, plan=plan))["ep"]
        assert f"waited for {waits:.2f} s instead of {ranked.seconds['ep']:.2f}" in word


def test_one_plan_is_explained_and_json_is_the_same(capsys):
    config = replace(EIGHT, explain="dp=8,zero=3,microbatches=8,precision=bf16")
    text, (ranked,) = planner.answer(config)
    loaded = json.loads(planner.answer(replace(config, json=True))[0])
    assert sum(loaded["seconds"].values()) == pytest.approx(ranked.step) == loaded["step_seconds"]
    assert f"{ranked.step:.2f} s" in text and loaded["plan"]["zero"] == 3
    assert 0.2 < loaded["mfu_causal"] < loaded["mfu"] < 0.8
    assert "does not fit" in planner.answer(replace(config, explain="dp=8"))[0]


@pytest.mark.slow
def test_a_line_of_the_table_can_be_explained():
    """Mutant: its microbatch is no word of a plan, or of any batch."""
    config = replace(EIGHT, model="llama-3.2-1b", seq=2048, top=1)
    (first,) = planner.answer(config)[1]
    assert planner.answer(replace(config, explain=str(first)))[1] == [first]


def test_what_nearly_fits_is_told_from_what_there_is():
    """Mutant: 66 of 66 GB, which reads as if it did fit."""
    assert planner.of_room(70.2e9, 66.3e9) == "70 of 66 GB"
    assert planner.of_room(66.4e9, 66.3e9) == "66.4 of 66.3 GB"
    assert planner.of_room(66.301e9, 66.3e9) == "66.301 of 66.300 GB"
    assert planner.of_room(66.3e9, 66.3e9) == "all of 66 GB"


@pytest.mark.slow
def test_what_a_search_leaves_as_it_is_is_said():
    """Mutant: every legal plan, as if all words of one were varied."""
    for text in planner.answer(replace(EIGHT, model="tiny", seq=64))[0], planner.NOT_VARIED:
        for word in ("tp_overlap", "context", "dispatch", "stages_per_rank", "compression"):
            assert word in text.splitlines()[-1]


@pytest.mark.slow
def test_json_says_why_others_lost():
    """As the words do. Mutant: the best plans alone."""
    config = replace(EIGHT, model="llama-3.2-1b", seq=2048)
    loaded = json.loads(planner.answer(replace(config, json=True))[0])
    text, plans = planner.answer(config)
    assert len(loaded["plans"]) == len(plans) == 5 and len(loaded["others"]) > 3
    assert all(f"  {family}: {why}" in text for family, why in loaded["others"].items())
    assert all(f"  {line}" in text for line in loaded["why"])


@pytest.mark.parametrize(
    ("changed", "plan", "kind"),
    [
        ({}, "dp=8", ""),
        ({}, "dp=2,tp=4,zero=1,sequence_parallel", ""),
        (dict(hardware="a100"), "dp=8,zero=3", ""),
        ({}, "dp=4,cp=2", "cp"),
        ({}, "dp=8,zero=2", "zero=2"),
        (dict(model="mixtral-8x7b"), "dp=8", "experts"),
        (dict(hardware="b200"), "dp=8", "on b200"),
        (dict(what_if="gpus=4"), "tp=8,sequence_parallel", "tp over nodes"),
        ({}, "tp=8,sequence_parallel,tp_overlap", "tp_overlap"),
        ({}, "pp=8,microbatches=8,schedule=gpipe", "schedule=gpipe"),
        ({}, "pp=8,microbatches=8,schedule=zb_h1", ""),
        ({}, "dp=2,pp=4,microbatches=4,schedule=interleaved_1f1b", ""),
        ({}, "dp=2,pp=4,microbatches=2", "fewer microbatches than ranks of pp"),
        ({}, "dp=4,pp=2,microbatches=2,zero=3", "zero=3 with pp"),
    ],
)
def test_no_error_is_stated_that_nobody_looked_at(changed, plan, kind):
    """Mutant: 15 % of every plan, though no published run is like it."""
    config = replace(EIGHT, explain=plan, **changed)
    text, (ranked,) = planner.answer(config)
    loaded = json.loads(planner.answer(replace(config, json=True))[0])
    words = f"no published run of this kind was checked: {kind}"
    assert (words in text) == bool(kind) == (loaded["error"] is None)
    assert loaded["unchecked"] == planner.unchecked(ranked.job) == (words if kind else "")
    assert (f"error {planner.ERROR:.0%}: 90 % of" in text) == (not kind)
    in_8_bits = replace(ranked.job, dtype="fp8")
    assert "fp8" in planner.unchecked(in_8_bits)


def test_zero_1_is_preferred_to_2_where_it_fits(found):
    """Which reduces gradients of each microbatch. Mutant: once in all, and so at no cost."""
    compared = 0
    fit = {(str(r), r.job.plan.zero): r for r in found.fit}
    for (text, zero), two in fit.items():
        one = fit.get((text.replace("zero=2", "zero=1"), 1))
        if zero == 2 and one and two.job.plan.microbatches > 1:
            assert one.step < two.step
            compared += 1
    assert compared > 10


def test_a_model_is_a_name_a_file_or_a_folder(tmp_path):
    tiny = replace(PRESETS["tiny"], num_layers=1)
    (tmp_path / "tiny").mkdir()
    text = json.dumps(config_json(tiny, torch.float32))
    (tmp_path / "tiny" / "config.json").write_text(text, encoding="utf-8")
    for where in (tmp_path / "tiny", tmp_path / "tiny" / "config.json"):
        assert asked.model_config(str(where)) == tiny
    assert asked.model_config("tiny") == PRESETS["tiny"]
    sizes = {"llama-3-70b": 70.6e9, "llama-3-405b": 405.9e9, "mixtral-8x7b": 46.7e9}
    for name, size in sizes.items():
        assert asked.model_config(name).num_parameters == pytest.approx(size, rel=0.01)


def call(capfd, *words):
    with pytest.raises(SystemExit) as stop:
        main.main(["plan", *words])
    out, err = capfd.readouterr()
    return stop.value.code, out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model llama-3-9b", "nearest names are llama-3-8b"),
        ("--hardware h101", "nearest names are h100"),
        ("--hardware nowhere.toml", "cannot be read as TOML"),
        ("--gpus 0", "--gpus 0"),
        ("--global-batch 0", "--global-batch 0"),
        ("--seq 9000", "sees 1 to 8,192 tokens"),
        ("--software megaton", "no such software; there is megatron"),
        ("--what-if nic=-1", "above 0"),
        ("--what-if speed=2", "nic (Gb/s"),
        ("--fix tp=2,banana", "banana"),
        ("--explain dp=3,tp=3 --gpus 9", "tp=3"),
        ("--explain dp=4", "4 ranks"),
        (
            "--explain dp=8,precision=float32",
            "h100-ndr is priced in bf16 alone; use precision=bf16",
        ),
        ("--gpus 1000000000000", "--gpus 1,000,000,000,000: use at most 1,048,576"),
        ("--explain dp=8,microbatch=1 --global-batch 64", "a batch of 8; use --global-batch 8, or"),
        ("--explain dp=8,microbatch=0", "--explain microbatch=0: microbatch must be 1 or more"),
        ("--explain dp=8 --fix tp=2", "--fix tp=2 is of a search, and --explain has one plan"),
    ],
)
def test_bad_input_is_one_line(capfd, words, message):
    code, _, err = call(capfd, *words.split())
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "category"),
    [
        ("--model llama-3-70b --gpus 8 --global-batch 8", "optimizer"),
        (
            "--gpus 8 --hardware a100-40 --global-batch 8 --fix tp=1,pp=1,cp=1,zero=0",
            "without --fix",
        ),
    ],
)
def test_nothing_fits_is_exit_code_3_with_a_change_that_works(capfd, words, category):
    code, _, err = call(capfd, *words.split())
    assert code == 3 and category in err and err.count("\n") == 1
    if "would do" in err:
        change = err.rpartition(";")[2].replace("would do", "").split()
        config = commands.parse(["plan", *words.split(), *change])[1]
        assert planner.answer(config)[1]


DEEPSEEK = LlamaConfig(
    129_280,
    7168,
    18_432,
    58,
    128,
    8,
    128,
    max_seq_len=4096,
    moe=MoEConfig(256, 8, 2048, num_shared=1),
)
"""DeepSeek-V3 without its three first layers, whose attention is about as large."""


@pytest.mark.slow
@pytest.mark.parametrize("fix", [{}, {"ep": 32, "zero": 3, "checkpointing": "full"}])
def test_deepseek_v3_beyond_276_gib_does_not_fit(fix):
    """torchtitan pull request 4016: more than devices of 288 GB have.

    Mutant: experts cut among ranks of dp that share no experts.
    """
    assert DEEPSEEK.num_parameters == pytest.approx(671e9, rel=0.01)
    base = replace(planner.base_of(replace(EIGHT, hardware="b300")), config=DEEPSEEK, seq_len=4096)
    found = planner.search(base, 32, 32, fix)
    smallest = found.smallest()
    assert found.best() is None and sum(smallest.memory.values()) > 276 * 2**30
    assert "nothing fits" in planner.lost(found, smallest, lambda _: True)
    assert planner.search(base, 256, 256, {"ep": 64, "pp": 1, "tp": 1, "cp": 1}).best()


def test_published_recipes_that_cannot_work_are_refused():
    """tp above the number of kv heads, where they do not divide it; more stages than layers."""
    config = LlamaConfig(32_000, 3072, 8192, 28, 12, 3, max_seq_len=4096)
    base = replace(planner.base_of(EIGHT), config=config, seq_len=4096)
    found = planner.search(base, 4, 64, {"tp": 4})
    assert found.best() is None and "kv" in planner.lost(found, found.fit[0], lambda r: True)
    with pytest.raises(NothingFits, match="for 8 devices: no candidate .* pp is at most 4 "):
        planner.answer(replace(EIGHT, model="tiny", fix="pp=8"))


@pytest.mark.slow
def test_64_gpus_take_less_than_a_minute(tmp_path, capfd):
    """On a processor to which 2,000 operations on no numbers, as in a trace, take 0.15 s."""
    number = torch.empty((), device="meta")
    for _ in range(2):  # the first time imports much
        start = time.process_time()
        for _ in range(2000):
            number + 1
        control = time.process_time() - start
    start, out = time.process_time(), tmp_path / "plan.png"
    code, printed, _ = call(capfd, "--gpus", "64", "--hardware", "h100-ndr", "--out", str(out))
    traced = printed.partition("own code under these plans, traced and replayed:\n")[2]
    assert [line[:5] for line in traced.splitlines()[:5]] == [f"  {n}: " for n in range(1, 6)]
    assert code == 0 and "64 x h100-ndr" in printed and out.stat().st_size > 5000
    assert time.process_time() - start < 60 * control / 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("dp=8,zero=1", ""),
        pytest.param(
            "dp=2,pp=4,microbatches=32", " for 16 of 32 micro", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_plan_that_minipars_own_code_cannot_hold_is_said(plan, more):
    """It keeps float32 where others keep 16 bits. Mutants: no trace; another limit."""
    base = planner.base_of(replace(EIGHT, model="llama-3.2-1b", seq=2048))
    config = replace(base.config, num_layers=max(2, Plan.parse(plan).pp))
    job = replace(base, config=config, plan=Plan.parse(f"{plan},precision=bf16"))
    ranked = planner.Ranked(job, cost.seconds(job), footprint.memory(job))
    assert ranked.as_dict()["minipar_bytes"] > 0
    peak = planner.simulate(ranked).peak_bytes
    for room, says in ((1.05, "fits in"), (0.95, "does not fit in")):
        small = replace(
            job.machine.device, memory=room * peak / footprint.HEADROOM, context=0, nccl=0
        )
        machine = replace(job.machine, device=small)
        told = planner.as_minipar(replace(ranked, job=replace(job, machine=machine)))
        assert says in told and more in told and f"{peak / 1e9:.0f} GB: " in told
        assert ("ask again with --software minipar" in told) == (room < 1)


def test_the_machine_can_be_changed():
    machine = asked.machine_of(replace(EIGHT, what_if="nic=200,nvlink=900,memory=141,gpus=72"))
    assert (machine.between.bandwidth, machine.inside.bandwidth) == (25e9, 900e9)
    assert (machine.device.memory, machine.gpus) == (141e9, 72)
    assert hardware.load("h100-ndr").gpus == 8


def test_every_answer_knows_of_the_same_room():
    """On a small device, what torch and NCCL leave. Mutant: a share of all its memory, in one."""
    config = replace(EIGHT, model="llama-3.2-1b", seq=2048, what_if="memory=10")
    base = planner.base_of(config)
    limit = footprint.room(base.machine.device)
    assert limit < footprint.HEADROOM * 10e9 and planner.search(base, 8, 64).limit == limit
    (ranked,) = planner.answer(replace(config, explain="dp=8"))[1]
    held = sum(ranked.memory.values())
    scaled = {part: limit * 1.01 / held * num_bytes for part, num_bytes in ranked.memory.items()}
    assert "does not fit" in planner.explain(replace(ranked, memory=scaled))


def test_a_device_has_the_bandwidth_that_is_asked_of_the_network():
    """Mutants: of one port, which a node's devices share; V100's rings as they were measured."""
    changed = replace(EIGHT, hardware="h100-100gbe", what_if="nic=400")
    shared, own = asked.machine_of(changed).between, asked.machine_of(EIGHT).between
    assert (shared.bandwidth, shared.shared) == (own.bandwidth, own.shared) == (50e9, 0)
    seconds = [
        asked.machine_of(replace(EIGHT, hardware="v100", what_if=what)).seconds_of_collective(
            "all_gather", 1e9, 4
        )
        for what in ("", "nvlink=300")
    ]
    assert seconds[1] < 0.5 * seconds[0]


def test_hosts_are_as_slow_in_the_simulator_as_in_the_closed_form():
    """Per doubling of tp, too. Mutant: as if tp had no operations of its own."""
    job = replace(planner.base_of(replace(EIGHT, model="tiny", seq=64)), plan=Plan(tp=2))
    slow = replace(job, software=replace(job.software, host_tp=1.0))  # next to that, all is free
    found = planner.simulate(planner.Ranked(slow, {}, {})).seconds
    assert found == pytest.approx(cost.seconds(slow)["host"], rel=0.01)


def test_a_plan_that_cannot_be_traced_is_a_sentence(capfd):
    """Mutant: an error, after all that was asked for."""
    plan = "pp=2,ep=2,schedule=dualpipe_v,microbatches=4,dispatch=paired"
    asked = "--model tiny-moe --gpus 4 --global-batch 8 --seq 64 --explain"
    code, printed, err = call(capfd, *asked.split(), plan)
    assert code == 0 and not err and "own code: not traced: plan pp=2" in printed
    (ranked,) = planner.answer(commands.parse(["plan", *asked.split(), plan])[1])[1]
    assert planner.as_minipar(ranked).startswith("not traced: plan pp=2")


@pytest.mark.slow
def test_the_simulator_and_the_closed_form_know_of_each_other(capsys, tmp_path):
    """Mutant: microseconds for milliseconds in one of them. minipar's own code sends more."""
    picture = tmp_path / "timeline.png"
    asked = "--model llama-3-8b --gpus 8 --global-batch 8 --seq 2048"
    plan = "dp=4,tp=2,zero=1,sequence_parallel,microbatches=2"
    with pytest.raises(SystemExit, match="0"):
        main.main(["plan", *asked.split(), "--explain", plan, "--out", str(picture)])
    said = capsys.readouterr().out
    closed = float(said.split("\n")[1].split()[1])
    replayed = float(said.partition("traced and replayed: ")[2].split()[0])
    assert 0.75 < replayed / closed < 1.35, said
    assert picture.stat().st_size > 10_000
