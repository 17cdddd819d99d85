"""The numbers of one device, and of each rank, under the names of one device.

Runs inside of ranks: one device is a group of one, so that calls of the file's loss go there
as well. Everything is in float64, and every rank has a seed of its own, so that nothing is equal by
luck: what ranks are to have alike must have been made alike.
"""

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.parallel.base.strategy import Strategy
from minipar.tools.prove.compare import Record, State, differing
from minipar.tools.prove.job import (
    Job,
    WrongFile,
    blamed,
    joined,
    mapped,
    rows,
    with_strategies,
)

SEED = 1000  # of rank 0, and of one device; rank r has SEED + r


@dataclass(frozen=True)
class Trial:
    """A short training: so many steps, each of so many microbatches."""

    name: str
    steps: int = 1
    microbatches: int = 1
    uneven: bool = False

    @property
    def is_joined(self) -> bool:
        """True if one device takes all microbatches at once: the truth, however they are cut."""
        return self.uneven and self.microbatches > 1

    def batches(self, job: Job, step: int) -> list[Any]:
        """Return the global batch of each microbatch of a step."""
        draw = job.uneven if self.uneven else job.batch
        seeds = range(step * self.microbatches, (step + 1) * self.microbatches)
        return [mapped(lambda t: t.double() if t.is_floating_point() else t, draw(seed))
                for seed in seeds]  # fmt: skip

    def on_one_device(self, batches: list[Any]) -> list[Any]:
        """Return the microbatches of one device."""
        return [joined(batches)] if self.is_joined else batches


@dataclass
class Seen(Record):
    """The notes of one rank. A tensor may be a piece, and nothing says which piece."""

    built: State = field(default_factory=dict)  # by build(), here, before parallelize
    outputs: State = field(default_factory=dict)  # by module, in order of execution
    kinds: dict[str, str] = field(default_factory=dict)  # names of modules -> of their classes
    ties: list[tuple[str, ...]] = field(default_factory=list)  # names that are one parameter
    data: list[str] = field(default_factory=list)  # axes on which ranks have rows of their own
    has_uneven: bool = False
    has_whole_batch: bool = True  # False if the file's function shares it out
    has_gradients: bool = True  # False if the optimizer's step reduces them
    own_norms: list[float] = field(default_factory=list)  # of what this rank holds, by step
    parts: list[list[tuple[float, State]]] = field(default_factory=list)
    """On one device: loss and gradients of each share of each microbatch, for the first step."""


def observe(source: str | Job, sizes: dict[str, int], trial: Trial, alone: bool) -> Seen:
    """Run a trial on this rank of a mesh; `alone`: as one device, and each share by itself too."""
    usual, doing = torch.get_default_dtype(), ["reading it"]
    torch.set_default_dtype(torch.float64)
    mesh = Mesh() if alone else Mesh(**sizes)
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
    variables = mock.patch.dict(os.environ, _of_torchrun(mesh))
    try:
        with torch.enable_grad(), quiet, variables, blamed(getattr(source, "file", source), doing):
            job = Job.load(source) if isinstance(source, str) else source
            data = job.data_axes(sizes)
            seen = _Run(job, mesh, trial, alone, doing).train()
            seen.data, seen.has_uneven = data, job.uneven is not None
            seen.has_whole_batch = not callable(job.shares)
            seen.has_gradients = not job.reduced_in_step
            if alone:
                doing.append("loss() of a share")
                seen.parts = _parts(job, trial, math.prod(sizes[a] for a in data), seen)
            return seen
    finally:
        torch.set_default_dtype(usual)


def _of_torchrun(mesh: Mesh) -> dict[str, str]:
    """Return the variables that torchrun sets, which libraries read."""
    rank, size = str(mesh.rank), str(mesh.size)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _build(job: Job, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = job.build()
    if not isinstance(model, nn.Module):
        raise WrongFile(f"build() returned {type(model).__name__}, which is not an nn.Module")
    return model.double()


class _Run:
    """A trial on one rank, or on one device."""

    def __init__(self, job: Job, mesh: Mesh, trial: Trial, alone: bool, doing: list[str]) -> None:
        self.job, self.mesh, self.trial, self.alone, self.doing = job, mesh, trial, alone, doing
        doing.append("build()")
        model = _build(job, SEED + mesh.rank)
        persistent = {_clean(name) for name in model.state_dict()}
        built = {n: t for n, t in _copies(_named(model, _clean)).items() if n in persistent}
        self.buffers = {_clean(name) for name, _ in model.named_buffers(remove_duplicate=False)}
        self.trainable = sum(p.requires_grad for p in model.parameters())
        self.after: Callable[[], Any] = lambda: None
        self.strategies: list[Strategy] = []
        if not alone:
            doing.append("parallelize()")
            parallel = job.parallelize(model, mesh)
            model, self.after, self.strategies = with_strategies(parallel)
            _without_mixed_precision(model)
        self.model, self.clean = model, _cleaner(model, built)
        doing.append("optimizer()")
        self.optimizer = _optimizer(job, model, self.strategies)
        doing.append("gathering the initial weights")
        before = built if alone else self.whole(_named(model, self.clean), "full_state_dict")
        self.seen = Seen(before, {}, built=built)
        modules = model.named_modules()
        self.seen.kinds = {self.clean(name): type(module).__name__ for name, module in modules}
        self.seen.ties = _ties(model, self.clean)
        torch.manual_seed(SEED + mesh.rank)  # for numbers that the model draws from here on
        self.outputs = _record_outputs(model, self.clean)

    def train(self) -> Seen:
        """Take the steps of the trial, and write down what each computes."""
        seen, doing = self.seen, self.doing
        for step in range(self.trial.steps):
            at = f"step {step + 1}"
            self.optimizer.zero_grad()
            seen.losses.append(self.forward_and_backward(step, at))
            doing.append(f"what follows backward in {at}")
            self.after()
            doing.append(f"gathering the gradients of {at}")
            gradients = _gradients(self.model, self.clean)
            own = {name: g for name, g in gradients.items() if g is not None}
            shards = [g.to_local() if _is_torchs(g) else g for g in own.values()]
            seen.own_norms.append(math.sqrt(sum(float(g.square().sum()) for g in shards)))
            seen.gradients.append(self.whole(gradients, "full_gradients"))
            for name, gradient in seen.gradients[-1].items() if self.alone else ():
                if gradient is not None and not gradient.isfinite().all():
                    raise WrongFile(
                        f"the gradient of {name} on one device is not finite in {at}: nothing can "
                        f"be compared"
                    )
            doing.append(f"clipping in {at}")
            seen.norms.append(self.norm(own))
            doing.append(f"the optimizer's {at}")
            self.optimizer.step()
            doing.append(f"gathering the weights after {at}")
            state = self.whole(_named(self.model, self.clean), "full_state_dict")
            state = {n: t for n, t in state.items() if n in seen.built or not self.alone}
            seen.weights.append({n: t for n, t in state.items() if n not in self.buffers})
            seen.buffers.append({n: t for n, t in state.items() if n in self.buffers})
        return seen

    def forward_and_backward(self, step: int, at: str) -> float:
        """Accumulate the gradients of a step's microbatches, and return the loss of the step."""
        job, batches, total = self.job, self.trial.batches(self.job, step), 0.0
        if self.alone:
            batches = self.trial.on_one_device(batches)
        elif job.accumulate is not None:
            self.doing.append(f"accumulate() of {at}")
            own = [job.share(batch, self.mesh) for batch in batches]
            with AllDigits():
                total = _number(job.accumulate(self.model, own), "accumulate()")
            batches = []
        for m, batch in enumerate(batches):
            self.doing.append(f"forward and loss of {at}")
            with contextlib.ExitStack() as stack:
                if m < len(batches) - 1 and not self.alone:
                    for context in self.unsynced():
                        stack.enter_context(context)
                own = batch if self.alone else job.share(batch, self.mesh)
                with AllDigits():
                    loss = job.loss(self.model, own)
                total += _number(loss, "loss()") / len(batches)
                if (step, m) == (0, 0):
                    self.seen.outputs = self.whole(dict(self.outputs), "")
                if self.alone and not math.isfinite(total):
                    raise WrongFile(
                        f"the loss on one device is {total} in {at}: nothing can be compared"
                    )
                self.doing.append(f"backward of {at}")
                if self.alone or job.backward is None:
                    _backward(loss / len(batches))
                else:
                    given = (loss, len(batches)) if job.divides() else (loss / len(batches),)
                    with AllDigits(in_backward=True):
                        job.backward(*given)
        return total

    def whole(self, named: State, by_strategy: str) -> State:
        """Return copies of tensors; DTensors and shards of our strategies become whole.

        The file's own `gather` is asked for every name that any rank has, on all ranks.
        """
        if self.strategies and by_strategy:
            found = getattr(self.strategies[-1], by_strategy)()
            return {self.clean(name): value for name, value in found.items()}
        if self.alone:
            return _copies(named)
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of slow gathers
        gather = self.job.gather if by_strategy else None
        theirs = {name: _is_torchs(tensor) for name, tensor in named.items()}
        of_ranks = all_gather_object(theirs, self.mesh.world)
        found = dict(named)
        for name in sorted(set().union(*of_ranks)):
            if all(has.get(name, True) for has in of_ranks) and name in named:
                found[name] = _whole_tensor(found[name].detach())
            if gather is not None:
                found[name] = gather(name, found.get(name), self.mesh)
        local = {n: t.to_local() if _is_torchs(t) else t for n, t in found.items()}
        return _copies(local)

    def unsynced(self) -> list[Any]:
        """Return the contexts for a microbatch that others follow."""
        if self.job.no_sync is not None:
            return [self.job.no_sync(self.model)]
        models = self.strategies or [self.model]
        return [each.no_sync() for each in models if hasattr(each, "no_sync")]

    def norm(self, own: dict[str, Tensor]) -> float | None:
        """Return the norm of all gradients as the file reckons it; None where it does not say."""
        if self.job.clip is not None:
            norm = self.job.clip(self.model)
            return None if norm is None else float(_whole_tensor(norm))
        if self.strategies:
            return float(self.strategies[-1].clip_grad_norm_(math.inf))
        meshes, built = {getattr(g, "device_mesh", None) for g in own.values()}, self.seen.built
        is_whole = all(g.shape == built[name].shape for name, g in own.items() if name in built)
        is_whole &= self.alone or len(own) == self.trainable  # others may be on other ranks
        if len(meshes) == 1 and (is_whole or None not in meshes):
            return float(_whole_tensor(torch.nn.utils.get_total_norm(list(own.values()))))
        return None  # torch's function would take this rank's pieces alone, or refuse


def _number(loss: Any, what: str) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = list(getattr(loss, "shape", [type(loss).__name__]))
        found = f"{loss.dtype} {found}" if isinstance(loss, Tensor) else str(found)
        raise WrongFile(f"{what} returned {found}; it must be one real number, []")
    return float(_whole_tensor(loss.detach()))


def _optimizer(job: Job, model: nn.Module, strategies: list[Strategy]) -> Any:
    if job.optimizer is not None:
        return job.optimizer(model)
    if own := [each.optimizer for each in strategies if hasattr(each, "optimizer")]:
        return own[0]
    trainable = [p for p in model.parameters() if p.requires_grad]
    # An eps that does not blow up the noise of gradients that are zero but for rounding.
    return torch.optim.AdamW(trainable, lr=0.01, weight_decay=0.1, eps=1e-6)


def _parts(job: Job, trial: Trial, data_ranks: int, seen: Seen) -> list[list[tuple[float, State]]]:
    """Return loss and gradients of every share, on one device. Refuse what is random."""
    model = _build(job, SEED)
    named = _copies(_named(model, _clean))
    again = {name: value for name, value in named.items() if name in seen.built}
    if odd := differing(again, seen.built):
        raise WrongFile(f"build() under one seed differs in {next(iter(odd))}; draw from torch")
    torch.manual_seed(SEED - 1)  # another one than before
    batches, found = trial.batches(job, 0), []
    whole = trial.on_one_device(batches)
    with AllDigits():
        total = sum(job.loss(model, batch).item() / len(whole) for batch in whole)
    if abs(total - seen.losses[0]) > 1e-10 * abs(total):
        raise WrongFile(
            f"the loss of one batch is {seen.losses[0]:.6g} and then {total:.6g}: what is random "
            f"cannot be compared; build() without dropout, and draw batch(seed) from its seed"
        )
    for batch in batches:
        found.append([])
        for index in range(data_ranks):
            model.zero_grad()
            with AllDigits():
                loss = job.loss(model, rows(batch, index, data_ranks))
            _backward(loss)
            found[-1].append((loss.item(), _copies(_gradients(model, _clean))))
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
    """Make torch's FSDP2 keep float64, whatever policy it was given."""
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
    """Return the name of a parameter or module without the names of torch's wrappers."""
    return re.sub(_WRAPPERS, "", name).removeprefix(".")


def _cleaner(model: nn.Module, built: Iterable[str]) -> Callable[[str], str]:
    """Return what also strips the prefix of a wrapper, if all names have it: "model." of
    "model.0.weight" where build() had "0.weight"."""
    names = [_clean(name) for name, _ in model.named_parameters()]
    ends = [name for name in built if names and names[0].endswith(f".{name}")]
    for prefix in [names[0].removesuffix(name) for name in ends]:
        if all(n.startswith(prefix) and n.removeprefix(prefix) in built for n in names):
            return lambda name: _clean(name).removeprefix(prefix[:-1]).removeprefix(".")
    return _clean


def _named(model: nn.Module, clean: Callable[[str], str]) -> State:
    """Return parameters, those that are tied too, and buffers of real numbers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    return {clean(name): value for name, value in named.items() if value.is_floating_point()}


def _gradients(model: nn.Module, clean: Callable[[str], str]) -> State:
    return {clean(name): p.grad for name, p in model.named_parameters()}


def _copies(named: State) -> State:
    return {n: None if value is None else value.detach().clone() for n, value in named.items()}


def _ties(model: nn.Module, clean: Callable[[str], str]) -> list[tuple[str, ...]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(clean(name))
    return [tuple(same) for same in names.values() if len(same) > 1]


def _whole_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if _is_torchs(value) else value


def _is_torchs(value: Any) -> bool:
    """Return True for a DTensor; that module takes a second to import, and may not be needed."""
    return hasattr(value, "full_tensor")


def _record_outputs(model: nn.Module, clean: Callable[[str], str]) -> State:
    """Return what modules return the first time, filled while they run: their first tensor."""
    outputs: State = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors: list[Tensor] = []
        mapped(tensors.append, output)
        numbers = [t for t in tensors if t.is_floating_point()]
        if numbers and name not in outputs:
            outputs[name] = numbers[0].detach().clone()

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, clean(name)))
    return outputs
