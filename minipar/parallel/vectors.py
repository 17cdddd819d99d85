"""Many tensors as one vector: what local_sgd.py sends, gradients or parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.values import look, to_device


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copies of all, one after the other, in float32 at least: [...], ... -> [N]."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the pieces of `flat` in the shapes of `like`: [N] -> [...], ..."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


@dataclass
class Gradients:
    """The gradients of one step, on their way to being those of all ranks."""

    parameters: list[nn.Parameter]
    used: list[bool]  # by this rank
    pending: Pending  # the gradients one after the other, then how many ranks used each

    @staticmethod
    def send(parameters: list[nn.Parameter], axis: Axis, op: Op) -> "Gradients":
        """Start the all-reduce, of one vector."""
        used = [p.grad is not None for p in parameters]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        users = to_device(torch.tensor(used, dtype=torch.float32), own[0].device)
        flat = flatten([*own, users])
        pending = all_reduce(flat, axis, op, out=flat, async_op=True)  # P@dp -> R@dp
        return Gradients(parameters, used, pending)

    def receive(self) -> None:
        """Put the gradients of all ranks in place; none where no rank had any."""
        gradients, users = self.pending.wait().tensor_split([-len(self.used)])
        pieces = unflatten(gradients, self.parameters)
        for p, piece, used, count in zip(self.parameters, pieces, self.used, users, strict=True):
            # Looks at a value only where this rank had no gradient of its own.
            exists = used or bool(look(count, on_meta=0))
            piece = piece.to(p.grad_dtype)
            if piece.stride() != p.stride():  # which fused optimizers do not look at
                piece = torch.empty_like(p, dtype=p.grad_dtype).copy_(piece)
            p.grad = piece if exists else None


def trainable(model: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    check(bool(parameters), "the model has no trainable parameter: there is nothing to agree on")
    return parameters


def as_pending(result: Tensor | None) -> Pending | None:
    return None if result is None else Pending(None, result.clone())


def check_every(every: int) -> None:
    check(every >= 1, f"every={every} must be 1 or more steps; 8 to 500 is usual")


def check(is_good: bool, message: str) -> None:
    if not is_good:
        raise ValueError(message)
