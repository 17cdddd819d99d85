"""What every strategy has in common: three words, and how to leave synchronisation out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis, with_own_group
from minipar.comm.values import to_device
from minipar.model.moe import alone, routers
from minipar.parallel.base import guard, hooks
from minipar.parallel.base.masters import master_of
from minipar.parallel.base.norm import clip_grad_norm
from minipar.parallel.base.optimizer_state import Members, cut_state, join_state, labelled, pack
from minipar.parallel.base.shards import (
    Row,
    axes_of,
    copies_axis,
    in_order,
    note_sum,
    piece_of,
    share_sum,
)


class Strategy:
    """A way to share the work on `model` along `axis`; made by the `apply` of a strategy's file.

    A training step reads::

        loss.backward()
        strategy.finish_backward()     # from here on, gradients are those of the whole batch
        strategy.clip_grad_norm_(1.0)
        optimizer.step()
    """

    shard_axes: tuple[Axis, ...] = ()  # over which gradients are cut
    rows: Sequence[Row] = ()  # of the pieces that are stepped in the place of parameters
    watched: Set[nn.Parameter] = frozenset()  # whose gradients are to be completed
    others_wait = False  # for the end of a backward: the stage before, in a pipeline
    run: Callable[..., Tensor] | None = None  # in the place of `train.step.forward_backward`,
    evaluate: Callable[..., Tensor] | None = None  # and of the forwards of a validation

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self.model, self.axis = model, axis
        self.device = device_of(model)  # which computes, wherever parameters go from here
        self.synchronises = True
        self.is_finished = True  # false from a backward on, see `guard.watch`
        self.finishes = 0
        guard.notice(self)

    def finish_backward(self) -> None:
        """Complete the communication of gradients that backward started."""
        self.is_finished = True
        self.finishes += 1

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        """Forget gradients of `zeroed` that are still on their way: `zero_grad` was called."""

    def has_stepped(self, stepped: Set[nn.Parameter]) -> None:
        """Called after a step of an optimizer, which has some of `watched` among its parameters."""

    def watch_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse to step `parameters` between a backward and its `finish_backward`, which makes
        their gradients those of the batch."""
        self.watched = frozenset(p for p in parameters if p.requires_grad)
        for p in self.watched:
            hooks.on_gradient(p, self._on_gradient)

    def _on_gradient(self, p: nn.Parameter) -> None:
        """Called by autograd when ``p.grad`` (accumulated over microbatches) is complete here."""
        self.is_finished = False
        guard.check_gradient(p, p.grad)

    def share_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let a sum that was not zeroed be shared by the ranks, when a gradient is added to it."""
        for p in parameters:
            p.register_hook(lambda added, p=p: self._share(p, added))

    def note_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that gradients of `parameters` are sums over the ranks by now: see `share_sums`."""
        for p in parameters:
            note_sum(p, self.axis, copies_axis(p, self.axis).size)

    def _share(self, p: nn.Parameter, added: Tensor | None = None) -> None:
        """Where the sum of the backward before was not zeroed: an n-th of it is this rank's."""
        if share_sum(p, self.axis) and added is not None:
            self.is_finished = False  # perhaps not accumulated, but for torch.autograd.grad()

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
        axes = in_order([*self.shard_axes, *(axis for p in parameters for axis in axes_of(p))])
        return clip_grad_norm(parameters, max_norm, axes, self.device)

    def release(self) -> None:
        """Free what only computing needs, such as gathered weights: another stage has its turn."""

    def shard(self, microbatch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut this rank's tokens out of a microbatch of whole sequences."""
        return microbatch

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers, named and shaped as in the serial model.

        Tied weights stay one tensor. Buffers, such as the averages of BatchNorm, are this rank's
        own: no strategy shares what forward writes into them. A collective wherever the strategy
        shards: all ranks call it.
        """
        state, masters = self.model.state_dict(keep_vars=True), self.full_masters()
        return copied(state, lambda t: masters[t] if t in masters else t.detach().clone())

    def full_masters(self) -> dict[nn.Parameter, Tensor]:
        """Return copies, whole, of the master weights of all parameters that have one (masters.py),
        or whose pieces are their masters."""
        return {p: master_of(p).clone() for p in self.model.parameters() if hasattr(p, "master")}

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return copies of all gradients, named and shaped as in the serial model; as above."""
        whole: dict[nn.Parameter, Tensor | None] = {}
        for row in self.rows:
            own = {p: p.grad for p in row.pieces if p.grad is not None}
            joined = row.join(own, row.shard.dtype)
            whole |= {p: joined[p] if p in own else None for p in row.pieces}
        found = {}
        for name, p in self.model.named_parameters():
            own = None if p.grad is None else p.grad.detach().clone()
            found[name] = whole.get(piece_of(p), own)
        return found

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `full_state_dict` returned, on any number of ranks. All ranks call it."""
        self.model.load_state_dict(state)
        with torch.no_grad():
            self.load_masters({p: state[name] for name, p in self.model.named_parameters()})

    def load_masters(self, whole: Mapping[nn.Parameter, Tensor]) -> None:
        """Give each parameter's master, if it has one, what is of it here of `whole`."""
        for p, values in whole.items():
            if hasattr(p, "master"):
                p.master.copy_(values)

    def members(self, optimizer: Optimizer) -> Members:
        """Return the parameters that `optimizer` steps, by group, each by its name in the model.

        Raises `RuntimeError` where these are pieces that only `compose.apply` puts together.
        """
        if self.shard_axes and not self.rows:
            raise RuntimeError(
                f"{type(self).__name__} has pieces along {self.shard_axes[0].name}, and does not "
                f"join the state of their optimizer; let compose.apply put strategies together"
            )
        names = {p: name for name, p in self.model.named_parameters()}
        return labelled([group["params"] for group in optimizer.param_groups], names)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer` as of one device, on the CPU; all ranks call it.

        For any number of ranks, and for an optimizer of a serial model; "param_names" say what is
        whose.
        """
        return join_state(optimizer, self.members(optimizer), self.rows)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part out of what `full_optimizer_state` returned, paired by name.

        Raises `ValueError` for the state of other parameters.
        """
        members = self.members(optimizer)
        own = cut_state(state, members, self.rows)
        optimizer.load_state_dict(pack(own, members, state["param_groups"], named=False))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate here, unsent: for every microbatch but the last."""
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before


def device_of(model: nn.Module) -> torch.device:
    """Return where the parameters of `model` are; the CPU, if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def copied(state: Mapping[str, Any], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return `state` with a copy of each tensor; of one with two names a single one.

    What is no tensor comes along as it is: of modules with `get_extra_state`.
    """
    copies = {t: copy(t) for t in state.values() if isinstance(t, Tensor)}
    return {name: copies[t] if isinstance(t, Tensor) else t for name, t in state.items()}


def flags(values: Sequence[bool | int], device: torch.device) -> Tensor:
    """Return `values` as bytes on `device`, without waiting for what it still has to do."""
    return to_device(torch.tensor(values, dtype=torch.uint8), device)


def share_counts(model: nn.Module, *axes: Axis, anew: bool = False) -> None:
    """Let routers that count the tokens of their rank alone count those of all ranks of `axes`.

    If `anew`, those that count for others already, too. A collective where routers balance over a
    batch: it makes process groups.
    """
    own = [router for _, router in routers(model) if anew or router.sum_counts is alone]
    if any(router.config.balance == "batch" for router in own):
        # Each layer waits for them: not behind weights that are fetched ahead, or gradients.
        axes = tuple(with_own_group(axis, "counts") for axis in axes)
    for router in own:
        router.sum_counts = sum_over(*axes)


def sum_over(*axes: Axis) -> Callable[[Tensor], Tensor]:
    """Return what adds up a tensor over all ranks of `axes`, one axis after the other."""

    def total(tensor: Tensor) -> Tensor:
        for axis in axes:
            tensor = all_reduce(tensor, axis)
        return tensor

    return total
