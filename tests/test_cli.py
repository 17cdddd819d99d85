"""The command line as a user meets it: one line for what is wrong, and runs that can be resumed.

Most calls are made in this process, where `Ranks` raises: what a user got wrong must be found
before anything is started.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tokenizers
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import minipar
from minipar.cli import commands, main, training
from minipar.lab.bench import race
from minipar.model.llama import PRESETS
from minipar.ranks.launch import RankError
from minipar.ranks.worker import Failure
from minipar.train import checkpoint, saver, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from tests.elsewhere import environment
from tests.patience import busy

SMALL = ["--steps", "6", "--seq-len", "32", "--batch-size", "4"]
SMALL += ["--sample-tokens", "5", "--eval-batches", "2"]
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
    """Files of many kinds, and a small run that can be resumed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("work")
    (work / "a.txt").write_text(inspect.getsource(argparse_like) * 25, encoding="utf-8")
    (work / "short.txt").write_text("to be or not to be\n" * 3, encoding="utf-8")
    (work / "empty.txt").write_text("", encoding="utf-8")
    (work / "binary.bin").write_bytes(bytes(range(256)) * 4)
    (work / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
    (work / "no_text.jsonl").write_text('{"body": "fine"}\n', encoding="utf-8")
    (work / "trace.json").write_text('{"what": 1}', encoding="utf-8")
    (work / "folder").mkdir()
    (work / "dangling").symlink_to(work / "nowhere/at/all")
    config = TrainConfig(
        mesh="dp=1",
        data=str(work / "a.txt"),
        steps=2,
        seq_len=32,
        batch_size=4,
        eval_batches=1,
        sample_tokens=0,
    )
    trainer.train(config, str(work / "run"))
    names = "no_config bad_config wrong_type no_checkpoint truncated headless strangers linked"
    for name in names.split():
        shutil.copytree(work / "run", work / name)
    (work / "no_config/config.json").unlink()
    (work / "bad_config/config.json").write_text('{"steps": 2', encoding="utf-8")
    (work / "wrong_type/config.json").write_text('{"steps": "many"}', encoding="utf-8")
    for name in ("strangers", "linked"):
        dataclasses.replace(config, tokenizer="/etc/hostname").save(work / name / "config.json")
    (work / "linked/tokenizer.json").symlink_to("/etc/hostname")
    shutil.rmtree(work / "no_checkpoint/checkpoints/step_000002")
    os.truncate(work / "truncated/checkpoints/step_000002/weights_00000.safetensors", 1000)
    (work / "headless/checkpoints/step_000002/manifest.json").unlink()
    torch.set_num_threads(threads)
    return work


def argparse_like() -> None:
    """Some text to learn from.

    It is repeated until it fills a few batches; what it says does not matter to anybody, as long as
    it has the letters, the blanks and the lines of the text that people write: 0123456789, (a), [b]
    and {c}. The quick brown fox jumps over the lazy dog, and the five boxing wizards jump quickly.
    """


# ---------------------------------------------------------------------- 1. malformed calls
MALFORMED = {
    # what is typed (W is the folder of `work`): what the line must say
    "trian": "'trian' is no command; did you mean train? There are train, ",
    "bench dpp": "dpp",
    "wash": "'wash' is no command; use one of train",
    "train --bogus 1": "--bogus",
    "train --step 5": "Unrecognized options: --step, 5; did you mean --steps",
    "train --steps " + "9" * 5000: "--steps",
    "train --steps 1" + "0" * 30: "--steps 1000000000000000000000000000000 must be a number up to",
    "train --mesh dp=65": "65 ranks do not fit this machine",
    "train --mesh dp=500000": "500,000 ranks do not fit this machine",
    "train --mesh dp=٣": "'dp=٣' is not axis=size",
    "train --preset llama-3-8b --mesh dp=60": "a rank takes 32.2 GB or more",
    "train --microbatches 1000": "--microbatches 1000 would be empty, all but 8",
    "train --data /dev/zero": "is a device, a pipe or a socket",
    "train --data ~nouser/x": "no file or folder '~nouser/x'",
    "train --tokenizer W/folder": "no tokenizer at",
    "train extra": "extra",
    "train --steps": "--steps",
    "train --steps many": "many",
    "train --steps 1.5": "1.5",
    "train --steps 0": "--steps 0 must be 1 or more",
    "train --lr -1": "--lr -1.0 must be above 0",
    "train --lr nan": "--lr nan must be above 0",
    "train --seed -1": "--seed -1 must be 0 or more",
    "train --microbatches 0": "--microbatches 0 must be 1 or more",
    "train --preset huge": "--preset huge is unknown; use one of tiny",
    "train --schedule linear": "linear",
    "train --dtype int8": "int8",
    "train --mesh dp=0": "'dp=0' is not axis=size",
    "train --mesh dp=x": "'dp=x' is not axis=size",
    "train --mesh xx=2": "'xx=2' is not axis=size",
    "train --mesh dp=2,dp=2": "'dp=2' is not axis=size with a new axis",
    "train --mesh ep=2": "spreads experts, and this Llama has none",
    "train --plan tp=3": "nearest plan that works is dp=3",
    "train --data W/nowhere.txt": "no file or folder",
    "train --data W/empty.txt": "holds no text",
    "train --data W/folder": "holds no text",
    "train --data W/binary.bin": "is binary",
    "train --data W/*.rst": "no file matches",
    "train --data W/bad.jsonl": "bad.jsonl:2: no JSON",
    "train --data W/no_text.jsonl": "no string in field 'text'",
    "train --data W/short.txt": "--seq-len 256 does not fit the 54 tokens of training text",
    "train --data W/a.txt --seq-len 999": "tokens of validation text",
    "train --seq-len 1000000": "is longer than tiny can see",
    "train --tokenizer W/none.json": "no tokenizer at",
    "train --tokenizer W/a.txt": "is no tokenizer.json",
    "train --backend mpi": "mpi",
    "train --backend link --link 5gbe": "no link '5gbe', did you mean",
    "train --name a/b": "--name 'a/b' must be a plain name",
    "train --data W/a.txt --seq-len 32 --out W/a.txt": "--out",
    "train --data W/a.txt --seq-len 32 --out /proc/none": "--out /proc/none: cannot make",
    "train --data W/a.txt --seq-len 32 --out W/dangling": "cannot make",
    "train --resume ''": "one of the arguments is empty; is a variable of the shell not set?",
    "train --resume=": "--resume is empty; name the folder of a run, or leave --resume out",
    "train --resume W/nowhere": "does not exist",
    "train --resume W/no_config": "it has no config.json",
    "train --resume W/bad_config": "is not the configuration of a run",
    "train --resume W/wrong_type": "steps='many'",
    "train --resume W/no_checkpoint": "the run has no checkpoint",
    "train --resume W/truncated": "weights_00000.safetensors has 1000 bytes instead of",
    "train --resume W/truncated/checkpoints/step_000002": "weights_00000.safetensors has 1000",
    "train --resume W/headless": "manifest.json",
    "train --init W/nowhere": "config.json: cannot be read",
    "train --keep 0": "--keep 0 must be 1 or more",
    "generate W/nowhere": "nowhere does not exist; name a run, or what export wrote",
    "generate W/run --tokens 0": "--tokens 0 must be 1 or more",
    "generate W/run --top-k 0": "--top-k 0 must be 1 or more",
    "generate W/run --prompt=": "--prompt is empty",
    "generate W/truncated": "weights_00000.safetensors has 1000 bytes instead of",
    "genrate W/run": "did you mean generate?",
    "export W/run": "required",
    "export W/nowhere W/out": "nowhere does not exist; name the folder of a run",
    "export W/no_checkpoint W/out": "the run has no checkpoint",
    "export W/strangers W/out": "it has no tokenizer.json; copy /etc/hostname to",
    "export W/linked W/out": "linked/tokenizer.json is no tokenizer.json",
    "export W/truncated W/out": "weights_00000.safetensors has 1000 bytes instead of",
    "export W/run W/a.txt": "is a file; a checkpoint is a folder",
    "export W/run W/a.txt/out": "export: cannot write",
    "export W/run ''": "one of the arguments is empty",
    "train --resume W/run/checkpoints/step_000001": "does not exist",
    "train --resume W/run --mesh dp=0": "'dp=0' is not axis=size",
    "bench fsdp --ranks 1": "--ranks 1: use 2 or more",
    "bench tensor --ranks 3": "--ranks 3",
    "bench context --seq-len 10": "--seq-len 10",
    "bench compression --methods zip": "zip",
    "bench ddp --links gloo 5gbe": "no link '5gbe'",
    "bench ddp --json W/nowhere/rows.json": "there is no folder",
    "bench idle --ranks 3": "--ranks 3",
    "overlap": "name at least one trace",
    "overlap W/nowhere.json": "nowhere.json",
    "overlap W/a.txt": "a.txt",
    "overlap W/trace.json": "trace.json",
    "overlap W/folder": "folder",
}


@pytest.fixture
def no_ranks(monkeypatch):
    """Fail where ranks are started."""

    def started(*args, **kwargs):
        pytest.fail("ranks were started for a call that cannot work")

    monkeypatch.setattr(training, "Ranks", started)
    monkeypatch.setattr(race, "Ranks", started)  # for every bench


def assert_one_line(code: int, out: str, err: str, says: str) -> None:
    assert code == 2, err
    assert err.startswith("minipar: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert says in err, err
    assert "Traceback" not in out + err and "╭" not in err


@pytest.mark.mostly_slow
@pytest.mark.parametrize("words", MALFORMED)
def test_a_malformed_call_is_one_clear_line(work, capfd, no_ranks, monkeypatch, tmp_path, words):
    if "/proc" in words and not os.path.isdir("/proc"):
        pytest.skip("needs a folder that even root cannot write to")
    monkeypatch.chdir(tmp_path)
    typed = [word.replace("W/", f"{work}/", 1) for word in shlex.split(words)]
    assert_one_line(*call(capfd, *typed), MALFORMED[words])
    assert list(tmp_path.iterdir()) == []  # no trace of a run
    assert not (work / "out").exists()  # nor of an export


def test_a_slip_is_one_clear_line_where_boxes_have_no_letters():
    """A locale of ASCII. Mutant: its rules of dashes are no rules."""
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ValueError) as slip:
        commands.parse(["train", "--step", "5"])
    assert str(slip.value).startswith("Unrecognized options: --step, 5; did you mean --steps")
    assert "---" not in str(slip.value)


def test_nccl_without_gpus_is_one_clear_line(work, capfd, no_ranks):
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    typed = "train", "--data", work / "a.txt", "--seq-len", 32, "--backend", "nccl"
    assert_one_line(*call(capfd, *typed), "needs a GPU per rank: 4 ranks but 0 GPUs")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, says",
    [
        ("--preset small", "is of another model: it has lm_head.weight of shape (256, 128)"),
        ("--seed 5", "cannot resume the data with another seed"),
        ("flipped", "contents of state.pt do not match their CRC-32"),
    ],
)
def test_what_only_the_ranks_can_see_is_one_clear_line_too(
    ranks, work, capfd, tmp_path, words, says
):
    assert ranks(2).pids  # so that what it shares with the others is here before
    folder = tmp_path / "run"
    shutil.copytree(work / "run", folder)
    if words == "flipped":
        state = folder / "checkpoints/step_000002/state.pt"
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
        words = ""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    config = (folder / "config.json").read_bytes()
    assert_one_line(
        *call(capfd, "train", "--resume", folder, "--mesh", "dp=2", *words.split()), says
    )
    assert (folder / "config.json").read_bytes() == config
    assert checkpoint.available(folder / "checkpoints")  # the run is still there
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not psutil.wait_procs(left, timeout=10)[1]


# ---------------------------------------------------------------------- 2. help
def words_of(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_explains_every_flag(capfd, monkeypatch, name):
    kind = commands.COMMANDS[name].config
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = call(capfd, *name.split(), "--help")
    assert code == 0 and err == ""
    page = words_of(out)
    described = set()  # a flag may be that of a parent, or given anew
    for cls in filter(dataclasses.is_dataclass, kind.__mro__):
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for field, doc in zip(body, body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or field.target.id in described:
                continue
            assert isinstance(doc, ast.Expr), f"{field.target.id} has no description"
            flag = "--" + field.target.id.replace("_", "-")
            assert flag in page or "Positional" in ast.unparse(field.annotation)
            assert words_of(doc.value.value) in page, field.target.id
            described.add(field.target.id)
    assert described == kind.__dataclass_fields__.keys()


def test_usage_names_every_command(capfd):
    for typed in ([], ["--help"], ["-h"]):
        code, out, _ = call(capfd, *typed)
        assert code == 0 and all(f"minipar {name}" in out for name in commands.COMMANDS)
    assert call(capfd, "--version") == (0, f"minipar {minipar.__version__}\n", "")


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_has_three_examples_that_can_be_typed(capfd, name):
    examples = commands.COMMANDS[name].examples
    _, out, _ = call(capfd, *name.split(), "--help")
    assert len(examples) == 3
    for flags in examples:
        assert not re.search(r"[*?]", re.sub(r"'[^']*'", "", flags))  # zsh would look for files
        assert f"\n  minipar {name} {flags}".rstrip() + "\n" in out
        read, config = commands.parse([*name.split(), *shlex.split(flags.partition(">")[0])])
        assert read == name
        if name.startswith(("train", "bench")):  # others ask for files
            config.check()


def test_flags_of_training_are_shown_in_groups_and_read_as_one(capfd, monkeypatch):
    """Mutant: a group forgets what a resumed run had."""
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = call(capfd, "train", "--help")
    titles = re.findall(r"─ (\w+) options ─", out)
    assert titles == ["model", "batch", "optimizer", "parallel", "saving", "run"]
    typed = ["train", "--plan", "dp=2,tp=2,zero=1", "--lr", "0.5", "--strict", "--keep", "7"]
    config = commands.parse(typed)[1]
    expected = TrainConfig(mesh="dp=2,tp=2", zero=1, lr=0.5, strict=True, keep=7)
    assert config == expected and type(config) is TrainConfig


def test_what_there_is_is_told_without_importing_torch():
    """Mutant: help that takes five seconds."""
    code = "import sys; from minipar.cli.main import main\ntry: main(['--help'])\n"
    code += (
        "except SystemExit: sys.exit(not sys.modules.keys().isdisjoint({'torch', 'matplotlib'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_python_m_minipar(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minipar", "train", "--steps", "0"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("minipar", run_name="__main__")
    assert_one_line(stop.value.code, *capfd.readouterr(), "--steps 0 must be 1 or more")


# ---------------------------------------------------------------------- 3. small pieces
def test_each_run_gets_a_folder_of_its_own(tmp_path):
    config = TrainConfig(mesh="dp=2, tp=1", out=str(tmp_path / "deep/runs"))
    assert [training.new_folder(config).name for _ in range(3)] == [
        "tiny-dp2-tp1",
        "tiny-dp2-tp1-2",
        "tiny-dp2-tp1-3",
    ]
    named = TrainConfig(name="mine", out=str(tmp_path))
    (tmp_path / "mine").write_text("a file is in the way", encoding="utf-8")
    assert training.new_folder(named) == tmp_path / "mine-2"


def test_resume_finds_the_newest_checkpoint_of_a_run(tmp_path):
    for step in (3, 12):
        saver.save(tmp_path / "checkpoints", step, {"w": torch.zeros(2)}, {}, keep=5)
    TrainConfig().save(tmp_path / "config.json")
    newest, other = (tmp_path / f"checkpoints/step_{step:06d}" for step in (12, 3))
    assert training.checkpoint_of(tmp_path) == newest and training.checkpoint_of(other) == other
    assert training.run_of(str(other)) == training.run_of(str(tmp_path)) == tmp_path


def test_a_checkpoint_is_found_from_inside_of_its_run(work, tmp_path, monkeypatch, capfd):
    """Mutant: what is no path with the folder of the run in it is no run."""
    saver.save(tmp_path / "checkpoints", 3, {"w": torch.zeros(2)}, {})
    TrainConfig(lr=0.5).save(tmp_path / "config.json")
    saved = tmp_path / "checkpoints/step_000003"
    for place, path in ((saved.parent, saved.name), (saved, "."), (saved, f"../{saved.name}")):
        monkeypatch.chdir(place)
        assert training.run_of(path) == tmp_path and training.typed_path(path) == saved
        assert commands.parse(["train", "--resume", path])[1].lr == 0.5
    code, _, err = call(capfd, "generate", ".")
    assert code == 2 and f"checkpoint {saved}" in err  # it is taken for one, and has no model
    monkeypatch.chdir(tmp_path)
    for path in ("checkpoints/step_000003", ".", "checkpoints"):
        assert str(training.typed_path(path)) == path  # as it was typed


def test_flags_beat_the_configuration_of_the_resumed_run(tmp_path):
    TrainConfig(steps=9, lr=0.5, mesh="dp=3", ddp="naive").save(tmp_path / "config.json")
    twice = ["--resume=another", "--resume", str(tmp_path)]  # the last one counts
    for typed in (["--resume", str(tmp_path)], [f"--resume={tmp_path}"], twice):
        _, config = commands.parse(["train", *typed, "--steps", "20"])
        assert (config.steps, config.lr, config.mesh, config.ddp) == (20, 0.5, "dp=3", "naive")
        assert config.resume == str(tmp_path)


def test_a_full_disk_and_a_bad_number_are_one_line(capfd, monkeypatch):
    for error in (OSError(28, "No space left on device"), FloatingPointError("step 3: loss nan")):

        def fails(_: TrainConfig, error=error):
            raise error

        monkeypatch.setattr(training, "train", fails)
        code, _, err = call(capfd, "train")
        assert code == 1 and err == f"minipar: error: {error}\n"


@pytest.mark.slow
def test_a_reader_that_has_gone_ends_it_without_a_word(tmp_path):
    """As of `| head -1`. Mutant: "[Errno 32] Broken pipe", or a traceback at exit."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("--help"), stdout=write_end, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    os.close(write_end)
    assert done.returncode == 141 and done.stderr == b""


def test_what_ranks_say_of_a_broken_pipe_is_left_out(capfd):
    failure = Failure("rank 0 of 2", "BrokenPipeError", "[Errno 32] Broken pipe", "Traceback")
    died = Failure("rank 1 of 2", "RuntimeError", "connection closed", "Traceback")
    assert main.explain(RankError({0: failure, 1: died})) == 141
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_an_export_has_the_tokenizer_of_its_run(work, tmp_path, capfd):
    """Of the run, not of the path in its configuration; or of bytes. transformers reads both."""
    words = {"[UNK]": 0, "to": 1, "be": 2}
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
    text = "to be  or\tnot Ä 漢\n"
    expected = {run: [1, 2, 0, 0, 0, 0], work / "run": list(text.encode())}
    for source, ids in expected.items():
        out = tmp_path / f"hf-{source.parent.name}"
        code, said, _ = call(capfd, "export", source, out)
        assert code == 0 and "tokenizer.json" in said
        read_back = AutoTokenizer.from_pretrained(out)
        assert read_back.encode(text, add_special_tokens=False) == ids
        # And the model goes on with it as ours does, from the run and from the export.
        model, start = AutoModelForCausalLM.from_pretrained(out), torch.tensor([ids])
        theirs = model.generate(start, max_new_tokens=9, do_sample=False, eos_token_id=None)
        typed = "--prompt", text, "--temperature", 0, "--tokens", 9
        capfd.readouterr()  # transformers' own bar
        for path in (source, out):
            code, said, err = call(capfd, "generate", path, *typed)
            assert (code, err) == (0, "") and said == read_back.decode(theirs[0]) + "\n"
    assert read_back.decode(ids) == text


def test_the_line_of_a_run_has_bar_loss_and_remaining_time_from_the_first_step(monkeypatch, capfd):
    trainer_ = SimpleNamespace(
        config=TrainConfig(steps=4), step=0, corpus=SimpleNamespace(description="a text"),
        num_parameters=10**6, mesh=SimpleNamespace(size=2), device=torch.device("cpu"),
        products="float32",
    )  # fmt: skip
    steps = [{"step": n, "loss": 5 - n, "seconds": 2.0, "tokens": 100} for n in range(1, 5)]
    plain = training.Progress(trainer_)
    for line in steps:
        plain(line)
    out, err = capfd.readouterr()
    assert re.search(r"step 1/4: loss 4.000, 50 tokens/s, \d\d:\d\d left\n", out) and err == ""
    assert out.endswith("step 4/4: loss 1.000, 50 tokens/s\n") and out.count("step ") == 2
    terminal = io.StringIO()
    monkeypatch.setattr(training, "tqdm", partial(tqdm, file=terminal, ncols=100))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    live = training.Progress(trainer_)
    live(steps[0])
    shown = terminal.getvalue().rpartition("\r")[2]
    assert "loss 4.000" in shown and "25%" in shown and "<" in shown, shown
    for line in (steps[0] | {"recorded": True, "seconds": 9.0}, steps[1] | {"seconds": 1.0}):
        live(line)  # a step that was recorded takes longer, and is left out where others are known
    live.bar.refresh()
    assert "67 tokens/s" in terminal.getvalue().rpartition("\r")[2]


# ---------------------------------------------------------------------- 4. real runs
LONG = ["--steps", "60", "--save-every", "5", "--seq-len", "32", "--batch-size", "4"]
LONG += ["--sample-tokens", "0", "--eval-batches", "2", "--mesh", "dp=2"]


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


@pytest.mark.slow
def test_ctrl_c_ends_everything_at_once(work, tmp_path):
    process = start(work, tmp_path, "--steps", "100000")
    children = wait_for_steps(process, tmp_path / "tiny-dp2/metrics.jsonl", 7)
    assert len(children) >= 3  # two ranks, and whoever started them
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE * busy())
    alive = psutil.wait_procs(children, timeout=10)[1]
    assert not alive and time.monotonic() - begin < 8 * busy()  # 0.3 on a quiet machine
    assert process.returncode == 130
    assert "Traceback" not in out + err and "KeyboardInterrupt" not in out + err
    step = checkpoint.step_of(checkpoint.available(tmp_path / "tiny-dp2/checkpoints")[-1])
    assert err.strip().splitlines() == [
        f"Stopped. Go on from step {step} with: minipar train --resume {tmp_path / 'tiny-dp2'}"
    ]


def ranks_of(children: list[psutil.Process]) -> list[psutil.Process]:
    parents = {child.ppid() for child in children}
    return sorted((c for c in children if c.pid not in parents), key=lambda c: c.pid)


def assert_saved_where_it_stopped(folder: Path, out: str, again: str = "minipar train") -> int:
    """The checkpoint is of the last step that was done, and one line tells how to go on."""
    step = checkpoint.step_of(checkpoint.available(folder / "checkpoints")[-1])
    assert [line[0] for line in curve(folder)] == [*range(1, step + 1)]
    lines = [line for line in out.splitlines() if line.startswith("Stopped")]
    assert lines == [f"Stopped. Go on from step {step} with: {again} --resume {folder}"]
    return step


@pytest.mark.slow
@pytest.mark.parametrize("who, name", [("rank", "SIGUSR1"), ("launcher", "SIGTERM")])
def test_a_signal_stops_a_run_in_order(work, tmp_path, capfd, uninterrupted, who, name):
    """Mutants: only the rank that was signalled stops; the launcher ends before its ranks do."""
    process = start(work, tmp_path, "--save-every", "1000")
    folder = tmp_path / "tiny-dp2"
    children = wait_for_steps(process, folder / "metrics.jsonl", 7)
    (process if who == "launcher" else ranks_of(children)[-1]).send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=PATIENCE * busy())
    assert process.returncode == 0 and err == ""
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert 7 <= assert_saved_where_it_stopped(folder, out) < 60
    assert not (folder / "report.json").exists()
    if who == "launcher":
        return
    code, out, err = call(capfd, "train", "--resume", folder)
    assert code == 0 and err == "", err
    assert curve(folder) == uninterrupted  # to the last bit


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(work, tmp_path):
    """Also when a rank does not answer."""
    process = start(work, tmp_path, "--steps", "100000")
    children = wait_for_steps(process, tmp_path / "tiny-dp2/metrics.jsonl", 7)
    ranks_of(children)[-1].suspend()
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE * busy())
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in out + err and "minipar train --resume" in err
    assert not psutil.wait_procs(children, timeout=10)[1]


# Not root, who may write anywhere; reads all, as Python may have been installed for root alone.
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
can_leave_rights = pytest.mark.skipif(
    not shutil.which("setpriv") or os.getuid() != 0 or subprocess.call([*NOBODY, "true"]) != 0,
    reason="needs root, to be somebody else",
)


@pytest.mark.slow
@can_leave_rights
def test_a_user_without_rights(work, tmp_path):
    """Of nothing but a folder; with a HOME that is another's. Mutants: a cache in the package; a
    traceback where nothing can be written."""
    for folder in (*reversed(tmp_path.parents[:2]), tmp_path):
        folder.chmod(0o755)
    (own := tmp_path / "own").mkdir()
    os.chown(own, 65534, 65534)
    environment = {**ENVIRONMENT, "HOME": str(tmp_path), "TMPDIR": str(own)}

    def run(where: Path, *words) -> subprocess.CompletedProcess:
        command_line = [*NOBODY, *command("train", "--data", work / "a.txt", *SMALL, *words)]
        pipes = dict(capture_output=True, text=True, encoding="utf-8")
        return subprocess.run(command_line, cwd=where, env=environment, **pipes)

    done = run(own, "--mesh", "dp=2", "--name", "mine")
    assert done.returncode == 0, done.stderr
    assert (own / "runs" / "mine" / "loss.png").exists()
    done = run(tmp_path, "--mesh", "dp=2")
    assert done.returncode == 2 and "minipar: error: --out runs: cannot make" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_folder_for_temporary_files():
    """Mutant: forty lines of what draws, which is imported first."""
    code = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']; "
    done = subprocess.run(
        [sys.executable, "-c", code + "import minipar.cli.main"],
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("minipar: error: ") and "set TMPDIR to" in line


@pytest.mark.slow
def test_kill_9_of_a_rank_and_resume(work, tmp_path, capfd, uninterrupted):
    process = start(work, tmp_path)
    folder = tmp_path / "tiny-dp2"
    children = wait_for_steps(process, folder / "metrics.jsonl", 7)
    parents = {child.ppid() for child in children}
    victim = max((c for c in children if c.pid not in parents), key=lambda c: c.pid)
    victim.kill()
    out, err = process.communicate(timeout=PATIENCE * busy())
    assert process.returncode == 1 and "Traceback" not in out + err
    errors = [line for line in err.splitlines() if line.startswith("minipar: error: ")]
    assert len(errors) == 1
    assert re.search(r"rank [01] of 2: the process ended by signal 9 \(SIGKILL\)$", errors[0])
    assert f"minipar train --resume {folder}" in err
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert 5 <= checkpoint.step_of(checkpoint.available(folder / "checkpoints")[-1]) < 60

    code, out, err = call(capfd, "train", "--resume", folder)
    assert code == 0 and err == "", err
    assert curve(folder) == uninterrupted  # to the last bit, and no step is missing or there twice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-dp2"]
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


HOSTILE = {
    "": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONOPTIMIZE=2 "
    "http_proxy=nonsense:: HTTPS_PROXY=http://256.1.1.1:99999 ALL_PROXY=x://y",
    "ulimit -v 8000000": "TMPDIR=/nowhere/at/all PYTHONIOENCODING=latin-1",
    "mount -t tmpfs -o size=64k none /dev/shm": "",
    "ip link set lo up && ip addr del 127.0.0.1/8 dev lo": "",
}
"""What is done before a run, and its environment."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "before",
    [name if not name else pytest.param(name, marks=pytest.mark.exhaustive) for name in HOSTILE],
)
def test_a_run_in_a_hostile_environment(work, tmp_path, before):
    """No home, few files, a folder for temporary ones with a long name, names of other letters."""
    isolated = {"m": ["unshare", "-m"], "i": ["unshare", "-n"]}.get(before[:1], [])
    if isolated and os.geteuid():
        pytest.skip("only root may do that")
    temporary = tmp_path / ("very long " * 20) / ("name " * 20)
    temporary.mkdir(parents=True)
    text = tmp_path / "Straße 漢.txt"
    text.write_text("Ä — to be or not to be, 漢字\n" * 400, encoding="utf-8")
    typed = ["train", "--data", text, "--out", tmp_path / "rüns", "--name", "ünï 漢", *SMALL]
    given = dict(pair.split("=", 1) for pair in HOSTILE[before].split())
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary), **given}
    del environment["HOME"]
    done = subprocess.run(
        [*isolated, "bash", "-c", f'ulimit -n 64; {before or "true"} && exec "$@"', "bash"]
        + command(*typed, "--mesh", "dp=2"),
        capture_output=True,
        env=environment,
        timeout=2 * PATIENCE * busy(),
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    folder = tmp_path / "rüns/ünï 漢"
    assert (folder / "report.json").exists() and (folder / "loss.png").exists()
    assert "Ä" in (folder / "sample.txt").read_text(encoding="utf-8")
    assert TrainConfig.load(folder / "config.json").steps == 6
    assert b"step 1/6" in done.stdout and b"step 6/6" in done.stdout
    assert not list(temporary.glob("minipar-*"))


def torchrun(work: Path, out: Path, *more: str) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return started([*launcher, *command("train", *LONG, *more)[1:]], work, out)


@pytest.mark.slow
def test_torchrun_is_the_same_run(work, tmp_path, uninterrupted):
    done = torchrun(work, tmp_path)
    out, err = done.communicate(timeout=PATIENCE * busy())
    assert done.returncode == 0, err
    assert curve(tmp_path / "tiny-dp2") == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-dp2"]
    assert out.count("validation loss") == 1  # one rank speaks
    report = json.loads((tmp_path / "tiny-dp2/report.json").read_text(encoding="utf-8"))
    assert len(report["peak_memory"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("who", ["torchrun", pytest.param("rank", marks=pytest.mark.exhaustive)])
def test_a_signal_stops_a_run_of_torchrun_in_order(work, tmp_path, who):
    """torchrun passes SIGTERM on to all ranks, and then says that it was stopped: exit code 1."""
    process = torchrun(work, tmp_path, "--steps", "100000", "--save-every", "100000")
    folder = tmp_path / "tiny-dp2"
    children = wait_for_steps(process, folder / "metrics.jsonl", 7)
    (process if who == "torchrun" else ranks_of(children)[-1]).send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE * busy())
    assert (process.returncode == 0) == (who == "rank"), err
    assert not psutil.wait_procs(children, timeout=10)[1]
    again = "the same line of torchrun, and in it"
    assert 7 <= assert_saved_where_it_stopped(folder, out, again) < 100_000


def test_an_exported_run_can_be_started_from(work, capfd, tmp_path):
    code, out, _ = call(capfd, "export", work / "run", tmp_path / "hf")
    assert code == 0 and "step_000002" in out
    _, config = commands.parse(
        ["train", "--init", str(tmp_path / "hf"), "--data", str(work / "a.txt")]
    )
    config.check()
    assert config.model_config() == dataclasses.replace(
        PRESETS["tiny"], max_seq_len=config.model_config().max_seq_len
    )


def test_torchrun_with_another_mesh_is_one_clear_line(work, capfd, monkeypatch, no_ranks, tmp_path):
    """Said by the first of its ranks, which end alike."""
    where = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**where, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    typed = "train", "--data", work / "a.txt", "--seq-len", 32, "--out", tmp_path, "--mesh", "dp=3"
    says = "--mesh dp=3 needs 3 ranks but torchrun started 2; use --mesh dp=2 or --nproc-per-node 3"
    assert_one_line(*call(capfd, *typed), says)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(main.time, "sleep", lambda _: None)  # so that the other ends first
    assert call(capfd, *typed) == (2, "", "")
    assert list(tmp_path.iterdir()) == []

    # But of files, each speaks: its disk may be the only one that is full.
    def is_full(_: TrainConfig) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "train", is_full)
    says = "minipar: error: rank 0: [Errno 28] No space left on device\n"
    assert call(capfd, "train") == (1, "", says)


@pytest.mark.parametrize("local", ["", "x", "1"])
def test_a_rank_that_no_launcher_made_is_none(capfd, monkeypatch, local):
    """Mutants: a traceback of `int`, or no word of what is wrong."""
    monkeypatch.setenv("LOCAL_RANK", local)
    assert_one_line(*call(capfd, "overlap", "nowhere.json"), "no such trace: nowhere.json")
