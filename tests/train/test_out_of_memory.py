"""A failed allocation ends in one line."""

import pytest
import torch

from minipar.train.out_of_memory import OutOfMemory, explained

SAYS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(SAYS)]
)
def test_a_failed_allocation_is_explained(error):
    with pytest.raises(OutOfMemory, match="out of memory .* minipar plan --fix"), explained():
        raise error
