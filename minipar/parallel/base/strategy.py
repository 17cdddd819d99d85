"""The base of every strategy: the calls of a step, no_sync, and checks against mistakes.

A step reads::

    optimizer.zero_grad()
    loss.backward()                 # all microbatches but the last under strategy.no_sync()
    strategy.finish_backward()      # from here on, gradients are those of the whole batch
    strategy.clip_grad_norm_(1.0)
    optimizer.step()

Likely mistakes that nobody would notice raise errors: `claim` checks the model when a strategy is
applied, `_before_step` checks each step of an optimizer.
"""

import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minipar.comm.collectives import all_reduce
from minipar.comm.hostcopy import look, to_device
from minipar.comm.mesh import Axis, with_own_group
from minipar.model.moe import alone, routers
from minipar.parallel.base.masters import master_of
from minipar.parallel.base.norm import check_unchanged, clip_grad_norm, note_reduced
from minipar.parallel.base.optimizer_state import Members, cut_state, join_state
from minipar.parallel.base.shards import axes_of, in_order, piece_of, region_of


class Strategy:
    """A way to share the work on `model` along `axis`; made by the `apply` of a strategy's file."""

    shard_axes: tuple[Axis, ...] = ()  # over which gradients are cut
    run: Callable[..., Tensor] | None = None  # replaces `train.step.forward_backward`
    evaluate: Callable[..., Tensor] | None = None  # replaces the forwards of a validation

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self.model, self.axis = model, axis
        self.device = device_of(model)  # computes, even if parameters later move to the host
        self.synchronises = True  # false under `no_sync`
        self.is_finished = True  # false from a backward on, until `finish_backward`

    # ------------------------------------------------------------------ one step
    def finish_backward(self) -> None:
        """Complete the communication of gradients that backward started."""
        self.is_finished = True
        own = list(self.with_gradients())
        check_shared(own)
        note_reduced(own)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending. Use it for every microbatch but the last."""
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    def with_gradients(self) -> Iterable[nn.Parameter]:
        """Return the parameters or shards that hold the gradient of the batch in ``grad``."""
        return map(piece_of, self.model.parameters())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        The norm is over the whole model, as torch computes it on one device. A collective. Raises
        `RuntimeError` before `finish_backward`, `ValueError` unless `max_norm` is positive.
        """
        self.check_finished("clip_grad_norm_()")
        parameters = list(self.with_gradients())
        axes = in_order([*self.shard_axes, *(axis for p in parameters for axis in axes_of(p))])
        return clip_grad_norm(parameters, max_norm, axes, self.device)

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Call ``scaler.unscale_(optimizer)``, and tell all ranks of an overflow in one shard.

        A collective. ``scaler.step`` then skips the step on all ranks, or on none.
        """
        self.check_finished("unscale_()")
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        found.setdefault(self.device, torch.zeros((), device=self.device))
        for axis in in_order([axis for p in self.with_gradients() for axis in axes_of(p)]):
            for flag in found.values():
                all_reduce(flag, axis, "max", out=flag)
        for p in self.with_gradients():
            if p.grad is not None:
                p.grad.unscaled = True
        self.note_reduced()

    def note_reduced(self) -> None:
        """Remember the versions of the shards' gradients; a step raises after later changes.

        Call it after an elementwise change of your own, such as ``p.grad *= 2``.
        """
        note_reduced(self.with_gradients())

    def release(self) -> None:
        """Free memory that only computing needs, such as gathered weights, before another stage."""

    def shard(self, microbatch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut this rank's tokens out of a microbatch of whole sequences."""
        return microbatch

    # ------------------------------------------------------------------ for strategies with hooks
    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse a step of `parameters` (or shards) between backward and `finish_backward`.

        The parameters hold the strategy, so the strategy lives as long as they do.
        """
        for p in parameters:
            vars(p).setdefault("watched_by", Local()).append(self)

    def hook_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make autograd call ``self._on_gradient(p)`` whenever it has added to ``p.grad``.

        Python's garbage collector does not see torch's hooks. So a hook must not hold a strong
        reference to the strategy.
        """
        method = weakref.WeakMethod(self._on_gradient)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: method()(p))

    def _on_gradient(self, p: nn.Parameter) -> None:
        """Note that a backward has begun, which `finish_backward` must end."""
        check_not_summed(p)
        self.is_finished = False

    def tell_used(self, used: list[bool], replicas: Axis | None = None) -> Callable[[], list[bool]]:
        """Start an all-reduce of one byte per parameter: has this rank used the parameter?

        The returned function waits, and returns which parameters any rank used. The function reads
        the bytes only if this rank left a parameter unused, because a read waits for the GPU. On
        "meta", all ranks count as equal.
        """
        told = to_device(torch.tensor(used, dtype=torch.uint8), self.device)
        if replicas is not None:
            all_reduce(told, replicas, "max", out=told)
        pending = all_reduce(told, self.axis, "max", out=told, async_op=True)

        def used_by_any() -> list[bool]:
            told = pending.wait()
            return used if all(used) else look(told, on_meta=used)

        return used_by_any

    def check_finished(self, what: str) -> None:
        """Raise `RuntimeError` if `what` comes between a backward and its `finish_backward`."""
        if not self.is_finished:
            raise RuntimeError(
                f"{what} came before finish_backward() of {type(self).__name__} along "
                f"{self.axis.name}: call it on all ranks after the last backward of each step"
            )

    # ------------------------------------------------------------------ whole tensors, out and in
    def join(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Collect the whole tensors of all stages of a pipeline, by name; a collective."""
        return dict(tensors)

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take this rank's stages out of what `join` returned."""
        return dict(tensors)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers, named and shaped as in the serial model.

        Masters replace rounded weights. Tied weights stay one tensor.
        Buffers are this rank's own. A collective: all ranks call it.
        """
        state = self.model.state_dict(keep_vars=True)  # waits for weights on their way
        return self._whole(state, lambda t: master_of(t) if hasattr(t, "master") else t.data)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return copies of all gradients, named and shaped as in the serial model; as above."""
        return self._whole(dict(self.model.named_parameters()), lambda p: p.grad)

    def _whole(
        self, named: Mapping[str, Tensor], value_of: Callable[[Tensor], Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Join the values of parameters, or of their pieces; a tied one is joined once."""
        whole: dict[Tensor, Tensor | None] = {}
        for t in dict.fromkeys(map(piece_of, named.values())):
            value = value_of(t)
            whole[t] = None if value is None else region_of(t).join(value, self.device)
        return self.join({name: whole[piece_of(t)] for name, t in named.items()})

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of `full_state_dict`, made on any number of ranks. All ranks call it."""
        state, here = self.own(state), self.model.state_dict(keep_vars=True)
        cut = {name: t for name, t in here.items() if region_of(t).axes and name in state}
        parts = {name: region_of(t).cut(state[name]).view_as(t) for name, t in cut.items()}
        self.model.load_state_dict({**state, **parts})
        for name, p in self.model.named_parameters():
            piece = piece_of(p)
            if (master := getattr(p, "master", piece)) is not p:  # a master needs all digits
                master.data.copy_(region_of(piece).cut(state[name]).view_as(master))

    def members(self, optimizer: Optimizer) -> Members:
        """Return the parameters that `optimizer` steps, by group, each by its name in the model."""
        names = {piece_of(p): name for name, p in self.model.named_parameters()}
        return [{names[p]: p for p in group["params"]} for group in optimizer.param_groups]

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer` as of one device, on the CPU; all ranks call it.

        Any number of ranks can load this state, and so can an optimizer of the serial model.
        """
        return join_state(optimizer, self.members(optimizer), self.device)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of `full_optimizer_state`, matched by name.

        Raises `ValueError` for the state of other parameters.
        """
        optimizer.load_state_dict(cut_state(state, self.members(optimizer)))


# ---------------------------------------------------------------------- when a strategy is applied
class Local(list):
    """A list on a parameter; after pickling, the list is empty."""

    def __reduce__(self) -> tuple:
        return Local, ()


def claim(model: nn.Module, name: str, axis: Axis) -> None:
    """Note that the strategy `name` shares the gradients of `model` along `axis`.

    Raises `ValueError` if another strategy does, and for sparse gradients and `max_norm`.
    """
    for path, module in model.named_modules():
        where = path or type(module).__name__
        if getattr(module, "sparse", False) is True:
            raise ValueError(f"{where} has sparse=True; ranks sum dense gradients: make it False")
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{where} has max_norm={module.max_norm:g}: each rank's forward would write into "
                f"other rows; make it with max_norm=None, and scale weights after the step"
            )
    for path, p in model.named_parameters():
        if other := getattr(p, "claimed_by", None):
            raise ValueError(
                f"{name} along {axis.name}: {path} is trained by {other[0]} already, and its "
                f"gradient would be summed twice; apply one of ddp, zero, fsdp, local_sgd, once"
            )
    for p in model.parameters():
        if p.requires_grad:
            p.claimed_by = Local([f"{name} along {axis.name}"])


def check_hooks(model: nn.Module) -> None:
    """Raise `ValueError` for a hook on a gradient: the gradients of weights come in shards."""
    for name, p in model.named_parameters():
        hooks = {**(p._backward_hooks or {}), **(p._post_accumulate_grad_hooks or {})}
        origins = [str(getattr(hook, "func", hook).__module__) for hook in hooks.values()]
        if not all(origin.startswith("minipar.") for origin in origins):  # ours only read
            words = f"{name} has a hook on its gradient, which comes in shards under fsdp"
            raise ValueError(f"{words}; change gradients after finish_backward()")


def refuse_state(owner: nn.Module | Optimizer) -> None:
    """Make ``owner.state_dict()`` raise `RuntimeError`: it would hold the shards of this rank."""

    def refuse(_: nn.Module | Optimizer, prefix: str = "", keep_vars: bool = False) -> None:
        if not keep_vars:  # which asks for the parameters themselves
            raise RuntimeError(
                "state_dict() would hold this rank's shards: on all ranks, call full_state_dict() "
                "of the strategy for whole weights, full_optimizer_state(optimizer) for their "
                "state, and load_full_state_dict() or load_full_optimizer_state() to load them"
            )

    parts = [owner]
    if isinstance(owner, nn.Module):
        parts = [m for m in owner.modules() if any(map(axes_of, m.parameters()))]
    for part in parts:
        part.register_state_dict_pre_hook(refuse)


# ---------------------------------------------------------------------- when gradients arrive
def mark_summed(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Note that gradients are sums over the ranks of `axis`: a second sum would be wrong."""
    for p in parameters:
        if p.grad is not None and axis.size > 1:
            p.grad.summed_over = {*getattr(p.grad, "summed_over", ()), axis.name}


def check_not_summed(p: nn.Parameter, axis: Axis | None = None) -> None:
    """Raise `RuntimeError` if the gradient of `p` is a sum over `axis`; None means any axis."""
    names = getattr(p.grad, "summed_over", ())
    if names if axis is None else axis.name in names:
        raise RuntimeError(
            "a backward would add to a finished sum over the ranks: call zero_grad() after each "
            "step (set_to_none=True), and use no_sync() around all microbatches but the last"
        )


# ---------------------------------------------------------------------- when an optimizer steps
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
"""Optimizers that step each number by its own gradient alone, and so can step shards."""


def check_elementwise(optimizer: Optimizer | type[Optimizer]) -> None:
    """Raise `ValueError` unless `optimizer` steps each number alone: only then it can step shards.

    Set ``elementwise = True`` on an optimizer of your own that does so.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, ELEMENTWISE) and not getattr(optimizer, "elementwise", False):
        raise ValueError(
            f"{kind.__name__} may look at whole matrices, and a rank has shards of them; use "
            f"AdamW or SGD, or set elementwise = True on it if it steps each number alone"
        )


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check the contract before each step of any optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if remedy := getattr(p, "stepped_elsewhere", None):
            raise RuntimeError(f"this {type(optimizer).__name__} changes nothing: {remedy}")
    for strategy in {strategy for p in parameters for strategy in getattr(p, "watched_by", ())}:
        strategy.check_finished("optimizer.step()")
    check_shared(parameters)
    shards = [p for p in parameters if axes_of(p)]
    if any(p.shape != region_of(p).shape for p in shards):
        check_elementwise(optimizer)
        if not hasattr(optimizer, "refuses_state"):
            optimizer.refuses_state = True
            refuse_state(optimizer)
    check_unchanged(shards)
    gradients = [p.grad for p in shards if p.grad is not None]
    if not all(hasattr(g, "unscaled") for g in gradients) and _called_by_scaler():
        raise RuntimeError(
            "GradScaler.step() without strategy.unscale_(scaler, optimizer): ranks look for an "
            "overflow in their own shards, and would skip different steps"
        )


def check_shared(parameters: Sequence[nn.Parameter]) -> None:
    """Raise `RuntimeError` if some of `parameters` are shared, and one with a gradient is not."""
    alone = [p for p in parameters if p.grad is not None and not hasattr(p, "claimed_by")]
    if alone and any(hasattr(p, "claimed_by") for p in parameters):
        raise RuntimeError(
            f"no rank shares the gradient of a parameter of shape {tuple(alone[0].shape)}, which "
            f"was frozen, or not in the model, when a strategy was applied. Unfreeze or add it "
            f"first, then apply; or keep it out of the model, with an optimizer of its own"
        )


def _called_by_scaler() -> bool:
    """True if the step comes out of ``GradScaler.step(optimizer)``."""
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(isinstance(caller, GradScaler) for caller in callers)


register_optimizer_step_pre_hook(_before_step)


# ---------------------------------------------------------------------- helpers
def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters of `model`; the CPU, if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def find_blocks(model: nn.Module, blocks: Sequence | None = None) -> list[nn.Module]:
    """Return the modules of `model` that are in `blocks`, or of a class in `blocks`.

    By default, these are the members of every `nn.ModuleList`, `nn.Sequential` and `nn.ModuleDict`,
    from the top down. To add a large embedding or head, list it in `blocks`.
    """
    modules = list(model.modules())
    if blocks is not None:
        found = [m for m in modules[1:] if m in blocks or type(m) in blocks]
        if blocks and not found:
            raise ValueError(f"blocks={blocks!r}: the model has none of them below its root")
        return found
    lists = [m for m in modules if isinstance(m, nn.ModuleList | nn.Sequential | nn.ModuleDict)]
    members = [m for each in lists for m in each.children()]
    found = [m for m in members if type(m).forward is not nn.Module.forward]  # no list in a list
    inside = {part for block in found for part in block.modules() if part is not block}
    return [m for m in dict.fromkeys(found) if m not in inside]


def share_counts(model: nn.Module, *axes: Axis) -> None:
    """Make routers count the tokens of all ranks of `axes`, if they count alone; a collective."""
    own = [router for _, router in routers(model) if router.sum_counts is alone]
    if any(router.config.balance == "batch" for router in own):
        # Each layer waits for its counts: they must not queue behind gradients or weights.
        axes = tuple(with_own_group(axis, "counts") for axis in axes)
    for router in own:
        router.sum_counts = sum_over(*axes)


def sum_over(*axes: Axis) -> Callable[[Tensor], Tensor]:
    """Return a function that adds up a tensor over all ranks of `axes`, one axis at a time."""
    return lambda tensor: reduce(all_reduce, axes, tensor)
