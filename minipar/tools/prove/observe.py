"""The numbers of one device, and of each rank, under the names of one device.

This runs inside of ranks. One device is a group of one rank, so that collectives in the file's loss
work there as well. Everything is in float64. Every rank has a seed of its own, so that nothing is
equal by luck: only what the file makes equal on all ranks is equal.
"""

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.parallel.base.strategy import Strategy
from minipar.tools.prove.compare import Record, State, noise
from minipar.tools.prove.job import Job, WrongFile, blamed, joined, rows

SEED = 1000  # of rank 0, and of one device; rank r has SEED + r


@dataclass(frozen=True)
class Trial:
    """A short training: so many steps, each of so many microbatches."""

    name: str
    steps: int = 1
    microbatches: int = 1
    uneven: bool = False
    is_joined: bool = False  # one device takes all microbatches as one batch

    def batches(self, job: Job, step: int) -> list[Any]:
        """Return the global batch of each microbatch of a step."""
        draw = job.uneven if self.uneven else job.batch
        drawn = [draw(step * self.microbatches + m) for m in range(self.microbatches)]
        return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, drawn)


@dataclass
class Seen(Record):
    """The notes of one rank. A tensor may be a piece, and nothing says which piece."""

    built: State = field(default_factory=dict)  # by build(), here, before parallelize
    outputs: State = field(default_factory=dict)  # by module, in order of execution
    kinds: dict[str, str] = field(default_factory=dict)  # names of modules -> of their classes
    own_norms: list[float] = field(default_factory=list)  # of what this rank holds, by step
    share: float = 1.0  # how much of a batch's numbers this rank is given
    # On one device alone:
    noise: State = field(default_factory=dict)  # where gradients are rounding, in any step
    data: list[str] = field(default_factory=list)  # axes on which ranks have rows of their own
    has_whole_batch: bool = True  # False if the file's function shares it out
    has_uneven: bool = False
    parts: list[list[tuple[float, State]]] = field(default_factory=list)
    """Loss and gradients of each share of each microbatch, for the first step."""


def observe(source: str | Job, sizes: dict[str, int], trial: Trial, alone: bool) -> Seen:
    """Run a trial on this rank of a mesh; `alone`: as one device, and each share by itself too."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    mesh = Mesh() if alone else Mesh(**sizes)
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK"), str(mesh.rank))
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(mesh.size))
    # What torchrun sets, libraries read.
    variables = mock.patch.dict(os.environ, numbers, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    # FSDP2's policies ignore the file's arguments, and so cast nothing.
    whole = mock.patch.object(MixedPrecisionPolicy, "__init__", lambda *args, **kwargs: None)
    try:
        with torch.enable_grad(), quiet, variables, whole, blamed(getattr(source, "file", source)):
            job = Job.load(source) if isinstance(source, str) else source
            return _alone(job, sizes, mesh, trial) if alone else _Run(job, mesh, trial).train()
    finally:
        torch.set_default_dtype(usual)


def _alone(job: Job, sizes: dict[str, int], mesh: Mesh, trial: Trial) -> Seen:
    """Train on one device; then on each share of each microbatch. Refuse what is random."""
    data, device = job.data_axes(sizes), job.on_one_device()
    seen, again = (_Run(device, mesh, t).train() for t in (trial, replace(trial, steps=1)))
    one, other = seen.losses[0], again.losses[0]
    if abs(one - other) > 1e-10 * abs(one):
        why = "what is random, or counts calls, cannot be compared; build() from torch's seed and "
        why += "without dropout, draw batch(seed) from its seed"
        raise WrongFile(f"the loss of one batch is {one:.6g} and then {other:.6g}: {why}")
    seen.data, seen.has_whole_batch = data, not callable(job.shares)
    seen.has_uneven = job.uneven is not None
    count = math.prod(sizes[axis] for axis in data)
    for batch in trial.batches(job, 0):
        seen.parts.append([])
        for share in [rows(batch, i, count) for i in range(count)]:
            one = replace(device, batch=lambda seed, share=share: share)
            part = _Run(one, mesh, Trial("a share")).train()
            seen.parts[-1].append((part.losses[0], part.gradients[0]))
    return seen


class _Run:
    """A trial on one rank, or on one device."""

    def __init__(self, job: Job, mesh: Mesh, trial: Trial) -> None:
        self.job, self.mesh, self.trial, self.is_alone = job, mesh, trial, mesh.size == 1
        torch.manual_seed(SEED + mesh.rank)
        model = job.build().double()
        model._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)
        saved = {_clean(name) for name in model.state_dict()}
        built = {n: t for n, t in _copies(_named(model)).items() if n in saved}
        self.buffers = {_clean(name) for name, _ in model.named_buffers(remove_duplicate=False)}
        result = job.parallelize(model, mesh)
        self.model, after = result if isinstance(result, tuple) else (result, None)
        after = after if isinstance(after, Sequence) else [after or (lambda: None)]
        self.strategies = [each for each in after if isinstance(each, Strategy)]
        self.after_backward = [getattr(each, "finish_backward", each) for each in after]
        self.clean = partial(_clean, prefix=_prefix(self.model, built))
        self.optimizer = self.make_optimizer()
        self.seen = Seen({}, {}, built=built)
        self.seen.before = self.weights()
        torch.seed()  # whatever the model draws from here on is another number in each run

    def train(self) -> Seen:
        """Run the steps of the trial, and record what each computes."""
        seen, has_gradients = self.seen, not self.job.reduced_in_step
        outputs = self.record_outputs()
        for step in range(self.trial.steps):
            self.optimizer.zero_grad()
            seen.losses.append(self.forward_and_backward(step))
            if step == 0:
                seen.outputs = self.whole(outputs)
            for finish in self.after_backward:
                finish()
            gradients = {self.clean(n): p.grad for n, p in self.model.named_parameters()}
            seen.own_norms.append(_own_norm(self.model))
            for name, where in noise(_copies(gradients) if self.is_alone else {}).items():
                seen.noise[name] = where | seen.noise.get(name, where)
            seen.gradients.append(self.whole(gradients, "full_gradients") if has_gradients else {})
            norm = self.norm()
            seen.norms.append(norm if has_gradients else None)
            self.optimizer.step()
            state = self.weights()
            seen.weights.append({n: t for n, t in state.items() if n not in self.buffers})
            seen.buffers.append({n: t for n, t in state.items() if n in self.buffers})
        return seen

    def forward_and_backward(self, step: int) -> float:
        """Accumulate the gradients of a step's microbatches, and return the loss of the step."""
        job, total = self.job, 0.0
        batches = self.trial.batches(job, step)
        if self.is_alone and self.trial.is_joined:
            batches = [joined(batches)]
        own = [job.share(batch, self.mesh) for batch in batches]
        self.seen.share = _numbers(own) / max(1, _numbers(batches))
        if job.accumulate is not None:
            with AllDigits():
                return float(_full(_number(job.accumulate(self.model, own), "accumulate").detach()))
        backward = job.backward or _backward
        for m, batch in enumerate(own):
            with self.unsynced() if m < len(own) - 1 else contextlib.nullcontext():
                with AllDigits():
                    loss = _number(job.loss(self.model, batch), "loss")
                total += float(_full(loss.detach())) / len(own)
                with AllDigits(in_backward=True):
                    backward(loss / len(own))
        return total

    def unsynced(self) -> Any:
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
            norm = self.seen.own_norms[-1] if self.is_alone else None
        return None if norm is None else float(_full(norm))

    def make_optimizer(self) -> Any:
        """Return the optimizer of the file, or of our strategies, or AdamW."""
        own = [each.optimizer for each in self.strategies if hasattr(each, "optimizer")]
        if own and self.job.optimizer is None:
            why = "which one device needs, too: let optimizer(model) in the file return its like"
            raise WrongFile(f"the strategy brings a {type(own[0]).__name__} of its own, {why}")
        if self.job.optimizer is not None:
            return own[0] if own else self.job.optimizer(self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        # With this eps, gradients that are only rounding of zero make no large steps.
        return torch.optim.AdamW(trainable, lr=0.01, weight_decay=0.1, eps=1e-6)

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
                found[name] = _full(found[name])
            if gather is not None:
                found[name] = gather(name, found.get(name), self.mesh)
        return {n: None if tensor is None else _local(tensor) for n, tensor in found.items()}

    def record_outputs(self) -> State:
        """Return a dict that fills while modules run: the first tensor of each one's first call."""
        outputs: State = {}

        def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if (numbers := [t for t in tensors if t.is_floating_point()]) and name not in outputs:
                outputs[name] = numbers[0].detach().clone()

        for full_name, module in self.model.named_modules():
            name = self.clean(full_name)
            self.seen.kinds[name] = type(module).__name__
            module.register_forward_hook(partial(note, name))
        return outputs


class AllDigits(TorchFunctionMode):
    """While a model runs, float64 takes the place of any shorter type that it casts to.

    Otherwise the model's own rounding (as of a norm in float32) would cover all other differences.
    Casts by hooks in backward belong to the parallelisation: they round as it says.
    """

    def __init__(self, in_backward: bool = False) -> None:
        super().__init__()
        self.in_backward = in_backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.in_backward or torch.is_grad_enabled():  # recomputed; in hooks it is off
            if func in (Tensor.float, Tensor.bfloat16, Tensor.half):
                func = Tensor.double
            args, kwargs = map(_long, args), {key: _long(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _backward(loss: Tensor) -> None:
    """Run ``loss.backward()`` inside of the mode, which is off in torch functions that it sees."""
    given = (loss,), (torch.ones_like(loss),), False, False, ()
    _engine_run_backward(*given, allow_unreachable=True, accumulate_grad=True)


def _long(value: Any) -> Any:
    is_float = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_float else value


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
    """Return parameters and buffers, those that are tied, too."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    return {clean(name): tensor for name, tensor in named.items()}


def _copies(named: State) -> State:
    """Return copies; the gradient of an embedding may be sparse, weights complex, buffers whole."""

    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        tensor = tensor.to_dense() if tensor.is_sparse else tensor
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()

    return {name: None if t is None else copy(t) for name, t in named.items()}


def _own_norm(model: nn.Module) -> float:
    """Return the norm of what this rank holds of the gradients; our zero has them elsewhere."""
    here = (p.grad for p in model.parameters() if not hasattr(p, "stepped_elsewhere"))
    shards = [_local(gradient) for gradient in here if gradient is not None]
    return math.sqrt(sum(float(shard.abs().square().sum()) for shard in shards))


def _numbers(batches: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batches) if isinstance(leaf, Tensor))


def _number(value: Any, function: str) -> Tensor:
    """Return what a function of the file has returned. Raises `WrongFile` if it is no number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise WrongFile(f"{function}() must return a tensor of one number, not {what}")
    return value


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
