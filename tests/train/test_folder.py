"""The folder of a run: two jobs at once, folders that are not shared, jobs that come again."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minipar
from minipar.cli import failures, training
from minipar.comm.mesh import Axis, Mesh
from minipar.ranks.launch import RankError
from minipar.train import checkpoint, saver, trainer
from minipar.train import folder as folders
from minipar.train.config import TrainConfig
from minipar.train.folder import RUNNING, held
from minipar.train.tokenizer import ByteTokenizer

ALONE = Axis("world", 0, 1, (0,))
HOLD = """
import sys, time
from pathlib import Path
from minipar.comm.mesh import Axis
from minipar.train.folder import held
with held(Path(sys.argv[1]), Axis("world", 0, 1, (0,))):
    print("held", flush=True)
    time.sleep(60)
"""


# ---------------------------------------------------------------------- one job at a time
def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path):
    """As in one of another user's. Mutant: a traceback that ends in the name of a file."""
    (tmp_path / RUNNING).mkdir()
    says = f"{tmp_path} cannot be written: .*{RUNNING}.*another user"
    with pytest.raises(OSError, match=says) as raised, held(tmp_path, ALONE):
        pass
    assert type(raised.value).__name__ in failures._SAY_IT_ALL


def no_locks(*_):
    raise OSError(38, "Function not implemented")


@pytest.mark.slow
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, monkeypatch, has_locks):
    """Also where the file system has no locks. Mutants: no lock; a file that outlives kill -9."""
    if not has_locks:
        monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    environment = {**os.environ, "PYTHONPATH": str(Path(minipar.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            says = f"is being written by process {process.pid} on host {platform.node()}; wait"
            with pytest.raises(ValueError, match=says), held(tmp_path / "run", ALONE):
                pass
        finally:
            process.send_signal(signal.SIGKILL)
    assert (tmp_path / "run" / RUNNING).exists()
    with held(tmp_path / "run", ALONE):
        assert json.loads((tmp_path / "run" / RUNNING).read_text(encoding="utf-8"))["pid"]
    assert not (tmp_path / "run").exists()  # nothing was put there


def test_where_nothing_is_locked_one_is_told_what_to_remove(tmp_path, monkeypatch):
    """A run that was killed on another host, which cannot be asked."""
    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    (tmp_path / RUNNING).write_text('{"host": "elsewhere", "pid": 7}', encoding="utf-8")
    says = f"process 7 on host elsewhere; wait .*; if it has ended, remove {tmp_path / RUNNING}$"
    with pytest.raises(ValueError, match=says), held(tmp_path, ALONE):
        pass


def test_a_small_file_is_never_half_written(tmp_path, monkeypatch):
    """Mutant: it is opened to be written in place, and a kill leaves nothing of it."""

    def killed(*_):
        raise KeyboardInterrupt

    config = TrainConfig(steps=7)
    writes = {
        "config.json": config.save,
        folders.JOB: lambda path: folders.note_job(path.parent, "a", config, None),
        "tokenizer.json": ByteTokenizer().save,
    }
    for name, write in writes.items():
        (tmp_path / name).write_text("before", encoding="utf-8")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", killed)
            write(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == "before"
        write(tmp_path / name)
        assert len((tmp_path / name).read_text(encoding="utf-8")) > 9
    assert {path.name for path in tmp_path.iterdir()} == set(writes)


def test_what_is_in_the_folder_stays(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / RUNNING).write_text("[1, nonsense", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), held(tmp_path, ALONE):
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_run_that_is_interrupted_as_it_ends_can_be_taken_up_in_the_same_process(
    tmp_path, monkeypatch
):
    """As a rank of a pool, which lives on. Mutant: closed only if nothing was in the way."""

    def interrupted(*_) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), held(tmp_path, ALONE):
        monkeypatch.setattr("minipar.train.folder._is_still", interrupted)
    monkeypatch.undo()
    with held(tmp_path, ALONE) as is_ours:
        assert is_ours()


def test_two_resumes_of_one_run_at_once(ranks, run_config, tmp_path):
    """The second is refused on all its ranks before it reads or writes anything."""
    ranks(2).run(trainer.train, run_config, str(tmp_path / "run"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    start = str(tmp_path / "run/checkpoints/step_000002")
    with held(tmp_path / "run", ALONE), pytest.raises(RankError) as caught:
        ranks(2).run(trainer.train, run_config, str(tmp_path / "run"), start)
    failures = caught.value.failures.values()
    assert [failure.kind for failure in failures] == ["ValueError"] * 2
    assert all(f"process {os.getpid()} on host" in failure.message for failure in failures)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_run_whose_folder_was_removed_leaves_the_next_one_alone(tmp_path):
    """Mutants: it publishes there and deletes the other's; it lets go of the other's lock."""
    folder, weights = tmp_path / "run", {"w": torch.zeros(2)}
    says = f"{folder} was removed, or is another run's by now"
    with ExitStack() as next_run:
        with held(folder, ALONE) as is_ours:
            old = saver.Saver(folder / "checkpoints", in_background=True, is_ours=is_ours)
            old.save(1, weights, {})
            while old.is_writing:
                time.sleep(0.01)
            shutil.rmtree(folder)
            next_run.enter_context(held(folder, ALONE))
            with pytest.raises(OSError, match=says):
                old.finish()
            save(folder, 5)
            (folder / "checkpoints/.unfinished_000009").mkdir()
            with pytest.raises(OSError, match=says):
                old.save(9, weights, {})
        assert (folder / RUNNING).exists()
        left = {path.name for path in (folder / "checkpoints").iterdir()}
        assert left == {"step_000005", ".unfinished_000009"}


# ---------------------------------------------------------------------- seen by all
@pytest.fixture
def run_config(tmp_path) -> TrainConfig:
    text = tmp_path / "a.txt"
    text.write_text("".join(f"step {i * i % 97} of many, " for i in range(300)), encoding="utf-8")
    return TrainConfig(
        mesh="dp=2",
        data=str(text),
        steps=2,
        seq_len=16,
        batch_size=2,
        eval_batches=1,
        sample_tokens=0,
        record_every=100,
    )


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
    assert f"run is not shared: rank 1 on {node} cannot read what rank 0 on {node}" in str(
        caught.value
    )
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("part", ["training", "validation"])
def test_another_text_on_another_host_is_refused(ranks, run_config, tmp_path, part):
    """Such as of a copy that was cut short. Mutant: the run learns from both, without a word."""
    text = Path(run_config.data).read_text(encoding="utf-8")
    for host in "01":
        (tmp_path / host).mkdir()
    (tmp_path / "0/a.txt").write_text(text, encoding="utf-8")
    other = {"training": text[:-9], "validation": text[:-9] + "*" * 9}[part]
    (tmp_path / "1/a.txt").write_text(other, encoding="utf-8")
    config, folder = replace(run_config, data="a.txt"), tmp_path / "run"
    with pytest.raises(RankError) as caught:
        ranks(2).run(on_a_host_of_its_own, trainer.train, str(tmp_path), config, str(folder))
    assert [failure.kind for failure in caught.value.failures.values()] == ["ValueError"] * 2
    node = platform.node()
    says = f"the {part} text of a.txt on {node} is not that of rank 0 on {node}"
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
    saver.save(tmp_path / "0/checkpoints", 1, {"w": torch.ones(2)}, {"step": 1})
    errors = ranks(2).run(on_a_host_of_its_own, save_apart, str(tmp_path), 2)
    assert errors[0] == errors[1]
    assert "cannot write checkpoint checkpoints/step_000002: rank 0 of 2: " in errors[0]
    assert "_00001.safetensors, which a rank has written, is not there" in errors[0]
    left = [path.name for path in (tmp_path / "0/checkpoints").iterdir()]
    assert left == ["step_000001"]


# ---------------------------------------------------------------------- jobs of torchrun
@pytest.fixture
def job(monkeypatch):
    """``job(name, restarts)``: as if a torchrun with that --rdzv-id had started us so often."""

    def job(name: str, restarts: int = 0) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return job


def save(folder: Path, step: int) -> str:
    saver.save(folder / "checkpoints", step, {"w": torch.zeros(2)}, {}, keep=9)
    return str(folder / f"checkpoints/step_{step:06d}")


def test_a_restart_finds_the_folder_and_what_was_saved_in_it(job, tmp_path):
    """Of ranks, or of a node whose torchrun has counted none. Before the first save it begins
    again, in the folder that is there; once the job is done, its name means nothing."""
    config, folder = TrainConfig(out=str(tmp_path), name="mine"), tmp_path / "mine"
    job("slurm-7")
    assert training._place_under_torchrun(config, None, None) == (folder, None)
    assert training._place_under_torchrun(config, None, None) == (folder, None)
    saved = save(folder, 5)
    job("slurm-7", restarts=2)
    assert training._place_under_torchrun(config, None, None) == (folder, saved)
    assert list(tmp_path.iterdir()) == [folder]
    folders.forget_job(folder)
    assert training._place_under_torchrun(config, None, None) == (tmp_path / "mine-2", None)


def test_a_restart_of_a_run_that_went_back_goes_back_too(job, tmp_path):
    """Resumed from step 3 of 9: what was saved in the life before is of another story."""
    start = save(tmp_path, 3)
    save(tmp_path, 9)
    job("a")
    assert training._place_under_torchrun(TrainConfig(), tmp_path, start) == (tmp_path, start)
    assert training._place_under_torchrun(TrainConfig(), tmp_path, start) == (tmp_path, start)
    newer = save(tmp_path, 6)
    assert training._place_under_torchrun(TrainConfig(), tmp_path, start) == (tmp_path, newer)
    again = save(tmp_path, 9)
    assert training._place_under_torchrun(TrainConfig(), tmp_path, start) == (tmp_path, again)


def test_a_run_that_went_back_goes_on_from_what_it_wrote_last(tmp_path, monkeypatch):
    """Not from the highest step, which the story before it has left. Mutants: by the number of the
    step; by times, which a copy has others of."""
    for seconds, step in enumerate((3, 9, 6)):
        os.utime(Path(save(tmp_path, step)) / "manifest.json", (-seconds, -seconds))
    assert training.checkpoint_of(tmp_path) == tmp_path / "checkpoints/step_000006"
    for seconds, step in enumerate((3, 9, 6)):  # of a version without numbers
        manifest = tmp_path / f"checkpoints/step_{step:06d}/manifest.json"
        content = json.loads(manifest.read_text(encoding="utf-8"))
        del content["number"]
        manifest.write_text(json.dumps(content), encoding="utf-8")
        os.utime(manifest, (seconds, seconds))
    assert training.checkpoint_of(tmp_path) == tmp_path / "checkpoints/step_000006"
    says = f"Stopped. Go on from step 6 with: minipar train --resume {tmp_path}"
    assert folders.how_to_go_on(tmp_path) == says
    blank = tmp_path / "a run"
    shutil.copytree(tmp_path / "checkpoints", blank / "checkpoints")
    assert folders.how_to_go_on(blank).endswith(f" --resume '{blank}'")  # as a shell reads it
    monkeypatch.setattr(folders.backends, "under_torchrun", lambda: True)
    assert f"with: the same line of torchrun, and in it --resume {tmp_path}" in (
        folders.how_to_go_on(tmp_path)
    )


def test_a_damaged_checkpoint_counts_by_when_it_was_written(tmp_path):
    """An old one is no reason to stop; the latest is, since it is that which is asked for."""
    for seconds, step in enumerate((3, 6)):
        os.utime(Path(save(tmp_path, step)) / "manifest.json", (seconds, seconds))
    damaged = tmp_path / "checkpoints/step_000003/manifest.json"
    damaged.write_text("", encoding="utf-8")
    for seconds, step in ((0, 6), (2, 3)):
        os.utime(damaged, (seconds, seconds))
        assert folders.newest(tmp_path).name == f"step_{step:06d}"
    os.utime(damaged, (0, 0))
    assert checkpoint.number_of(Path(save(tmp_path, 9))) == 3


def test_a_job_is_not_forgotten_before_its_pictures_are_drawn(job, tmp_path, monkeypatch):
    """Or a node that fails meanwhile would begin the whole run again, under another name."""

    def fails(*_):
        assert (tmp_path / "mine" / folders.JOB).exists()
        raise ZeroDivisionError

    job("a")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(training.backends, "joined", lambda *_: nullcontext())
    monkeypatch.setattr(training.trainer, "train", lambda *_: "a report")
    monkeypatch.setattr(training, "conclude", fails)
    config = TrainConfig(out=str(tmp_path), name="mine", mesh="dp=1")
    with pytest.raises(ZeroDivisionError):
        training._train_under_torchrun(config, None, None)
    monkeypatch.setattr(training, "conclude", lambda *_: None)
    training._train_under_torchrun(config, None, None)
    assert not (tmp_path / "mine" / folders.JOB).exists()


def test_another_job_or_other_flags_find_nothing_of_ours(job, tmp_path):
    config = TrainConfig(out=str(tmp_path), name="mine")
    job("a")
    training._place_under_torchrun(config, None, None)
    other = TrainConfig(out=str(tmp_path), name="mine", lr=0.5)
    assert training._place_under_torchrun(other, None, None) == (tmp_path / "mine-2", None)
    job("b")
    assert training._place_under_torchrun(config, None, None) == (tmp_path / "mine-3", None)


def test_a_restart_without_a_name_is_refused(job, tmp_path):
    """Mutant: a run past step 157 comes back at step 1, in another folder."""
    job("none")
    config = TrainConfig(out=str(tmp_path), name="mine")
    assert training._place_under_torchrun(config, None, None) == (tmp_path / "mine", None)
    job("none", restarts=1)
    with pytest.raises(ValueError, match="without --rdzv-id nothing says which run they had"):
        training._place_under_torchrun(config, None, None)
