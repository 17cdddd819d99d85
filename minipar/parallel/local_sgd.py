"""Local SGD: every rank trains alone for a while, then all ranks agree on one model.

Idea.   Data parallelism sends all gradients in every step. But ranks that start from one model and
        read similar data drift apart slowly. So each rank may train alone for H steps; then all
        ranks agree, which sends H times less (1 and 2). Or ranks agree in every step, on the
        gradient of the step before: its all-reduce may last a whole step (3).
Math.   Rank r of n; u_r is its optimizer, with a state of its own that is never sent:
        1. local SGD      w_r <- u_r(w_r, g_r) H times, from a model w that all have agreed on. Then
                          w itself takes a step, along D = (1/n) sum_s (w - w_s), the *outer
                          gradient*: w <- w - D, which is the average of all w_s; w_r <- w.
        2. DiLoCo         That step is one of SGD with Nesterov momentum: m <- mu m + D,
                          w <- w - lr (D + mu m). With lr=1 and mu=0 this is local SGD.
           delayed          D arrives d steps after it was sent; w_r <- mix w_r + (1 - mix) w.
        3. delayed gradients   in step t all use the gradient of step t-1: g = (1/n) sum_s g_s.
Shapes. w_r V@dp, as the model has them; D, m, w flat vectors R@dp, in float32 at least.
Comms.  Bytes that a rank sends per step, for P = 4 bytes (8 in float64) of each number that learns:

          synchronous, or late gradients   2 (n-1)/n (P + N)   N parameters: who used each?
          local SGD, DiLoCo                2 (n-1)/n P / H

Memory. w and m, 2 P. While an outer gradient travels P more.
Costs you. Another result than one device. The loss per token is higher, the more so with a large H,
        many ranks and different data. Between agreements each rank has its own model, gradient norm
        and optimizer state: a checkpoint would need all of them, so save after `finish`.
Tokens. A loss that is divided by the tokens of *all* ranks (``average=False``, see train/) has
        gradients that are parts of a sum. A rank that steps alone multiplies its part by n. With
        H = 1 and SGD the average of the ranks is then exactly the synchronous step.
Source. 1. Stich 2019 (arXiv 1805.09767). 2. Douillard et al. 2023 (2311.08105), algorithm 1; delay
        and mix: Douillard et al. 2025 (2501.18512), algorithm 2, without its fragments. 3. Li et
        al. 2018, Pipe-SGD (1811.03619), with a width of two.
In torch: `torch.distributed.algorithms.model_averaging`, `PostLocalSGDOptimizer`; torchft.
Proved by tests/law/test_local_sgd.py and tests/parallel/test_local_sgd.py.

Use: ``apply(model, mesh.dp, optimizer, method="diloco", every=50)``. It acts after each
``optimizer.step()``, so the training step is as under other strategies. At the end, call `finish`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_reduce
from minipar.comm.mesh import Axis, with_own_group
from minipar.model.moe import routers
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import split_like
from minipar.parallel.base.strategy import Strategy, check_not_summed, claim, mark_summed


def apply(
    model: nn.Module, axis: Axis, optimizer: Optimizer, *, method: str = "local sgd", **options: Any
) -> "LocalSGD | DelayedGradients":
    """Train `model` (any `nn.Module`) along `axis` by one of `METHODS`, in place.

    `optimizer` steps the model's parameters, by any rule; it has no state yet. `options` go to the
    class of the method. Raises `ValueError` for options that do not fit.
    """
    return METHODS[method](model, axis, optimizer, **options)


# ---------------------------------------------------------------------- tensors as one vector
def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy `tensors` into one vector [N], in float32 at least."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def refuse(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise `ValueError` for state that ranks do not average: router biases and masters."""
    if any(router.config.bias_speed is not None for _, router in routers(model)):
        own = "each rank would move the biases of its routers by its own tokens"
        raise ValueError(f"{own}; balance experts by a loss (bias_speed=None)")
    if any(hasattr(p, "master") for p in parameters):
        short = "masters.keep() came before: 16 bits of the weights would be averaged"
        raise ValueError(f"{short}; call it after local_sgd.apply")


# ---------------------------------------------------------------------- 1, 2. meeting less often
class LocalSGD(Strategy):
    """Train alone for `every` steps; then take an outer step along the mean change of all ranks.

    `optimizer` is the inner one, usually AdamW. `lr` and `momentum` are the outer ones: with lr=1
    and momentum=0 ranks meet at their average, else this is DiLoCo. `average`: the loss is a mean
    over the tokens of this rank; if False, of all ranks.

    With a `delay` the outer gradient arrives `delay` steps after it was sent. If a rank then took
    the whole outer model, its steps since then would be lost. If the rank took nothing, ranks would
    never agree. So a rank keeps a share `mix` of its own weights. Raises `ValueError` for a delay
    that is longer than a round.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        optimizer: Optimizer,
        every: int = 16,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        delay: int = 0,
        mix: float = 0.5,
        average: bool = True,
    ) -> None:
        if not 0 <= delay <= every:
            raise ValueError(f"delay={delay}: use at most every={every}")
        super().__init__(model, axis)
        self.every, self.average, self.steps = every, average, 0
        self.lr, self.momentum, self.delay, self.mix = lr, momentum, delay, mix if delay else 0.0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        claim(model, "local_sgd", axis)
        refuse(model, self.parameters)
        replicate(model, axis)
        self.watch(self.parameters)
        if not average:
            self.hook_gradients(self.parameters)
        if delay:  # other calls must not wait behind a call that takes several steps
            self.axis = with_own_group(axis, "late")
        optimizer.register_step_post_hook(self._after_step)
        self._begin()

    def _begin(self) -> None:
        """Make the current parameters the model on which all ranks have agreed."""
        self.outer = flatten(self.parameters)  # [N]
        self.velocity = torch.zeros_like(self.outer)
        self.pending: Pending | None = None  # the outer gradient in flight

    def finish_backward(self) -> None:
        """Scale this rank's gradients, if they are parts of a sum."""
        super().finish_backward()
        for p in () if self.average else self.parameters:
            check_not_summed(p, self.axis)
            if p.grad is not None:
                p.grad *= self.axis.size
                mark_summed([p], self.axis)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Send this rank's change at the end of a round; receive the mean `delay` steps later."""
        self.steps += 1
        if self.pending and (self.steps - self.delay) % self.every == 0:
            self._receive()
        if self.steps % self.every == 0:
            gradient = self.outer - flatten(self.parameters)  # V@dp -> R@dp
            self.pending = all_reduce(gradient, self.axis, "avg", out=gradient, async_op=True)
            if self.delay == 0:
                self._receive()

    def _receive(self) -> None:
        """Wait for the outer gradient, take the outer step, and move this rank's parameters."""
        gradient, self.pending = self.pending.wait(), None
        self.velocity.mul_(self.momentum).add_(gradient)
        self.outer.sub_(gradient + self.momentum * self.velocity, alpha=self.lr)
        for p, outer in split_like(self.outer, self.parameters).items():
            p.lerp_(outer.to(p.dtype), 1 - self.mix)

    @torch.no_grad()
    def finish(self) -> None:
        """Take the outer step that is under way; then bring all ranks to their average.

        A collective. The average has no momentum: momentum is for whole rounds.
        """
        if self.pending:
            self._receive()
        flat = flatten(self.parameters)
        self.outer = all_reduce(flat, self.axis, "avg", out=flat)
        for p, average in split_like(self.outer, self.parameters).items():
            p.copy_(average)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the last model on which ranks agreed, to evaluate it; buffers are this rank's."""
        agreed = split_like(self.outer, self.parameters)
        state = self.model.state_dict(keep_vars=True)
        return self._whole(state, lambda t: agreed.get(t, t.data).to(t.dtype))

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load `state` on every rank, and make the loaded model the outer model."""
        self.finish()  # nothing is under way from here on
        super().load_full_state_dict(state)
        self._begin()


# ---------------------------------------------------------------------- 3. a step late
class DelayedGradients(Strategy):
    """Data parallelism in which step t uses the gradient of step t-1.

    A whole forward and backward can hide the all-reduce. All ranks have the same model at all
    times. The first step has no gradient and changes nothing. Use a lower learning rate.
    """

    def __init__(
        self, model: nn.Module, axis: Axis, _: Optimizer | None = None, *, average: bool = True
    ) -> None:
        super().__init__(model, axis)
        self.op: Op = "avg" if average else "sum"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        claim(model, "delayed gradients", axis)
        replicate(model, axis, is_data=True)
        self.watch(self.parameters)
        self.axis = with_own_group(axis, "late")
        self.pending: Pending | None = None  # the gradients of the last step, in flight
        self.hook_gradients(self.parameters)

    def finish_backward(self) -> None:
        """Send the gradients of this step; put the gradients of the last step in their place."""
        super().finish_backward()
        used_by_any = self.tell_used([p.grad is not None for p in self.parameters])
        flat = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        pending = all_reduce(flat, self.axis, self.op, out=flat, async_op=True)  # P@dp -> R@dp
        self.finish()
        self.pending, self.used_by_any = pending, used_by_any

    def finish(self) -> None:
        """Wait for the last gradients and put them in place, for one more ``optimizer.step()``."""
        for p in self.parameters:
            p.grad = None
        if self.pending is not None:
            pieces = split_like(self.pending.wait(), self.parameters)
            for (p, piece), is_used in zip(pieces.items(), self.used_by_any(), strict=True):
                if is_used:  # with the strides of `p`: fused optimizers ignore strides
                    p.grad = torch.empty_like(p, dtype=p.grad_dtype).copy_(piece)
            self.pending = None
        mark_summed(self.parameters if self.op == "sum" else (), self.axis)


METHODS: dict[str, Callable[..., LocalSGD | DelayedGradients]] = {  # by what a user types
    "local sgd": LocalSGD,
    "diloco": partial(LocalSGD, lr=0.7, momentum=0.9),
    "diloco delayed": partial(LocalSGD, lr=0.7, momentum=0.9, delay=1),
    "delayed gradients": DelayedGradients,
}
