"""`minipar train`: on ranks of our own or on torchrun's; a folder for the run, and its report."""

import itertools
import math
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minipar.cli.main import is_bad_input
from minipar.comm.mesh import Mesh
from minipar.observe.timeline import Timeline
from minipar.ranks import backends, processes
from minipar.ranks.launch import RankError, Ranks
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.folder import on_first_rank
from minipar.train.metrics import read
from minipar.train.report import Report
from minipar.train.stop import StopRequest
from minipar.train.trainer import Trainer


def defaults(resume: str) -> TrainConfig:
    """Return the defaults of all flags; with `resume`, the flags of that run."""
    config = TrainConfig()
    if resume and resume != "latest":
        run, _ = found(resume)
        config = TrainConfig.load(run / "config.json")
        if config.tokenizer and (run / "tokenizer.json").exists():
            config = replace(config, tokenizer=str(run / "tokenizer.json"))
    return config


def train(config: TrainConfig) -> None:
    """Train, on torchrun's ranks or on ranks of our own; then draw and print the results."""
    longest = config.model_config().max_seq_len if config.init else config.seq_len
    if longest < config.seq_len == TrainConfig.seq_len:
        print(f"{config.init} cannot see the usual {config.seq_len} tokens: --seq-len {longest}")
        config = replace(config, seq_len=longest)
    config.check()
    if backends.under_torchrun():
        _train_under_torchrun(config)
        return
    backend, size = config.backend, config.num_ranks
    backend = backends.pick_backend(size) if backend == "auto" else backend
    backends.check_ranks(size, backend, config.weight_bytes())
    folder, start = _place(config)
    if _is_done(config, start):
        return
    processes.warm_up(__name__)  # imports the trainer once for all ranks
    how = dict(backend=backend, timeout=config.timeout, sink=None)
    try:
        with (
            _saying_how_to_go_on(folder),
            Ranks(size, **how) as ranks,
            StopRequest(ranks.pids),  # passes a signal on to them
        ):
            report = ranks.run(trainer.train, config, str(folder), start, Progress)[0]
    finally:
        with suppress(OSError):
            folder.rmdir()  # only if it is empty
    conclude(report, folder)


def _train_under_torchrun(config: TrainConfig) -> None:
    rank, size = backends.rank_and_size()
    if size != (asked := config.num_ranks):
        raise ValueError(
            f"--plan {config.plan} needs {asked} ranks but WORLD_SIZE={size}; use --mesh dp={size} "
            f"or torchrun's --nproc-per-node {asked}; if a pod set WORLD_SIZE, unset it and RANK"
        )
    with backends.joined(config.backend, config.timeout):
        world = Mesh(**config.as_plan().mesh_sizes()).world
        # Rank 0 chooses, so that all ranks use the same folder.
        folder, start = on_first_rank(lambda: _place(config), world)
        if _is_done(config, start, rank):
            return
        with _saying_how_to_go_on(folder) if rank == 0 else nullcontext():
            report = trainer.train(config, str(folder), start, Progress)
    if rank == 0:
        conclude(report, folder)


@contextmanager
def _saying_how_to_go_on(folder: Path) -> Iterator[None]:
    """Say how to resume the run if the body fails, but not if it refuses the user's flags."""
    try:
        yield
    except BaseException as error:
        failed = isinstance(error, RankError) and not is_bad_input([*error.failures.values()])
        if failed or not isinstance(error, (RankError, ValueError)):
            print(f"\n{how_to_go_on(folder)}", file=sys.stderr)
        raise


# ---------------------------------------------------------------------- the folder of a run
def _place(config: TrainConfig) -> tuple[Path, str | None]:
    """Return the folder of the run, and the checkpoint to start from; say both."""
    if not config.resume:
        folder, saved = new_folder(config), None
    elif config.resume != "latest":
        folder, saved = found(config.resume)
    elif config.name:
        folder = Path(config.out) / config.name
        saved = checkpoint.newest(folder)
    else:
        raise ValueError("--resume latest needs the --name of the run")
    if saved is not None and saved.name != checkpoint.newest(folder).name:
        print(f"later checkpoints stay in {folder}; name one of this run's to resume it")
    begins = f"Resuming {saved}" if saved else f"Training {config.init or config.preset}"
    print(f"{begins} on {config.data} with {config.plan}, into {folder}/", flush=True)
    return folder, saved and str(saved)


def _is_done(config: TrainConfig, start: str | None, rank: int = 0) -> bool:
    """True if a run has done its steps, as where a scheduler starts its job again; say so."""
    is_done = start is not None and checkpoint.step_of(Path(start)) == config.steps
    if is_done and rank == 0:
        print(f"all {config.steps} steps were done before; --steps adds more")
    return is_done


def new_folder(config: TrainConfig) -> Path:
    """Make and return a folder for the run; its name gets a number where it is taken."""
    mesh = "-".join(f"{axis}{size}" for axis, size in config.as_plan().mesh_sizes().items())
    name = config.name or f"{Path(config.init).name or config.preset}-{mesh}"
    folder = Path(config.out) / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        with suppress(FileExistsError):  # made just now, maybe, by a run that starts beside this
            folder.mkdir()
            return folder
        folder = folder.with_name(f"{name}-{number}")


def found(path: str, asked: str = "--resume") -> tuple[Path, Path]:
    """Return the folder of a run, and a checkpoint: the one that `path` names, or the newest."""
    whole = Path(path).absolute()
    is_checkpoint = whole.parent.name == "checkpoints"
    run = whole.parent.parent if is_checkpoint else Path(path)
    if not whole.exists():
        raise ValueError(f"{asked} {path} does not exist; name the folder of a run")
    if not (run / "config.json").is_file():
        raise ValueError(f"{asked} {path} is no run: it has no config.json")
    saved = whole if is_checkpoint else checkpoint.newest(run)
    if saved is None:
        raise ValueError(f"{asked} {path}: the run has no checkpoint; start it again instead")
    return run, saved


def how_to_go_on(folder: Path) -> str:
    """Say how a run that has stopped is taken up again."""
    saved = checkpoint.newest(folder)
    if saved is None:
        return "Stopped before the first checkpoint."
    resume = f"--resume {shlex.quote(str(folder))}"
    how = "the same line of torchrun, and in it" if backends.under_torchrun() else "minipar train"
    return f"Stopped. Go on from step {checkpoint.step_of(saved)} with: {how} {resume}"


# ---------------------------------------------------------------------- what is printed
class Progress:
    """A bar on a terminal; without a terminal, a line every ten seconds. Lives in rank 0."""

    def __init__(self, trainer: Trainer) -> None:
        size, million = trainer.mesh.size, trainer.num_parameters / 1e6
        print(trainer.corpus.description)
        print(f"{million:.2f}M parameters, {size} ranks on {trainer.device.type}", flush=True)
        self.total, how = trainer.config.steps, dict(unit="step", disable=None, dynamic_ncols=True)
        self.bar = tqdm(total=self.total, initial=trainer.step, **how)
        self.spoken = -math.inf

    def __call__(self, line: dict[str, Any]) -> None:
        step, now = line["step"], time.monotonic()
        status = f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(status)
        self.bar.update()
        if self.bar.disable and (step == self.total or now - self.spoken > 10):
            print(f"step {step}/{self.total}: {status}", flush=True)
            self.spoken = now
        if step == self.total:
            self.bar.close()


def conclude(report: Report | None, folder: Path) -> None:
    """Draw the pictures of a run and print the table at its end.

    Without a report, the run was asked to stop: say how to go on.
    """
    if report is None:
        print(f"\n{how_to_go_on(folder)}")
        return
    from minipar.lab import draw  # takes a second; ranks that train do not need it

    steps = read(folder / "metrics.jsonl")
    lines = {
        name: tuple(zip(*((s["step"], s[key]) for s in steps if key in s), strict=True))
        for name, key in ((folder.name, "loss"), ("validation", "validation_loss"))
    }
    figure = draw.curves(
        lines,
        points=["validation"],
        xlabel="step",
        ylabel="loss in nats per token",
        title=f"{folder.name}: validation loss {report.validation_loss:.3f}",
    )
    draw.save(figure, folder / "loss.png")
    if (folder / "timeline.json").exists():
        recorded = Timeline.load(folder / "timeline.json")
        draw.save(draw.timeline(recorded, unit="in this one step"), folder / "timeline.png")
    print(summary(report))


def summary(report: Report) -> str:
    """Return the table at the end of a run."""
    speed, seconds = report.tokens_per_second, report.step_seconds
    rows = {
        "loss": f"{report.first_loss:.3f} -> {report.last_loss:.3f} nats per token",
        "validation loss": f"{report.validation_loss:.3f} nats per token",
        "speed": f"{speed:,.0f} tokens/s, {seconds * 1e3:.0f} ms a step",
        "utilisation": f"{report.mfu:.0%} of the FLOP/s of {report.peak}",
    }
    if report.hidden_fraction is not None:
        sent, ms = report.sent_bytes / 1e6, report.communication_seconds * 1e3
        hidden = f"{report.hidden_fraction:.0%} of it hidden (timeline.png)"
        rows["communication"] = f"rank 0 sends {sent:,.1f} MB a step in {ms:,.0f} ms, {hidden}"
    memory = [num_bytes / 1e6 for num_bytes in report.peak_memory]
    rows["peak memory"] = f"{min(memory):,.0f} to {max(memory):,.0f} MB a rank"
    made = ", ".join(sorted(path.name for path in Path(report.folder).iterdir()))
    rows["files"] = f"{report.folder}/: {made}"
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())
