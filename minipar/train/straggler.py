"""How fast this rank computes, and a rank made slow on purpose.

All ranks of a step wait for the slowest. To see it, slow one down: `Pace(model, 2.5)` sleeps 1.5
times as long as forward and backward took, in small pieces as they go along, so that gradients and
their communication come late as they would on a slower processor. Nothing but time changes. Each
sleep is a span "slowed on purpose" in the timeline: a figure with a declared straggler says so.

    with Pace(model, 2.5 if mesh.rank == 1 else 1.0) as pace, timeline.record(model) as recorded:
        train_step(...)
    pace.seconds                       # of computing, without waiting for others

What it measures without slowing is what `balance.py` shares out work by.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.mesh import whole_number
from minipar.observe import timeline

SHORTEST_SLEEP = 1e-3  # seconds; the clock of a sleep is too coarse for less


class Pace:
    """Counts this rank's `seconds` of forward and backward, made `factor` times as long.

    `model` returns one tensor. Only forwards that keep a graph count, so validation does not; the
    loss, the optimizer and whatever else runs outside of `model` is neither counted nor slowed.
    Make it before a strategy hooks the parameters: then their gradients are late before they are
    sent. On a GPU it waits for the kernels that compute, to measure them. Raises `ValueError` for a
    factor below 1.
    """

    def __init__(self, model: nn.Module, factor: float = 1.0) -> None:
        if not 1 <= factor < math.inf:
            raise ValueError(f"a rank cannot be slowed by {factor:g}; use a factor from 1 up")
        self.factor, self.seconds = factor, 0.0
        self._device = next(model.parameters()).device
        self._begun = self._mark = 0.0  # of this forward or backward; of the piece to stretch next
        self._debt = 0.0  # seconds still to sleep
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._after_forward),
        ]
        if factor > 1:
            for p in model.parameters():
                if p.requires_grad:
                    self._handles.append(p.register_post_accumulate_grad_hook(self._stretch))

    def close(self) -> None:
        """Let the model run at its own pace again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> "Pace":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._stretch()
        if output.requires_grad:
            self._count()
            output.register_hook(self._before_backward)

    def _before_backward(self, grad: Tensor) -> None:
        self._begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._stretch()
        self._count()

    def _begin(self, *_: Any) -> None:
        self._begun = self._mark = self._now()

    def _count(self) -> None:
        self.seconds += self._now() - self._begun

    def _stretch(self, *_: Any) -> None:
        """Sleep for what has been computed since the last time, unless it is still too little."""
        if self.factor == 1:
            return
        now = self._now()
        self._debt += (self.factor - 1) * (now - self._mark)
        if self._debt >= SHORTEST_SLEEP:
            with timeline.span("compute", "slowed on purpose"):
                time.sleep(self._debt)
            awake = self._now()
            self._debt -= awake - now  # a sleep is never exact: the next one makes up for it
            now = awake
        self._mark = now

    def _now(self) -> float:
        if self._device.type == "cuda":  # of other streams, it would wait for slower ranks
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()


def parse_slow(text: str, num_ranks: int) -> dict[int, float]:
    """Return {1: 2.5, 3: 4.0} for "1=2.5,3=4"; {} for "".

    Raises `ValueError` for anything else, a rank that does not exist, or a factor below 1.
    """
    factors: dict[int, float] = {}
    for part in text.replace(" ", "").split(",") if text else []:
        rank, _, factor = part.partition("=")
        try:
            number, value = whole_number(rank), float(factor)
        except ValueError:
            number, value = None, 0.0
        is_new = number is not None and number < num_ranks and number not in factors
        if not is_new or not 1 <= value <= 1e6:
            raise ValueError(
                f"--slow {text!r}: {part!r} is not rank=factor with a new rank from 0 to "
                f"{num_ranks - 1} and a factor from 1 to 1e6; try {num_ranks - 1}=2"
            )
        factors[number] = value
    return factors
