"""Random faults: the run ends or goes on within a bound, says what happened, and loses nothing.

A standing group of two ranks trains a tiny Llama, and is hit again and again: each time it takes up
the run from its newest checkpoint, until a fault hits it again a few steps later. In the end all
steps are compared, to the bit, with those of a run that nothing ever happened to.
"""

import math
import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from minipar.ranks import processes
from minipar.ranks.launch import RankError, Ranks
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.step import StepResult
from minipar.train.trainer import Trainer
from tests.patience import busy
from tests.train.runs import SAME, lines_of

SAVE_EVERY = 2  # steps
TIMEOUT = 6.0  # seconds until a collective fails; more than a step takes on a busy machine
STALL = 1.0  # seconds in a collective until the watchdog speaks
BOUND = 40.0  # seconds in which an attempt must have ended, the longest being a timeout and a kill
CONFIG = TrainConfig(
    mesh="dp=2",
    batch_size=4,
    seq_len=32,
    sample_tokens=0,
    save_every=SAVE_EVERY,
    record_steps=0,
    timeout=TIMEOUT,
)


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run."""

    kind: str
    rank: int
    after: int  # steps of this attempt that are done before
    moment: float  # from 0 to 1: when exactly, or where


# ---------------------------------------------------------------------- on the ranks
def train_and_be_hit(
    faults: Sequence[Fault], config: TrainConfig, folder: str, start: str | None
) -> None:
    """Train as usual, but for `faults`."""
    usual_step, usual_save = Trainer._train_step, Trainer.save
    first_step = 0 if start is None else checkpoint.step_of(Path(start))

    def train_step(self: Trainer, batch: list) -> StepResult:
        for fault in faults:
            if self.step - 1 - first_step == fault.after:
                hit_in_step(fault, self)
        return usual_step(self, batch)

    def save(self: Trainer, *args, **kwargs):
        with ExitStack() as saving:
            for fault in faults:
                if self.step - first_step > fault.after:
                    hit_in_save(fault, saving)
            return usual_save(self, *args, **kwargs)

    with ExitStack() as undo:  # the ranks will go on with something else
        undo.enter_context(patch.object(Trainer, "_train_step", train_step))
        undo.enter_context(patch.object(trainer, "STALL_SECONDS", STALL))
        undo.enter_context(patch.object(Trainer, "save", save))
        trainer.train(config, folder, start)


def hit_in_step(fault: Fault, trainer: Trainer) -> None:
    """Let happen what happens in the coming step."""
    mine = dist.get_rank() == fault.rank
    if fault.kind == "all killed" or (mine and fault.kind == "killed"):
        kill_soon(0.05 * fault.moment)
    elif mine and fault.kind == "no number":
        parameters = list(trainer.model.parameters())
        unlucky = parameters[int(fault.moment * len(parameters))]
        unlucky.register_hook(lambda gradient: gradient * math.nan)
    elif mine and fault.kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif mine and fault.kind == "stopped for a while":
        wake = f"sleep {0.5 * fault.moment}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def hit_in_save(fault: Fault, saving: ExitStack) -> None:
    """Let happen what happens while a checkpoint is being written."""
    if dist.get_rank() != fault.rank:
        return
    if fault.kind == "killed in a save":
        kill_soon(0.06 * fault.moment)
    elif fault.kind == "disk full":
        saving.enter_context(no_file_longer_than(int(500_000 * fault.moment)))


def kill_soon(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """The system refuses to write on, whoever writes: Python, torch's C++, or safetensors' Rust."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


# ---------------------------------------------------------------------- what must be said
def says_who_died(fault: Fault, error: RankError, heard: str) -> None:
    died = {rank: f for rank, f in error.failures.items() if f.kind == "Died"}
    assert died.keys() == error.failures.keys()  # nobody's consequences
    if fault.kind != "all killed":
        assert list(died) == [fault.rank]
    assert {f.message for f in died.values()} == {"the process ended by signal 9 (SIGKILL)"}


def says_which_step(fault: Fault, error: RankError, heard: str) -> None:
    assert len(error.failures) == 2  # all, and alike
    assert {failure.kind for failure in error.failures.values()} == {"FloatingPointError"}
    assert "gradient norm nan; checkpoints are untouched" in str(error)


def says_which_file(fault: Fault, error: RankError, heard: str) -> None:
    assert {failure.kind for failure in error.failures.values()} == {"OSError"}
    assert re.search(r"cannot write checkpoint \S*step_\d{6}: ", str(error))


def says_who_waits_for_whom(fault: Fault, error: RankError, heard: str) -> None:
    other = 1 - fault.rank
    assert list(error.failures) == [other] and error.failures[other].broken
    assert re.search(rf"Whether rank {fault.rank} came to \w+ #\d+ on dp is unknown", heard)
    assert re.search(rf"rank {other} in \w+ #\d+ on dp -> perhaps rank {fault.rank}", heard)
    assert f"rank {fault.rank}: nothing is known. Ended, stopped, or cut off?" in heard
    assert heard.count("minipar: stalled") == 1


KINDS: dict[str, Callable | None] = {
    # what must be said where a fault of this kind ends the attempt
    "killed": says_who_died,
    "all killed": says_who_died,
    "killed in a save": says_who_died,
    "disk full": says_which_file,
    "no number": says_which_step,
    "stopped for a while": None,
    "stopped": says_who_waits_for_whom,
}


def draw(kinds: Sequence[str], seed: int) -> list[Fault]:
    """Return a fault of each kind in random order, at a random rank and moment."""
    dice = random.Random(seed)
    kinds = dice.sample(kinds, len(kinds))
    return [Fault(kind, dice.randrange(2), dice.randrange(4), dice.random()) for kind in kinds]


# ---------------------------------------------------------------------- the run
class Run:
    """A run that is hit, taken up again, and hit again."""

    def __init__(self, pool: Ranks, config: TrainConfig, folder: Path) -> None:
        self.pool, self.config, self.folder = pool, config, folder
        self.heard: list[str] = []
        pool.sink = lambda rank, stream, text: self.heard.append(text)

    @property
    def newest(self) -> Path | None:
        return checkpoint.newest(self.folder)

    @property
    def steps_done(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return len(read(metrics)) if metrics.exists() else 0

    def attempt(self, faults: Sequence[Fault]) -> None:
        """Train on from the newest checkpoint, with `faults`, the last of which may end it."""
        before, start = self.pool.pids, self.newest
        self.heard.clear()
        begin, error = time.monotonic(), None
        try:
            args = self.config, str(self.folder), None if start is None else str(start)
            self.pool.run(train_and_be_hit, faults, *args)
        except RankError as caught:
            error = caught
        assert time.monotonic() - begin < BOUND * busy()
        says = KINDS[faults[-1].kind] if faults else None
        assert (error is None) == (says is None), error
        if says is not None:
            says(faults[-1], error, "".join(self.heard))
            self.check_what_is_left()
        for pid in set(before) - set(self.pool.pids):
            assert not psutil.pid_exists(pid)

    def check_what_is_left(self) -> None:
        """No step is lost that a finished save has seen, and what is there can be read."""
        done, newest = self.steps_done, self.newest
        saved = 0 if newest is None else checkpoint.step_of(newest)
        # The save after the last step may have been the one that was hit; in the background, the
        # one before may still have been on its way.
        in_flight = int(self.config.async_save)
        assert saved >= SAVE_EVERY * ((done - 1) // SAVE_EVERY - in_flight)
        if newest is not None:
            assert checkpoint.load(newest)[1]["step"] == saved

    def curve(self) -> list[tuple]:
        return lines_of(self.folder, *SAME)


def attempts(faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """What happens in the same attempt: faults that end nothing, and then one that ends it."""
    together: list[Fault] = []
    for fault in faults:
        steps_before = together[-1].after + 1 if together else 0
        together.append(replace(fault, after=steps_before + fault.after))
        if KINDS[fault.kind] is not None:
            yield together
            together = []
    yield together


def survive(faults: Sequence[Fault], text: Path, folder: Path, **changes) -> Run:
    """Let `faults` happen to a run; check that its steps are those of an undisturbed one."""
    # More than are done before the last fault.
    steps = 8 + sum(fault.after + 2 for fault in faults)
    config = replace(CONFIG, data=str(text), steps=steps, **changes)
    # The fork server outlives the pool.
    processes.warm_up("minipar.train.trainer", "tests.train.test_faults")
    mine = set(psutil.Process().children(recursive=True))
    with Ranks(2, timeout=TIMEOUT) as pool:
        whole, broken = (Run(pool, config, folder / name) for name in ("whole", "broken"))
        whole.attempt([])
        for together in attempts(faults):
            broken.attempt(together)
    left = set(psutil.Process().children(recursive=True)) - mine
    assert not psutil.wait_procs(left, timeout=10)[1]
    assert broken.steps_done == steps
    assert broken.curve() == whole.curve()  # to the last bit; no step is missing or there twice
    ours, theirs = (checkpoint.load(run.newest)[0] for run in (broken, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    return broken


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nine_random_faults(text, tmp_path):
    """Mutants: a save in place; a place in the text or moments of Adam not resumed; a rank
    that a killed one leaves waiting; a pool that takes its own kills for failures of ranks.
    """
    survive(draw([*KINDS, "killed in a save", "disk full"], seed=0), text, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_kills_while_saves_go_on_in_the_background(text, tmp_path):
    """Mutant: a checkpoint put in place before all ranks have written their share."""
    kinds = ["killed in a save", "all killed"]
    survive(draw(kinds, seed=2), text, tmp_path, async_save=True)
