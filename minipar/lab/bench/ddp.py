"""`minipar bench ddp`: our strategies beside PyTorch's own, on the same model, data and link.

Machines drift, so contenders take turns step by step, in changing order, and what counts is the
ratio within a round: ours over theirs, as the median of all rounds with its quartiles. A round's
time is that of its slowest rank. Memory is measured apart, in fresh processes: how much the peak
of the resident set grows while a contender trains.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from minipar.comm import backends, link
from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.launch import Ranks
from minipar.comm.mesh import Mesh
from minipar.comm.spans import wire_bytes
from minipar.lab.bench.race import (
    StepConfig,
    aligned,
    hidden_share,
    in_turns,
    percent,
    quartiles,
    save,
)
from minipar.model.llama import PRESETS, Llama, token_loss
from minipar.parallel import ddp
from minipar.train.report import peak_memory


@dataclass(frozen=True)
class DdpConfig(StepConfig):
    """Compare our data parallel with PyTorch's own, in interleaved steps on one model and link."""

    buckets: tuple[float, ...] = (25.0, 5.0, 1.0)
    """Megabytes per bucket to try for PyTorch's; its best one is compared with our default."""

    def check(self) -> None:
        super().check()
        if not self.buckets or min(self.buckets) <= 0:
            raise ValueError("--buckets needs at least one value, buckets above 0")


def run(config: DdpConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return the rows."""
    config.check()
    memory = {name: _memory(config, name) for name in ("ours", "torch")}
    rows = []
    for name in config.links:
        with Ranks(config.ranks, backend="gloo" if name == "gloo" else "link", sink=None) as ranks:
            measured = ranks.run(measure, config, name)[0]
        rows.append(_row(config, name, measured, memory))
        print(f"{rows[-1]['link']}: ratio {rows[-1]['ratio']:.3f}", flush=True)
    print("\n" + table(rows))
    save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- contenders
@dataclass
class Contender:
    """Something that takes training steps."""

    model: torch.nn.Module
    step: Callable[[], None]


def contenders(config: DdpConfig, mesh: Mesh) -> dict[str, Callable[[], Contender]]:
    """Ours, PyTorch's with every bucket size, and one that does not communicate at all."""
    torch.manual_seed(mesh.rank)
    shape = PRESETS[config.preset]
    device = backends.device_of(mesh.rank)
    tokens = torch.randint(shape.vocab_size, (config.batch_size, config.seq_len + 1), device=device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()

    def contender(
        wrap: Callable, finish: Callable = lambda wrapped: None, shares: int = 1
    ) -> Contender:
        model = Llama(shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        wrapped = wrap(model)
        forward = wrapped if isinstance(wrapped, torch.nn.Module) else model

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            (token_loss(forward(inputs), targets) / (shares * targets.numel())).backward()
            finish(wrapped)
            optimizer.step()

        return Contender(model, step)

    def theirs(bucket_mb: float) -> Contender:
        return contender(
            lambda model: DistributedDataParallel(
                model,
                bucket_cap_mb=bucket_mb * 1e6 / 2**20,
                gradient_as_bucket_view=True,
            )
        )

    def ours() -> Contender:
        # As in the trainer: each rank divides its loss by the tokens of all, gradients are summed.
        return contender(
            lambda model: ddp.apply(model, mesh.dp, average=False),
            lambda strategy: strategy.finish_backward(),
            shares=mesh.dp.size,
        )

    return {
        "ours": ours,
        **{f"torch {mb:g}": lambda mb=mb: theirs(mb) for mb in config.buckets},
        "alone": lambda: contender(lambda model: model),
    }


# ---------------------------------------------------------------------- on the ranks
@dataclass
class Measured:
    """Seconds of every round of every contender."""

    seconds: dict[str, list[float]]
    gradient_bytes: int


def measure(config: DdpConfig, link_name: str) -> Measured:
    """Let all contenders take turns; called on every rank."""
    mesh = Mesh(dp=config.ranks)
    if link_name != "gloo":
        link.use(link.parse(link_name))
        link.check_calls(False)  # time is the topic
    field = {name: make() for name, make in contenders(config, mesh).items()}
    for contender in field.values():
        for _ in range(3):  # PyTorch's refills its buckets after the first step, and so do we
            contender.step()
    names, seconds = list(field), {name: [] for name in field}
    gc.collect()
    gc.disable()
    for name in in_turns(names, config.rounds):
        barrier(mesh.world)
        start = time.perf_counter()
        field[name].step()
        seconds[name].append(time.perf_counter() - start)
    gc.enable()
    every = all_gather_object(seconds, mesh.world)
    slowest = {n: [max(ts) for ts in zip(*(s[n] for s in every), strict=True)] for n in names}
    num_bytes = sum(p.nbytes for p in field["alone"].model.parameters())
    return Measured(slowest, num_bytes)


def _memory(config: DdpConfig, name: str) -> float:
    """Return by how many bytes training lets a rank grow, in processes that did nothing before."""
    with Ranks(config.ranks, sink=None) as ranks:
        return statistics.median(ranks.run(_growth, config, name))


def _growth(config: DdpConfig, name: str) -> int:
    mesh = Mesh(dp=config.ranks)
    field = contenders(config, mesh)
    before = peak_memory(backends.device_of(mesh.rank))
    contender = field[name if name == "ours" else f"torch {config.buckets[0]:g}"]()
    for _ in range(5):
        contender.step()
    return peak_memory(backends.device_of(mesh.rank)) - before


# ---------------------------------------------------------------------- the table
def _row(
    config: DdpConfig, name: str, measured: Measured, memory: dict[str, float]
) -> dict[str, Any]:
    typical = {k: statistics.median(times) for k, times in measured.seconds.items()}
    best = min((k for k in typical if k.startswith("torch")), key=typical.get)
    ratios = [
        ours / theirs
        for ours, theirs in zip(measured.seconds["ours"], measured.seconds[best], strict=True)
    ]
    low, ratio, high = quartiles(ratios)
    wire = link.parse(name) if name != "gloo" else None
    busy = 0.0
    if wire is not None:
        busy = link.seconds("all_reduce", measured.gradient_bytes, config.ranks, wire)
    return {
        "bench": "ddp",
        "link": wire.label if wire is not None else "gloo, this machine",
        "ranks": config.ranks,
        "preset": config.preset,
        "ours_ms": typical["ours"] * 1e3,
        "torch_ms": typical[best] * 1e3,
        "torch_bucket_mb": float(best.split()[1]),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "compute_ms": typical["alone"] * 1e3,
        "communication_ms": busy * 1e3,
        "megabytes": wire_bytes("all_reduce", measured.gradient_bytes, config.ranks) / 1e6,
        "ours_hidden": hidden_share(typical["ours"], typical["alone"], busy),
        "torch_hidden": hidden_share(typical[best], typical["alone"], busy),
        "ours_peak_mb": memory["ours"] / 1e6,
        "torch_peak_mb": memory["torch"] / 1e6,
        "memory_ratio": memory["ours"] / memory["torch"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; ratios are ours over PyTorch's, below 1 where ours is faster."""
    head = ("link", "ours", "torch (best bucket)", "ratio [quartiles]", "compute", "on the wire")
    head += ("hidden: ours", "torch", "memory ratio")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["link"],
                f"{row['ours_ms']:.0f} ms",
                f"{row['torch_ms']:.0f} ms ({row['torch_bucket_mb']:g} MB)",
                f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]",
                f"{row['compute_ms']:.0f} ms",
                f"{row['communication_ms']:.0f} ms" if row["communication_ms"] else "-",
                percent(row["ours_hidden"]),
                percent(row["torch_hidden"]),
                f"{row['memory_ratio']:.3f}",
            )
        )
    return aligned(lines)
