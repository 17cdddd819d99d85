"""Train a model in parts, and measure the host memory of each rank: `--zero 3` on the CPU.

    python -m tests.lab.large_model                    # 0.75B parameters, 12 GB of state
    python -m tests.lab.large_model --vocab 8192       # where there is less memory

A random checkpoint of the shape of Llama-3.2-1B, with fewer layers, is written as Hugging Face
does; 4 ranks read it parameter by parameter, train three steps and save, 2 ranks go on from there.
For each rank: its highest resident memory, beside its part of the state, 16 bytes per parameter
over the number of ranks, and what is in use. That is the largest block: the embedding, tied to the
head. It is whole where it computes; its gradient, as large, is there before that of any other,
which is a part of the state. Where the vocabulary is small, it is four layers: two gathered, and
two gradients. 15 % are for the next layer, the numbers in between and what the allocator keeps.
"""

import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import tyro

from minipar.model import hf
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.ranks.launch import Ranks
from minipar.train import trainer
from minipar.train.config import TrainConfig
from minipar.train.report import Report

STATE = 16  # bytes per parameter: weight, gradient and two moments in float32
BASE = 0.35e9  # bytes of a process that has imported torch
RUNS = (4, 3), (2, 4)  # ranks, and the step up to which they train


@dataclass(frozen=True)
class LargeModel:
    """Train a Llama under --zero 3 from a checkpoint, save, and resume on fewer ranks."""

    layers: int = 8
    """Of the 16 that Llama-3.2-1B has."""
    vocab: int = 128_256
    """Tokens that the model knows."""


def expected_bytes(shape: LlamaConfig, ranks: int) -> tuple[float, float]:
    """Return (part of the state, what is in use) of a rank, in bytes: see the head of the file."""
    in_use = max(4 * shape.num_layer_parameters, shape.vocab_size * shape.hidden_size)
    return STATE * shape.num_parameters / ranks, 4 * in_use


def main(argv: list[str] | None = None) -> int:
    """Run it; return 1 if a rank held more than it should, 2 if there is too little memory."""
    asked = tyro.cli(LargeModel, args=argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks compute where their memory is measured
    preset = PRESETS["llama-3.2-1b"]
    shape = replace(preset, num_layers=asked.layers, vocab_size=asked.vocab)
    need = max(n * (sum(expected_bytes(shape, n)) + BASE) for n, _ in RUNS)
    free = psutil.virtual_memory().available
    if need > free:
        print(
            f"minipar: error: {need / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free; "
            f"use a smaller --vocab or fewer --layers",
            file=sys.stderr,
        )
        return 2
    state = STATE * shape.num_parameters
    print(f"{shape.num_parameters / 1e9:.2f}B parameters, {state / 1e9:.1f} GB of state")
    fits, start = True, None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(1) as one:
            one.run(write, shape, str(folder / "model"))
        (folder / "a.txt").write_text("so much text that a few steps need " * 100, encoding="utf-8")
        small = TrainConfig(zero=3, seq_len=16, sample_tokens=2)
        small = replace(small, init=str(folder / "model"), data=str(folder / "a.txt"))
        for ranks, steps in RUNS:
            config = replace(small, mesh=f"dp={ranks}", steps=steps, batch_size=ranks)
            with Ranks(ranks, timeout=600, sink=None) as pool:
                report = pool.run(trainer.train, config, f"{folder}/dp={ranks}", start)[0]
            start = f"{folder}/dp={ranks}/checkpoints/step_{steps:06d}"
            fits = show(report, shape, ranks) and fits
    return int(not fits)


def write(shape: LlamaConfig, folder: str) -> None:
    """Write a random model."""
    hf.save(Llama(shape, seed=1), folder)


def show(report: Report, shape: LlamaConfig, ranks: int) -> bool:
    """Print what ranks held at most; return whether that is within 15 % of what is expected."""
    state, in_use = expected_bytes(shape, ranks)
    limit = 1.15 * (state + in_use) + BASE
    peaks = ", ".join(f"{peak / 1e9:.2f}" for peak in report.peak_memory)
    print(
        f"{ranks} ranks, steps {report.first_step} to {report.steps}, loss {report.last_loss:.3f}\n"
        f"  peak of each {peaks} GB, of which a bare process {BASE / 1e9:.2f}\n"
        f"  1/{ranks} of the state {state / 1e9:.2f} + in use {in_use / 1e9:.2f}, and 15 %, + a "
        f"bare process = {limit / 1e9:.2f} GB; the whole state would be {ranks * state / 1e9:.2f}"
    )
    return max(report.peak_memory) <= limit


if __name__ == "__main__":
    from tests.lab import large_model  # by its name, which the ranks can import, too

    sys.exit(large_model.main())
