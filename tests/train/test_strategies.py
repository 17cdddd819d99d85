"""Whole runs on any mesh, and with local methods: what is saved, resumed, validated and reported.

Unless a test says otherwise runs are in float64: what agrees to 1e-10 is the same computation.
"""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model import hf
from minipar.model.llama import PRESETS, Llama
from minipar.observe import timeline
from minipar.parallel.local_sgd import METHODS
from minipar.parallel.plan import Plan
from minipar.ranks.launch import RankError
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.report import StepRecorder
from minipar.train.trainer import Trainer
from tests.train.runs import SAME, assert_same_run, lines_of, saved

PLAIN = TrainConfig(
    steps=6,
    batch_size=5,
    seq_len=24,
    dtype="float64",
    warmup_steps=2,
    max_norm=0.5,
    eval_batches=2,
    sample_tokens=0,
    save_every=3,
    record_every=100,
)


def report_of(folder: Path) -> dict:
    return json.loads(
        (folder / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    )


# ---------------------------------------------------------------------- any plan
PLANS = [
    "dp=2,zero=3,microbatches=2",
    *(f"dp=3,zero={zero},microbatches=2" for zero in (1, 2, 3)),
    "tp=2,sequence_parallel",
    "dp=2,tp=2,zero=1,microbatches=2",
    "dp=2,pp=2,schedule=interleaved_1f1b,microbatches=2",
    "pp=2,tp=2,zero=2,sequence_parallel,schedule=zb_v,microbatches=3",
    "cp=2,tp=2,zero=3,context=ulysses",
    "pp=2,cp=2,microbatches=2,checkpointing=full",
]


def some(values, chosen) -> list:
    """For `parametrize`: those of `values` that are not `chosen` are left to `make test-all`."""
    return [v if v in chosen else pytest.param(v, marks=pytest.mark.exhaustive) for v in values]


WHOLE_RUN = dict(steps=4, sample_tokens=5, eval_every=3)


@pytest.fixture(scope="module")
def on_one_device(text, tmp_path_factory):
    """The folder of a run that a single process has made."""
    folder = tmp_path_factory.mktemp("one")
    trainer.train(replace(PLAIN, data=str(text), mesh="dp=1", **WHOLE_RUN), str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("plan", some(PLANS, [PLANS[i] for i in (0, 2, 4, 6, 7, 8)]))
def test_any_plan_leaves_what_one_device_would(run, on_one_device, plan):
    """Losses, norms, weights, optimizer state, validation and sample: all as of one device.

    Mutants: pieces joined in another order; a norm of this rank's pieces only (no `shard_axes`);
    weights read before they have arrived; only rank 0 in a collective (which would hang); moments
    of one stage; tokens that all ranks of tp count.
    """
    one = on_one_device
    many = run(Plan.parse(plan).num_ranks, "many", plan=plan, **WHOLE_RUN)
    assert any(norm > PLAIN.max_norm for (norm,) in lines_of(one, "grad_norm"))
    assert_same_run(many, one)
    (weights, state), (expected, serial) = saved(many, 4), saved(one, 4)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10)
    ours, theirs = state["optimizer"], serial["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() and len(theirs["state"]) == len(
        PARAMETERS
    )
    for i, entries in theirs["state"].items():
        assert entries.keys() == ours["state"][i].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in entries.items():
            torch.testing.assert_close(ours["state"][i][key], value, rtol=1e-8, atol=1e-12)
    written, (ours, theirs) = Plan.parse(plan), map(report_of, (many, one))
    assert ours["num_parameters"] == theirs["num_parameters"]
    if written.zero < 3 or written.dp == written.num_ranks:
        assert ours["sample"] == theirs["sample"]
    else:  # no rank can have the whole model
        assert ours["sample"].startswith("(none: ")
    validated = [
        [line.get("validation_loss", 0) for line in read(f / "metrics.jsonl")] for f in (one, many)
    ]
    assert validated[0][2] and validated[1] == pytest.approx(validated[0], rel=1e-10)


CHAINS = {
    "zero": ["dp=2,zero=2", "dp=3,zero=3", "dp=2,zero=1", "dp=1"],
    "mesh": ["dp=4", "tp=2,pp=2,microbatches=2", "dp=1", "dp=2,cp=2,zero=1,microbatches=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_by_another_plan_on_other_ranks(run, chain):
    """As if nothing had happened: losses, norms, the place in the data, the learning rate.

    Mutants: moments of one rank saved as if of all; pieces cut as by other ranks.
    """
    whole, start, first = run(1, "whole", steps=8), None, 0
    for plan, stop in zip(CHAINS[chain], (4, 6, 7, 8), strict=True):
        size = Plan.parse(plan).num_ranks
        folder = run(size, f"to {stop}", start=start, plan=plan, steps=8, save_every=stop)
        assert_same_run(folder, whole, first)
        start, first = folder / f"checkpoints/step_{stop:06d}", stop


@pytest.mark.slow
def test_experts_on_ranks_of_their_own_take_what_copies_of_all_would(run):
    """From the batch to the checkpoint. Mutant: shares of a batch by dp alone, alike along ep.

    Not beside one device: this preset balances each rank's microbatch, as Mixtral did.
    """
    moe = dict(preset="tiny-moe", steps=4)
    copies, apart = run(2, "copies", **moe), run(2, "apart", mesh="ep=2", **moe)
    assert_same_run(apart, copies)
    rest = run(2, "rest", start=apart / "checkpoints/step_000003", **moe)
    assert_same_run(rest, copies, 3)


@pytest.mark.slow
def test_a_plan_resumes_to_the_bit(run):
    """In single precision, on four ranks of two kinds. Mutant: a moment not restored."""
    changes = dict(plan="dp=2,tp=2,zero=1,sequence_parallel,microbatches=2", dtype="float32")
    whole = run(4, "whole", **changes)
    rest = run(4, "rest", start=whole / "checkpoints/step_000003", **changes)
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[3:]
    ours, theirs = saved(rest, 6)[0], saved(whole, 6)[0]
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "zeros", some([(2, 0), (3, 0), (0, 3), (3, 2), (1, 3)], [(2, 0), (0, 3), (3, 2)])
)
def test_goes_on_with_another_zero_in_single_precision(run, zeros):
    """Half on 2 ranks, half on one: to the rounding of float32, which grows by a step's update."""
    before, after = zeros
    whole = run(2, "whole", dtype="float32", zero=before)
    rest = run(1, "rest", start=whole / "checkpoints/step_000003", dtype="float32", zero=after)
    assert lines_of(rest, "loss")[0] == pytest.approx(lines_of(whole, "loss")[3], rel=1e-6)
    assert_same_run(rest, whole, 3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("zero", some([1, 2, 3], [3]))
def test_zero_resumes_to_the_bit(run, zero):
    """In single precision. Mutants: a moment not restored, or the pieces of another rank."""
    changes = dict(zero=zero, dtype="float32", microbatches=2)
    whole = run(2, "whole", **changes)
    rest = run(2, "rest", start=whole / "checkpoints/step_000003", **changes)
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[3:]
    ours, theirs = saved(rest, 6)[0], saved(whole, 6)[0]
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
def test_what_was_kept_back_goes_on_with_the_same_mesh_alone(run, capfd):
    """Mutant: as many ranks are taken for the same ranks; the first gradient tells."""
    plan = "dp=2,cp=2,compression=top-k,microbatches=2"
    changes = dict(plan=plan, dtype="float32")
    whole = run(4, "whole", **changes)
    rest = run(4, "rest", start=whole / "checkpoints/step_000003", **changes)
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[3:]
    assert "nothing kept back" not in capfd.readouterr().out
    changes = dict(plan="dp=2,pp=2,compression=top-k,schedule=zb_v", dtype="float32")
    other = run(4, "other", start=whole / "checkpoints/step_000003", **changes)
    assert "is of 4 ranks, dp=2,cp=2, and this run has 4, pp=2,dp=2" in capfd.readouterr().out
    loss, norm = lines_of(other, "loss", "grad_norm")[0]
    assert loss == pytest.approx(lines_of(whole, "loss")[3][0], rel=1e-5)
    assert norm != pytest.approx(lines_of(whole, "grad_norm")[3][0], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis, preset, alike, other",
    [
        ("pp=2", "tiny", "schedule=gpipe", "schedule=zb_v"),
        ("tp=2", "tiny-moe", "sequence_parallel", "expert_tensor_parallel"),
    ],
)
def test_what_was_kept_back_goes_on_with_the_same_parts_alone(
    run, capfd, axis, preset, alike, other
):
    """On the same mesh a rank may have other layers, or other parts of experts. Mutant: the axes
    are compared alone, and what is kept of a part that is elsewhere ends the run, as if it was
    damaged."""
    plan, same = f"{axis},compression=bf16,microbatches=2", dict(preset=preset, batch_size=2)
    start = run(2, "before", plan=plan, steps=1, **same) / "checkpoints/step_000001"
    run(2, "alike", start=start, plan=f"{plan},{alike}", steps=2, **same)
    assert "nothing kept back" not in capfd.readouterr().out
    run(2, "other", start=start, plan=f"{plan},{other}", steps=2, **same)
    has = "stages=0-1-1-0" if axis == "pp=2" else other
    says = f"is of 2 ranks, {axis}, and this run has 2, {axis},{has}\n"
    assert says in capfd.readouterr().out


@pytest.mark.slow
def test_what_was_kept_back_is_dropped_where_nothing_would_add_it(run, capfd):
    """By a compressor that keeps nothing back, and once. Mutant: each checkpoint has it again."""
    start = run(2, "top-k", compress="top-k", steps=1) / "checkpoints/step_000001"
    folder = run(2, "fp16", start=start, compress="fp16", steps=2)
    says = "what --compress has kept back in the checkpoint is dropped: this run has none"
    assert says in capfd.readouterr().out
    assert [kept["residues"] for kept in saved(folder, 2)[1]["compression"]] == [{}, {}]
    run(2, "none", start=folder / "checkpoints/step_000002", steps=3)
    assert says not in capfd.readouterr().out


def test_weights_of_another_model_are_refused_by_shards_too(run):
    """Its pieces are flat; what counts is what they are pieces of."""
    folder = run(1, "one", steps=1)
    with pytest.raises(checkpoint.CheckpointError, match="of another model: it has lm_head"):
        run(1, "other", start=folder / "checkpoints/step_000001", zero=3, preset="small")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_sixteen_bits_with_zero(run, precision):
    """Close to ddp in the same precision, which is close to float32."""
    changes = dict(dtype="float32", steps=4)
    full = lines_of(run(1, "full", **changes), "loss")
    for zero in (2, 3):
        found = run(2, f"zero{zero}", precision=precision, zero=zero, **changes)
        for (loss,), (expected,) in zip(lines_of(found, "loss"), full, strict=True):
            assert loss == pytest.approx(expected, rel=2e-2)
        assert lines_of(found, "loss") != full
        if precision == "fp16":
            assert lines_of(found, "skipped_steps")[-1] == (0,)
    plan = f"dp=2,pp=2,zero=2,schedule=zb_v,microbatches=2,precision={precision}"
    for mesh in (plan, f"tp=2,cp=2,sequence_parallel,precision={precision}"):
        found = run(4, mesh[:4], plan=mesh, **changes)
        assert lines_of(found, "loss")[-1] == pytest.approx(full[-1], rel=2e-2)
    if precision == "bf16":
        half = run(2, "half", zero=3, reduce_dtype="bfloat16", **changes)
        assert lines_of(half, "loss")[-1] == pytest.approx(full[-1], rel=2e-2)


# ---------------------------------------------------------------------- what a report says
PARAMETERS = list(Llama(PRESETS["tiny"]).parameters())
NUM_BYTES = sum(p.numel() for p in PARAMETERS) * 8  # of gradients, in float64


@pytest.mark.slow
def test_bytes_that_end_in_the_next_step_are_reported(run):
    """ZeRO-1 on 2 ranks: P/2 to reduce and P/2 to gather in a step, as the docstring promises.

    The weights of the last step are still under way when the last recording ends. Mutant: the
    recorder drops what is in flight, on a slow link all of P/2.
    """
    sent = report_of(run(2, "all", zero=1, record_every=1, steps=4))["sent_bytes"]
    assert 3.5 * NUM_BYTES <= sent <= 4.01 * NUM_BYTES + 1000
    sent = report_of(run(2, "three", zero=3, record_every=1, steps=4))["sent_bytes"]
    # (n-1)/n (2 P - R - B) + (n-1)/n P, where R and B, the root and the last block, are not all
    assert 4 * NUM_BYTES <= sent <= 4 * 1.6 * NUM_BYTES


@pytest.mark.slow
def test_recorded_steps_stand_for_all(run):
    """Mutant: the bytes of the recorded steps for those of all."""
    sent = report_of(run(2, "half", record_every=2, steps=4))["sent_bytes"]
    assert sent == pytest.approx(4 * NUM_BYTES, rel=0.05)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_crosses_steps_is_seen_where_it_ends(every):
    """Each step sends 10 bytes that arrive in it, and 100 that arrive in the next.

    Mutants: what is in flight is dropped; or counted in both steps; or begins before its step.
    """
    model, under_way = nn.Linear(2, 2), []
    recorder = StepRecorder(model, 0, 7, every, crosses_steps=True)
    took = []
    for number in range(7):
        began = time.monotonic()
        with recorder.step(number):
            active, start = timeline.active(), time.monotonic()
            model(torch.ones(1, 2))
            for other, begun in under_way:
                other.comm("all_gather", "dp", 100, begun, time.monotonic())
            under_way.clear()
            if active is not None:
                active.comm("reduce_scatter", "dp", 10, start, time.monotonic())
                under_way.append((active, time.monotonic()))
        took.append(time.monotonic() - began)
    chosen = [n for n in range(7) if n % every == every // 2 and (n or every == 1)]
    assert sorted(recorder.recorded) == chosen
    for number, step in recorder.recorded.items():
        if number == 0:
            continue
        gathered, reduced = step.select(name="all_gather"), step.select(name="reduce_scatter")
        assert len(gathered) == len(reduced) == 1
        assert gathered.start < reduced.end and step.duration < took[number]
    assert recorder.typical(Mesh()).bytes_by_axis() == {"dp": 110}
    num_bytes, seconds, hidden = recorder.communication()
    crossing = len(chosen) - (every == 1)  # nothing came into the first step
    expected = (10 * len(chosen) + 100 * crossing) * 7 / len(chosen)
    assert num_bytes == pytest.approx(expected) and seconds > 0 and 0 <= hidden <= 1


@pytest.mark.parametrize("first, last, every", [(0, 245, 20), (0, 3, 20), (7, 8, 5), (7, 9, 20)])
def test_at_least_one_step_is_recorded_where_steps_are_crossed(first, last, every):
    recorder = StepRecorder(nn.Linear(2, 2), first, last, every, crosses_steps=True)
    for number in range(first, last):
        with recorder.step(number):
            recorder.model(torch.ones(1, 2))
    assert recorder.recorded
    assert first not in recorder.recorded or last == first + 1


@pytest.mark.slow
def test_all_agreements_are_counted_and_one_is_shown(run):
    """2 of 6 steps send P; one step in twenty would tell of none, or of ten times as much."""
    folder = run(2, "local", local_method="local sgd", local_every=3)
    sent = report_of(folder)["sent_bytes"]
    assert sent == pytest.approx(2 * NUM_BYTES, abs=6 * 20)
    shown = timeline.Timeline.load(folder / "timeline.json")
    assert shown.bytes_by_axis()["dp"] == pytest.approx(2 * NUM_BYTES, abs=200)


# ---------------------------------------------------------------------- local methods
@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    some(METHODS, ["local sgd", "diloco delayed", "diloco streaming", "delayed gradients"]),
)
def test_a_local_method_resumes_to_the_bit(run, method, capfd):
    """Resumed in the middle of a round. Mutants: rank 0's model, or its moments, handed to all."""
    changes = dict(local_method=method, local_every=4, dtype="float32", steps=8)
    whole = run(2, "whole", save_every=5, **changes)
    ranks = saved(whole, 5)[1]["local"]["ranks"]
    rest = run(2, "rest", start=whole / "checkpoints/step_000005", save_every=5, **changes)
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[5:]
    ours, theirs = saved(rest, 8), saved(whole, 8)
    assert all(ours[0][name].equal(theirs[0][name]) for name in theirs[0])
    own = [rank["strategy"]["model"]["model.norm.weight"] for rank in ranks]
    moments = [rank["optimizer"]["state"][0]["exp_avg"] for rank in ranks]
    alone = method not in ("post-local sgd", "delayed gradients")  # which still agree in each step
    assert own[0].equal(own[1]) is moments[0].equal(moments[1]) is not alone
    final = [rank["strategy"]["model"]["model.norm.weight"] for rank in theirs[1]["local"]["ranks"]]
    assert final[0].equal(final[1]) and final[0].equal(theirs[0]["model.norm.weight"])
    assert "anew" not in capfd.readouterr().out


def agreed_after_loading(config: TrainConfig, folder: str) -> dict:
    trainer = Trainer(config, Path(folder))
    trainer.load(Path(folder))
    return trainer.setup.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("method", some(["diloco", "local sgd"], ["diloco"]))
def test_what_is_validated_is_what_is_saved(run, ranks, method, capfd):
    """The model agreed on; validating it changes nothing. On other ranks a run begins from it.

    Step 3 is in the middle of a round. Mutants: a rank's own model validated, or not put back; an
    outer model that stays the one of the beginning.
    """
    changes = dict(local_method=method, local_every=2, steps=5)
    folder = run(2, "often", eval_every=1, **changes)
    plain = run(2, "plain", **changes)
    assert lines_of(folder, *SAME) == lines_of(plain, *SAME)
    config = TrainConfig.load(folder / "config.json")
    for step in (3, 5):
        start = folder / f"checkpoints/step_{step:06d}"
        serial = Trainer(replace(config, mesh="dp=1", local_method="none"), folder)
        serial.load(start)
        validated = read(folder / "metrics.jsonl")[step - 1]["validation_loss"]
        assert serial.validate() == pytest.approx(validated, rel=1e-10)
    line = f"the checkpoint is of {method} on 2 ranks"
    assert f"the optimizer starts anew: that of {line[0:14]}" in capfd.readouterr().out

    start = folder / "checkpoints/step_000003"
    expected = saved(folder, 3)[0]
    for agreed in ranks(3).run(agreed_after_loading, replace(config, mesh="dp=3"), str(start)):
        for name, weight in expected.items():
            torch.testing.assert_close(agreed[name], weight, rtol=1e-12, atol=1e-14)
    assert f"{line}, and this is {method} on 3" in capfd.readouterr().out


@pytest.mark.slow
def test_a_local_method_goes_on_where_ddp_was(run, capfd):
    """All ranks take over the one optimizer state; the first loss is that of the same weights."""
    plain = run(2, "plain")
    start = plain / "checkpoints/step_000003"
    local = run(2, "local", start=start, local_method="diloco", local_every=1)
    ours, theirs = lines_of(local, "step", "loss"), lines_of(plain, "step", "loss")[3:]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    assert ours[1] != pytest.approx(theirs[1], rel=1e-4)
    assert "anew" not in capfd.readouterr().out
    state = saved(local, 6)[1]["local"]["ranks"][0]["optimizer"]["state"][0]
    assert state["step"].item() == 6


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_all_ranks_together(run, tmp_path):
    """Also where each has a norm of its own. Mutant: one stops, and the others wait for it."""
    for save_every in (1, 100):
        with pytest.raises(RankError) as caught:
            run(
                2,
                f"wild{save_every}",
                lr=1e9,
                dtype="float32",
                local_method="local sgd",
                local_every=2,
                save_every=save_every,
            )
        failures = caught.value.failures.values()
        assert [failure.kind for failure in failures] == ["FloatingPointError"] * 2
    for folder in checkpoint.available(tmp_path / "wild1/checkpoints"):
        assert all(weight.isfinite().all() for weight in checkpoint.load(folder)[0].values())


def trained_with_an_infinite_gradient(config: TrainConfig, folder: str, stop_after: int) -> str:
    """Train; in step 3 a gradient of rank 1 is infinite, and all are asked to stop after a step."""
    trainer, request = Trainer(config, Path(folder)), SimpleNamespace(came=False)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        is_due = trainer.mesh.rank == 1 and trainer.step == 2
        return gradient * math.inf if is_due else gradient

    def tell(line: dict) -> None:
        request.came = line["step"] == stop_after

    next(trainer.model.parameters()).register_hook(spoil)
    with pytest.raises(FloatingPointError) as raised:
        trainer.run(tell, request)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, save_every, stop_after, rank",
    [("local sgd", 2, 3, 1), ("diloco", 2, 3, 1), ("delayed gradients", 3, 0, 0)],
)
def test_no_checkpoint_keeps_what_is_not_finite_on_one_rank(
    ranks, text, tmp_path, method, save_every, stop_after, rank
):
    """Neither one that a signal asks for, nor the gradient that waits for the next step. Mutants:
    who is asked to stop looks at no norm; a late gradient is looked at when it is used."""
    config = replace(PLAIN, data=str(text), mesh="dp=2", local_method=method, save_every=save_every)
    found = ranks(2).run(trained_with_an_infinite_gradient, config, str(tmp_path), stop_after)
    assert found[0] == found[1]
    assert found[0].startswith(f"step 3: on rank {rank}, gradient norm ")
    kept = [checkpoint.step_of(path) for path in checkpoint.available(tmp_path / "checkpoints")]
    assert kept == [step for step in (2,) if step == save_every]


def with_an_overflow_on_one_rank(config: TrainConfig, folder: str) -> tuple[int, bool]:
    trainer = Trainer(config, Path(folder))
    steps = []

    def poison(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        steps.append(output.requires_grad)
        if trainer.mesh.rank == 1 and sum(steps) == 2 and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)

    trainer.model.register_forward_hook(poison)
    trainer.run()
    weights = trainer.setup.full_state_dict()
    return int(trainer.precision.scaler.num_skipped), all(
        weight.isfinite().all().item() for weight in weights.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(zero=1),
        dict(zero=2),
        dict(zero=3),
        dict(mesh="tp=2", sequence_parallel=True),
        dict(mesh="pp=2", microbatches=2, zero=1),
        dict(local_method="diloco", local_every=2),
    ],
    ids=str,
)
def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(ranks, text, tmp_path, changes):
    """Mutant: the flag is not shared, and where ranks differ in it one of them steps alone."""
    common = dict(data=str(text), mesh="dp=2", dtype="float32", precision="fp16")
    config = replace(PLAIN, **{**common, **changes})
    config.check()
    found = ranks(2).run(with_an_overflow_on_one_rank, config, str(tmp_path))
    assert found == [(1, True), (1, True)]


# ---------------------------------------------------------------------- never whole
@pytest.mark.slow
@pytest.mark.parametrize(
    "text", some(["dp=2", "dp=2,tp=2", "pp=2,microbatches=2", "cp=2"], ["dp=2", "dp=2,tp=2"])
)
def test_zero_3_begins_as_the_whole_model_does(ranks, tmp_path, text, run):
    """From "meta", by a seed or from a folder: weights as of one process, bit for bit.

    Mutants: a rank draws its pieces from the global stream; a tied head of its own."""
    folder, tied = tmp_path / "model", "pp" not in text  # which two stages cannot share here
    hf.save(Llama(replace(PRESETS["tiny"], tie_embeddings=tied), seed=5), folder)
    config = replace(PLAIN, data=str(Path(checkpoint.__file__)), plan=f"{text},zero=3")
    for init, seed in (("", 3), (str(folder), 3))[not tied :]:
        expected = hf.load(folder) if init else Llama(PRESETS["tiny"], seed=seed)
        asked = replace(config, init=init, seed=seed)
        for found in ranks(config.num_ranks).run(first_weights, asked, str(tmp_path / "run")):
            wanted = {name: t.double() for name, t in expected.state_dict().items()}
            assert found.keys() == wanted.keys()
            assert all(found[name].equal(wanted[name]) for name in wanted)


def first_weights(config: TrainConfig, folder: str) -> dict:
    with torch.random.fork_rng():
        return Trainer(config, Path(folder)).setup.full_state_dict()
