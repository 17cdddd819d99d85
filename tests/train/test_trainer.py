"""Whole runs: the same on any number of ranks, and the same when they are interrupted.

Unless a test says otherwise runs are in float64, where the order in which numbers are added hides
nothing: what agrees to 1e-10 is the same computation.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model import hf
from minipar.model.llama import PRESETS, Llama
from minipar.observe import timeline
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.ranks.launch import RankError
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.data import IGNORE
from minipar.train.metrics import read
from minipar.train.report import StepRecorder, figures
from minipar.train.step import train_step
from tests.train.runs import assert_same_run, lines_of, report_of, saved

PLAIN = TrainConfig(
    steps=6,
    batch_size=5,
    seq_len=32,
    dtype="float64",
    warmup_steps=2,
    max_norm=0.5,
    sample_tokens=0,
    save_every=100,
    record_steps=0,
)


@pytest.fixture(scope="module")
def one(text, tmp_path_factory) -> Path:
    """The folder of a run that a single process has made."""
    folder = tmp_path_factory.mktemp("one")
    trainer.train(replace(PLAIN, data=str(text), mesh="dp=1"), str(folder))
    return folder


# ---------------------------------------------------------------------- any number of ranks
@pytest.mark.slow
def test_trap_07_any_number_of_ranks_and_microbatches_is_the_same_run(run, one):
    """In float64. Bits may differ: other ranks, other order of additions, and that is right.

    A mutant that averages gradients over ranks, or forgets a rank's samples, is off by far more.
    """
    norms = [norm for (norm,) in lines_of(one, "grad_norm")]
    assert any(norm > PLAIN.max_norm for norm in norms)  # so that clipping has a say
    folders = [run(size, f"on{size}") for size in (2, 3)]
    folders += [run(1, "small", microbatches=3), run(2, "both", microbatches=2)]
    final, validated = saved(one, 6)[0], report_of(one)["validation_loss"]
    for other in folders:
        assert_same_run(other, one)
        assert report_of(other)["validation_loss"] == pytest.approx(validated, rel=1e-10)
        for name, weight in saved(other, 6)[0].items():
            torch.testing.assert_close(weight, final[name], rtol=0, atol=1e-9)


# ---------------------------------------------------------------------- interrupted runs


@pytest.mark.slow
def test_resumes_in_place_and_on_another_number_of_ranks(run):
    """The place in the text is counted in samples: nothing is lost or seen twice."""
    whole = run(1, "whole", steps=9, save_every=3)  # 46 samples: the second epoch begins meanwhile
    broken = run(2, "broken", steps=9, save_every=3)
    shutil.rmtree(broken / "checkpoints/step_000009")
    with (broken / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 10, "lo')  # cut short by a kill
    run(3, "broken", start=broken / "checkpoints/step_000006", steps=9, save_every=3)
    assert_same_run(broken, whole)
    assert [step for (step,) in lines_of(broken, "step")] == [*range(1, 10)]


@pytest.mark.slow
def test_a_schedule_that_has_changed_since_the_checkpoint_is_said(run, one, capfd):
    """Mutant: a schedule is stretched in silence."""
    run(1, "longer", start=one / "checkpoints/step_000006", steps=7)
    assert "the learning rate of step 6 was 0.0003, and is" in capfd.readouterr().out
    run(1, "rest", start=run(1, "part", save_every=3) / "checkpoints/step_000003")
    assert "the learning rate" not in capfd.readouterr().out


@pytest.mark.slow
def test_another_text_seed_or_model_is_refused(run, one, tmp_path):
    refused = [
        (dict(steps=6), ValueError, "has 6 steps already: --steps must be more"),
        (dict(seed=1), ValueError, "cannot resume the data with another seed"),
        (dict(seq_len=16), ValueError, "cannot resume the data with another seq_len"),
        (dict(preset="small"), checkpoint.CheckpointError, "is of a model with "),
    ]
    for name, value in {"rope_theta": 5e5, "norm_eps": 0.5}.items():  # of which no shape tells
        hf.save(Llama(replace(PRESETS["tiny"], **{name: value})), tmp_path / name)
        says = f"{name}={getattr(PRESETS['tiny'], name)}, and this one has"
        refused.append((dict(init=str(tmp_path / name)), checkpoint.CheckpointError, says))
    for changes, error, says in refused:
        with pytest.raises(error, match=says):
            run(1, "other", start=one / "checkpoints/step_000006", **{"steps": 7} | changes)
    assert not (tmp_path / "other").exists()


# ---------------------------------------------------------------------- learning, or not
@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(run, tmp_path):
    """On all ranks, before a checkpoint. Mutant: numbers are looked at after the save."""
    with pytest.raises(RankError) as caught:
        run(2, "wild", lr=1e9, save_every=1, dtype="float32")
    failures = caught.value.failures.values()
    assert [failure.kind for failure in failures] == ["FloatingPointError"] * 2
    (message,) = {failure.message for failure in failures}
    assert "gradient norm" in message and "lower --lr than 1e+09" in message
    steps = [step for (step,) in lines_of(tmp_path / "wild", "step")]
    newest = checkpoint.newest(tmp_path / "wild")
    assert steps and checkpoint.step_of(newest) == steps[-1] < 6
    assert all(weight.isfinite().all() for weight in checkpoint.load(newest)[0].values())


@pytest.mark.slow
def test_trap_11_the_cpu_path_never_touches_cuda(run, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which is then used")
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("cuda was touched"))
    with pytest.raises(BaseException, match="cuda was touched"):
        torch.cuda.synchronize()
    run(1, "one", sample_tokens=3, record_steps=1, profile=True)


# ---------------------------------------------------------------------- what a run leaves
@pytest.mark.slow
def test_a_trace_is_written_or_the_run_says_that_there_is_none(run, capfd):
    assert [*(run(1, "long", profile=True, steps=3) / "profile").iterdir()]
    short = run(1, "short", profile=True, steps=2)
    assert "no trace of steps 3 to 5, as this run has 2" in capfd.readouterr().out
    assert not (short / "profile").exists()


@pytest.mark.slow
def test_files_are_written_and_agree(run):
    """The last two steps of six are recorded, and one of them is drawn."""
    longer = PLAIN.steps + 1  # a warm-up ends with the run
    changes = dict(record_steps=2, sample_tokens=7, save_every=4, warmup_steps=longer)
    folder = run(2, "files", dtype="float32", **changes)
    report, steps = report_of(folder), read(folder / "metrics.jsonl")
    assert [line["step"] for line in steps] == [*range(1, 7)]
    assert [line["step"] for line in steps if line.get("recorded")] == [5, 6]
    assert report["first_loss"] == steps[0]["loss"] and report["last_loss"] == steps[-1]["loss"]
    assert steps[-1]["lr"] == PLAIN.lr  # the warm-up has ended with the run
    assert report["validation_loss"] == steps[-1]["validation_loss"]
    num_tokens, seconds = (sum(line[key] for line in steps[:4]) for key in ("tokens", "seconds"))
    assert report["tokens_per_second"] == pytest.approx(num_tokens / seconds)
    flops = PRESETS["tiny"].flops_per_token(PLAIN.seq_len)
    for line in steps:
        assert 0 < line["tokens"] <= 5 * 32
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert 50e6 < line["peak_memory"] <= max(report["peak_memory"])
    peaks = [flops * line["tokens_per_second"] / line["mfu"] for line in (*steps, report)]
    assert peaks == [pytest.approx(peaks[0])] * 7
    assert report["peak"] == "a float32 matmul, measured on 2 ranks at once"

    params = list(Llama(PRESETS["tiny"]).parameters())
    assert report["num_parameters"] == sum(p.numel() for p in params)
    # 2 (n-1)/n (P + N) of gradients and flags, and two scalars of 8 bytes: tokens and loss.
    per_step = 2 * (2 - 1) / 2 * (sum(p.nbytes for p in params) + len(params) + 16)
    assert report["sent_bytes"] == pytest.approx(per_step, abs=80)
    assert 0 <= report["hidden_fraction"] <= 1 and report["communication_seconds"] > 0
    assert len(report["peak_memory"]) == 2

    recorded = Timeline.load(folder / "timeline.json")
    assert recorded.ranks == [0, 1] and "2 ranks" in recorded.label
    assert recorded.bytes_by_axis()["dp"] == pytest.approx(2 * per_step, abs=200)
    assert {"forward", "backward", "optimizer", "comm"} <= {span.kind for span in recorded}
    sample = report["sample"]
    assert (folder / "sample.txt").read_text(encoding="utf-8") == f"{sample}\n"
    assert 32 < len(sample) <= 32 + 7  # letters of one byte, and then of up to four
    config = TrainConfig.load(folder / "config.json")
    assert config.plan == "dp=2" and config.save_every == 4
    found = checkpoint.available(folder / "checkpoints")
    assert [checkpoint.step_of(path) for path in found] == [4, 6]


def test_a_recorded_step_holds_what_crosses_into_the_next():
    """Each step launches 10 bytes for itself and 100 that the next step waits for; between the
    steps, others travel. Mutants: what is under way is dropped; what a save sends is counted."""

    def comm(num_bytes, start, name):
        return Span("comm", name, 0, start, time.monotonic(), "dp", num_bytes)

    model, under_way = nn.Linear(2, 2), []
    recorder = StepRecorder(model, 7, 3)
    on = []
    for _ in range(7):
        with recorder.step():
            active, start = timeline.active(), time.monotonic()
            on.append(active is not None)
            model(torch.ones(1, 2))
            for begun in under_way:
                active.spans.append(comm(100, begun, "all_gather"))
            under_way.clear()
            if active is not None:
                active.spans.append(comm(10, start, "reduce_scatter"))
                under_way.append(time.monotonic())
        assert recorder.is_on == on[-1]
        if (active := timeline.active()) is not None:
            active.spans.append(comm(1, time.monotonic(), "all_reduce"))
    assert on == [False] * 4 + [True] * 3 and timeline.active() is None
    step = recorder.typical(Mesh())
    names = [span.name for span in step if span.kind == "comm"]
    assert sorted(names) == ["all_gather", "all_gather", "reduce_scatter"]
    assert figures([dict(loss=1, tokens=1, seconds=1)], step)["sent_bytes"] == 10 + 100
    assert not StepRecorder(model, 5, 0).typical(Mesh()).spans


def test_figures_are_of_steps_that_were_not_recorded():
    lines = [{"loss": 3.0, "tokens": 10, "seconds": s} for s in (1.0, 3.0, 2.0)]
    found = figures(lines, Timeline())
    assert found["tokens_per_second"] == 5.0 and found["step_seconds"] == 2.0
    assert found["hidden_fraction"] is None and found["sent_bytes"] == 0
    lines[0]["recorded"] = True  # such a step counts only where all were recorded
    assert figures(lines, Timeline())["tokens_per_second"] == 4.0
    assert figures(lines[:1], Timeline())["tokens_per_second"] == 10.0


def test_trap_10_no_valid_token_anywhere_is_no_step():
    model = Llama(PRESETS["tiny"]).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.zeros(2, 7, dtype=torch.int64)
    batch = [(inputs, torch.full_like(inputs, IGNORE))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = train_step(model, [], optimizer, batch, Mesh().dp, max_norm=1.0)
    assert (result.loss, result.grad_norm) == (0, 0)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
