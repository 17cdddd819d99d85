"""The table of the law: every strategy, what it is tried on, what it sends, what it holds.

A `Row` attaches one strategy, or several, to a small training `Task`. test_law.py runs the same
tests over all rows. A new strategy adds a row here, and is proved.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Axis, Mesh
from minipar.model.masks import document_mask, document_positions
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import context, ddp, fsdp, offload, tensor, ulysses, zero
from minipar.parallel.compression import Codec, Compressed, PowerSGD, TopK
from minipar.train.data import IGNORE
from minipar.train.step import Microbatch
from tests.law import models
from tests.law.harness import Attach, Cut, Task, make_optimizer


# ---------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class Uneven(Task):
    """Rank r has ``shares[r]`` microbatches of two rows each; some ranks have none.

    The shares move on by one rank with each step.
    """

    num_sequences: int = 10
    shares: tuple[int, ...] = ()

    def microbatches_of(self, step: int, rank: int, size: int) -> list[Microbatch]:
        pairs = list(zip(*(t.split(2) for t in self.batch(step)), strict=True))
        shares = self.shares if size > 1 else (len(pairs),)
        shares = [shares[(r + step) % size] for r in range(size)]
        start = sum(shares[:rank])
        return pairs[start : start + shares[rank]]


@dataclass(frozen=True)
class Packed(Task):
    """Several documents in a row, which do not see each other."""

    def microbatches_of(self, step: int, rank: int, size: int) -> list[Microbatch]:
        result = []
        for inputs, targets in super().microbatches_of(step, rank, size):
            documents = (inputs % 9 == 0).cumsum(1)
            more = document_positions(documents), document_mask(documents)
            result.append((inputs, targets, *more))
        return result


@dataclass(frozen=True)
class Silent(Task):
    """No target in the second half of any sequence: in plain order the last rank has none."""

    def batch(self, step: int) -> Microbatch:
        inputs, targets = super().batch(step)
        targets[:, self.seq_len // 2 :] = IGNORE
        return inputs, targets


def selective_llama(seed: int) -> nn.Module:
    """Keeps the results of matmuls and of attention, computes the rest again."""
    model = models.llama(seed)
    checkpoint_activations(model, "selective")
    return model


def freeze_matrices(model: nn.Module) -> None:
    """Train the vectors alone, as some kinds of fine-tuning do."""
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)


def freeze_every_other_matrix(model: nn.Module) -> None:
    """Freeze a part of some blocks, and all of one block."""
    models.frozen_embedding(model)
    for i, p in enumerate(model.model.layers.parameters()):
        p.requires_grad_(i % 2 == 1)  # frozen: a block's first norm, which backward needs last
    model.model.layers[1].requires_grad_(False)


ANY = {  # for strategies that take any model
    "llama": Task(models.llama),
    "untied": Task(models.untied_llama),
    "recomputing": Task(models.recomputing_llama),
    "accumulating": Task(models.llama, microbatches=2, num_sequences=8),
    "uneven": Task(models.llama, microbatches=3, num_sequences=5),
    "foreign": Task(models.Foreign),
    "frozen": Task(models.untied_llama, fine_tune=models.frozen_embedding),
    "sometimes used": Task(models.SometimesUsed, num_sequences=4),
    "idle ranks": Task(models.llama, num_sequences=3),
}
IN_LARGE = ["llama", "accumulating", "uneven", "foreign", "sometimes used", "idle ranks"]

six_heads = partial(models.llama, num_heads=6, num_kv_heads=3, head_dim=4)
# 4 heads on 2 of keys: on 4 ranks two ranks share a head of keys. The words are 0 to 59.
CUT = {
    "llama": Task(partial(models.llama, vocab_size=64), vocab_size=60, seq_len=8),
    "untied": Task(partial(models.llama, vocab_size=64, tie_embeddings=False), 60, seq_len=12),
}


# ---------------------------------------------------------------------- rows
@dataclass(frozen=True)
class Row:
    """One strategy, or several, on one task."""

    name: str
    task: Task
    sizes: dict[str, int]
    attach: Attach
    cut: Cut = lambda microbatch, mesh: microbatch
    sent: Callable[[Task, int], dict[str, float]] | None = None  # bytes by axis, in the last step
    slack: float = 50.0  # bytes; each call rounds down
    state: Callable[[int, int], float] | None = (
        None  # (numbers of the model, ranks) -> moments here
    )
    mute: str = ""  # what is wrong first without communication; "": not tried
    strict: bool = False  # tried on the link that finds races
    quick: bool = False  # part of `make test-fast`
    rtol: float = 1e-10

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return self.name


# ---------------------------------------------------------------------- bytes, by the docstrings
def numbers_of(task: Task) -> tuple[int, int]:
    """Return (numbers, parameters) of the model of `task` that learn."""
    model = task.build(0)
    task.fine_tune(model)
    learns = [p for p in model.parameters() if p.requires_grad]
    return sum(p.numel() for p in learns), len(learns)


def trainer_bytes(n: int, num_floats: int = 0) -> float:
    """The trainer's own all-reduces: tokens and loss, and `num_floats` of the gradient norm."""
    return 2 * (n - 1) / n * 8 * (2 + num_floats)


def sent_by_ddp(task: Task, n: int) -> dict[str, float]:
    """2 (n-1)/n (P + N): gradients, and a byte per parameter."""
    numbers, count = numbers_of(task)
    return {"dp": 2 * (n - 1) / n * (8 * numbers + count) + trainer_bytes(n)}


def sent_by_tensor(task: Task, n: int, mode: str) -> dict[str, float]:
    """What tensor.py promises a rank to send along tp."""
    config, share = task.build(0).config, (n - 1) / n
    layers, width, kv_heads = config.num_layers, config.hidden_size, config.num_kv_heads
    tokens = task.num_sequences * task.seq_len
    sent = (8 * layers + 4 + 2 * layers * (mode == "overlap")) * share * tokens * width
    sent += 6 * share * tokens
    if mode != "plain":
        sent += 2 * share * (2 * layers + 1) * width
    if n > kv_heads:
        sent += 2 * share * 2 * layers * kv_heads * config.head_dim * width
    return {"tp": 8 * (sent + 2 * share)}  # the trainer's gradient norm is one number


def sent_by_context(task: Task, n: int, method: str) -> dict[str, float]:
    """Keys and values around a ring three times; or four tensors, there and back, by Ulysses."""
    config, kept = task.build(0).config, (n - 1) / n
    head = task.num_sequences * task.seq_len * config.head_dim * 8  # bytes of one head of all
    kv_heads = max(config.num_kv_heads, n)  # 2 repeated for 4 ranks
    sent = 3 * kept * 2 * config.num_kv_heads * head  # forward once, backward twice
    if method == "ulysses":
        sent = 2 * kept * (2 * config.num_heads + 2 * kv_heads) * head / n
    return {"cp": config.num_layers * sent + sent_by_ddp(task, n)["dp"]}


# ---------------------------------------------------------------------- data: any model
SMALL = 0.004  # MB of a bucket: even these models fill several


def attach_ddp(model: nn.Module, mesh: Mesh, **options: Any) -> list:
    return [ddp.apply(model, mesh.dp, bucket_mb=SMALL, average=False, **options)]


def attach_zero(model: nn.Module, mesh: Mesh, stage: int, axis: Axis | None = None) -> list:
    axis = axis or mesh.dp
    make = partial(zero.ShardedOptimizer, bucket_mb=SMALL)
    optimizer = make_optimizer(model, make, torch.optim.AdamW, axis)
    assert len(optimizer.buckets) >= 3
    model.zero = zero.apply(model, axis, optimizer=optimizer, stage=stage, average=False)
    return [model.zero]


def attach_fsdp(model: nn.Module, mesh: Mesh, axis: Axis | None = None, **options: Any) -> list:
    return [fsdp.apply(model, axis or mesh.dp, average=False, **options)]


def attach_hybrid(model: nn.Module, mesh: Mesh) -> list:
    """The ranks of dp as a grid: shards inside of a row, copies down the columns."""
    grid = Mesh(replica=2, shard=2)
    return attach_fsdp(model, mesh, grid.shard, replicate_axis=grid.replica)


@dataclass
class Verbatim(Codec):
    """Sends the bytes of the numbers themselves: what is left is how sums are made of them."""

    def compress(self, rows: Tensor) -> Tensor:
        return rows.contiguous().view(torch.uint8)

    def decompress(self, wire: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return wire.contiguous().view(dtype)


LOSSLESS = {
    "verbatim": Verbatim,
    "top-k": partial(TopK, fraction=1.0),
    "powersgd": partial(PowerSGD, rank=64),  # where no matrix is large enough to shrink
}


def attach_compressed(model: nn.Module, mesh: Mesh, codec: str, **options: Any) -> list:
    return attach_ddp(model, mesh, reduce=Compressed(LOSSLESS[codec]()), **options)


def attach_on_host(model: nn.Module, mesh: Mesh) -> list:
    strategies = attach_fsdp(model, mesh)
    strategies[0].optimizer = make_optimizer(model)
    offload.HostShards(strategies[0], strategies[0].optimizer, HostCopy())
    return strategies


def data_rows() -> Iterator[Row]:
    """ddp, ZeRO, FSDP, compression and offload."""
    ddp_at = partial(Row, sent=sent_by_ddp, state=lambda numbers, n: 2 * numbers)
    for version in ddp.VERSIONS:
        for name in ["llama", "uneven", "foreign", "sometimes used"]:
            quick, mute = name == "llama", "gradient" if name == "llama" else ""
            attach = partial(attach_ddp, version=version)
            title = f"ddp {version}, {name}"
            yield ddp_at(title, ANY[name], {"dp": 2}, attach, quick=quick, mute=mute,
                         strict=name == "uneven")  # fmt: skip
        for shares in [(4, 1), (0, 5)]:
            task = Uneven(models.llama, shares=shares)
            yield Row(f"ddp {version}, shares of {shares}", task, {"dp": 2}, attach)
    for size, name in [(3, "accumulating"), (4, "foreign"), (3, "idle ranks"), (4, "frozen")]:
        yield ddp_at(f"ddp on {size}, {name}", ANY[name], {"dp": size}, attach_ddp)
    for build in models.recomputing_llama, models.Foreign:
        task = Uneven(build, shares=(1, 0, 3, 1))
        yield Row(f"ddp, shares of (1, 0, 3, 1), {build.__name__}", task, {"dp": 4}, attach_ddp)

    sharded = lambda numbers, n: 2 * numbers / n  # noqa: E731
    for stage in (1, 2):
        attach = partial(attach_zero, stage=stage)
        at = partial(Row, attach=attach, state=sharded)
        for name in ANY:
            mute = "gradient" if name == "llama" else ""
            yield at(f"zero {stage}, {name}", ANY[name], {"dp": 2}, mute=mute,
                     quick=name == "llama", strict=name == "accumulating")  # fmt: skip
        for i, name in enumerate(IN_LARGE):
            size = 3 + (i + stage) % 2
            yield at(f"zero {stage} on {size}, {name}", ANY[name], {"dp": size})

    wrapped = {
        "encoder": Task(models.Encoder),
        "checkpointed": Task(models.Checkpointed),
        "partly frozen": Task(models.untied_llama, fine_tune=freeze_every_other_matrix),
    }
    for name, task in (ANY | wrapped).items():
        yield Row(f"fsdp, {name}", task, {"dp": 2}, attach_fsdp, state=sharded,
                  mute="step 0" if name == "llama" else "", quick=name in ("llama", "foreign"),
                  strict=name == "accumulating")  # fmt: skip
    for i, name in enumerate(IN_LARGE):
        yield Row(f"fsdp on {3 + i % 2}, {name}", ANY[name], {"dp": 3 + i % 2}, attach_fsdp)
    variants = {
        "kept": dict(reshard_after_forward=False),
        "without prefetch": dict(prefetch=False),
        "one unit": dict(blocks=()),
        "small units": dict(blocks=(nn.Linear,)),
        "dtypes given": dict(compute_dtype=torch.float64, reduce_dtype=torch.float64),
    }
    for variant, options in variants.items():
        for name in ["accumulating", "foreign"]:
            attach = partial(attach_fsdp, **options)
            yield Row(f"fsdp {variant}, {name}", ANY[name], {"dp": 2}, attach)
    for name in ["accumulating", "foreign"]:
        yield Row(f"fsdp hybrid, {name}", ANY[name], {"dp": 4}, attach_hybrid)

    for name, codec in [
        ("uneven", "verbatim"),
        ("foreign", "verbatim"),
        ("sometimes used", "top-k"),
    ]:
        attach = partial(attach_compressed, codec=codec)
        yield Row(f"compression {codec}, {name}", ANY[name], {"dp": 3}, attach)
    for codec in LOSSLESS:
        attach = partial(attach_compressed, codec=codec)
        mute = "gradient" if codec == "verbatim" else ""  # others fail at once
        yield Row(f"compression {codec}", ANY["llama"], {"dp": 4}, attach, mute=mute,
                  strict=codec == "verbatim")  # fmt: skip
    attach = partial(attach_compressed, codec="verbatim", version="bucketed")
    yield Row("compression, bucketed", ANY["llama"], {"dp": 3}, attach)

    for size in (1, 2, 3):
        for name in ["accumulating", "foreign"]:
            yield Row(f"fsdp on the host, {size}, {name}", ANY[name], {"dp": size}, attach_on_host)


# ---------------------------------------------------------------------- inside of a layer
MODES = {"plain": {}, "sequence": dict(sequence=True), "overlap": dict(sequence=True, overlap=True)}


def attach_tensor(model: nn.Module, mesh: Mesh, mode: str) -> list:
    return [tensor.apply(model, mesh.tp, **MODES[mode])]


def tensor_rows() -> Iterator[Row]:
    """Tensor parallelism: plain, sequence parallel, overlapped."""
    small = partial(models.llama, vocab_size=64)
    task = partial(Task, vocab_size=60, seq_len=12)
    tasks = CUT | {
        "one kv head": task(partial(small, num_kv_heads=1)),
        "no grouping": task(partial(small, num_kv_heads=4, tie_embeddings=False)),
        "recomputing": task(models.recomputing_llama),
        "accumulating": task(CUT["llama"].build, microbatches=3, num_sequences=5),
        "frozen": task(models.untied_llama, fine_tune=models.frozen_embedding),
        "norms of heads": task(partial(small, qk_norm=True)),
        "only vectors": task(models.untied_llama, fine_tune=freeze_matrices),
        "six heads": task(partial(six_heads, vocab_size=63)),
        "six heads, one kv head": task(partial(six_heads, vocab_size=63, num_kv_heads=1)),
    }
    on_four = ["llama", "one kv head", "accumulating", "norms of heads"]
    for i, mode in enumerate(MODES):
        attach, sent = partial(attach_tensor, mode=mode), partial(sent_by_tensor, mode=mode)
        at = partial(Row, attach=attach)
        for j, (name, own) in enumerate(tasks.items()):
            size = 3 if name.startswith("six") else 2
            if name in CUT:
                yield at(f"tensor {mode}, {name}", own, {"tp": 2}, sent=sent, mute="loss",
                         quick=name == "llama", strict=name == "untied")  # fmt: skip
            elif (i + j) % 2:
                yield at(f"tensor {mode} on {size}, {name}", own, {"tp": size})
        for j, name in enumerate(on_four):
            if name == "llama" or (i + j) % 2:
                formula = sent if name == "llama" else None
                yield at(f"tensor {mode} on 4, {name}", tasks[name], {"tp": 4}, sent=formula)


METHODS = {
    "ring": dict(order="zigzag"),
    "plain ring": dict(order="plain"),
    "gather": dict(order="zigzag", exchange="gather"),
    "plain gather": dict(order="plain", exchange="gather"),
    "math": dict(order="zigzag"),
    "ulysses": None,
}


def attach_context(model: nn.Module, mesh: Mesh, method: str, data: str = "ddp") -> list:
    """Attention over cp; a data strategy over dp and cp together sums the gradients."""
    options, axis = METHODS[method], mesh.joint("dp", "cp")
    apply = ulysses.apply if options is None else partial(context.apply, **options)
    attention = apply(model, mesh.cp)
    if method == "math":
        attention.kernel = "math"
    if data == "zero":
        return [attention, *attach_zero(model, mesh, 2, axis)]
    if data == "fsdp":
        return [attention, *attach_fsdp(model, mesh, axis)]
    return [attention, ddp.apply(model, axis, bucket_mb=SMALL, average=False)]


def cut_sequences(microbatch: Microbatch, mesh: Mesh, method: str) -> Microbatch:
    options = METHODS[method]
    if options is None:
        return ulysses.shard_batch(microbatch, mesh.cp)
    return context.shard_batch(microbatch, mesh.cp, options["order"])


def context_rows() -> Iterator[Row]:
    """Rings, gathers and Ulysses."""
    task, wide = partial(Task, seq_len=24), dict(hidden_size=24, num_heads=6)
    tasks = {
        "llama": task(models.llama),
        "documents": Packed(models.llama, seq_len=24),
        "untied": task(models.untied_llama),
        "recomputing": task(models.recomputing_llama),
        "selective": task(selective_llama),
        "accumulating": task(models.llama, microbatches=3, num_sequences=5),
        "one kv head": task(partial(models.llama, num_kv_heads=1)),
        "no groups": task(partial(models.llama, num_kv_heads=4)),
        "silent": Silent(models.llama, seq_len=24),
    }
    six = task(partial(models.llama, **wide))
    six_packed = Packed(partial(models.llama, **wide), seq_len=24)
    for i, method in enumerate(METHODS):
        attach, cut = partial(attach_context, method=method), partial(cut_sequences, method=method)
        sent = partial(sent_by_context, method=method)
        at = partial(Row, attach=attach, cut=cut)
        for j, (name, own) in enumerate(tasks.items()):
            first = name == "llama"
            if first or name == "documents" or (i + j) % 3 == 0:
                yield at(f"{method}, {name}", own, {"cp": 2}, sent=sent if first else None,
                         mute="loss" if first else "", strict=first,
                         quick=first and method in ("ring", "ulysses"))  # fmt: skip
        # Three ranks are the first ring in which gradients of keys are passed on, not just home.
        for name, own in {"llama": six, "documents": six_packed}.items():
            yield at(f"{method} on 3, {name}", own, {"cp": 3})
        for name in ["llama", "documents"]:
            formula = sent if name == "llama" else None
            yield at(f"{method} on 4, {name}", tasks[name], {"cp": 4}, sent=formula)
        for data in ["ddp", "zero", "fsdp"]:
            if (method in ("ring", "ulysses")) or data == "ddp":
                own = partial(attach_context, method=method, data=data)
                name = "silent" if data == "ddp" else "documents"
                title = f"{method} beside {data}, {name}"
                yield Row(title, tasks[name], {"dp": 2, "cp": 2}, own, cut)


ROWS = {row.name: row for row in [*data_rows(), *tensor_rows(), *context_rows()]}
