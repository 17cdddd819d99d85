"""Train a model in parts, and measure the host memory of each rank: `--zero 3` on the CPU.

    python -m minipar.lab.large_model                    # 0.75B parameters, 12 GB of state
    python -m minipar.lab.large_model --vocab 8192       # where there is less memory

A random checkpoint of the shape of Llama-3.2-1B, with fewer layers, is written as Hugging Face
does; 4 ranks read it shard by shard, train three steps and save, 2 ranks go on from there. For each
rank: its highest resident memory, beside its part of the state (16 bytes per parameter over the
number of ranks) and the largest unit that is gathered, which is the embedding with the head: its
weights, and at the end of backward the gradients of both of its uses.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import tyro

from minipar.comm.launch import Ranks
from minipar.model import hf
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.train import trainer
from minipar.train.config import TrainConfig
from minipar.train.report import Report

STATE = 16  # bytes per parameter: weight, gradient and two moments in float32
BASE = 0.35e9  # bytes of a process that has imported torch


@dataclass(frozen=True)
class LargeModel:
    """Train a Llama under --zero 3 from a checkpoint, save, and resume on fewer ranks."""

    layers: int = 8
    """Of the 16 that Llama-3.2-1B has."""
    vocab: int = 128_256
    """Tokens that the model knows."""
    ranks: int = 4
    """That train first; half as many go on."""
    steps: int = 3
    """Before the save; one more after it."""

    def shape(self) -> LlamaConfig:
        """Return the shape of the model."""
        preset = PRESETS["llama-3.2-1b"]
        return replace(preset, num_layers=self.layers, vocab_size=self.vocab)


def expected_bytes(shape: LlamaConfig, ranks: int) -> tuple[float, float]:
    """Return (part of the state, largest unit) of a rank, in bytes: see the head of the file."""
    table = 4 * shape.vocab_size * shape.hidden_size
    return STATE * shape.num_parameters / ranks, 3 * table


def main(argv: list[str] | None = None) -> int:
    """Run it; return 1 if a rank held more than it should, 2 if there is too little memory."""
    asked = tyro.cli(LargeModel, args=argv)
    shape, groups = asked.shape(), (asked.ranks, max(asked.ranks // 2, 1))
    need = max(n * (sum(expected_bytes(shape, n)) + BASE) for n in groups)
    free = psutil.virtual_memory().available
    if need > free:
        print(
            f"minipar: error: {need / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free; "
            f"use a smaller --vocab or fewer --layers",
            file=sys.stderr,
        )
        return 2
    size = f"{shape.num_parameters / 1e9:.2f}B parameters"
    print(f"{size}, {STATE * shape.num_parameters / 1e9:.1f} GB of state")
    fits, start = True, None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(1) as one:
            one.run(write, shape, str(folder / "model"))
        for ranks, steps in zip(groups, (asked.steps, asked.steps + 1), strict=True):
            config = TrainConfig(
                mesh=f"dp={ranks}",
                zero=3,
                init=str(folder / "model"),
                data=str(Path(trainer.__file__).parent),
                steps=steps,
                batch_size=ranks,
                seq_len=16,
                eval_batches=1,
                sample_tokens=2,
            )
            with Ranks(ranks, timeout=600, sink=None) as pool:
                report = pool.run(run, config, str(folder / f"dp={ranks}"), start)[0]
            start = str(folder / f"dp={ranks}/checkpoints/step_{steps:06d}")
            fits = show(report, shape, ranks) and fits
    return int(not fits)


def write(shape: LlamaConfig, folder: str) -> None:
    """Write a random model, in shards."""
    hf.save(Llama(shape, seed=1), folder, max_shard_bytes=10**9)


def run(config: TrainConfig, folder: str, start: str | None) -> Report | None:
    """Train as `minipar train` does. Called on every rank."""
    return trainer.train(config, folder, start)


def show(report: Report, shape: LlamaConfig, ranks: int) -> bool:
    """Print what ranks held at most; return whether that is within 15 % of what is expected."""
    state, unit = expected_bytes(shape, ranks)
    limit = 1.15 * (state + unit)
    peaks = ", ".join(f"{peak / 1e9:.2f}" for peak in report.peak_memory)
    print(
        f"{ranks} ranks: peak {peaks} GB; a {ranks}th of the state {state / 1e9:.2f} GB + the "
        f"largest unit {unit / 1e9:.2f} GB + 15 % = {limit / 1e9:.2f} GB; "
        f"steps {report.first_step} to {report.steps}, loss {report.last_loss:.3f}"
    )
    return max(report.peak_memory) <= limit


if __name__ == "__main__":
    from minipar.lab import large_model  # by its name, which the ranks can import, too

    sys.exit(large_model.main())
