"""A graceful stop: whoever gets the signal, all ranks save after the same step and end."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from minipar.train import checkpoint, stop, trainer
from minipar.train.config import TrainConfig
from minipar.train.stop import StopRequest
from tests.train.runs import SAME, lines_of

CONFIG = TrainConfig(
    steps=6,
    batch_size=4,
    seq_len=16,
    warmup_steps=2,
    sample_tokens=0,
    save_every=100,
    record_steps=0,
)


# ---------------------------------------------------------------------- one process
@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_is_noted_and_nothing_else(number):
    before = signal.getsignal(number)
    with StopRequest() as request:
        assert not request.came
        os.kill(os.getpid(), number)
        assert request.came
        os.kill(os.getpid(), number)  # an echo: this process lives on
    assert signal.getsignal(number) == before


def test_a_launcher_passes_a_signal_on_once(monkeypatch):
    got, now, kill, own = [], 100.0, os.kill, os.getpid()
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    with StopRequest([11, 12]), monkeypatch.context() as patched:
        patched.setattr(os, "kill", lambda pid, number: got.append((pid, number)))
        for _ in range(2):
            kill(own, signal.SIGUSR1)
        assert got == [(11, signal.SIGUSR1), (12, signal.SIGUSR1)]
        now += 2 * stop.ECHO_SECONDS
        with pytest.raises(SystemExit) as caught:
            kill(own, signal.SIGTERM)
        assert caught.value.code == 143


def test_a_signal_before_the_first_step_is_noted(text, tmp_path, monkeypatch):
    """While the text is read, say. Mutant: it ends the process by -15, and nothing is saved."""
    torch.set_num_threads(1)
    usual = trainer.Trainer.__init__

    def signalled(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        usual(self, *args)

    monkeypatch.setattr(trainer.Trainer, "__init__", signalled)
    config = replace(CONFIG, data=str(text), mesh="dp=1")
    assert trainer.train(config, str(tmp_path / "run")) is None
    (saved,) = checkpoint.available(tmp_path / "run/checkpoints")
    assert checkpoint.step_of(saved) == 1


# ---------------------------------------------------------------------- whole runs
def train(config: TrainConfig, folder: str, start: str | None, signalled: dict[int, int]):
    """Train on this rank; it gets SIGUSR1 in the middle of the step that `signalled` has for it."""
    train_step = trainer.Trainer._train_step

    def interrupted(self, batch):
        if signalled.get(self.mesh.rank) == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train_step(self, batch)

    trainer.Trainer._train_step = interrupted
    try:
        return trainer.train(config, folder, start)
    finally:
        trainer.Trainer._train_step = train_step


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"async_save": True, "save_every": 2}])
def test_all_stop_after_the_same_step_and_go_on_to_the_bit(ranks, text, tmp_path, changes):
    """Rank 1 alone is signalled; then rank 0. Mutants: each rank for itself (which would hang);
    stop without a save; a save in the background that is given up."""
    config = replace(CONFIG, data=str(text), mesh="dp=2", **changes)
    assert all(ranks(2).run(train, config, str(tmp_path / "whole"), None, {}))
    folder = tmp_path / "parts"
    for start, step, signalled in ((None, 3, {1: 3}), (3, 5, {0: 5}), (5, 6, {})):
        start = start and str(folder / f"checkpoints/step_{start:06d}")
        reports = ranks(2).run(train, config, str(folder), start, signalled)
        assert [report is None for report in reports] == [bool(signalled)] * 2
        assert checkpoint.step_of(checkpoint.available(folder / "checkpoints")[-1]) == step
        assert [line[0] for line in lines_of(folder, *SAME)] == [*range(1, step + 1)]
    assert lines_of(folder, *SAME) == lines_of(tmp_path / "whole", *SAME)
    last = "checkpoints/step_000006"
    ours, theirs = checkpoint.load(folder / last)[0], checkpoint.load(tmp_path / "whole" / last)[0]
    assert all(ours[name].equal(theirs[name]) for name in theirs)
