"""`minipar train`: on ranks of our own or on torchrun's; a folder for the run, and its report."""

import contextlib
import itertools
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minipar.cli.output import print_anything, say
from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.observe.timeline import Timeline
from minipar.ranks import backends
from minipar.ranks.launch import RankError, Ranks, check_fits_here
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.folder import find_job, forget_job, how_to_go_on, newest, note_job
from minipar.train.metrics import read
from minipar.train.report import Report
from minipar.train.stop import pass_on
from minipar.train.trainer import Trainer


def train(config: TrainConfig) -> None:
    """Train, on torchrun's ranks or on ranks of our own; then draw and print what came of it."""
    config.check()
    start, folder = None, None
    if config.resume:
        folder = run_of(config.resume)
        start = str(checkpoint_of(typed_path(config.resume)))
        checkpoint.verify(Path(start))
    config.check_text(reads=not backends.under_torchrun())  # whose ranks are here, and read it
    if backends.under_torchrun():
        _train_under_torchrun(config, folder, start)
        return
    check_fits_here(config.num_ranks, config.weight_bytes())
    backend = config.backend
    if backend == "auto":
        backend = backends.pick_backend(config.num_ranks)
    backends.check_backend(backend, config.num_ranks)
    folder = folder or new_folder(config)
    say(_headline(config, folder, start))
    try:
        with (
            Ranks(
                config.num_ranks,
                backend=backend,
                timeout=config.timeout,
                sink=None,
                preload=(__name__,),  # with the trainer: once, and not in each rank
            ) as ranks,
            pass_on(ranks.pids),
        ):
            report = ranks.run(trainer.train, config, str(folder), start, Progress)[0]
    except (KeyboardInterrupt, SystemExit, RankError) as error:
        if isinstance(error, RankError) and is_bad_input(error):
            with contextlib.suppress(OSError):
                folder.rmdir()  # nothing is in it, unless it is that of an earlier run
        else:
            print(f"\n{how_to_go_on(folder)}", file=sys.stderr)
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
            say(_headline(config, folder, start))
        try:
            report = trainer.train(config, name, start, Progress)
        except Exception as error:
            if rank == 0 and not (folder / "config.json").exists():  # it has not begun
                (folder / trainer.STALLED).unlink(missing_ok=True)
                forget_job(folder)
            if not isinstance(error, ValueError) and backends.local_rank() == 0:
                again = "Unless torchrun starts the ranks again: " * (backends.restarts_left() > 0)
                error.add_note(f"\n{again}{how_to_go_on(folder)}")
            raise
    if rank == 0:
        conclude(report, folder)
        if report is not None:
            forget_job(folder)


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


def config_of(resumed: str) -> TrainConfig:
    """Return the configuration of the run of which `resumed` is the folder, or a checkpoint."""
    run = run_of(resumed)
    config = TrainConfig.load(run / "config.json")
    if config.tokenizer and (run / "tokenizer.json").exists():
        return replace(config, tokenizer=str(run / "tokenizer.json"))
    return config


def is_bad_input(error: RankError) -> bool:
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
        except OSError as error:
            # Maybe by a run that starts at once. Of a link to nowhere it is --out that exists.
            is_taken = isinstance(error, FileExistsError) and os.path.lexists(folder)
            if not is_taken:
                raise ValueError(f"--out {config.out}: cannot make {folder}: {error}") from None
    raise AssertionError("there is always another number")


def run_of(path: str, asked: str = "--resume") -> Path:
    """Return the folder of the run that `path`, a run or one of its checkpoints, belongs to."""
    folder = typed_path(path)
    if not path:
        raise ValueError(f"{asked} is empty; name the folder of a run, or leave {asked} out")
    if not folder.exists():
        raise ValueError(f"{asked} {path} does not exist; name the folder of a run")
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not (run / "config.json").is_file():
        raise ValueError(f"{asked} {path} is no run: it has no config.json")
    return run


def typed_path(path: str) -> Path:
    """Return `path`; for a checkpoint that is named from inside of its run, as step_000008, all of
    it, so that the folder of the run can be seen in it.
    """
    whole = Path(os.path.abspath(path))
    is_cut = whole.parent.name == "checkpoints" != Path(path).parent.name
    return whole if is_cut else Path(path)


def checkpoint_of(path: Path, asked: str = "--resume") -> Path:
    """Return `path` if it is a checkpoint, else the newest one of the run."""
    if path.parent.name == "checkpoints":
        return path
    saved = newest(path)
    if saved is None:
        raise ValueError(f"{asked} {path}: the run has no checkpoint; start it again instead")
    return saved


class Progress:
    """A bar on a terminal; without, a line of the first step, the last, and every ten seconds.

    Lives in rank 0.
    """

    def __init__(self, trainer: Trainer) -> None:
        print_anything()
        say(
            f"{trainer.corpus.description}\n"
            f"{trainer.num_parameters / 1e6:.2f}M parameters, "
            f"{trainer.mesh.size} ranks on {trainer.device.type}, products in {trainer.products}"
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
        # Seconds and tokens, of steps that were recorded and of others: the first take longer.
        self.spent = {True: [0.0, 0.0], False: [0.0, 0.0]}
        self.begun, self.num_steps = time.monotonic(), 0

    def __call__(self, line: dict[str, Any]) -> None:
        spent = self.spent[bool(line.get("recorded"))]
        spent[:] = spent[0] + line["seconds"], spent[1] + line["tokens"]
        seconds, tokens = self.spent[not self.spent[False][0]]
        status = f"loss {line['loss']:.3f}, {tokens / seconds:,.0f} tokens/s"
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update()
        self.num_steps += 1
        if self.num_steps == 1:
            self.bar.refresh()
        last = line["step"] == self.total
        if self.bar.disable and (last or time.monotonic() - self.spoken > 10):
            left = (self.total - line["step"]) * (time.monotonic() - self.begun) / self.num_steps
            words = "" if last else f", {tqdm.format_interval(left)} left"
            say(f"step {line['step']}/{self.total}: {status}{words}")
            self.spoken = time.monotonic()
        if last:
            self.bar.close()


def conclude(report: Report | None, folder: Path) -> None:
    """Draw the pictures of a run and print the table at its end; or how to go on, without report.

    Without, it was asked to stop.
    """
    if report is None:
        say(f"\n{how_to_go_on(folder)}")
        return
    from minipar.lab import draw  # a second, of which training knows nothing

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
    say(summary(report))


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
        counting = " (FLOPs of the experts that a token passes)" if report.experts else ""
        rows["utilisation"] = f"{report.mfu:.0%} of the FLOP/s of {report.peak}{counting}"
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
