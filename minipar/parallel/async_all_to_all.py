"""An all-to-all beside which others compute, forward and backward: a part of expert.py."""

from typing import Any

import torch
from torch import Tensor

from minipar.comm.collectives import Pending, all_to_all
from minipar.comm.mesh import Axis


class AsyncAllToAll:
    """An all-to-all of rows between its start and `land`, forward; in reverse, backward."""

    def __init__(self, axis: Axis, rows: Tensor, there: list[int], here: list[int]) -> None:
        self.axis, self.there, self.here = axis, there, here
        self.pending: Pending | None = None
        self.ticket = _Start.apply(rows, self)

    def launch(self, rows: Tensor, send: list[int], receive: list[int]) -> None:
        """Start to send."""
        self.pending = all_to_all(
            rows, self.axis, send_counts=send, recv_counts=receive, async_op=True
        )

    def arrive(self) -> Tensor:
        """Wait for what was started."""
        pending, self.pending = self.pending, None
        return pending.wait()

    def land(self) -> Tensor:
        """Return the rows that have arrived."""
        return _Land.apply(self.ticket, self)


class _Start(torch.autograd.Function):
    """Rows leave; in backward, this is where gradients must have come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        flight.launch(rows, flight.there, flight.here)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.arrive(), None


class _Land(torch.autograd.Function):
    """Rows arrive; in backward, gradients leave.

    Autograd goes backward in the reverse order of forward, so what was computed between the two
    runs between them again.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        return flight.arrive()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.launch(grad, ctx.flight.here, ctx.flight.there)
        return grad.new_zeros(()), None
