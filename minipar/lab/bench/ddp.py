"""`minipar bench ddp`: our data parallel beside PyTorch's own, on the same model and link.

How the race is run and what is counted: see `race.py`. PyTorch's takes part with several sizes of
buckets, and its best one is what ours is compared with. `bench fsdp` measures the same step.

Memory is measured apart, in fresh processes: how much the peak of the resident set grows while a
contender trains, once a toy model has had all code loaded. There, `malloc` is told to give freed
tensors back to the system at once; holes in its heap would count otherwise, up to half as much
again for the contender that allocates and frees the most.
"""

import ctypes
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from minipar.comm.mesh import Mesh
from minipar.lab.bench import race
from minipar.lab.bench.race import ADAMW, Attached, StepConfig
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.parallel import ddp
from minipar.train.config import SMALLEST
from minipar.train.report import peak_memory

TOY = LlamaConfig(256, 32, 64, num_layers=2, num_heads=2, num_kv_heads=1, tie_embeddings=True)

COLUMNS: race.Columns = (
    ("link", "{link}"),
    ("ours", "{ours_ms:.0f} ms ({ours})"),
    ("torch (best bucket)", "{torch_ms:.0f} ms ({torch_bucket_mb:g} MB)"),
    race.RATIO,
    ("compute", "{compute_ms:.0f} ms"),
    ("on the wire", "{communication_ms:.0f} ms"),
    *race.HIDDEN,
)


@dataclass(frozen=True)
class DdpConfig(StepConfig):
    """Compare our data parallel with PyTorch's own, in interleaved steps on one model and link."""

    links: tuple[str, ...] = ("gloo", "10gbe", "1gbe", "1gbe*4")
    """Where to compare: gloo, as fast as this machine goes, or emulated links; 1gbe*4 is slowed 4
    times."""
    buckets: tuple[float, ...] = (25.0, 5.0, 1.0)
    """Megabytes per bucket to try for PyTorch's; its best one is compared with each of ours."""
    versions: tuple[str, ...] = ("overlapped", "tuned")
    """Which of ours: the default, and the one that finds its buckets by itself."""

    least = {"buckets": SMALLEST}

    def check(self) -> None:
        super().check()
        if unknown := [name for name in self.versions if name not in ddp.VERSIONS]:
            known = ", ".join(ddp.VERSIONS)
            raise ValueError(f"--versions {' '.join(unknown)}: use some of {known}")


def run(config: DdpConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return the rows."""
    config.check()
    field = contenders(config)
    grown = {name: memory(config, field[name]) for name in field if name != race.ALONE}
    rows = []
    for name in config.links:
        measured = race.on_ranks(measure, config, name, field)
        new = [_row(config, version, name, measured, grown) for version in config.versions]
        race.announce(new)
        rows += new
    print("\n" + race.table(rows, COLUMNS))
    race.save(rows, config.json)
    return rows


def _row(
    config: DdpConfig,
    version: str,
    name: str,
    measured: dict[str, race.Measured],
    memory: dict[str, float],
) -> dict[str, Any]:
    rivals = {_torch(mb): mb for mb in config.buckets}
    row = race.row(config, "ddp", name, version, list(rivals), measured, memory)
    return row | {
        "torch_bucket_mb": rivals[row["torch"]],
        "communication_ms": row["ours_communication_ms"],
        "megabytes": row["ours_megabytes"],
    }


# ---------------------------------------------------------------------- training steps
Attach = Callable[[Llama, Mesh], Attached]


def alone(model: Llama, mesh: Mesh) -> Attached:
    """No communication at all: how long computing takes."""
    return Attached(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def torch_ddp(model: Llama, bucket_mb: float | None) -> DistributedDataParallel:
    """PyTorch's data parallel, with buckets of so many megabytes, or as many as it likes."""
    capacity = bucket_mb * 1e6 / 2**20 if bucket_mb else None
    return DistributedDataParallel(model, bucket_cap_mb=capacity, gradient_as_bucket_view=True)


class Contender:
    """A model that takes training steps by the method `attach`, on tokens of this rank."""

    def __init__(self, config: StepConfig, mesh: Mesh, attach: Attach, shape: LlamaConfig) -> None:
        tokens = config.tokens(shape, seed=mesh.rank)
        self.step = race.training(attach(Llama(shape), mesh), *tokens)


def measure(
    config: StepConfig, link_name: str, methods: Mapping[str, Attach]
) -> dict[str, race.Measured]:
    """Let contenders of these methods take turns; called on every rank.

    The step before the one that counts leaves on its way what that one will leave there.
    """
    mesh, shape = Mesh(dp=config.ranks), PRESETS[config.preset]
    steps = {name: Contender(config, mesh, attach, shape).step for name, attach in methods.items()}
    return race.race(steps, mesh.dp, link_name, config.rounds, lead=steps)


def memory(config: StepConfig, attach: Attach) -> float:
    """Return by how many bytes training lets a rank grow, in processes that did nothing before."""
    with race.pool(config.ranks, "gloo") as ranks:
        return statistics.median(ranks.run(_growth, config, attach))


def _growth(config: StepConfig, attach: Attach) -> int:
    mesh, peaks = Mesh(dp=config.ranks), []
    _give_memory_back()
    for shape in (TOY, PRESETS[config.preset]):  # the toy has all code loaded
        contender = Contender(config, mesh, attach, shape)
        for _ in range(3):
            contender.step()
        peaks.append(peak_memory(torch.device("cpu")))
        del contender
        gc.collect()
    return peaks[1] - peaks[0]


def _give_memory_back() -> None:
    """Have each block of 128 KiB or more mapped for itself, and unmapped when freed (glibc)."""
    mallopt, threshold = getattr(ctypes.CDLL(None), "mallopt", None), -3
    if mallopt is not None:
        mallopt(threshold, 128 * 1024)


# ---------------------------------------------------------------------- contenders
def contenders(config: DdpConfig) -> dict[str, Attach]:
    """Ours, PyTorch's with every bucket size, and one that does not communicate at all."""
    rivals = {_torch(mb): partial(theirs, bucket_mb=mb) for mb in config.buckets}
    mine = {version: partial(ours, version=version) for version in config.versions}
    return mine | rivals | {race.ALONE: alone}


def _torch(bucket_mb: float) -> str:
    return f"torch {bucket_mb:g}"


def ours(model: Llama, mesh: Mesh, version: ddp.Version) -> Attached:
    """As in the trainer: each rank divides its loss by the tokens of all, gradients are summed."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    strategy = ddp.apply(model, mesh.dp, average=False, version=version)
    return Attached(model, optimizer, strategy.finish_backward, mesh.dp.size)


def theirs(model: Llama, mesh: Mesh, bucket_mb: float) -> Attached:
    """`DistributedDataParallel` with buckets of that size."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Attached(torch_ddp(model, bucket_mb), optimizer)
