"""The strategy of a run, as its flags ask for: put on the model, with the optimizer that fits.

`make` returns one of two set-ups. They differ in what a rank holds, and so in what a checkpoint
needs from it; to the training loop they are the same:

    Planned   ranks train one model together      (`--mesh`, `--zero` ...: a plan of plan.py)
    Local     every rank has a model of its own   (`--local-method`)

What a checkpoint says of weights and optimizer is what one device would have, so a run of the first
kind can go on by any other plan, and on any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.values import to_host
from minipar.model import hf
from minipar.model.init import initial_weight
from minipar.model.llama import Llama
from minipar.parallel import compose, local_sgd
from minipar.parallel.base.shards import Part, Region
from minipar.parallel.base.strategy import Strategy
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint, shards
from minipar.train.checkpoint import Stored
from minipar.train.config import TrainConfig
from minipar.train.metrics import say
from minipar.train.optim import make_optimizer
from minipar.train.precision import reduce_in
from minipar.train.saver import Saver
from minipar.train.workload import Workload


def make(config: TrainConfig, model: Llama, mesh: Mesh, workload: Workload) -> "Setup":
    """Make `model` parallel along the axes of `mesh`, in place, as `config` says; a collective.

    A model that `is_in_parts` comes on the meta device, and each part gets its first values here.
    """
    if config.local_method != "none":
        return Local(config, model, mesh)
    return Planned(config, model, mesh, workload)


def is_in_parts(config: TrainConfig) -> bool:
    """Whether no rank ever has the whole model: it comes, stays and goes in parts."""
    return config.zero == 3


class Setup:
    """What the training loop knows of a strategy. Made and used alike on all ranks."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    data_axis: Axis  # its ranks hold different tokens
    autocast: str  # the precision of products, as far as weights do not have it by themselves
    overflow_axes: tuple[Axis, ...] = ()  # on whose ranks a loss scale must fit all or none
    crosses_steps = False  # what a step sends may arrive in the next
    is_local = False  # ranks hold models of their own, that differ between agreements
    period = 0  # steps from one agreement to the next; 0: all steps are alike

    def __init__(self, config: TrainConfig, model: Llama, mesh: Mesh) -> None:
        self.config, self.model, self.mesh = config, model, mesh

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model of the run as one device would hold it; a collective."""
        return self.strategy.full_state_dict()

    def save(self, saver: Saver, step: int, state: dict[str, Any], names: Sequence[str]) -> None:
        """Write a checkpoint of all this and `state`, of parameters of these `names`."""
        raise NotImplementedError

    def load_weights(self, weights: dict[str, Any], where: str) -> None:
        """Take over the weights of a checkpoint. Raises `CheckpointError` naming `where`."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the rest of a checkpoint, after `load_weights`.

        It may be that of another kind of set-up. What does not fit begins anew, and a line says so.
        """
        raise NotImplementedError

    def late_norm(self) -> float:
        """The norm of a gradient that a checkpoint would have for the step to come; 0 without."""
        return 0.0

    @contextmanager
    def agreed_model(self) -> Iterator[None]:
        """In the body, `model` is the model of the run on every rank: the one to validate."""
        yield

    def finish(self) -> None:
        """After the last step: bring all ranks to the model of the run; a collective."""


# ---------------------------------------------------------------------- 1. one model, by a plan
class Planned(Setup):
    """Ranks train one model together: data, tensor, pipeline and context parallelism, ZeRO."""

    def __init__(self, config: TrainConfig, model: Llama, mesh: Mesh, workload: Workload) -> None:
        super().__init__(config, model, mesh)
        plan, reduce, reduce_dtype = config.as_plan(), None, None
        self.autocast = plan.autocast
        if config.reduce_dtype != "same":
            reduce_dtype = getattr(torch, config.reduce_dtype)
            reduce = reduce_in(reduce_dtype)
        self.strategy = compose.apply(
            model,
            mesh,
            plan,
            partial(make_optimizer, lr=config.lr, weight_decay=config.weight_decay),
            ddp_version=config.ddp,
            bucket_mb=config.bucket_mb or None,
            reduce=workload.watch(reduce),
            reduce_dtype=reduce_dtype,
            init=_first_values(config, model) if is_in_parts(config) else None,
        )
        self.optimizer = self.strategy.optimizer
        self.data_axis = self.strategy.axis
        self.compressed = self.strategy.parts.compressed
        self.crosses_steps = plan.zero in (1, 2)  # weights arrive in the next forward

    def save(self, saver: Saver, step: int, state: dict[str, Any], names: Sequence[str]) -> None:
        """Each rank writes what it has; weights, optimizer state and residues are not gathered."""
        own: dict[str, Part] = {}
        if self.compressed is not None:
            state = state | {"compression": self._kept_back(own), "mesh": self._mesh}
        shards.save(self.strategy, saver, step, state, names, own)

    def load_weights(self, weights: dict[str, Any], where: str) -> None:
        """Read this rank's part of them. Raises `CheckpointError` naming `where`."""
        checkpoint.check_shapes(self.strategy.shapes, weights, where)
        shards.fill(self.strategy, weights)

    def _kept_back(self, own: dict[str, Part]) -> list[dict[str, Any]]:
        """Put what this rank has kept back of its gradients into `own`; return what all have.

        There, meta tensors are in the place of tensors. A collective.
        """

        def take(path: str, tensor: Tensor) -> Tensor:
            if not (tensor.ndim and tensor.numel()):
                return to_host(tensor)
            region = Region.whole(tensor.shape)
            own[f"compression/{self.mesh.rank}/{path}"] = Part(tensor.flatten(), region)
            return torch.empty_like(tensor, device="meta")

        kept_back = checkpoint.map_tensors(self.compressed.state_dict(self.model), take)
        return all_gather_object(kept_back, self.mesh.world)

    @property
    def _mesh(self) -> str:
        """What decides which rank has what."""
        plan = self.strategy.plan
        words = [f"{axis}={size}" for axis, size in self.mesh.sizes.items() if size > 1]
        if plan.pp > 1 and (ranks := plan.make_schedule().rank_of) != (*range(plan.pp),):
            words.append(f"stages={'-'.join(map(str, ranks))}")
        cuts = "experts_over_cp", "experts_over_tp", "expert_tensor_parallel"
        words += [word for word in cuts if getattr(plan, word)]
        return ",".join(words) or "dp=1"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On another mesh, nothing that was kept back fits: it is dropped."""
        if "optimizer" in state:
            self.strategy.load_full_optimizer_state(state["optimizer"])
        else:
            ranks = _of_local(state["local"])
            say(self.mesh, f"the optimizer starts anew: that of the checkpoint is {ranks}")
        if self.compressed is None:
            _tell_dropped(self.mesh, state)
            return
        kept_back, theirs = state.get("compression", []), state.get("mesh")
        if kept_back and theirs == self._mesh:
            own = tree_map_only(Stored, lambda stored: stored(), kept_back[self.mesh.rank])
            self.compressed.load_state_dict(own, self.model)
            if not self.compressed.feedback:
                _tell_dropped(self.mesh, state)
        else:
            saved = f"of {len(kept_back)} ranks, {theirs}" if kept_back else "of no compression"
            say(
                self.mesh,
                f"--compress {self.config.compress} starts with nothing kept back: the checkpoint "
                f"is {saved}, and this run has {self.mesh.size}, {self._mesh}",
            )


def _first_values(config: TrainConfig, model: Llama) -> Callable[[str], Tensor]:
    """Return what gives a weight or a buffer of the serial model, by its name, as it begins."""
    device, dtype, shape = compute_device(), getattr(torch, config.dtype), model.config
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())  # those that are not saved, too
    source = hf.Folder(config.init) if config.init else None

    def first_value(name: str) -> Tensor:
        if name in buffers:
            return torch.zeros_like(buffers[name], device=device)
        if name == hf.HEAD and shape.tie_embeddings:
            name = hf.EMBEDDING
        if source is not None:
            return source.read(name, dtype, device)
        return initial_weight(shape, name, shapes[name], config.seed).to(device, dtype)

    return first_value


# ---------------------------------------------------------------------- 2. a model on every rank
class Local(Setup):
    """Local SGD and its kin. The model of the run is the one that the ranks agree on.

    It is what is validated, saved as the weights of a checkpoint, and sampled from: of local SGD
    the average of the ranks at that moment, of DiLoCo the outer model as of the last agreement. A
    checkpoint also has the model and the optimizer of every rank, for as many to go on exactly.
    """

    is_local = True
    late = ("diloco delayed", "diloco streaming", "delayed gradients")

    def __init__(self, config: TrainConfig, model: Llama, mesh: Mesh) -> None:
        super().__init__(config, model, mesh)
        self.data_axis, self.overflow_axes, self.autocast = mesh.dp, (mesh.dp,), config.precision
        self.crosses_steps = config.local_method in self.late
        options: dict[str, Any] = {"average": False}
        if config.local_method != "delayed gradients":  # which agrees in every step
            options["every"] = self.period = config.local_every
        self.optimizer = make_optimizer(model, lr=config.lr, weight_decay=config.weight_decay)
        self.strategy = local_sgd.apply(
            model, mesh.dp, self.optimizer, method=config.local_method, **options
        )

    def save(self, saver: Saver, step: int, state: dict[str, Any], names: Sequence[str]) -> None:
        """What every rank holds is gathered: all of it is in the memory of each, for a moment."""
        own = {"strategy": self.strategy.state_dict(), "optimizer": self.optimizer.state_dict()}
        ranks = all_gather_object(tree_map_only(Tensor, to_host, own), self.mesh.world)
        local = {"method": self.config.local_method, "ranks": ranks}
        saver.save(step, self.full_state_dict(), state | {"local": local})

    def load_weights(self, weights: dict[str, Any], where: str) -> None:
        """All ranks start from the model agreed on."""
        checkpoint.check_weights(self.model, weights, where)
        self.strategy.load_full_state_dict(weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On another number of ranks, or by another method: stay with the model agreed on."""
        saved = state.get("local")
        if saved is None:  # of ranks that were alike: all go on from there
            self.optimizer.load_state_dict(state["optimizer"])
            _tell_dropped(self.mesh, state)
            return
        if saved["method"] == self.config.local_method and len(saved["ranks"]) == self.mesh.size:
            own = saved["ranks"][self.mesh.rank]
            device = next(self.model.parameters()).device
            own = tree_map_only(Tensor, lambda tensor: tensor.to(device), own)
            self.strategy.load_state_dict(own["strategy"])
            self.optimizer.load_state_dict(own["optimizer"])
            return
        say(
            self.mesh,
            f"all ranks start from the model agreed on, their optimizers anew: the checkpoint is "
            f"{_of_local(saved)}, and this is {self.config.local_method} on {self.mesh.size}",
        )

    def late_norm(self) -> float:
        """That of delayed gradients."""
        is_late = isinstance(self.strategy, local_sgd.DelayedGradients)
        return self.strategy.late_norm() if is_late else 0.0

    @contextmanager
    def agreed_model(self) -> Iterator[None]:
        """The agreed model takes the place of this rank's own for as long as the body lasts."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.full_state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def finish(self) -> None:
        """All ranks take over the average of their models.

        With delayed gradients they are equal anyway; the last gradient waits in the checkpoint for
        a next step.
        """
        if not isinstance(self.strategy, local_sgd.DelayedGradients):
            self.strategy.finish()


def _tell_dropped(mesh: Mesh, state: dict[str, Any]) -> None:
    if any(kept["residues"] for kept in state.get("compression", ())):
        say(mesh, "what --compress has kept back in the checkpoint is dropped: this run has none")


def _of_local(saved: dict[str, Any]) -> str:
    return f"of {saved['method']} on {len(saved['ranks'])} ranks"
