"""`minipar bench ddp`: our data parallel beside PyTorch's own, on the same model and link.

How the race is run and what is counted: see `race.py`, and for memory `data_parallel.py`. PyTorch's
takes part with several sizes of buckets, and its best one is what ours is compared with.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minipar.comm.launch import Ranks
from minipar.comm.mesh import Mesh
from minipar.lab.bench import race
from minipar.lab.bench.data_parallel import (
    ADAMW,
    Attach,
    Attached,
    alone,
    measure,
    memory,
    torch_ddp,
)
from minipar.model.llama import Llama
from minipar.parallel import ddp

COLUMNS: race.Columns = (
    ("link", "{link}"),
    ("ours", "{ours_ms:.0f} ms"),
    ("torch (best bucket)", "{torch_ms:.0f} ms ({torch_bucket_mb:g} MB)"),
    race.RATIO,
    ("compute", "{compute_ms:.0f} ms"),
    ("on the wire", "{communication_ms:.0f} ms"),
    *race.HIDDEN,
)


@dataclass(frozen=True)
class DdpConfig(race.StepConfig):
    """Compare our data parallel with PyTorch's own, in interleaved steps on one model and link."""

    buckets: tuple[float, ...] = (25.0, 5.0, 1.0)
    """Megabytes per bucket to try for PyTorch's; its best one is compared with our default."""

    def check(self) -> None:
        super().check()
        if min(self.buckets) <= 0:
            raise ValueError("--buckets needs at least one value, buckets above 0")


def run(config: DdpConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return the rows."""
    config.check()
    field = contenders(config)
    grown = dict.fromkeys(field, memory(config, field[_torch(config.buckets[0])]))
    grown["ours"] = memory(config, ours)
    rows = []
    for name in config.links:
        with Ranks(config.ranks, backend="gloo" if name == "gloo" else "link", sink=None) as ranks:
            rows.append(_row(config, name, ranks.run(measure, config, name, field)[0], grown))
        race.announce(rows[-1:])
    print("\n" + race.table(rows, COLUMNS))
    race.save(rows, config.json)
    return rows


def _row(
    config: DdpConfig, name: str, measured: dict[str, race.Measured], memory: dict[str, float]
) -> dict[str, Any]:
    rivals = {_torch(mb): mb for mb in config.buckets}
    row = race.row(config, "ddp", name, "ours", list(rivals), measured, memory)
    return row | {
        "torch_bucket_mb": rivals[row["torch"]],
        "communication_ms": row["ours_communication_ms"],
        "megabytes": row["ours_megabytes"],
    }


# ---------------------------------------------------------------------- contenders
def contenders(config: DdpConfig) -> dict[str, Attach]:
    """Ours, PyTorch's with every bucket size, and one that does not communicate at all."""
    rivals = {_torch(mb): partial(theirs, bucket_mb=mb) for mb in config.buckets}
    return {"ours": ours, **rivals, race.ALONE: alone}


def _torch(bucket_mb: float) -> str:
    return f"torch {bucket_mb:g}"


def ours(model: Llama, mesh: Mesh) -> Attached:
    """As in the trainer: each rank divides its loss by the tokens of all, gradients are summed."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    strategy = ddp.apply(model, mesh.dp, average=False)
    return Attached(model, optimizer, strategy.finish_backward, mesh.dp.size)


def theirs(model: Llama, mesh: Mesh, bucket_mb: float) -> Attached:
    """`DistributedDataParallel` with buckets of that size."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Attached(torch_ddp(model, bucket_mb), optimizer)
