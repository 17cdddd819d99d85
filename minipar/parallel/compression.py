"""Compression: send less than the gradients, and remember what was left out.

Idea.   A gradient is noisy: 8 bits, one bit, one entry in a hundred or a matrix of rank 4 suffice.
        Each rank adds the part that it did not send (the *residue*) to its gradient of the next
        step. Then no part is lost, only late: *error feedback*.
Math.   On rank r, with gradient g_r and residue e_r: v_r = w g_r + e_r (w = 1/n to average, else
        1), and s_r of it is sent; e_r <- v_r - s_r; every rank gets g = sum_r s_r. Invariant:
        g + sum_r e_r after the step = sum_r (w g_r + e_r before it), whatever the compressor.
Shapes. Buckets of N numbers, P@dp -> R@dp; bit for bit the same result on all ranks.
Comms.  Bytes that a rank sends per bucket of N numbers, n ranks (c: as a fraction of 4 N bytes):

          uncompressed   2 (n-1)/n 4 N
          codec          2 (n-1)/n c 4 N   c = 1/4 + 1/b int8; 1/32 + 1/b sign
          top-k          (n-1) 8 k         k = fraction N: a number and its place
          PowerSGD       2 (n-1)/n 4 (r sum (rows + columns) + what is no matrix worth it)

        with one scale of 4 bytes per block of b numbers.
Sums.   An all-reduce can add numbers, but not codes: int8 would overflow, and blocks differ in
        scale. So a codec gathers all vectors (n-1 of them arrive), or rank r gets chunk r of every
        rank, decompresses, adds in float32, compresses the sum and sends the sum to all: 2 (n-1)/n
        vectors, one rounding more. On two ranks both cost the same; there, a codec gathers.
        PowerSGD sends numbers that are linear in the gradient: an all-reduce adds them.
Memory. One residue of 4 bytes per parameter with feedback; a pair of thin matrices for PowerSGD.
Costs you. Accuracy: see each class. Time to compress, in a thread beside backward. A loss scale
        must not change from step to step. A checkpoint holds no residues. Use compression over dp
        alone: a thread launches the calls, and NCCL wants one order among the calls of all groups.
Source. Error feedback: Seide et al. 2014; Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
        QSGD: 1610.02132. Sign: 1802.04434. Top-k: 1712.01887 (without its momentum correction).
        PowerSGD: 1905.13727, algorithm 1. Feedback after the sum: 1905.05957.
In torch: `torch.distributed.algorithms.ddp_comm_hooks`.
Proved by tests/parallel/test_compression.py and tests/law/test_law.py.

Use: ``ddp.apply(model, mesh.dp, reduce=Compressed(TopK(0.01)))``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.background import Background
from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_gather, all_reduce, all_to_all
from minipar.comm.mesh import Axis
from minipar.parallel.base.shards import split_like


class Compressor:
    """A way to add up vectors over all ranks. It has state, so each strategy needs its own."""

    def reduce(self, vector: Tensor, axis: Axis, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the sum of the parts that ranks sent; `vector` becomes the part not sent.

        `vector` [N] holds the gradients of `parameters` one after the other, in float32 or float64.
        All ranks get the same sum, to the bit.
        """
        raise NotImplementedError


# ---------------------------------------------------------------------- codes
class Codec(Compressor):
    """compress -> bytes on the wire -> decompress; the number of bytes depends on N alone.

    A subclass has two methods. ``compress(rows)`` returns bytes for C vectors, [C, N] -> [C, W]
    uint8; each row can be decompressed alone. ``decompress(wire, length, dtype)`` returns the
    approximate vectors [C, N].
    """

    sparse = False  # a sum of n vectors has n times the bytes of one

    def reduce(self, vector: Tensor, axis: Axis, parameters: Sequence[nn.Parameter]) -> Tensor:
        if axis.size == 2 or self.sparse:
            return self._gather_and_add(vector, axis)
        length, dtype = len(vector), vector.dtype
        rows = F.pad(vector, (0, -length % axis.size)).view(axis.size, -1)  # row r is for rank r
        wire = self.compress(rows)
        mine = self.decompress(all_to_all(wire, axis), rows.shape[1], dtype).sum(0)  # [N/n]
        rows -= self.decompress(wire, rows.shape[1], dtype)  # what was not sent
        wire = self.compress(mine[None])
        total = self.decompress(all_gather(wire, axis), len(mine), dtype)  # [n, N/n]
        # The sum is rounded, too. The rank that rounds a part of the sum keeps the error.
        rows[axis.rank] += mine - total[axis.rank]
        vector.copy_(rows.flatten()[:length])
        return total.flatten()[:length]

    def _gather_and_add(self, vector: Tensor, axis: Axis) -> Tensor:
        total, wires = torch.zeros_like(vector), all_gather(self.compress(vector[None]), axis)
        for rank, wire in enumerate(wires.split(1)):  # in one order on all ranks
            sent = self.decompress(wire, len(vector), vector.dtype)[0]
            total += sent
            if rank == axis.rank:
                vector -= sent
        return total


@dataclass
class Int8(Codec):
    """255 even steps between the largest number of a block and its negative.

    The `block` numbers of a block share a scale of 4 bytes. An outlier can round the others of its
    block to zero: in a small block, these are few.
    """

    block: int = 256

    def scale_of(self, blocks: Tensor) -> Tensor:
        """Return a scale for each block: [C, N/b, b] -> [C, N/b, 1]."""
        return blocks.abs().amax(-1, keepdim=True) / 127

    def encode(self, ratios: Tensor) -> Tensor:
        """Return numbers divided by their scale, [C, N], as codes of one byte."""
        return ratios.round().clamp(-127, 127).to(torch.int8)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        """Return the numbers [C, N] that the bytes of `encode` stand for."""
        return codes.view(torch.int8)

    def compress(self, rows: Tensor) -> Tensor:
        blocks = _blocks(rows, self.block)
        scale = self.scale_of(blocks).float()
        ratios = blocks / torch.where(scale == 0, 1, scale)  # nan stays nan, to show an overflow
        return _pack(scale.squeeze(-1), self.encode(ratios.flatten(1)[:, : rows.shape[1]]))

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        head = 4 * math.ceil(length / self.block)
        scale = _unpack(wire[:, :head], torch.float32)[..., None]  # [C, N/b, 1]
        ratios = self.decode(wire[:, head:], length).to(dtype)
        return (_blocks(ratios, self.block) * scale).flatten(1)[:, :length]


@dataclass
class Sign(Int8):
    """One bit: every number of a block becomes plus or minus the block's mean magnitude.

    Blocks and scales are those of `Int8`. Without feedback it need not converge (1901.09847,
    section 3); with feedback it does.
    """

    def scale_of(self, blocks: Tensor) -> Tensor:
        return blocks.abs().mean(-1, keepdim=True)

    def encode(self, ratios: Tensor) -> Tensor:
        bits = F.pad(ratios >= 0, (0, -ratios.shape[1] % 8)).unflatten(1, (-1, 8))
        return (bits.to(torch.uint8) << _bit_numbers(bits)).sum(-1).to(torch.uint8)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        bits = (codes[..., None] >> _bit_numbers(codes)) & 1
        return bits.flatten(1)[:, :length].to(torch.int8) * 2 - 1


@dataclass
class TopK(Codec):
    """The largest `fraction` of the numbers (at least one) with their places; no others.

    Every rank has other places, so no rank can add vectors and send the sum: bytes grow with n-1.
    """

    fraction: float = 0.01
    sparse = True

    def compress(self, rows: Tensor) -> Tensor:
        k = math.ceil(self.fraction * rows.shape[1])
        places = rows.abs().topk(k, dim=1, sorted=False).indices
        return _pack(rows.gather(1, places), places.int())

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        k = math.ceil(self.fraction * length)
        values, places = wire.split([dtype.itemsize * k, 4 * k], dim=1)
        values, places = _unpack(values, dtype), _unpack(places, torch.int32).long()
        return values.new_zeros(len(wire), length).scatter_(1, places, values)


# ---------------------------------------------------------------------- linear in the gradient
@dataclass
class PowerSGD(Compressor):
    """Gradients of matrices as products of two thin ones: M [R, C] -> P [R, r] Q^T [r, C].

    One step of the power iteration approximates the r main directions, from the last step's Q (a
    warm start): P = sum_r M_r Q; make P orthonormal; Q = sum_r M_r^T P. Both sums are linear, so
    all-reduces compute them. The result is a projection of the *sum* of the gradients. Vectors, and
    matrices that would not shrink to half, are sent uncompressed.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        self.starts: dict[nn.Parameter, Tensor] = {}  # Q of the last step
        self.generator: torch.Generator | None = None  # with the same seed on all ranks

    def compresses(self, shape: Sequence[int]) -> bool:
        """True if gradients of this shape are sent as P and Q."""
        return len(shape) == 2 and 2 * self.rank * sum(shape) < math.prod(shape)

    def reduce(self, vector: Tensor, axis: Axis, parameters: Sequence[nn.Parameter]) -> Tensor:
        self.generator = self.generator or torch.Generator(vector.device).manual_seed(0)
        total = torch.empty_like(vector)
        sums, grads = split_like(total, parameters), split_like(vector, parameters)
        matrices = {p: grad for p, grad in grads.items() if self.compresses(p.shape)}
        rest = [p for p in parameters if p not in matrices]
        for parameter, added in zip(rest, _add_all([grads[p] for p in rest], axis), strict=True):
            sums[parameter].copy_(added)
            grads[parameter].zero_()

        ps = _add_all([m @ self._start(p, m) for p, m in matrices.items()], axis)
        # Householder's method. The paper's Gram-Schmidt fails if columns depend on each other, as
        # columns from a gradient of lower rank do.
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = _add_all([m.mT @ p for m, p in zip(matrices.values(), ps, strict=True)], axis)
        for (parameter, matrix), p, q in zip(matrices.items(), ps, qs, strict=True):
            sent = torch.matmul(p, q.mT, out=sums[parameter])
            matrix -= sent / axis.size  # a rank's residue is its distance to the mean that was sent
            self.starts[parameter] = q
        return total

    def _start(self, parameter: nn.Parameter, matrix: Tensor) -> Tensor:
        """Return the Q of the last step, or a random Q: equal on all ranks."""
        fresh = matrix.new_empty(matrix.shape[1], self.rank).normal_(generator=self.generator)
        q = self.starts.get(parameter, fresh)
        # Zeros or nan in one step must not stay for ever.
        return torch.where(q.isfinite().all() & q.any(), q, fresh)


def _add_all(tensors: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Return the sums over all ranks of several tensors, by one all-reduce."""
    if not tensors:
        return []
    flat = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis)
    return [*split_like(flat, tensors).values()]


# ---------------------------------------------------------------------- error feedback, under ddp
class Compressed:
    """Reduces buckets through a compressor: ``ddp.apply(..., reduce=Compressed(TopK(0.01)))``.

    Args:
        compressor: each strategy needs its own.
        error_feedback: keep the part of each bucket that was not sent, and send it later.

    A thread works on one bucket after the other, in the order of the calls, while backward goes on.
    From the first bucket to `finish_backward`, nothing else may use the axis.
    """

    def __init__(self, compressor: Compressor, *, error_feedback: bool = True) -> None:
        self.compressor, self.feedback = compressor, error_feedback
        self.residues: dict[Any, Tensor] = {}  # of this rank, by bucket
        self._latest: Background | None = None

    def __call__(self, bucket: Any, axis: Axis, op: Op) -> Pending:
        """Start to reduce a bucket of ddp in place: its `flat` [N], by its `parameters`."""
        if axis.size == 1:
            return all_reduce(bucket.flat, axis, op, out=bucket.flat, async_op=True)
        work = partial(self._reduce, bucket, axis, 1 / axis.size if op == "avg" else 1.0)
        self._latest = Background(work, self._latest, bucket.flat.device, "compression")
        return Pending(self._latest, bucket.flat)

    @torch.no_grad()
    def _reduce(self, bucket: Any, axis: Axis, weight: float) -> None:
        flat = bucket.flat
        vector = weight * flat.to(torch.promote_types(flat.dtype, torch.float32))
        vector += self.residues.get(bucket, 0)
        flat.copy_(self.compressor.reduce(vector, axis, bucket.parameters))
        if self.feedback:
            # The trainer skips or reports a step with an overflow. Later steps must be finite.
            self.residues[bucket] = vector.nan_to_num_(nan=0, posinf=0, neginf=0)


# ---------------------------------------------------------------------- helpers
def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _blocks(rows: Tensor, size: int) -> Tensor:
    """Cut [C, N] into blocks [C, N/b, b] of one length, with few zeros at the end."""
    length = rows.shape[1]
    count = math.ceil(length / size)
    width = math.ceil(length / count)
    return F.pad(rows, (0, count * width - length)).unflatten(1, (count, width))


def _pack(*parts: Tensor) -> Tensor:
    """Join the bytes of several [C, ...], one after the other: [C, W]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Read [C, W] bytes as numbers of `dtype`; a copy, because numbers need aligned addresses."""
    return wire.clone(memory_format=torch.contiguous_format).view(dtype)
