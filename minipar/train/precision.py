"""Mixed precision: matmuls in 16 or 8 bits, weights that learn in 32.

Idea.   Half the bits is half the memory traffic and at least twice the speed of a matmul. But a
        step *adds* to a weight a number that is thousands of times smaller than the weight. So the
        optimizer keeps float32 *master weights*. They are cast down
          once a step       bf16            weights and activations are in bf16, see
                                            parallel/base/masters.py; nothing else is cast
          in each forward   autocast-bf16   the model has the masters, and autocast, here, casts
                                            the inputs of each matmul
Formats (bits of exponent, of fraction; largest; smallest above zero; relative step).
        float32  8, 23   3e38     1e-45    2^-23
        bf16     8, 7    3e38     9e-41    2^-7     the range of float32, few digits
        fp16     5, 10   65504    6e-8     2^-10    more digits; small gradients become zero
        e4m3     4, 3    448      2e-3     2^-3     fp8 for inputs and weights
        e5m2     5, 2    57344    1.5e-5   2^-2     fp8 for gradients
Three remedies, one section each below: master weights (bf16 needs no more), loss scaling (fp16),
        and a scale per tensor (fp8).
Memory. Bytes per parameter, of weight + gradient + optimizer: once a step 2 + 4 + 12 (masters, and
        AdamW's 8); in each forward 4 + 4 + 8, and 2 for the casts; without master weights
        (``--dtype bfloat16``) 2 + 2 + 4. Under autocast, the residual stream and the inputs of
        norms stay in float32.
Which.  `minipar train --precision bf16` casts once a step, for every plan. It casts all weights,
        also of norms and routers, which still compute in float32. fp16 exists as autocast only.
Comms.  One all-reduce of 4 bytes over each axis that shards gradients, for the loss scaler;
        `reduce_in` halves the bytes of gradients.
Source. Micikevicius et al. 1710.03740, sections 3.1 (master weights) and 3.2 (loss scaling);
        Micikevicius et al. 2209.05433, sections 2 and 3 (fp8).
In torch: `torch.autocast` (used here), `torch.amp.GradScaler`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_reduce
from minipar.comm.hostcopy import look
from minipar.comm.mesh import Axis
from minipar.model import casts
from minipar.parallel import ddp
from minipar.parallel.base.norm import cut_over, note_reduced
from minipar.parallel.base.shards import piece_of

COMPUTE_DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPUTE_DTYPES["autocast-bf16"] = torch.bfloat16  # a plan's name; its "bf16" casts weights, too
"""Names of precisions, and what matrix products are cast to; None: nothing is cast."""


# ---------------------------------------------------------------------- 1. master weights
class Precision:
    """The precision of a training step; the default casts nothing and scales nothing::

        with precision.autocast():
            loss = ...
        precision.scale(loss).backward()
        ...                                        # strategies finish; gradients are still scaled
        precision.unscale(strategy.with_gradients(), axes)
        precision.step(optimizer)

    "bf16" and "fp16" want a model in float32: its parameters are the master weights. Autocast
    casts them for matmuls and attention, once per forward, and leaves norms, softmax and sums in
    float32. "fp16" has a `LossScaler`.
    """

    def __init__(self, name: str = "float32", device: torch.device | str = "cpu") -> None:
        self.dtype, self.device = COMPUTE_DTYPES[name], torch.device(device)
        self.scaler = LossScaler(device=device) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager:
        """Return the context of forward and loss; backward computes in forward's dtypes anyhow."""
        if self.dtype is None:
            return nullcontext()
        return casts.autocast(self.device.type, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return what to call `backward` on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, parameters: Iterable[Tensor], axes: Iterable[Axis] = ()) -> None:
        """Divide gradients by the loss scale, before their norm is taken. `axes`: that cut them."""
        if self.scaler is not None:
            self.scaler.unscale(parameters, axes)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step `optimizer`, unless gradients overflowed."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def report(self) -> dict[str, Tensor]:
        """Return metrics of a step: the loss scale and the steps left out so far."""
        if self.scaler is None:
            return {}
        return {"loss_scale": self.scaler.loss_scale, "skipped_steps": self.scaler.num_skipped}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, perhaps one of another precision."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


FULL = Precision()
"""Nothing is cast and nothing is scaled."""


def reduce_in(dtype: torch.dtype) -> ddp.Reduce:
    """Send gradients as `dtype`, whatever they are kept in: ``ddp.apply(..., reduce=...)``.

    bf16 sends half the bytes of float32. But each of n-1 additions on the way rounds to 8 bits, at
    most 2^-8 of a sum of absolute values. So the error grows with the number of ranks.
    """

    def reduce(bucket: ddp.Bucket, axis: Axis, op: Op) -> Pending:
        wire = bucket.flat.to(dtype)  # the same tensor, if it has that dtype: then all is in place
        pending = all_reduce(wire, axis, op, out=wire, async_op=True)
        return Pending(None, bucket.flat, finish=lambda flat: flat.copy_(pending.wait()))

    return reduce


# ---------------------------------------------------------------------- 2. loss scaling
class LossScaler:
    """Multiplies the loss, so that gradients in fp16 do not become zero; adapts its factor.

    The chain rule carries the factor to every gradient, and `unscale` divides it out again in
    float32. The factor grows after `growth_interval` good steps in a row. A step with a gradient
    that is infinite or NaN is left out, and the factor shrinks.

    All ranks must leave out the same steps. Where gradients are replicated, ranks agree by
    themselves, since an infinity survives a sum. Where gradients are sharded, `unscale` asks the
    ranks along those axes.

    State: `loss_scale` (float32), `good_steps` and `num_skipped` (int32), tensors on `device`;
    `found_inf` (1.0 or 0.0) between `unscale` and `update`. Equal to `torch.amp.GradScaler` step
    for step.
    """

    growth_factor, backoff_factor = 2.0, 0.5

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        self.growth_interval = growth_interval
        self.loss_scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.num_skipped = torch.tensor(0, dtype=torch.int32, device=device)
        self.found_inf: Tensor | None = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale: call `backward` on this."""
        return loss * self.loss_scale.to(loss.device)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor], axes: Iterable[Axis] = ()) -> Tensor:
        """Divide all gradients by the scale, in place; return 1.0 if any was not finite, else 0.0.

        `axes`: every axis over which gradients are sharded, in the same order on all ranks; one
        all-reduce of 4 bytes over each. Raises `ValueError` for a gradient sharded over another,
        and for gradients in fp16, where dividing would lose what scaling has saved; `RuntimeError`
        for a second call in one step, and for parameters with gradients elsewhere.
        """
        if self.found_inf is not None:
            raise RuntimeError("unscale() was called twice in one step; call update() in between")
        axes = list(axes)
        unique = {id(p): p for p in parameters}
        grads = _gradients(unique, axes)
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("gradients in float16 cannot be unscaled; keep parameters in float32")
        found, inverse = torch.zeros_like(self.loss_scale), self.loss_scale.double().reciprocal()
        kinds: dict[tuple, list[Tensor]] = defaultdict(list)
        for grad in grads:
            if grad.numel():
                kinds[grad.device, grad.dtype].append(grad)
        for (device, _), same in kinds.items():
            # The largest absolute value is NaN where any is, and unlike a sum cannot overflow.
            largest = torch.stack(torch._foreach_norm(same, float("inf")))
            found = torch.maximum(found, (~largest.isfinite()).any().to(found))
            torch._foreach_mul_(same, inverse.float().to(device))
        note_reduced(unique.values())
        for axis in axes:
            found = all_reduce(found, axis, "max")
        self.found_inf = found
        return found

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step `optimizer`, unless gradients were not finite. After `unscale`."""
        if self.found_inf is None:
            raise RuntimeError("call unscale() between backward() and step()")
        if not look(self.found_inf, on_meta=0.0):  # the only wait for the device
            optimizer.step()

    def update(self) -> None:
        """Choose the scale of the next step; once per step, after all optimizers."""
        if self.found_inf is None:
            raise RuntimeError("call unscale() and step() before update()")
        overflow, exact = self.found_inf.bool(), self.loss_scale.double()
        good = self.good_steps + 1
        is_due = good == self.growth_interval
        grown = (exact * self.growth_factor).float()
        grown = torch.where(is_due & grown.isfinite(), grown, self.loss_scale)
        shrunk = (exact * self.backoff_factor).float()
        self.loss_scale = torch.where(overflow, shrunk, grown)
        self.good_steps = torch.where(overflow | is_due, 0, good)
        self.num_skipped = self.num_skipped + overflow
        self.found_inf = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {name: getattr(self, name) for name in ("loss_scale", "good_steps", "num_skipped")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; what it lacks stays as it is."""
        for name, value in state.items():
            setattr(self, name, value.to(getattr(self, name)))


def _gradients(parameters: dict[int, Tensor], axes: Collection[Axis]) -> list[Tensor]:
    """Return the gradients of `parameters` by id; raise where `unscale` would miss some."""
    for p in parameters.values():
        cut_over(p, axes)
        is_elsewhere = hasattr(p, "stepped_elsewhere") and piece_of(p).numel() > 0
        if is_elsewhere and id(piece_of(p)) not in parameters:
            raise RuntimeError("these parameters get no gradients; use strategy.with_gradients()")
    return [p.grad for p in parameters.values() if p.grad is not None]


# ---------------------------------------------------------------------- 3. eight bits
class Scaled(NamedTuple):
    """A tensor in fp8: its values are ``data.float() * scale``."""

    data: Tensor
    scale: Tensor  # float32, one for the whole tensor


def quantise(tensor: Tensor, dtype: torch.dtype) -> Scaled:
    """Round to fp8, scaled so that the largest value becomes the largest number of `dtype`.

    Without the scale, a weight of 0.0009 is below what e4m3 can tell from zero, and most gradients
    are below e5m2. The error is at most 2^-4 (e4m3) or 2^-3 (e5m2) of a value in the normal range.
    An infinity or NaN makes all values NaN, so that a loss scaler notices.
    """
    largest = tensor.detach().abs().amax().float()
    scale = largest / torch.finfo(dtype).max
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # never divide by 0
    return Scaled((tensor.float() / scale).to(dtype), scale)


def product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Return a bᵀ: [M, K], [N, K] -> [M, N], summed in float32, rounded to `dtype` once at the end.

    Tensor cores compute it where they support fp8; elsewhere float32 emulates it. float32 holds
    every product of two fp8 numbers exactly, so results differ by the order of additions only.
    """
    if runs_fp8(a.data, b.data):
        # Both operands must be contiguous along K; so is the second, [K, N] as a transposed view.
        return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=dtype)
    return (a.data.float() @ b.data.float().t() * (a.scale * b.scale)).to(dtype)


def runs_fp8(a: Tensor, b: Tensor) -> bool:
    """True if the device multiplies fp8 (NVIDIA Ada, Hopper and later) of these shapes."""
    if a.device.type != "cuda" or any(size % 16 for size in (*a.shape, *b.shape)):
        return False
    return torch.cuda.get_device_capability(a.device) >= (8, 9)


class _Fp8Product(torch.autograd.Function):
    """x wᵀ. Three tensors are rounded to fp8, x, w and the gradient, for three products: y = x wᵀ,
    and in backward dx = g w and dw = gᵀ x. With one scale per tensor a transpose is exact.

    What is kept for backward is a quarter of float32, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        # x [M, K], weight [N, K] -> [M, N]
        with casts.off(x.device.type):
            qx, qw = quantise(x, torch.float8_e4m3fn), quantise(weight, torch.float8_e4m3fn)
            ctx.save_for_backward(*qx, *qw)
            ctx.dtypes = x.dtype, weight.dtype
            return product(qx, qw, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        g, g_scale = quantise(grad, torch.float8_e5m2)  # [M, N]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:  # [M, N], [K, N] -> [M, K]
            columns = Scaled(weight.t().contiguous(), weight_scale)
            grad_x = product(Scaled(g, g_scale), columns, x_dtype)
        if ctx.needs_input_grad[1]:  # [N, M], [K, M] -> [N, K]
            rows, columns = (q.t().contiguous() for q in (g, x))
            grad_weight = product(Scaled(rows, g_scale), Scaled(columns, x_scale), weight_dtype)
        return grad_x, grad_weight, None


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8; its weight is the master weight."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], in autocast's dtype where it is on, else in the dtype of `x`."""
        dtype = casts.product_dtype(x.device.type) or x.dtype
        y = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), self.weight, dtype)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(dtype)


def use_fp8(model: nn.Module) -> list[str]:
    """Turn the linear layers of `model` into `Fp8Linear`, in place; return their names.

    Parameters, names and hooks stay. `lm_head` stays as it is, the layer most sensitive to errors.
    The embedding is no matrix product. A layer that is cut over ranks has one scale per piece.
    """
    turned = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            module.__class__ = Fp8Linear
            turned.append(name)
    return turned
