"""A whole run: a loop around the training step of step.py, and all that a real run needs."""

import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object, all_reduce
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.observe import watchdog
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint, out_of_memory, peak, setup, shards
from minipar.train.config import TrainConfig
from minipar.train.corpus import Corpus, load_corpus
from minipar.train.data import Batches, Sequences, check_same, on_device
from minipar.train.folder import held
from minipar.train.metrics import Log, say
from minipar.train.optim import warmup_cosine
from minipar.train.precision import COMPUTE_DTYPES, Precision
from minipar.train.report import (
    PROFILED_STEPS,
    Report,
    StepRecorder,
    figures,
    peak_memory,
    profiler,
)
from minipar.train.sampling import write
from minipar.train.saver import Saver
from minipar.train.step import StepResult, evaluate, train_step
from minipar.train.stop import StopRequest
from minipar.train.tokenizer import Tokenizer, load_tokenizer

STALL_SECONDS = 60.0  # in one collective, until the watchdog says which rank keeps it waiting
EVAL_BATCHES = 16  # of validation text, in each validation

Progress = Callable[[dict[str, Any]], None]


class Trainer:
    """Everything a rank holds while it trains. Made and used alike on all ranks.

    Raises `ValueError` on every rank for a configuration, text or checkpoint that does not fit.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder, self.plan = config, folder, config.as_plan()
        self.mesh = Mesh(**self.plan.mesh_sizes())
        self.is_first = self.mesh.rank == 0  # the rank that writes the files of the run
        self.device = compute_device()
        torch.manual_seed(config.seed)
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer or None)
        self.corpus: Corpus = load_corpus(config.data, self.tokenizer)
        self.batches = self._batches(self.corpus.train, config.seed)
        part = "the part for validation, a twentieth of the text,"
        self.validation = Sequences(self.corpus.validation, config.seq_len, part)
        texts = {"training": self.batches.sequences, "validation": self.validation}
        check_same(config.data, texts, self.mesh.world)

        self.model = setup.make_model(config, config.model_config(self.tokenizer.vocab_size))
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.strategy = setup.apply(config, self.model, self.mesh)
        self.optimizer = self.strategy.optimizer
        self.precision = Precision(self.plan.autocast, self.device)
        dtype = COMPUTE_DTYPES[self.plan.precision] or getattr(torch, config.dtype)
        self.peak = peak.of_ranks(self.device, dtype, self.mesh.world)
        self.flops_per_token = self.model.config.flops_per_token(config.seq_len)
        how = dict(keep=config.keep, in_background=config.async_save)
        self.saver = Saver(folder / "checkpoints", self.mesh.world, **how)
        self.step = 0  # steps done

    def _batches(self, tokens: Tensor, seed: int) -> Batches:
        axis = self.mesh.joint("dp", "ep")
        return Batches(
            Sequences(tokens, self.config.seq_len),
            self.config.batch_size,
            axis.rank,
            axis.size,
            seed=seed,
            microbatches=self.plan.microbatches,
        )

    # ------------------------------------------------------------------ the loop
    def run(
        self, progress: Progress = lambda line: None, request: StopRequest | None = None
    ) -> Report | None:
        """Train up to ``config.steps``; `progress` is called with every line of the metrics.

        When any rank has got a `request` to stop, all save after the same step, and return None.

        Raises `FloatingPointError` on every rank at a loss or gradient that is not finite, unless
        loss scaling made it so. Raises `OSError` on every rank where a checkpoint cannot be
        written; if it is written in the background, after a later step.
        """
        config, request = self.config, request or StopRequest()
        path = self.folder / "metrics.jsonl" if self.is_first else None
        log = Log(path, self.step, self.device, self._complete, progress)
        recorder, steps = self._recorder(), range(self.step + 1, config.steps + 1)
        profiling = nullcontext()
        if config.profile and len(steps) < 3:
            say(self.mesh, f"--profile: no trace of steps 3 to 5, as this run has {len(steps)}")
        elif config.profile:
            profiling = profiler(self.folder / "profile", self.mesh.rank)
        batches = on_device(self.batches.forever(), self.device, self.strategy.shard)
        with closing(self.saver), recorder.recording, profiling as profile:
            for self.step in steps:
                with recorder.step():
                    result = self._train_step(next(batches))
                line = {"step": self.step, "lr": self.learning_rate(self.step - 1)}
                line |= result.numbers() | self.precision.report()  # no device is waited for
                log.write(line | ({"recorded": True} if recorder.is_on else {}))
                self._profile(profile)
                is_last, is_to_stop = self.step == config.steps, self._agree(request.came)
                if is_last or (config.eval_every and self.step % config.eval_every == 0):
                    validation_loss = self.validate()
                    log.add(validation_loss=validation_loss)
                    log.restart_clock()
                if is_last or is_to_stop or self.step % config.save_every == 0:
                    log.flush()  # no checkpoint of a step with NaN: this raises
                    self.save()
                    log.restart_clock()
                if is_to_stop and not is_last:
                    self.saver.finish()
                    return None
            self.saver.finish()
        return self._report(log.lines, validation_loss, recorder)

    def _train_step(self, batch: list[tuple[Tensor, ...]]) -> StepResult:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step - 1)
        return train_step(
            self.model,
            [self.strategy],
            self.optimizer,
            batch,
            self.strategy.axis,
            max_norm=self.config.max_norm,
            precision=self.precision,
        )

    def _recorder(self) -> StepRecorder:
        num_steps = most = self.config.steps - self.step
        if self.config.profile:
            most -= PROFILED_STEPS  # on a GPU, both need torch's only profiler
        blocks = None if self.strategy.run else self.model  # a pipeline records by itself
        return StepRecorder(blocks, num_steps, max(0, min(self.config.record_steps, most)))

    def _profile(self, profile: torch.profiler.profile | None) -> None:
        if profile is not None and profile.step_num < PROFILED_STEPS:
            if self.plan.zero in (1, 2):  # their weights are still on their way:
                self.strategy.full_state_dict()  # gloo would crash when the profiler ends
            profile.step()

    def _complete(self, line: dict[str, Any]) -> None:
        """Check the numbers of a step, and put what follows from them into its line."""
        step, loss, norm, num_tokens = (line[k] for k in ("step", "loss", "grad_norm", "tokens"))
        # With loss scaling a gradient may overflow: the scaler then leaves the step out.
        is_sound = math.isfinite(norm) or line.get("loss_scale", 0) >= 1
        if not math.isfinite(loss) or not is_sound:
            self.saver.finish()  # of an earlier step, which was finite
            found = f"step {step}: loss {loss}, gradient norm {norm}; checkpoints are untouched"
            raise FloatingPointError(f"{found}. Try a lower --lr than {self.config.lr:g}")
        line["tokens_per_second"] = num_tokens / line["seconds"]
        line["mfu"] = self.peak.utilisation(self.flops_per_token, num_tokens, line["seconds"])
        line["peak_memory"] = peak_memory(self.device)

    def _agree(self, is_asked: bool) -> bool:
        """Return True if any rank was asked to stop; a collective of 16 bytes.

        It also finishes a save in the background that all ranks have written.
        """
        flags = torch.tensor([is_asked, self.saver.is_writing], dtype=torch.int64)  # on the host
        is_to_stop, is_writing = all_reduce(flags, self.mesh.world, "max").tolist()
        if not is_writing:
            self.saver.finish()
        return bool(is_to_stop)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        peak, steps = self.config.lr, self.config.steps
        warmup = min(self.config.warmup_steps, steps)
        return warmup_cosine(step, peak=peak, total_steps=steps, warmup_steps=warmup)

    def validate(self) -> float:
        """Return the loss on the same sample of text every time."""
        # In microbatches as in training, so that validation needs no more memory.
        few = islice(self._batches(self.corpus.validation, seed=0), EVAL_BATCHES)
        self.model.eval()  # in which experts drop nothing
        with self.precision.autocast():
            few = on_device(few, self.device, self.strategy.shard)
            loss = evaluate(self.model, few, self.strategy.axis, self.strategy.evaluate)
        self.model.train()
        return loss

    # ------------------------------------------------------------------ saving and resuming
    def save(self) -> None:
        """Write a checkpoint, or begin to with --async-save; a collective."""
        state = {
            "step": self.step,
            "lr": self.optimizer.param_groups[0]["lr"],
            "model": asdict(self.model.config),
            "precision": self.precision.state_dict(),
            "data": self.batches.state_dict(),
        }
        shards.save(self.strategy, self.saver, self.step, state)

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`: exactly, unless a printed line says not.

        A collective. Raises `CheckpointError` on all ranks for one that is damaged or does not fit,
        and `ValueError` for one that already has all steps of this run.
        """
        done = checkpoint.step_of(folder)
        if done >= self.config.steps:
            raise ValueError(f"{folder} has {done} steps already: --steps must be more")
        weights, state = checkpoint.load(folder, self.mesh.world, lazily=True)
        with checkpoint.reading(folder):
            _check_shape(state["model"], asdict(self.model.config))
            self.batches.load_state_dict(state["data"])
            setup.load(self.strategy, weights, state["optimizer"], f"checkpoint {folder}")
            self.precision.load_state_dict(state["precision"])
            self.step = state["step"]
            before, now = state["lr"], self.learning_rate(self.step - 1)
            if not math.isclose(before, now):
                rate = f"the learning rate of step {self.step} was {before:.3g}, and is {now:.3g}"
                say(self.mesh, f"this run's flags change the schedule: {rate} now")

    # ------------------------------------------------------------------ the end
    def _report(
        self, lines: list[dict[str, Any]], validation_loss: float, recorder: StepRecorder
    ) -> Report:
        self.timeline = recorder.typical(self.mesh)
        carrier = link.current().label if self.config.backend == "link" else "this machine"
        self.timeline.label = f"measured, one step, {self.mesh.size} ranks, {carrier}"
        told = figures(lines, self.timeline)
        return Report(
            folder=str(self.folder),
            data=self.corpus.description,
            num_parameters=self.num_parameters,
            steps=self.step,
            **told,
            validation_loss=validation_loss,
            mfu=self.peak.utilisation(self.flops_per_token, told["tokens_per_second"], 1),
            peak=self.peak.source,
            peak_memory=all_gather_object(peak_memory(self.device), self.mesh.world),
        )

    def sample(self) -> str:
        """Return how the model that was saved last continues the validation text."""
        count, prompt = self.config.sample_tokens, self.corpus.validation[:32]
        if not count:
            return ""
        if self.plan.zero == 3:
            return f"(none: no rank has the whole model; minipar generate {self.folder})"
        model = checkpoint.model_of(checkpoint.newest(self.folder)).to(self.device)
        return write(model, self.tokenizer, prompt, count, self.config.seed)


def _check_shape(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise `ValueError` where models differ, also in what the shapes of weights do not show."""
    saved, own = ({**shape, **(shape["moe"] or {})} for shape in (saved, own))
    for name in own:
        if name not in ("moe", "max_seq_len") and saved.get(name) != own[name]:
            now = f"{saved.get(name)}, and this one has {own[name]}"
            raise ValueError(f"it is of a model with {name}={now}")


def train(
    config: TrainConfig,
    folder: str,
    start: str | None = None,
    progress: Callable[[Trainer], Progress] | None = None,
) -> Report | None:
    """Train on this rank as all others do; rank 0 writes the files of the run into `folder`.

    `start` is the folder of the checkpoint to continue from. The caller draws the pictures.
    Returns None if the run was asked to stop, and has saved.
    """
    place, world = Path(folder), Mesh(**config.as_plan().mesh_sizes()).world
    stalls = watchdog.watch(STALL_SECONDS)
    with StopRequest() as request, stalls, held(place, world), out_of_memory.explained():
        if config.backend == "link":
            link.use(config.link)
        trainer = Trainer(config, place)
        if start is not None:
            trainer.load(Path(start))
        if trainer.is_first:
            config.save(place / "config.json")
            if config.tokenizer:
                trainer.tokenizer.save(place / "tokenizer.json")
        told = progress(trainer) if progress and trainer.is_first else lambda line: None
        report = trainer.run(told, request)
        if report is None:
            return None
        if trainer.is_first:
            report.sample = trainer.sample()
            report.write(place)
            if trainer.timeline.spans:
                trainer.timeline.save(place / "timeline.json")
        return report
