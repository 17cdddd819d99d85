"""Numbers that are read a step late, on a GPU that is there by the clock only."""

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from minipar.train import checkpoint, metrics, trainer
from minipar.train.config import TrainConfig
from minipar.train.data import on_device
from minipar.train.metrics import MEASURED, Stopwatch, Telling, read, say
from tests.streams import GPU, Streams

pytestmark = pytest.mark.trains

PLAIN = TrainConfig(
    steps=8,
    batch_size=4,
    seq_len=16,
    dtype="float64",
    warmup_steps=2,
    eval_batches=1,
    sample_tokens=0,
    save_every=100,
    record_every=100,
)


class Gpu:
    """Does in turn what is launched, 10 seconds each, while the host goes on by its own clock."""

    def __init__(self) -> None:
        self.now = self.free = 0.0  # the time of the host, and when all is done
        self.log: list[str] = []
        self.hangs = False
        self.before: dict[int, Callable[[], None]] = {}  # what happens when a step is launched
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.now, gpu.free)

            def query(self) -> bool:
                return not gpu.hangs

            def synchronize(self) -> None:
                assert not gpu.hangs
                gpu.log.append("wait")
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, end: "Event") -> float:
                assert max(self.at, end.at) <= gpu.now, "it is asked before it is known"
                return 1e3 * (end.at - self.at)

        self.Event = Event


@pytest.fixture
def gpu(monkeypatch):
    """The trainer takes the device for a GPU where it launches, tells and measures."""
    gpu, train_step, deal = Gpu(), trainer.train_step, trainer.Workload.deal

    def launch(*args, **options):
        gpu.log.append("launch")
        gpu.before.get(gpu.log.count("launch"), lambda: None)()
        gpu.now += 1.0
        gpu.free = max(gpu.free, gpu.now) + 10.0
        return train_step(*args, **options)

    def read_batch(*args):
        gpu.log.append("batch")
        gpu.now += 2.0
        deal(*args)

    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    monkeypatch.setattr(trainer, "train_step", launch)
    monkeypatch.setattr(trainer.Workload, "deal", read_batch)
    monkeypatch.setattr(trainer, "Telling", lambda _, *rest: Telling(GPU, *rest))
    monkeypatch.setattr(trainer, "Stopwatch", lambda _: Stopwatch(GPU))
    return gpu


def told(folder) -> list[dict]:
    """The lines of a run without what differs between two that do the same."""
    lines = read(folder / "metrics.jsonl")
    return [{name: line[name] for name in line if name not in MEASURED} for line in lines]


# ---------------------------------------------------------------------- the order of things
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_a_step_is_told_when_the_next_one_has_been_launched(run, request, preset):
    """All lines as without a GPU, each once. Mutants: each step waited for; the last one lost."""
    changes = dict(save_every=4, eval_every=6, preset=preset)
    plain = run(1, "plain", **changes)
    gpu = request.getfixturevalue("gpu")
    late = run(1, "late", **changes)
    assert [line["step"] for line in told(late)] == [*range(1, 9)]
    assert told(late) == told(plain)
    # Two steps before the first number; at once where it is saved (4, 8) or validated (6).
    first, later = ["batch", "launch"], ["batch", "launch", "wait"]
    up_to_4, up_to_6 = [*first, *later, *later, *later, "wait"], [*first, *later, "wait"]
    assert gpu.log == [*up_to_4, *up_to_6, *up_to_6]
    ours, theirs = (checkpoint.load(folder / "checkpoints/step_000008") for folder in (late, plain))
    assert all(torch.equal(ours[0][name], weight) for name, weight in theirs[0].items())
    assert ours[1]["data"] == theirs[1]["data"]  # no batch was read that was not trained on


def test_the_seconds_of_all_steps_are_those_of_the_run(run, gpu):
    """Mutants: the seconds in which a step was launched; those up to its reading."""
    folder = run(1, "late", eval_every=4)
    seconds = [line["seconds"] for line in read(folder / "metrics.jsonl")]
    # The batch and the first kernel of a step are waited for only where the one before was read.
    assert seconds == [13.0, 10.0, 10.0, 10.0, 13.0, 10.0, 10.0, 10.0]
    assert sum(seconds) == gpu.now == gpu.free
    for line in read(folder / "metrics.jsonl"):
        assert line["tokens_per_second"] == line["tokens"] / line["seconds"]


def test_seconds_of_a_slow_host_are_in_the_steps(run, gpu, monkeypatch):
    """Where batches take longer than computing, the GPU waits, and the steps say so."""
    read_batch = trainer.Workload.deal

    def slowly(*args):
        gpu.now += 28.0
        read_batch(*args)

    monkeypatch.setattr(trainer.Workload, "deal", slowly)
    folder = run(1, "late")
    seconds = [line["seconds"] for line in read(folder / "metrics.jsonl")]
    assert sum(seconds) == gpu.free == 8 * 31.0 + 10.0


# ---------------------------------------------------------------------- every way to end
@pytest.mark.slow
def test_a_stop_tells_and_saves_its_own_step(run, gpu):
    """And goes on to the same numbers. Mutant: the run is saved before its last step is told."""
    whole = run(1, "whole")
    gpu.before[8 + 3] = partial(signal.raise_signal, signal.SIGUSR1)
    stopped = run(1, "stopped")
    [saved] = checkpoint.available(stopped / "checkpoints")
    assert checkpoint.step_of(saved) == 3
    assert told(stopped) == told(whole)[:3]
    run(1, "stopped", start=saved)
    assert told(stopped) == told(whole)


@pytest.mark.parametrize("save_every, launched", [(100, 4), (3, 3)])
def test_a_nan_stops_the_run(run, tmp_path, gpu, monkeypatch, save_every, launched):
    """A step later, with nothing told after it; at once where a checkpoint would keep it."""
    launch = trainer.train_step

    def spoil(*args, **options):
        result = launch(*args, **options)
        is_bad = gpu.log.count("launch") == 3
        return replace(result, loss=result.loss * math.nan) if is_bad else result

    monkeypatch.setattr(trainer, "train_step", spoil)
    with pytest.raises(FloatingPointError, match="step 3: loss nan"):
        run(1, "wild", save_every=save_every)
    assert gpu.log.count("launch") == launched
    assert [line["step"] for line in told(tmp_path / "wild")] == [1, 2]
    assert checkpoint.available(tmp_path / "wild/checkpoints") == []


@pytest.mark.parametrize("hangs", [False, True])
def test_a_failure_leaves_the_steps_before_it_told(run, tmp_path, gpu, monkeypatch, hangs):
    """But for one that the GPU is not through with, as where it waits for a rank that is gone."""

    def fail():
        gpu.hangs = hangs
        raise ArithmeticError("in step 4")

    gpu.before[4] = fail
    monkeypatch.setattr(metrics, "PATIENCE", 0.0)
    with pytest.raises(ArithmeticError, match="in step 4"):
        run(1, "fails")
    assert [line["step"] for line in told(tmp_path / "fails")] == [1, 2] + [3] * (not hangs)


def test_a_reader_that_has_gone_ends_no_run(monkeypatch, capsys):
    """And one rank speaks for all."""
    for rank in range(2):
        say(SimpleNamespace(rank=rank), "all start anew")
    assert capsys.readouterr().out == "all start anew\n"

    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    say(SimpleNamespace(rank=0), "all start anew")


# ---------------------------------------------------------------------- batches
class Tokens:
    """What of a tensor is asked for on its way to a GPU, noted down with the stream of the time."""

    def __init__(self, streams, name) -> None:
        self.streams, self.name = streams, name

    def pin_memory(self):
        return Tokens(self.streams, f"pinned {self.name}")

    def to(self, device, non_blocking=False):
        assert device == GPU and non_blocking
        self.streams.log.append(f"{self.name} on {self.streams.now}")
        return self

    def record_stream(self, stream):
        self.streams.log.append(f"{self.name} kept for {stream.name}")


def test_a_gpu_takes_a_batch_while_it_computes(monkeypatch):
    """On a lane of its own, for which computing waits. Mutants: it does not; memory is reused."""
    streams = Streams(monkeypatch)
    pairs = [(Tokens(streams, f"x{i}"), Tokens(streams, f"y{i}")) for i in range(2)]
    batches = on_device(iter([pairs[:1], pairs[1:]]), GPU, lambda pair: pair)
    next(batches)
    expected = []
    for name in ("pinned x0", "pinned y0"):
        expected += [f"{name} on lane 0", "computing waits for lane 0"]
        expected += [f"{name} kept for computing"]
    assert streams.log == expected  # and nothing of the second batch
