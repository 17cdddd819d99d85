"""No rank has the whole model: the memory of each is measured, at sizes where it tells.

A random checkpoint of the shape of Llama-3.2-1B, with fewer layers and words, is written as Hugging
Face does; 4 ranks read it parameter by parameter under `--zero 3`, train three steps and save; 2
ranks go on from there. A rank may hold its part of the state, 16 bytes per parameter over the
number of ranks, and what is in use: four layers (two gathered, and two gradients), or the
embedding. 15 % are for the numbers in between and what the allocator keeps.
"""

from dataclasses import replace

import pytest

from minipar.model import hf
from minipar.model.llama import PRESETS, Llama
from minipar.ranks.launch import Ranks
from minipar.train import trainer
from minipar.train.config import TrainConfig

SHAPE = replace(PRESETS["llama-3.2-1b"], num_layers=6, vocab_size=8192)
BASE = 0.35e9  # bytes of a process that has imported torch


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_each_rank_holds_its_part_and_no_more(monkeypatch, tmp_path):
    """Mutants: a save that gathers everything; a checkpoint that is read whole, then cut."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ranks compute where their memory is measured
    with Ranks(1) as one:
        one.run(_write, str(tmp_path / "model"))
    (tmp_path / "a.txt").write_text("so much text that a few steps need " * 100, encoding="utf-8")
    config = TrainConfig(zero=3, seq_len=16, sample_tokens=2)
    config = replace(config, init=str(tmp_path / "model"), data=str(tmp_path / "a.txt"))
    in_use = 4 * max(4 * SHAPE.num_layer_parameters, SHAPE.vocab_size * SHAPE.hidden_size)
    start = None
    for ranks, steps in ((4, 3), (2, 4)):
        config = replace(config, mesh=f"dp={ranks}", steps=steps, batch_size=ranks)
        folder = str(tmp_path / f"dp={ranks}")
        with Ranks(ranks, timeout=600, sink=None) as pool:
            report = pool.run(trainer.train, config, folder, start)[0]
        start = f"{folder}/checkpoints/step_{steps:06d}"
        limit = BASE + 1.15 * (16 * SHAPE.num_parameters / ranks + in_use)
        assert max(report.peak_memory) <= limit < 16 * SHAPE.num_parameters, report.peak_memory


def _write(folder: str) -> None:
    hf.save(Llama(SHAPE, seed=1), folder)
