"""Vectors as bytes: compress, gather, decompress and add in float32, since a link adds no codes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import all_gather, all_to_all
from minipar.comm.mesh import Axis
from minipar.parallel.compression.compressor import Compressor, Reduced, check, make_generator


@dataclass
class Codec(Compressor):
    """compress -> bytes on the wire -> decompress; the number of bytes depends on N alone."""

    sparse = False  # bytes of a sum of n vectors are n times those of one

    def compress(self, rows: Tensor) -> Tensor:
        """Return bytes for each of C vectors, each to be read alone: [C, N] -> [C, W] uint8."""
        raise NotImplementedError

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return what the bytes stand for: [C, W] uint8 -> [C, N]."""
        raise NotImplementedError

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        if axis.size == 2 or self.sparse:
            return self._gather_and_add(vector, axis, weight)
        size, length = axis.size, len(vector)
        rows = F.pad(vector, (0, -length % size)).view(size, -1)  # [n, N/n]
        mine, residue = self.reduce_scatter(rows, axis)
        mine = mine * weight
        wire = self.compress(mine[None])
        total = self.decompress(all_gather(wire, axis), len(mine), vector.dtype)  # [n, N/n]
        # The error of this second rounding is in the sum of all ranks; who made it keeps it.
        residue[axis.rank] += (mine - total[axis.rank]) / weight
        return total.flatten()[:length], residue.flatten()[:length]

    def reduce_scatter(self, rows: Tensor, axis: Axis) -> Reduced:
        """Return the sum of the r-th rows of all ranks on rank r, and the residue: [n, N] -> [N].

        The half that a strategy needs which shards its gradients.
        """
        self._draw_apart(axis, rows.device)
        wire = self.compress(rows)
        residue = rows - self.decompress(wire, rows.shape[1], rows.dtype)
        arrived = all_to_all(wire, axis)  # row s: my chunk, from rank s
        return self.decompress(arrived, rows.shape[1], rows.dtype).sum(0), residue

    def _gather_and_add(self, vector: Tensor, axis: Axis, weight: float) -> Reduced:
        self._draw_apart(axis, vector.device)
        wire = self.compress(vector[None])
        total, sent = torch.zeros_like(vector), None
        for rank, row in enumerate(all_gather(wire, axis).split(1)):  # in one order on all ranks
            vector_of_rank = self.decompress(row, len(vector), vector.dtype)[0]
            total += vector_of_rank
            sent = vector_of_rank if rank == axis.rank else sent
        return total * weight, vector - sent

    def _draw_apart(self, axis: Axis, device: torch.device) -> None:
        """Random numbers of this rank's own: errors of stochastic rounding should cancel out."""
        self.generator = self.generator or make_generator(device, axis.rank)


@dataclass
class Half(Codec):
    """bf16 or fp16: half the bytes. fp16 has 3 bits more, and neither below 6e-8 nor above 65504.

    Sums are taken in float32, unlike where a network adds halves.
    """

    dtype: torch.dtype = torch.bfloat16
    feedback = False

    def __post_init__(self) -> None:
        check(self.dtype in (torch.float16, torch.bfloat16), "dtype", self.dtype, "float16")

    def compress(self, rows: Tensor) -> Tensor:
        return _pack(rows.to(self.dtype))

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return _unpack(wire, self.dtype).to(dtype)


@dataclass
class _Scaled(Codec):
    """Numbers as small codes, times a scale for each block of `block` (None: one for all).

    A small block keeps an outlier from silencing many others, at 4 bytes per scale.
    """

    block: int | None = 256

    def __post_init__(self) -> None:
        check(self.block is None or self.block >= 1, "block", self.block, "64 to 1024, or None")

    def scale_of(self, blocks: Tensor) -> Tensor:
        """[C, N/b, b] -> [C, N/b, 1]."""
        raise NotImplementedError

    def encode(self, ratios: Tensor) -> Tensor:
        """Numbers of the order of their scale, [C, N], as codes of one byte."""
        raise NotImplementedError

    def decode(self, codes: Tensor, length: int) -> Tensor:
        """The inverse, [C, N], of bytes."""
        raise NotImplementedError

    def compress(self, rows: Tensor) -> Tensor:
        blocks = _blocks(rows, self.block)
        scale = self.scale_of(blocks).float()
        ratios = blocks / torch.where(scale == 0, 1, scale)  # nan stays: not to hide an overflow
        return _pack(scale.squeeze(-1), self.encode(ratios.flatten(1)[:, : rows.shape[1]]))

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        head = 4 * (math.ceil(length / self.block) if self.block else 1)
        scale = _unpack(wire[:, :head], torch.float32)[..., None]  # [C, N/b, 1]
        ratios = self.decode(wire[:, head:], length).to(dtype)
        return (_blocks(ratios, self.block) * scale).flatten(1)[:, :length]


@dataclass
class Int8(_Scaled):
    """255 even steps between the largest number of a block and its negative.

    `stochastic` rounds up with a probability that makes the mean right (QSGD, section 3.1): no
    bias, hence no feedback, but up to twice the error.
    """

    stochastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.feedback = not self.stochastic

    def scale_of(self, blocks: Tensor) -> Tensor:
        return blocks.abs().amax(-1, keepdim=True) / 127

    def encode(self, ratios: Tensor) -> Tensor:
        if self.stochastic:
            ratios = (ratios + _uniform(ratios, self.generator)).floor()
        return ratios.round().clamp(-127, 127).to(torch.int8)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        return _unpack(codes, torch.int8)


FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass
class Fp8(_Scaled):
    """Floating point in a byte: "e4m3" (3 bits of mantissa) or "e5m2" (2, and a wider range).

    Steps shrink with the number, so small ones in a block survive better than with int8, and large
    ones worse. The largest of a block becomes the largest of the format (2209.05433, section 3).
    """

    kind: str = "e4m3"
    stochastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.kind in FP8, "kind", self.kind, " or ".join(FP8))
        self.dtype, self.feedback = FP8[self.kind], not self.stochastic

    def scale_of(self, blocks: Tensor) -> Tensor:
        return blocks.abs().amax(-1, keepdim=True) / torch.finfo(self.dtype).max

    def encode(self, ratios: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        if self.stochastic:
            exponent = torch.frexp(ratios.clamp(-info.max, info.max))[1] - 1  # of the leading bit
            lowest = round(math.log2(info.smallest_normal))
            step = torch.exp2(exponent.clamp(min=lowest)) * info.eps  # to the next code
            ratios = (ratios / step + _uniform(ratios, self.generator)).floor() * step
        return ratios.clamp(-info.max, info.max).to(self.dtype)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        return _unpack(codes, self.dtype)


@dataclass
class Sign(_Scaled):
    """One bit: every number of a block becomes plus or minus the block's mean magnitude.

    Without feedback it need not converge (1901.09847, section 3); with feedback it does.
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
    """The largest `fraction` of the numbers (at least one) with their places; the rest waits.

    Every rank has other places, so nothing can be added on the way: bytes grow with n-1.
    """

    fraction: float = 0.01
    sparse = True

    def __post_init__(self) -> None:
        check(0 < self.fraction <= 1, "fraction", self.fraction, "above 0 and at most 1")

    def compress(self, rows: Tensor) -> Tensor:
        k = math.ceil(self.fraction * rows.shape[1])
        places = rows.abs().topk(k, dim=1, sorted=False).indices
        return _pack(rows.gather(1, places), places.int())

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        k = math.ceil(self.fraction * length)
        values, places = wire.split([dtype.itemsize * k, 4 * k], dim=1)
        values, places = _unpack(values, dtype), _unpack(places, torch.int32).long()
        return values.new_zeros(len(wire), length).scatter_(1, places, values)


# ---------------------------------------------------------------------- helpers
def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _blocks(rows: Tensor, size: int | None) -> Tensor:
    """[C, N] -> [C, N/b, b] with as few zeros at the end as blocks of one length allow."""
    length = rows.shape[1]
    count = math.ceil(length / size) if size else 1
    width = math.ceil(length / count)
    return F.pad(rows, (0, count * width - length)).unflatten(1, (count, width))


def _pack(*parts: Tensor) -> Tensor:
    """The bytes of several [C, ...], one after the other: [C, W]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, W] bytes as numbers of `dtype`; copied, because these must lie on even addresses."""
    return wire.clone(memory_format=torch.contiguous_format).view(dtype)
