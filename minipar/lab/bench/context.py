"""`minipar bench context`: our context parallelism beside PyTorch's, on the same model and link.

How the race is run and what is counted: see `race.py`. It is run twice: for the attention of one
layer, forward and backward, and for a training step of the whole model, whose gradients our data
parallelism sums for every contender.

PyTorch's `context_parallel` cannot be had on a CPU: it takes over the attention kernels of GPUs and
no other, and says so. What it runs for these can: its ring is a template that takes any kernel
(`_templated_ring_attention`, and another one for backward). Given the CPU's FlashAttention, which
is the one that ours uses, it takes part in both of its forms, keys gathered at once (its default)
and passed on from rank to rank, in its balanced order, which is our "zigzag". It is spared the
detour through DTensor that `context_parallel` makes. Ulysses is not in PyTorch by any name.

The third table is about order. In a ring all wait for the slowest in every step, so what counts is
the sum over steps of the slowest rank's time. Four ranks on two cores would measure the cores: so
each rank's share of each step is computed by itself, one after the other on one core, and timed by
the CPU time of the thread, the best of several rounds. Communication has no part in it. The CPU's
kernel leaves out the future in blocks of 512 keys, so that short sequences gain less.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import Axis, Mesh
from minipar.lab.bench import race
from minipar.lab.bench.race import ADAMW, Attached, StepConfig
from minipar.model.llama import PRESETS, Core, Llama, LlamaConfig
from minipar.parallel import context, ddp, ulysses
from minipar.parallel.base.sequences import CutSequences

OURS: dict[str, dict[str, str] | None] = {
    "ring, zigzag": dict(order="zigzag"),
    "ring, plain": dict(order="plain"),
    "gather": dict(exchange="gather"),
    "ulysses": None,
}
THEIRS = {"ring, all-gather": "allgather", "ring, all-to-all": "alltoall"}
"""PyTorch's, and how they pass on keys, as `set_rotate_method` calls it."""


@dataclass(frozen=True)
class ContextConfig(StepConfig):
    """Compare our context parallelism with PyTorch's: attention, whole steps, and bytes."""

    batch_size: int = 1
    """Sequences per step, of which every rank has a part."""
    seq_len: int = 2048
    """Tokens per sequence."""
    rounds: int = 10
    """Steps of each contender per link."""
    balance_ranks: int = 4
    """Number of ranks for which zigzag is compared with plain order; 0 leaves that out."""
    balance_seq_len: int = 8192
    """Tokens per sequence in that comparison."""
    balance_rounds: int = 3
    """Rounds of it, of which the best counts."""

    least = {"balance_ranks": 0}

    def check(self) -> None:
        super().check()
        heads = PRESETS[self.preset].num_heads
        good = [n for n in range(2, heads + 1) if heads % n == 0]
        if self.ranks not in good:
            raise ValueError(
                f"--ranks {self.ranks}: it takes 2 to share, and ulysses shares the {heads} heads "
                f"of {self.preset}; use one of {', '.join(map(str, good))}"
            )
        if self.balance_ranks == 1:
            raise ValueError(f"--balance-ranks {self.balance_ranks}: use 0, or 2 and more")
        for prefix, ranks, length in (
            ("", self.ranks, self.seq_len),
            ("balance-", self.balance_ranks, self.balance_seq_len),
        ):
            chunks = 2 * ranks
            if ranks and length % chunks:
                raise ValueError(
                    f"--{prefix}seq-len {length} is cut into {chunks} chunks for --{prefix}ranks "
                    f"{ranks}; use {length + -length % chunks}"
                )


def run(config: ContextConfig) -> list[dict[str, Any]]:
    """Run the comparisons, print their tables, and return the rows of all."""
    config.check()
    rows: dict[str, list[dict[str, Any]]] = {what: [] for what in WHAT}
    for name in config.links:
        with race.pool(config.ranks, name) as ranks:
            for what, found in rows.items():
                measured = ranks.run(measure, config, name, what)[0]
                bench = f"context, {what}"
                new = [race.row(config, bench, name, o, list(THEIRS), measured) for o in OURS]
                race.announce(new, f", {what}")
                found += new
    for what, found in rows.items():
        print(f"\n{what}\n{race.table(found)}")
    balance = []
    if config.balance_ranks:
        with race.pool(1, "gloo") as ranks:
            balance = ranks.run(balance_rows, config)[0]
        print("\n" + race.table(balance, BALANCE))
    every = [row for found in rows.values() for row in found] + balance
    race.save(every, config.json)
    return every


def measure(config: ContextConfig, link_name: str, what: str) -> dict[str, race.Measured]:
    """Let all contenders take turns at attention or at a step; called on every rank."""
    axis, shape = Mesh(cp=config.ranks).cp, PRESETS[config.preset]
    steps = {name: WHAT[what](config, axis, name, shape) for name in (*OURS, *THEIRS)}
    return race.race(steps, axis, link_name, config.rounds)


# ---------------------------------------------------------------------- contenders
def attach(model: Llama, axis: Axis, name: str) -> CutSequences:
    """Cut the sequences of `model` as the contender called `name` does."""
    if name == "ulysses":
        return ulysses.apply(model, axis)
    strategy = context.apply(model, axis, **OURS.get(name, {}))
    if name in THEIRS:
        strategy.attention = torch_ring(THEIRS[name])
    return strategy


def torch_ring(rotate_method: str) -> type[torch.autograd.Function]:
    """PyTorch's ring attention around the CPU's kernel; takes the arguments of `RingAttention`."""
    # Imported here: it takes a while, and every command imports this file.
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    aten, seq_dim = torch.ops.aten, 2

    class TorchRing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            _, axis, *_ = others
            theirs.set_rotate_method(rotate_method)
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = theirs._templated_ring_attention(
                axis.group, seq_dim, kernel, q, k, v, is_causal=True, dropout_p=0.0
            )
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.group, ctx.num_others = axis.group, len(others)
            return out

        @staticmethod
        def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
            theirs.set_rotate_method(rotate_method)
            kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
            grads = theirs._templated_ring_attention_backward(
                ctx.group,
                seq_dim,
                kernel,
                d_out,
                "grad_out",
                *ctx.saved_tensors,
                is_causal=True,
                dropout_p=0.0,
            )
            return *grads, *[None] * ctx.num_others

    return TorchRing


def attention(
    config: ContextConfig, axis: Axis, name: str, shape: LlamaConfig
) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of one layer's attention; returns what this rank has of out, dq, dk, dv.

    q [B, H, T, K], k and v [B, G, T, K] and the gradient of the output are those of one device.
    """
    model = Llama(shape, seed=0)
    strategy = attach(model, axis, name)
    core: Core = model.model.layers[0].self_attn.core
    stream = torch.Generator().manual_seed(0)
    own = []
    for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads):
        whole = torch.randn(
            config.batch_size, heads, shape.head_dim, config.seq_len, generator=stream
        )
        own.append(strategy.own_tokens(whole).mT.contiguous())
    *inputs, d_out = own
    inputs = [x.requires_grad_() for x in inputs]

    def step() -> tuple[Tensor, ...]:
        out = core(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, d_out)

    return step


def training(
    config: ContextConfig, axis: Axis, name: str, shape: LlamaConfig
) -> Callable[[], Tensor]:
    """A training step: it returns the loss of this rank's tokens, in nats per token."""
    model = Llama(shape, seed=0)
    strategy = attach(model, axis, name)
    data = ddp.apply(model, axis, average=False)
    inputs, targets = (strategy.own_tokens(x).contiguous() for x in config.tokens(shape))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    attached = Attached(model, optimizer, data.finish_backward, axis.size)
    return race.training(attached, inputs, targets)


WHAT: dict[str, Callable[..., Callable[[], Any]]] = {"attention": attention, "step": training}


# ---------------------------------------------------------------------- zigzag beside plain
def balance_rows(config: ContextConfig) -> list[dict[str, Any]]:
    """How long the ring's slowest rank computes in all steps, plain and zigzag, as a row."""
    size = config.balance_ranks
    plain, zigzag = (critical_path(config, order) for order in ("plain", "zigzag"))
    return [
        {
            "bench": "context, order",
            "ranks": size,
            "preset": config.preset,
            "batch_size": config.batch_size,
            "seq_len": config.balance_seq_len,
            "rounds": config.balance_rounds,
            "plain_ms": plain * 1e3,
            "zigzag_ms": zigzag * 1e3,
            "ratio": plain / zigzag,
            "ratio_of_blocks": 4 * size / (2 * size + 1),
        }
    ]


def critical_path(config: ContextConfig, order: context.Order) -> float:
    """Sum over the steps of a ring, forward and backward, of the slowest rank's CPU seconds."""
    shape, size = PRESETS[config.preset], config.balance_ranks
    stream = torch.Generator().manual_seed(0)

    def random(*dims: int) -> Tensor:
        length = config.balance_seq_len // size
        return torch.randn(*dims, length, shape.head_dim, generator=stream)

    q, d_out = (random(config.batch_size, shape.num_heads) for _ in range(2))
    kv = random(2, config.batch_size, shape.num_kv_heads)
    by_rank = []
    for axis in (Axis("cp", rank, size, tuple(range(size))) for rank in range(size)):
        rounds = [_step_seconds(q, kv, d_out, axis, order) for _ in range(config.balance_rounds)]
        by_rank.append([min(step) for step in zip(*rounds, strict=True)])  # noise only adds
    return sum(max(step) for step in zip(*by_rank, strict=True))


def _step_seconds(
    q: Tensor, kv: Tensor, d_out: Tensor, axis: Axis, order: context.Order
) -> list[float]:
    """CPU seconds of each step of one rank, as `RingAttention` takes them, with nothing sent."""
    kernel, steps = context.KERNELS["fused"], context.blocks_of(None, q, axis, order)
    seconds = []

    def timed(add: Callable[..., Any], blocks: Sequence[context.Block]) -> None:
        start = time.thread_time()
        add(kv, blocks)
        seconds.append(time.thread_time() - start)

    softmax = context.OnlineSoftmax(kernel, q)
    for blocks in steps:
        timed(softmax.add, blocks)
    gradients = context.OnlineGradients(kernel, q, softmax.out, softmax.lse, d_out)
    for blocks in steps:
        timed(gradients.add, blocks)
    return seconds


BALANCE: race.Columns = (
    ("attention in a ring", "{ranks} ranks, slowest of each step"),
    ("tokens", "{seq_len}"),
    ("plain", "{plain_ms:.0f} ms"),
    ("zigzag", "{zigzag_ms:.0f} ms"),
    ("ratio", "{ratio:.3f}"),  # plain over zigzag: above 1 where zigzag is faster
    ("by blocks", "{ratio_of_blocks:.3f}"),
)
