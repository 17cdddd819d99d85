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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
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

    def batches(self, job: Job, step: int, alone: bool = False) -> list[Any]:
        """Return the global batch of each microbatch of a step; `alone`: as one device has them."""
        draw = job.uneven if self.uneven else job.batch
        drawn = [draw(step * self.microbatches + m) for m in range(self.microbatches)]
        drawn = mapped(lambda t: t.double() if t.is_floating_point() else t, drawn)
        return [joined(drawn)] if alone and self.is_joined else drawn


@dataclass
class Seen(Record):
    """The notes of one rank. A tensor may be a piece, and nothing says which piece."""

    built: State = field(default_factory=dict)  # by build(), here, before parallelize
    outputs: State = field(default_factory=dict)  # by module, in order of execution
    kinds: dict[str, str] = field(default_factory=dict)  # names of modules -> of their classes
    ties: list[tuple[str, ...]] = field(default_factory=list)  # names that are one parameter
    own_norms: list[float] = field(default_factory=list)  # of what this rank holds, by step
    # On one device alone:
    data: list[str] = field(default_factory=list)  # axes on which ranks have rows of their own
    has_whole_batch: bool = True  # False if the file's function shares it out
    has_uneven: bool = False
    parts: list[list[tuple[float, State]]] = field(default_factory=list)
    """Loss and gradients of each share of each microbatch, for the first step."""


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
            if not alone:
                return _Run(job, mesh, trial, doing).train()
            seen = _Run(job.on_one_device(), mesh, trial, doing).train()
            seen.data, seen.has_whole_batch = data, not callable(job.shares)
            seen.has_uneven = job.uneven is not None
            doing.append("loss() of a share")
            seen.parts = _parts(job, trial, math.prod(sizes[axis] for axis in data), seen)
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

    def __init__(self, job: Job, mesh: Mesh, trial: Trial, doing: list[str]) -> None:
        self.job, self.mesh, self.trial, self.doing = job, mesh, trial, doing
        doing.append("build()")
        model = _build(job, SEED + mesh.rank)
        saved = {_clean(name) for name in model.state_dict()}
        built = {n: t for n, t in _copies(_named(model)).items() if n in saved}
        self.buffers = {_clean(name) for name, _ in model.named_buffers(remove_duplicate=False)}
        doing.append("parallelize()")
        parallel = job.parallelize(model, mesh)
        self.model, self.after, self.strategies = with_strategies(parallel)
        _without_mixed_precision(self.model)
        self.clean = partial(_clean, prefix=_prefix(self.model, built))
        doing.append("optimizer()")
        self.optimizer = _optimizer(job, self.model, self.strategies)
        doing.append("gathering the initial weights")
        self.seen = Seen({}, {}, built=built, ties=_ties(self.model, self.clean))
        self.seen.before = self.weights()
        modules = self.model.named_modules()
        self.seen.kinds = {self.clean(name): type(module).__name__ for name, module in modules}
        torch.manual_seed(SEED + mesh.rank)  # for numbers that the model draws from here on
        self.outputs = _record_outputs(self.model, self.clean)

    def train(self) -> Seen:
        """Take the steps of the trial, and write down what each computes."""
        seen, doing, has_gradients = self.seen, self.doing, not self.job.reduced_in_step
        for step in range(self.trial.steps):
            at = f"step {step + 1}"
            self.optimizer.zero_grad()
            seen.losses.append(self.forward_and_backward(step, at))
            doing.append(f"what follows backward in {at}")
            self.after()
            doing.append(f"gathering the gradients of {at}")
            gradients = {self.clean(n): p.grad for n, p in self.model.named_parameters()}
            shards = [_local(g) for g in gradients.values() if g is not None]
            seen.own_norms.append(math.sqrt(sum(float(g.square().sum()) for g in shards)))
            seen.gradients.append(self.whole(gradients, "full_gradients") if has_gradients else {})
            doing.append(f"clipping in {at}")
            norm = self.norm()
            seen.norms.append(norm if has_gradients else None)
            doing.append(f"the optimizer's {at}")
            self.optimizer.step()
            doing.append(f"gathering the weights after {at}")
            state = self.weights()
            seen.weights.append({n: t for n, t in state.items() if n not in self.buffers})
            seen.buffers.append({n: t for n, t in state.items() if n in self.buffers})
        return seen

    def forward_and_backward(self, step: int, at: str) -> float:
        """Accumulate the gradients of a step's microbatches, and return the loss of the step."""
        job, doing, total = self.job, self.doing, 0.0
        batches = self.trial.batches(job, step, alone=self.mesh.size == 1)
        own = [job.share(batch, self.mesh) for batch in batches]
        if job.accumulate is not None:
            doing.append(f"accumulate() of {at}")
            with AllDigits():
                return _number(job.accumulate(self.model, own), "accumulate()")
        for m, batch in enumerate(own):
            doing.append(f"forward and loss of {at}")
            with self.unsynced() if m < len(own) - 1 else contextlib.nullcontext():
                with AllDigits():
                    loss = job.loss(self.model, batch)
                total += _number(loss, "loss()") / len(own)
                if step == m == 0:
                    self.seen.outputs = self.whole(self.outputs)
                doing.append(f"backward of {at}")
                with AllDigits(in_backward=True):
                    if job.backward is None:
                        torch.autograd.backward(loss / len(own))
                    elif job.divides():
                        job.backward(loss, len(own))
                    else:
                        job.backward(loss / len(own))
        return total

    def unsynced(self) -> contextlib.ExitStack:
        """Return the context of a microbatch that others follow."""
        if self.job.no_sync is not None:
            return self.job.no_sync(self.model)
        contexts = contextlib.ExitStack()
        for each in self.strategies or [self.model]:
            if hasattr(each, "no_sync"):
                contexts.enter_context(each.no_sync())
        return contexts

    def norm(self) -> float | None:
        """Return the norm of all gradients as the file or our strategies know it, else None."""
        if self.job.clip is not None:
            norm = self.job.clip(self.model)
        elif self.strategies:
            norm = self.strategies[-1].clip_grad_norm_(math.inf)
        else:  # one device holds all gradients; torch's function may take a rank's pieces alone
            norm = self.seen.own_norms[-1] if self.mesh.size == 1 else None
        return None if norm is None else float(_whole_tensor(norm))

    def weights(self) -> State:
        """Return the parameters and buffers that one device has, too."""
        named = _named(self.model, self.clean)
        return self.whole({n: named[n] for n in self.seen.built if n in named}, "full_state_dict")

    def whole(self, named: State, by_strategy: str = "") -> State:
        """Return copies of tensors; DTensors and shards of our strategies become whole.

        The file's own `gather` is asked for every name that any rank has, on all ranks.
        """
        if self.strategies and by_strategy:
            found = getattr(self.strategies[-1], by_strategy)()
            return {self.clean(name): value for name, value in found.items()}
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of slow gathers
        gather = self.job.gather if by_strategy else None
        is_torchs = {name: hasattr(tensor, "full_tensor") for name, tensor in named.items()}
        of_ranks, found = all_gather_object(is_torchs, self.mesh.world), _copies(named)
        for name in sorted(set().union(*of_ranks)):
            if all(has.get(name, True) for has in of_ranks) and name in named:
                found[name] = _whole_tensor(found[name])
            if gather is not None:
                found[name] = gather(name, found.get(name), self.mesh)
        return {n: None if tensor is None else _local(tensor) for n, tensor in found.items()}


def _number(loss: Any, what: str) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return float(_whole_tensor(loss.detach()))
    found = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise WrongFile(f"{what} returned {found}; it must be one real number, []")


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
    model, parts = _build(job, SEED), []
    again = _named(model)
    if odd := differing({name: again.get(name) for name in seen.built}, seen.built):
        raise WrongFile(f"build() under one seed differs in {next(iter(odd))}; draw from torch")
    torch.manual_seed(SEED - 1)  # another one than before
    batches = trial.batches(job, 0, alone=True)
    with AllDigits():
        total = sum(job.loss(model, batch).item() / len(batches) for batch in batches)
    if abs(total - seen.losses[0]) > 1e-10 * abs(total):
        raise WrongFile(
            f"the loss of one batch is {seen.losses[0]:.6g} and then {total:.6g}: what is random "
            f"cannot be compared; build() without dropout, and draw batch(seed) from its seed"
        )
    for batch in trial.batches(job, 0):
        parts.append([])
        for index in range(data_ranks):
            model.zero_grad()
            with AllDigits():
                loss = job.loss(model, rows(batch, index, data_ranks))
            with AllDigits(in_backward=True):
                torch.autograd.backward(loss)
            gradients = {_clean(name): p.grad for name, p in model.named_parameters()}
            parts[-1].append((loss.item(), _copies(gradients)))
    return parts


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
            if func in (Tensor.float, Tensor.bfloat16, Tensor.half):
                func = Tensor.double
            elif func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if _is_short(a) else a for a in args)
            if _is_short(kwargs.get("dtype")):
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _is_short(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < 8


def _without_mixed_precision(model: nn.Module) -> None:
    """Make torch's FSDP2 keep float64, whatever policy it was given."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            from torch.distributed.fsdp import MixedPrecisionPolicy

            state = module._get_fsdp_state()
            state._mp_policy = MixedPrecisionPolicy()
            for group in state._fsdp_param_groups:
                group.mp_policy = MixedPrecisionPolicy()


# ---------------------------------------------------------------------- tensors by name
_WRAPPERS = r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)"


def _clean(name: str, prefix: str = "") -> str:
    """Return the name of a parameter or module without the names of wrappers."""
    name = re.sub(_WRAPPERS, "", name).removeprefix(".")
    return f"{name}.".removeprefix(prefix)[:-1]


def _prefix(model: nn.Module, built: State) -> str:
    """Return what a wrapper puts before all names: "model." of "model.0.weight"."""
    names = [_clean(name) for name, _ in model.named_parameters()]
    ends = [name for name in built if f".{''.join(names[:1])}".endswith(f".{name}")]
    prefixes = [names[0].removesuffix(name) for name in ends]
    fitting = [p for p in prefixes if all(n.removeprefix(p) in built for n in names)]
    return min(fitting, key=len, default="")


def _named(model: nn.Module, clean: Callable[[str], str] = _clean) -> State:
    """Return parameters, those that are tied too, and buffers of real numbers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    return {clean(name): value for name, value in named.items() if value.is_floating_point()}


def _copies(named: State) -> State:
    return {n: None if value is None else value.detach().clone() for n, value in named.items()}


def _ties(model: nn.Module, clean: Callable[[str], str]) -> list[tuple[str, ...]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(clean(name))
    return [tuple(same) for same in names.values() if len(same) > 1]


def _whole_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


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
