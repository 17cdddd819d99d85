"""The training loop: one step that a reader can follow, and around it all that a real run needs.

`train_step` is the same for every strategy: strategies change what the model does inside of it.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import link
from minipar.comm.backends import device_of
from minipar.comm.collectives import all_gather_object, all_reduce, barrier
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.timeline import Timeline
from minipar.model.llama import PRESETS, Llama, generate, token_loss
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import ddp
from minipar.parallel.strategy import Strategy
from minipar.train import checkpoint
from minipar.train.config import TrainConfig
from minipar.train.corpus import Corpus, Tokenizer, load_corpus, load_tokenizer
from minipar.train.data import IGNORE, Batches, Sequences
from minipar.train.metrics import Metrics
from minipar.train.optim import (
    clip_grad_norm,
    make_optimizer,
    warmup_cosine,
    warmup_stable_decay,
)
from minipar.train.precision import FULL, Precision, reduce_in
from minipar.train.report import Report, StepRecorder, peak_memory, training_figures

Microbatch = tuple[Tensor, Tensor]  # inputs [B, T] and targets [B, T]


# ---------------------------------------------------------------------- one step
@dataclass(frozen=True)
class StepResult:
    """What one step reports: scalars of the whole batch, equal on all ranks."""

    loss: Tensor  # nats per token, over all tokens of all ranks
    num_tokens: Tensor  # targets that counted
    grad_norm: Tensor  # before clipping


def train_step(
    model: nn.Module,
    strategies: Sequence[Strategy],
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Microbatch],
    data_axis: Axis,
    *,
    max_norm: float = math.inf,
    shard_axes: Sequence[Axis] = (),
    precision: Precision = FULL,
) -> StepResult:
    """Run forward, backward, clipping and the optimizer on this rank's share of one batch.

    The loss is the sum over targets divided by their number *in the whole batch*, over all
    microbatches and all ranks of `data_axis`: a mean of the ranks' means would weigh the tokens of
    a rank with little to do more than those of the others. So strategies sum gradients here, they
    do not average them.
    """
    own_tokens = sum((targets != IGNORE).sum() for _, targets in microbatches)
    counting = all_reduce(own_tokens, data_axis, async_op=True)  # hidden behind the first forward
    optimizer.zero_grad(set_to_none=True)
    own_loss = torch.zeros((), dtype=torch.float64, device=own_tokens.device)
    for i, (inputs, targets) in enumerate(microbatches):
        with ExitStack() as stack:
            if i < len(microbatches) - 1:
                for strategy in strategies:
                    stack.enter_context(strategy.no_sync())
            with precision.autocast():
                loss = token_loss(model(inputs), targets)
            num_tokens = counting.wait().clamp(min=1)
            precision.scale(loss / num_tokens).backward()
            own_loss += loss.detach()
    for strategy in strategies:
        strategy.finish_backward()
    adding = all_reduce(own_loss, data_axis, async_op=True)  # hidden behind the optimizer
    precision.unscale(model.parameters(), shard_axes)
    grad_norm = clip_grad_norm(model.parameters(), max_norm, shard_axes)
    precision.step(optimizer)  # a step whose gradients overflowed is left out on all ranks
    return StepResult(adding.wait() / num_tokens, num_tokens, grad_norm)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Sequence[Microbatch]], data_axis: Axis) -> float:
    """Return the loss in nats per token over `batches`, each target counted once over all ranks."""
    totals = None
    for inputs, targets in (microbatch for batch in batches for microbatch in batch):
        loss = token_loss(model(inputs), targets).double()
        sums = torch.stack([loss, (targets != IGNORE).sum()])
        totals = sums if totals is None else totals + sums
    if totals is None:
        raise ValueError("there are no batches to validate on")
    loss, num_tokens = all_reduce(totals, data_axis).tolist()
    return loss / max(num_tokens, 1)


# ---------------------------------------------------------------------- a whole run
class Trainer:
    """Everything a rank holds while it trains. Made and used alike on all ranks.

    Raises `ValueError` on every rank for a configuration, text or checkpoint that does not fit.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.mesh = Mesh(**config.mesh_sizes())
        self.device = device_of(self.mesh.rank)
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer or None)
        self.corpus: Corpus = load_corpus(config.data, self.tokenizer)
        config.check_length(self.corpus)
        self.batches = self._batches(self.corpus.train, config.seed, config.microbatches)

        model_config = PRESETS[config.preset]
        if self.tokenizer.vocab_size > model_config.vocab_size:
            model_config = replace(model_config, vocab_size=self.tokenizer.vocab_size)
        self.model = Llama(model_config, seed=config.seed)
        self.model.to(self.device, getattr(torch, config.dtype))
        checkpoint_activations(self.model, config.recompute)
        cast = config.reduce_dtype != "same"
        self.strategies = [
            ddp.apply(
                self.model,
                self.mesh.dp,
                version=config.ddp,
                bucket_mb=config.bucket_mb or None,
                average=False,
                reduce=reduce_in(getattr(torch, config.reduce_dtype)) if cast else None,
            )
        ]
        self.optimizer = make_optimizer(self.model, lr=config.lr, weight_decay=config.weight_decay)
        self.precision = Precision(config.precision, self.device)
        self.step = 0
        self.timeline = Timeline()

    def _batches(self, tokens: Tensor, seed: int, microbatches: int) -> Batches:
        sequences = Sequences(tokens, self.config.seq_len)
        return Batches(
            sequences,
            self.config.batch_size,
            self.mesh.dp.rank,
            self.mesh.dp.size,
            seed=seed,
            microbatches=microbatches,
        )

    # ------------------------------------------------------------------ the loop
    def run(self, progress: Callable[[dict[str, Any]], None] = lambda _: None) -> Report:
        """Train up to ``config.steps``; `progress` is called with every line of the metrics.

        Raises `FloatingPointError` on every rank at the first loss or gradient that is not finite,
        unless it is loss scaling that made it so.
        """
        config, first_step, lines = self.config, self.step, []
        recorder = StepRecorder(self.model, first_step, config.steps, config.record_every)
        metrics = Metrics(self.folder / "metrics.jsonl", self.step) if self.is_first else None
        batches = self._on_device(self.batches.forever())
        while self.step < config.steps:
            start = time.perf_counter()
            batch = next(batches)
            lr = self.learning_rate()
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with recorder.step(self.step):
                result = train_step(
                    self.model,
                    self.strategies,
                    self.optimizer,
                    batch,
                    self.mesh.dp,
                    max_norm=config.max_norm,
                    precision=self.precision,
                )
            self.step += 1
            line = {
                "step": self.step,
                "loss": result.loss.item(),
                "lr": lr,
                "grad_norm": result.grad_norm.item(),
                "tokens": int(result.num_tokens),
                "seconds": time.perf_counter() - start,
                **self.precision.report(),
            }
            self._check_finite(line)
            is_last = self.step == config.steps
            if is_last or (config.eval_every and self.step % config.eval_every == 0):
                line["validation_loss"] = self.validate()
            lines.append(line)
            if metrics is not None:
                metrics.write(line)
            progress(line)
            if is_last or self.step % config.save_every == 0:
                self.save()
        if metrics is not None:
            metrics.close()
        return self._report(first_step, lines, recorder)

    def _check_finite(self, line: dict[str, Any]) -> None:
        # A gradient that overflows because the loss was scaled up is no accident.
        scaled_up = line.get("loss_scale", 0) >= 1
        if not math.isfinite(line["loss"]) or not (math.isfinite(line["grad_norm"]) or scaled_up):
            raise FloatingPointError(
                f"step {line['step']}: loss {line['loss']}, gradient norm {line['grad_norm']}; "
                f"checkpoints are untouched. Try a lower --lr than {self.config.lr:g}"
            )

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files."""
        return self.mesh.rank == 0

    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        config = self.config
        common = dict(
            peak=config.lr,
            warmup_steps=min(config.warmup_steps, config.steps),
            total_steps=config.steps,
        )
        if config.schedule == "cosine":
            return warmup_cosine(self.step, **common)
        decay_steps = min(config.steps // 5, config.steps - common["warmup_steps"])
        return warmup_stable_decay(self.step, decay_steps=decay_steps, **common)

    def validate(self) -> float:
        """Return the loss on the same sample of the validation text every time."""
        batches = self._batches(self.corpus.validation, seed=0, microbatches=1)
        few = (batch for _, batch in zip(range(self.config.eval_batches), batches, strict=False))
        with self.precision.autocast():
            return evaluate(self.model, self._on_device(few), self.mesh.dp)

    def _on_device(self, batches: Iterable[Sequence[Microbatch]]):
        for batch in batches:
            yield [(x.to(self.device), y.to(self.device)) for x, y in batch]

    # ------------------------------------------------------------------ saving and resuming
    def save(self) -> None:
        """Write a checkpoint; a collective."""
        weights = self.strategies[-1].full_state_dict()
        random_states = all_gather_object(torch.get_rng_state(), self.mesh.world)
        if self.is_first:
            state = {
                "step": self.step,
                "optimizer": self.optimizer.state_dict(),
                "precision": self.precision.state_dict(),
                "data": self.batches.state_dict(),
                "random": random_states,
            }
            checkpoint.save(self.folder / "checkpoints", self.step, weights, state)
        barrier(self.mesh.world)  # nobody runs ahead into a crash while the files are half written

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`, exactly."""
        weights, state = checkpoint.load(folder)
        checkpoint.load_weights(self.model, weights, f"checkpoint {folder}")
        self.batches.load_state_dict(state["data"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state.get("precision", {}))
        random_states = state["random"]
        torch.set_rng_state(random_states[self.mesh.rank % len(random_states)])
        self.step = state["step"]

    # ------------------------------------------------------------------ the end
    def _report(
        self, first_step: int, lines: list[dict[str, Any]], recorder: StepRecorder
    ) -> Report:
        self.timeline = recorder.typical(self.mesh)
        self.timeline.label = f"measured, {self.mesh.size} ranks, {self._link_label}"
        sent_bytes, communication_seconds, hidden_fraction = recorder.communication()
        return Report(
            folder=str(self.folder),
            data=self.corpus.description,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            first_step=first_step,
            steps=self.step,
            **training_figures(lines),
            validation_loss=lines[-1]["validation_loss"] if lines else self.validate(),
            sent_bytes=sent_bytes,
            communication_seconds=communication_seconds,
            hidden_fraction=hidden_fraction,
            peak_memory=all_gather_object(peak_memory(self.device), self.mesh.world),
            sample=self.sample() if self.is_first else "",
        )

    @property
    def _link_label(self) -> str:
        """What carries the bytes, for the footnote of a picture."""
        return link.current().label if self.config.backend == "link" else "this machine"

    def sample(self) -> str:
        """Return text that the model writes, from the first characters of the validation text."""
        if not self.config.sample_tokens:
            return ""
        prompt = self.corpus.validation[:32].to(self.device, torch.int64)[None]
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        self.model.eval()
        tokens = generate(
            self.model, prompt, self.config.sample_tokens, 0.8, top_k=40, generator=generator
        )
        self.model.train()
        return self.tokenizer.decode(tokens[0].tolist())


def train(
    config: TrainConfig,
    folder: str,
    start: str | None = None,
    progress: Callable[["Trainer"], Callable[[dict[str, Any]], None]] | None = None,
) -> Report:
    """Train on this rank as all others do; rank 0 writes the files of the run into `folder`.

    `start` is the folder of the checkpoint to continue from. Files that are pictures are left to
    the caller: floor 3 does not plot.
    """
    if config.backend == "link":
        link.use(config.link)
    trainer = Trainer(config, Path(folder))
    if start is not None:
        trainer.load(Path(start))
    if trainer.is_first:
        trainer.folder.mkdir(parents=True, exist_ok=True)
        config.save(trainer.folder / "config.json")
    report = trainer.run(progress(trainer) if progress and trainer.is_first else lambda _: None)
    if trainer.is_first:
        if trainer.timeline.spans:
            trainer.timeline.save(trainer.folder / "timeline.json")
        (trainer.folder / "sample.txt").write_text(report.sample)
        (trainer.folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report
