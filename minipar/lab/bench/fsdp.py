"""`minipar bench fsdp`: ZeRO-1, ZeRO-2 and FSDP beside PyTorch's, on the same model and link.

How the race is run and what is counted: see `race.py`, and for memory `ddp.py`. A turn is
two steps, of which the second counts, as weights may still be on their way when a step ends. Each
of ours is compared with its fastest rival; beside it stands what a user of PyTorch gets who
switches nothing on.

PyTorch hides the collectives of `fully_shard` by CUDA streams. On a CPU there are none, and each
collective blocks where it is called; it would be cheap to win against that. So it takes part in
three forms: as it comes; with asynchronous all-gathers and the next block named to every block;
and with asynchronous reduce-scatters as well, for which torch has no switch but a seam to put one
into (`AsyncReduceScatter`): then all is hidden that its streams would hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minipar.comm.mesh import Mesh
from minipar.lab.bench import race
from minipar.lab.bench.ddp import Attach, alone, measure, memory, torch_ddp
from minipar.lab.bench.race import ADAMW, ALONE, Attached
from minipar.model.llama import Llama
from minipar.parallel import fsdp, zero

COLUMNS: race.Columns = (
    *race.STEPS,
    ("ratio to it as it comes", "{ratio_as_it_comes:.3f}"),
    ("MB sent: ours", "{ours_megabytes:.1f}"),
    ("torch", "{torch_megabytes:.1f}"),
    *race.HIDDEN,
)


@dataclass(frozen=True)
class ShardingConfig(race.StepConfig):
    """Compare our ZeRO and FSDP with PyTorch's: time, memory and hidden communication."""

    links: tuple[str, ...] = ("10gbe", "1gbe", "1gbe*2")
    """Where to compare: emulated links, or gloo, as fast as this machine goes; 1gbe*2 is slowed
    twice."""
    rounds: int = 6
    """Steps of each contender per link."""

    least = {"ranks": 2}


def run(config: ShardingConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row for each of ours on each link."""
    config.check()
    grown = {name: memory(config, METHODS[name]) for name in METHODS if name != ALONE}
    rows: list[dict[str, Any]] = []
    for name in config.links:
        with race.pool(config.ranks, name) as ranks:
            for ours, theirs in FAMILIES:
                field = {key: METHODS[key] for key in [*ours, *theirs, ALONE]}
                measured = ranks.run(measure, config, name, field)[0]
                rows += [
                    race.row(config, "fsdp", name, method, theirs, measured, grown)
                    for method in ours
                ]
        race.announce(rows[-len(RIVALS) :])
    print("\n" + race.table(rows, COLUMNS))
    race.save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- ours
def zero_stage(model: Llama, mesh: Mesh, stage: int) -> Attached:
    """ZeRO-1 or ZeRO-2 of `minipar.parallel.zero`."""
    parameters = model.parameters()
    optimizer = zero.ShardedOptimizer(parameters, torch.optim.AdamW, mesh.dp, **ADAMW)
    strategy = zero.apply(model, mesh.dp, optimizer=optimizer, stage=stage, average=False)
    return Attached(model, optimizer, strategy.finish_backward, mesh.dp.size)


def sharded(model: Llama, mesh: Mesh, reshard: bool = True) -> Attached:
    """`minipar.parallel.fsdp`, with or without its `reshard_after_forward`."""
    strategy = fsdp.apply(model, mesh.dp, reshard_after_forward=reshard, average=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Attached(model, optimizer, strategy.finish_backward, mesh.dp.size)


# ---------------------------------------------------------------------- PyTorch's
# Imported where they are used: they take most of a second, and every command imports this file.
def zero_redundancy(model: Llama, mesh: Mesh, bucket_mb: float | None = None) -> Attached:
    """`ZeroRedundancyOptimizer` on top of `DistributedDataParallel`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = torch_ddp(model, bucket_mb)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return Attached(wrapped, optimizer)


def torch_sharded(
    model: Llama,
    mesh: Mesh,
    reshard: bool = True,
    prefetch: bool = False,
    async_reduce: bool = False,
) -> Attached:
    """`fully_shard` on every block and the root, in one of the forms above."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    grid = DeviceMesh.from_group(mesh.dp.group, "cpu", mesh_dim_names=("dp",))
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


def _announce(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Tell every block which one comes next."""
    for here, following in zip((model, *blocks), blocks, strict=False):
        here.set_modules_to_forward_prefetch([following])
    for here, following in zip((model, *reversed(blocks)), reversed(blocks), strict=False):
        here.set_modules_to_backward_prefetch([following])


class AsyncReduceScatter:
    """A reduce-scatter for `set_custom_reduce_scatter` that returns at once; `wait` ends them all.

    Torch only cuts its output into gradients, which are first read by the optimizer.
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
OURS: dict[str, Attach] = {
    "ZeRO-1": partial(zero_stage, stage=1),
    "ZeRO-2": partial(zero_stage, stage=2),
    "FSDP, weights kept": partial(sharded, reshard=False),
    "FSDP": sharded,
}
THEIRS: dict[str, Attach] = {
    "ZeroRedundancyOptimizer": zero_redundancy,
    "ZeroRedundancyOptimizer, 5 MB buckets": partial(zero_redundancy, bucket_mb=5.0),
    "fully_shard": torch_sharded,
    "fully_shard, prefetch": partial(torch_sharded, prefetch=True),
    "fully_shard, all asynchronous": partial(torch_sharded, prefetch=True, async_reduce=True),
    "fully_shard, kept": partial(torch_sharded, reshard=False),
    "fully_shard, kept, all asynchronous": partial(
        torch_sharded, reshard=False, prefetch=True, async_reduce=True
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
