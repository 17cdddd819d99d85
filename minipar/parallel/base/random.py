"""Random numbers on several ranks: equal for equal tensors, different for different tensors.

Ranks with the same activations must drop the same ones. Ranks with different activations must not,
or the noise repeats (T22). Our Llama has no dropout; this is for layers of your own::

    dp, cp, pp                   other data on every rank      seed(0, mesh.dp)
    tp, outside of the borders   one residual stream           nothing to do
    tp, inside; ``sequence``     own heads; own tokens         with fork_rng(mesh.tp): ...

Recomputation restores the stream outside of `fork_rng`, and so the stream inside.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), appendix B.2. In torch: DTensor's random ops.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minipar.comm.mesh import Axis


def seed(number: int, *apart: Axis) -> None:
    """Seed this rank; ranks with the same coordinates on all axes of `apart` get the same seed."""
    torch.manual_seed(hash((number, *(axis.rank for axis in apart))))


@contextmanager
def fork_rng(axis: Axis) -> Iterator[None]:
    """Give every rank of `axis` its own random stream in the body; outside, they share one."""
    number = torch.empty((), dtype=torch.int64, device="cpu").random_().item()  # alike on all ranks
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(hash((number, axis.rank)))
        yield
