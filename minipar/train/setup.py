"""The model of a run under its plan, with the optimizer that fits; what it saves, and takes back.

A checkpoint has weights and optimizer state as one device would have them, so a run can go on by
any other plan, and on any number of ranks. Only what compression has kept back of the gradients
belongs to the ranks of one mesh.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.comm.values import to_host
from minipar.model import hf
from minipar.model.init import initial_weight
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.base.shards import Part, Region
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint, compiled, shards
from minipar.train.checkpoint import Stored
from minipar.train.config import TrainConfig
from minipar.train.metrics import say
from minipar.train.optim import make_optimizer
from minipar.train.saver import Saver


def make_model(config: TrainConfig, shape: LlamaConfig) -> Llama:
    """Return the whole model with its first values; under ZeRO 3, on the meta device."""
    dtype, device = getattr(torch, config.dtype), compute_device()
    if config.as_plan().zero == 3:
        with torch.device("meta"):
            return Llama(shape).to(dtype)
    if config.init:
        return hf.load(config.init, dtype, device)
    return Llama(shape, seed=config.seed).to(device, dtype)


class Setup:
    """A model under the plan of `config`: made in place, by a collective, alike on all ranks."""

    def __init__(self, config: TrainConfig, model: Llama, mesh: Mesh) -> None:
        self.config, self.model, self.mesh, self.plan = config, model, mesh, config.as_plan()
        self.strategy = compose.apply(
            model,
            mesh,
            self.plan,
            partial(make_optimizer, lr=config.lr, weight_decay=config.weight_decay),
            ddp_version=config.ddp,
            init=_first_values(config, model) if self.plan.zero == 3 else None,
        )
        self.optimizer = self.strategy.optimizer
        self.compressed = self.strategy.parts.compressed
        if config.compile != "none":
            compiled.compile_blocks(model, config.compile)

    def save(self, saver: Saver, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint of weights, optimizer and `state`: each rank what it has."""
        own: dict[str, Part] = {}
        if self.compressed is not None:
            state = state | {"compression": self._kept_back(own), "mesh": self._places()}
        shards.save(self.strategy, saver, step, state, own)

    def load(self, weights: dict[str, Stored], state: dict[str, Any], where: str) -> None:
        """Go on from a checkpoint. Raises `CheckpointError` naming `where`, if it does not fit."""
        checkpoint.check_shapes(self.strategy.shapes, weights, where)
        shards.fill(self.strategy, weights)
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        shards.load_optimizer(self.strategy, state["optimizer"])
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay  # as the flags of this run say
        self._take_back(state.get("compression"), state.get("mesh"))

    # ------------------------------------------------------------------ compression
    def _kept_back(self, own: dict[str, Part]) -> list[dict[str, Any]]:
        """Put what this rank has kept back of its gradients into `own`; return what all ranks have.

        In the returned value, meta tensors stand for tensors. A collective.
        """

        def take(path: str, tensor: Tensor) -> Tensor:
            if not (tensor.ndim and tensor.numel()):
                return to_host(tensor)
            region = Region.whole(tensor.shape)
            own[f"compression/{self.mesh.rank}/{path}"] = Part(tensor.flatten(), region)
            return torch.empty_like(tensor, device="meta")

        kept_back = checkpoint.map_tensors(self.compressed.state_dict(self.model), take)
        return all_gather_object(kept_back, self.mesh.world)

    def _places(self) -> str:
        """Return the words of the plan that decide which rank has which gradients."""
        words = [f"{axis}={size}" for axis, size in self.mesh.sizes.items() if size > 1]
        if self.plan.pp > 1:
            words.append(f"stages={'-'.join(map(str, self.plan.make_schedule().rank_of))}")
        cuts = "experts_over_cp", "experts_over_tp", "expert_tensor_parallel"
        return ",".join([*words, *(word for word in cuts if getattr(self.plan, word))]) or "dp=1"

    def _take_back(self, kept_back: list[dict[str, Any]] | None, places: str | None) -> None:
        """Take over what was kept back, on the same mesh; on another, say that it is dropped."""
        fits = self.compressed is not None and places == self._places()
        if fits and kept_back:
            own = tree_map_only(Stored, lambda stored: stored(), kept_back[self.mesh.rank])
            self.compressed.load_state_dict(own, self.model)
        keeps = fits and self.compressed.feedback
        if not keeps and any(kept["residues"] for kept in kept_back or ()):
            say(self.mesh, f"what compression has kept back on {places} is dropped by this plan")


def _first_values(config: TrainConfig, model: Llama) -> Callable[[str], Tensor]:
    """Return a function from the name of a weight or a buffer to its first value, whole."""
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
