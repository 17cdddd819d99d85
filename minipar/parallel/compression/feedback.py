"""Error feedback, plugged into ddp: the part that a step leaves out joins the next gradient."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar.comm.background import Background
from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_reduce
from minipar.comm.mesh import Axis
from minipar.parallel.compression.codecs import Compressor


class Compressed:
    """Reduces buckets through a compressor: ``ddp.apply(..., reduce=Compressed(TopK(0.01)))``.

    Args:
        compressor: one of its own for each strategy.
        error_feedback: keep what was left out of each bucket, and send it later.

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
        if bucket.flat.is_meta:
            raise ValueError("a trace has no thread in which to compress; trace without reduce=")
        self._latest = Background(work, self._latest, bucket.flat.device, "compression")
        return Pending(self._latest, bucket.flat)

    @torch.no_grad()
    def _reduce(self, bucket: Any, axis: Axis, weight: float) -> None:
        flat = bucket.flat
        vector = weight * flat.to(torch.promote_types(flat.dtype, torch.float32))
        vector += self.residues.get(bucket, 0)
        flat.copy_(self.compressor.reduce(vector, axis, bucket.parameters))
        if self.feedback:
            # An overflow spoils this step, which the trainer skips or reports, and no later one.
            self.residues[bucket] = vector.nan_to_num_(nan=0, posinf=0, neginf=0)
