"""The command line as a user meets it: clear words for what is wrong, and runs that can be resumed.

Most calls are made in this process, where `Ranks` raises: what a user got wrong must be found
before anything is started.
"""

import dataclasses
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import minipar
from minipar.cli import commands, main, training
from minipar.model import hf
from minipar.model.llama import PRESETS, Llama
from minipar.ranks.launch import RankError
from minipar.ranks.worker import Failure
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from tests.elsewhere import environment
from tests.patience import busy
from tests.train.runs import save

ENVIRONMENT = environment()
PATIENCE = 90  # seconds that a start may take on a busy machine


def command(*words) -> list[str]:
    return [sys.executable, "-m", "minipar", *map(str, words)]


def call(capfd, *words) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        main.main([str(word) for word in words])
    return stop.value.code or 0, *capfd.readouterr()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A text, a small run that can be resumed, and two that cannot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("work")
    words = "the quick brown fox (a) jumps [b] over {c} 0123 lazy dogs\n"
    (work / "a.txt").write_text(words * 200, encoding="utf-8")
    (work / "short.txt").write_text("to be or not to be\n" * 3, encoding="utf-8")
    (work / "bad.toml").write_text("step = 3\n", encoding="utf-8")
    (work / "twice.toml").write_text("config = 'bad.toml'\n", encoding="utf-8")
    config = TrainConfig(
        mesh="dp=1", data=str(work / "a.txt"), steps=2, seq_len=32, batch_size=4, sample_tokens=0
    )
    trainer.train(config, str(work / "run"))
    for name in "no_config", "no_checkpoint":
        shutil.copytree(work / "run", work / name)
    (work / "no_config/config.json").unlink()
    shutil.rmtree(work / "no_checkpoint/checkpoints/step_000002")
    torch.set_num_threads(threads)
    return work


# ---------------------------------------------------------------------- 1. malformed calls
MALFORMED = {
    # what is typed (W is the folder of `work`): what must be said
    "wash": "'wash' is no command; use one of train",
    "train --step 5": "Unrecognized options: --step",
    "train --steps 0": "--steps 0 must be 1 or more",
    "train --mesh xx=2": "'xx=2' is not axis=size",
    "train --mesh dp=500000": "500,000 ranks do not fit this machine",
    "train --preset llama-3-8b --mesh dp=60": "a rank takes 32.2 GB or more",
    "train --plan tp=3": "tp=3 does not divide num_heads",
    "train --config W/bad.toml": "Unrecognized options: --step",
    "train --config W/twice.toml": "twice.toml: it names another file",
    "train --backend nccl --mesh dp=12": "backend=nccl needs a GPU per rank: 12 ranks",
    "train --resume W/nowhere": "does not exist",
    "train --resume W/no_config": "it has no config.json",
    "train --resume W/no_checkpoint": "the run has no checkpoint",
    "train --resume latest": "--resume latest needs the --name of the run",
    "generate W/nowhere": "nowhere is no folder; name a run, or what export wrote",
    "generate W/run --prompt=": "--prompt '' has no token",
    "export W/run W/run": "is a run, and would lose its config.json",
}


@pytest.fixture
def no_ranks(monkeypatch):
    """Fail where ranks are started."""
    monkeypatch.setattr(training, "Ranks", lambda *_, **__: pytest.fail("ranks were started"))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("typed", MALFORMED)
def test_a_malformed_call_is_told_before_anything_starts(
    work, capfd, no_ranks, monkeypatch, tmp_path, typed
):
    """In one line, or in tyro's box; with exit code 2, and without a trace of a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    words = [word.replace("W/", f"{work}/", 1) for word in shlex.split(typed)]
    code, out, err = call(capfd, *words)
    assert code == 2 and MALFORMED[typed] in err and "Traceback" not in out + err, err
    assert err.startswith("╭") or (err.startswith("minipar: error: ") and err.count("\n") == 1)
    assert list(tmp_path.iterdir()) == [] and not (work / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, says",
    [
        ("--seed 5", "cannot resume the data with another seed"),
        ("--data W/short.txt", "seq_len=32 does not fit the part for validation, a twentieth"),
    ],
)
def test_what_only_the_ranks_can_see_is_one_clear_line_too(work, capfd, words, says):
    config = (work / "run/config.json").read_bytes()
    typed = words.replace("W/", f"{work}/").split()
    resume = "train", "--resume", work / "run", "--steps", 4, "--mesh", "dp=2"
    code, _, err = call(capfd, *resume, *typed)
    assert code == 2 and err.startswith("minipar: error: ") and err.count("\n") == 1, err
    assert says in err
    assert (work / "run/config.json").read_bytes() == config
    assert checkpoint.available(work / "run/checkpoints")  # the run is still there


def test_a_file_that_ranks_may_not_read_is_one_clear_line(capfd):
    alike = {rank: Failure(f"rank {rank} of 2", "PermissionError", "no", "x") for rank in (0, 1)}
    assert main.explain(RankError(alike)) == 1 and capfd.readouterr().err == "minipar: error: no\n"


# ---------------------------------------------------------------------- 2. help


def test_usage_names_every_command_without_importing_torch(capfd):
    for typed in ([], ["--help"], ["-h"]):
        code, out, _ = call(capfd, *typed)
        assert code == 0 and all(f"minipar {name}" in out for name in commands.COMMANDS)
    code, out, _ = call(capfd, "bench", "fsdp", "--help")  # what is typed before it, too
    assert code == 0 and "[{ddp,fsdp," in out.splitlines()[0]
    assert call(capfd, "--version") == (0, f"minipar {minipar.__version__}\n", "")
    code = "import sys; from minipar.cli.main import main\ntry: main(['--help'])\n"
    code += "except SystemExit: sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


# ---------------------------------------------------------------------- 3. small pieces
def test_each_run_gets_a_folder_of_its_own(tmp_path):
    config = TrainConfig(mesh="dp=2,tp=2", zero=1, out=str(tmp_path / "deep/runs"))
    names = [training.new_folder(config).name for _ in range(3)]
    assert names == ["tiny-dp2-tp2", "tiny-dp2-tp2-2", "tiny-dp2-tp2-3"]
    named = TrainConfig(name="mine", out=str(tmp_path))
    (tmp_path / "mine").write_text("a file is in the way", encoding="utf-8")
    assert training.new_folder(named) == tmp_path / "mine-2"


def test_resume_finds_a_checkpoint_of_a_run(tmp_path, monkeypatch, capsys):
    """The highest step, or the one that is named, also from inside of the run; or the latest of a
    name, as torchrun's restarts need it."""
    for step in (3, 12):
        save(tmp_path / "mine/checkpoints", step, {"w": torch.zeros(2)}, {}, keep=5)
    folder = tmp_path / "mine"
    TrainConfig(out=str(tmp_path)).save(folder / "config.json")
    newest, other = (folder / f"checkpoints/step_{step:06d}" for step in (12, 3))
    place = training._place
    assert place(TrainConfig(resume=str(folder))) == (folder, str(newest))
    assert "later" not in capsys.readouterr().out
    assert place(TrainConfig(resume=str(other))) == (folder, str(other))
    assert f"later checkpoints stay in {folder}" in capsys.readouterr().out
    monkeypatch.chdir(other)
    assert place(TrainConfig(resume=".")) == (folder, str(other))
    latest = TrainConfig(out=str(tmp_path), resume="latest")
    assert place(dataclasses.replace(latest, name="mine")) == (folder, str(newest))
    assert place(dataclasses.replace(latest, name="new")) == (tmp_path / "new", None)
    says = f"Stopped. Go on from step 12 with: minipar train --resume {folder}"
    assert training.how_to_go_on(folder) == says
    (blank := tmp_path / "a run").mkdir()
    shutil.copytree(folder / "checkpoints", blank / "checkpoints")
    assert training.how_to_go_on(blank).endswith(f" --resume '{blank}'")  # as a shell reads it


def test_flags_beat_a_file_which_beats_the_run_that_is_resumed(tmp_path):
    TrainConfig(steps=9, lr=0.5, mesh="dp=3", keep=7).save(tmp_path / "config.json")
    save(tmp_path / "checkpoints", 3, {"w": torch.zeros(2)}, {})
    twice = ["--resume=another", "--resume", str(tmp_path)]  # the last one counts
    for typed in ([f"--resume={tmp_path}"], twice):
        _, config = commands.parse(["train", *typed, "--steps", "20", "--mesh", "dp=2,tp=2"])
        assert (config.steps, config.lr, config.plan) == (20, 0.5, "dp=2,tp=2")
        assert config.keep == 7 and config.resume == str(tmp_path)
    (tmp_path / "run.toml").write_text(
        "lr = 0.25\nsteps = 7\nzero = 1\nasync_save = true\nprofile = false\nname = '-x'\n"
        "out = '~/a'",
        encoding="utf-8-sig",  # as Windows writes it
    )
    typed = ["--resume", str(tmp_path), "--config", str(tmp_path / "run.toml"), "--steps", "20"]
    _, config = commands.parse(["train", *typed])
    assert (config.steps, config.lr, config.plan) == (20, 0.25, "dp=3,zero=1")
    assert config.async_save and not config.profile and config.name == "-x"
    assert config.out == str(Path.home() / "a")  # no shell has read the file
    (tmp_path / "run.toml").write_text(f"resume = '{tmp_path}'", encoding="utf-8")
    _, config = commands.parse(["train", "--config", str(tmp_path / "run.toml")])
    assert (config.steps, config.lr, config.plan) == (9, 0.5, "dp=3")
    (tmp_path / "run.toml").write_text("mesh = 'tp=2'\nzero = 1", encoding="utf-8")
    typed = ["--config", str(tmp_path / "run.toml"), "--plan", "dp=4,zero=3"]
    assert commands.parse(["train", *typed])[1].plan == "dp=4,zero=3"


def test_a_model_that_is_shorter_than_usual_sets_the_length_and_says_so(
    tmp_path, capfd, monkeypatch
):
    """Mutant: refused, with a flag that nobody has typed."""
    hf.save(Llama(dataclasses.replace(PRESETS["tiny"], max_seq_len=64)), tmp_path)
    seen = []
    monkeypatch.setattr(training.backends, "check_ranks", lambda *_: seen.append(1) or sys.exit(9))
    assert call(capfd, "train", "--init", tmp_path)[:2] == (
        9,
        f"{tmp_path} cannot see the usual 256 tokens: --seq-len 64\n",
    )
    code, _, err = call(capfd, "train", "--init", tmp_path, "--seq-len", 65)
    assert code == 2 and "--seq-len 65 is too long" in err and len(seen) == 1


@pytest.mark.slow
def test_an_export_has_the_tokenizer_of_its_run(work, tmp_path, capfd):
    """Of the run, not of the path in its configuration; or of bytes. transformers reads both."""
    words = {"[UNK]": 0, "the": 1, "fox": 2, "</s>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "theirs.json"))
    run = tmp_path / "run"
    config = TrainConfig.load(work / "run/config.json")
    config = dataclasses.replace(config, tokenizer=str(tmp_path / "theirs.json"), steps=1)
    trainer.train(config, str(run))
    (tmp_path / "theirs.json").unlink()
    _, resumed = commands.parse(["train", "--resume", str(run)])
    assert resumed.tokenizer == str(run / "tokenizer.json")
    text = "the  fox\tnot Ä 漢\n"
    expected = {run: ([1, 2, 0, 0, 0], "</s>"), work / "run": (list(text.encode()), None)}
    for source, (ids, end) in expected.items():
        out = tmp_path / f"hf-{source.parent.name}"
        code, said, _ = call(capfd, "export", source, out)
        assert code == 0 and "tokenizer.json" in said
        read_back = AutoTokenizer.from_pretrained(out)
        assert read_back.encode(text, add_special_tokens=False) == ids
        assert read_back.eos_token == end
        # And the model goes on with it as ours does, from the run and from the export.
        model, start = AutoModelForCausalLM.from_pretrained(out), torch.tensor([ids])
        theirs = model.generate(start, max_new_tokens=9, do_sample=False, eos_token_id=None)
        typed = "--prompt", text, "--temperature", 0, "--tokens", 9
        capfd.readouterr()  # transformers' own bar
        for path in (source, out):
            code, said, err = call(capfd, "generate", path, *typed)
            assert (code, err) == (0, "") and said == read_back.decode(theirs[0]) + "\n"


# ---------------------------------------------------------------------- 4. real runs
LONG = ["--steps", "60", "--save-every", "5", "--seq-len", "32", "--batch-size", "4"]
LONG += ["--sample-tokens", "0", "--mesh", "dp=2"]


@pytest.fixture(scope="module")
def uninterrupted(work, standing):
    """What a run of `LONG` should look like: [(step, loss, lr, gradient norm)]."""
    _, config = commands.parse(["train", *LONG, "--data", str(work / "a.txt")])
    standing(2).run(trainer.train, config, str(work / "uninterrupted"))
    return curve(work / "uninterrupted")


def curve(folder: Path) -> list[tuple]:
    return [(s["step"], s["loss"], s["lr"], s["grad_norm"]) for s in read(folder / "metrics.jsonl")]


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """What a failed test has started would take the processors from all tests after it."""
    yield
    for process in STARTED:
        process.kill()  # ranks end with it
        process.communicate()
    STARTED.clear()


def started(words: list[str], work: Path, out: Path) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    where = ["--data", str(work / "a.txt"), "--out", str(out)]
    STARTED.append(subprocess.Popen([*words, *where], env=ENVIRONMENT, **pipes))
    return STARTED[-1]


def start(work: Path, out: Path, *more: str) -> subprocess.Popen:
    return started(command("train", *LONG, *more), work, out)


def wait_for_steps(process: subprocess.Popen, metrics: Path, count: int) -> list[psutil.Process]:
    """Wait until the run has done `count` steps; return the processes that it consists of."""
    deadline = time.monotonic() + PATIENCE * busy()
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.01)
    return psutil.Process(process.pid).children(recursive=True)


def ranks_of(children: list[psutil.Process]) -> list[psutil.Process]:
    parents = {child.ppid() for child in children}
    return sorted((c for c in children if c.pid not in parents), key=lambda c: c.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, name, code",
    [("rank", "SIGUSR1", 0), ("launcher", "SIGTERM", 0), ("launcher", "SIGINT", 130)],
)
def test_a_signal_ends_a_run_in_order_and_ctrl_c_at_once(work, tmp_path, who, name, code):
    """Mutants: only the rank that was signalled stops; the launcher ends before its ranks do."""
    process = start(work, tmp_path, "--steps", "100000")
    folder = tmp_path / "tiny-dp2"
    children = wait_for_steps(process, folder / "metrics.jsonl", 7)
    (process if who == "launcher" else ranks_of(children)[-1]).send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=PATIENCE * busy())
    assert process.returncode == code and "Traceback" not in out + err
    assert not psutil.wait_procs(children, timeout=10)[1]
    step = checkpoint.step_of(checkpoint.newest(folder))
    said = [line for line in (out + err).splitlines() if line.startswith("Stopped")]
    assert said == [f"Stopped. Go on from step {step} with: minipar train --resume {folder}"]
    if code == 0:  # all steps are saved
        assert err == "" and [line[0] for line in curve(folder)] == [*range(1, step + 1)]
    assert not (folder / "report.json").exists()


@pytest.mark.slow
def test_kill_9_of_a_rank_and_resume(work, tmp_path, capfd, uninterrupted):
    process = start(work, tmp_path)
    folder = tmp_path / "tiny-dp2"
    children = wait_for_steps(process, folder / "metrics.jsonl", 7)
    ranks_of(children)[-1].kill()
    out, err = process.communicate(timeout=PATIENCE * busy())
    assert process.returncode == 1 and "Traceback" not in out + err
    (error,) = [line for line in err.splitlines() if line.startswith("minipar: error: ")]
    assert re.search(r"rank [01] of 2: the process ended by signal 9 \(SIGKILL\)$", error)
    assert f"minipar train --resume {folder}" in err
    assert not psutil.wait_procs(children, timeout=10)[1]

    code, out, err = call(capfd, "train", "--resume", folder)
    assert code == 0 and err == "", err
    assert curve(folder) == uninterrupted  # to the last bit, and no step is missing or there twice
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-dp2"]
    assert {path.name for path in folder.iterdir()} == {
        *("checkpoints", "config.json", "loss.png", "metrics.jsonl", "report.json"),
        *("sample.txt", "timeline.json", "timeline.png"),
    }
    # Without a terminal: no bar, no escape codes, a table at the end.
    assert "\r" not in out and "\x1b" not in out
    assert out.startswith(f"Resuming {folder}/checkpoints/step_0000")
    assert re.search(r"^step 60/60: loss \d\.\d{3}, [\d,]+ tokens/s$", out, re.M)
    for row in ("loss", "speed", "validation loss", "communication", "peak memory", "files"):
        assert re.search(rf"^ *{row}  \S", out, re.M), row


# ---------------------------------------------------------------------- 5. torchrun
@pytest.mark.slow
def test_torchrun_is_the_same_run(work, tmp_path, uninterrupted):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = started([*launcher, *command("train", *LONG)[1:]], work, tmp_path)
    out, err = done.communicate(timeout=PATIENCE * busy())
    assert done.returncode == 0, err
    assert curve(tmp_path / "tiny-dp2") == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-dp2"]
    assert out.count("validation loss") == 1  # one rank speaks
    report = json.loads((tmp_path / "tiny-dp2/report.json").read_text(encoding="utf-8"))
    assert len(report["peak_memory"]) == 2


def test_torchrun_with_another_mesh_is_one_clear_line(work, capfd, monkeypatch, no_ranks, tmp_path):
    """Said by the first of its ranks, which end alike; but of files, each rank speaks."""
    where = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**where, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    typed = "train", "--data", work / "a.txt", "--seq-len", 32, "--out", tmp_path, "--mesh", "dp=3"
    says = "--plan dp=3 needs 3 ranks but WORLD_SIZE=2; use --mesh dp=2 or torchrun's --nproc-per"
    code, out, error = call(capfd, *typed)
    assert (code, out) == (2, "") and error.startswith(f"minipar: error: {says}")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(main.time, "sleep", lambda _: None)  # so that the other ends first
    assert call(capfd, *typed) == (2, "", "")
    assert list(tmp_path.iterdir()) == []

    def is_full(_: TrainConfig) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "train", is_full)
    says = "minipar: error: rank 0: [Errno 28] No space left on device\n"
    assert call(capfd, "train") == (1, "", says)
