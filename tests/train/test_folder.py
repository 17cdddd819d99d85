"""The folder of a run: two jobs at once, and folders or texts that hosts do not share."""

import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minipar.comm.mesh import Axis, Mesh
from minipar.ranks.launch import RankError
from minipar.train import folder as folders
from minipar.train import saver, trainer
from minipar.train.config import TrainConfig
from minipar.train.folder import LOCK, held
from tests.train.runs import save

ALONE = Axis("world", 0, 1, (0,))


# ---------------------------------------------------------------------- one job at a time
def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path):
    """As in one of another user's. Mutant: a traceback that ends in the name of a file."""
    (tmp_path / LOCK).mkdir()
    says = f"{tmp_path} cannot be written: .*{LOCK}.*another user"
    with pytest.raises(OSError, match=says), held(tmp_path, ALONE):
        pass


# ---------------------------------------------------------------------- seen by all
@pytest.fixture
def run_config(tmp_path) -> TrainConfig:
    text = tmp_path / "a.txt"
    text.write_text("".join(f"step {i * i % 97} of many, " for i in range(300)), encoding="utf-8")
    return TrainConfig(
        mesh="dp=2", data=str(text), steps=2, seq_len=16, batch_size=2, sample_tokens=0
    )


def test_two_resumes_of_one_run_at_once(ranks, run_config, tmp_path):
    """The second is refused on all its ranks before it reads or writes anything."""
    ranks(2).run(trainer.train, run_config, str(tmp_path / "run"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    start = str(tmp_path / "run/checkpoints/step_000002")
    with held(tmp_path / "run", ALONE), pytest.raises(RankError) as caught:
        ranks(2).run(trainer.train, run_config, str(tmp_path / "run"), start)
    failures = caught.value.failures.values()
    assert [failure.kind for failure in failures] == ["ValueError"] * 2
    assert all("is being written by another run" in failure.message for failure in failures)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def on_a_host_of_its_own(work, parent: str, *args):
    """Call `work` in a working directory of this rank's own."""
    before, patience = os.getcwd(), folders.PATIENCE
    folders.PATIENCE = 0.2
    os.chdir(f"{parent}/{dist.get_rank()}")
    try:
        return work(*args)
    finally:
        os.chdir(before)
        folders.PATIENCE = patience


@pytest.mark.slow
def test_a_copy_of_a_run_on_each_host_is_refused_and_untouched(ranks, run_config, tmp_path):
    """Mutant: it goes on, and keeps of each checkpoint what rank 0 has written."""
    ranks(2).run(trainer.train, run_config, str(tmp_path / "0/run"))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    args = run_config, "run", "run/checkpoints/step_000002"
    with pytest.raises(RankError) as caught:
        ranks(2).run(on_a_host_of_its_own, trainer.train, str(tmp_path), *args)
    assert [failure.kind for failure in caught.value.failures.values()] == ["ValueError"] * 2
    node = platform.node()
    says = f"run is not shared: rank 1 on {node} cannot read what rank 0 on {node}"
    assert says in str(caught.value)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_another_text_on_another_host_is_refused(ranks, run_config, tmp_path):
    """Such as of a copy that was cut short. Mutant: the run learns from both, without a word."""
    text = Path(run_config.data).read_text(encoding="utf-8")
    for host in "01":
        (tmp_path / host).mkdir()
    (tmp_path / "0/a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "1/a.txt").write_text(text[:-9] + "*" * 9, encoding="utf-8")
    config, folder = replace(run_config, data="a.txt"), tmp_path / "run"
    with pytest.raises(RankError) as caught:
        ranks(2).run(on_a_host_of_its_own, trainer.train, str(tmp_path), config, str(folder))
    assert [failure.kind for failure in caught.value.failures.values()] == ["ValueError"] * 2
    node = platform.node()
    says = f"the validation text of a.txt on {node} differs from the text of rank 0 on {node}"
    assert all(says in failure.message for failure in caught.value.failures.values())
    assert not folder.exists()


def save_apart(step: int) -> str:
    world = Mesh(dp=2).world
    weights = {f"w{i}": torch.full((9,), float(i)) for i in range(4)}
    try:
        saver.Saver(Path("checkpoints"), world, keep=1).save(step, weights, {"step": step})
    except OSError as error:
        return str(error)
    return ""


def test_no_checkpoint_is_published_that_lacks_a_file(ranks, tmp_path):
    """Nor is the one before deleted. Mutant: rank 0 trusts the digests that it is told."""
    for rank in range(2):
        (tmp_path / f"{rank}/checkpoints").mkdir(parents=True)
    save(tmp_path / "0/checkpoints", 1, {"w": torch.ones(2)}, {"step": 1})
    errors = ranks(2).run(on_a_host_of_its_own, save_apart, str(tmp_path), 2)
    assert errors[0] == errors[1]
    assert "cannot write checkpoint checkpoints/step_000002: rank 0 of 2: " in errors[0]
    assert "_00001.safetensors, which a rank has written, is not there" in errors[0]
    left = [path.name for path in (tmp_path / "0/checkpoints").iterdir()]
    assert left == ["step_000001"]
