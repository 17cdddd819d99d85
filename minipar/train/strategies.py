"""The strategy of a run, as its flags ask for: put on the model, with the optimizer that fits.

`make` returns one of three set-ups. They differ in what a rank holds, and so in what a checkpoint
needs from it; to the training loop they are the same:

    Replicated   every rank holds everything                          (`--zero 0`: ddp)
    Sharded      a rank holds a part of the state, or of the weights  (`--zero 1, 2 and 3`)
    Local        every rank has a model of its own                    (`--local-method`)

What a checkpoint says of weights and optimizer is what one device would have, so a run of the first
two kinds can go on as the other, and on any number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis, Mesh
from minipar.parallel import ddp, fsdp, local_sgd, zero
from minipar.parallel.compression import COMPRESSORS, Compressed
from minipar.parallel.strategy import Strategy
from minipar.train import checkpoint
from minipar.train.config import TrainConfig
from minipar.train.optim import make_optimizer
from minipar.train.precision import COMPUTE_DTYPES, reduce_in
from minipar.train.workload import Workload


def make(config: TrainConfig, model: nn.Module, mesh: Mesh, workload: Workload) -> "Setup":
    """Make `model` parallel along ``mesh.dp``, in place, as `config` says; a collective."""
    if config.local_method != "none":
        return Local(config, model, mesh)
    if config.zero:
        return Sharded(config, model, mesh)
    return Replicated(config, model, mesh, workload)


class Setup:
    """What the training loop knows of a strategy. Made and used alike on all ranks."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    shard_axes: tuple[Axis, ...] = ()  # for `train_step`
    crosses_steps = False  # what a step sends may arrive in the next
    is_local = False  # ranks hold models of their own, that differ between agreements
    period = 0  # steps from one agreement to the next; 0: all steps are alike

    def __init__(self, config: TrainConfig, model: nn.Module, mesh: Mesh) -> None:
        self.config, self.model, self.mesh = config, model, mesh

    def _make_optimizer(self, **options: Any) -> torch.optim.Optimizer:
        config = self.config
        return make_optimizer(self.model, lr=config.lr, weight_decay=config.weight_decay, **options)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model of the run as one device would hold it; a collective."""
        return self.strategy.full_state_dict()

    def load_weights(self, weights: dict[str, Tensor], where: str) -> None:
        """Take over what `full_state_dict` returned. Raises `CheckpointError` naming `where`."""
        checkpoint.check_weights(self.model, weights, where)
        self.strategy.load_full_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the other things that a checkpoint needs, equal on all ranks; a collective."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it, after `load_weights`. What does not fit begins anew, and a line says so.

        `state` may be that of another kind of set-up.
        """
        if "optimizer" in state:
            self._load_optimizer(state["optimizer"])
        else:
            self._say(
                f"the optimizer starts anew: that of the checkpoint is {_of_local(state['local'])}"
            )

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    @contextmanager
    def agreed_model(self) -> Iterator[None]:
        """In the body, `model` is the model of the run on every rank: the one to validate."""
        yield

    def finish(self) -> None:
        """After the last step: bring all ranks to the model of the run; a collective."""

    def _gather(self, own: Any) -> list[Any]:
        """What each rank holds for itself, on the CPU; in the memory of all ranks, for a moment."""
        own = tree_map_only(Tensor, lambda tensor: tensor.cpu(), own)
        return all_gather_object(own, self.mesh.world)

    def _say(self, line: str) -> None:
        if self.mesh.rank == 0:
            print(line, flush=True)


# ---------------------------------------------------------------------- 1. everything everywhere
class Replicated(Setup):
    """ddp, with compressed gradients or without."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, mesh: Mesh, workload: Workload
    ) -> None:
        super().__init__(config, model, mesh)
        self.compressed: Compressed | None = None
        reduce = None
        if config.reduce_dtype != "same":
            reduce = reduce_in(getattr(torch, config.reduce_dtype))
        if config.compress != "none":
            reduce = self.compressed = Compressed(COMPRESSORS[config.compress]())
        self.strategy = ddp.apply(
            model,
            mesh.dp,
            version=config.ddp,
            bucket_mb=config.bucket_mb or None,
            average=False,
            reduce=workload.watch(reduce),
        )
        self.optimizer = self._make_optimizer()

    def state_dict(self) -> dict[str, Any]:
        """As of every set-up, and what each rank has kept back of its gradients."""
        state = super().state_dict()
        if self.compressed is not None:
            state["compression"] = self._gather(self.compressed.state_dict(self.model))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of another number of ranks, nothing that was kept back fits: it is dropped."""
        super().load_state_dict(state)
        if self.compressed is None:
            return
        kept_back = state.get("compression", [])
        if len(kept_back) == self.mesh.size:
            self.compressed.load_state_dict(kept_back[self.mesh.rank], self.model)
        else:
            saved = f"of {len(kept_back)} ranks" if kept_back else "of no compression"
            self._say(
                f"--compress {self.config.compress} starts with nothing kept back: the checkpoint "
                f"is {saved}, and this run has {self.mesh.size}"
            )


# ---------------------------------------------------------------------- 2. a part on every rank
class Sharded(Setup):
    """ZeRO: optimizer state (1), gradients (2) and weights (3) are cut over the ranks."""

    def __init__(self, config: TrainConfig, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(config, model, mesh)
        self.shard_axes = (mesh.dp,)
        self.crosses_steps = config.zero < 3  # weights arrive in the next forward
        if config.zero == 3:
            self.strategy = self._fully(COMPUTE_DTYPES[config.precision])
            self.optimizer = self._make_optimizer()  # of the pieces
            return
        self.optimizer = self._make_optimizer(
            make=partial(
                zero.ShardedOptimizer,
                optimizer_class=torch.optim.AdamW,
                axis=mesh.dp,
                bucket_mb=config.bucket_mb or None,
            )
        )
        self.strategy = zero.apply(
            model, mesh.dp, optimizer=self.optimizer, stage=config.zero, average=False
        )

    def _fully(self, compute_dtype: torch.dtype | None) -> fsdp.FullySharded:
        # Weights are gathered in 16 bits: autocast would cast them later, and keep all the casts.
        # Gradients are summed up in float32 all the same, unless told otherwise.
        reduce_dtype = None if compute_dtype is None else torch.float32
        if self.config.reduce_dtype != "same":
            reduce_dtype = getattr(torch, self.config.reduce_dtype)
        return fsdp.apply(
            self.model,
            self.mesh.dp,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            average=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, put together from all ranks."""
        if self.config.zero < 3:
            return super().state_dict()
        return {"optimizer": self.strategy.full_optimizer_state(self.optimizer)}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        if self.config.zero < 3:
            super()._load_optimizer(state)
        else:
            self.strategy.load_full_optimizer_state(self.optimizer, state)


# ---------------------------------------------------------------------- 3. a model on every rank
class Local(Setup):
    """Local SGD and its kin. The model of the run is the one that the ranks agree on.

    It is what is validated, saved as the weights of a checkpoint, and sampled from: of local SGD
    the average of the ranks at that moment, of DiLoCo the outer model as of the last agreement. A
    checkpoint also has the model and the optimizer of every rank, for as many to go on exactly.
    """

    is_local = True
    late = ("diloco delayed", "diloco streaming", "delayed gradients")

    def __init__(self, config: TrainConfig, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(config, model, mesh)
        self.crosses_steps = config.local_method in self.late
        if config.precision == "fp16":  # an overflow on one rank makes all of them skip the step
            self.shard_axes = (mesh.dp,)
        options: dict[str, Any] = {"average": False}
        if config.local_method != "delayed gradients":  # which agrees in every step
            options["every"] = self.period = config.local_every
        self.optimizer = self._make_optimizer()
        self.strategy = local_sgd.apply(
            model, mesh.dp, self.optimizer, method=config.local_method, **options
        )

    def state_dict(self) -> dict[str, Any]:
        """What every rank holds."""
        own = {"strategy": self.strategy.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {"local": {"method": self.config.local_method, "ranks": self._gather(own)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On another number of ranks, or by another method: start from the model agreed on."""
        saved = state.get("local")
        if saved is None:  # of ranks that were alike: all go on from there
            super().load_state_dict(state)
            return
        if saved["method"] == self.config.local_method and len(saved["ranks"]) == self.mesh.size:
            own = saved["ranks"][self.mesh.rank]
            device = next(self.model.parameters()).device
            own = tree_map_only(Tensor, lambda tensor: tensor.to(device), own)
            self.strategy.load_state_dict(own["strategy"])
            self.optimizer.load_state_dict(own["optimizer"])
            return
        self._say(
            f"all ranks start from the model agreed on, their optimizers anew: the checkpoint is "
            f"{_of_local(saved)}, and this is {self.config.local_method} on {self.mesh.size}"
        )

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


def _of_local(saved: dict[str, Any]) -> str:
    return f"of {saved['method']} on {len(saved['ranks'])} ranks"
