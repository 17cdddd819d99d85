"""Agents of torchrun: two that do not share a folder, and one that starts its ranks again.

Each has a folder of its own as working directory, so that a relative --out is not shared.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import minipar
from minipar.cli import commands
from minipar.train import trainer
from minipar.train.metrics import read
from tests.patience import busy
from tests.train.runs import SAME, lines_of

ROOT = str(Path(minipar.__file__).parents[1])
PATIENCE = 100  # seconds that a start may take on a busy machine
RUN = ["--steps", "60", "--save-every", "5", "--seq-len", "32", "--batch-size", "4"]
RUN += ["--sample-tokens", "0", "--timeout", "60"]


class Agent:
    """One torchrun, and what it has printed."""

    def __init__(self, folder: Path, port: int, nodes: int, *flags: str):
        launcher = ["torch.distributed.run", "--nnodes", str(nodes)]
        launcher += ["--nproc-per-node", str(2 // nodes), "--max-restarts", str(2 - nodes)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        launcher += ["--local-addr", "127.0.0.1", "--monitor-interval", "0.1"]
        command = [sys.executable, "-m", *launcher, "-m", "minipar", "train", *RUN, *flags]
        folder.mkdir()
        self.path = folder / "said"
        with self.path.open("w", encoding="utf-8") as said:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
            self.process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, cwd=folder
            )

    @property
    def said(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()


@contextmanager
def agents_in(folders: list[Path], *flags: str) -> Iterator[list[Agent]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [Agent(folder, port, len(folders), *flags) for folder in folders]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()


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
    with agents_in(folders, *flags) as agents:
        for agent in agents:
            assert agent.process.wait(PATIENCE * busy()) != 0
    for agent in agents:
        lines = [line for line in agent.said.splitlines() if "minipar: error: " in line]
        assert lines and len(set(lines)) == 1, agent.said
        says = r"runs/tiny-dp2 is not shared: rank 1 on \S+ cannot read what rank 0 on"
        assert re.search(says, lines[0])
        assert 'Traceback (most recent call last):\n  File "' + ROOT + "/minipar" not in agent.said
    assert not list(tmp_path.glob("*/runs/*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_goes_on_in_the_same_folder_to_the_bit(ranks, text, tmp_path):
    """With --resume latest, when torchrun starts all ranks again. Mutant: a run begun anew."""
    flags = ["--data", str(text), "--mesh", "dp=2"]
    _, config = commands.parse(["train", *RUN, *flags])
    ranks(2).run(trainer.train, config, str(tmp_path / "whole"))
    folder = tmp_path / "shared/mine"
    metrics = folder / "metrics.jsonl"
    flags += ["--out", str(tmp_path / "shared"), "--name", "mine", "--resume", "latest"]
    with agents_in([tmp_path / "one"], *flags) as (agent,):
        deadline = time.monotonic() + PATIENCE * busy()
        while not metrics.exists() or len(read(metrics)) <= 6:
            assert agent.process.poll() is None and time.monotonic() < deadline, agent.said
            time.sleep(0.05)
        psutil.Process(agent.process.pid).children()[-1].send_signal(signal.SIGKILL)
        assert agent.process.wait(PATIENCE * busy()) == 0, agent.said
        said = agent.said
    assert re.search(rf"^Resuming {folder}/checkpoints/step_0000\d\d on ", said, re.M), said
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["mine"]
    assert lines_of(folder, *SAME) == lines_of(tmp_path / "whole", *SAME)
    assert not (folder / "lock").exists()
