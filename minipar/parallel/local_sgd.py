"""Local SGD: let every rank train alone for a while, and agree on one model now and then.

Idea.   Data parallelism sends all gradients in every step. Ranks that start from the same model and
        read alike data drift apart slowly, though: it is enough to agree every H steps, which is H
        times less to send (1 and 2). Or agree in every step, but a step late: the link has the time
        of a whole step to bring the gradient (3).
Math.   Rank r, n ranks, u_r its optimizer (state included, which is its own and never sent):
        1. local SGD      w_r <- u_r(w_r, g_r) H times; then w_r <- (1/n) sum_s w_s.
           post-local SGD   the same after a number of synchronous steps.
        2. DiLoCo         w_r as before, from a model w that all have agreed on. Then w itself takes
                          a step, along D = (1/n) sum_s (w - w_s), the *outer gradient*, by SGD with
                          Nesterov momentum: m <- mu m + D, w <- w - lr (D + mu m); w_r <- w.
           delayed          D arrives d steps after it was sent; w_r <- mix w_r + (1 - mix) w.
           streaming        the same for F fragments of the model, in turn.
        3. delayed gradients   in step t all use the gradient of step t-1: g = (1/n) sum_s g_s.
Shapes. w_r V@dp, as the model has them; D, m, w flat vectors R@dp, in float32 at least.
Comms.  Bytes that a rank sends per token, if it has K tokens in a step, n ranks, P = 4 bytes (8 in
        float64) for each parameter that learns:

          synchronous          2 (n-1)/n (P + e N) / K   N parameters of e bytes an element
          local SGD            2 (n-1)/n P / (H K)       post-local: at first as synchronous
          DiLoCo               2 (n-1)/n P / (H K)
            delayed            the same, behind d forwards and backwards
            streaming          the same, of which P/F at once: an even flow and no flood
          delayed gradients    2 (n-1)/n (P + e N) / K   behind a whole forward and backward

Memory. DiLoCo: w and m, 2 P. While something is under way P more, or P/F.
Costs you. Another result than one device: less to send is paid for in loss per token, the more the
        larger H, the more ranks and the less alike their data. Between agreements a rank has a
        model of its own, and with it a gradient norm (by which it clips) and an optimizer state of
        its own. A checkpoint is needed from every rank. The training step still adds up two
        numbers over all ranks (tokens and loss), and waits for the latency of that.
Tokens. A loss that is divided by the tokens of *all* ranks (``average=False``, see train/) has
        gradients that are parts of a sum. A rank that steps alone multiplies its part by n: the
        mean over its own tokens where all have equally many. Where not, it steps the further the
        more it has, and that is right: with H = 1 and SGD the average of the ranks is exactly the
        synchronous step.
Source. 1. Stich 2019 (arXiv 1805.09767); Lin et al. 2020 (1808.07217), post-local. 2. Douillard et
        al. 2023 (2311.08105), algorithm 1; streaming with delay and mix: Douillard et al. 2025
        (2501.18512), algorithm 2. 3. Li et al. 2018, Pipe-SGD (1811.03619), with a width of two.
In torch: `torch.distributed.algorithms.model_averaging`, `PostLocalSGDOptimizer`; torchft.
Proved by tests/parity/test_local_sgd.py and tests/parallel/test_local_sgd.py.

Use: ``apply(model, mesh.dp, optimizer, method="diloco", every=50)``. It acts after each
``optimizer.step()``, so the training step is that of all other strategies. At the end, `finish`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minipar.comm.calls import Pending
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis, with_own_group
from minipar.comm.shapes import Op
from minipar.comm.values import look
from minipar.model.moe import routers
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.strategy import (
    Strategy,
    check_not_summed,
    claim,
    copied,
    mark_summed,
    stepped_by,
)
from minipar.parallel.vectors import (
    Gradients,
    as_pending,
    check,
    check_every,
    flatten,
    trainable,
    unflatten,
)


def apply(
    model: nn.Module, axis: Axis, optimizer: Optimizer, *, method: str = "local sgd", **options: Any
) -> "LocalSGD | DiLoCo | DelayedGradients":
    """Train `model` (any `nn.Module`) along `axis` by one of `METHODS`, in place.

    `optimizer` steps the model's parameters, by any rule; made anew, so that it has no state yet.
    `options` are those of the class that `METHODS` names, all with defaults.

    Where a loss scale may make ranks leave out a step, leave it out on all of them: with
    ``Precision("fp16", axes=(axis,))``, an overflow on one rank counts for all.

    Raises `ValueError` for an unknown method and for options that do not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    return METHODS[method](model, axis, optimizer, **options)


# ---------------------------------------------------------------------- 1. averaging parameters
class _Local(Strategy):
    """Every rank steps along its own gradient. `_synchronise` is called after each such step.

    `every`: steps from one agreement to the next. `average`: whether losses are means over the
    tokens of a rank; if not, of all ranks, see "Tokens" above. Raises `ValueError` for numbers that
    are too small, or an optimizer of another model.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        optimizer: Optimizer,
        every: int = 16,
        *,
        average: bool = True,
    ) -> None:
        super().__init__(model, axis)
        self.every, self.average, self.steps = every, average, 0
        self.parameters = trainable(model)
        check_every(every)
        check(
            set(self.parameters) <= set(stepped_by(optimizer)),
            "the optimizer does not hold all trainable parameters of the model; make it of "
            "model.parameters()",
        )
        check(
            all(router.config.bias_speed is None for _, router in routers(model)),
            "each rank would move the biases of its routers by its own tokens, and no agreement "
            "covers them; balance experts by a loss (bias_speed=None)",
        )
        check(
            not any(hasattr(p, "master") for p in self.parameters),
            "masters.keep() came before, and 16 bits of the weights would be averaged in the place "
            "of their masters; call it after local_sgd.apply",
        )
        claim(model, "local_sgd", axis)
        replicate(model, axis)
        self.watch(self.parameters)
        if not average:
            self.hook_gradients(self.parameters)
        optimizer.register_step_post_hook(self._after_step)

    def finish_backward(self) -> None:
        """Make the gradients those of this rank's own tokens; nothing is sent."""
        super().finish_backward()
        if not self.average:
            for p in self.parameters:
                check_not_summed(p, self.axis)
                if p.grad is not None:
                    p.grad *= self.axis.size
            mark_summed(self.parameters, self.axis)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self._synchronise()

    def _synchronise(self) -> None:
        raise NotImplementedError

    def _agreed(self) -> dict[nn.Parameter, Tensor]:
        """What the ranks agree on in place of each of `parameters`."""
        raise NotImplementedError

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model that the ranks agree on, the one to evaluate; buffers are this rank's.

        Local SGD: the average of all ranks at this moment, the point that its theory speaks of; a
        collective. DiLoCo: the outer parameters, as of the last outer step: they are what is
        trained, and a rank's own model a probe sent out from there. To resume use `state_dict`.
        """
        state, agreed = self.model.state_dict(keep_vars=True), self._agreed()
        return copied(state, lambda t: agreed.get(t, t).detach().to(t.dtype, copy=True))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that this rank needs to go on exactly, its own model included.

        Every rank saves its own, and that of its optimizer with it.
        """
        return {"steps": self.steps, "model": super().full_state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])


class LocalSGD(_Local):
    """Average the parameters of all ranks after every `every` steps.

    Post-local SGD: the first `synchronous_steps` share all gradients, as long as the model changes
    fast. Arguments besides, and errors, as of `_Local`.
    """

    def __init__(self, *common: Any, synchronous_steps: int = 0, **options: Any) -> None:
        check(synchronous_steps >= 0, f"synchronous_steps={synchronous_steps} must be 0 or more")
        super().__init__(*common, **options)
        self.synchronous_steps = synchronous_steps
        if synchronous_steps and self.average:
            self.hook_gradients(self.parameters)

    def finish_backward(self) -> None:
        """At first, gradients of the whole batch; later, this rank's own."""
        if self.steps < self.synchronous_steps:
            Strategy.finish_backward(self)
            op = "avg" if self.average else "sum"
            for p in self.parameters:
                check_not_summed(p, self.axis)
            Gradients.send(self.parameters, self.axis, op).receive()
            mark_summed(() if self.average else self.parameters, self.axis)
        else:
            super().finish_backward()

    def _synchronise(self) -> None:
        alone = self.steps - self.synchronous_steps
        if alone > 0 and alone % self.every == 0:
            self.finish()

    def _agreed(self) -> dict[nn.Parameter, Tensor]:
        flat = flatten(self.parameters)  # V@dp -> R@dp
        average = all_reduce(flat, self.axis, "avg", out=flat)
        return dict(zip(self.parameters, unflatten(average, self.parameters), strict=True))

    @torch.no_grad()
    def finish(self) -> None:
        """Bring all ranks to one model, their average; a collective."""
        for p, average in self._agreed().items():
            p.copy_(average)


# ---------------------------------------------------------------------- 2. an outer optimizer
class Fragment:
    """Parameters that are synchronised together, and the outer optimizer's view of them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.outer = flatten(parameters)  # [N], what the ranks last agreed on
        self.momentum = torch.zeros_like(self.outer)
        self.pending: Pending | None = None

    def send(self, axis: Axis) -> None:
        """Start to average the outer gradient, the way that the ranks went from the agreement."""
        gradient = self.outer - flatten(self.parameters)  # V@dp -> R@dp
        self.pending = all_reduce(gradient, axis, "avg", out=gradient, async_op=True)

    def receive(self, lr: float, momentum: float, mix: float = 0.0) -> None:
        """Wait for it, take the outer step and move this rank's parameters there."""
        gradient, self.pending = self.pending.wait(), None
        self.momentum.mul_(momentum).add_(gradient)
        self.outer.sub_(gradient + momentum * self.momentum, alpha=lr)
        self.adopt(mix)

    def adopt(self, mix: float = 0.0) -> None:
        """Set this rank's parameters to the outer ones, but for a share `mix` of what they were."""
        for p, outer in self.pairs():
            p.lerp_(outer.to(p.dtype), 1 - mix)

    def pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and its place in `outer`."""
        return zip(self.parameters, unflatten(self.outer, self.parameters), strict=True)

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return copies; what is under way is waited for, and saved as having arrived."""
        arrived = None if self.pending is None else self.pending.wait().clone()
        return {"outer": self.outer.clone(), "momentum": self.momentum.clone(), "arrived": arrived}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Go on from there."""
        self.outer.copy_(state["outer"])
        self.momentum.copy_(state["momentum"])
        self.pending = as_pending(state["arrived"])


class DiLoCo(_Local):
    """After `every` inner steps, one step of an outer optimizer along the way that all ranks went.

    The optimizer handed in is the inner one, usually AdamW. `lr` and `momentum` are the outer ones;
    lr=1 and momentum=0 are local SGD. Arguments besides, and errors, as of `_Local`.
    """

    def __init__(
        self, *common: Any, lr: float = 0.7, momentum: float = 0.9, **options: Any
    ) -> None:
        check(lr > 0, f"lr={lr} must be above 0; 0.7 is usual, and 1 without momentum")
        check(0 <= momentum < 1, f"momentum={momentum} is not in [0, 1); 0.9 is usual")
        super().__init__(*common, **options)
        self.lr, self.momentum = lr, momentum
        self.fragments = [Fragment(self.parameters)]

    def _synchronise(self) -> None:
        if self.steps % self.every == 0:
            for fragment in self.fragments:
                fragment.send(self.axis)
                fragment.receive(self.lr, self.momentum)

    def _agreed(self) -> dict[nn.Parameter, Tensor]:
        return {p: outer for fragment in self.fragments for p, outer in fragment.pairs()}

    @torch.no_grad()
    def finish(self) -> None:
        """Bring all ranks to one model, theirs and the outer one; a collective.

        What was learnt since the last agreement is averaged without momentum, which is made for
        whole rounds.
        """
        for fragment in self.fragments:
            flat = flatten(fragment.parameters)
            fragment.outer = all_reduce(flat, self.axis, "avg", out=flat)
            fragment.adopt()

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Begin anew from this model: as the outer one, and that of every rank."""
        super().load_full_state_dict(state)
        for fragment in self.fragments:
            if fragment.pending is not None:
                fragment.pending.wait()  # in vain, but its buffer is in use until then
        self.fragments = [Fragment(fragment.parameters) for fragment in self.fragments]

    def state_dict(self) -> dict[str, Any]:
        """As of every local strategy, and the outer optimizer."""
        return super().state_dict() | {"outer": [f.state_dict() for f in self.fragments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        super().load_state_dict(state)
        for fragment, saved in zip(self.fragments, state["outer"], strict=True):
            fragment.load_state_dict(saved)


class StreamingDiLoCo(DiLoCo):
    """DiLoCo that never stops to talk: the outer gradient arrives `delay` steps after it was sent.

    The ranks learn something in these steps that the outer model does not know of. A rank that
    moved there all the way would forget it, one that stayed would never agree with the others: it
    keeps a share `mix`.

    With ``fragments`` above 1 each fragment of the model has its turn `every` steps after its last,
    at even distances between: the link carries little at a time, but most of the time. A fragment
    is a number of whole parameters, so the largest of these is the least that is sent at once.

    Raises `ValueError` as `DiLoCo`; for more fragments than steps or parameters; for a delay longer
    than `every`; for a mix that is no share.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        optimizer: Optimizer,
        every: int = 16,
        *,
        fragments: int = 1,
        delay: int = 1,
        mix: float = 0.5,
        **options: Any,
    ) -> None:
        check_every(every)
        count = len(trainable(model))
        most = min(every, count)
        check(
            1 <= fragments <= most,
            f"fragments={fragments} does not fit every={every} steps and {count} parameters; "
            f"use 1 to {most}",
        )
        check(
            0 <= delay <= every, f"delay={delay} does not fit every={every}; use 0 to {every} steps"
        )
        check(0 <= mix < 1, f"mix={mix} is not in [0, 1); 0.5 is usual")
        super().__init__(model, axis, optimizer, every, **options)
        self.axis = with_own_group(axis, "late")
        self.delay, self.mix = delay, mix if delay else 0.0
        self.fragments = [Fragment(p) for p in divide(self.parameters, fragments)]

    def _synchronise(self) -> None:
        for i, fragment in enumerate(self.fragments, start=1):
            since = self.steps - i * self.every // len(self.fragments)  # its first turn
            if fragment.pending and (since - self.delay) % self.every == 0:
                fragment.receive(self.lr, self.momentum, self.mix)
            if since % self.every == 0:
                fragment.send(self.axis)
                if self.delay == 0:
                    fragment.receive(self.lr, self.momentum)

    def finish(self) -> None:
        """Take the outer steps that are under way; then as `DiLoCo`."""
        with torch.no_grad():
            for fragment in self.fragments:
                if fragment.pending:
                    fragment.receive(self.lr, self.momentum, self.mix)
        super().finish()


def divide(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Cut into `count` lists about equally long in numbers: the largest first, to the shortest."""
    lists: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for p in sorted(parameters, key=lambda p: -p.numel()):  # stable: the same on all ranks
        min(lists, key=lambda some: sum(q.numel() for q in some)).append(p)
    return lists


# ---------------------------------------------------------------------- 3. a step late
class DelayedGradients(Strategy):
    """Data parallelism in which step t uses the gradient of step t-1.

    Its all-reduce has a whole forward and backward to hide behind, where overlapped data
    parallelism has what is left of one backward. All ranks have the same model at all times. The
    first step finds no gradient and changes nothing. Wants a lower learning rate, as the gradient
    is that of a point just left. A late gradient carries the loss scale of its own step: use this
    with bf16, which needs none, rather than fp16. Raises `ValueError` for a model that has nothing
    to train.
    """

    def __init__(self, model: nn.Module, axis: Axis, *, average: bool = True) -> None:
        super().__init__(model, axis)
        self.parameters = trainable(model)
        self.op: Op = "avg" if average else "sum"
        claim(model, "delayed gradients", axis)
        replicate(model, axis, is_data=True)
        self.watch(self.parameters)
        self.axis = with_own_group(axis, "late")
        self.under_way: Gradients | None = None
        self.hook_gradients(self.parameters)

    def finish_backward(self) -> None:
        """Send the gradients of this step, put those of the last one in their place."""
        super().finish_backward()
        for p in self.parameters:
            check_not_summed(p, self.axis)
        before = self.under_way
        self.under_way = Gradients.send(self.parameters, self.axis, self.op)
        self._receive(before)

    def finish(self) -> None:
        """Wait for the last gradient and put it in place, for one more ``optimizer.step()``."""
        before, self.under_way = self.under_way, None
        self._receive(before)

    def _receive(self, gradients: Gradients | None) -> None:
        if gradients is None:
            for p in self.parameters:
                p.grad = None
            return
        gradients.receive()
        mark_summed(self.parameters if self.op == "sum" else (), self.axis)

    def late_norm(self) -> float:
        """The norm of the gradient under way, which is waited for: the same on all ranks."""
        if (late := self.under_way) is None:
            return 0.0
        gradients, _ = late.pending.wait().tensor_split([-len(late.used)])
        return look(torch.linalg.vector_norm(gradients), on_meta=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the model and of the gradient under way; every rank saves its own."""
        late = self.under_way
        saved = None if late is None else (list(late.used), late.pending.wait().clone())
        return {"model": self.full_state_dict(), "late": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        self.model.load_state_dict(state["model"])
        self.under_way = None
        if state["late"] is not None:
            used, arrived = state["late"]
            self.under_way = Gradients(self.parameters, used, as_pending(arrived))


METHODS: dict[str, Callable[..., LocalSGD | DiLoCo | DelayedGradients]] = {
    "local sgd": LocalSGD,
    "post-local sgd": partial(LocalSGD, synchronous_steps=32),
    "diloco": DiLoCo,
    "diloco delayed": StreamingDiLoCo,
    "diloco streaming": partial(StreamingDiLoCo, fragments=4),
    "delayed gradients": lambda model, axis, optimizer, **options: DelayedGradients(
        model, axis, **options
    ),
}
"""Makers of each method with its defaults, by the name that a user types."""
