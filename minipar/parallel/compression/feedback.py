"""Error feedback, plugged into ddp: what a step leaves out is added to the next gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from minipar.comm.background import Background
from minipar.comm.calls import Pending, beside, waited
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.shapes import Op
from minipar.parallel.base.shards import laid_out_as
from minipar.parallel.compression.codecs import Fp8, Half, Int8, Sign, TopK
from minipar.parallel.compression.compressor import Compressor, check
from minipar.parallel.compression.linear import PowerSGD, RandomK


class Bucket(Protocol):
    """What is needed of a bucket of `ddp`."""

    parameters: list[nn.Parameter]
    flat: Tensor  # [N]: gradients, one parameter after the other


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
        self, compressor: Compressor, *, error_feedback: bool | None = None, warmup_steps: int = 0
    ) -> None:
        check(warmup_steps >= 0, "warmup_steps", warmup_steps, "0 or more")
        self.compressor, self.warmup_steps = compressor, warmup_steps
        self.feedback = compressor.feedback if error_feedback is None else error_feedback
        self._residues: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()
        self._residue_of: dict[nn.Parameter, Tensor] = {}
        self._steps: dict[nn.Parameter, int] = {}
        self._latest: Background | None = None

    def __call__(self, bucket: Bucket, axis: Axis, op: Op) -> Pending:
        """Start to reduce `bucket` in place."""
        step = self._steps.get(bucket.parameters[0], 0)
        self._steps.update(dict.fromkeys(bucket.parameters, step + 1))
        if step < self.warmup_steps or axis.size == 1:
            return all_reduce(bucket.flat, axis, op, out=bucket.flat, async_op=True)
        weight = 1 / axis.size if op == "avg" else 1.0
        work = partial(self._reduce, bucket, axis, op, weight)
        if bucket.flat.is_meta:  # a trace has no time: when the thread calls must not be by chance
            with beside() as numbers:
                Background(work, [], bucket.flat.device, "compression").wait()
            return Pending(None, bucket.flat, lambda flat: waited(numbers) or flat)
        before = [] if self._latest is None else [self._latest]
        self._latest = Background(work, before, bucket.flat.device, "compression")
        return Pending(self._latest, bucket.flat)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket, axis: Axis, op: Op, weight: float) -> None:
        vector = bucket.flat
        if not vector.numel():  # parameters without elements
            return
        vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
        if self.feedback:
            kept = self._residue(bucket, vector)
            vector = vector + kept
        total, residue = self.compressor.reduce(vector, axis, weight, bucket.parameters)
        bucket.flat.copy_(total)
        if self.feedback:
            # An overflow spoils one step, which the trainer skips or reports, not all that follow.
            kept.copy_(residue.nan_to_num_(nan=0, posinf=0, neginf=0))

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
        return torch.zeros_like(parameter) if kept is None else laid_out_as(parameter, kept)

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

        Another compressor may take over: it owes what the first one kept back, if it has residues.
        """
        parameters = dict(model.named_parameters())
        self._steps = {parameters[name]: step for name, step in state["steps"].items()}
        residues = state["residues"] if self.feedback else {}
        self._residue_of = {
            parameters[name]: kept.to(parameters[name].device) for name, kept in residues.items()
        }
        self._residues.clear()  # made anew from these by the next call
        self.compressor.load_state_dict(state["compressor"], parameters)


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
