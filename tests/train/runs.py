"""What is looked at of the folder of a run: lines of its metrics, and its checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from minipar.train import checkpoint
from minipar.train.metrics import read
from minipar.train.saver import Saver

SAME = "step", "loss", "lr", "grad_norm", "tokens"
"""Of each step, what two runs that do the same agree on."""


def lines_of(folder: Path, *keys: str) -> list[tuple]:
    """Return these values of each step."""
    return [tuple(line[key] for key in keys) for line in read(folder / "metrics.jsonl")]


def saved(folder: Path, step: int) -> tuple[dict, dict]:
    """Return weights and state of a checkpoint."""
    return checkpoint.load(folder / f"checkpoints/step_{step:06d}")


def report_of(folder: Path) -> dict:
    text = (folder / "report.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=pytest.fail)


def assert_same_run(found: Path, expected: Path, first: int = 0, rtol: float = 1e-10) -> None:
    """Hold the steps of a run against those of another, from number `first` on."""
    ours, theirs = lines_of(found, *SAME), lines_of(expected, *SAME)[first:]
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=rtol), mine[0]


def save(folder: Path, step: int, weights: dict, state: dict, keep: int = 2) -> None:
    """Write a checkpoint by this process alone."""
    Saver(folder, keep=keep).save(step, weights, state)


def some(step: int) -> tuple[dict, dict]:
    """Weights and state, equal on all ranks, from which one can tell the step that they are of."""
    weights = {f"w{i}": torch.full((40, i), float(step + i)) for i in range(1, 7)}
    moments = {
        name: {"exp_avg": w + 0.5, "step": torch.tensor(step)} for name, w in weights.items()
    }
    return {**weights, "tied": weights["w2"]}, {"step": step, "optimizer": moments}


def assert_is(folder: Path, step: int) -> None:
    (weights, state), (expected, _) = checkpoint.load(folder), some(step)
    assert state["step"] == step == checkpoint.step_of(folder)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].equal(weight)
        moments = state["optimizer"].get(name, state["optimizer"]["w2"])
        assert moments["exp_avg"].equal(weight + 0.5) and moments["step"] == step
    assert weights["tied"].equal(weights["w2"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
