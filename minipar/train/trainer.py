"""A whole run: around the training step of step.py, all that a real one needs."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object, all_reduce, barrier, broadcast
from minipar.comm.mesh import Mesh
from minipar.emulate import link, strict
from minipar.model import hf
from minipar.model.llama import Llama
from minipar.model.recompute import checkpoint_activations
from minipar.observe import watchdog
from minipar.observe.timeline import Timeline
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint, compiled, peak, strategies
from minipar.train.config import EXPERTS, TrainConfig
from minipar.train.corpus import Corpus, load_corpus
from minipar.train.data import Batches, Sequences, check_same, on_device
from minipar.train.folder import go_on_from, held
from minipar.train.metrics import Metrics, Stopwatch, Telling, say
from minipar.train.optim import names_in_order, warmup_cosine, warmup_stable_decay
from minipar.train.out_of_memory import noted
from minipar.train.precision import COMPUTE_DTYPES, Precision
from minipar.train.report import (
    Report,
    StepRecorder,
    expert_figures,
    expert_slots,
    peak_memory,
    training_figures,
)
from minipar.train.sampling import write
from minipar.train.saver import Saver
from minipar.train.step import evaluate, train_step
from minipar.train.stop import StopRequest
from minipar.train.tokenizer import Tokenizer, load_tokenizer
from minipar.train.workload import Workload

STALLED = "stalled.json"  # in the folder of a run: what the watchdog saw, for `minipar hang`
TELL_SECONDS = 10.0  # between two words from a run that is busy with something else than steps


class Trainer:
    """Everything a rank holds while it trains. Made and used alike on all ranks.

    Raises `ValueError` on every rank for a configuration, text or checkpoint that does not fit.
    `is_ours` says on rank 0 whether `folder` is still that of this run.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, is_ours: Callable[[], bool] = lambda: True
    ) -> None:
        self.config, self.folder = config, folder
        self.mesh = Mesh(**config.mesh_sizes())
        self.device, self.dtype = compute_device(), getattr(torch, config.dtype)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.manual_seed(config.seed)
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer or None)
        self.corpus: Corpus = load_corpus(config.data, self.tokenizer)
        config.check_length(self.corpus)
        self.batches = self._batches(self.corpus.train, config.seed)
        self.judged = Sequences(self.corpus.validation, config.seq_len)
        texts = {"training": self.batches.sequences, "validation": self.judged}
        check_same(config.data, texts, self.mesh.world)

        shape = config.model_config(self.tokenizer.vocab_size)
        if strategies.is_in_parts(config):
            with torch.device("meta"):
                self.model = Llama(shape).to(self.dtype)
        elif config.init:
            self.model = hf.load(config.init, self.dtype, self.device)
        else:
            self.model = Llama(shape, seed=config.seed).to(self.device, self.dtype)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.parameter_names = names_in_order(self.model)  # of the serial model, whatever follows
        checkpoint_activations(self.model, config.recompute)
        self.workload = Workload(config, self.model, self.mesh)
        self.setup = strategies.make(config, self.model, self.mesh, self.workload)
        if config.compile != "none":
            compiled.compile_blocks(self.model, config.compile)
        self.optimizer = self.setup.optimizer
        self.precision = Precision(self.setup.autocast, self.device, self.setup.overflow_axes)
        compute_dtype = COMPUTE_DTYPES[config.precision] or self.dtype
        self.products = peak.kind_of_product(self.device, compute_dtype)
        self.peak = peak.of_ranks(self.device, compute_dtype, self.mesh.world)
        self.flops_per_token = shape.flops_per_token(config.seq_len)
        self.saver = Saver(
            folder / "checkpoints",
            self.mesh.world,
            keep=config.keep,
            in_background=config.async_save,
            is_ours=is_ours,
        )
        self.save_seconds = 0.0  # that training has waited for checkpoints
        self.told_save_seconds = 0.0  # of these, in the metrics
        self.step = self.first_step = 0  # steps done; those done when this run began, or went on
        self.loss: float | None = None  # of the step that was done last, as far as it is known
        self.unsound: tuple[int, float] | None = None  # a step, and its norm on this rank alone
        self.timeline = Timeline()

    def _batches(self, tokens: Tensor, seed: int) -> Batches:
        config, axis = self.config, self.mesh.joint("dp", "ep")
        return Batches(
            Sequences(tokens, config.seq_len),
            config.batch_size,
            axis.rank,
            axis.size,
            seed=seed,
            microbatches=config.microbatches,
        )

    # ------------------------------------------------------------------ the loop
    def run(
        self,
        progress: Callable[[dict[str, Any]], None] = lambda _: None,
        request: StopRequest | None = None,
    ) -> Report | None:
        """Train up to ``config.steps``; `progress` is called with every line of the metrics.

        On a GPU a step is told, and its numbers are checked, when the next one has been launched.
        When `request` has come on any rank, all save after that step, and return None.

        Raises `FloatingPointError` on every rank at the first loss or gradient that is not finite,
        unless it is loss scaling that made it so. Raises `OSError` on every rank where a checkpoint
        cannot be written: of one that is written in the background, after a later step.
        """
        with closing(self.saver):
            board = self.folder / "tensorboard" if self.config.tensorboard else None
            path = self.folder / "metrics.jsonl"
            metrics = Metrics(path, self.step, board) if self.is_first else None
            last = metrics and metrics.last
            if last and self.loss is not None and last != (self.step, self.loss):
                say(
                    self.mesh,
                    f"{path} has steps of another way that the run has gone, from an earlier "
                    f"checkpoint, in the place of some up to step {self.step}",
                )
            with Telling(self.device, self._complete, progress, metrics) as told:
                return self._run(told, request or StopRequest())

    def _run(self, told: Telling, request: StopRequest) -> Report | None:
        config, setup, first_step = self.config, self.setup, self.step
        of_blocks = None if setup.strategy.run else self.model  # a pipeline tells by itself
        every = config.record_every
        if setup.period and self.device.type != "cuda":
            every = 1  # few of the steps talk: miss none, where it costs little to record
        recorder = StepRecorder(
            of_blocks, first_step, config.steps, every, setup.crosses_steps, setup.period or 1
        )
        batches = on_device(self.batches.forever(), self.device, setup.strategy.shard)
        clock = Stopwatch(self.device)
        while self.step < config.steps:
            with clock:
                self.workload.deal(self.step, self.batches)
                batch = next(batches)
                lr = self.learning_rate()
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
            with recorder.step(self.step), clock:  # to begin and end it is no part of the step
                result = train_step(
                    self.model,
                    [setup.strategy],
                    self.optimizer,
                    batch,
                    setup.data_axis,
                    max_norm=config.max_norm,
                    precision=self.precision,
                    noise=self.workload.noise,
                )
                numbers = result.numbers()
            self.step += 1
            line = {
                "step": self.step,
                "lr": lr,
                **numbers,
                "seconds": clock,
                **self.precision.report(),
                **recorder.figures(self.step - 1),
                **self._costs(),
            }
            clock = Stopwatch(self.device)  # what follows delays the next step
            with clock:
                line |= self.workload.learn(result, self.batches)
                line |= expert_slots(self.model, self.mesh, self.device)
                told.hold(line)
            is_last, saves = self.step == config.steps, self._saves_after(self.step)
            validates = config.eval_every > 0 and self.step % config.eval_every == 0
            self._check(told, now=saves or validates)
            if saves:
                self._check_to_save()
            if is_last:
                told.tell()  # before it is saved: no run that goes on from there would tell of it
                setup.finish()
                self.save()  # what comes now may fail, and the training is done
                told.add({"validation_loss": self.validate()})
                break
            if validates:
                line["validation_loss"] = self.validate()
            with clock:
                told.tell()
            if saves:
                self.save()
            with clock:
                is_to_stop = self._agree(request.came)
            if is_to_stop:
                if not saves:
                    self._check(told, now=True)
                    self._check_to_save()
                    told.tell()
                    self.save()
                break
        self._finish_save()
        return self._report(first_step, told.lines, recorder) if self.step == config.steps else None

    def _saves_after(self, step: int) -> bool:
        return step == self.config.steps or step % self.config.save_every == 0

    def _costs(self) -> dict[str, Any]:
        """What the metrics tell of time and memory; `_complete` fills in what needs numbers."""
        costs = {"tokens_per_second": None, "mfu": None, "peak_memory": peak_memory(self.device)}
        if self.save_seconds > self.told_save_seconds:
            costs["save_seconds"] = self.save_seconds - self.told_save_seconds
            self.told_save_seconds = self.save_seconds
        return costs

    def _complete(self, line: dict[str, Any]) -> None:
        num_tokens, seconds = line["tokens"], line["seconds"]
        line["tokens_per_second"] = num_tokens / seconds
        line["mfu"] = self.peak.utilisation(self.flops_per_token, num_tokens, seconds)
        if "slots" in line:
            line |= expert_figures(line.pop("slots"), self.model.config)

    def _agree(self, is_asked: bool) -> bool:
        """Return whether any rank was asked to stop; a collective.

        It also finishes a save in the background that all ranks have written, or one has not been
        able to: 24 bytes do for both.
        """
        own = [is_asked, self.saver.has_failed, self.saver.is_writing]
        flags = torch.tensor(own, dtype=torch.int64)  # of the host: no GPU is waited for
        is_to_stop, has_failed, is_writing = all_reduce(flags, self.mesh.world, "max").tolist()
        if self.saver.in_progress and (has_failed or not is_writing):
            self._finish_save()
        return bool(is_to_stop)

    def _check(self, told: Telling, now: bool) -> None:
        """Raise on all ranks where a step whose numbers are due, or all `now`, was not finite."""
        for line in told.read(now=now):
            step, loss, norm = line["step"], line["loss"], line["grad_norm"]
            # A gradient that overflows because the loss was scaled up is no accident.
            is_sound = math.isfinite(norm) or line.get("loss_scale", 0) >= 1
            if not math.isfinite(loss) or not (is_sound or self.setup.is_local):
                self._refuse(step, f"loss {loss}, gradient norm {norm}")
            if not is_sound:
                # Each rank has a norm of its own, and they must stop together: by the next loss,
                # as a rule, which tells all; at the latest before they save.
                self.unsound = self.unsound or (step, norm)
            self.loss = loss

    def _check_to_save(self) -> None:
        """Raise on all ranks where what one of them would save is not finite; a collective.

        That is known of a loss and a norm that all ranks have in common; here it is of those that
        a rank has for itself, and of a gradient that waits for its step.
        """
        if not self.setup.is_local:
            return
        own = self.unsound or (self.step, self.setup.late_norm())
        for rank, (step, norm) in enumerate(all_gather_object(own, self.mesh.world)):
            if not math.isfinite(norm):
                self._refuse(step, f"on rank {rank}, gradient norm {norm}")

    def _refuse(self, step: int, what: str) -> None:
        self._finish_save()  # of a step before, which was finite
        remedy = f"Try a lower --lr than {self.config.lr:g}"
        if 0 < self.first_step == step - 1:
            start = f"No step went well after the checkpoint of step {self.first_step}"
            remedy = f"{start}: resume from an earlier one. {remedy}"
        raise FloatingPointError(f"step {step}: {what}; checkpoints are untouched. {remedy}")

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files."""
        return self.mesh.rank == 0

    def learning_rate(self) -> float:
        """The learning rate of the coming step, whose batch has been dealt."""
        config = self.config
        common = dict(
            peak=config.lr * self.workload.lr_factor(self.batches),
            warmup_steps=min(config.warmup_steps, config.steps),
            total_steps=config.steps,
        )
        if config.schedule == "cosine":
            return warmup_cosine(self.step, **common)
        decay_steps = min(config.steps // 5, config.steps - common["warmup_steps"])
        return warmup_stable_decay(self.step, decay_steps=decay_steps, **common)

    def validate(self) -> float:
        """Return the loss of the model of the run on the same sample of text every time."""
        # In microbatches as in training, so that validation needs no more memory.
        batches = self._batches(self.corpus.validation, seed=0)
        few = islice(batches, self.config.eval_batches)
        self.model.eval()  # in which experts drop nothing
        with self.setup.agreed_model(), self.precision.autocast():
            few = on_device(few, self.device, self.setup.strategy.shard)
            loss = evaluate(self.model, few, self.setup.data_axis, self.setup.strategy.evaluate)
        self.model.train()
        return loss

    # ------------------------------------------------------------------ saving and resuming
    def save(self) -> None:
        """Write a checkpoint, or begin to with --async-save; a collective."""
        with self._waiting_for_files():
            state = {
                "step": self.step,
                "loss": self.loss,
                "model": asdict(self.model.config),
                "precision": self.precision.state_dict(),
                "data": self.batches.state_dict(),
                "workload": self.workload.state_dict(),
                "validation": self.judged.fingerprint,
                "random": all_gather_object(torch.get_rng_state(), self.mesh.world),
            }
            self.setup.save(self.saver, self.step, state, self.parameter_names)

    def _finish_save(self) -> None:
        with self._waiting_for_files():
            self.saver.finish()

    @contextmanager
    def _waiting_for_files(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.save_seconds += time.perf_counter() - start

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`: exactly, unless a printed line says not.

        A collective. Raises `CheckpointError` on all ranks for one that is damaged or does not fit,
        and `ValueError` for one of more steps than this run shall have.
        """
        with checkpoint.reading(folder):
            done = checkpoint.step_of(folder)
        if done > self.config.steps:
            raise ValueError(
                f"--steps {self.config.steps} is below the {done} that {folder} has done; use "
                f"{done} or more, or --resume an earlier checkpoint"
            )
        weights, state = checkpoint.load(folder, self.mesh.world, lazily=not self.setup.is_local)
        self.setup.load_weights(weights, f"checkpoint {folder}")
        with checkpoint.reading(folder):
            if state["step"] != checkpoint.step_of(folder):
                raise ValueError(f"it is of step {state['step']}")
            _check_shape(state["model"], asdict(self.model.config))
            if "optimizer" in state:
                state["optimizer"] = checkpoint.by_number(state["optimizer"], self.parameter_names)
            self.batches.load_state_dict(state["data"])
            decays = [group["weight_decay"] for group in self.optimizer.param_groups]
            self.setup.load_state_dict(state)
            for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = decay  # as the flags of this run say
            self.precision.load_state_dict(state.get("precision", {}))
            self.workload.load_state_dict(state.get("workload", {}))
            random_states = state["random"]
            torch.set_rng_state(random_states[self.mesh.rank % len(random_states)])
            self.step, self.loss = state["step"], state.get("loss")
            self.first_step = self.step
            if state.get("validation", self.judged.fingerprint) != self.judged.fingerprint:
                say(
                    self.mesh,
                    f"the validation text of {self.config.data} is not that of the checkpoint: "
                    f"losses of validation from here on are no measure beside those before",
                )

    # ------------------------------------------------------------------ the end
    def _report(
        self, first_step: int, lines: list[dict[str, Any]], recorder: StepRecorder
    ) -> Report:
        say(self.mesh, "All steps are done: gathering the timeline of one ...")
        self.timeline = recorder.typical(self.mesh)
        carrier = link.current().label if self.config.backend == "link" else "this machine"
        self.timeline.label = f"measured, one step, {self.mesh.size} ranks, {carrier}"
        self.timeline.label += self.workload.label
        figures = training_figures(lines)
        speed = figures["tokens_per_second"]
        sent_bytes, communication_seconds, hidden_fraction = recorder.communication()
        return Report(
            folder=str(self.folder),
            data=self.corpus.description,
            num_parameters=self.num_parameters,
            first_step=first_step,
            steps=self.step,
            **figures,
            validation_loss=lines[-1]["validation_loss"] if lines else self.validate(),
            mfu=speed and self.peak.utilisation(self.flops_per_token, speed, seconds=1),
            peak=self.peak.source,
            save_seconds=self.save_seconds,
            sent_bytes=sent_bytes,
            communication_seconds=communication_seconds,
            hidden_fraction=hidden_fraction,
            experts=lines[-1] if lines and "expert_load" in lines[-1] else {},
            peak_memory=all_gather_object(peak_memory(self.device), self.mesh.world),
        )

    def sample(self) -> tuple[str, str]:
        """Return a prompt, and the text that the model writes, on the first rank; a collective.

        The prompt is the beginning of the validation text. A model in parts writes with all ranks,
        but where they have different layers, or parts of a sequence: a word on that takes the place
        of the text.
        """
        total, start = self.config.sample_tokens, self.corpus.validation[:32]
        if not total:
            return "", ""
        model, world, agreeing = self.model, self.mesh.world, nullcontext()
        if strategies.is_in_parts(self.config):
            if self.mesh.pp.size * self.mesh.cp.size > 1:
                return "", f"(none: no rank has the whole model; minipar generate {self.folder})"
            # All go on by the token of the first, whose rounding may differ from the others'.
            agreeing = model.register_forward_hook(
                lambda model, tokens, logits: broadcast(logits[:, -1:], world)
            )
        else:
            # With whole weights on one rank, or all would have to gather them for each token.
            weights = self.setup.full_state_dict()
            if not self.is_first:
                for _ in range(0, total, 8):  # as the first rank writes: see `told`
                    barrier(world)
                return "", ""
            with torch.device("meta"):
                model = Llama(self.model.config)
            model = hf.fill(model, weights).to(self.device, self.dtype)
        say(self.mesh, f"writing a sample of {total:,} tokens ...")
        last = time.monotonic()

        def told(done: int) -> None:
            nonlocal last
            barrier(world)  # so that none waits for all of it, longer than --timeout
            if time.monotonic() - last > TELL_SECONDS:
                say(self.mesh, f"Writing the sample: {done:,} of {total:,} tokens ...")
                last = time.monotonic()

        with agreeing:
            return write(model.eval(), self.tokenizer, start, total, self.config.seed, told=told)


def _check_shape(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise `ValueError` where models differ in what the shapes of their weights do not tell.

    What flags say of experts may change, and how long a sequence may be.
    """
    saved, own = ({**shape, **(shape.get("moe") or {})} for shape in (saved, own))
    may_differ = "moe", "max_seq_len", *EXPERTS.values()
    for name in own:
        if name in saved and name not in may_differ and saved[name] != own[name]:
            now = f"{saved[name]}, and this one has {own[name]}"
            raise ValueError(f"it is of a model with {name}={now}")


def train(
    config: TrainConfig,
    folder: str,
    start: str | None = None,
    progress: Callable[["Trainer"], Callable[[dict[str, Any]], None]] | None = None,
) -> Report | None:
    """Train on this rank as all others do; rank 0 writes the files of the run into `folder`.

    `start` is the folder of the checkpoint to continue from. Files that are pictures are left to
    the caller: floor 3 does not plot. None if the run was asked to stop, and has saved.
    """
    place, world = Path(folder), Mesh(**config.mesh_sizes()).world
    watched = strict.watching() if config.strict else nullcontext()
    stalls = watchdog.watch(config.stall_seconds, dump=place / STALLED)
    holding = held(place, world)
    with StopRequest() as request, stalls, holding as is_ours, watched, noted(place) as known:
        if config.backend == "link":
            link.use(config.link)
        known.append(trainer := Trainer(config, place, is_ours))
        if start is not None:
            trainer.load(Path(start))
        if trainer.is_first:
            if start is not None and trainer.step < config.steps:
                go_on_from(place, Path(start))
            config.save(place / "config.json")
            if config.tokenizer:
                trainer.tokenizer.save(place / "tokenizer.json")
        first_step = trainer.step
        tell = progress(trainer) if progress and trainer.is_first else lambda _: None
        report = trainer.run(tell, request)
        if report is None:
            return None
        # A run that was done already has told more than the report of no step could.
        has_news = trainer.step > first_step or not (place / "report.json").exists()
        if trainer.is_first and trainer.timeline.spans:
            trainer.timeline.save(place / "timeline.json")
        if trainer.is_first and has_news:
            report.write(place)
        # May fail, or take long: what there is, is written.
        report.prompt, report.sample = trainer.sample()
        if trainer.is_first and has_news and report.sample:
            report.write(place)
        return report
