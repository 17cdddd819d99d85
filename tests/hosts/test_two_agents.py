"""Two torchruns, as on two hosts, on this one: what they do not share, and how they go on together.

Each has a folder of its own as working directory, so that a relative --out is not shared.
"""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import minipar
from minipar.cli import commands
from minipar.train import checkpoint, trainer
from minipar.train.metrics import read
from tests.patience import busy

ROOT = str(Path(minipar.__file__).parents[1])
PATIENCE = 100  # seconds that a start may take on a busy machine
RUN = ["--steps", "60", "--save-every", "5", "--seq-len", "32", "--batch-size", "4"]
RUN += ["--sample-tokens", "0", "--eval-batches", "1", "--stall-seconds", "1", "--timeout", "60"]


class Agent:
    """One torchrun, and what it has printed."""

    def __init__(self, folder: Path, port: int, num_ranks: int, restarts: int, *flags: str):
        launcher = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(num_ranks)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        launcher += ["--rdzv-id", "mine", "--local-addr", "127.0.0.1"]
        launcher += ["--monitor-interval", "0.1", "--max-restarts", str(restarts)]
        command = [sys.executable, "-m", *launcher, "-m", "minipar", "train", *RUN, *flags]
        folder.mkdir(exist_ok=True)
        self.path = folder / f"said{len(list(folder.glob('said*')))}"
        with self.path.open("w", encoding="utf-8") as said:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
            self.process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, cwd=folder
            )

    @property
    def said(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()


@contextmanager
def two_agents(
    folders: list[Path], num_ranks: int, restarts: int, *flags: str
) -> Iterator[list[Agent]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [Agent(folder, port, num_ranks, restarts, *flags) for folder in folders]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()


def wait_until(condition: Callable[[], bool], agents: list[Agent]) -> None:
    deadline = time.monotonic() + PATIENCE * busy()
    while not condition():
        alive = all(agent.process.poll() is None for agent in agents)
        assert alive and time.monotonic() < deadline, [agent.said for agent in agents]
        time.sleep(0.05)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"step {i * i % 97} of many, " for i in range(900)), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_folder_that_is_not_shared_is_refused_before_the_first_step(text, tmp_path):
    """Mutant: rank 0 alone makes the folder, and the first save says "No such file"."""
    folders = [tmp_path / "one", tmp_path / "two"]
    flags = "--data", str(text), "--mesh", "dp=2", "--out", "runs"
    with two_agents(folders, 1, 0, *flags) as agents:
        for agent in agents:
            assert agent.process.wait(PATIENCE * busy()) != 0
    for agent in agents:
        lines = [line for line in agent.said.splitlines() if "minipar: error: " in line]
        assert lines and len(set(lines)) == 1, agent.said
        assert re.search(
            r"runs/tiny-dp2 is not shared: rank 1 on \S+ cannot read what rank 0 on", lines[0]
        )
        assert 'Traceback (most recent call last):\n  File "' + ROOT not in agent.said
    assert not list(tmp_path.glob("*/runs/*"))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_worker_goes_on_in_the_same_folder_to_the_bit(ranks, text, tmp_path):
    """The agents count their restarts apart: 1 where the worker was killed, 0 beside it.

    Mutants: ranks that meet by that count (which hangs); a run begun anew.
    """
    flags = ["--data", str(text), "--mesh", "dp=2,tp=2"]
    _, config = commands.parse(["train", *RUN, *flags])
    ranks(4).run(trainer.train, config, str(tmp_path / "whole"))
    folder = tmp_path / "shared/tiny-dp2-tp2"
    metrics = folder / "metrics.jsonl"
    flags += ["--out", str(tmp_path / "shared")]
    with two_agents([tmp_path / "one", tmp_path / "two"], 2, 1, *flags) as agents:
        wait_until(lambda: metrics.exists() and len(read(metrics)) > 6, agents)
        victim = agents[1].ranks[-1]
        victim.send_signal(signal.SIGSTOP)
        who = rf"rank \d of 4 \(.*\) on host {platform.node()}, process {victim.pid}: its last was"
        wait_until(lambda: any(re.search(who, agent.said) for agent in agents), agents)
        victim.kill()
        for agent in agents:
            assert agent.process.wait(PATIENCE * busy()) == 0, [agent.said for agent in agents]
    said = "".join(agent.said for agent in agents)
    assert re.search(rf"^Resuming {folder}/checkpoints/step_0000\d\d with", said, re.M)
    assert "Go on from step" in said
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [folder.name]
    keys = "step", "loss", "lr", "grad_norm", "tokens"
    ours, theirs = (
        [tuple(line[key] for key in keys) for line in read(run / "metrics.jsonl")]
        for run in (folder, tmp_path / "whole")
    )
    assert ours == theirs and len(ours) == 60
    last = "checkpoints/step_000060"
    ours, theirs = (checkpoint.load(run / last)[0] for run in (folder, tmp_path / "whole"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert not (folder / "running.json").exists() and not (folder / "job.json").exists()
