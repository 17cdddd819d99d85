"""What a link can add up, since it is linear in the gradient: fewer numbers, fewer dimensions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.parallel.compression.compressor import Compressor, Reduced, check, make_generator


@dataclass
class RandomK(Compressor):
    """The same random `fraction` of the numbers on all ranks: no places are sent, sums are easy."""

    fraction: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check(0 < self.fraction <= 1, "fraction", self.fraction, "above 0 and at most 1")

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        self.generator = self.generator or make_generator(vector.device, self.seed)
        k = math.ceil(self.fraction * len(vector))
        order = torch.randperm(len(vector), generator=self.generator, device=vector.device)
        places = order[:k]
        total, residue = torch.zeros_like(vector), vector.clone()
        sent = vector[places] + 0 * vector.sum()  # an overflow elsewhere must show: nan
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
        check(self.rank >= 1, "rank", self.rank, "1 to 32")
        self._qs: dict[nn.Parameter, Tensor] = {}

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether gradients of this shape are sent as P and Q."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return 0 < 2 * (rows + columns) * min(self.rank, rows, columns) <= rows * columns

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        self.generator = self.generator or make_generator(vector.device, self.seed)
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


def _add_all(tensors: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Sums over all ranks of several tensors, by one all-reduce."""
    if not tensors:
        return []
    flat = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
