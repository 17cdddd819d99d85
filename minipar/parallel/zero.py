"""ZeRO, stages 1 and 2: every rank keeps and updates one n-th of the optimizer's state.

Idea.   Under data parallelism all ranks hold the same optimizer state and compute the same update.
        Under ZeRO each rank owns one n-th of the numbers. Rank r gets the gradients of its numbers
        alone, updates these numbers alone, and sends them to all ranks. Adam's state is twice the
        model; a rank has one n-th of it. Stage 2 also frees a gradient once its owner has it.
Math.   On rank r, which owns the slice w_r: g_r = slice r of sum_s g^(s) (divided by n
        with ``average=True``); w_r <- w_r - update(g_r, state_r); w = [w_0 ... w_(n-1)].
Shapes. A bucket is a flat buffer of N numbers: weights R@dp; gradients P@dp, reduce-scattered to
        [N/n] V@dp; weights [N/n] V@dp, gathered to [N] R@dp. A slice may cut a parameter. A rank's
        part of a parameter is a *piece*. The optimizer steps pieces (see base/shards.py).
Comms.  P bytes of parameters: reduce-scatter (n-1)/n P during backward and all-gather (n-1)/n P
        during the next forward, together the bytes of `ddp`. Besides, one byte for each of N
        parameters (did any rank use it?): 2 (n-1)/n N. Stage 2 reduces each of m microbatches:
        (m + 1) (n-1)/n P. With bf16 weights and float32 masters, the all-gather is half as large.
Memory. Bytes per rank at the highest point, for gradients G and optimizer state O (Adam: 2 P):
          ddp      P + G + O
          stage 1  P + G + O/n               gradients are whole until the end of backward
          stage 2  P + G/n + O/n             and two buckets: one travels, one is being filled
Costs you. The optimizer must step each number alone: not Muon, Adafactor, LBFGS. Gradients lie in
        the pieces. Stage 2 needs equally many backwards on every rank.
Source. Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), sections 5.1, 5.2 and 7. In torch:
        `ZeroRedundancyOptimizer` for stage 1, on top of `ddp`: 3 P bytes.
Proved by tests/parallel/test_zero.py and tests/law/test_law.py.

Use::

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh.dp, lr=1e-3)
    strategy = zero.apply(model, mesh.dp, optimizer=optimizer, stage=2)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minipar.comm.collectives import Op, Pending, all_gather, all_gather_object
from minipar.comm.mesh import Axis
from minipar.parallel.base.masters import keep_slices, master_of
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import Elsewhere, OnItsWay, Row, in_groups, piece_of
from minipar.parallel.base.strategy import Strategy, check_elementwise, claim, find_blocks


# ---------------------------------------------------------------------- 1. a bucket, cut n ways
class Bucket(Row):
    """Parameters, all views of a flat buffer; this rank owns, and steps, one slice."""

    gathering: Pending | None = None  # slices of all ranks to `weights`

    def __init__(self, parameters: list[nn.Parameter], data_axis: Axis) -> None:
        super().__init__(parameters, data_axis)
        weights = parameters[0].new_zeros(sum(self.splits))  # [N], zeros at its end
        slices = weights.view(self.axis.size, -1)
        self.hold(parameters, slices[self.axis.rank].data)  # its version is its own
        self.parameters = parameters
        for p, piece in zip(parameters, self.pieces, strict=True):
            p.piece, p.arrives = piece, self.wait_for_gather
        self.bind(weights)
        self.missing = set(parameters)  # without a gradient in this backward
        self.away = {p: Elsewhere(p) for p in parameters}  # in the place of gradients
        self.drop()

    @torch.no_grad()
    def bind(self, weights: Tensor) -> None:
        """Make the parameters views of `weights` [N]; their values stay."""
        self.weights = weights
        for p, place in zip(self.parameters, self.split(weights), strict=True):
            p.data = place.copy_(p.data)
        self.version = self.shard._version  # as all ranks have it

    def drop(self) -> None:
        """Forget all gradients."""
        self.wait_for_reduce()
        self.whole: Tensor | None = None  # [N]: gradients of this rank
        self.views: dict[nn.Parameter, Tensor] = {}  # of `whole`
        self.reduced = None
        self.used: set[nn.Parameter] = set()  # by this rank, since `zero_grad`
        for p in (*self.parameters, *self.pieces):
            p.grad = None

    def add(self, p: nn.Parameter) -> None:
        """Move the gradient of `p`, or zeros, into the flat buffer, where autograd adds to it."""
        if self.whole is None:
            self.whole = torch.empty_like(self.weights, dtype=self.shard.dtype)
            self.views = dict(zip(self.parameters, self.split(self.whole), strict=True))
            self.whole[self.whole.numel() - self.splits[-1] :].zero_()  # the padding
        if p.grad is None or type(p.grad) is Elsewhere:  # not used since the last `finish_backward`
            self.views[p].zero_()
        elif p.grad is not self.views[p]:
            p.grad = self.views[p].copy_(p.grad.detach())

    def reduce(self, op: Op, is_last: bool) -> None:
        """Start to reduce-scatter the gradients; `is_last`: of the step's last microbatch."""
        self.wait_for_reduce()  # of the microbatch before
        for p in self.parameters:
            self.add(p)
            if p.grad is self.views[p]:
                self.used.add(p)
                p.grad = self.away[p] if is_last else None
        self.start_to_reduce(self.whole, op)
        self.whole, self.views = None, {}  # freed when it has been sent

    def gather(self) -> None:
        """Start to all-gather the slices of all ranks, after the step."""
        self.check_memory((*self.parameters, *self.pieces), (self.weights, self.shard))
        shard = self.shard.to(self.weights.dtype)  # rounded, if it holds masters
        self.gathering = all_gather(shard, self.axis, out=self.weights, async_op=True)
        self.version = self.shard._version
        for p in self.parameters:
            if type(p) is nn.Parameter:  # a user's own subclass stays as it is
                p.__class__ = OnItsWay

    @torch.compiler.disable
    def wait_for_gather(self) -> None:
        """Wait until all slices are in `weights`; before the next forward uses them."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            for p in self.parameters:
                if type(p) is OnItsWay:
                    p.__class__ = nn.Parameter
        if self.shard._version != self.version:
            how = "write into the parameters of the model, alike on all ranks"
            raise RuntimeError(f"this rank alone has written into its slice of the weights: {how}")


@torch.compiler.disable
def wait_for_weights(block: nn.Module, _: Any) -> None:
    """Wait until the parameters of `block` are whole."""
    for p in block.parameters():
        if hasattr(p, "arrives"):  # a deep copy has other parameters
            p.arrives()


# ---------------------------------------------------------------------- 2. a step, cut n ways
class ShardedOptimizer(Optimizer):
    """An elementwise `torch.optim` class, with its state and its work spread over `axis`.

    `params` and `options` are as for `optimizer_class`. `bucket_mb` is the capacity of a bucket in
    MB (10^6 bytes): by default an eighth of the parameters, at most 25 MB. Raises `ValueError` if
    `optimizer_class` looks at whole matrices.
    """

    elementwise = True  # as `optimizer_class` is

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        axis: Axis,
        *,
        bucket_mb: float | None = None,
        **options: Any,
    ) -> None:
        check_elementwise(optimizer_class)
        groups = Optimizer(params, {}).param_groups  # torch reads all forms of `params`
        self.axis, self.is_applied = axis, False
        members = [group["params"] for group in groups]
        trainable = [[p for p in own if p.requires_grad and p.numel()] for own in members]
        num_bytes = sum(p.nbytes for own in trainable for p in own)
        capacity = bucket_mb * 1e6 if bucket_mb else min(num_bytes / 8, 25e6)
        self.buckets: list[Bucket] = []
        for group, own in zip(groups, trainable, strict=True):
            self.buckets += [Bucket(some, axis) for some in in_groups(own, lambda _: capacity)]
            group["params"] = [*map(piece_of, group["params"])]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.inner = optimizer_class(groups, **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's slices, and start to all-gather them, the first layer's first."""
        if not self.is_applied:
            raise RuntimeError("no gradients come here before zero.apply(..., optimizer=...)")
        for bucket in self.buckets:
            bucket.version = bucket.shard._version  # the gather after the step sends all writes
            bucket.wait_for_gather()
        for p in self.bucket_of:
            if hasattr(p, "master"):
                master_of(p)  # takes over what was written into the parameter
        self.inner.param_groups, self.inner.state = self.param_groups, self.state  # maybe loaded
        self.inner.step()
        for bucket in reversed(self.buckets):
            bucket.gather()

    def synchronize(self) -> None:
        """Wait until all parameters are whole."""
        for bucket in self.buckets:
            bucket.wait_for_gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients: zero keeps none from step to step."""
        for bucket in self.buckets:
            bucket.drop()


# ---------------------------------------------------------------------- 3. while backward goes on
class Stage1(Strategy):
    """A bucket is reduced as soon as backward has filled it, while backward goes on.

    All ranks send buckets in the order of the list. Backward waits for the older ones in flight.
    """

    most_in_flight = 2  # buckets: the link always has one to carry

    def __init__(self, model: nn.Module, optimizer: ShardedOptimizer, average: bool) -> None:
        super().__init__(model, optimizer.axis)
        self.shard_axes, self.optimizer, optimizer.is_applied = (optimizer.axis,), optimizer, True
        self.op: Op = "avg" if average else "sum"
        self.buckets = optimizer.buckets
        self.bucket_of = optimizer.bucket_of
        # Autograd computes the last layer's gradients first; a pipeline's tied ones come last.
        place = {p: 1 if hasattr(p, "comes_last") else -i for i, p in enumerate(model.parameters())}
        self.buckets.sort(key=lambda bucket: max(place[p] for p in bucket.parameters))
        self.sent = 0  # the number of buckets sent in this round
        self.is_last = True  # True if the microbatch is the last one of its step
        for block in find_blocks(model):  # may be compiled: torch makes no graph of an `OnItsWay`
            block.register_forward_pre_hook(wait_for_weights)
        # This rank's own slices lie in the buffers that are filled.
        model.register_state_dict_pre_hook(lambda *_: optimizer.synchronize())
        self.hook_gradients(self.bucket_of)
        self.watch(self.with_gradients())
        for p in self.bucket_of:
            p.stepped_elsewhere = "step the ShardedOptimizer, which has their gradients"
            p.piece.claimed_by = p.claimed_by

    def _on_gradient(self, p: nn.Parameter) -> None:
        super()._on_gradient(p)
        bucket = self.bucket_of[p]
        if p.piece.grad is not None or not bucket.missing:
            raise RuntimeError(
                "a backward would add to a finished sum: call zero_grad() of the ShardedOptimizer, "
                "as the model's misses it, and finish_backward() after a backward out of no_sync()"
            )
        if p.grad.grad_fn is None:  # else a penalty on the gradient may follow
            bucket.add(p)
        if self.synchronises:
            bucket.missing.discard(p)
            while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
                self._reduce_next()

    def _reduce_next(self) -> None:
        self.buckets[self.sent].reduce(self.op, self.is_last)
        self.sent += 1
        if self.sent > self.most_in_flight:
            self.buckets[self.sent - self.most_in_flight - 1].wait_for_reduce()

    def _end_round(self) -> None:
        """Reduce the other buckets, complete or not. In a round, each bucket is sent once."""
        while self.sent < len(self.buckets):
            self._reduce_next()
        self.sent = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def finish_backward(self) -> None:
        self._end_round()
        used_by_any = self.tell_used([p in bucket.used for p, bucket in self.bucket_of.items()])
        for bucket in self.buckets:
            bucket.wait_for_reduce()
        # A parameter that no rank used has no gradient, as on one device: AdamW would decay it.
        for (p, bucket), is_used in zip(self.bucket_of.items(), used_by_any(), strict=True):
            if is_used:
                p.grad = bucket.away[p]
                p.piece.grad = bucket.reduced[bucket.spans[p.piece]].view_as(p.piece)
        super().finish_backward()


# ---------------------------------------------------------------------- 4. gradients cut n ways
class Stage2(Stage1):
    """Every microbatch is reduced, in `no_sync` too: whole gradients are freed in backward.

    When a bucket is sent, the bucket before it must have arrived: at most two are whole. Each
    `no_sync` is a round, and so is `finish_backward`. All ranks need equally many rounds.
    """

    most_in_flight = 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_last = self.is_last, False
        try:
            yield
        finally:
            self._end_round()
            self.is_last = before


# ---------------------------------------------------------------------- put on a model
def apply(
    model: nn.Module,
    axis: Axis,
    *,
    optimizer: ShardedOptimizer,
    stage: int = 1,
    average: bool = True,
    working_dtype: torch.dtype | None = None,
) -> Stage1:
    """Make `model` (any `nn.Module`) data parallel along `axis`, at the traffic of `ddp`.

    Args:
        optimizer: holds all trainable parameters of `model`, and is sharded along `axis`.
        stage: 1: gradients are whole until the end of backward; 2: those of two buckets at most.
        average: divide the sum of the gradients by the number of ranks.
        working_dtype: compute, and gather weights, in this dtype; slices are masters (masters.py).

    After a failed backward, and before you skip a step, call `finish_backward` and then
    ``optimizer.zero_grad()`` on all ranks. Raises `ValueError` for an optimizer that does not fit.
    """
    if optimizer.axis != axis:
        raise ValueError(f"optimizer= is sharded along {optimizer.axis.name}, not {axis.name}")
    trainable = {p: name for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if trainable.keys() != optimizer.bucket_of.keys():
        missing = [name for p, name in trainable.items() if p not in optimizer.bucket_of]
        lacks = f"it lacks {missing[:3] or 'none'}"
        raise ValueError(f"optimizer= must hold all trainable parameters and no others; {lacks}")
    if stage not in (1, 2):
        raise ValueError(f"stage={stage} must be 1 or 2; the third stage of ZeRO is fsdp.apply")
    claim(model, f"zero {stage}", axis)
    replicate(model, axis, is_data=True)
    order = [trainable[p] for p in optimizer.bucket_of]
    if any(theirs != order for theirs in all_gather_object(order, axis)):
        raise ValueError("optimizer= has parameters in another order on each rank, as of a set")
    if working_dtype is not None:
        keep_slices(model, optimizer.buckets, working_dtype)
    return (Stage1 if stage == 1 else Stage2)(model, optimizer, average)
