"""A failed allocation ends in one line."""

import subprocess
import sys

import pytest
import torch

from minipar.train.out_of_memory import OutOfMemory, explained
from tests.elsewhere import environment

SAYS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(SAYS)]
)
def test_a_failed_allocation_is_explained(error):
    with pytest.raises(OutOfMemory, match="out of memory .* minipar plan --fix"), explained():
        raise error


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), explained():
        raise RuntimeError("shapes do not match")


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
    assert "minipar: error: rank 0 of 1 (dp=0): out of memory (" in done.stderr
    assert "minipar plan --fix" in done.stderr
