"""A failed allocation: the error says what the rank held, by category."""

import re
import subprocess
import sys

import pytest
import torch

from minipar.model.llama import Llama
from minipar.train import trainer
from minipar.train.config import TrainConfig
from minipar.train.out_of_memory import OutOfMemory, explained
from tests.elsewhere import environment

SAYS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(SAYS)]
)
def test_a_failed_allocation_is_explained(error):
    says = r"before the first step: of 0\.0\d GB held, all else"
    with pytest.raises(OutOfMemory, match=says), explained():
        raise error


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), explained():
        raise RuntimeError("shapes do not match")


def test_what_a_rank_holds_is_told_by_category(tmp_path, text, monkeypatch):
    """Mutants: gradients or the optimizer's state are left out; what was there before counts."""
    config = TrainConfig(
        mesh="dp=1", preset="small", data=str(text), seq_len=16, batch_size=1, sample_tokens=0
    )
    forward, calls = Llama.forward, []

    def fails(self, *args, **kwargs):
        calls.append(sum(p.nbytes for p in self.parameters()))
        if len(calls) == 2:
            raise RuntimeError(SAYS)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Llama, "forward", fails)
    with pytest.raises(OutOfMemory, match="out of memory in step 2: .* minipar plan --fix") as said:
        trainer.train(config, str(tmp_path))
    found = dict(re.findall(r"(parameters|optimizer|all else) ([\d.]+)", str(said.value)))
    assert float(found["parameters"]) == pytest.approx(calls[0] / 1e9, abs=0.006)
    assert float(found["optimizer"]) == pytest.approx(2 * calls[0] / 1e9, abs=0.006)
    assert float(found["all else"]) < 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_run_out_of_memory_ends_with_a_line(tmp_path, text):
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
    assert "minipar: error: rank 0 of 1 (dp=0): out of memory in step 1: of " in done.stderr
    assert "parameters 0.00" in done.stderr and "minipar plan --fix" in done.stderr
