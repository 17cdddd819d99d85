"""Compression: send less than the gradients, and remember what was left out.

Idea.   A gradient is noisy: 8 bits, one bit, one entry in a hundred or a matrix of rank 4 will do,
        if what a step leaves out (the *residue*) is added to the gradient of the next one. Nothing
        is lost then, it only comes later: *error feedback*.
Math.   On rank r, with gradient g_r and residue e_r: v_r = g_r + e_r, of which s_r is sent;
        e_r <- v_r - s_r; every rank gets g = w sum_r s_r (w = 1/n to average, else 1). Invariant:
        g / w + sum_r e_r after the step = sum_r (g_r + e_r before it), whatever the compressor.
Shapes. Buckets of N numbers, P@dp -> R@dp; bit for bit the same result on all ranks.
Comms.  Bytes that a rank sends per bucket of N numbers, n ranks (c: as a fraction of 4 N bytes):

          uncompressed   2 (n-1)/n 4 N
          codec          2 (n-1)/n c 4 N   c = 1/2 fp16, bf16; 1/4 + 1/b int8, fp8; 1/32 + 1/b sign
          top-k          (n-1) 8 k         k = fraction N: a number and its place
          random-k       2 (n-1)/n 4 k     the places follow from a seed that all ranks share
          PowerSGD       2 (n-1)/n 4 (r sum (rows + columns) + what is no matrix worth it)

        with one scale of 4 bytes per block of b numbers. For each parameter a number on top, of how
        many ranks used it: that is always exact.
Sums.   A link can add numbers, but not codes: int8 would overflow, and blocks differ in scale.
        So a codec either gathers all vectors (n-1 of them arrive), or each rank gets one chunk
        from every rank, decompresses, adds in float32, compresses the sum and hands that out: 2
        (n-1)/n vectors, one rounding more. On two ranks that is no fewer bytes, so they gather.
        What random-k and PowerSGD send is linear in the gradient: an all-reduce adds it up.
Memory. One residue of 4 bytes per parameter with feedback; a pair of thin matrices for PowerSGD.
Costs you. Accuracy: see each class. Time to compress, in a thread beside backward. Gradients have
        to mean the same from step to step (unscale them *before* if a loss scale may change). What
        was kept back for a parameter that no rank uses in the step is lost. A checkpoint holds the
        residues of all ranks (`Compressed.state_dict`), n times the size of the model.
Source. Error feedback: Seide et al. 2014; Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
        QSGD: 1610.02132. Sign: 1802.04434. Top-k: 1712.01887 (without its momentum correction).
        fp8: 2209.05433. PowerSGD: 1905.13727, algorithm 1. Feedback after the sum: 1905.05957.
In torch: `torch.distributed.algorithms.ddp_comm_hooks`.
Proved by tests/parallel/test_compression.py and tests/parity/test_compression.py.

Use: ``ddp.apply(model, mesh.dp, reduce=Compressed(TopK(0.01), warmup_steps=100))``.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import Op, Pending, all_gather, all_reduce, all_to_all
from minipar.comm.mesh import Axis

Reduced = tuple[Tensor, Tensor]  # w sum_r s_r, the same on all ranks; and this rank's residue


class Compressor:
    """A way to add up vectors over all ranks with fewer bytes.

    Keeps state (random numbers, warm starts): every strategy needs one of its own.
    """

    feedback = True
    """Whether residues are kept unless the user says otherwise: where the error has a bias."""
    generator = None
    """Random numbers, from the first call on."""

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        """Return ``weight * sum`` over ranks of what was sent of `vector`, and what was not.

        `vector` [N] holds the gradients of `parameters` one after the other, in float32 or float64.
        """
        raise NotImplementedError

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Return what the next call depends on besides its arguments, by the `names` given."""
        return {"generator": self.generator and self.generator.get_state()}

    def load_state_dict(
        self, state: dict[str, Any], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Go on from what `state_dict` returned."""
        if state["generator"] is not None:
            self.generator = _generator(next(iter(parameters.values())).device, seed=0)
            self.generator.set_state(state["generator"])


# ---------------------------------------------------------------------- 1. vectors as bytes
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
        self.generator = self.generator or _generator(device, axis.rank)


@dataclass
class Half(Codec):
    """bf16 or fp16: half the bytes. fp16 has 3 bits more, and neither below 6e-8 nor above 65504.

    Sums are taken in float32, unlike where a network adds halves.
    """

    dtype: torch.dtype = torch.bfloat16
    feedback = False

    def __post_init__(self) -> None:
        _check(self.dtype in (torch.float16, torch.bfloat16), "dtype", self.dtype, "float16")

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
        _check(self.block is None or self.block >= 1, "block", self.block, "64 to 1024, or None")

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
        _check(self.kind in FP8, "kind", self.kind, " or ".join(FP8))
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
        _check(0 < self.fraction <= 1, "fraction", self.fraction, "above 0 and at most 1")

    def compress(self, rows: Tensor) -> Tensor:
        k = math.ceil(self.fraction * rows.shape[1])
        places = rows.abs().topk(k, dim=1, sorted=False).indices
        return _pack(rows.gather(1, places), places.int())

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        k = math.ceil(self.fraction * length)
        values, places = wire.split([dtype.itemsize * k, 4 * k], dim=1)
        values, places = _unpack(values, dtype), _unpack(places, torch.int32).long()
        return values.new_zeros(len(wire), length).scatter_(1, places, values)


# ---------------------------------------------------------------------- 2. what a link can add up
@dataclass
class RandomK(Compressor):
    """The same random `fraction` of the numbers on all ranks: no places are sent, sums are easy.

    `unbiased` multiplies by 1/fraction, so that the mean is right without feedback; the variance
    grows as much.
    """

    fraction: float = 0.01
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check(0 < self.fraction <= 1, "fraction", self.fraction, "above 0 and at most 1")
        self.feedback = not self.unbiased

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        self.generator = self.generator or _generator(vector.device, self.seed)
        k = math.ceil(self.fraction * len(vector))
        order = torch.randperm(len(vector), generator=self.generator, device=vector.device)
        places, factor = order[:k], len(vector) / k if self.unbiased else 1
        total, residue = torch.zeros_like(vector), vector.clone()
        sent = vector[places] * factor + 0 * vector.sum()  # an overflow elsewhere must show: nan
        total[places] = all_reduce(sent, axis) * weight
        residue[places] -= sent
        return total, residue


@dataclass
class PowerSGD(Compressor):
    """Gradients of matrices as products of two thin ones: M [R, C] -> P [R, r] Q^T [r, C].

    One step of the power iteration finds the r directions that matter, from those of the last step
    (`warm_start`): P = sum_r M_r Q; make P orthonormal; Q = sum_r M_r^T P. Both sums are linear, so
    all-reduces take them, and the result is a projection of the *sum* of the gradients. Vectors and
    matrices that would not shrink to half go uncompressed.
    """

    rank: int = 4
    warm_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.rank >= 1, "rank", self.rank, "1 to 32")
        self._qs: dict[nn.Parameter, Tensor] = {}

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether gradients of this shape are sent as P and Q."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return 2 * (rows + columns) * min(self.rank, rows, columns) <= rows * columns

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        self.generator = self.generator or _generator(vector.device, self.seed)
        total, residue = torch.empty_like(vector), torch.zeros_like(vector)
        pieces = zip(
            parameters,
            *(flat.split([p.numel() for p in parameters]) for flat in (vector, total, residue)),
            strict=True,
        )
        matrices, outs, left, whole = {}, {}, {}, []
        for p, piece, out, kept in pieces:
            if self.compresses(p.shape):
                matrices[p], outs[p], left[p] = (x.view(len(p), -1) for x in (piece, out, kept))
            else:
                whole.append((piece, out))

        for (_, out), added in zip(whole, _add_all([v for v, _ in whole], axis), strict=True):
            out.copy_(added * weight)
        ps = _add_all([m @ self._start(p, m) for p, m in matrices.items()], axis)
        # By Householder's method: Gram-Schmidt, as in the paper, fails where columns depend on each
        # other, as those of a gradient of lower rank do.
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = _add_all([m.mT @ p for m, p in zip(matrices.values(), ps, strict=True)], axis)
        for parameter, p, q in zip(matrices, ps, qs, strict=True):
            out = torch.matmul(p, q.mT * weight, out=outs[parameter])
            self._qs[parameter] = q
            # Every rank keeps its distance to the mean of what was sent.
            left[parameter].copy_(matrices[parameter] - out / (weight * axis.size))
        return total, residue

    def _start(self, parameter: nn.Parameter, matrix: Tensor) -> Tensor:
        """The Q to begin with: that of the last step, or a random one, equal on all ranks."""
        shape = matrix.shape[1], min(self.rank, *matrix.shape)
        fresh = torch.randn(
            shape, generator=self.generator, dtype=matrix.dtype, device=matrix.device
        )
        q = self._qs.get(parameter)
        if q is None or q.shape != shape or not self.warm_start:
            return fresh
        # A step of zeros or of nan must not be remembered for ever.
        return torch.where(q.isfinite().all() & q.any(), q, fresh)

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        starts = {names[p]: q for p, q in self._qs.items()}
        return super().state_dict(names) | {"starts": starts}

    def load_state_dict(
        self, state: dict[str, Any], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().load_state_dict(state, parameters)
        starts = state.get("starts", {})  # none, if another compressor wrote the checkpoint
        self._qs = {parameters[name]: q.to(parameters[name].device) for name, q in starts.items()}


# ---------------------------------------------------------------------- 3. plugged into ddp
class Bucket(Protocol):
    """What is needed of a bucket of `ddp`."""

    parameters: list[nn.Parameter]
    flat: Tensor  # gradients and users
    gradients: Tensor  # [N], one parameter after the other
    users: Tensor  # [number of parameters]: how many ranks used each


class Compressed:
    """Reduces buckets through a compressor: ``ddp.apply(..., reduce=Compressed(TopK(0.01)))``.

    Args:
        compressor: one of its own for each strategy.
        error_feedback: keep residues; by default where `compressor` has a bias.
        warmup_steps: so many steps are reduced exactly first, while gradients still change fast.

    Works in a thread, one bucket after the other in the order of the calls, so that backward goes
    on: between its start and `finish_backward`, nothing else may use the axis.
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        error_feedback: bool | None = None,
        warmup_steps: int = 0,
    ) -> None:
        _check(warmup_steps >= 0, "warmup_steps", warmup_steps, "0 or more")
        self.compressor, self.warmup_steps = compressor, warmup_steps
        self.feedback = compressor.feedback if error_feedback is None else error_feedback
        self._residues: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()
        self._residue_of: dict[nn.Parameter, Tensor] = {}
        self._steps: dict[nn.Parameter, int] = {}
        self._latest: _Background | None = None

    def __call__(self, bucket: Bucket, axis: Axis, op: Op) -> Pending:
        """Start to reduce `bucket` in place."""
        step = self._steps.get(bucket.parameters[0], 0)
        self._steps.update(dict.fromkeys(bucket.parameters, step + 1))
        if step < self.warmup_steps or axis.size == 1:
            return all_reduce(bucket.flat, axis, op, out=bucket.flat, async_op=True)
        weight = 1 / axis.size if op == "avg" else 1.0
        self._latest = _Background(lambda: self._reduce(bucket, axis, op, weight), self._latest)
        return Pending(self._latest, bucket.flat)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket, axis: Axis, op: Op, weight: float) -> None:
        counting = all_reduce(bucket.users, axis, op, out=bucket.users, async_op=True)
        vector = bucket.gradients
        if not vector.numel():  # parameters without elements
            counting.wait()
            return
        vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
        if self.feedback:
            kept = self._residue(bucket, vector)
            vector = vector + kept
        total, residue = self.compressor.reduce(vector, axis, weight, bucket.parameters)
        bucket.gradients.copy_(total)
        if self.feedback:
            # An overflow spoils one step, which the trainer skips or reports, not all that follow.
            kept.copy_(residue.nan_to_num_(nan=0, posinf=0, neginf=0))
        counting.wait()

    def _residue(self, bucket: Bucket, like: Tensor) -> Tensor:
        """This rank's residue for `bucket`, which may hold parameters of earlier ones."""
        if bucket not in self._residues:
            residue = torch.zeros_like(like)
            pieces = residue.split([p.numel() for p in bucket.parameters])
            for p, piece in zip(bucket.parameters, pieces, strict=True):
                if p in self._residue_of:
                    piece.copy_(self._residue_of[p])
                self._residue_of[p] = piece
            self._residues[bucket] = residue
        return self._residues[bucket]

    def residue(self, parameter: nn.Parameter) -> Tensor:
        """What this rank has kept back of the gradient of `parameter`, in its shape."""
        kept = self._residue_of.get(parameter)
        return torch.zeros_like(parameter) if kept is None else kept.view_as(parameter)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return this rank's residues, warm starts, random numbers and place in the warm-up."""
        names = {p: name for name, p in model.named_parameters()}
        return {
            "steps": {names[p]: step for p, step in self._steps.items()},
            "residues": {names[p]: kept.clone() for p, kept in self._residue_of.items()},
            "compressor": self.compressor.state_dict(names),
        }

    def load_state_dict(self, state: dict[str, Any], model: nn.Module) -> None:
        """Go on from what `state_dict` returned on this rank, of as many ranks.

        Another compressor may take over: it owes what the first one kept back.
        """
        parameters = dict(model.named_parameters())
        self._steps = {parameters[name]: step for name, step in state["steps"].items()}
        self._residue_of = {
            parameters[name]: kept.to(parameters[name].device)
            for name, kept in state["residues"].items()
        }
        self._residues.clear()  # made anew from these by the next call
        self.compressor.load_state_dict(state["compressor"], parameters)


class _Background:
    """Work in a thread of its own that begins when the work before it has ended.

    One after the other, because all ranks must make the same calls in the same order.
    """

    def __init__(self, work: Callable[[], Any], before: "_Background | None") -> None:
        self._work, self._before, self._error = work, before, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._before is not None:
            self._before._thread.join()
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = self._before = None

    def wait(self) -> None:
        """Block until done; raise what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error


COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "int8": Int8,
    "fp8-e4m3": lambda: Fp8(kind="e4m3"),
    "fp8-e5m2": lambda: Fp8(kind="e5m2"),
    "sign": Sign,
    "top-k": TopK,
    "random-k": RandomK,
    "powersgd": PowerSGD,
}
"""Makers of each compressor with its defaults, by the name that a user types."""


# ---------------------------------------------------------------------- helpers
def _check(is_good: bool, name: str, value: Any, rule: str) -> None:
    if not is_good:
        raise ValueError(f"{name}={value} does not work here; use {rule}")


def _generator(device: torch.device, seed: int) -> torch.Generator | None:
    """Random numbers that leave those of the caller alone; "meta" has none to give."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


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


def _add_all(tensors: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Sums over all ranks of several tensors, by one all-reduce."""
    if not tensors:
        return []
    flat = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
