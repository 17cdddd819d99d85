"""What no flag of a run compares with one device: a few steps of it, for `gpu_check`.

Offload, models that train alone and agree, and compressed gradients, on ranks that each see a part
of a batch, beside one rank that sees all of it. The two are equal where theory says so: the average
of steps is the step of the average where the optimizer is plain SGD and each step ends with an
agreement; and what all ranks send of a gradient is, with what each keeps back, the gradient.
And experts in one product of torch's, which on a GPU takes bf16 alone, beside one after the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis, Mesh
from minipar.model.experts import Experts
from minipar.model.llama import PRESETS, Llama
from minipar.parallel import ddp, fsdp, local_sgd, offload, zero
from minipar.parallel.base.norm import grad_norm
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.compression.feedback import COMPRESSORS, Compressed
from minipar.ranks import backends
from minipar.train.step import train_step

STEPS, BATCH, LR = 4, 4, 0.5
Learner = tuple[Strategy, torch.optim.Optimizer]


def plain(model: nn.Module, dp: Axis, **options: Any) -> Learner:
    """Data parallel."""
    return ddp.apply(model, dp, average=False, **options), SGD(model.parameters(), LR)


def offloaded(model: nn.Module, dp: Axis) -> Learner:
    """The same, and the optimizer steps on the host."""
    strategy, optimizer = plain(model, dp)
    offload.step_on_host(optimizer)
    return strategy, optimizer


def zero_on_host(model: nn.Module, dp: Axis) -> Learner:
    """ZeRO 2, whose optimizer steps on the host."""
    optimizer = zero.ShardedOptimizer(model.parameters(), SGD, dp, lr=LR)
    strategy = zero.apply(model, dp, optimizer=optimizer, stage=2, average=False)
    offload.step_on_host(optimizer.inner)
    return strategy, optimizer


def shards_on_host(model: nn.Module, dp: Axis) -> Learner:
    """ZeRO 3, whose shards live on the host."""
    strategy = fsdp.apply(model, dp, average=False)
    offload.shards_on_host(strategy)
    return strategy, SGD(model.parameters(), LR)


def local(model: nn.Module, dp: Axis, method: str, **options: float) -> Learner:
    """Models that agree after each step."""
    optimizer = SGD(model.parameters(), LR)
    strategy = local_sgd.apply(
        model, dp, optimizer, method=method, every=1, average=False, **options
    )
    return strategy, optimizer


OUTER = {"lr": 1.0, "momentum": 0.0}
"""Of an outer step: that it ends at the average."""
LEARNERS: dict[str, Callable[[nn.Module, Axis], Learner]] = {
    "offload": offloaded,
    "zero=2 on the host": zero_on_host,
    "zero=3 on the host": shards_on_host,
    "local sgd": partial(local, method="local sgd"),
    "diloco": partial(local, method="diloco", **OUTER),
    "diloco delayed": partial(local, method="diloco delayed", delay=0, mix=0.0, **OUTER),
}
GROUPED = "experts in one product"
PARTS = (GROUPED, *LEARNERS, *(f"compression={name}" for name in COMPRESSORS))


def steps_of(part: str, size: int) -> list[dict[str, float]]:
    """Return what metrics say of each step by `part`, one of `PARTS`; called on `size` ranks.

    One rank does without it.
    """
    dp, device = Mesh(dp=size).dp, backends.compute_device()
    if part == GROUPED:
        return [product_of_experts("loop" if size == 1 else "grouped", device)]
    torch.manual_seed(dp.rank)  # all are to have the weights of rank 0
    model = Llama(PRESETS["tiny"]).to(device)
    if part not in LEARNERS:
        return [gradient(model, dp, part.partition("=")[2])]
    strategy, optimizer = (LEARNERS[part] if size > 1 else plain)(model, dp)
    batch = [share(dp, device)]
    steps = [train_step(model, [strategy], optimizer, batch, dp) for _ in range(STEPS)]
    return [{"loss": step.loss.item()} for step in steps]


def gradient(model: nn.Module, dp: Axis, compressor: str) -> dict[str, float]:
    """Return loss and norm of a gradient: of what was sent, and of what all have kept back."""
    reduce = Compressed(COMPRESSORS[compressor](), error_feedback=True)
    strategy, optimizer = plain(model, dp, reduce=reduce)
    result = train_step(model, [strategy], optimizer, [share(dp, strategy.device)], dp)
    for p in model.parameters():
        p.grad += all_reduce(reduce.residue(p), dp)
    norm = grad_norm(model.parameters())
    return {"loss": result.loss.item(), "grad_norm": norm.item()}


def product_of_experts(how: str, device: torch.device) -> dict[str, float]:
    """Return loss and norm of the gradient of four experts, one of which gets no rows."""
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([5, 0, 40, 19])
    experts = Experts(len(counts), 64, 128)
    rows = torch.randn(counts.sum(), 64, generator=generator)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    rows, experts = rows.to(device, torch.bfloat16), experts.to(device, torch.bfloat16)
    loss = experts(rows, counts.to(device), how).float().square().mean()
    loss.backward()
    return {"loss": loss.item(), "grad_norm": grad_norm(experts.parameters()).item()}


def share(dp: Axis, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets, [B/n, T] of random tokens: the same in each step."""
    tokens = torch.randint(256, (BATCH, 33), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device).tensor_split(dp.size)[dp.rank]
    return tokens[:, :-1], tokens[:, 1:].contiguous()
