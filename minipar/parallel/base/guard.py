"""What users of PyTorch do by habit: it works here, or is refused at once with the right way.

ddp.apply(model, dp), and again            `claim`: the second is refused
nn.Embedding(..., sparse=True)             `check_layers`, `check_gradient`: refused
nn.Embedding(..., max_norm=1)              `check_layers`: refused, as forward writes into weights
head.weight.data = embedding.weight.data   `check_apart`: refused where parameters get new memory
a hook on a parameter's gradient           `comes_last`: called before it is sent; `check_hooks`
a cell of a notebook that runs again       `hooks.on_gradient`: the model of the last run is freed
optimizer.step() before finish_backward()  `watch`: refused
zero_grad() before finish_backward()       `watch`: what is on its way is dropped, too
p.grad = None before finish_backward()     works under ddp; what ZeRO or fsdp has on its way arrives
                                           all the same, as a piece: call zero_grad()
an optimizer made before fsdp.apply        `watch`: refused at its first step
optimizer.step(closure), as of LBFGS       works under ddp if it calls finish_backward() and returns
                                           the mean loss of all ranks, by which each one stops
an optimizer that looks at whole matrices, or at all of a group
                                           `elementwise`: refused where it sees pieces
torch.nn.utils.clip_grad_norm_, get_total_norm, clip_grad_value_ and clip_grads_with_norm_
                                           `notice`: refused where they see too little
torch.amp.GradScaler                       `watch`: an overflow in a piece is known to all ranks;
                                           refused before finish_backward()
a layer unfrozen, or replaced, after apply `watch`: refused at the next step
model.load_state_dict(..., assign=True)    `notice`: refused: no optimizer has what it brings
model.state_dict() of one rank's pieces    `refuse_state`; and under fsdp model.load_state_dict()
optimizer.state_dict() of them             `notice`: refused where it is loaded by others
a weight used while it is not here         `absent.Absent`: it is waited for, or refused
a forward that writes into its weights     `flat.Flat.check_unwritten`: refused under fsdp
a part that torch.jit runs                 `check_python`: refused where weights come and go
ranks that run different blocks            `same_order.Ledger`: refused at the end of a step
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache, partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.parallel.base.elementwise import check_elementwise, twin
from minipar.parallel.base.shards import axes_of, full_shape, in_order


# ---------------------------------------------------------------------- when a strategy is applied
def claim(model: nn.Module, strategy: str, axis: Axis) -> None:
    """Note that `strategy` shares the gradients of `model`.

    Raises `ValueError` if another does, or for a model whose gradients will be, or buffers are,
    sparse.
    """
    name = f"{strategy} along {axis.name}"
    for path, p in model.named_parameters():
        if other := getattr(p, "claimed_by", None):
            raise ValueError(
                f"{name}: {path} is trained by {other} already, and its gradient would be summed "
                f"twice; apply one of ddp, zero, fsdp and local_sgd, once"
            )
    check_layers(model)
    for path, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise ValueError(
                f"{name}: the buffer {path} is {buffer.layout}, and only dense ones can be sent; "
                f"make it dense, or an attribute, which each rank has for itself"
            )
    for p in model.parameters():
        p.claimed_by = _Claim(name)


class _Claim(str):
    """Which strategy trains a parameter; none, once it was saved and loaded, as by torch.save."""

    def __reduce__(self) -> tuple:
        return str, ()


def check_layers(model: nn.Module) -> None:
    """Raise `ValueError` for a layer of sparse gradients, or one that writes into its weights."""
    for path, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        name = path or type(module).__name__
        if own and getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name} has sparse=True, and only dense gradients can be shared here; make it "
                f"with sparse=False"
            )
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{name} has max_norm={module.max_norm:g}: its forward writes into the rows that "
                f"it looks up, which differ between ranks, and so would weights; make it with "
                f"max_norm=None, and scale its output or its weights after the step"
            )


def check_python(model: nn.Module) -> None:
    """Raise `ValueError` for a part of `model` that torch.jit runs, and no weight is waited for."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'the model'} was made by torch.jit, which reads weights without asking "
                f"whether they are here; give the module that it was made of"
            )


def check_real(model: nn.Module) -> None:
    """Raise `ValueError` for a complex parameter: `reduce=` would lose half of its gradient."""
    for name, p in model.named_parameters():
        if p.is_complex():
            raise ValueError(f"reduce= sums real numbers, and {name} is {p.dtype}; leave it out")


def check_apart(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise `ValueError` for two parameters in the same memory, which each would get its own."""
    ends: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in named:
        if p.numel() and not p.is_meta:
            length = 1 + sum(
                (n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True)
            )
            span = p.data_ptr(), p.data_ptr() + length * p.element_size(), name
            ends.setdefault(p.untyped_storage().data_ptr(), []).append(span)
    for spans in ends.values():
        for (_, end, first), (start, _, second) in pairwise(sorted(spans)):
            if start < end:
                raise ValueError(
                    f"{second} and {first} are two parameters in the same memory, and here each "
                    f"gets memory of its own; tie them as one: let both modules have the parameter "
                    f"itself, as in head.weight = embedding.weight"
                )


def check_hooks(p: nn.Parameter, num_own: int = 0) -> None:
    """Raise `RuntimeError` for a hook on the gradient of `p`, of which this rank has pieces.

    `num_own` of its hooks are minipar's: where there are no more, nothing is looked at.
    """
    hooks = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
    if len(hooks) > num_own and any(map(_is_foreign, hooks)):
        raise RuntimeError(
            f"a parameter of shape {tuple(full_shape(p))} has a hook on its gradient, which would "
            f"not be called with it: under fsdp it comes in pieces, and without hooks; change "
            f"gradients after finish_backward()"
        )


def comes_last(p: nn.Parameter, own: Callable) -> bool:
    """Whether `own` is the last hook on the whole gradient of `p`; from the next one on, it is.

    Hooks that were registered later may still change a gradient that must not be sent before.
    """
    hooks = p._post_accumulate_grad_hooks or {}
    if len(hooks) < 2:
        return True
    key = next(key for key, hook in hooks.items() if hook == own)
    is_last = not any(map(_is_foreign, list(hooks.values())[list(hooks).index(key) + 1 :]))
    if not is_last:
        hooks[key] = hooks.pop(key)
    return is_last


def _is_foreign(hook: Callable) -> bool:
    """Whether it is none of minipar's own, which look at gradients and change none."""
    return not (getattr(hook, "__module__", None) or "").startswith("minipar.")


def check_gradient(p: nn.Parameter, gradient: Tensor) -> None:
    """Raise `RuntimeError` for a gradient that is not dense, or was taken away."""
    if gradient is None:
        raise RuntimeError(
            f"a hook has taken the gradient of a parameter of shape {tuple(p.shape)} away, and "
            f"there is none to share; use gradients after finish_backward()"
        )
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {gradient.layout}, and only "
            f"dense ones can be shared here; embeddings need sparse=False"
        )


# ---------------------------------------------------------------------- when an optimizer steps
_strategies: "weakref.WeakSet[Any]" = weakref.WeakSet()
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # strategies, too
_checked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_is_looking: ContextVar[bool] = ContextVar("is_looking", default=False)  # at a call of torch's


def notice(strategy: Any) -> None:
    """Refuse what torch's clipping and norms would see of the model of `strategy` too little of."""
    _strategies.add(strategy)
    _listen()


def watch(strategy: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse to step or to clip `parameters` while `strategy.is_finished` is false, and to step
    what no rank shares of its model: a layer that was frozen here, or takes another's place."""
    strategy.watched = frozenset(parameters)
    strategy.frozen = {p for p in strategy.model.parameters() if not p.requires_grad}
    _watched.add(strategy)


def check_finished(strategy: Any, what: str) -> None:
    """Raise `RuntimeError` if `what` comes between a backward and its `finish_backward`."""
    if not strategy.is_finished:
        raise RuntimeError(
            f"{what} came before finish_backward(): the gradients here are those of this rank, not "
            f"of the batch. Call finish_backward() of the {type(strategy).__name__} strategy along "
            f"{strategy.axis.name} once per step, after the last backward, on all ranks"
        )


@cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _around(Optimizer, "zero_grad", partial(_drop_first, stepped_by))
    _around(nn.Module, "zero_grad", partial(_drop_first, nn.Module.parameters))
    _around(nn.init, "_calculate_fan_in_and_fan_out", _fans_of_whole)
    _around(GradScaler, "_unscale_grads_", _agree_on_overflow)
    # Hooks would have to be registered for each optimizer, before it is asked.
    _around(Optimizer, "state_dict", _tell_whose)
    _around(Optimizer, "load_state_dict", _load_own)
    _around(nn.Module, "load_state_dict", _load_in_place)
    for function in (
        clip_grad.clip_grad_norm_,
        clip_grad._get_total_norm,
        clip_grad.clip_grad_value_,
        clip_grad._clip_grads_with_norm_,
    ):
        _look_first(function)


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """From now on ``owner.name(...)`` is ``function(before, ...)``, with `before` what it was."""
    before = getattr(owner, name)

    @wraps(before)
    def after(*args: Any, **options: Any) -> Any:
        return function(before, *args, **options)

    setattr(owner, name, after)


def _drop_first(
    parameters_of: Callable, zero_grad: Callable, owner: Any, set_to_none: bool = True
) -> None:
    """Let `zero_grad` reach gradients that are still on their way, too."""
    zeroed = frozenset(parameters_of(owner))
    for strategy in list(_watched):
        if not strategy.watched.isdisjoint(zeroed):
            strategy.drop(zeroed)
    zero_grad(owner, set_to_none)


def _fans_of_whole(fans: Callable, tensor: Tensor) -> tuple[int, int]:
    if getattr(tensor, "is_flat", False):
        raise RuntimeError(
            "the scale of a first value follows from the shape of the whole weight, and under fsdp "
            "this rank has a piece; initialise before fsdp.apply, or give it init="
        )
    return fans(tensor)


def _agree_on_overflow(
    unscale: Callable, scaler: Any, optimizer: Optimizer, scale: Tensor, found: Tensor, half: bool
) -> dict[torch.device, Tensor]:
    """Whether there was an overflow, on any rank that has pieces of the same gradients."""
    _check_finished(stepped_by(optimizer), "scaler.unscale_()")
    if not getattr(optimizer, "attached", True):
        raise RuntimeError(
            f"a {type(optimizer).__name__} by itself takes gradients over as it steps, too late "
            f"for GradScaler; let zero.apply bring them to it"
        )
    flags = unscale(scaler, optimizer, scale, found, half) or {found.device: found.clone()}
    for axis in in_order([axis for p in stepped_by(optimizer) for axis in axes_of(p)]):
        for flag in flags.values():
            all_reduce(flag, axis, "max", out=flag)
    return flags


def _look_first(function: Callable[..., Any]) -> None:
    """Let `_check_seen` see what `function` of torch is given, by whichever name it was imported.

    What it does lies in a cell of a wrapper, torch's own no_grad, that all its names share.
    """
    (cell,) = function.__closure__
    inner = cell.cell_contents
    signature, name = inspect.signature(inner), inner.__name__.lstrip("_")

    @wraps(inner)
    def checked(*args: Any, **options: Any) -> Any:
        if _is_looking.get():  # one of these calls another, with what has been looked at
            return inner(*args, **options)
        call = signature.bind(*args, **options)
        first, given = next(iter(call.arguments.items()))
        tensors = [given] if isinstance(given, Tensor) else list(given)
        _check_seen(name, tensors)
        if tensors:  # torch warns of a generator that is empty
            call.arguments[first] = tensors
        token = _is_looking.set(True)
        try:
            return inner(*call.args, **call.kwargs)
        finally:
            _is_looking.reset(token)

    cell.cell_contents = checked


def _check_seen(name: str, tensors: list[Tensor]) -> None:
    """Raise `RuntimeError` where torch's `name` of parameters or gradients would be wrong."""
    owners, missed = {}, []
    for strategy in list(_strategies):
        pieces = [p for row in strategy.rows for p in row.pieces]
        own = [*strategy.model.parameters(), *pieces]
        owners |= {id(t): p for p in own for t in (p, p.grad)}
        is_elsewhere = any(hasattr(p, "stepped_elsewhere") for p in own)
        has_some = [p for p in own if p.grad is not None]
        missed += own if not strategy.is_finished else has_some if is_elsewhere else []
    if name == "get_total_norm" and missed and not tensors:  # else the norm of nothing, 0
        raise RuntimeError(
            "torch's get_total_norm sees no gradient here, as those of the batch are elsewhere, or "
            "not complete; after finish_backward(), call strategy.clip_grad_norm_(max_norm) in its "
            "place, which returns the norm of all (max_norm=math.inf only measures)"
        )
    parameters = [owners.get(id(t), t) for t in tensors]
    _check_finished(parameters, f"{name}()")
    for p in parameters:
        axes = [axis.name for axis in axes_of(p) if axis.size > 1]
        if name in ("clip_grad_norm_", "get_total_norm") and (
            axes or hasattr(p, "stepped_elsewhere")
        ):
            raise RuntimeError(
                f"torch's {name} sees the gradients of this rank alone, and here each "
                f"rank has pieces of them{f' along {axes[0]}' if axes else ''}; "
                f"call strategy.clip_grad_norm_(max_norm) in its place, which returns the norm of "
                f"all (max_norm=math.inf only measures)"
            )
        if hasattr(p, "stepped_elsewhere"):
            raise RuntimeError(
                f"torch's {name} changes nothing here, as these parameters do not get the "
                f"gradients of the batch; give it strategy.with_gradients()"
            )


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of `optimizer`."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    stepped = frozenset(stepped_by(optimizer))
    _check_finished(stepped, "the end of a closure")
    for strategy in list(_watched):
        if not strategy.watched.isdisjoint(stepped):
            strategy.has_stepped(stepped)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    parameters = stepped_by(optimizer)
    for p in parameters:
        if why := getattr(p, "stepped_elsewhere", None):
            raise RuntimeError(f"this {type(optimizer).__name__} changes nothing: {why}")
        if hasattr(p, "is_kept") and p not in getattr(optimizer, "keeps", ()):
            raise RuntimeError(
                f"this {type(optimizer).__name__} would step 16-bit working weights, and not their "
                f"masters: step the optimizer that masters.keep() was given"
            )
    _check_finished(parameters, "optimizer.step()")
    _check_shared(parameters)
    if optimizer not in _checked:
        # One that wraps another, which the trial would step: that one is checked as it steps.
        wraps = any(isinstance(value, Optimizer) for value in vars(optimizer).values())
        for group in () if wraps else optimizer.param_groups:
            if any(_is_in_pieces(p) for p in group["params"]):
                make = partial(twin, optimizer)
                check_elementwise(make, type(optimizer).__name__, group, group["params"][0])
        _checked.add(optimizer)


def _is_in_pieces(p: nn.Parameter) -> bool:
    """Whether this rank has a part of its numbers: of fsdp's rows, or a slice of a matrix."""
    return getattr(p, "is_flat", False) or p.shape != full_shape(p)


def _check_finished(parameters: Iterable[nn.Parameter], what: str) -> None:
    for strategy in list(_strategies):
        if not strategy.watched.isdisjoint(parameters):
            check_finished(strategy, what)


def _check_shared(parameters: list[nn.Parameter]) -> None:
    """Raise `RuntimeError` for a parameter of a shared model whose gradient is of this rank."""
    strategies = list(_watched)
    known = set().union(*(strategy.watched for strategy in strategies))
    stepped = {p for p in parameters if p.requires_grad and p.grad is not None}
    for strategy in strategies if stepped else ():
        late = stepped - known
        if not strategy.watched.isdisjoint(parameters):
            late |= {p for p in strategy.frozen if p.requires_grad}
        names = {p: name for name, p in strategy.model.named_parameters()} if late else {}
        if strategy.axis.size > 1 and not late.isdisjoint(names):
            raise RuntimeError(
                f"{names[(late & names.keys()).pop()]} was frozen, or another, when "
                f"{type(strategy).__name__} was applied along {strategy.axis.name}: no rank shares "
                f"its gradient, and each would step by its own. Unfreeze and replace layers first, "
                f"then apply the strategy"
            )


# ---------------------------------------------------------------------- whose state this is
def refuse_state(model: nn.Module, *, loads: bool = False) -> None:
    """Let `model.state_dict()` raise `RuntimeError`: it would be of the pieces of this rank.

    If it `loads` whole weights by other means, let `load_state_dict()` raise as well.
    """
    for module in model.modules():
        if any(axes_of(p) for p in module.parameters(recurse=False)):
            module.register_state_dict_pre_hook(_refuse_to_tell)
            if loads:
                module.register_load_state_dict_pre_hook(_refuse_to_load)


def _refuse_to_tell(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # which asks for the parameters themselves
        raise RuntimeError(
            "state_dict() would hold this rank's pieces: call full_state_dict() of the strategy on "
            "all ranks for whole weights, load_full_state_dict() to load them"
        )


def _refuse_to_load(*_: Any) -> None:
    raise RuntimeError(
        "load_state_dict() would write into this rank's pieces: call load_full_state_dict() of the "
        "strategy on all ranks, with whole weights as full_state_dict() returns them"
    )


def _tell_whose(tell: Callable, optimizer: Optimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` tells, with whose pieces it is of, if they are pieces."""
    told = tell(optimizer)
    pieces = {n: place for n, p in _numbered(optimizer, told) if (place := _place_of(p))}
    return {**told, "pieces": pieces} if pieces else told


def _load_own(load: Callable, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise `ValueError` for a state of whole parameters, or of the pieces of another rank."""
    for n, p in _numbered(optimizer, state_dict) if "state" in state_dict else ():
        theirs = state_dict.get("pieces", {}).get(n, _place_of(p))
        own = state_dict["state"].get(n, {}).values() if axes_of(p) else ()
        tensors = [t for t in own if isinstance(t, Tensor) and t.ndim]
        if theirs != _place_of(p) or any(t.shape != p.shape for t in tensors):
            places = [f"rank {axis.rank} along {axis.name}={axis.size}" for axis in axes_of(p)]
            raise ValueError(
                f"this is not the state of {' and '.join(places) or 'whole parameters'}: "
                f"optimizer.state_dict() is of the pieces of one rank. Save "
                f"strategy.full_optimizer_state(optimizer), and take it over by "
                f"strategy.load_full_optimizer_state(optimizer, state)"
            )
    load(optimizer, state_dict)


def _load_in_place(
    load: Callable, module: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
) -> Any:
    """Raise `RuntimeError` where other tensors would take the place of parameters."""
    for name, p in module.named_parameters() if assign else ():
        if owner := getattr(p, "claimed_by", None):
            raise RuntimeError(
                f"load_state_dict(assign=True) would put another tensor in the place of {name}, "
                f"which is trained by {owner}, and no optimizer would have it; leave out "
                f"assign=True, or load before the strategy is applied"
            )
    return load(module, state_dict, strict, assign)


def _numbered(optimizer: Optimizer, told: dict[str, Any]) -> list[tuple[int, nn.Parameter]]:
    """The numbers that `told` has for the parameters of `optimizer`."""
    numbers = [n for group in told.get("param_groups", []) for n in group["params"]]
    # Torch says what is wrong with their number.
    return list(zip(numbers, stepped_by(optimizer), strict=False))


def _place_of(p: nn.Parameter) -> list[list[int]]:
    """Rank and size of each axis of several ranks that cuts `p`."""
    return [[axis.rank, axis.size] for axis in axes_of(p) if axis.size > 1]
