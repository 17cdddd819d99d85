"""Make the model of a run under its plan, with its optimizer; load a checkpoint into both.

A checkpoint has weights and optimizer state as one device would have them, so a run can go on by
any other plan, and on any number of ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.model import hf
from minipar.model.init import initial_weight
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.base.optimizer_state import pack
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint, compiled, shards
from minipar.train.checkpoint import Stored
from minipar.train.config import TrainConfig
from minipar.train.optim import make_optimizer


def make_model(config: TrainConfig, shape: LlamaConfig) -> Llama:
    """Return the whole model with its first values; under ZeRO 3, on the meta device."""
    dtype, device = getattr(torch, config.dtype), compute_device()
    if config.as_plan().zero == 3:
        with torch.device("meta"):
            return Llama(shape).to(dtype)
    if config.init:
        return hf.load(config.init, dtype, device)
    return Llama(shape, seed=config.seed).to(device, dtype)


def apply(config: TrainConfig, model: Llama, mesh: Mesh) -> compose.Composed:
    """Put `model` under the plan of `config`, in place, with its optimizer; a collective."""
    plan = config.as_plan()
    strategy = compose.apply(
        model,
        mesh,
        plan,
        partial(make_optimizer, lr=config.lr, weight_decay=config.weight_decay),
        init=_first_values(config, model) if plan.zero == 3 else None,
    )
    if config.compile != "none":
        compiled.compile_blocks(model, config.compile)
    return strategy


def load(
    strategy: compose.Composed,
    weights: dict[str, Stored],
    optimizer: dict[str, Any],
    where: str,
) -> None:
    """Go on from a checkpoint. Raises `CheckpointError` naming `where`, if it does not fit."""
    checkpoint.check_shapes(strategy.shapes, weights, where)
    shards.fill(strategy, weights)
    decays = [group["weight_decay"] for group in strategy.optimizer.param_groups]
    state = pack(optimizer["state"], strategy.names, optimizer["groups"])
    strategy.load_full_optimizer_state(state)
    for group, decay in zip(strategy.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay  # as the flags of this run say


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
