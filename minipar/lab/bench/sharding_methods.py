"""Every way to shard training state, ours and PyTorch's: what `minipar bench fsdp` compares.

PyTorch hides the collectives of `fully_shard` by CUDA streams. On a CPU there are none, and each
collective blocks where it is called; it would be cheap to win against that. So it takes part in
three forms: as it comes; with asynchronous all-gathers and the next block named to every block;
and with asynchronous reduce-scatters as well, for which torch has no switch but a seam to put one
into (`AsyncReduceScatter`): then all is hidden that its streams would hide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama
from minipar.parallel import fsdp, zero

ADAMW: dict[str, Any] = dict(lr=1e-4, fused=True)


@dataclass
class Attached:
    """A model under some method: call `forward`, backward, `finish`, and step the optimizer."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = lambda: None
    shares: int = 1  # by how many the loss is to be divided, where gradients are summed


Attach = Callable[[Llama, Mesh], Attached]


def alone(model: Llama, mesh: Mesh) -> Attached:
    """No communication at all: how long computing takes."""
    return Attached(model, torch.optim.AdamW(model.parameters(), **ADAMW))


# ---------------------------------------------------------------------- ours
def zero_stage(stage: int) -> Attach:
    """ZeRO-1 or ZeRO-2 of `minipar.parallel.zero`."""

    def attach(model: Llama, mesh: Mesh) -> Attached:
        parameters = model.parameters()
        optimizer = zero.ShardedOptimizer(parameters, torch.optim.AdamW, mesh.dp, **ADAMW)
        strategy = zero.apply(model, mesh.dp, optimizer=optimizer, stage=stage, average=False)
        return Attached(model, optimizer, strategy.finish_backward, mesh.dp.size)

    return attach


def sharded(reshard: bool = True) -> Attach:
    """`minipar.parallel.fsdp`, with or without its `reshard_after_forward`."""

    def attach(model: Llama, mesh: Mesh) -> Attached:
        strategy = fsdp.apply(model, mesh.dp, reshard_after_forward=reshard, average=False)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Attached(model, optimizer, strategy.finish_backward, mesh.dp.size)

    return attach


# ---------------------------------------------------------------------- PyTorch's
# Imported where they are used: they take most of a second, and every command imports this file.
def zero_redundancy(bucket_mb: float | None = None) -> Attach:
    """`ZeroRedundancyOptimizer` on top of `DistributedDataParallel`."""

    def attach(model: Llama, mesh: Mesh) -> Attached:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        capacity = bucket_mb * 1e6 / 2**20 if bucket_mb else None
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=capacity, gradient_as_bucket_view=True
        )
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
        )
        return Attached(wrapped, optimizer)

    return attach


def torch_sharded(
    reshard: bool = True, prefetch: bool = False, async_reduce: bool = False
) -> Attach:
    """`fully_shard` on every block and the root, in one of the forms above."""

    def attach(model: Llama, mesh: Mesh) -> Attached:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        device_type = next(model.parameters()).device.type
        grid = DeviceMesh.from_group(mesh.dp.group, device_type, mesh_dim_names=("dp",))
        blocks = list(model.model.layers)
        for block in blocks:
            fully_shard(block, mesh=grid, reshard_after_forward=reshard)
        fully_shard(model, mesh=grid)
        if prefetch:
            model._set_unshard_async_op(True)
            _announce(model, blocks)
        reduce_scatter = AsyncReduceScatter()
        if async_reduce:
            for module in (model, *blocks):
                module.set_custom_reduce_scatter(reduce_scatter)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Attached(model, optimizer, reduce_scatter.wait)

    return attach


def _announce(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Tell every block which one comes next."""
    for here, following in zip((model, *blocks), blocks, strict=False):
        here.set_modules_to_forward_prefetch([following])
    for here, following in zip((model, *reversed(blocks)), reversed(blocks), strict=False):
        here.set_modules_to_backward_prefetch([following])


class AsyncReduceScatter:
    """A reduce-scatter for `set_custom_reduce_scatter` that returns at once; `wait` ends them all.

    Torch only cuts its output into gradients, at which nobody looks before the optimizer.
    """

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Start to reduce."""
        work = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=True)
        self.works.append(work)

    def wait(self) -> None:
        """Block until all gradients are there."""
        while self.works:
            self.works.pop(0).wait()


# ---------------------------------------------------------------------- by name
ALONE = "alone"
OURS: dict[str, Attach] = {
    "ZeRO-1": zero_stage(1),
    "ZeRO-2": zero_stage(2),
    "FSDP, weights kept": sharded(reshard=False),
    "FSDP": sharded(),
}
THEIRS: dict[str, Attach] = {
    "ZeroRedundancyOptimizer": zero_redundancy(),
    "ZeroRedundancyOptimizer, 5 MB buckets": zero_redundancy(5.0),
    "fully_shard": torch_sharded(),
    "fully_shard, prefetch": torch_sharded(prefetch=True),
    "fully_shard, all asynchronous": torch_sharded(prefetch=True, async_reduce=True),
    "fully_shard, kept": torch_sharded(reshard=False),
    "fully_shard, kept, all asynchronous": torch_sharded(
        reshard=False, prefetch=True, async_reduce=True
    ),
}
METHODS: dict[str, Attach] = {**OURS, **THEIRS, ALONE: alone}

# Whom of PyTorch's each of ours is compared with: a family takes turns. First as PyTorch's comes.
FAMILIES: list[tuple[list[str], list[str]]] = [
    (["ZeRO-1"], ["ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer, 5 MB buckets"]),
    # Under its own name, PyTorch has no ZeRO-2.
    (
        ["ZeRO-2", "FSDP, weights kept"],
        ["fully_shard, kept", "fully_shard, kept, all asynchronous"],
    ),
    (["FSDP"], ["fully_shard", "fully_shard, prefetch", "fully_shard, all asynchronous"]),
]
RIVALS = {name: theirs for ours, theirs in FAMILIES for name in ours}
