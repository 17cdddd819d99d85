"""`minipar plan`: what it recommends is legal, fits and is the fastest; why not, in words."""

import json
import shlex
from dataclasses import replace

import pytest
import torch

from minipar.cli import commands, main
from minipar.model.hf import config_json
from minipar.model.llama import PRESETS
from minipar.parallel.plan import Plan
from minipar.sim import asked, cost, footprint, hardware, planner
from minipar.sim.planner import NothingFits, PlanConfig, Ranked
from minipar.train.config import TrainConfig

EIGHT = PlanConfig(gpus=8, global_batch=64, replay=False)
SMALL = replace(EIGHT, model="llama-3.2-1b", seq=2048)


@pytest.fixture(scope="module")
def found():
    """Eight billion parameters on eight devices."""
    return planner.search(planner.base_of(EIGHT), 8, 64)


def ranked(config: PlanConfig, plan: str) -> Ranked:
    job = replace(planner.base_of(config), plan=Plan.parse(plan))
    return Ranked(job, cost.seconds(job), footprint.memory(job))


# ---------------------------------------------------------------------- the search
def test_what_is_recommended_is_legal_and_fits_and_is_the_fastest(found):
    plans, limit = found.top(20), footprint.room(hardware.load("h100").device)
    assert len(plans) > 5 and [p.step for p in plans] == sorted(p.step for p in plans)
    for one in plans:
        one.job.plan.check(one.job.config)
        assert sum(one.memory.values()) <= limit < 66.5e9 and one.job.plan.num_ranks == 8
        assert one.job.plan.dp * one.job.plan.microbatches * one.job.microbatch == 64
    legal = [r for r in found.fit if planner.problem(r.job) is None]
    assert plans[0].step == min(r.step for r in legal)
    # Least tp x pp, then the largest microbatch that fits: the rule of thumb.
    thumb = min(legal, key=lambda r: (r.job.plan.tp * r.job.plan.pp, -r.job.microbatch))
    assert plans[0].step <= thumb.step


def test_a_faster_plan_is_explained_by_a_part_that_takes_less(found):
    """Mutant: the fastest "takes -20%: 0.00 s of tp instead of 0.00"."""
    slow = found.best(lambda r: r.job.plan.checkpointing == "full")
    less, *_, more = planner.lost(found, slow, lambda _: True).rpartition(": ")[2].split()
    assert float(less) < float(more)


def test_of_equal_plans_the_simplest_is_taken():
    """A tiny model on 16 GPUs. Mutant: cp, or ZeRO 3, for a percent."""
    said = planner.answer(replace(EIGHT, model="tiny", gpus=16, global_batch=512))[0]
    star = next(line for line in said.splitlines() if line.partition(" ")[0].endswith("*"))
    assert " dp=16,precision=bf16,micro" in star and "--plan dp=16,precision=bf16 " in said
    assert "so equal: take it" in said


def test_plans_that_nobody_checked_are_not_said_to_be_equal():
    """Mutant: "take it", beside an error of "?"."""
    said = planner.answer(replace(EIGHT, model="tiny", gpus=16, global_batch=512, fix="cp=2"))[0]
    assert "error ?" in said and "errors are not known: time both" in said and "take it" not in said


def test_stages_per_rank_are_searched(found):
    """Mutants: two of each rank alone, where published pipelines had three, five and eight; stages
    with one layer beside stages with two, as 32 layers in 20 or in 24 would be."""
    stages = {r.job.plan.stages_per_rank for r in found.fit if r.job.plan.pp == 4}
    assert stages == {0, 2, 3, 8}
    assert max(r.job.plan.stages_per_rank for r in found.fit if r.job.plan.pp == 8) == 2


@pytest.mark.parametrize(
    ("software", "word", "values"),
    [
        ("nanotron", "zero", {0, 1}),
        ("nanotron", "schedule", {"1f1b"}),
        ("llm-foundry", "tp", {1}),
        ("any", "zero", {0, 1, 2, 3}),
    ],
)
def test_software_is_only_asked_for_what_it_can_do(software, word, values):
    """Mutant: ZeRO 2 recommended to users of nanotron, which has none."""
    every = planner.search(planner.base_of(replace(SMALL, software=software)), 8, 64)
    assert {getattr(r.job.plan, word) for r in (*every.fit, *every.too_large)} == values
    alone = planner.search(planner.base_of(replace(SMALL, software=software)), 1, 64)
    assert alone.best()  # llm-foundry's FSDP on one device is no ZeRO


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "fix",
    [
        "context=ulysses,cp=2",
        "schedule=zb_h1,pp=2",
        "stages_per_rank=4,pp=2",
        "microbatch=64",
        "pp=2,zero=3",
        "tp=2,sequence_parallel=false",
        "dp=8,microbatches=1",
    ],
)
def test_words_that_no_search_varies_can_be_fixed(fix):
    """Mutant: every candidate has them as usual, and so none is left."""
    options = dict(global_batch=512)
    if "microbatches" in fix:  # 64 sequences each, on a device that has room for them
        options |= dict(seq=256)
    if "zero=3" in fix:  # which goes with no table that two stages have
        options |= dict(model="llama-3-8b")
    for one in planner.answer(replace(SMALL, fix=fix, **options))[1]:
        given = {"microbatch": one.job.microbatch}
        for word, value in asked.fixed(fix).items():
            assert given.get(word, getattr(one.job.plan, word, None)) == value


def test_words_to_fix_are_read_as_those_of_a_plan():
    """Mutant: a name with a hyphen, or a blank behind it, is looked up as it was typed."""
    assert asked.fixed("tp = 2,sequence-parallel") == {"tp": 2, "sequence_parallel": True}


# ---------------------------------------------------------------------- the words
def test_flags_are_read_by_our_own_training_and_are_torchtitans_degrees():
    one = ranked(replace(EIGHT, model="small", gpus=4, seq=512), "dp=2,tp=2,zero=1")
    given = planner.flags(one.job)
    name, config = commands.parse(
        ["train", "--preset", "small", *shlex.split(given["minipar train"])]
    )
    assert isinstance(config, TrainConfig) and name == "train"
    assert config.as_plan() == one.job.plan and (config.seq_len, config.batch_size) == (512, 2)
    p = "--parallelism."
    assert given["torchtitan"] == f"{p}data_parallel_shard_degree 2 {p}tensor_parallel_degree 2"
    whole = planner.flags(replace(one.job, plan=Plan(dp=2)))
    assert whole["torchtitan"] == f"{p}data_parallel_replicate_degree 2"


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
        (dict(gpus=16), "tp=16,sequence_parallel", "tp over nodes"),
        (dict(gpus=16, hardware="h100-10gbe"), "pp=16,microbatches=64", "nodes over 10gbe"),
        (dict(gpus=128, global_batch=128), "dp=128,zero=1", "more than 64 devices"),
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
    text, (one,) = planner.answer(config)
    words = f"no published run of this kind was checked: {kind}"
    assert (words in text) == bool(kind)
    assert planner.unchecked(one.job) == (words if kind else "")
    assert (f"error {planner.ERROR:.0%}: 90 % of" in text) == (not kind)
    assert "fp8" in planner.unchecked(replace(one.job, dtype="fp8"))


def test_one_plan_is_explained_and_json_is_the_same():
    config = replace(EIGHT, explain="dp=8,zero=3,microbatches=8,precision=bf16")
    text, (one,) = planner.answer(config)
    loaded = json.loads(planner.answer(replace(config, json=True))[0])
    assert sum(loaded["seconds"].values()) == pytest.approx(one.step) == loaded["step_seconds"]
    assert f"{one.step:.2f} s" in text and loaded["plan"]["zero"] == 3
    assert 0.2 < loaded["mfu_causal"] < loaded["mfu"] < 0.8
    assert planner.answer(replace(config, explain=str(one)))[1] == [one]  # microbatch is a word
    said = planner.answer(replace(config, explain="dp=4,cp=2,context=gather"))[0]
    assert "does not fit" in said and "does not price context=gather:" in said


# ---------------------------------------------------------------------- replay
def test_hosts_are_as_slow_in_the_simulator_as_in_the_closed_form():
    """Per doubling of tp, too. Mutant: as if tp had no operations of its own."""
    job = ranked(replace(EIGHT, model="tiny", seq=64), "tp=2,microbatches=2").job
    slow = replace(job, software=replace(job.software, host_tp=1.0))  # next to that, all is free
    assert planner.simulate(slow).seconds == pytest.approx(cost.seconds(slow)["host"], rel=0.01)


@pytest.mark.slow
def test_the_replay_orders_the_table():
    """Mutants: the order of the closed form; plans that are not replayed."""
    text, plans = planner.answer(replace(SMALL, seq=8192, top=3, replay=True))
    times, closed = ([getattr(one, name) for one in plans] for name in ("replayed", "step"))
    assert times == sorted(times) and min(times) > 0 and closed != sorted(closed)
    assert all(f"{one.replayed:.2f} s" in text for one in plans)
    for one in plans:
        assert one.replayed == pytest.approx(one.step, rel=0.15)
        assert one.traced_bytes == pytest.approx(one.held, rel=0.2)


@pytest.mark.parametrize(("software", "stands"), [("any", False), ("minipar", True)])
def test_selective_recomputation_of_others_is_not_replayed(software, stands):
    """Mutant: our code, which keeps twice as much and repeats less, sets the time of theirs."""
    one = ranked(SMALL, "dp=2,zero=1,checkpointing=selective,precision=bf16")
    few = replace(one.job.config, num_layers=2)
    job = replace(one.job, config=few, software=hardware.software(software))
    one = planner.replayed(Ranked(job, cost.seconds(job), footprint.memory(job)))
    assert bool(one.replayed) == stands


@pytest.mark.slow
def test_a_few_microbatches_stand_for_the_step():
    """Mutant: their time alone, or that of as many as there are."""
    one = ranked(SMALL, "dp=4,pp=2,zero=1,microbatches=16,precision=bf16")
    few = replace(one.job.config, num_layers=4)
    job = replace(one.job, config=few)
    one = Ranked(job, cost.seconds(job), footprint.memory(job))
    assert planner.shorter(job).plan.microbatches == 4
    whole = planner.simulate(job).seconds + job.software.fixed
    assert planner.replayed(one).replayed == pytest.approx(whole, rel=0.03)


@pytest.mark.slow
def test_explaining_draws_a_few_microbatches(capsys, tmp_path):
    """Mutant: hundreds, which take minutes to draw; microseconds for milliseconds."""
    picture, plan = tmp_path / "timeline.png", "dp=4,tp=2,zero=1,sequence_parallel,microbatches=64"
    words = "--model llama-3.2-1b --gpus 8 --global-batch 256 --seq 2048"
    with pytest.raises(SystemExit, match="0"):
        main.main(["plan", *words.split(), "--explain", plan, "--out", str(picture)])
    said = capsys.readouterr().out
    closed = float(said.split("\n")[1].split()[1])
    replayed = float(said.partition("traced and replayed: ")[2].split()[0])
    assert "for 4 of 64 microbatches" in said and 0.75 < 16 * replayed / closed < 1.5, said
    assert picture.stat().st_size > 10_000


def test_a_plan_that_cannot_be_traced_is_a_sentence(capfd):
    """Mutant: an error, after all that was asked for."""
    plan = "pp=2,ep=2,schedule=dualpipe_v,microbatches=4,dispatch=paired"
    words = "--model tiny-moe --gpus 4 --global-batch 8 --seq 64 --explain"
    code, printed, err = call(capfd, *words.split(), plan)
    assert code == 0 and not err and "own code: not traced: plan pp=2" in printed
    (one,) = planner.answer(commands.parse(["plan", *words.split(), plan])[1])[1]
    assert planner.replayed(one) == one and not one.replayed


# ---------------------------------------------------------------------- the question
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
        ("--hardware H100", "nearest names are h100"),
        ("--out nowhere/plan.png", "name a file in a folder that exists"),
        ("--hardware nowhere.toml", "nowhere.toml is not a machine"),
        ("--global-batch 0", "--global-batch 0"),
        ("--seq 9000", "sees 1 to 8,192 tokens"),
        ("--software megaton", "no software 'megaton'; there are any"),
        ("--fix tp=2,banana", "banana"),
        ("--explain dp=3,tp=3 --gpus 9", "tp=3"),
        ("--explain dp=4", "4 ranks"),
        ("--explain dp=8,precision=float32", "h100-ndr is priced in precision=bf16 alone"),
        ("--gpus 1000000000000", "--gpus 1,000,000,000,000: use at most 1,048,576"),
        ("--explain dp=8,microbatch=1 --global-batch 64", "--gpus 8 and --global-batch 8"),
        ("--explain dp=8 --fix tp=2", "--fix tp=2 bounds a search, and --explain has one plan"),
    ],
)
def test_bad_input_is_one_line(capfd, words, message):
    code, _, err = call(capfd, *words.split())
    assert code == 2 and message in err and err.count("\n") == 1


NO_NETWORK = """
[node.mine]
device = "h100"
gpus = [8, "counted"]
inside = "nvlink4"
between = "none"
"""


def test_a_network_that_nobody_named_is_refused_where_a_plan_needs_it(tmp_path):
    """Mutant: placeholder numbers, by which plans are ranked without a word."""
    (tmp_path / "mine.toml").write_text(NO_NETWORK, encoding="utf-8")
    inside = replace(SMALL, hardware=str(tmp_path / "mine.toml"))
    assert planner.answer(inside)[1]
    with pytest.raises(ValueError, match="mine has no network between its nodes, as nobody has"):
        planner.answer(replace(inside, gpus=16))


def test_words_that_no_candidate_has_are_said():
    """Mutant: the smallest plan of none."""
    with pytest.raises(NothingFits, match="for these --gpus, .* there is no such plan"):
        planner.answer(replace(EIGHT, fix="dp=3"))


@pytest.mark.slow
def test_nothing_fits_is_exit_code_3_with_a_change_that_works(capfd):
    words = "--model llama-3-70b --gpus 8 --global-batch 8"
    code, _, err = call(capfd, *words.split())
    assert code == 3 and "optimizer" in err and err.count("\n") == 1
    change = err.rpartition(";")[2].replace("would do", "").split()
    config = commands.parse(["plan", *words.split(), "--no-replay", *change])[1]
    assert planner.answer(config)[1]
