"""Every way to send less that minipar has, by name: what `minipar bench compression` compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minipar.comm.mesh import Axis
from minipar.parallel import ddp, local_sgd
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.compression.codecs import (
    Compressor,
    Fp8,
    Half,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from minipar.parallel.compression.feedback import Compressed

REFERENCE, CHANCE = "fp32", "fp32 disturbed"
TURN = 8  # steps; those who do not talk in every step do so every 8, so once in a turn


@dataclass(frozen=True)
class Method:
    """A way to train along an axis: `attach(model, axis, optimizer, steps)` before `steps` steps.

    Its `family` is what it spares: exact, rounding, fewer numbers, low rank, less often.
    """

    family: str
    attach: Callable[[nn.Module, Axis, torch.optim.Optimizer, int], Strategy]


def compressed(family: str, make: Callable[[], Compressor], **options: Any) -> Method:
    """Return a method that reduces buckets by a compressor of its own."""
    return Method(
        family,
        lambda model, axis, optimizer, steps: ddp.apply(
            model, axis, average=False, reduce=Compressed(make(), **options)
        ),
    )


def seldom(method: str, **options: Any) -> Method:
    """Return a method of `local_sgd`."""
    return Method(
        "less often, or late",
        lambda model, axis, optimizer, steps: local_sgd.apply(
            model, axis, optimizer, method=method, average=False, **options
        ),
    )


def _post_local(
    model: nn.Module, axis: Axis, optimizer: torch.optim.Optimizer, steps: int
) -> Strategy:
    """Take half of the steps together, half of them alone."""
    options = dict(method="local sgd", every=TURN, synchronous_steps=steps // 2, average=False)
    return local_sgd.apply(model, axis, optimizer, **options)


def _exact(model: nn.Module, axis: Axis, *_: Any) -> Strategy:
    return ddp.apply(model, axis, average=False)


@torch.no_grad()
def _disturbed(model: nn.Module, axis: Axis, *_: Any) -> Strategy:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator).to(p))
    return _exact(model, axis)


METHODS: dict[str, Method] = {
    REFERENCE: Method("exact", _exact),
    CHANCE: Method("exact", _disturbed),
    "fp16": compressed("rounding", lambda: Half(torch.float16)),
    "bf16": compressed("rounding", lambda: Half(torch.bfloat16)),
    "int8": compressed("rounding", Int8),
    "int8, no feedback": compressed("rounding", Int8, error_feedback=False),
    "int8 stochastic": compressed("rounding", lambda: Int8(stochastic=True)),
    "fp8 e4m3": compressed("rounding", lambda: Fp8(kind="e4m3")),
    "fp8 e5m2": compressed("rounding", lambda: Fp8(kind="e5m2")),
    "fp8 e5m2, no feedback": compressed("rounding", lambda: Fp8(kind="e5m2"), error_feedback=False),
    "sign": compressed("rounding", Sign),
    "sign, no feedback": compressed("rounding", Sign, error_feedback=False),
    "top-k 10 %": compressed("fewer numbers", lambda: TopK(0.1)),
    "top-k 1 %": compressed("fewer numbers", lambda: TopK(0.01)),
    "top-k 1 %, no feedback": compressed("fewer numbers", lambda: TopK(0.01), error_feedback=False),
    "random-k 10 %": compressed("fewer numbers", lambda: RandomK(0.1)),
    "random-k 1 %": compressed("fewer numbers", lambda: RandomK(0.01)),
    "random-k 1 %, no feedback": compressed(
        "fewer numbers", lambda: RandomK(0.01), error_feedback=False
    ),
    "PowerSGD rank 4": compressed("low rank", lambda: PowerSGD(rank=4)),
    "PowerSGD rank 4, no feedback": compressed(
        "low rank", lambda: PowerSGD(rank=4), error_feedback=False
    ),
    "PowerSGD rank 1": compressed("low rank", lambda: PowerSGD(rank=1)),
    "delayed gradients": seldom("delayed gradients"),
    "local SGD": seldom("local sgd", every=TURN),
    "post-local SGD": Method("less often, or late", _post_local),
    "DiLoCo": seldom("diloco", every=TURN),
    "DiLoCo delayed": seldom("diloco delayed", every=TURN),
    "DiLoCo streaming": seldom("diloco streaming", every=TURN),
}
"""Every method by the name that a table shows. Those with a bias also without error feedback."""
