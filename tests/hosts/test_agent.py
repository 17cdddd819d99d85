"""An agent of torchrun that starts its ranks again."""

import os
import re
import signal
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


@contextmanager
def torchrun(said: Path, *command: str) -> Iterator[subprocess.Popen]:
    """In the body, a torchrun of two ranks that prints to a file."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    with said.open("w", encoding="utf-8") as out:
        words = [sys.executable, "-m", *launcher, "-m", "minipar", *command]
        process = subprocess.Popen(words, env=environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_goes_on_in_the_same_folder_to_the_bit(ranks, tmp_path):
    """With --resume latest, when torchrun starts all ranks again. Mutant: a run begun anew."""
    text, out, folder = tmp_path / "a.txt", tmp_path / "said", tmp_path / "shared/mine"
    text.write_text("".join(f"step {i * i % 97} of many, " for i in range(900)), encoding="utf-8")
    train = ["train", "--data", str(text), "--mesh", "dp=2", "--steps", "60", "--save-every", "5"]
    train += ["--seq-len", "32", "--batch-size", "4", "--sample-tokens", "0", "--timeout", "60"]
    _, config = commands.parse(train)
    ranks(2).run(trainer.train, config, str(tmp_path / "whole"))
    metrics = folder / "metrics.jsonl"
    train += ["--out", str(tmp_path / "shared"), "--name", "mine", "--resume", "latest"]
    with torchrun(out, *train) as agent:
        deadline = time.monotonic() + PATIENCE * busy()
        while not metrics.exists() or len(read(metrics)) <= 6:
            assert agent.poll() is None and time.monotonic() < deadline, out.read_text("utf-8")
            time.sleep(0.05)
        psutil.Process(agent.pid).children()[-1].send_signal(signal.SIGKILL)
        ended = agent.wait(PATIENCE * busy())
    said = out.read_text("utf-8")
    assert ended == 0, said
    assert re.search(rf"^Resuming {folder}/checkpoints/step_0000\d\d with", said, re.M), said
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["mine"]
    assert lines_of(folder, *SAME) == lines_of(tmp_path / "whole", *SAME)
    assert not (folder / "lock").exists()
