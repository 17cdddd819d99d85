"""`minipar bench STRATEGY`: whom of PyTorch's each strategy of ours races against.

How a race is run: race.py. How contenders train: contenders.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minipar.comm.mesh import Axis, Mesh
from minipar.lab.bench import race
from minipar.lab.bench.contenders import (
    PIPELINES,
    our_context,
    our_ddp,
    our_fsdp,
    our_pipeline,
    our_tensor,
    our_ulysses,
    our_zero,
    torch_ddp,
    torch_fsdp,
    torch_pipeline,
    torch_tensor,
    torch_zero,
)
from minipar.lab.bench.race import RaceConfig, Step
from minipar.model.llama import PRESETS, LlamaConfig

Make = Callable[[RaceConfig, Axis, LlamaConfig], Step]


def run(config: RaceConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table; return a row for each of ours on each link."""
    contest = CONTESTS[config.strategy]
    config = replace(config, seq_len=config.seq_len or contest.seq_len)
    config.check()
    rows = []
    for name in config.links:
        with race.pool(config.ranks, name) as ranks:
            for ours, rivals in contest.rivals.items():
                measured = ranks.run(measure, config, name, ours)[0]
                rows.append(race.row(config, name, ours, list(rivals), measured))
                print(f"{rows[-1]['link']}: {ours} {rows[-1]['ratio']:.3f}", flush=True)
    print("\n" + race.table(rows))
    race.save(rows, config.json)
    return rows


def measure(config: RaceConfig, link_name: str, ours: str) -> dict[str, race.Measured]:
    """Run `ours` and its rivals in turns on a link; called on every rank."""
    contest = CONTESTS[config.strategy]
    axis = getattr(Mesh(**{contest.axis: config.ranks}), contest.axis)
    shape, names = contest.shape(config), [ours, *contest.rivals[ours]]
    steps = {name: contest.make[name](config, axis, shape) for name in names}
    return race.race(steps, axis, link_name, config.rounds)


@dataclass(frozen=True)
class Contest:
    """The contenders of one strategy."""

    axis: str
    make: Mapping[str, Make]
    rivals: Mapping[str, Sequence[str]]
    """Ours, and the contenders of PyTorch's to compare with: first as PyTorch's comes."""
    seq_len: int = 128
    changes: Callable[[RaceConfig], dict[str, Any]] = lambda config: {}  # of the preset

    def shape(self, config: RaceConfig) -> LlamaConfig:
        """Return the model that all contenders train."""
        return replace(PRESETS[config.preset], **self.changes(config))


CONTESTS = {
    "ddp": Contest(
        "dp",
        {
            "overlapped": partial(our_ddp, version="overlapped"),
            "tuned": partial(our_ddp, version="tuned"),
            **{f"torch {mb} MB": partial(torch_ddp, bucket_mb=mb) for mb in (25, 5, 1)},
        },
        dict.fromkeys(("overlapped", "tuned"), ["torch 25 MB", "torch 5 MB", "torch 1 MB"]),
    ),
    "fsdp": Contest(
        "dp",
        {
            "ZeRO-1": partial(our_zero, stage=1),
            "ZeRO-2": partial(our_zero, stage=2),
            "FSDP, weights kept": partial(our_fsdp, reshard=False),
            "FSDP": our_fsdp,
            "ZeroRedundancyOptimizer": partial(torch_zero, bucket_mb=25),
            "ZeroRedundancyOptimizer, 5 MB": partial(torch_zero, bucket_mb=5),
            "fully_shard": torch_fsdp,
            "fully_shard, prefetch": partial(torch_fsdp, prefetch=True),
            "fully_shard, all async": partial(torch_fsdp, prefetch=True, async_reduce=True),
            "fully_shard, kept": partial(torch_fsdp, reshard=False),
            "fully_shard, kept, all async": partial(
                torch_fsdp, reshard=False, prefetch=True, async_reduce=True
            ),
        },
        {
            "ZeRO-1": ["ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer, 5 MB"],
            "ZeRO-2": ["fully_shard, kept", "fully_shard, kept, all async"],  # torch has no ZeRO-2
            "FSDP, weights kept": ["fully_shard, kept", "fully_shard, kept, all async"],
            "FSDP": ["fully_shard", "fully_shard, prefetch", "fully_shard, all async"],
        },
    ),
    "tensor": Contest(
        "tp",
        {
            "plain": our_tensor,
            "sequence": partial(our_tensor, sequence=True),
            "overlap": partial(our_tensor, sequence=True, overlap=True),
            "parallelize_module": partial(torch_tensor, once=False),
            "parallelize_module, inputs once": torch_tensor,
            "with SequenceParallel": partial(torch_tensor, sequence=True),
        },
        {
            "plain": ["parallelize_module", "parallelize_module, inputs once"],
            "sequence": ["with SequenceParallel"],
            "overlap": ["with SequenceParallel"],
        },
        seq_len=256,
        changes=lambda config: dict(tie_embeddings=False),
    ),
    "context": Contest(
        "cp",
        {
            "ring, zigzag": partial(our_context, order="zigzag"),
            "ring, plain": partial(our_context, order="plain"),
            "gather": partial(our_context, exchange="gather"),
            "ulysses": our_ulysses,
            "ring, all-gather": partial(our_context, rotate="allgather"),
            "ring, all-to-all": partial(our_context, rotate="alltoall"),
        },
        dict.fromkeys(
            ("ring, zigzag", "ring, plain", "gather", "ulysses"),
            ["ring, all-gather", "ring, all-to-all"],
        ),
        seq_len=2048,
    ),
    "pipeline": Contest(
        "pp",
        {
            **{name: partial(our_pipeline, name=name) for name in PIPELINES},
            **{theirs: partial(torch_pipeline, name=name) for name, theirs in PIPELINES.items()},
        },
        {name: [theirs] for name, theirs in PIPELINES.items()},
        changes=lambda config: dict(tie_embeddings=False, num_layers=4 * config.ranks),
    ),
}
