"""`minipar bench fsdp`: ZeRO-1, ZeRO-2 and FSDP beside PyTorch's, on the same model and link.

Contenders that do the same work (`sharding_methods`) take turns, in changing order, as machines
drift. A turn is two steps, of which the second counts, as weights may still be on their way when a
step ends. What counts is the ratio within a round of turns: ours over theirs, as the median of all
rounds with its quartiles. A step's time is that of its slowest rank. Bytes and seconds on the wire
are those of the emulated link, which sees what anybody sends.

Each of ours is compared with its fastest rival; beside it stands what a user of PyTorch gets who
switches nothing on. Memory is measured apart, in fresh processes: how much the peak of the resident
set grows while a contender trains, once a toy model has had all code loaded. There, `malloc` is
told to give freed tensors back to the system at once; holes in its heap would count otherwise, up
to half as much again for whoever allocates and frees the most.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import backends, link
from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.launch import Ranks
from minipar.comm.mesh import Mesh
from minipar.lab.bench.race import (
    StepConfig,
    aligned,
    hidden_share,
    in_turns,
    percent,
    quartiles,
    save,
)
from minipar.lab.bench.sharding_methods import ALONE, FAMILIES, METHODS, RIVALS
from minipar.model.llama import PRESETS, Llama, LlamaConfig, token_loss
from minipar.train.report import peak_memory

TOY = LlamaConfig(256, 32, 64, num_layers=2, num_heads=2, num_kv_heads=1, tie_embeddings=True)


@dataclass(frozen=True)
class ShardingConfig(StepConfig):
    """Compare our ZeRO and FSDP with PyTorch's: time, memory and hidden communication."""

    links: tuple[str, ...] = ("10gbe", "1gbe", "1gbe*2")
    """Where to compare: emulated links, or gloo, as fast as this machine goes; 1gbe*2 is slowed
    twice."""
    rounds: int = 6
    """Steps of each contender per link."""

    def check(self) -> None:
        super().check()
        if self.ranks < 2:
            raise ValueError(f"--ranks {self.ranks}: it takes at least 2 to share")


def run(config: ShardingConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row for each of ours on each link."""
    config.check()
    memory = {name: _memory(config, name) for name in METHODS if name != ALONE}
    rows = []
    for name in config.links:
        with Ranks(config.ranks, backend="gloo" if name == "gloo" else "link", sink=None) as ranks:
            for ours, theirs in FAMILIES:
                measured = ranks.run(measure, config, name, [*ours, *theirs, ALONE])[0]
                rows += [_row(config, name, method, measured, memory) for method in ours]
        ratios = ", ".join(f"{row['ours']} {row['ratio']:.3f}" for row in rows[-len(RIVALS) :])
        print(f"{rows[-1]['link']}: {ratios}", flush=True)
    print("\n" + table(rows))
    save(rows, config.json)
    return rows


# ---------------------------------------------------------------------- on the ranks
class Contender:
    """A model that takes training steps by the method called `name`, on tokens of this rank."""

    def __init__(self, config: ShardingConfig, mesh: Mesh, name: str, shape: LlamaConfig) -> None:
        device = backends.device_of(mesh.rank)
        stream = torch.Generator().manual_seed(mesh.rank)
        size = (config.batch_size, config.seq_len + 1)
        tokens = torch.randint(shape.vocab_size, size, generator=stream).to(device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        self.attached = METHODS[name](Llama(shape).to(device), mesh)

    def step(self) -> Tensor:
        """Take a training step; return the loss of this rank, in nats per token."""
        attached = self.attached
        attached.optimizer.zero_grad(set_to_none=True)
        loss = token_loss(attached.forward(self.inputs), self.targets) / self.targets.numel()
        (loss / attached.shares).backward()
        attached.finish()
        attached.optimizer.step()
        return loss.detach()


@dataclass
class Measured:
    """What every step of a contender came to."""

    seconds: list[float] = field(default_factory=list)  # of the slowest rank
    communication: list[float] = field(default_factory=list)  # seconds, mean over the ranks
    num_bytes: list[float] = field(default_factory=list)  # sent by the busiest rank


class Sent(NamedTuple):
    """What went over the link in one call: moments in seconds of `time.monotonic`."""

    issued: float
    start: float
    end: float
    num_bytes: int


def measure(config: ShardingConfig, link_name: str, names: Sequence[str]) -> dict[str, Measured]:
    """Let the contenders called `names` take turns; called on every rank."""
    mesh = Mesh(dp=config.ranks)
    link.check_calls(False)  # time is the topic
    shape = PRESETS[config.preset]
    field = {name: Contender(config, mesh, name, shape) for name in names}
    for contender in field.values():
        for _ in range(3):  # the first steps learn the order of blocks and fill buckets anew
            contender.step()
    if link_name != "gloo":
        link.use(link.parse(link_name))
    turns: list[tuple[str, float, float]] = []
    sent: list[Sent] = []

    def note(work: Any) -> None:  # figures only: its tensors are to be freed, and used again
        sent.append(Sent(work.t_issue, *work.times, work.num_bytes))

    link.observers.append(note)
    for name in in_turns(names, config.rounds):
        gc.collect()
        gc.disable()
        barrier(mesh.dp)
        field[name].step()  # leaves on the way what the next one will leave there
        start = time.monotonic()
        field[name].step()
        turns.append((name, start, time.monotonic()))
        barrier(mesh.dp)  # what is on its way arrives before anything else takes time
        gc.enable()
    link.observers.remove(note)
    link.use("none")
    link.check_calls(True)
    every = [_sums(sent, start, end) for _, start, end in turns]
    measured = {name: Measured() for name in field}
    for (name, *_), *ranks in zip(turns, *all_gather_object(every, mesh.dp), strict=True):
        seconds, communication, num_bytes = zip(*ranks, strict=True)
        measured[name].seconds.append(max(seconds))
        measured[name].communication.append(statistics.mean(communication))
        measured[name].num_bytes.append(max(num_bytes))
    return measured


def _sums(sent: list[Sent], start: float, end: float) -> tuple[float, float, float]:
    """Return seconds, seconds on the wire and bytes of a step of this rank."""
    own = [one for one in sent if start <= one.issued < end]
    return end - start, sum(one.end - one.start for one in own), sum(one.num_bytes for one in own)


def _memory(config: ShardingConfig, name: str) -> float:
    """Return by how many bytes training lets a rank grow, in processes that did nothing before."""
    with Ranks(config.ranks, sink=None) as ranks:
        return statistics.median(ranks.run(_growth, config, name))


def _growth(config: ShardingConfig, name: str) -> int:
    mesh, peaks = Mesh(dp=config.ranks), []
    _give_memory_back()
    for shape in (TOY, PRESETS[config.preset]):  # the toy has all code loaded
        contender = Contender(config, mesh, name, shape)
        for _ in range(3):
            contender.step()
        peaks.append(peak_memory(backends.device_of(mesh.rank)))
        del contender
        gc.collect()
    return peaks[1] - peaks[0]


def _give_memory_back() -> None:
    """Have each block of 128 KiB or more mapped for itself, and unmapped when freed (glibc)."""
    mallopt, threshold = getattr(ctypes.CDLL(None), "mallopt", None), -3
    if mallopt is not None:
        mallopt(threshold, 128 * 1024)


# ---------------------------------------------------------------------- the table
def _row(
    config: ShardingConfig,
    name: str,
    ours: str,
    measured: dict[str, Measured],
    memory: dict[str, float],
) -> dict[str, Any]:
    def typical(method: str, what: str) -> float:
        return statistics.median(getattr(measured[method], what))

    def ratios(rival: str) -> tuple[float, float, float]:
        pairs = zip(measured[ours].seconds, measured[rival].seconds, strict=True)
        return quartiles([mine / theirs for mine, theirs in pairs])

    def of(method: str) -> dict[str, float]:
        step, busy = typical(method, "seconds"), typical(method, "communication")
        return {
            "ms": step * 1e3,
            "communication_ms": busy * 1e3,
            "megabytes": typical(method, "num_bytes") / 1e6,
            "hidden": hidden_share(step, typical(ALONE, "seconds"), busy),
            "peak_mb": memory[method] / 1e6,
        }

    fastest = min(RIVALS[ours], key=lambda rival: typical(rival, "seconds"))
    low, ratio, high = ratios(fastest)
    return {
        "bench": "fsdp",
        "link": link.parse(name).label if name != "gloo" else "gloo, this machine",
        "ranks": config.ranks,
        "preset": config.preset,
        "rounds": config.rounds,
        "ours": ours,
        "torch": fastest,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "memory_ratio": memory[ours] / memory[fastest],
        "compute_ms": typical(ALONE, "seconds") * 1e3,
        **{f"ours_{key}": value for key, value in of(ours).items()},
        **{f"torch_{key}": value for key, value in of(fastest).items()},
        "rivals": {rival: ratios(rival)[1] for rival in RIVALS[ours]},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; ratios are ours over PyTorch's, below 1 where ours is better."""
    head = ("link", "ours", "step", "PyTorch's fastest of its kind", "step", "ratio [quartiles]")
    head += ("ratio to it as it comes", "MB sent: ours", "torch", "hidden: ours", "torch")
    head += ("memory ratio",)
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["link"],
                row["ours"],
                f"{row['ours_ms']:.0f} ms",
                row["torch"],
                f"{row['torch_ms']:.0f} ms",
                f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]",
                f"{next(iter(row['rivals'].values())):.3f}",
                f"{row['ours_megabytes']:.1f}",
                f"{row['torch_megabytes']:.1f}",
                percent(row["ours_hidden"]),
                percent(row["torch_hidden"]),
                f"{row['memory_ratio']:.3f}",
            )
        )
    return aligned(lines)
