"""Layers that take their time, and how long a training step of them takes behind a link."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Axis
from minipar.emulate import link
from minipar.observe import timeline


class _Slow(torch.autograd.Function):
    """A product that takes its time, and leaves the processor alone as a GPU would."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backward_seconds = backward
        with timeline.span("forward", "layer"):
            time.sleep(forward)
        return x @ weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        with timeline.span("backward", "layer"):
            time.sleep(ctx.backward_seconds)
        return grad @ weight.mT, x.mT @ grad, None, None


class SlowLayer(nn.Module):
    """[B, 64] -> [B, 64], in so many seconds forward and backward; a weight of `NUM_BYTES`."""

    NUM_BYTES = 64 * 64 * 4

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x, self.weight, *self.seconds)


def slow_model(num_layers: int, forward: float, backward: float) -> nn.Sequential:
    return nn.Sequential(*(SlowLayer(forward, backward) for _ in range(num_layers)))


def fastest(
    step: Callable[[], Any],
    axis: Axis | None,
    bandwidth: float,
    *,
    count: int = 3,
    rehearsals: int = 1,
) -> tuple[float, float]:
    """Return (seconds, hidden fraction) of the fastest of `count` steps on such a link.

    Before them come `rehearsals`, the first of them without the link: strategies learn from it.
    Ranks of `axis` begin each step together, when nothing is on its way; with None they go on.
    """
    link.check_calls(False)
    try:
        results = []
        for number in range(rehearsals + count):
            link.use(link.Link("test", 0.0, bandwidth) if number else "none")
            if axis is not None:
                barrier(axis)
            with timeline.record() as recorded:
                start = time.monotonic()
                step()
                seconds = time.monotonic() - start
            results.append((seconds, recorded.hidden_fraction))
        return min(results[rehearsals:])
    finally:
        link.use("none")
        link.check_calls(True)
