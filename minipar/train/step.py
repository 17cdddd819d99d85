"""One training step for every strategy: strategies change what happens inside of the model."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_reduce
from minipar.comm.hostcopy import look
from minipar.comm.mesh import Axis
from minipar.model.llama import loss_on
from minipar.model.moe import routers, start_step
from minipar.observe.timeline import span
from minipar.parallel.base.norm import clip_grad_norm
from minipar.parallel.base.shards import in_order, piece_of
from minipar.parallel.base.strategy import Strategy, device_of
from minipar.train.batch_size import NoiseScale
from minipar.train.data import IGNORE
from minipar.train.precision import FULL, Precision

# inputs [B, T], targets [B, T], and what else the model takes, such as positions and mask
Microbatch = tuple[Tensor, ...]


@dataclass(frozen=True)
class StepResult:
    """The report of one step: scalars of the whole batch, equal on all ranks."""

    loss: Tensor  # nats per token, over all tokens of all ranks
    num_tokens: Tensor  # targets that counted
    grad_norm: Tensor  # before clipping
    noise: Tensor  # sums over the ranks of the `own_numbers` of a NoiseScale; or empty

    def numbers(self) -> dict[str, Tensor]:
        """Return loss, grad_norm and tokens as metrics name them; no device is waited for."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, "tokens": self.num_tokens}


def computing_on(model: nn.Module, strategies: Sequence[Strategy]) -> torch.device:
    """Return the device that computes; parameters may live on another."""
    return strategies[0].device if strategies else device_of(model)


def forward_backward(
    model: nn.Module,
    strategies: Sequence[Strategy],
    microbatches: Sequence[Microbatch],
    *,
    weigh: Callable[[Tensor], Tensor],
    autocast: Callable[[], AbstractContextManager],
) -> Tensor:
    """Add up the gradients of `weigh(loss)` over microbatches, one after the other.

    Returns the sum of their losses, float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=computing_on(model, strategies))
    for i, (inputs, targets, *context) in enumerate(microbatches):
        with ExitStack() as stack:
            if i < len(microbatches) - 1:
                for strategy in strategies:
                    stack.enter_context(strategy.no_sync())
            with autocast():
                loss = loss_on(model, inputs, targets, context)
            with span("backward", "backward"):
                weigh(loss).backward()
            total += loss.detach()
    return total


def train_step(
    model: nn.Module,
    strategies: Sequence[Strategy],
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Microbatch],
    data_axis: Axis,
    *,
    max_norm: float = math.inf,
    precision: Precision = FULL,
    noise: NoiseScale | None = None,
) -> StepResult:
    """Run forward, backward, clipping and the optimizer on this rank's share of one batch.

    Ranks may have different numbers of microbatches, even none. But where ranks talk in each
    microbatch (ZeRO 2, fsdp, experts over ep, a balance of the "batch"), all ranks of that axis
    need the same number: otherwise some ranks would wait for a missing call until the timeout.
    The `run` of a strategy, such as a pipeline, takes the place of `forward_backward`.

    The loss is the sum over targets, divided by the number of targets *in the whole batch*: in all
    microbatches of all ranks of `data_axis`. A mean of the ranks' means would give more weight to
    the tokens of a rank that has few. So strategies sum gradients here, they do not average
    them.
    """
    device = computing_on(model, strategies)
    shard_axes = in_order(axis for strategy in strategies for axis in strategy.shard_axes)
    run = next((strategy.run for strategy in strategies if strategy.run), forward_backward)
    own_tokens = torch.zeros((), dtype=torch.int64, device=device)
    for _, targets, *_ in microbatches:
        own_tokens += (targets != IGNORE).sum()
    counting = all_reduce(own_tokens, data_axis, async_op=True)  # hidden behind the first forward
    optimizer.zero_grad(set_to_none=True)

    def weigh(loss: Tensor) -> Tensor:
        return precision.scale(loss / counting.wait().clamp(min=1))

    if next(routers(model), None) is not None:  # balancing losses are sums over tokens, too
        one = torch.ones((), dtype=torch.float64, device=device)
        start_step(model, cache(partial(weigh, one)))
    own_loss = run(model, strategies, microbatches, weigh=weigh, autocast=precision.autocast)
    num_tokens = counting.wait().clamp(min=1)
    for strategy in strategies:
        strategy.finish_backward()
    own = own_loss[None]
    if noise is not None:
        loss_scale = precision.scale(torch.ones_like(own_loss))
        own = torch.cat([own, noise.own_numbers(own_tokens, num_tokens, loss_scale)])
    adding = all_reduce(own, data_axis, async_op=True)  # hidden behind the optimizer
    # Gradients lie where backward put them, or where an optimizer that shards them keeps its part.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters += map(piece_of, model.parameters())  # those in both count once
    precision.unscale(parameters, shard_axes)
    grad_norm = clip_grad_norm(parameters, max_norm, shard_axes, device)
    precision.step(optimizer)  # a step whose gradients overflowed is left out on all ranks
    for _, router in routers(model):
        router.update_bias()
        router.loss_weight = None  # it refers to `counting`, which deepcopy cannot copy
    sums = adding.wait()
    return StepResult(sums[0] / num_tokens, num_tokens, grad_norm, sums[1:])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Microbatch]],
    data_axis: Axis,
    run: Callable[[Sequence[Microbatch]], Tensor] | None = None,
) -> float:
    """Return the loss in nats per token over `batches`, each target counted once over all ranks.

    `run` takes the place of one forward after the other, and returns the sum of the losses.
    """

    def one_by_one(batch: Sequence[Microbatch]) -> Tensor:
        return sum(loss_on(model, x, y, rest).double() for x, y, *rest in batch)

    totals = None
    for batch in batches:
        num_tokens = sum((targets != IGNORE).sum() for _, targets, *_ in batch)
        sums = torch.stack([(run or one_by_one)(batch), num_tokens])
        totals = sums if totals is None else totals + sums
    if totals is None:
        raise ValueError("there are no batches to validate on")
    loss, num_tokens = look(all_reduce(totals, data_axis), on_meta=(math.nan, 1))
    return loss / max(num_tokens, 1)
