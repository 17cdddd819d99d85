"""Random numbers on several ranks: the same where tensors are the same, others where they differ.

Idea.   Ranks with the same activations must drop the same ones. Ranks with different activations
        must not, or the noise repeats (T22). `seed` starts torch's stream of random numbers alike
        on ranks that compute alike. `fork_rng` steps aside into a stream of this rank's own.
Math.   A stream inside `fork_rng` begins at hash(s, r), with s the next number of the stream
        outside and r the rank. Recomputation restores the stream outside, and so both.
Where.  Each type of tensor along an axis (comm/autograd.py) has its stream:

          dp, cp, pp                       other data on every rank           ``seed(0, mesh.dp)``
          tp, outside of the borders, I    residual stream: one mask for all  nothing
          tp, inside, V                    heads, hidden units                ``fork_rng(mesh.tp)``
          tp, ``sequence``, outside, V     residual stream, cut along tokens  ``fork_rng(mesh.tp)``

Comms.  None. Masks inside of borders depend on the number of ranks.
Source. Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), appendix B.2, which keeps both
        streams. In torch: DTensor's random ops.
Proved by tests/parallel/test_random.py. Our Llama has no dropout: this is for layers of your own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from minipar.comm.mesh import Axis


def seed(number: int, *apart: Axis) -> None:
    """Start this rank's stream: the same one on ranks with the same place on all axes `apart`.

    ``seed(0, mesh.dp, mesh.cp)`` gives the ranks of `tp` one stream, and other data another.
    """
    torch.manual_seed(_hash(number, *(axis.rank for axis in apart)))


@contextmanager
def fork_rng(axis: Axis) -> Iterator[None]:
    """Give every rank of `axis` a random stream of its own in the body; outside, all draw alike.

    Draws one number from the stream outside, however many ranks there are.
    """
    # On the host, whatever the default device: one that works ahead need not be waited for.
    number = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(_hash(number, axis.rank))
        yield


def _hash(*numbers: int) -> int:
    """Return a seed for `numbers`; a sum would give (seed 0, rank 1) the stream of (1, 0)."""
    digest = blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
