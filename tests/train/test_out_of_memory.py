"""A failed allocation: what was held is told by category, and noted down once."""

import json
import subprocess
import sys

import pytest
import torch

from minipar.model.llama import Llama
from minipar.observe import memory
from minipar.train import out_of_memory, trainer
from minipar.train.config import TrainConfig
from minipar.train.out_of_memory import OutOfMemory, noted
from tests.elsewhere import environment

SAYS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(SAYS)],
)
def test_a_failed_allocation_is_noted_down_by_the_first_rank_alone(tmp_path, error):
    def fails():
        with noted(tmp_path):
            raise error

    with pytest.raises(OutOfMemory, match="before the first step") as first:
        fails()
    assert first.value.speaks and first.value.folder == tmp_path
    content = json.loads((tmp_path / out_of_memory.FILE).read_text(encoding="utf-8"))
    assert content["held"].keys() == {"all else"} and content["free"] > 0
    assert content["held"]["all else"] < 50e6  # what was there before the run is not held by it
    with pytest.raises(OutOfMemory) as second, noted(tmp_path):
        (tmp_path / out_of_memory.FILE).write_text("another rank's", encoding="utf-8")
        raise error
    assert not second.value.speaks


def test_other_errors_pass(tmp_path):
    with pytest.raises(RuntimeError, match="shapes"), noted(tmp_path):
        raise RuntimeError("shapes do not match")
    assert not list(tmp_path.iterdir())


def test_what_a_rank_holds_is_told_by_category(tmp_path, text, monkeypatch):
    """Mutants: gradients or the optimizer's state are left out; a storage is counted twice."""
    config = TrainConfig(
        mesh="dp=1",
        data=str(text),
        seq_len=16,
        batch_size=4,
        sample_tokens=0,
        eval_batches=1,
        steps=3,
    )
    forward, calls = Llama.forward, []

    def fails(self, *args, **kwargs):
        calls.append(sum(p.numel() for p in self.parameters()))
        if len(calls) == 2:
            raise RuntimeError(SAYS)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Llama, "forward", fails)
    monkeypatch.setattr(memory, "tags", type(memory.tags)())  # without those of other tests
    with pytest.raises(OutOfMemory, match=r"out of memory in step 2: of .* GB held, .*optimizer"):
        trainer.train(config, str(tmp_path))
    held = json.loads((tmp_path / out_of_memory.FILE).read_text(encoding="utf-8"))["held"]
    assert held["parameters"] == 4 * calls[0]
    assert held["optimizer"] == pytest.approx(8 * calls[0], rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_run_out_of_memory_ends_with_a_page(tmp_path, text):
    """A real limit, at which the activations of a step fail."""
    typed = "train --mesh dp=1 --seq-len 256 --batch-size 1024 --preset tiny --sample-tokens 0"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 3000000 && exec "$@"', "bash", sys.executable, "-m", "minipar"]
        + [*typed.split(), "--data", str(text), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(),
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "minipar: error: rank 0 of 1 (dp=0): out of memory in step 1" in done.stderr
    assert "held at that moment, in GB:" in done.stderr and "    minipar train " in done.stderr
    assert "--microbatches" in done.stderr and str(tmp_path) in done.stderr
