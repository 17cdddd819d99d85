"""`minipar bench tensor`: our tensor parallelism beside PyTorch's, on the same model and link.

How the race is run and what is counted: see `race.py`. A step is forward, loss, backward and AdamW.

PyTorch's is `parallelize_module` with a plan of `ColwiseParallel` and `RowwiseParallel`, embedding
and head cut by the vocabulary, and `loss_parallel`; with `SequenceParallel` norms where ours cuts
the tokens. In its tutorial for the plain form q, k and v are given their input one by one, and each
of them sums its part of a gradient over all ranks. A plan that prepares their input once, as the
tutorial does for sequence parallelism, takes part as well, and the faster one is what ours is
compared with. PyTorch's asynchronous tensor parallelism wants `torch.compile` and GPUs with
symmetric memory, so that our ``overlap`` races with its sequence parallelism as it is.

PyTorch's plan cuts every table for itself, so embeddings are not tied here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import Axis, Mesh
from minipar.lab.bench import race
from minipar.lab.bench.race import ADAMW, Attached, StepConfig
from minipar.model.llama import PRESETS, Llama, LlamaConfig, loss_of
from minipar.parallel import tensor

OURS: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence": dict(sequence=True),
    "overlap": dict(sequence=True, overlap=True),
}
THEIRS: dict[str, dict[str, bool]] = {
    "parallelize_module": dict(sequence=False, once=False),
    "parallelize_module, inputs once": dict(sequence=False, once=True),
    "with SequenceParallel": dict(sequence=True, once=True),
}
RIVALS = {
    "plain": ["parallelize_module", "parallelize_module, inputs once"],
    "sequence": ["with SequenceParallel"],
    "overlap": ["with SequenceParallel"],
}
"""Whom of PyTorch's each of ours is compared with."""


@dataclass(frozen=True)
class TensorConfig(StepConfig):
    """Compare our tensor parallelism with PyTorch's: time of a training step, and bytes."""

    seq_len: int = 256
    """Tokens per sequence; every rank works on all of them."""

    def check(self) -> None:
        super().check()
        shape = PRESETS[self.preset]
        good = [n for n in range(2, shape.num_kv_heads + 1) if shape.num_kv_heads % n == 0]
        if self.ranks not in good:
            raise ValueError(
                f"--ranks {self.ranks}: it takes 2 to share, and PyTorch's plan has every rank own "
                f"as many of the {shape.num_kv_heads} key/value heads of {self.preset}; use one of "
                f"{', '.join(map(str, good))}"
            )
        if self.seq_len % self.ranks:
            raise ValueError(
                f"--seq-len {self.seq_len}: PyTorch's plan cuts it by --ranks {self.ranks}; use "
                f"{self.seq_len + -self.seq_len % self.ranks}"
            )


def run(config: TensorConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row for each of ours on each link."""
    config.check()
    rows = []
    for name in config.links:
        measured = race.on_ranks(measure, config, name)
        for ours, rivals in RIVALS.items():
            rows.append(race.row(config, "tensor", name, ours, rivals, measured))
        race.announce(rows[-len(RIVALS) :])
    print("\n" + race.table(rows))
    race.save(rows, config.json)
    return rows


def measure(config: TensorConfig, link_name: str) -> dict[str, race.Measured]:
    """Let all contenders take turns; called on every rank."""
    axis, shape = Mesh(tp=config.ranks).tp, PRESETS[config.preset]
    steps = {name: contender(config, axis, name, shape).step for name in (*OURS, *THEIRS)}
    return race.race(steps, axis, link_name, config.rounds)


# ---------------------------------------------------------------------- contenders
@dataclass
class Contender:
    """A model that is cut, and a training step: it returns the loss in nats per token."""

    model: Llama
    step: Callable[[], Tensor]


def contender(config: TensorConfig, axis: Axis, name: str, shape: LlamaConfig) -> Contender:
    """The contender called `name`, on a model of that shape and a batch that all ranks have."""
    model = Llama(replace(shape, tie_embeddings=False), seed=0)
    attach, options = (ours, OURS[name]) if name in OURS else (theirs, THEIRS[name])
    return attach(model, axis, *config.tokens(shape), **options)


def ours(model: Llama, axis: Axis, inputs: Tensor, targets: Tensor, **options: bool) -> Contender:
    """`minipar.parallel.tensor`."""
    strategy = tensor.apply(model, axis, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    attached = Attached(model, optimizer, strategy.finish_backward)
    return Contender(model, race.training(attached, inputs, targets))


def theirs(
    model: Llama, axis: Axis, inputs: Tensor, targets: Tensor, *, sequence: bool, once: bool
) -> Contender:
    """`parallelize_module`, in one of the forms above."""
    # Imported here: it takes a while, and every command imports this file.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    grid = DeviceMesh.from_group(axis.group, "cpu", mesh_dim_names=("tp",))
    parallelize_module(model, grid, plan(len(model.model.layers), sequence, once))
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    # In groups of their own: a fused step takes no mixture of the two kinds.
    groups = [dict(params=params) for params in kinds.values() if params]
    optimizer = torch.optim.AdamW(groups, **ADAMW)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = loss_of(model)(model(inputs), targets) / targets.numel()
            loss.backward()
        optimizer.step()
        return loss.detach().to_local()

    return Contender(model, step)


def plan(num_layers: int, sequence: bool, once: bool) -> dict[str, Any]:
    """A plan for a Llama: which style for which module."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outside = Shard(1) if sequence else Replicate()  # of activations [B, T, D], between matrices
    first = ColwiseParallel(input_layouts=Replicate() if once else outside)
    second = RowwiseParallel(output_layouts=outside)
    block: dict[str, Any] = {
        "self_attn.o_proj": second,
        "mlp.down_proj": second,
        **{f"self_attn.{name}_proj": first for name in "qkv"},
        **{f"mlp.{name}_proj": first for name in ("gate", "up")},
    }
    styles: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, use_local_output=False),
    }
    if once:
        block["self_attn"] = PrepareModuleInput(
            input_layouts=(outside, None, None), desired_input_layouts=(Replicate(), None, None)
        )
        block["mlp"] = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    if sequence:
        block["input_layernorm"] = block["post_attention_layernorm"] = SequenceParallel()
        styles["model.norm"] = SequenceParallel()
    for i in range(num_layers):
        styles |= {f"model.layers.{i}.{name}": style for name, style in block.items()}
    return styles
