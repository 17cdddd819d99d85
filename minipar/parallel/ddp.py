"""Data parallelism: every rank holds the whole model and computes on its own share of the batch.

Idea.   The gradient of a sum over samples is the sum of the gradients. So each rank computes the
        gradient of its share, and one all-reduce per step makes them the gradient of the batch.
Math.   g = (1/n) sum_r g_r  with ``average=True``, for a loss that each rank averages over its
        own samples; g = sum_r g_r  with ``average=False``, for a loss that every rank has already
        divided by the number of tokens of *all* ranks (right for uneven shares; see train/).
Shapes. batch [B, T] V@dp -> [B/n, T] on each rank; parameters R@dp; local gradients P@dp,
        all-reduced to R@dp.
Comms.  P bytes of gradients, and a byte for each of N parameters: did any rank use it? In backward,
        2 (n-1)/n (P + N) per rank and step. Fewer with `reduce=`, see compression.py.
Memory. Everything n times over. Gradients live inside the buckets, without a second copy.
Costs you. The model must fit on one device. Batches must be large, so that computing hides sending.
Source. Li et al. 2020 (arXiv 2006.15704), section 3. In torch: `DistributedDataParallel`.
Proved by tests/parallel/test_ddp.py and tests/law/test_law.py.

Four versions, each one idea further: `Naive`, `Bucketed`, `Overlapped`, `Tuned`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from minipar.comm import clock
from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_reduce
from minipar.comm.mesh import Axis
from minipar.observe import memory
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import Elsewhere, copies_axis, gradient_bytes, laid_out_as
from minipar.parallel.base.strategy import Strategy, check_not_summed, claim, mark_summed
from minipar.parallel.bucket_sizes import choose, fill_buckets, measure

Version = Literal["naive", "bucketed", "overlapped", "tuned"]
Reduce = Callable[["Bucket", Axis, Op], Pending]  # starts to reduce a bucket, in place


# ---------------------------------------------------------------------- 1. one call per parameter
class Naive(Strategy):
    """After backward, one all-reduce per parameter.

    Slow for two reasons: each call pays the latency of the link, and no compute hides a call.
    """

    def __init__(self, model: nn.Module, axis: Axis, average: bool = True) -> None:
        super().__init__(model, axis)
        self.op: Op = "avg" if average else "sum"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.watch(self.parameters)
        if axis.size > 1:
            self.hook_gradients(self.parameters)

    def finish_backward(self) -> None:
        # All ranks reduce all parameters. If a rank skipped its unused parameters, others would
        # hang. A byte per parameter tells "used by no rank" (no gradient) from a zero gradient.
        used_by_any = self.tell_used([p.grad is not None for p in self.parameters])
        self.reduce_all()
        for p, is_used in zip(self.parameters, used_by_any(), strict=True):
            if not is_used:
                p.grad = None
        if self.op == "sum":
            mark_summed(self.parameters, self.axis)
        super().finish_backward()

    def reduce_all(self) -> None:
        """Make each ``p.grad`` the result over all ranks."""
        for p in self.parameters:
            check_not_summed(p, self.axis)
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
            copies = copies_axis(p, self.axis)
            if self.op == "avg":  # over all ranks, even if only some have copies
                p.grad.mul_(copies.size / self.axis.size)
            all_reduce(p.grad, copies, self.op, out=p.grad)


# ---------------------------------------------------------------------- 2. fewer, larger calls
class Bucket:
    """Gradients that travel together: one flat buffer, and each ``p.grad`` is a view of it."""

    def __init__(self, parameters: list[nn.Parameter], reduce: Reduce | None = None) -> None:
        self.parameters, self.reduce = parameters, reduce or all_reduce_bucket
        sizes, like = [p.numel() for p in parameters], parameters[0]
        self.flat = like.new_zeros(sum(sizes), dtype=like.grad_dtype)
        parts = self.flat.split(sizes)
        self.views = {p: laid_out_as(p, part) for p, part in zip(parameters, parts, strict=True)}
        memory.tag("gradients", self.flat)
        self.away = {p: Elsewhere(p) for p in parameters}  # in the place of gradients on their way
        self.pending: Pending | None = None
        self.missing = set(parameters)  # without a gradient in this backward

    def add(self, p: nn.Parameter) -> None:
        """Move the gradient of `p` into its view; from now on autograd adds to the view itself."""
        if p.grad is not (view := self.views[p]):
            p.grad, view.summed_over = view.copy_(p.grad.detach()), ()

    def launch(self, axis: Axis, op: Op) -> None:
        """Start to reduce. Gradients that this rank does not have are zero."""
        for p in self.parameters:
            if p.grad is None:
                self.views[p].zero_()
            else:
                check_not_summed(p, axis)
                self.add(p)
                p.grad = self.away[p]  # a gradient in flight may be neither read nor changed
        copies = copies_axis(self.parameters[0], axis)
        if op == "avg" and copies.size < axis.size:  # the average is over all ranks of `axis`
            self.flat.mul_(copies.size / axis.size)
        self.pending = self.reduce(self, copies, op)

    def finish(self) -> None:
        """Wait for the result, and let ``p.grad`` be a view of it."""
        self.pending.wait()
        self.pending, self.missing = None, set(self.parameters)
        for p, view in self.views.items():
            p.grad = view


def all_reduce_bucket(bucket: Bucket, axis: Axis, op: Op) -> Pending:
    """Reduce exactly: one all-reduce."""
    return all_reduce(bucket.flat, axis, op, out=bucket.flat, async_op=True)


class Bucketed(Naive):
    """After backward, one all-reduce per bucket of parameters: latency is paid a few times only."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        average: bool = True,
        bucket_mb: float | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        super().__init__(model, axis, average)
        num_bytes = sum(map(gradient_bytes, self.parameters))
        self.capacity = bucket_mb * 1e6 if bucket_mb else min(num_bytes / 4, 25e6)
        self.reduce = reduce
        # Autograd computes the last layer's gradients first; a pipeline's tied ones come last.
        order = sorted(self.parameters[::-1], key=lambda p: hasattr(p, "comes_last"))
        is_alone = axis.size == 1 and reduce is None  # then gradients stay where they are
        self._use(fill_buckets([] if is_alone else order, self.capacity))

    def _use(self, groups: list[list[nn.Parameter]]) -> None:
        self.buckets = [Bucket(parameters, self.reduce) for parameters in groups]
        self.launched = 0  # the first `launched` of them are on their way
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def finish_backward(self) -> None:
        for bucket in self.buckets[self.launched :]:  # also buckets that this rank did not use
            bucket.launch(self.axis, self.op)
        if self.reduce is not None:  # only a compressor's thread may use the axis until it ends
            for bucket in self.buckets:
                bucket.pending.wait()
        super().finish_backward()

    def reduce_all(self) -> None:
        for bucket in self.buckets:
            bucket.finish()
        self.launched = 0


# ---------------------------------------------------------------------- 3. while computing goes on
class Overlapped(Bucketed):
    """A bucket is sent as soon as backward has filled it, while backward goes on.

    All ranks must send the buckets in one order: a full bucket waits for the buckets before it.
    """

    def _on_gradient(self, p: nn.Parameter) -> None:
        super()._on_gradient(p)
        bucket = self.bucket_of[p]
        if bucket.pending is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} received another gradient after its bucket "
                f"was sent: call finish_backward() after each backward outside of no_sync()"
            )
        if p.grad.grad_fn is None:  # else it has a graph, for a penalty on gradients
            bucket.add(p)
        if self.synchronises:
            bucket.missing.discard(p)
            while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
                self.buckets[self.launched].launch(self.axis, self.op)
                self.launched += 1


# ---------------------------------------------------------------------- 4. in buckets that fit
class Tuned(Overlapped):
    """The buckets with which the step ends first, on this model and this axis.

    The second backward notes when each gradient arrives. A few timed all-reduces measure the costs
    of a call. All ranks then take the cut of `bucket_sizes.best_cut`, and keep it. `said` has the
    predicted times of these buckets, and of the buckets of `fill_buckets`.
    """

    said = "not tuned yet: the second backward tells when gradients arrive"
    backwards = 0

    def _on_gradient(self, p: nn.Parameter) -> None:
        super()._on_gradient(p)
        if self.backwards == 1 and self.synchronises:
            self.arrived_at[p] = clock.stamp(self.device)

    def finish_backward(self) -> None:
        super().finish_backward()
        self.backwards += 1
        if self.backwards == 1:
            self.arrived_at: dict[nn.Parameter, Any] = {}
        elif self.backwards == 2 and self.buckets and self.device.type != "meta":
            self._tune()

    def _tune(self) -> None:
        first = next(iter(self.arrived_at.values()), None)  # a rank without samples has none
        arrived = {p: clock.between(first, at) for p, at in self.arrived_at.items()}
        own = torch.tensor([arrived.get(p, 0.0) for p in self.bucket_of], dtype=torch.float64)
        costs = measure(self.axis, self.buckets[0].flat, int(self.capacity))
        rule = [bucket.parameters for bucket in self.buckets]
        groups, self.said = choose(self.axis, own.to(self.device), rule, costs)
        self._use(groups)


VERSIONS = {"naive": Naive, "bucketed": Bucketed, "overlapped": Overlapped, "tuned": Tuned}


# ---------------------------------------------------------------------- put on a model
def apply(
    model: nn.Module,
    axis: Axis,
    *,
    version: Version = "overlapped",
    bucket_mb: float | None = None,
    average: bool = True,
    reduce: Reduce | None = None,
) -> Naive:
    """Make `model` (any `nn.Module`) data parallel along `axis`, in place.

    Args:
        bucket_mb: capacity of a bucket in MB (10^6 bytes), see `fill_buckets`. By default a
            quarter of the gradients, at most 25 MB. "tuned" begins with it.
        average: divide the sum of the gradients by the number of ranks.
        reduce: reduces a bucket, as `compression.Compressed` does; by default, exactly.

    A parameter that no rank used keeps ``grad=None``, as on one device. If only some ranks used a
    parameter, its gradient is zero on the others. Buffers are made equal here, but not kept equal.
    After an exception in backward, and before you skip a step, call `finish_backward` and then
    ``zero_grad()`` on all ranks.

    Raises `ValueError` for a `reduce` that the version does not use, and where `claim` does.
    """
    if reduce is not None and version in ("naive", "tuned"):
        raise ValueError(f"version={version!r} reduces exactly; with reduce=, use 'overlapped'")
    claim(model, "ddp", axis)
    replicate(model, axis, is_data=True)
    options = () if version == "naive" else (bucket_mb, reduce)
    return VERSIONS[version](model, axis, average, *options)
