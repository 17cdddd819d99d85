"""What one device, and each rank, computes of a training: written down by the names of one device.

Runs inside of ranks: one device is a group of one, so that what the file's loss sends is sent there
as well. Everything is in float64, and every rank has a seed of its own, so that nothing is equal by
luck: what ranks are to have alike must have been made alike.
"""

import contextlib
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.parallel.base.strategy import Strategy
from minipar.tools.prove.compare import Record, State, differing
from minipar.tools.prove.job import Job, WrongFile, blamed, mapped, rows, with_strategies

SEED = 1000  # of rank 0, and of one device; rank r has SEED + r


@dataclass(frozen=True)
class Trial:
    """A short training: so many steps, each of so many microbatches."""

    name: str
    steps: int = 1
    microbatches: int = 1
    uneven: bool = False

    def batches(self, job: Job, step: int) -> list[Any]:
        """The global batch of each microbatch of a step."""
        draw = job.uneven if self.uneven else job.batch
        seeds = range(step * self.microbatches, (step + 1) * self.microbatches)
        return [mapped(_to_float64, draw(seed)) for seed in seeds]


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@dataclass
class Seen(Record):
    """What one rank saw. Tensors may be pieces still, where nothing says of what."""

    built: State = field(default_factory=dict)  # by build(), here, before parallelize
    outputs: State = field(default_factory=dict)  # by module, in order of execution
    kinds: dict[str, str] = field(default_factory=dict)  # names of modules -> of their classes
    ties: list[tuple[str, ...]] = field(default_factory=list)  # names that are one parameter
    data: list[str] = field(default_factory=list)  # axes whose ranks have rows of their own
    has_uneven: bool = False
    parts: list[list[tuple[float, State]]] = field(default_factory=list)
    """On one device: loss and gradients of each share of each microbatch, for the first step."""


def observe(source: str | Job, sizes: dict[str, int], trial: Trial, alone: bool) -> Seen:
    """Run a trial on this rank of a mesh; `alone`: as one device, and each share by itself too."""
    usual, doing = torch.get_default_dtype(), ["reading it"]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), blamed(getattr(source, "file", source), doing):
            job = Job.load(source) if isinstance(source, str) else source
            seen = _train(job, Mesh() if alone else Mesh(**sizes), trial, alone, doing)
            seen.data, seen.has_uneven = job.data_axes(sizes), job.uneven is not None
            if alone:
                doing.append("loss() of a share")
                seen.parts = _parts(job, trial, math.prod(sizes[a] for a in seen.data), seen)
            return seen
    finally:
        torch.set_default_dtype(usual)


def _build(job: Job, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = job.build()
    if not isinstance(model, nn.Module):
        raise WrongFile(f"build() returned {type(model).__name__}, which is no nn.Module")
    return model.double()


def _train(job: Job, mesh: Mesh, trial: Trial, alone: bool, doing: list[str]) -> Seen:
    doing.append("build()")
    model = _build(job, SEED + mesh.rank)
    persistent = {_clean(name) for name in model.state_dict()}
    built = {n: t for n, t in _copies(_named(model)).items() if n in persistent}
    after: Callable[[], Any] = lambda: None  # noqa: E731
    strategies: list[Strategy] = []
    if not alone:
        doing.append("parallelize()")
        model, after, strategies = with_strategies(job.parallelize(model, mesh))
        _without_mixed_precision(model)
    doing.append("optimizer()")
    optimizer = _optimizer(job, model, strategies)

    def whole(named: State, by_strategy: str) -> State:
        if strategies:
            found = getattr(strategies[-1], by_strategy)()
            return {_clean(name): value for name, value in found.items()}
        return _copies(named) if alone else _whole(mesh, named, job.gather)

    doing.append("gathering the initial weights")
    seen = Seen(built if alone else whole(_named(model), "full_state_dict"), {}, built=built)
    seen.kinds = {_clean(name): type(module).__name__ for name, module in model.named_modules()}
    seen.ties = _ties(model)
    torch.manual_seed(SEED + mesh.rank)  # for what the model draws from here on
    outputs = _record_outputs(model)
    for step in range(trial.steps):
        optimizer.zero_grad()
        batches, losses = trial.batches(job, step), []
        for m, batch in enumerate(batches):
            with contextlib.ExitStack() as stack:
                if m < len(batches) - 1 and not alone:
                    for context in _unsynced(job, model, strategies):
                        stack.enter_context(context)
                doing.append(f"forward and loss of step {step + 1}")
                own = batch if alone else job.share(batch, mesh)
                with AllDigits():
                    loss = job.loss(model, own)
                if not seen.outputs:
                    seen.outputs = dict(outputs) if alone else _whole(mesh, outputs)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    what = list(getattr(loss, "shape", [type(loss).__name__]))
                    raise WrongFile(f"loss() returned {what}; it must be one number, []")
                losses.append(float(_whole_tensor(loss.detach())) / len(batches))
                if alone and not math.isfinite(losses[-1]):
                    raise WrongFile(
                        f"the loss on one device is {losses[-1]} in step {step + 1}: nothing can "
                        f"be compared"
                    )
                doing.append(f"backward of step {step + 1}")
                _backward(loss / len(batches))
        seen.losses.append(sum(losses))
        doing.append(f"what follows backward in step {step + 1}")
        after()
        doing.append(f"gathering the gradients of step {step + 1}")
        seen.gradients.append(whole(_gradients(model), "full_gradients"))
        for name, gradient in seen.gradients[-1].items():
            if alone and gradient is not None and not gradient.isfinite().all():
                raise WrongFile(
                    f"the gradient of {name} on one device is not finite in step {step + 1}: "
                    f"nothing can be compared"
                )
        doing.append(f"clipping in step {step + 1}")
        seen.norms.append(_norm(job, model, strategies, built))
        doing.append(f"the optimizer's step {step + 1}")
        optimizer.step()
        doing.append(f"gathering the weights after step {step + 1}")
        seen.weights.append(whole(_named(model, buffers=False), "full_state_dict"))
    return seen


def _optimizer(job: Job, model: nn.Module, strategies: list[Strategy]) -> Any:
    if job.optimizer is not None:
        return job.optimizer(model)
    for strategy in strategies:
        if hasattr(strategy, "optimizer"):
            return strategy.optimizer
    trainable = [p for p in model.parameters() if p.requires_grad]
    # An eps that does not blow up the noise of gradients that are zero but for rounding.
    return torch.optim.AdamW(trainable, lr=0.01, weight_decay=0.1, eps=1e-6)


def _unsynced(job: Job, model: nn.Module, strategies: list[Strategy]) -> list[Any]:
    """Contexts for a microbatch that others follow."""
    if job.no_sync is not None:
        return [job.no_sync(model)]
    return [each.no_sync() for each in strategies or [model] if hasattr(each, "no_sync")]


def _norm(job: Job, model: nn.Module, strategies: list[Strategy], built: State) -> float | None:
    """The norm of all gradients as the file reckons it; None where it does not say how."""
    if job.clip is not None:
        norm = job.clip(model)
        return None if norm is None else float(_whole_tensor(norm))
    if strategies:
        return float(strategies[-1].clip_grad_norm_(math.inf))
    named = {name: g for name, g in _gradients(model).items() if g is not None}
    meshes = {getattr(g, "device_mesh", None) for g in named.values()}
    is_whole = all(g.shape == built[name].shape for name, g in named.items() if name in built)
    if len(meshes) == 1 and (is_whole or None not in meshes):
        return float(_whole_tensor(torch.nn.utils.get_total_norm(list(named.values()))))
    return None  # torch's function would take this rank's pieces alone, or refuse


def _parts(job: Job, trial: Trial, data_ranks: int, seen: Seen) -> list[list[tuple[float, State]]]:
    """Loss and gradients of every share, on one device; also tells whether the file is random."""
    model = _build(job, SEED)
    again = {name: value for name, value in _copies(_named(model)).items() if name in seen.built}
    if odd := differing(again, seen.built):
        raise WrongFile(f"build() under one seed differs in {next(iter(odd))}; draw from torch")
    torch.manual_seed(SEED - 1)  # another one than before
    batches, found = trial.batches(job, 0), []
    with AllDigits():
        total = sum(job.loss(model, batch).item() / len(batches) for batch in batches)
    if abs(total - seen.losses[0]) > 1e-10 * abs(total):
        raise WrongFile(
            f"the loss of one batch is {seen.losses[0]:.6g} and then {total:.6g}: what is random "
            f"cannot be compared; build() without dropout"
        )
    for batch in batches:
        found.append([])
        for index in range(data_ranks):
            model.zero_grad()
            with AllDigits():
                loss = job.loss(model, rows(batch, index, data_ranks))
            _backward(loss)
            found[-1].append((loss.item(), _copies(_gradients(model))))
    return found


class AllDigits(TorchFunctionMode):
    """While a model runs, float64 takes the place of any shorter type that it casts to.

    Else what it rounds (as a norm in float32) would be all that is seen. What hooks and the like
    cast in backward is a parallelisation's own, and is rounded as it says.
    """

    def __init__(self, in_backward: bool = False) -> None:
        super().__init__()
        self.in_backward = in_backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.in_backward or torch.is_grad_enabled():  # recomputed; hooks have no gradients
            if func in _CASTS:
                func = Tensor.double
            elif func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if _is_short(a) else a for a in args)
            if _is_short(kwargs.get("dtype")):
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _backward(loss: Tensor) -> None:
    """``loss.backward()``, which would run outside of the mode: it is a function that this sees."""
    with AllDigits(in_backward=True):
        given = (loss,), (torch.ones_like(loss),), False, False, ()
        _engine_run_backward(*given, allow_unreachable=True, accumulate_grad=True)


_CASTS = Tensor.float, Tensor.bfloat16, Tensor.half


def _without_mixed_precision(model: nn.Module) -> None:
    """Let torch's FSDP2 keep float64, whatever policy it was given."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            from torch.distributed.fsdp import MixedPrecisionPolicy

            state = module._get_fsdp_state()
            state._mp_policy = MixedPrecisionPolicy()
            for group in state._fsdp_param_groups:
                group.mp_policy = MixedPrecisionPolicy()


def _is_short(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < 8


# ---------------------------------------------------------------------- tensors by name
_WRAPPERS = r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)"


def _clean(name: str) -> str:
    """The name of a parameter or module without those of torch's wrappers."""
    return re.sub(_WRAPPERS, "", name).removeprefix(".")


def _named(model: nn.Module, buffers: bool = True) -> State:
    """Parameters, those that are tied too, and buffers of real numbers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False)) if buffers else {}
    return {_clean(name): value for name, value in named.items() if value.is_floating_point()}


def _gradients(model: nn.Module) -> State:
    return {_clean(name): p.grad for name, p in model.named_parameters()}


def _copies(named: State) -> State:
    return {n: None if value is None else value.detach().clone() for n, value in named.items()}


def _ties(model: nn.Module) -> list[tuple[str, ...]]:
    by_identity: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(p), []).append(_clean(name))
    return [tuple(names) for names in by_identity.values() if len(names) > 1]


def _whole_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if _is_torchs(value) else value


def _is_torchs(value: Any) -> bool:
    """Whether it is a DTensor; that module takes a second to import, and may not be needed."""
    return hasattr(value, "full_tensor")


def _whole(mesh: Mesh, named: State, gather: Callable | None = None) -> State:
    """Copies of tensors, those of DTensors whole, or as the file's own `gather` has it.

    Of what only some ranks have, these keep their piece, lest the others wait for it.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of slow ways to gather
    cut = {n for n, t in named.items() if t is not None and (gather or _is_torchs(t))}
    found = dict(named)
    for name in sorted(set.intersection(*all_gather_object(cut, mesh.world))):
        found[name] = _whole_tensor(found[name].detach())
        found[name] = gather(name, found[name], mesh) if gather else found[name]
    local = {n: t.to_local() if _is_torchs(t) else t for n, t in found.items()}
    return _copies(local)


def _record_outputs(model: nn.Module) -> State:
    """What modules return the first time, filled while they run: the first tensor of numbers."""
    outputs: State = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors: list[Tensor] = []
        mapped(tensors.append, output)
        numbers = [t for t in tensors if t.is_floating_point()]
        if numbers and name not in outputs:
            outputs[name] = numbers[0].detach().clone()

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, _clean(name)))
    return outputs
