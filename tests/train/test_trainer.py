"""Whole runs: the same on any number of ranks, and the same when they are interrupted.

Unless a test says otherwise runs are in float64, where the order in which numbers are added hides
nothing: what agrees to 1e-10 is the same computation.
"""

import json
import math
import resource
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from minipar.comm.mesh import Mesh
from minipar.model import hf, llama
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.model.moe import MoE
from minipar.observe import timeline
from minipar.observe.timeline import Timeline
from minipar.parallel import ddp
from minipar.ranks.launch import RankError
from minipar.train import checkpoint, metrics, saver, trainer
from minipar.train.config import TrainConfig
from minipar.train.corpus import load_corpus
from minipar.train.data import IGNORE, Sequences
from minipar.train.folder import newest
from minipar.train.metrics import Metrics, read
from minipar.train.report import MOST_PICTURES, StepRecorder, training_figures
from minipar.train.step import StepResult, train_step
from minipar.train.tokenizer import ByteTokenizer
from tests.train.runs import SAME, assert_same_run, lines_of, saved

PLAIN = TrainConfig(
    steps=6,
    batch_size=5,
    seq_len=32,
    dtype="float64",
    warmup_steps=2,
    max_norm=0.5,
    eval_batches=2,
    sample_tokens=0,
    save_every=100,
    record_every=100,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small text that can be learnt: a few sentences over and over, in changing order."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    words = ["one ", "rank ", "talks, ", "the ", "others ", "wait, ", "then ", "they ", "add. "]
    path.write_text("".join(words[i * i % 9] for i in range(1500)), encoding="utf-8")
    return path


def weights_of(folder, step: int) -> dict[str, torch.Tensor]:
    return saved(folder, step)[0]


# ---------------------------------------------------------------------- any number of ranks
@pytest.mark.slow
def test_trap_07_any_number_of_ranks_and_microbatches_is_the_same_run(run):
    """In float64. Bits may differ: other ranks, other order of additions, and that is right.

    A mutant that averages gradients over ranks, or forgets a rank's samples, is off by far more.
    """
    one = run(1, "one")
    norms = [norm for (norm,) in lines_of(one, "grad_norm")]
    assert any(norm > PLAIN.max_norm for norm in norms)  # so that clipping has a say
    for size in (2, 3, 4):
        assert_same_run(run(size, f"on{size}"), one)
    assert_same_run(run(1, "small", microbatches=3), one)
    assert_same_run(run(2, "both", microbatches=2), one)
    final = weights_of(one, 6)
    for other in ("on2", "on3", "on4", "small", "both"):
        for name, weight in weights_of(one.parent / other, 6).items():
            torch.testing.assert_close(weight, final[name], rtol=0, atol=1e-9)
    validated = {
        json.loads((path / "report.json").read_text(encoding="utf-8"))["validation_loss"]
        for path in one.parent.iterdir()
    }
    assert max(validated) - min(validated) < 1e-10


@pytest.mark.slow
def test_trap_07_single_precision_agrees_to_a_tolerance(run):
    one, two = run(1, "one", dtype="float32"), run(2, "two", dtype="float32")
    assert_same_run(two, one, rtol=1e-4)
    assert_same_run(run(1, "double"), one, rtol=1e-3)


@pytest.mark.slow
def test_validation_counts_every_token_once_on_any_number_of_ranks(run, text):
    """Against a loop over the text; 5 does not divide into it, nor do 2 and 3 ranks."""
    folder = run(1, "one", eval_batches=10_000, steps=2)
    corpus = load_corpus(str(text), ByteTokenizer())
    model = Llama(PRESETS["tiny"]).double()
    checkpoint.load_weights(model, weights_of(folder, 2), "checkpoint")
    sequences, total, count = Sequences(corpus.validation, PLAIN.seq_len), 0.0, 0
    assert len(sequences) % 5 and len(sequences) > 5
    with torch.no_grad():
        for inputs, targets in (sequences[i] for i in range(len(sequences))):
            real = targets != IGNORE
            logits = model(inputs[None])[0]
            total += cross_entropy(logits[real], targets[real], reduction="sum").item()
            count += int(real.sum())
    assert count == len(corpus.validation) - 1
    expected = pytest.approx(total / count, rel=1e-12)
    for size in (1, 2, 3):
        folder = run(size, f"on{size}", eval_batches=10_000, steps=2)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        assert report["validation_loss"] == expected


# ---------------------------------------------------------------------- interrupted runs
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_resumes_to_the_bit(run, size):
    """12 steps, or 6 and another 6. Mutants: moments, place in the text, or schedule not restored.

    With 3 ranks also: a first step whose buckets are laid out in another order than those of later
    steps, which adds up, and so rounds, otherwise.
    """
    changes = dict(steps=12, dtype="float32", save_every=6, microbatches=2, eval_every=4)
    whole = run(size, "whole", **changes)
    rest = run(size, "rest", start=whole / "checkpoints/step_000006", **changes)
    assert [step for (step,) in lines_of(rest, "step")] == [*range(7, 13)]
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[6:]
    validated = [line["validation_loss"] for line in read(whole / "metrics.jsonl")[7::4]]
    assert validated == [line["validation_loss"] for line in read(rest / "metrics.jsonl")[1::4]]
    ours, theirs = weights_of(rest, 12), weights_of(whole, 12)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    report = json.loads((rest / "report.json").read_text(encoding="utf-8"))
    assert (report["first_step"], report["steps"]) == (6, 12)


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
def test_a_compressed_run_resumes_to_the_bit(run, capfd):
    """What ranks keep back is theirs alone. Mutants: not saved; rank 0's handed to all.

    On another number of ranks it is dropped, and one line says so.
    """
    changes = dict(steps=6, save_every=3, compress="top-k")
    whole = run(2, "whole", **changes)
    start = whole / "checkpoints/step_000003"
    saved = checkpoint.load(start)[1]["compression"]
    assert len(saved) == 2
    for name, kept in saved[0]["residues"].items():
        assert kept.any() and not kept.equal(saved[1]["residues"][name])
    rest = run(2, "rest", start=start, **changes)
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[3:]
    ours, theirs = weights_of(rest, 6), weights_of(whole, 6)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert "nothing kept back" not in capfd.readouterr().out

    other = run(1, "other", start=start, **changes)
    assert "nothing kept back: the checkpoint is of 2 ranks" in capfd.readouterr().out
    assert lines_of(other, "step") == [(4,), (5,), (6,)]
    run(1, "without", start=start, steps=4)
    assert "has kept back in the checkpoint is dropped" in capfd.readouterr().out
    plain = run(1, "plain", steps=3)
    run(1, "begun", start=plain / "checkpoints/step_000003", **changes)
    assert "nothing kept back: the checkpoint is of no compression" in capfd.readouterr().out


@pytest.mark.slow
def test_validation_takes_no_more_memory_than_training_and_costs_no_checkpoint(
    run, tmp_path, monkeypatch
):
    """Nor the line of the last step, if it is interrupted: a run that goes on from the checkpoint
    could not tell of it. Mutants: the whole share of a rank at once; the last save
    after it; the last line after it."""
    forward, seen = Llama.forward, []

    def watched(self, tokens, *rest):
        seen.append((torch.is_grad_enabled(), tuple(tokens.shape)))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(Llama, "forward", watched)
    run(1, "small", steps=1, microbatches=3)
    assert set(seen) == {(True, (2, 32)), (False, (2, 32))}

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(trainer, "evaluate", fails)
    with pytest.raises(MemoryError):
        run(1, "fails", steps=2)
    assert weights_of(tmp_path / "fails", 2)
    assert lines_of(tmp_path / "fails", "step") == [(1,), (2,)]


@pytest.mark.slow
def test_another_text_of_validation_is_told(run, text, tmp_path, capfd):
    """It is the end of the file. Mutant: the text of training has a fingerprint alone."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8")[:-1] + "!", encoding="utf-8")
    start = run(1, "one", steps=1) / "checkpoints/step_000001"
    run(1, "same", start=start, steps=2)
    says = "is not that of the checkpoint: losses of validation from here on are no measure"
    assert says not in capfd.readouterr().out
    run(1, "other", start=start, steps=2, data=str(other))
    assert f"the validation text of {other} {says}" in capfd.readouterr().out


@pytest.mark.slow
def test_steps_of_another_way_of_the_run_are_told(run, capfd):
    """It went back, and then back to where it had been. Mutant: metrics are cut by the step alone,
    and nobody knows that some are of another run."""
    changes = dict(save_every=2, keep=9)
    folder = run(1, "one", steps=4, **changes)
    run(1, "one", start=folder / "checkpoints/step_000004", steps=5, **changes)
    run(1, "one", start=folder / "checkpoints/step_000002", steps=3, lr=1e-4, **changes)
    assert "another way" not in capfd.readouterr().out
    run(1, "one", start=folder / "checkpoints/step_000004", steps=5, **changes)
    says = f"{folder}/metrics.jsonl has steps of another way that the run has gone, "
    assert says in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.mostly_slow
@pytest.mark.parametrize("zero", [0, 1])
def test_a_resumed_run_has_the_weight_decay_of_its_flags(run, zero):
    """And norms have none, as before. Mutant: that of the checkpoint."""
    size = 1 + zero
    start = run(size, "one", steps=1, zero=zero) / "checkpoints/step_000001"
    folder = run(size, "two", start=start, steps=2, zero=zero, weight_decay=0.7, lr=0.0125)
    groups = checkpoint.load(folder / "checkpoints/step_000002")[1]["optimizer"]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.7}


@pytest.mark.slow
def test_a_run_that_is_done_only_reports(run):
    folder = run(1, "one")
    before = lines_of(folder, "step", "loss", "seconds")
    first = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    recorded = (folder / "timeline.json").read_bytes()
    run(1, "one", start=folder / "checkpoints/step_000006")
    assert lines_of(folder, "step", "loss", "seconds") == before
    assert (folder / "timeline.json").read_bytes() == recorded
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == first
    (folder / "report.json").unlink()  # as if it was killed before
    run(1, "one", start=folder / "checkpoints/step_000006")
    again = json.loads(
        (folder / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    )
    assert again["validation_loss"] == first["validation_loss"]
    assert again["first_loss"] is again["step_seconds"] is None and again["steps"] == 6


@pytest.mark.slow
def test_another_text_seed_or_model_is_refused(run, ranks, text, tmp_path):
    folder = run(1, "one", steps=2)
    start = folder / "checkpoints/step_000002"
    with pytest.raises(ValueError, match="--steps 1 is below the 2 that .* has done; use 2 or"):
        run(1, "other", start=start, steps=1)
    with pytest.raises(ValueError, match="cannot resume the data with another seed"):
        run(1, "other", start=start, seed=1)
    with pytest.raises(ValueError, match="cannot resume the data with another seq_len"):
        run(1, "other", start=start, seq_len=16)
    with pytest.raises(checkpoint.CheckpointError, match="of another model: it has lm_head"):
        run(1, "other", start=start, preset="small")
    balanced = run(1, "balanced", preset="tiny-moe", expert_bias=0.01, steps=1)
    with pytest.raises(checkpoint.CheckpointError, match="use the --expert-bias of the run before"):
        run(1, "other", start=balanced / "checkpoints/step_000001", preset="tiny-moe")
    tiny = PRESETS["tiny"]
    for name, value in {"rope_theta": 5e5, "norm_eps": 0.5}.items():  # of which no shape tells
        hf.save(Llama(replace(tiny, **{name: value})), tmp_path / name)
        was = getattr(tiny, name)
        with pytest.raises(checkpoint.CheckpointError, match=f"{name}={was}, and this one has"):
            run(1, "other", start=start, init=str(tmp_path / name))
    assert not (tmp_path / "other").exists()


def test_a_run_whose_folder_is_removed_ends_with_its_next_save(text, tmp_path):
    """Mutant: it makes the folder anew, with checkpoints and without a configuration."""
    folder, config = tmp_path / "gone", replace(PLAIN, data=str(text), mesh="dp=1", save_every=1)

    def removes(_):
        return lambda line: shutil.rmtree(folder)

    with pytest.raises(OSError, match=f"step_000001: {folder} was removed, or is another run's"):
        trainer.train(config, str(folder), None, removes)
    assert not folder.exists()


@pytest.mark.slow
def test_a_run_that_went_back_is_taken_up_there_if_it_was_killed_at_once(run, monkeypatch):
    """Mutant: before its first save, its newest checkpoint is the one that it went back from."""
    folder = run(1, "one", steps=2, save_every=1)
    start = folder / "checkpoints/step_000001"
    run(1, "one", start=start, steps=1)  # which only looks: there is nothing to do
    assert newest(folder) == folder / "checkpoints/step_000002"
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(1, "one", start=start, steps=2)
    assert newest(folder) == start and checkpoint.load(start)[1]["step"] == 1
    before = (start / "manifest.json").read_bytes()
    with pytest.raises(ZeroDivisionError):
        run(1, "other", start=start, steps=2)  # what is another run's is left alone
    assert (start / "manifest.json").read_bytes() == before


# ---------------------------------------------------------------------- learning, or not
@pytest.mark.slow
def test_learns(run):
    folder = run(2, "learn", steps=60, dtype="float32", lr=5e-3, batch_size=8)
    losses = [loss for (loss,) in lines_of(folder, "loss")]
    assert losses[0] > 4.5 and losses[-1] < 0.6 * losses[0]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["validation_loss"] < 0.7 * losses[0]
    assert (report["first_loss"], report["last_loss"]) == (losses[0], losses[-1])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(ranks, run, tmp_path):
    with pytest.raises(RankError) as caught:
        run(2, "wild", lr=1e9, save_every=1, dtype="float32")
    failures = caught.value.failures.values()
    assert len(failures) == 2
    for failure in failures:
        assert failure.kind == "FloatingPointError"
        assert "gradient norm" in failure.message and "lower --lr than 1e+09" in failure.message
    assert len({failure.message for failure in failures}) == 1
    steps = [step for (step,) in lines_of(tmp_path / "wild", "step")]
    newest = checkpoint.available(tmp_path / "wild/checkpoints")[-1]
    assert steps and checkpoint.step_of(newest) == steps[-1] < 6
    assert all(weight.isfinite().all() for weight in checkpoint.load(newest)[0].values())


@pytest.mark.slow
def test_a_first_step_that_is_not_finite_speaks_of_the_checkpoint(run, monkeypatch):
    """A lower learning rate alone would not help. Mutant: it is all that is said."""
    start, usual = run(1, "one", steps=2) / "checkpoints/step_000002", trainer.train_step

    def spoil(*args, **options):
        result = usual(*args, **options)
        return replace(result, loss=result.loss * math.nan)

    monkeypatch.setattr(trainer, "train_step", spoil)
    says = "No step went well after the checkpoint of step 2: resume from an earlier one. Try a"
    with pytest.raises(FloatingPointError, match=f"step 3: loss nan, .* untouched. {says}"):
        run(1, "two", start=start)
    with pytest.raises(FloatingPointError, match="step 1: loss nan, .* untouched. Try a lower"):
        run(1, "new")


@pytest.mark.slow
def test_trap_11_the_cpu_path_never_touches_cuda(run, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which is then used")
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("cuda was touched"))
    with pytest.raises(BaseException, match="cuda was touched"):
        torch.cuda.synchronize()
    run(1, "one", sample_tokens=3, record_every=1)


# ---------------------------------------------------------------------- what a run leaves
@pytest.mark.slow
@pytest.mark.mostly_slow
@pytest.mark.parametrize("version", ["overlapped", "naive"])
def test_files_are_written_and_agree(ranks, run, version):
    folder = run(
        2, "files", dtype="float32", record_every=1, sample_tokens=7, save_every=4, ddp=version
    )
    report = json.loads(
        (folder / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    )
    steps = read(folder / "metrics.jsonl")
    assert [line["step"] for line in steps] == [*range(1, 7)]
    assert report["first_loss"] == steps[0]["loss"] and report["last_loss"] == steps[-1]["loss"]
    assert report["validation_loss"] == steps[-1]["validation_loss"]
    num_tokens, seconds = (sum(line[key] for line in steps) for key in ("tokens", "seconds"))
    assert report["tokens_per_second"] == pytest.approx(num_tokens / seconds)
    assert all(0 < line["tokens"] <= 5 * 32 for line in steps)

    model = Llama(PRESETS["tiny"])
    params = list(model.parameters())
    assert report["num_parameters"] == sum(p.numel() for p in params)
    # 2 (n-1)/n (P + N) of gradients and flags, and two scalars of 8 bytes: tokens and loss.
    per_step = 2 * (2 - 1) / 2 * (sum(p.nbytes for p in params) + len(params) + 16)
    assert report["sent_bytes"] == pytest.approx(6 * per_step, abs=6 * 2 * 40)
    assert 0 <= report["hidden_fraction"] <= 1 and report["communication_seconds"] > 0
    assert len(report["peak_memory"]) == 2 and min(report["peak_memory"]) > 50e6

    recorded = Timeline.load(folder / "timeline.json")
    assert recorded.ranks == [0, 1] and "2 ranks" in recorded.label
    # The step of median length may be the first, in which ddp also agrees on an order of buckets.
    order = 2 * 8 * len(params)
    assert recorded.bytes_by_axis()["dp"] == pytest.approx(2 * per_step, abs=200 + order)
    assert {"forward", "backward", "optimizer", "comm"} <= {span.kind for span in recorded}
    prompt, sample = report["prompt"], report["sample"]
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    assert text == f"Prompt:\n{prompt}\n\nThe model goes on:\n{sample}\n"
    assert len(prompt.encode()) == 32 and 0 < len(sample) <= 7  # letters of up to four bytes
    assert TrainConfig.load(folder / "config.json").ddp == version
    saved = checkpoint.available(folder / "checkpoints")
    assert [checkpoint.step_of(path) for path in saved] == [4, 6]


@pytest.mark.parametrize("first, last, every", [(0, 245, 20), (0, 3, 20), (7, 8, 5), (6, 12, 4)])
def test_at_least_one_step_is_recorded(first, last, every):
    recorder = StepRecorder(torch.nn.Linear(2, 2), first, last, every)
    for number in range(first, last):
        with recorder.step(number):
            recorder.model(torch.ones(1, 2))
    expected = (last - first) / min(every, last - first)
    assert recorder.recorded and abs(len(recorder.recorded) - expected) <= 1
    assert recorder.communication() == (0, 0, None)  # one rank has nobody to talk to
    assert recorder.typical(Mesh()).spans


@pytest.mark.slow
def test_speed_and_memory_are_in_every_line(run):
    """And the share of the peak follows from them. Mutants: seconds of the save counted as the
    step's; the share of one rank's peak."""
    longer = PLAIN.steps + 1  # a warm-up ends with the run
    folder = run(2, "speed", dtype="float32", record_every=2, save_every=2, warmup_steps=longer)
    report, steps = (
        json.loads((folder / "report.json").read_text(encoding="utf-8")),
        read(folder / "metrics.jsonl"),
    )
    flops = PRESETS["tiny"].flops_per_token(PLAIN.seq_len)
    for line in steps:
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert 50e6 < line["peak_memory"] <= max(report["peak_memory"])
        peak = flops * line["tokens_per_second"] / line["mfu"]
        assert peak == pytest.approx(flops * steps[0]["tokens_per_second"] / steps[0]["mfu"])
    assert 1e9 < peak < 1e14
    assert report["mfu"] == pytest.approx(flops * report["tokens_per_second"] / peak)
    assert report["peak"] == "a float32 matrix product, measured on 2 ranks at once"
    recorded = [line["step"] for line in steps if "hidden_fraction" in line]
    assert recorded == [2, 4, 6]
    assert all(0 <= line.get("hidden_fraction", 0) <= 1 for line in steps)
    # Saved after steps 2, 4 and 6: told in the line that follows, the last in the report alone.
    assert [line["step"] for line in steps if "save_seconds" in line] == [3, 5]
    told = sum(line.get("save_seconds", 0) for line in steps)
    assert 0 < told < report["save_seconds"]


class SlowRecorder(StepRecorder):
    """Takes its time to begin and to end a recording, as the profiler of a GPU does."""

    @contextmanager
    def step(self, number):
        SlowRecorder.clock += 1000.0
        yield
        SlowRecorder.clock += 1000.0


def test_the_seconds_of_a_step_are_without_its_recording(text, tmp_path, monkeypatch):
    """Mutants: the recording counted; only the time inside of it; the loss read afterwards."""
    torch.set_num_threads(1)
    SlowRecorder.clock, numbers = 0.0, StepResult.numbers

    def read_slowly(self):
        SlowRecorder.clock += 2.0
        return numbers(self)

    def deal_slowly(self, *args):
        SlowRecorder.clock += 1.0

    monkeypatch.setattr(trainer.time, "perf_counter", lambda: SlowRecorder.clock)
    monkeypatch.setattr(trainer, "StepRecorder", SlowRecorder)
    monkeypatch.setattr(StepResult, "numbers", read_slowly)
    monkeypatch.setattr(trainer.Workload, "deal", deal_slowly)
    monkeypatch.setattr(trainer.peak, "_measured", lambda *_: 1e9)
    config = replace(PLAIN, data=str(text), mesh="dp=1", steps=2, record_every=1)
    trainer.train(config, str(tmp_path))
    assert [line["seconds"] for line in read(tmp_path / "metrics.jsonl")] == [3.0, 3.0]


@pytest.mark.slow
def test_the_seconds_of_a_step_begin_where_the_last_one_ended(text, tmp_path, monkeypatch):
    """Mutants: what is told, and agreed on, between two steps takes no time; validation does."""
    torch.set_num_threads(1)
    now = 0.0

    def slowly(owner, name, seconds):
        usual = getattr(owner, name)

        def late(*args, **options):
            nonlocal now
            now += seconds
            return usual(*args, **options)

        monkeypatch.setattr(owner, name, late)

    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now)
    monkeypatch.setattr(trainer.peak, "_measured", lambda *_: 1e9)
    slowly(trainer, "train_step", 1.0)
    slowly(Metrics, "write", 2.0)
    slowly(trainer.Trainer, "_agree", 4.0)
    slowly(trainer.Workload, "learn", 8.0)
    for name in ("validate", "save"):
        slowly(trainer.Trainer, name, 1000.0)
    slowly(StepRecorder, "figures", 1000.0)
    every = dict(record_every=1, eval_every=1, save_every=1)
    config = replace(PLAIN, data=str(text), mesh="dp=1", steps=3, **every)
    trainer.train(config, str(tmp_path))
    assert [line["seconds"] for line in read(tmp_path / "metrics.jsonl")] == [1.0, 15.0, 15.0]


@pytest.mark.slow
def test_checkpoints_in_the_background_are_the_same(run):
    """The run as well. Mutants: the last one is not waited for; a tensor is saved late."""
    plain = run(2, "plain", save_every=2)
    behind = run(2, "behind", save_every=2, async_save=True)
    assert_same_run(behind, plain, rtol=0)
    for folder in (plain, behind):
        saved = checkpoint.available(folder / "checkpoints")
        assert [checkpoint.step_of(path) for path in saved] == [4, 6]
    for step in (4, 6):
        ours, theirs = (
            checkpoint.load(folder / f"checkpoints/step_{step:06d}") for folder in (behind, plain)
        )
        assert str(ours[1].pop("random")) == str(theirs[1].pop("random"))
        for mine, other in zip(*map(torch.utils._pytree.tree_leaves, (ours, theirs)), strict=True):
            assert mine.equal(other) if isinstance(mine, torch.Tensor) else mine == other
    assert json.loads((behind / "report.json").read_text(encoding="utf-8"))["save_seconds"] > 0


def train_with_little_room(config: TrainConfig, folder: str, victim: int) -> None:
    """Train; from the first save on, files of one rank cannot grow beyond 100 kB."""
    before, write = resource.getrlimit(resource.RLIMIT_FSIZE), saver._write_share

    def cramped(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        return write(*args)

    if dist.get_rank() == victim:
        saver._write_share = cramped
    try:
        trainer.train(config, folder)
    finally:
        saver._write_share = write
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_checkpoint_that_fails_in_the_background_stops_all_ranks(ranks, text, tmp_path):
    """At a later step, or at the end. Mutants: only the rank that failed raises; nobody does."""
    config = replace(
        PLAIN, data=str(text), mesh="dp=2", steps=40, save_every=1, async_save=True, batch_size=2
    )
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_with_little_room, config, str(tmp_path), 1)
    failures = caught.value.failures.values()
    assert [failure.kind for failure in failures] == ["OSError"] * 2, caught.value
    assert len({failure.message for failure in failures}) == 1
    message = next(iter(failures)).message
    assert "cannot write checkpoint" in message and "step_000001: rank 1 of 2: " in message
    assert checkpoint.available(tmp_path / "checkpoints") == []
    assert 1 <= len(read(tmp_path / "metrics.jsonl")) < 40


def test_tensorboard_gets_tokens_per_expert_by_layer_and_number():
    line = {"step": 3, "expert_load": 1.5, "tokens_per_expert": {"layers.0.mlp": [5, 7]}}
    shown = {"expert_load": 1.5, "tokens_per_expert/layers.0.mlp/0": 5}
    assert dict(metrics._numbers(line)) == shown | {"tokens_per_expert/layers.0.mlp/1": 7}


@pytest.mark.slow
def test_tensorboard_gets_the_numbers_of_every_line(run, monkeypatch, tmp_path):
    """By the writer that torch has; here is another in its place, as the package may be missing."""
    board: list = []

    class Writer:
        def __init__(self, folder, purge_step):
            board.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step):
            board.append((name, value, step))

        def flush(self):
            pass

        def close(self):
            board.append("close")

    fake = type(sys)("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    folder = run(1, "board", steps=3, tensorboard=True)
    assert board[0] == ("open", folder / "tensorboard", 1) and board[-1] == "close"
    assert board[1:-1] == [
        (name, value, line["step"])
        for line in read(folder / "metrics.jsonl")
        for name, value in line.items()
        if name != "step"
    ]
    board.clear()
    run(1, "board", start=folder / "checkpoints/step_000003", steps=4, tensorboard=True)
    assert board[0] == ("open", folder / "tensorboard", 4)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if not installed
    with pytest.raises(ValueError, match="needs the tensorboard package.*pip install tensorboard"):
        replace(PLAIN, data="stdlib", tensorboard=True).check()


@pytest.mark.slow
def test_a_long_end_says_what_it_does(run, monkeypatch, capsys):
    """And the sample is the same, however often it speaks."""
    silent = run(1, "silent", steps=1, sample_tokens=20)
    monkeypatch.setattr(trainer, "TELL_SECONDS", 0.0)
    told = run(1, "told", steps=1, sample_tokens=20)
    out = capsys.readouterr().out
    assert out.count("All steps are done") == 2
    assert "Writing the sample: 8 of 20 tokens ..." in out
    ours, theirs = (folder / "sample.txt" for folder in (told, silent))
    assert ours.read_bytes() == theirs.read_bytes()


def count_barriers(config: TrainConfig, folder: str) -> int:
    """Train; return how often this rank has met the others while the sample was written."""
    barrier, count = trainer.barrier, 0

    def counted(axis):
        nonlocal count
        count += 1
        barrier(axis)

    trainer.barrier = counted
    try:
        trainer.train(config, folder)
    finally:
        trainer.barrier = barrier
    return count


@pytest.mark.slow
def test_a_sample_keeps_no_rank_waiting_and_draws_no_weights(ranks, text, tmp_path, monkeypatch):
    """Mutants: the others wait for all of it; a model of random weights to write them over."""
    config = replace(PLAIN, data=str(text), steps=1, sample_tokens=20)
    assert ranks(2).run(count_barriers, replace(config, mesh="dp=2"), str(tmp_path / "two")) == [
        3,
        3,
    ]
    drawn, init_weights = [], llama.init_weights
    monkeypatch.setattr(
        llama,
        "init_weights",
        lambda model, seed: (
            drawn.append(not model.lm_head.weight.is_meta),
            init_weights(model, seed),
        ),
    )
    trainer.train(replace(config, mesh="dp=1"), str(tmp_path / "one"))
    assert drawn.count(True) == 1  # the model that is trained
    ours, theirs = (tmp_path / name / "sample.txt" for name in ("one", "two"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("mesh", "more"),
    [("tp=2", {}), ("ep=2", {"preset": "tiny-moe"}), ("tp=2", {"sequence_parallel": True})],
)
def test_a_model_in_parts_writes_what_a_whole_one_does(run, mesh, more):
    """Mutant: a word takes its place."""
    same = dict(zero=3, steps=1, sample_tokens=19) | more
    parts = run(2, "parts", mesh=mesh, **same)
    whole = run(1, "whole", **same | {"zero": 0, "sequence_parallel": False})
    ours, theirs = ((folder / "sample.txt").read_bytes() for folder in (parts, whole))
    assert ours == theirs and len(ours) > 19


@pytest.mark.slow
def test_a_model_in_parts_that_sees_parts_of_a_text_has_a_word_in_place_of_its_sample(run):
    """Mutant: every rank gathers the whole model at the end, which none could hold."""
    folder = run(2, "parts", mesh="cp=2", zero=3, steps=1, sample_tokens=9)
    told = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert told["prompt"] == "" and told["sample"].startswith("(none: no rank has the whole model")
    assert (folder / "sample.txt").read_text(encoding="utf-8") == told["sample"] + "\n"


def test_what_a_run_remembers_does_not_grow(run, monkeypatch):
    """Mutants: the timeline of each recorded step; the tokens of each expert in each step."""
    recorder = StepRecorder(torch.nn.Linear(2, 2), 0, 40, 1)
    for number in range(40):
        with recorder.step(number):
            recorder.model(torch.ones(1, 2))
    assert list(recorder.recorded) == [*range(40 - MOST_PICTURES, 40)]
    assert recorder.num_recorded == 40

    kept = []
    monkeypatch.setattr(
        trainer, "training_figures", lambda lines: kept.extend(lines) or training_figures(lines)
    )
    folder = run(1, "moe", steps=3, preset="tiny-moe", batch_size=2)
    assert ["tokens_per_expert" in line for line in kept] == [False, False, True]
    assert len(lines_of(folder, "tokens_per_expert")) == 3
    told = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert (
        told["experts"]["tokens_per_expert"]
        == read(folder / "metrics.jsonl")[-1]["tokens_per_expert"]
    )


@pytest.mark.slow
def test_the_slots_of_experts_are_those_of_the_whole_model_and_batch(run):
    """Mutants: a stage tells of its own layers; a rank of its own sequences."""
    same = dict(preset="tiny-moe", steps=1, microbatches=2)
    whole = lines_of(run(1, "whole", **same), "expert_load", "dropped_slots", "tokens_per_expert")
    [(_, _, slots)] = whole
    num_slots = 2 * PLAIN.batch_size * PLAIN.seq_len
    assert {name: sum(row) for name, row in slots.items()} == {
        f"model.layers.{layer}.mlp": num_slots for layer in range(4)
    }
    for number, mesh in enumerate(("pp=2", "dp=2", "ep=2")):
        folder = run(2, f"cut{number}", mesh=mesh, **same)
        assert lines_of(folder, "expert_load", "dropped_slots", "tokens_per_expert") == whole, mesh


@pytest.mark.slow
@pytest.mark.mostly_slow
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2"])
def test_experts_in_parts_train_go_on_and_count_as_one_rank_does(run, mesh):
    """ZeRO 3 fills what a router counts, too. Mutant: only what a checkpoint has."""
    same = dict(preset="tiny-moe", steps=3, batch_size=2, expert_bias=0.01, save_every=1, keep=3)
    same["expert_balance"] = "sequence"
    whole, parts = run(1, "whole", **same), run(2, "parts", mesh=mesh, zero=3, **same)
    rest = run(2, "rest", mesh=mesh, zero=3, start=parts / "checkpoints/step_000001", **same)
    assert_same_run(parts, whole)
    told = lines_of(whole, "loss", "tokens_per_expert")
    assert lines_of(rest, "tokens_per_expert") == [(slots,) for _, slots in told[1:]]
    assert [loss for (loss,) in lines_of(rest, "loss")] == pytest.approx([x for x, _ in told[1:]])
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    ours, theirs = (weights_of(folder, 3)[bias] for folder in (rest, whole))
    assert torch.equal(ours, theirs) and ours.any()


@pytest.mark.slow
def test_a_capacity_is_for_training_and_not_for_what_is_validated_or_written(run, monkeypatch):
    """Mutant: the text is written by experts that drop tokens, more of them the longer it is."""
    where, apply_capacity = [], MoE.apply_capacity

    def told(moe: MoE, *args):
        where.append(torch.is_grad_enabled())
        return apply_capacity(moe, *args)

    monkeypatch.setattr(MoE, "apply_capacity", told)
    run(1, "moe", preset="tiny-moe", steps=2, expert_capacity=1.0, eval_every=1, sample_tokens=2)
    assert where == [True] * 2 * 4


@pytest.mark.parametrize("crosses_steps", [False, True])
def test_every_step_that_a_recorder_disturbs_says_so(crosses_steps):
    """Also where it is silent, of a period, and before one that is recorded, for what it leaves in
    flight. Mutant: those alone whose timeline is kept."""
    recorder = StepRecorder(torch.nn.Linear(2, 2), 0, 24, 3, crosses_steps, period=4)
    disturbed, flagged, hidden = [], [], []
    for number in range(24):
        with recorder.step(number):
            if (active := timeline.active()) is not None:
                disturbed.append(number)
                recorder.model(torch.ones(1, 2))
                now = time.monotonic()
                active.comm("all_reduce", "dp", 100 if number % 4 == 0 else 1, now - 1e-3, now)
        figures = recorder.figures(number)
        flagged += [number] * bool(figures.get("recorded"))
        hidden += [number] * ("hidden_fraction" in figures)
    assert flagged == disturbed == [*range(4 - crosses_steps, 8), *range(16 - crosses_steps, 20)]
    assert hidden == [4, 16] == list(recorder.recorded)


def test_where_few_steps_talk_whole_periods_are_recorded():
    """So that those that talk have their share. Mutant: always the same silent step of each."""
    recorder = StepRecorder(None, 0, 80, 5, period=4)
    chosen = [number for number in range(80) if recorder._is_chosen(number)]
    assert chosen == [*range(8, 12), *range(28, 32), *range(48, 52), *range(68, 72)]
    for first, last in ((0, 3), (7, 12), (15, 45)):  # few steps, from the middle on
        recorder = StepRecorder(None, first, last, 20, period=20)
        assert any(map(recorder._is_chosen, range(first, last)))


def test_figures_of_no_step_are_none():
    assert set(training_figures([]).values()) == {None}
    lines = [{"loss": 3.0, "tokens": 10, "seconds": s} for s in (1.0, 3.0, 2.0)]
    assert training_figures(lines) == {
        "first_loss": 3.0,
        "last_loss": 3.0,
        "tokens_per_second": 5.0,
        "step_seconds": 2.0,
    }
    for line in lines[:1]:  # a step that was recorded counts only where all were
        line |= {"recorded": True}
    assert training_figures(lines)["tokens_per_second"] == 4.0
    assert training_figures(lines)["step_seconds"] == 2.5
    assert training_figures(lines[:1])["tokens_per_second"] == 10.0


def test_metrics_survive_what_a_kill_leaves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": 1 / step})
    metrics.close()
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 4, "loss"', encoding="utf-8")
    assert [line["step"] for line in read(path)] == [1, 2, 3]
    metrics = Metrics(path, step=2)  # goes on from a checkpoint of step 2
    assert [line["step"] for line in read(path)] == [1, 2]
    metrics.write({"step": 3, "loss": 0.25})
    metrics.close()
    assert [line["loss"] for line in read(path)] == [1.0, 0.5, 0.25]
    for odd in ("nonsense", '{"step": 2, "tokens_per_expert": [NaN]}'):
        path.write_text(f'{{"step": 1}}\n{odd}\n{{"step": 3}}\n', encoding="utf-8")
        with pytest.raises(ValueError, match=r"metrics.jsonl:2 is no line of metrics"):
            read(path)


# ---------------------------------------------------------------------- T10
SHAPE = LlamaConfig(61, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1)


def uneven_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [12, 7], six rows for each rank: those of rank 1 have no target at all.

    Rank 0 has three microbatches of two rows with 14, 3 and 0 targets.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(61, (12, 7), generator=generator)
    targets = torch.randint(61, (12, 7), generator=generator)
    targets[2, 3:], targets[3:] = IGNORE, IGNORE
    return inputs, targets


def one_step(size: int, microbatches: int, in_turns: bool = False):
    """Take a step on `size` ranks; return what was reported, the gradients, the new weights.

    With `in_turns` rows are dealt out one by one, and both of two ranks have targets: 10 and 7.
    """
    mesh = Mesh(dp=size)
    torch.manual_seed(mesh.rank)
    model = Llama(SHAPE, seed=mesh.rank).double()
    strategies = [ddp.apply(model, mesh.dp, average=False)] if size > 1 else []
    inputs, targets = (
        t[mesh.rank :: size] if in_turns else t.chunk(size)[mesh.rank] for t in uneven_batch()
    )
    batch = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = train_step(model, strategies, optimizer, batch, mesh.dp, max_norm=0.5)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    numbers = result.loss.item(), int(result.num_tokens), result.grad_norm.item()
    return numbers, gradients, {n: v.clone() for n, v in model.state_dict().items()}


def test_trap_10_uneven_tokens_are_weighed_by_their_number(ranks):
    """Padding, dp=2, three microbatches, and a rank without one valid token.

    Mutants: a mean per microbatch or per rank (computed here beside it), a division by zero.
    """
    serial, gradients, weights = one_step(1, 1)
    assert serial[1] == 17 and serial[2] > 0.5  # clipped
    assert one_step(1, 3)[0] == pytest.approx(serial, rel=1e-12)
    for numbers, ours, after in ranks(2).run(one_step, 2, 3) + ranks(2).run(one_step, 2, 3, True):
        assert numbers == pytest.approx(serial, rel=1e-10)
        for name, expected in gradients.items():
            assert ours[name].isfinite().all()
            torch.testing.assert_close(ours[name], expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(after[name], weights[name], rtol=1e-10, atol=1e-12)

    inputs, targets = uneven_batch()
    logits = Llama(SHAPE, seed=0).double()(inputs)

    def mean(rows: slice) -> float:
        chosen = logits[rows].flatten(0, 1), targets[rows].flatten()
        return cross_entropy(*chosen, ignore_index=IGNORE).item()

    assert mean(slice(0, 12)) == pytest.approx(serial[0], rel=1e-10)
    of_microbatches = [mean(slice(row, row + 2)) for row in range(0, 12, 2)]
    valid = [loss for loss in of_microbatches if not math.isnan(loss)]
    assert len(valid) == 2 and len(of_microbatches) == 6  # a mean over no token is NaN
    assert abs(sum(valid) / len(valid) - serial[0]) > 1e-3 * serial[0]
    assert abs(sum(valid) / 6 - serial[0]) > 0.1 * serial[0]


def test_trap_10_no_valid_token_anywhere_is_no_step():
    model = Llama(SHAPE).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.zeros(2, 7, dtype=torch.int64)
    batch = [(inputs, torch.full_like(inputs, IGNORE))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = train_step(model, [], optimizer, batch, Mesh().dp, max_norm=1.0)
    assert (result.loss, result.grad_norm) == (0, 0)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
