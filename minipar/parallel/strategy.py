"""What every strategy has in common: three words, and how to leave synchronisation out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from minipar.comm.collectives import broadcast
from minipar.comm.mesh import Axis
from minipar.parallel import guard
from minipar.parallel.norm import clip_grad_norm


class Strategy:
    """A way to share the work on `model` along `axis`; made by the `apply` of a strategy's file.

    A training step reads::

        loss.backward()
        strategy.finish_backward()     # from here on, gradients are those of the whole batch
        strategy.clip_grad_norm_(1.0)
        optimizer.step()
    """

    shard_axes: tuple[Axis, ...] = ()  # over which gradients are cut, besides those they name

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self.model, self.axis = model, axis
        self.synchronises = True
        self.is_finished = True  # false from a backward on, see `guard.watch`
        self.finishes = 0

    def finish_backward(self) -> None:
        """Complete the communication of gradients that backward started."""
        self.is_finished = True
        self.finishes += 1

    def with_gradients(self) -> Iterable[nn.Parameter]:
        """Parameters, or pieces of them, whose ``grad`` is that of the batch."""
        return self.model.parameters()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        As torch's function of this name would on one device: the norm is that of the whole model,
        whatever part of it this rank has. A collective. Raises `RuntimeError` before
        `finish_backward`, `ValueError` for a `max_norm` that is not positive.
        """
        guard.check_finished(self, "clip_grad_norm_()")
        parameters = list(self.with_gradients())
        axes = {axis for p in parameters for axis in getattr(p, "shard_axes", ())}
        axes = sorted(axes | set(self.shard_axes), key=lambda axis: axis.name)
        return clip_grad_norm(parameters, max_norm, axes)

    def release(self) -> None:
        """Give back what computing needs: somebody else's turn comes, such as another stage's."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers, named and shaped as in the serial model.

        Tied weights stay one tensor. A collective wherever the strategy shards: all ranks call it.
        """
        state = self.model.state_dict(keep_vars=True)
        copies = {id(tensor): tensor.detach().clone() for tensor in state.values()}
        return {name: copies[id(tensor)] for name, tensor in state.items()}

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `full_state_dict` returned, on any number of ranks. All ranks call it."""
        self.model.load_state_dict(state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate here, unsent: for every microbatch but the last."""
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before


def replicate(model: nn.Module, axis: Axis) -> None:
    """Give all ranks of `axis` the parameters and buffers of its rank 0, in place."""
    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor.data, axis, src=0, out=tensor.data)
