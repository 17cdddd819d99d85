"""Data parallelism: every rank holds the whole model and computes on its own share of the batch.

Idea.   The gradient of a sum over samples is the sum of the gradients. So each rank computes the
        gradient of its share, and one all-reduce per step makes them the gradient of the batch.
Math.   g = (1/n) sum_r g_r  with ``average=True``, for a loss that each rank averages over its
        own samples; g = sum_r g_r  with ``average=False``, for a loss that every rank has already
        divided by the number of tokens of *all* ranks (right for uneven shares; see train/).
Shapes. batch [B, T] V@dp -> [B/n, T] on each rank; parameters R@dp; local gradients P@dp,
        all-reduced to R@dp.
Comms.  P bytes of gradients and e bytes for each of N parameters (a count of the ranks that used
        it; e the size of one element): 2 (n-1)/n (P + N e) per rank and step, in the backward.
        Fewer with `reduce=`, see compression/.
Memory. Everything n times over. Gradients live inside the buckets: no second copy of them.
Costs you. A model that fits on one device; batches so large that computing outlasts sending.
Source. Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
        (arXiv 2006.15704), section 3.
In torch: `torch.nn.parallel.DistributedDataParallel`.
Proved by tests/parallel/test_ddp.py; taught in notebooks/03_data_parallel.ipynb.

Four versions, each one idea further: `Naive`, `Bucketed`, `Overlapped`, `Tuned`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Set
from itertools import accumulate, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minipar.comm.calls import Pending
from minipar.comm.collectives import Op, all_reduce, broadcast
from minipar.comm.mesh import Axis
from minipar.comm.values import look
from minipar.parallel import bucket_sizes
from minipar.parallel.base import guard, hooks
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import copies_axis, gradient_bytes, laid_out_as
from minipar.parallel.base.strategy import Strategy

Version = Literal["naive", "bucketed", "overlapped", "tuned"]
Reduce = Callable[["Bucket", Axis, Op], Pending]  # starts to reduce a bucket, in place


def apply(
    model: nn.Module,
    axis: Axis,
    *,
    version: Version = "overlapped",
    bucket_mb: float | None = None,
    average: bool = True,
    reduce: Reduce | None = None,
) -> Strategy:
    """Make `model` (any `nn.Module`) data parallel along `axis`, in place.

    Args:
        version: "naive", "bucketed", "overlapped" or "tuned".
        bucket_mb: capacity of a bucket in MB (10^6 bytes), see `fill_buckets`. By default a
            quarter of the gradients, at most 25 MB. "tuned" begins with it.
        average: divide the sum of the gradients by the number of ranks.
        reduce: how a bucket is reduced, such as `compression.Compressed`; by default, exactly.

    A parameter that no rank used keeps ``grad=None``, as on one device; one that only some ranks
    used counts as zero on the others. Buffers are made equal here, once; from then on each rank's
    are its own. After a backward that an exception cut short, call `finish_backward` and zero the
    gradients on all ranks: then they are in step again.

    Raises `ValueError` for an unknown version, a bucket without capacity, a version without buckets
    where `reduce` asks for them or one that times exact all-reduces, a model without a trainable
    parameter or with sparse gradients, or one that a strategy trains already.
    """
    if version not in VERSIONS:
        raise ValueError(f"version={version!r} is unknown; use one of {', '.join(VERSIONS)}")
    if bucket_mb is not None and not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} must be above 0; 1 to 25 is usual")
    if reduce is not None and version == "naive":
        raise ValueError("reduce= needs buckets; use version='overlapped' or 'bucketed'")
    if version == "tuned" and reduce is not None:
        raise ValueError("version='tuned' times exact all-reduces; with reduce=, use 'overlapped'")
    if reduce is not None:
        guard.check_real(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter: there are no gradients to share")
    kinds = {(p.grad_dtype, p.device, copies_axis(p, axis)) for p in trainable}
    if version == "tuned" and len(kinds) > 1:
        raise ValueError(
            f"version='tuned' needs gradients of one dtype and device, with copies on all of "
            f"{axis.name}, and these are of {len(kinds)} kinds; use version='overlapped'"
        )
    guard.claim(model, "ddp", axis)
    replicate(model, axis, is_data=True)
    if version == "naive":
        return Naive(model, axis, average)
    return VERSIONS[version](model, axis, average, bucket_mb, reduce)


# ---------------------------------------------------------------------- 1. one call per parameter
class Naive(Strategy):
    """After backward, one all-reduce per parameter.

    Right, and slow twice over: each call pays the latency of the link, and nothing is computed
    meanwhile.
    """

    def __init__(self, model: nn.Module, axis: Axis, average: bool = True) -> None:
        super().__init__(model, axis)
        self.op = "avg" if average else "sum"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        guard.watch(self, self.parameters)
        if axis.size > 1:
            for p in self.parameters:
                hooks.on_gradient(p, self._on_gradient)
            if not average:
                self.share_sums(self.parameters)

    def finish_backward(self) -> None:
        super().finish_backward()
        # A rank that skips a parameter it did not use would leave the others waiting: all ranks
        # reduce all parameters, and a count tells "unused everywhere" from "zero".
        used = torch.tensor([float(p.grad is not None) for p in self.parameters])
        first = self.parameters[0]
        used = all_reduce(used.to(first.device, first.grad_dtype), self.axis)
        for p, users in zip(self.parameters, used, strict=True):
            self._share(p)
            unused_here = p.grad is None
            if unused_here:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
            axis = copies_axis(p, self.axis)
            if self.op == "avg":  # over all ranks, also where few have copies
                p.grad.mul_(axis.size / self.axis.size)
            all_reduce(p.grad, axis, self.op, out=p.grad)
            if unused_here and not used_elsewhere(users):
                p.grad = None
        self.note_sums(self.parameters if self.op == "sum" else ())


def used_elsewhere(users: Tensor) -> bool:
    """Whether others used a parameter that this rank did not; on "meta" all ranks are alike."""
    return bool(look(users, on_meta=0))


# ---------------------------------------------------------------------- 2. fewer, larger calls
class Bucket:
    """One flat buffer that the gradients of several parameters live in.

    Layout: the gradients one after the other, then for each the number of ranks that used it
    (averaged: their share).
    """

    def __init__(self, parameters: list[nn.Parameter], reduce: Reduce | None = None) -> None:
        self.parameters = parameters
        self.reduce = reduce or all_reduce_bucket
        like = parameters[0]
        numel = sum(p.numel() for p in parameters) + len(parameters)
        self._lay_out(like.new_zeros(numel, dtype=like.grad_dtype))
        self.pending: Pending | None = None
        self.sent: set[nn.Parameter] = set()  # those of which this rank has had a gradient
        self.expected = self.missing = len(parameters)  # gradients per backward; still to come
        for p in parameters:
            if p.grad is not None:
                self.take(p)

    def _lay_out(self, flat: Tensor) -> None:
        """Let the gradients be views of `flat`."""
        sizes = [p.numel() for p in self.parameters]
        self.flat, self.gradients = flat, flat[: sum(sizes)]
        *pieces, self.users = flat.split([*sizes, len(sizes)])
        self.views = {p: laid_out_as(p, v) for p, v in zip(self.parameters, pieces, strict=True)}
        del pieces
        self.num_users = _users_of(flat)

    def take(self, p: nn.Parameter) -> None:
        """Move the gradient of `p` into the bucket; from now on it accumulates there.

        Not yet if it has a graph: there may come a penalty on it, before it is sent.
        """
        if p.grad.grad_fn is None:
            self._hold(p)

    def _hold(self, p: nn.Parameter) -> None:
        if p.grad is not self.views[p]:
            if self._is_kept(p):
                self._move()
            p.grad = self.views[p].copy_(p.grad.detach())

    def _is_kept(self, p: nn.Parameter) -> bool:
        """Whether the gradient of `p` that was here is still in use, though ``p.grad`` is not.

        Such as g = p.grad, or a view of it: another name for the tensor, or one more of its memory.
        """
        return sys.getrefcount(self.views[p]) > 2 or _users_of(self.flat) > self.num_users

    def _move(self) -> None:
        """Go on in new memory; gradients that are here come along."""
        before = self.views
        self._lay_out(self.flat.clone())
        for p, view in before.items():
            if p.grad is view:
                p.grad = self.views[p]

    def launch(self, axis: Axis, op: Op) -> None:
        """Start to reduce."""
        self.users.fill_(1)
        self.sent = {p for p in self.parameters if p.grad is not None}
        for i, p in enumerate(self.parameters):
            if p in self.sent:
                self._hold(p)
            else:
                self.views[p].zero_()
                self.users[i] = 0
        copies = copies_axis(self.parameters[0], axis)
        if op == "avg" and copies.size < axis.size:  # the average is over all ranks all the same
            self.flat.mul_(copies.size / axis.size)
        self.pending = self.reduce(self, copies, op)

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        """Let gradients of `zeroed` that are on their way count as those of no rank."""
        if self.pending is not None:
            self.pending.wait()
            for i, p in enumerate(self.parameters):
                if p in zeroed:
                    self.users[i] = 0

    def finish(self) -> None:
        """Wait for that; hand the gradients out."""
        self.pending.wait()
        self.pending, self.missing = None, self.expected
        for i, p in enumerate(self.parameters):
            # Looks at a value only where this rank had no gradient of its own; one that was taken
            # away since (p.grad = None) does not come back.
            if p.grad is None and p not in self.sent and used_elsewhere(self.users[i]):
                p.grad = self.views[p]


def _users_of(tensor: Tensor) -> int:
    """How many tensors there are of the memory of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def all_reduce_bucket(bucket: Bucket, axis: Axis, op: Op) -> Pending:
    """Reduce exactly: one all-reduce."""
    return all_reduce(bucket.flat, axis, op, out=bucket.flat, async_op=True)


def fill_buckets(
    parameters: list[nn.Parameter], capacity: float, reduce: Reduce | None = None
) -> list[Bucket]:
    """Pack `parameters`, in their order, into buckets of at most `capacity` bytes each.

    The first is a quarter of that and the second a half, so that the link has something to do early
    and never waits long for more; the last is a quarter, as no computation is left to hide it. A
    parameter larger than a bucket has one to itself. Different dtypes, devices or ranks with copies
    do not mix.
    """
    groups: list[list[nn.Parameter]] = []
    room: dict[tuple, tuple[list[nn.Parameter] | None, float]] = {}
    for p in parameters:
        key = p.grad_dtype, p.device, copies_axis(p, None)
        group, left = room.get(key, (None, 0.0))
        if group is None or gradient_bytes(p) > left:
            group, left = [], capacity * min(1, 2 ** len(groups) / 4)
            groups.append(group)
        group.append(p)
        room[key] = group, left - gradient_bytes(p)
    last, left = [], capacity / 4
    if groups and sum(map(gradient_bytes, groups[-1])) > left:
        while gradient_bytes(groups[-1][-1]) <= left:
            left -= gradient_bytes(groups[-1][-1])
            last.insert(0, groups[-1].pop())
    return [Bucket(group, reduce) for group in [*groups, last] if group]


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
        self.reduce = reduce
        num_bytes = sum(map(gradient_bytes, self.parameters))
        self.capacity = bucket_mb * 1e6 if bucket_mb else min(num_bytes / 4, 25e6)
        # Gradients come into being from the last layer to the first.
        order = self.parameters[::-1]
        is_alone = axis.size == 1 and reduce is None  # then they stay where they are
        self.buckets = fill_buckets([] if is_alone else order, self.capacity, reduce)

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        for bucket in self.buckets:
            bucket.drop(zeroed)

    def finish_backward(self) -> None:
        Strategy.finish_backward(self)
        for bucket in self.buckets:
            if bucket.pending is None:
                for p in bucket.parameters:
                    self._share(p)
                bucket.launch(self.axis, self.op)
        for bucket in self.buckets:
            bucket.finish()
        self.note_sums(self.parameters if self.op == "sum" else ())


# ---------------------------------------------------------------------- 3. while computing goes on
class Overlapped(Bucketed):
    """A bucket is sent as soon as backward has filled it, while backward goes on.

    All ranks must send the same buckets in the same order, whatever the order in which their
    gradients are ready: a bucket waits for those before it. The first backward is a rehearsal. It
    sends nothing early but notes in which order gradients arrive, and how often (a parameter used
    by two re-entrant checkpoints receives its gradient in two parts); from then on buckets follow
    that order, as rank 0 saw it.
    """

    def __init__(self, model: nn.Module, axis: Axis, *options: Any) -> None:
        super().__init__(model, axis, *options)
        # Arrivals, in order, in the first backward.
        self.rehearsal: Counter[nn.Parameter] | None = Counter() if self.buckets else None
        self.next = 0  # the bucket whose turn it is
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def _on_gradient(self, p: nn.Parameter) -> None:
        super()._on_gradient(p)
        bucket = self.bucket_of[p]
        if bucket.pending is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} received another gradient after its bucket "
                f"was sent, unlike in the first backward. Call finish_backward() after each "
                f"backward outside of no_sync(), also after one that was cut short by an exception "
                f"(and zero the gradients then); or use version='bucketed' if the graph changes"
            )
        bucket.take(p)
        if not self.synchronises:
            return
        is_complete = guard.comes_last(p, self._on_gradient)
        if self.rehearsal is not None:
            self.rehearsal[p] += 1
        if self.rehearsal is not None or not is_complete:
            return
        bucket.missing -= 1
        while self.next < len(self.buckets) and self.buckets[self.next].missing <= 0:
            self.buckets[self.next].launch(self.axis, self.op)
            self.next += 1

    def finish_backward(self) -> None:
        super().finish_backward()
        self.next = 0
        if self.rehearsal is not None:
            self._learn(self.rehearsal)
            self.rehearsal = None

    def _learn(self, arrived: Counter[nn.Parameter]) -> None:
        """Have the buckets follow the order in which gradients arrived in the rehearsal."""
        unused = [p for p in reversed(self.parameters) if p not in arrived]
        number = {p: i for i, p in enumerate(self.parameters)}
        order = [number[p] for p in [*arrived, *unused]]
        told = torch.tensor(order, device=self.parameters[0].device)
        order = look(broadcast(told, self.axis, src=0), on_meta=order)
        self.order, self.arrivals = [self.parameters[i] for i in order], arrived
        self._refill(lambda: fill_buckets(self.order, self.capacity, self.reduce))

    def _refill(self, make: Callable[[], list[Bucket]]) -> None:
        """Move all gradients into the buckets that `make` makes."""
        self.buckets, self.bucket_of = [], {}  # each old one goes when its gradients have moved
        self.buckets = make()
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for bucket in self.buckets:
            times = (max(1, self.arrivals[p]) for p in bucket.parameters)
            bucket.expected = bucket.missing = sum(times)


# ---------------------------------------------------------------------- 4. in buckets that fit
class Tuned(Overlapped):
    """The cut into buckets that lets the step end first, on this model and this axis.

    The second backward notes when each gradient arrives; a few timed all-reduces tell what a call
    costs. All ranks then take the cut that `bucket_sizes.best_cut` finds, and keep it. Sums of more
    than two ranks depend in their last bit on where a bucket ends, so two runs may differ there:
    that is why `Overlapped` has a rule instead. On "meta", where nothing takes time, it holds here.
    Gradients must be of one kind, or they could not share a bucket: `apply` refuses others.
    """

    def __init__(self, model: nn.Module, axis: Axis, *options: Any) -> None:
        super().__init__(model, axis, *options)
        self.arrived_at: dict[nn.Parameter, Any] | None = {} if self.buckets else None
        self.said = "not tuned yet: the second backward tells when gradients arrive"

    def _on_gradient(self, p: nn.Parameter) -> None:
        super()._on_gradient(p)
        if self.arrived_at is not None and self.rehearsal is None and self.synchronises:
            self.arrived_at.pop(p, None)  # of a gradient in two parts, the second counts
            self.arrived_at[p] = bucket_sizes.now(self.device)

    def finish_backward(self) -> None:
        super().finish_backward()
        if self.arrived_at is not None and self.finishes > 1 and self.device.type != "meta":
            is_done = self._tune(self.arrived_at)  # on all ranks, also without gradients
            self.arrived_at = None if is_done else {}

    def explain(self) -> str:
        """Return what the chosen buckets and those of the rule are predicted to do."""
        return self.said

    def _tune(self, stamps: dict[nn.Parameter, Any]) -> bool:
        """Cut anew. False, with the buckets as they were, if no rank had a gradient."""
        arrived = dict(zip(stamps, bucket_sizes.seconds_since_first(stamps.values()), strict=True))
        own = [*(arrived.get(p, 0.0) for p in self.order), float(len(stamps))]
        own = torch.tensor(own, dtype=torch.float64, device=self.device)
        *slowest, most = look(all_reduce(own, self.axis, "max"), on_meta=None)
        if not most:
            return False
        # The slowest rank's; a gradient that comes before its turn waits for those before it.
        ready, sizes = list(accumulate(slowest, max)), [gradient_bytes(p) for p in self.order]
        costs = bucket_sizes.measure(self.axis, self.buckets[0].flat, int(self.capacity))
        cut = bucket_sizes.best_cut(ready, sizes, costs)
        by_rule = [len(bucket.parameters) for bucket in self.buckets]
        self.said = bucket_sizes.compare(ready, sizes, costs, chosen=cut, rule=by_rule)
        order = iter(self.order)
        self._refill(lambda: [Bucket(list(islice(order, many))) for many in cut])
        return True


VERSIONS: dict[str, type[Naive]] = {
    "naive": Naive,
    "bucketed": Bucketed,
    "overlapped": Overlapped,
    "tuned": Tuned,
}
