"""Local SGD: every rank trains alone for a while, then all ranks agree on one model.

Idea.   Data parallelism sends all gradients in every step. But ranks that start from one model and
        read similar data drift apart slowly. So they may train alone for H steps and then agree,
        which sends H times less (1 and 2). Or they agree in every step, one step late: the link has
        a whole step to bring the gradient (3).
Math.   Rank r of n; u_r is its optimizer, with a state of its own that is never sent:
        1. local SGD      w_r <- u_r(w_r, g_r) H times; then w_r <- (1/n) sum_s w_s.
           post-local SGD   the same after a number of synchronous steps.
        2. DiLoCo         w_r as before, from a model w that all have agreed on. Then w itself takes
                          a step, along D = (1/n) sum_s (w - w_s), the *outer gradient*, by SGD with
                          Nesterov momentum: m <- mu m + D, w <- w - lr (D + mu m); w_r <- w.
           delayed          D arrives d steps after it was sent; w_r <- mix w_r + (1 - mix) w.
           streaming        the same for F fragments of the model, in turn.
        3. delayed gradients   in step t all use the gradient of step t-1: g = (1/n) sum_s g_s.
Shapes. w_r V@dp, as the model has them; D, m, w flat vectors R@dp, in float32 at least.
Comms.  Bytes that a rank sends per step, for P = 4 bytes (8 in float64) of each number that learns:

          synchronous, or late gradients   2 (n-1)/n (P + N)   N parameters: who used each?
          local SGD, DiLoCo                2 (n-1)/n P / H     streaming: P/F at once

Memory. DiLoCo: w and m, 2 P. While an outer gradient travels P more, or P/F.
Costs you. Another result than one device. The loss per token is higher, the more so with a large H,
        many ranks and different data. Between agreements each rank has its own model, gradient norm
        and optimizer state: a checkpoint would need all of them, so save after `finish`.
Tokens. A loss that is divided by the tokens of *all* ranks (``average=False``, see train/) has
        gradients that are parts of a sum. A rank that steps alone multiplies its part by n. With
        H = 1 and SGD the average of the ranks is then exactly the synchronous step.
Source. 1. Stich 2019 (arXiv 1805.09767); Lin et al. 2020 (1808.07217), post-local. 2. Douillard et
        al. 2023 (2311.08105), algorithm 1; streaming with delay and mix: Douillard et al. 2025
        (2501.18512), algorithm 2. 3. Li et al. 2018, Pipe-SGD (1811.03619), with a width of two.
In torch: `torch.distributed.algorithms.model_averaging`, `PostLocalSGDOptimizer`; torchft.
Proved by tests/law/test_local_sgd.py and tests/parallel/test_local_sgd.py.

Use: ``apply(model, mesh.dp, optimizer, method="diloco", every=50)``. It acts after each
``optimizer.step()``, so the training step is as under all other strategies. At the end, `finish`.
"""

from collections.abc import Callable, Iterator, Sequence
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


def send_gradients(
    strategy: Strategy, parameters: list[nn.Parameter], average: bool
) -> Callable[[], None]:
    """Start to reduce the gradients of one step, as one vector; the result puts them in place."""
    op: Op = "avg" if average else "sum"
    used_by_any = strategy.tell_used([p.grad is not None for p in parameters])
    flat = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    pending = all_reduce(flat, strategy.axis, op, out=flat, async_op=True)  # P@dp -> R@dp

    def receive() -> None:
        pieces = split_like(pending.wait(), parameters)
        for p, piece, is_used in zip(parameters, pieces, used_by_any(), strict=True):
            # Strides as the parameter's: fused optimizers do not look at strides.
            p.grad = torch.empty_like(p, dtype=p.grad_dtype).copy_(piece) if is_used else None
        mark_summed(() if average else parameters, strategy.axis)

    return receive


def refuse(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise `ValueError` for state beside the parameters, on which ranks would never agree."""
    if any(router.config.bias_speed is not None for _, router in routers(model)):
        own = "each rank would move the biases of its routers by its own tokens"
        raise ValueError(f"{own}; balance experts by a loss (bias_speed=None)")
    if any(hasattr(p, "master") for p in parameters):
        short = "masters.keep() came before: 16 bits of the weights would be averaged"
        raise ValueError(f"{short}; call it after local_sgd.apply")


# ---------------------------------------------------------------------- 1. averaging parameters
class LocalSGD(Strategy):
    """Average the parameters of all ranks after every `every` steps.

    Post-local SGD: the first `synchronous_steps` share all gradients, while the model changes fast.
    `average`: the loss is a mean over the tokens of this rank; if False, of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        optimizer: Optimizer,
        every: int = 16,
        *,
        synchronous_steps: int = 0,
        average: bool = True,
    ) -> None:
        super().__init__(model, axis)
        self.every, self.synchronous_steps, self.average = every, synchronous_steps, average
        self.steps, self.parameters = 0, [p for p in model.parameters() if p.requires_grad]
        claim(model, "local_sgd", axis)
        refuse(model, self.parameters)
        replicate(model, axis)
        self.watch(self.parameters)
        if not average or synchronous_steps:
            self.hook_gradients(self.parameters)
        optimizer.register_step_post_hook(self._after_step)

    def finish_backward(self) -> None:
        """Average all gradients in synchronous steps; later, scale this rank's."""
        super().finish_backward()
        for p in () if self.average else self.parameters:
            check_not_summed(p, self.axis)
        if self.steps < self.synchronous_steps:
            send_gradients(self, self.parameters, self.average)()
        elif not self.average:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad *= self.axis.size
            mark_summed(self.parameters, self.axis)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self.synchronise()

    def synchronise(self) -> None:
        """Agree on one model where it is time; called after each step of the optimizer."""
        alone = self.steps - self.synchronous_steps
        if alone > 0 and alone % self.every == 0:
            self.finish()

    def agreed(self) -> dict[nn.Parameter, Tensor]:
        """Return the agreed value of each parameter: the average at this moment; a collective."""
        flat = flatten(self.parameters)  # V@dp -> R@dp
        average = all_reduce(flat, self.axis, "avg", out=flat)
        return dict(zip(self.parameters, split_like(average, self.parameters), strict=True))

    @torch.no_grad()
    def finish(self) -> None:
        """Bring all ranks to one model, their average; a collective."""
        for p, average in self.agreed().items():
            p.copy_(average)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the agreed model, the one to evaluate; buffers are this rank's. A collective."""
        agreed = self.agreed()
        state = self.model.state_dict(keep_vars=True)
        return self._whole(state, lambda t: agreed.get(t, t.data).to(t.dtype))


# ---------------------------------------------------------------------- 2. an outer optimizer
class Fragment:
    """Parameters that are synchronised together, with the state of their outer optimizer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.outer = flatten(parameters)  # [N], the model that the ranks last agreed on
        self.momentum = torch.zeros_like(self.outer)
        self.pending: Pending | None = None

    def send(self, axis: Axis) -> None:
        """Start to average the outer gradient: the way of each rank since the agreement."""
        gradient = self.outer - flatten(self.parameters)  # V@dp -> R@dp
        self.pending = all_reduce(gradient, axis, "avg", out=gradient, async_op=True)

    def receive(self, lr: float, momentum: float, mix: float) -> None:
        """Wait for the outer gradient, take the outer step, and move this rank's parameters."""
        gradient, self.pending = self.pending.wait(), None
        self.momentum.mul_(momentum).add_(gradient)
        self.outer.sub_(gradient + momentum * self.momentum, alpha=lr)
        self.adopt(mix)

    def adopt(self, mix: float = 0.0) -> None:
        """Set this rank's parameters to the outer ones, but for a share `mix` of their own."""
        for p, outer in self.pairs():
            p.lerp_(outer.to(p.dtype), 1 - mix)

    def pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter and its part of `outer`."""
        return zip(self.parameters, split_like(self.outer, self.parameters), strict=True)


class DiLoCo(LocalSGD):
    """After `every` inner steps, one step of an outer optimizer along the way of all ranks.

    `optimizer` is the inner one, usually AdamW. `lr` and `momentum` are the outer ones; lr=1 and
    momentum=0 are local SGD.

    With a `delay` the outer gradient arrives that many steps after it was sent. A rank that then
    moved to the outer model would forget what it has learnt meanwhile; a rank that stayed would
    never agree. So a rank keeps a share `mix` of its own. With several `fragments` the parts of the
    model take turns: the link carries little at a time, but most of the time.

    Raises `ValueError` for a delay that outlasts a turn, and for more turns than steps.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        optimizer: Optimizer,
        every: int = 16,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        average: bool = True,
    ) -> None:
        if not (1 <= fragments <= every and 0 <= delay <= every):
            raise ValueError(f"fragments={fragments}, delay={delay}: use at most every={every}")
        super().__init__(model, axis, optimizer, every, average=average)
        if delay:  # nothing may queue behind a call that takes several steps
            self.axis = with_own_group(axis, "late")
        self.delay, self.outer_step = delay, (lr, momentum, mix if delay else 0.0)
        self.fragments = [Fragment(p) for p in divide(self.parameters, fragments)]

    def synchronise(self) -> None:
        for i, fragment in enumerate(self.fragments, start=1):
            since = self.steps - i * self.every // len(self.fragments)  # its first turn
            if fragment.pending and (since - self.delay) % self.every == 0:
                fragment.receive(*self.outer_step)
            if since % self.every == 0:
                fragment.send(self.axis)
                if self.delay == 0:
                    fragment.receive(*self.outer_step)

    def agreed(self) -> dict[nn.Parameter, Tensor]:
        """Return the outer parameters."""
        return {p: outer for fragment in self.fragments for p, outer in fragment.pairs()}

    @torch.no_grad()
    def finish(self) -> None:
        """Take the outer steps that are under way; then bring all ranks to their average.

        A collective. The average has no momentum: momentum is for whole rounds.
        """
        for fragment in self.fragments:
            if fragment.pending:
                fragment.receive(*self.outer_step)
        for fragment in self.fragments:
            flat = flatten(fragment.parameters)
            fragment.outer = all_reduce(flat, self.axis, "avg", out=flat)
            fragment.adopt()

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Start anew: this model is the outer model, and every rank's."""
        self.finish()  # nothing is under way from here on
        super().load_full_state_dict(state)
        self.fragments = [Fragment(fragment.parameters) for fragment in self.fragments]


def divide(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Split into `count` lists of about equal size: the largest first, to the shortest list."""
    lists: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for p in sorted(parameters, key=lambda p: -p.numel()):  # stable: the same on all ranks
        min(lists, key=lambda some: sum(q.numel() for q in some)).append(p)
    return lists


# ---------------------------------------------------------------------- 3. a step late
class DelayedGradients(Strategy):
    """Data parallelism in which step t uses the gradient of step t-1.

    The all-reduce has a whole forward and backward to hide behind. All ranks have the same model at
    all times. The first step finds no gradient and changes nothing. Use a lower learning rate.
    """

    def __init__(
        self, model: nn.Module, axis: Axis, _: Optimizer | None = None, *, average: bool = True
    ) -> None:
        super().__init__(model, axis)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.average = average
        claim(model, "delayed gradients", axis)
        replicate(model, axis, is_data=True)
        self.watch(self.parameters)
        self.axis = with_own_group(axis, "late")
        self.receive = self._have_none  # puts the gradients of the last step in place
        self.hook_gradients(self.parameters)

    def finish_backward(self) -> None:
        """Send the gradients of this step; put the gradients of the last step in their place."""
        super().finish_backward()
        for p in self.parameters:
            check_not_summed(p, self.axis)
        before, self.receive = self.receive, send_gradients(self, self.parameters, self.average)
        before()

    def finish(self) -> None:
        """Wait for the last gradient and put it in place, for one more ``optimizer.step()``."""
        self.receive()
        self.receive = self._have_none

    def _have_none(self) -> None:
        for p in self.parameters:
            p.grad = None


METHODS: dict[str, Callable[..., LocalSGD | DelayedGradients]] = {
    "local sgd": LocalSGD,
    "post-local sgd": partial(LocalSGD, synchronous_steps=32),
    "diloco": DiLoCo,
    "diloco delayed": partial(DiLoCo, delay=1),
    "diloco streaming": partial(DiLoCo, delay=1, fragments=4),
    "delayed gradients": DelayedGradients,
}
"""Makers of each method with its defaults, by the name that a user types."""
