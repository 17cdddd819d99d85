"""The command line, `minipar COMMAND`. `minipar train --help` is worth reading.

Whatever a user got wrong ends in one line on stderr and exit code 2; a rank that failed in exit
code 1, with that rank's own traceback where one line cannot say why; a model that fits nowhere in
exit code 3; Ctrl-C in exit code 130. A run that was asked to stop by a signal, and has saved, ends
with 0.
"""

import contextlib
import difflib
import inspect
import io
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
import tyro
from tqdm import tqdm

from minipar import __version__
from minipar.comm import backends
from minipar.comm.backends import compute_device
from minipar.comm.breakdown import breakdown
from minipar.comm.collectives import all_gather_object
from minipar.comm.launch import RankError, Ranks, prefixed
from minipar.comm.mesh import Mesh, check_fits_here
from minipar.comm.spans import is_ours, printable
from minipar.comm.timeline import Timeline
from minipar.lab import draw
from minipar.lab.bench import (
    collectives,
    compression,
    context,
    ddp,
    expert,
    fsdp,
    mixture,
    pipeline,
    tensor,
)
from minipar.lab.draw import hang as draw_hang
from minipar.lab.draw.proof import proof
from minipar.lab.report import page as overlap_page
from minipar.model import hf
from minipar.model.llama import Llama
from minipar.prove import doctor
from minipar.prove import hang as prove_hang
from minipar.prove.compare import RTOL
from minipar.prove.job import check_file, parse_mesh
from minipar.prove.prove import prove as judge
from minipar.sim import calibrate, planner, remedy
from minipar.train import checkpoint, out_of_memory, trainer
from minipar.train.config import TrainConfig, check_numbers
from minipar.train.corpus import ByteTokenizer, Tokenizer, load_tokenizer, try_out
from minipar.train.folder import find_job, forget_job, how_to_go_on, note_job
from minipar.train.metrics import read
from minipar.train.report import Report
from minipar.train.sampling import write
from minipar.train.stop import pass_on
from minipar.train.trainer import Trainer


@dataclass(frozen=True)
class Export:
    """Write the weights of a run as Hugging Face's libraries, and --init of training, read them."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or of one of its checkpoints."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Where to write config.json, model.safetensors and tokenizer.json."""


@dataclass(frozen=True)
class Generate:
    """Let a trained model go on with a text, on this process alone."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder of a run, of one of its checkpoints, or of a model as Hugging Face's libraries write
    it."""
    prompt: str = "\n"
    """What it goes on with."""
    tokens: int = 200
    """How many to write."""
    temperature: float = 0.8
    """0 takes the likeliest token, 1 draws as the model says."""
    top_k: int = 40
    """Draw among so many of the likeliest tokens."""
    seed: int = 0
    """Of the draw."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        check_numbers(self, {"tokens": 1, "temperature": 0, "top_k": 1})
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed} must be 0 or more, and below 2^63")
        if not self.prompt:
            raise ValueError("--prompt is empty; a model needs something to go on with")


@dataclass(frozen=True)
class Overlap:
    """Show how much communication a training job hides: its own, or anybody's PyTorch traces."""

    traces: tyro.conf.Positional[list[str]]
    """Chrome traces of torch.profiler (.json or .json.gz), one file per rank, or a folder of them;
    or a timeline.json of `minipar train`."""
    out: str = "overlap.png"
    """Where to draw the picture; or, if it ends with .html, to write all of it as one page."""
    json: bool = False
    """Print numbers for programs instead; draws only what --out names."""


@dataclass(frozen=True)
class Hang:
    """Say why a job hangs, from what its ranks wrote down: who waits for whom, who did not come.

    Exit code 1 where a hang is found, 0 where none is.
    """

    dumps: tyro.conf.Positional[list[str]]
    """Dumps of PyTorch's flight recorder (pickle or JSON), one file per rank, or a folder of them;
    or the stalled.json of `minipar train`."""
    out: str = ""
    """Where to draw the picture, if at all."""


@dataclass(frozen=True)
class Prove:
    """Is *your* parallel training equal to one device, and if not, where does it part?

    Ends with exit code 0 if it is, 1 if not, 2 if the file cannot be run or compared.
    """

    file: tyro.conf.Positional[str]
    """A Python file with build(), batch(seed), loss(model, batch) and parallelize(model, mesh),
    which returns the model, or the model and a function to call after backward. What else it may
    have: see minipar/prove/job.py."""
    mesh: str = "dp=2"
    """Axes and sizes, such as dp=2,tp=2. Ranks of axes named dp, fsdp or ep have rows of their
    own of a batch."""
    steps: int = 3
    """How many optimizer steps."""
    rtol: float = RTOL
    """What counts as equal, relative to the largest number of a tensor."""
    timeout: float = 30.0
    """Seconds after which a collective fails that not all ranks join; a run may take 20 times as
    long."""
    out: str = "prove.png"
    """Where to draw the model and the point where it parts, if it does."""
    json: bool = False
    """Print all of it as JSON instead, and draw nothing."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in `argv`; end the process with its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    try:
        try:
            name, command = parse(argv)
            _COMMANDS[name].run(command)
        finally:
            sys.stdout.flush()
        code = 0
    except planner.NothingFits as error:
        _complain(error)
        code = 3
    except ValueError as error:
        backends.excuse(str(error))
        _complain(error)
        code = 2
    except RankError as error:
        code = _explain(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = BROKEN_PIPE
    except out_of_memory.OutOfMemory as error:  # of torchrun's ranks, maybe of this one alone
        _complain(MemoryError(f"{Mesh.label}: {error}"), *getattr(error, "__notes__", ()))
        code = 1
    except (OSError, FloatingPointError) as error:
        _complain(error)
        code = 1
    if code == BROKEN_PIPE:
        _mute()
    if code and int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(3)  # torchrun ends all ranks with the first: let the one that speaks be first
    sys.exit(code)


BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone, as of `| head -1`: what shells make of it."""


def _mute() -> None:
    """Let output go nowhere from now on; the interpreter would try again to print the rest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say(words: str) -> None:
    """Print at once; a reader that has gone, such as `head`, does not end a run."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        _mute()


def _print_anything() -> None:
    """Let no name of a file end a run because the locale has no letters for it.

    Nor a stream that a shell has closed (>&-).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


# ---------------------------------------------------------------------- reading the command line
def parse(argv: list[str]) -> tuple[str, Any]:
    """Return the name of the command and its typed flags, a dataclass of `_COMMANDS`.

    Raises `ValueError` with one line for a bad flag or value.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0)
    if argv[0] in ("-V", "--version"):
        print(f"minipar {__version__}")
        sys.exit(0)
    # The longest command that the line begins with: "bench ddp" before "bench".
    name = next((n for n in _COMMANDS if argv[: len(n.split())] == n.split()), None)
    if name is None:
        asked = " ".join(argv[: 2 if argv[0] == "bench" else 1])
        near = difflib.get_close_matches(asked, _COMMANDS, 1)
        hint = f"did you mean {near[0]}? There are" if near else "use one of"
        raise ValueError(f"{asked!r} is no command; {hint} {', '.join(_COMMANDS)}")
    kind, flags = _COMMANDS[name].config, argv[len(name.split()) :]
    default = tyro.MISSING_NONPROP
    if kind is TrainConfig and (resumed := _value_of("--resume", flags)):
        run = run_of(resumed)
        default = TrainConfig.load(run / "config.json")
        if default.tokenizer and (run / "tokenizer.json").exists():
            default = replace(default, tokenizer=str(run / "tokenizer.json"))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command = _typed(name, kind, flags, default)
    except SystemExit as stop:
        if stop.code:
            raise ValueError(_first_words(complaint.getvalue())) from None
        raise
    return name, command


def _typed(name: str, kind: type, flags: list[str], default: Any) -> Any:
    """Let tyro read the flags of a command; those that `kind` has from several parents in groups.

    A group is a parent, in whose name and words they are shown.
    """
    lines = "".join(f"\n  minipar {name} {flags}".rstrip() for flags in _EXAMPLES.get(name, ()))
    told = dict(prog=f"minipar {name}", args=flags)
    told["description"] = f"{inspect.getdoc(kind)}\n\nExamples:{lines}"
    if len(kind.__bases__) == 1:
        return tyro.cli(kind, default=default, **told)
    default = kind() if default is tyro.MISSING_NONPROP else default
    parents = {parent.__name__.lower(): parent for parent in reversed(kind.__bases__)}
    groups = make_dataclass(
        kind.__name__, [(n, tyro.conf.OmitArgPrefixes[parent]) for n, parent in parents.items()]
    )
    usual = {
        n: parent(**{f.name: getattr(default, f.name) for f in fields(parent)})
        for n, parent in parents.items()
    }
    found = tyro.cli(groups, default=groups(**usual), **told)
    return kind(**{k: v for n in parents for k, v in vars(getattr(found, n)).items()})


def _usage() -> str:
    """Return what there is, in groups, the most used first."""
    grouped = {name for names in _GROUPS.values() for name in names}
    more = [name for name in _COMMANDS if name not in grouped and not name.startswith("bench")]
    bench = [name for name in _COMMANDS if name.startswith("bench")]
    groups = dict(_GROUPS) | {"Measure ours beside PyTorch's own": bench}
    groups["Look, plan and prove"] = [*groups["Look, plan and prove"], *more]
    lines = ["usage: minipar COMMAND [flags]"]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        lines += [f"  minipar {name:18} {_COMMANDS[name].summary}" for name in names]
    lines += ["", "Examples:"]
    lines += [f"  minipar {name} {_EXAMPLES[name][0]}".rstrip() for name in _FIRST]
    how = "`minipar COMMAND --help` lists the flags; `minipar --version` says which this is."
    return "\n".join([*lines, "", how])


def _value_of(flag: str, argv: list[str]) -> str | None:
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _first_words(box: str) -> str:
    """What is wrong, out of the box that tyro draws around it: the lines above its first rule.

    And of what follows, the flags that may have been meant.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯]", "", box)
    first, *rest = re.split(r"─{9,}", re.sub(r"─ [^\n]* ─+", "", plain, count=1))
    near = [word for part in rest if "Perhaps" in part for word in re.findall(r"\n +(--\S+)", part)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return (" ".join(first.split()) or "cannot read the command line") + hint


def _complain(error: BaseException, *notes: str) -> None:
    """Print one line. The ranks of torchrun fail alike, so that one per machine speaks for all."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 or isinstance(error, MemoryError):
        notes = *notes, *getattr(error, "__notes__", ())
        said = printable(" ".join(str(error).split()))
        print(f"minipar: error: {said}", file=sys.stderr, flush=True)
        print(*notes, sep="", end="", file=sys.stderr, flush=True)


def _explain(error: RankError) -> int:
    """Print who failed and why; return the exit code."""
    failures = list(error.failures.values())
    # The others have only lost their connection to it.
    failures = [f for f in failures if f.kind == "OutOfMemory"] or failures
    if any(failure.kind == "BrokenPipeError" for failure in failures):
        return BROKEN_PIPE
    messages = {failure.message: failure for failure in failures}  # most often all ranks' is one
    if _is_bad_input(error) and len(messages) == 1:
        _complain(ValueError(failures[0].message))
        return 2
    if all(f.kind in _SAY_IT_ALL or "allocate memory" in f.message for f in failures):
        for message, failure in messages.items():
            alone = "" if len(messages) < len(failures) else f"{failure.label}: "
            _complain(RuntimeError(f"{alone}{message}"))
    else:
        print("\n".join(error.reports()), file=sys.stderr)
    print(*getattr(error, "__notes__", ()), sep="", end="", file=sys.stderr)
    return 1


_SAY_IT_ALL = ("Died", "FloatingPointError", "OSError", "MemoryError", "OutOfMemory")
"""Failures of ranks whose message is all that there is to know."""


# ---------------------------------------------------------------------- minipar train
def train(config: TrainConfig) -> None:
    """Train, on torchrun's ranks or on ranks of our own; then draw and print what came of it."""
    config.check()
    start, folder = None, None
    if config.resume:
        folder = run_of(config.resume)
        start = str(checkpoint_of(Path(config.resume)))
        checkpoint.verify(Path(start))
    config.check_text()
    if not backends.under_torchrun():
        check_fits_here(config.num_ranks, config.weight_bytes())
    if backends.under_torchrun():
        try:
            _train_under_torchrun(config, folder, start)
        except out_of_memory.OutOfMemory as error:
            if error.speaks:
                error.add_note(remedy.page_of(config, error.folder))
            raise
        return
    backend = config.backend
    if backend == "auto":
        backend = backends.pick_backend(config.num_ranks)
    backends.check_backend(backend, config.num_ranks)
    if folder is None:
        folder = new_folder(config)
    _say(_headline(config, folder, start))
    try:
        with (
            Ranks(
                config.num_ranks, backend=backend, timeout=config.timeout, sink=None, mend=False
            ) as ranks,
            pass_on(ranks.pids),
        ):
            report = ranks.run(trainer.train, config, str(folder), start, Progress)[0]
    except (KeyboardInterrupt, SystemExit, RankError) as error:
        if isinstance(error, RankError) and _is_bad_input(error):
            with contextlib.suppress(OSError):
                folder.rmdir()  # nothing is in it, unless it is that of an earlier run
        else:
            print(f"\n{how_to_go_on(folder)}", file=sys.stderr)
        failures = error.failures.values() if isinstance(error, RankError) else ()
        if any(failure.kind == "OutOfMemory" for failure in failures):
            error.add_note(remedy.page_of(config, folder))
        raise
    conclude(report, folder)


def _train_under_torchrun(config: TrainConfig, folder: Path | None, start: str | None) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != config.num_ranks:
        raise ValueError(
            f"--mesh {config.mesh} needs {config.num_ranks} ranks but torchrun started {size}; "
            f"use --mesh dp={size} or --nproc-per-node {config.num_ranks}"
        )
    with backends.joined(config.backend, config.timeout):
        # One rank chooses, so that all speak of the same folder.
        problem = None
        if rank == 0:
            try:
                folder, start = _place_under_torchrun(config, folder, start)
            except (ValueError, OSError) as error:
                problem = error
        world = Mesh(**config.mesh_sizes()).world
        name, start, problem = all_gather_object((str(folder), start, problem), world)[0]
        if problem is not None:
            raise problem
        folder = Path(name)
        if rank == 0:
            _say(_headline(config, folder, start))
        try:
            report = trainer.train(config, name, start, Progress)
        except Exception as error:
            if rank == 0 and not (folder / "config.json").exists():  # it has not begun
                forget_job(folder)
            if not isinstance(error, ValueError) and int(os.environ.get("LOCAL_RANK", 0)) == 0:
                again = "Unless torchrun starts the ranks again: " * (backends.restarts_left() > 0)
                error.add_note(f"\n{again}{how_to_go_on(folder)}")
            raise
    if rank == 0:
        if report is not None:
            forget_job(folder)
        conclude(report, folder)


def _place_under_torchrun(
    config: TrainConfig, folder: Path | None, start: str | None
) -> tuple[Path, str | None]:
    """Return the folder of the run, and the checkpoint to start from.

    After a restart of ranks or nodes by torchrun these are the folder that the ranks before had,
    and the newest checkpoint that they have written, if any. Raises `ValueError` where a restart
    cannot tell which run it had.
    """
    job = backends.job_name()
    if job is None:
        if backends.restarts():
            raise ValueError(
                "torchrun has started the ranks again, but without --rdzv-id nothing says which "
                f"run they had; go on with --resume and the newest run in {config.out}/"
            )
        return folder or new_folder(config), start
    if found := find_job(folder, job, config):
        return found
    folder = folder or new_folder(config)
    note_job(folder, job, config, start)
    return folder, start


def _headline(config: TrainConfig, folder: Path, start: str | None) -> str:
    model = config.init or config.preset
    verb = f"Resuming {start}" if start else f"Training {model} on {config.data}"
    return f"{verb} with mesh {config.mesh}, into {folder}/"


def _is_bad_input(error: RankError) -> bool:
    return all(f.kind in ("ValueError", "CheckpointError") for f in error.failures.values())


def new_folder(config: TrainConfig) -> Path:
    """Make and return a folder for the run; its name gets a number where it is taken."""
    mesh = config.mesh.replace(" ", "").replace("=", "").replace(",", "-")
    name = config.name or f"{Path(config.init).name or config.preset}-{mesh}"
    for number in itertools.count(1):
        folder = Path(config.out) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue  # two runs that start at once do not share it, either
        except OSError as error:
            raise ValueError(f"--out {config.out}: cannot make {folder}: {error}") from None
    raise AssertionError("there is always another number")


def run_of(path: str, asked: str = "--resume") -> Path:
    """Return the folder of the run that `path`, a run or one of its checkpoints, belongs to."""
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"{asked} {path} does not exist; name the folder of a run")
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not (run / "config.json").is_file():
        raise ValueError(f"{asked} {path} is no run: it has no config.json")
    return run


def checkpoint_of(path: Path, asked: str = "--resume") -> Path:
    """Return `path` if it is a checkpoint, else the newest one of the run."""
    if path.parent.name == "checkpoints":
        return path
    saved = checkpoint.available(path / "checkpoints")
    if not saved:
        raise ValueError(f"{asked} {path}: the run has no checkpoint; start it again instead")
    return saved[-1]


class Progress:
    """A bar on a terminal; without, a line of the first step, the last, and every ten seconds.

    Lives in rank 0.
    """

    def __init__(self, trainer: Trainer) -> None:
        _print_anything()
        _say(
            f"{trainer.corpus.description}\n"
            f"{trainer.num_parameters / 1e6:.2f}M parameters, "
            f"{trainer.mesh.size} ranks on {trainer.device.type}"
        )
        self.bar = tqdm(
            total=trainer.config.steps,
            initial=trainer.step,
            unit="step",
            disable=None,
            dynamic_ncols=True,
            mininterval=0.2,
        )
        self.total, self.spoken = trainer.config.steps, -math.inf
        self.seconds = self.tokens = 0.0
        self.begun, self.num_steps = time.monotonic(), 0

    def __call__(self, line: dict[str, Any]) -> None:
        self.seconds += line["seconds"]
        self.tokens += line["tokens"]
        status = f"loss {line['loss']:.3f}, {self.tokens / self.seconds:,.0f} tokens/s"
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update()
        self.num_steps += 1
        if self.num_steps == 1:
            self.bar.refresh()
        last = line["step"] == self.total
        if self.bar.disable and (last or time.monotonic() - self.spoken > 10):
            left = (self.total - line["step"]) * (time.monotonic() - self.begun) / self.num_steps
            words = "" if last else f", {tqdm.format_interval(left)} left"
            _say(f"step {line['step']}/{self.total}: {status}{words}")
            self.spoken = time.monotonic()
        if last:
            self.bar.close()


def conclude(report: Report | None, folder: Path) -> None:
    """Draw the pictures of a run and print the table at its end; or how to go on, without report.

    Without, it was asked to stop.
    """
    if report is None:
        _say(f"\n{how_to_go_on(folder)}")
        return
    steps = read(folder / "metrics.jsonl")
    lines = {"training": [(line["step"], line["loss"]) for line in steps]}
    validated = [(s["step"], s["validation_loss"]) for s in steps if "validation_loss" in s]
    if validated:
        lines["validation"] = validated
    name = os.fsencode(folder.name).decode(errors="replace")  # whatever the locale made of it
    figure = draw.curves(
        {name: tuple(zip(*points, strict=True)) for name, points in lines.items()},
        points=["validation"],
        xlabel="step",
        ylabel="loss in nats per token",
        title=f"{name}: validation loss {report.validation_loss:.3f}",
    )
    draw.save(figure, folder / "loss.png")
    if (folder / "timeline.json").exists():
        recorded = Timeline.load(folder / "timeline.json")
        draw.save(draw.timeline(recorded, unit="in this one step"), folder / "timeline.png")
    _say(summary(report))


def summary(report: Report) -> str:
    """Return the table at the end of a run."""
    megabyte = 1e6
    memory = report.peak_memory
    rows = {}
    if report.step_seconds is None:
        rows["loss"] = f"all {report.steps} steps were done before; --steps adds more"
    else:
        rows["loss"] = f"{report.first_loss:.3f} -> {report.last_loss:.3f} nats per token"
        rows["speed"] = (
            f"{report.tokens_per_second:,.0f} tokens/s, {report.step_seconds * 1e3:.0f} ms a step"
        )
        rows["utilisation"] = f"{report.mfu:.0%} of the FLOP/s of {report.peak}"
    rows["validation loss"] = f"{report.validation_loss:.3f} nats per token"
    if report.experts:
        slots = [n for layer in report.experts["tokens_per_expert"].values() for n in layer]
        rows["experts"] = (
            f"{min(slots):,} to {max(slots):,} tokens each, the busiest had "
            f"{report.experts['expert_load']:.2f} times the mean load, "
            f"{report.experts['dropped_slots']:,} slots were dropped, in the last step"
        )
    if report.hidden_fraction is not None:
        rows["communication"] = (
            f"{report.sent_bytes / megabyte:,.0f} MB sent by each rank; "
            f"{report.communication_seconds:.1f} s, {report.hidden_fraction:.0%} of it hidden "
            "(rank 0, the whole run; timeline.png: all ranks, one step)"
        )
    rows["peak memory"] = (
        f"{min(memory) / megabyte:,.0f} to {max(memory) / megabyte:,.0f} MB a rank"
    )
    rows["files"] = (
        f"{report.folder}/: metrics.jsonl, loss.png, timeline.png, timeline.json "
        "(open it at https://ui.perfetto.dev), sample.txt, checkpoints/, config.json"
    )
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())


# ---------------------------------------------------------------------- minipar export
def export(command: Export) -> None:
    """Write the newest weights of a run as a Hugging Face folder, with its tokenizer.

    That is the file in the folder of the run. What its configuration names may be any file of this
    machine, if the run is a stranger's.
    """
    run, folder = run_of(command.run, "export"), Path(command.folder)
    start = checkpoint_of(Path(command.run), "export")
    tokenizer = _tokenizer_of(run, "export")
    checkpoint.export(start, folder)
    tokenizer.save(folder / "tokenizer.json")
    # Or transformers would take the tokenizer of a Llama, which has other rules for blanks.
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind) + "\n", encoding="utf-8")
    print(f"{start} -> {folder}/: config.json, safetensors and tokenizer.json")


def _tokenizer_of(run: Path, asked: str) -> Tokenizer:
    """Return that of a run: the file in its folder, or bytes."""
    own = None
    if (named := TrainConfig.load(run / "config.json").tokenizer) != "":
        own = run / "tokenizer.json"
        if not own.is_file():
            raise ValueError(f"{asked} {run}: it has no tokenizer.json; copy {named} to {own}")
        try_out(own)
    return load_tokenizer(own)


# ---------------------------------------------------------------------- minipar generate
def generate(command: Generate) -> None:
    """Print the prompt and what the model makes of it; the model is a run's, or any Llama."""
    command.check()
    path = Path(command.model)
    if path.parent.name == "checkpoints" or (path / "checkpoints").is_dir():
        tokenizer = _tokenizer_of(run_of(command.model, "generate"), "generate")
        weights, shape = checkpoint.model_of(checkpoint_of(path, "generate"))
        model = Llama(shape)
        checkpoint.load_weights(model, weights, f"checkpoint {path}")
    else:
        if not path.is_dir():
            raise ValueError(f"generate {path} does not exist; name a run, or what export wrote")
        own = path / "tokenizer.json"
        own = None if ByteTokenizer.wrote(own) else own
        if own:
            try_out(own)
        tokenizer, model = load_tokenizer(own), hf.load(path)
    start = torch.tensor(list(tokenizer.encode(command.prompt)))
    options = command.tokens, command.seed, command.temperature, command.top_k
    prompt, text = write(model.to(compute_device()), tokenizer, start, *options)
    print(f"{prompt}{text}")


# ---------------------------------------------------------------------- minipar overlap
MOST_DRAWN = 256
"""Ranks in one picture: of more, nothing could be seen, and they would take gigabytes."""


def overlap(command: Overlap) -> None:
    """Print how much communication the traces hide, per rank and axis, and draw it."""
    if not command.traces:
        raise ValueError("name at least one trace: minipar overlap trace-rank0.json ...")
    recorded = read_timeline(command.traces)
    parts = breakdown(recorded)
    if command.json:
        print(json.dumps(parts.as_json() | {"ranks": [asdict(o) for o in recorded.overlap()]}))
        if command.out == Overlap.out:
            return
    else:
        print(f"{recorded}\n\n{parts}".rstrip())
    ranks = recorded.ranks
    if len(ranks) > MOST_DRAWN and not command.json:
        print(f"drawn are the first {MOST_DRAWN} of {len(ranks)} ranks")
    shown = set(ranks[:MOST_DRAWN])
    rounds = [step for rank in ranks[:1] for step in recorded.steps.get(rank, [])]
    middle = rounds[len(rounds) // 2] if len(rounds) > 1 else None
    spans = (s for s in recorded if s.rank in shown)
    if middle:  # of many steps in one picture nothing could be seen
        _, a, b = middle
        spans = (
            replace(s, start=max(a, s.start), end=min(b, s.end))
            for s in spans
            if s.start < b and s.end > a
        )
    label = f"{recorded.label} {middle[0]}".strip() if middle else recorded.label
    figure = draw.timeline(Timeline(spans, label))
    if command.out.endswith(".html"):
        text = overlap_page(recorded, parts, figure, draw.finding(recorded, "recorded"))
        Path(command.out).write_text(text, encoding="utf-8")
        where = command.out
    else:
        where = draw.save(figure, command.out)
    if not command.json:
        print(f"drawn into {where}" + (f": {middle[0]}" if middle else ""))


def read_timeline(traces: list[str]) -> Timeline:
    """Read a timeline of ours, or the traces of torch.profiler."""
    if len(traces) == 1 and is_ours(traces[0]):
        recorded = Timeline.load(traces[0])
        if not recorded.spans:
            raise ValueError(f"{traces[0]} is a timeline without spans")
        return recorded
    bar = partial(tqdm, disable=None, leave=False, unit="trace")
    return Timeline.from_profiler(traces[0] if len(traces) == 1 else traces, progress=bar)


# ---------------------------------------------------------------------- minipar hang
def hang(command: Hang) -> None:
    """Print what the dumps tell, and end the process with 1 where a call has not ended."""
    if not command.dumps:
        raise ValueError("name the dumps: minipar hang FOLDER, or minipar hang nccl_trace_rank_*")
    report = prove_hang.explain(*prove_hang.read(command.dumps))
    print(report)
    if command.out:
        print(f"\ndrawn into {draw.save(draw_hang.hang(report), command.out)}")
    if report.findings:
        sys.exit(1)


# ---------------------------------------------------------------------- minipar prove
def prove(command: Prove) -> None:
    """Print whether a training equals one device; where it parts, draw that and exit with 1."""
    check_file(command.file)
    sizes = parse_mesh(command.mesh)
    for name, value in (("steps", command.steps), ("timeout", command.timeout)):
        if not 1 <= value < 1e6:
            raise ValueError(f"--{name} {value} must be 1 or more")
    if not 0 < command.rtol < 1:
        raise ValueError(f"--rtol {command.rtol} must be between 0 and 1, such as 1e-10")
    check_fits_here(math.prod(sizes.values()))
    how = dict(timeout=command.timeout, sink=_to_stderr)
    with Ranks(1, **how) as one, Ranks(math.prod(sizes.values()), **how) as many:
        one.time_limit = many.time_limit = 20 * command.timeout
        pool = {1: one, many.size: many}.__getitem__
        verdict = judge(command.file, sizes, pool, command.steps, command.rtol)
    print(verdict.json() if command.json else verdict)
    if verdict.parting is None:
        return
    if command.out and not command.json:
        print(f"drawn into {draw.save(proof(verdict), command.out)}")
    sys.exit(1)


def _to_stderr(rank: int, stream: str, text: str) -> None:
    prefixed(rank, "stderr", text)


def plan(command: planner.PlanConfig) -> None:
    """Print the plans that would train a model fastest, and why; draw where their time goes."""
    text, plans = planner.answer(command, partial(tqdm, disable=None, leave=False, unit="plan"))
    print(text, flush=True)
    if not command.json and not command.explain:
        with tqdm(total=1, desc="tracing minipar's own code", disable=None, leave=False):
            print(f"\n{planner.as_minipar(plans[0])}")
    if command.explain and not command.json:
        _simulated(command, plans[0])
    elif command.out and not command.json:
        inks = {"bubble": "idle", "host": "copy", "fixed": "optimizer"}
        figure = draw.bars(
            planner.where_time_goes(plans),
            unit="s",
            title=f"{command.model} on {command.gpus} x {command.hardware}: a step's time",
            note="predicted, in closed form",
            colours={part: draw.colour(ink) for part, ink in inks.items()},
        )
        print(f"\ndrawn into {draw.save(figure, command.out)}")


def _simulated(command: planner.PlanConfig, plan: planner.Ranked) -> None:
    """Print and draw what becomes of the plan when minipar's own code runs it."""
    simulated = planner.simulate(plan)
    exposed = [f"{axis} {s:.2f} s" for axis, s in simulated.exposed.items() if s > 5e-3]
    print(
        f"\nminipar's own code, traced and replayed: {simulated.seconds:.2f} s a step, "
        f"{simulated.peak_bytes / 1e9:.0f} GB of tensors at the peak; exposed: "
        f"{', '.join(exposed) or 'nothing'}"
    )
    if command.out:
        title = f"{command.model} on {command.gpus} x {command.hardware}"
        figure = draw.timeline(simulated.timeline, title=title)
        print(f"\ndrawn into {draw.save(figure, command.out)}")


# ---------------------------------------------------------------------- all of them
class _Command(NamedTuple):
    config: type
    run: Callable[[Any], Any]
    summary: str


def _command(run: Callable[[Any], Any], summary: str) -> _Command:
    """What `run` takes is the flags."""
    return _Command(next(iter(get_type_hints(run).values())), run, summary)


_COMMANDS = {
    "train": _command(train, "train a Llama on several ranks"),
    "bench ddp": _command(ddp.run, "our data parallel beside PyTorch's own"),
    "bench collectives": _command(
        collectives.run, "our all-reduce algorithms beside the backend's"
    ),
    "bench compression": _command(
        compression.run, "every way to send less: what it saves, and costs"
    ),
    "bench fsdp": _command(fsdp.run, "our ZeRO and FSDP beside PyTorch's own"),
    "bench tensor": _command(tensor.run, "our tensor parallelism beside PyTorch's own"),
    "bench context": _command(
        context.run, "our context parallelism beside PyTorch's; zigzag or not"
    ),
    "bench expert": _command(
        expert.run, "our expert parallelism beside plain torch, balanced or not"
    ),
    "bench mixture": _command(
        mixture.run, "a mixture of experts beside a dense model, after equal FLOPs"
    ),
    "bench pipeline": _command(
        pipeline.run, "our pipeline beside PyTorch's, and how idle ranks are"
    ),
    "generate": _command(generate, "let a trained model go on with a text"),
    "doctor": _command(doctor.run, "what this machine has, and whether ranks work on it"),
    "export": _command(export, "write the weights of a run for Hugging Face's libraries"),
    "overlap": _command(overlap, "how much communication do these traces hide?"),
    "hang": _command(hang, "who keeps this hanging job waiting?"),
    "prove": _command(prove, "is your parallel training equal to one device?"),
    "plan": _command(plan, "which plan would train this model fastest there?"),
    "calibrate": _command(calibrate.run, "measure this machine, for `minipar plan`"),
}

_GROUPS = {
    "Train, and use what was trained": ["train", "generate", "export"],
    "Look, plan and prove": ["doctor", "overlap", "plan", "calibrate"],
}
_FIRST = "train", "generate", "plan"
"""Commands of which the usage shows an example."""
_EXAMPLES = {
    "train": (
        "--mesh dp=2,tp=2 --steps 100",
        "--preset small --data ~/texts --zero 3 --recompute full",
        "--backend link --link 10gbe*4 --ddp naive",
    ),
    "generate": (
        "runs/tiny-dp4 --prompt 'def main('",
        "runs/tiny-dp4/checkpoints/step_000050 --temperature 0",
        "my-llama --tokens 50 --seed 7",
    ),
    "export": (
        "runs/tiny-dp4 my-llama",
        "runs/tiny-dp4/checkpoints/step_000050 early",
        "runs/tiny-dp4-2 ~/models/second",
    ),
    "doctor": ("", "--out /nfs/runs", "> issue.txt"),
    "overlap": (
        "traces/",
        "trace-rank0.json trace-rank1.json.gz --out mine.png",
        "runs/tiny-dp4/timeline.json",
    ),
    "plan": (
        "--model llama-3-70b --gpus 64 --hardware h100-ndr",
        "--model my-llama/config.json --gpus 8 --software minipar",
        "--gpus 16 --explain dp=8,tp=2,zero=1,microbatches=4 --global-batch 64",
    ),
    "calibrate": ("", "--ranks 2 --out laptop.toml", "--nccl-tests all_reduce_perf.txt"),
    "bench ddp": ("", "--links gloo 1gbe --rounds 10", "--preset tiny --json rows.json"),
    "bench collectives": ("", "--ranks 8", "--algorithms ring tree"),
    "bench compression": ("", "--methods int8 powersgd", "--out compression.png"),
    "bench fsdp": ("", "--preset tiny --ranks 2", "--json rows.json"),
    "bench tensor": ("", "--ranks 2 --seq-len 128", "--json rows.json"),
    "bench context": ("", "--ranks 2", "--json rows.json"),
    "bench expert": ("", "--preset small-moe", "--ranks 2"),
    "bench pipeline": ("", "--schedules gpipe 1f1b", "--microbatches 8"),
}
"""Three calls of each command, the first one first to be tried."""
