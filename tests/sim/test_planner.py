"""`minipar plan`: what it recommends is legal, fits and is the fastest; why not, in words."""

import json
import shlex
import time
from dataclasses import replace

import pytest
import torch

from minipar.cli import commands, main
from minipar.model.hf_config import config_json
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.parallel.plan import Plan
from minipar.sim import asked, cost, hardware, planner
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


@pytest.mark.parametrize("better", ["nic=800", "nvlink=900", "memory=141", "gpus=16"])
def test_a_better_machine_is_never_slower(found, better):
    config = replace(EIGHT, model="llama-3.2-1b", hardware="rtx4090", seq=2048)
    steps = [best(replace(config, what_if=what)).step for what in ("", better)]
    assert steps[1] <= steps[0] * (1 + 1e-9)


def test_the_words_say_why(found):
    text, plans = planner.answer(replace(EIGHT, gpus=16, global_batch=16))
    for words in (
        "The best, by part:",
        "Why:",
        "Others:",
        "To paste:",
        "slower:",
        "MFU",
        "good to",
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
    return planner.Ranked(job, cost.seconds(job), cost.memory(job))


def test_flags_are_read_by_our_own_training_and_come_in_pairs():
    for plan in (
        "dp=2,tp=2,zero=1,sequence_parallel",
        "dp=2,pp=2,schedule=interleaved_1f1b,microbatches=4",
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


def test_a_schedule_that_others_lack_is_said():
    job = replace(planner.base_of(EIGHT), plan=Plan(pp=8, schedule="zb_h1", microbatches=64))
    given = planner.flags(job)
    assert given["torchtitan"] == given["Megatron-LM"] == "has no schedule zb_h1"
    assert "schedule=zb_h1" in given["minipar train"]


def test_one_plan_is_explained_and_json_is_the_same(capsys):
    config = replace(EIGHT, explain="dp=8,zero=3,microbatches=8,precision=bf16")
    text, (ranked,) = planner.answer(config)
    loaded = json.loads(planner.answer(replace(config, json=True))[0])
    assert sum(loaded["seconds"].values()) == pytest.approx(ranked.step) == loaded["step_seconds"]
    assert f"{ranked.step:.2f} s" in text and loaded["plan"]["zero"] == 3
    assert 0.2 < loaded["mfu_causal"] < loaded["mfu"] < 0.8
    assert "does not fit" in planner.answer(replace(config, explain="dp=8"))[0]


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
    ],
)
def test_bad_input_is_one_line(capfd, words, message):
    code, _, err = call(capfd, *words.split())
    assert code == 2 and message in err and err.count("\n") == 1


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


def test_published_recipes_that_cannot_work_are_refused():
    """tp above the number of kv heads, where they do not divide it; more stages than layers."""
    config = LlamaConfig(32_000, 3072, 8192, 28, 12, 3, max_seq_len=4096)
    base = replace(planner.base_of(EIGHT), config=config, seq_len=4096)
    found = planner.search(base, 4, 64, {"tp": 4})
    assert found.best() is None and "kv" in planner.lost(found, found.fit[0], lambda r: True)
    with pytest.raises(NothingFits, match="no legal plan for 8 devices: no dp divides|num_layers"):
        planner.answer(replace(EIGHT, model="tiny", fix="pp=8"))


@pytest.mark.slow
def test_64_gpus_take_less_than_a_minute(tmp_path, capfd):
    start, out = time.process_time(), tmp_path / "plan.png"
    code, printed, _ = call(capfd, "--gpus", "64", "--hardware", "h100-ndr", "--out", str(out))
    traced = printed.partition("own code under these plans, traced and replayed:\n")[2]
    assert [line[:5] for line in traced.splitlines()[:5]] == [f"  {n}: " for n in range(1, 6)]
    assert code == 0 and "64 x h100-ndr" in printed and out.stat().st_size > 5000
    assert time.process_time() - start < 60


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
    ranked = planner.Ranked(job, cost.seconds(job), cost.memory(job))
    assert ranked.as_dict()["minipar_bytes"] > 0
    peak = planner.simulate(ranked).peak_bytes
    for room, says in ((1.05, "fits in"), (0.95, "does not fit in")):
        small = replace(job.machine.device, memory=room * peak / cost.HEADROOM)
        machine = replace(job.machine, device=small)
        told = planner.as_minipar(replace(ranked, job=replace(job, machine=machine)))
        assert says in told and more in told and f"{peak / 1e9:.0f} GB: " in told
        assert ("ask again with --software minipar" in told) == (room < 1)


def test_the_machine_can_be_changed():
    machine = asked.machine_of(replace(EIGHT, what_if="nic=200,nvlink=900,memory=141,gpus=72"))
    assert (machine.between.bandwidth, machine.inside.bandwidth) == (25e9, 900e9)
    assert (machine.device.memory, machine.gpus) == (141e9, 72)
    assert hardware.load("h100-ndr").gpus == 8


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
