"""An optimizer of which every rank has and computes one n-th: what ZeRO is about.

`Bucket` is a flat buffer of parameters, and later of their gradients; `ShardedOptimizer` steps this
rank's slice of each, and hands the new weights out. zero.py brings the gradients.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.calls import Pending
from minipar.comm.collectives import all_gather, reduce_scatter
from minipar.comm.mesh import Axis
from minipar.comm.shapes import Op
from minipar.observe import memory
from minipar.parallel.base import absent
from minipar.parallel.base.optimizer_state import (
    Members,
    as_groups,
    cut_state,
    join_state,
    labelled,
    pack,
)
from minipar.parallel.base.shards import Layout, Row, copies_axis, master_of
from minipar.parallel.base.strategy import check_elementwise


class Bucket(Row):
    """Parameters one after the other in a flat buffer, of which this rank owns a slice.

    The buffer holds the parameters themselves: they become views of it. The slice is a view of it,
    too, until `work_in` parts them.
    """

    def __init__(self, parameters: list[nn.Parameter], data_axis: Axis) -> None:
        axis = copies_axis(parameters[0], data_axis)
        self.share = axis.size / data_axis.size
        layout = Layout([p.numel() for p in parameters], axis)
        self.parameters = parameters
        self.weights = parameters[0].new_zeros(layout.total)  # [N], zeros at its end
        super().__init__(parameters, layout, axis, self.weights.view(axis.size, -1)[axis.rank])
        self.arriving: Pending | None = None  # an all-gather of weights
        self.whole: Tensor | None = None  # [N]: gradients of this rank
        self.gradients: dict[nn.Parameter, Tensor] = {}  # views of it
        self.reducing: Pending | None = None  # a reduce-scatter from the one to the other
        self.reduced: Tensor | None = None  # [N/n]: gradients of all ranks
        self.is_sent = False  # in this round
        self.expected = self.missing = len(parameters)  # gradients per backward; still to come
        self.has_masters = False  # in the slice, beside weights that compute
        self.can_leave = all(map(absent.can_leave, parameters))
        for p, piece in zip(parameters, self.pieces, strict=True):
            p.on_use, p.piece = self.arrive, piece
        self._put(self.weights)

    def _put(self, weights: Tensor) -> None:
        """Let the parameters be views of `weights` [N], with the values they have."""
        self.weights = weights
        self.views = dict(zip(self.parameters, self.split(weights), strict=True))
        for p, view in self.views.items():
            p.data = view.copy_(p.data)

    def work_in(self, dtype: torch.dtype) -> None:
        """Keep the slice as master weights; from now on parameters, and what is gathered, have
        `dtype`. Gradients have that of the slice."""
        self.has_masters = True
        self.move(self.shard.clone())
        memory.tag("optimizer", self.shard)
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            p.data = p.data.to(dtype)
            p.grad_dtype, p.master, p.rounded = piece.dtype, piece, p._version
            p.part_of = partial(self.part_of, piece)
        self._put(torch.zeros_like(self.weights, dtype=dtype))

    def gather(self) -> None:
        """Start to collect the slices of all ranks, where they belong."""
        for p, view in self.views.items():
            if p.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has got new memory since its optimizer "
                    f"was made; move or cast the model first"
                )
        shard = self.shard.to(self.weights.dtype)  # rounded, if it holds masters
        self.arriving = all_gather(shard, self.axis, out=self.weights, async_op=True)
        if self.can_leave:
            absent.leave(self.parameters)
        else:
            self.arrive()

    def arrive(self) -> None:
        """Wait until the slices of all ranks are in `weights`."""
        if self.arriving is not None:
            arriving, self.arriving = self.arriving, None
            arriving.wait()
            absent.come_back(self.parameters)

    # -------- gradients: used by the strategies below
    def take(self, p: nn.Parameter) -> None:
        """Move the gradient of `p` into the flat buffer; from now on it accumulates there.

        Not yet if it has a graph: there may come a penalty on it, before it is sent.
        """
        if p.grad.grad_fn is None:
            self._hold(p)

    def _hold(self, p: nn.Parameter) -> None:
        if self.whole is None:
            self.whole = torch.empty_like(self.weights, dtype=self.shard.dtype)
            self.gradients = dict(zip(self.parameters, self.split(self.whole), strict=True))
        view = self.gradients[p]
        if p.grad is not view:
            view.copy_(p.grad.detach())
            p.grad = view

    def reduce(self, op: Op) -> list[nn.Parameter]:
        """Start to reduce whole gradients to shards; return the parameters that had one."""
        self.wait_for_reduce()
        used = [p for p in self.parameters if p.grad is not None]
        for p in used:
            self._hold(p)
            p.grad = None
        if not used:
            self.whole = torch.zeros_like(self.weights, dtype=self.shard.dtype)
        elif len(used) < len(self.parameters):
            for p in set(self.parameters) - set(used):
                self.gradients[p].zero_()
        self.whole[sum(self.layout.splits[:-1]) :] = 0
        if op == "avg" and self.share < 1:  # the average is over all ranks all the same
            self.whole.mul_(self.share)
        self.reducing = reduce_scatter(self.whole, self.axis, op=op, async_op=True)
        self.whole, self.gradients = None, {}  # the pending collective holds the buffer
        self.is_sent = True
        return used

    def wait_for_reduce(self) -> None:
        """Wait for the reduce-scatter; accumulate its result in `reduced`."""
        if self.reducing is not None:
            arrived, self.reducing = self.reducing.wait(), None
            self.reduced = arrived if self.reduced is None else self.reduced.add_(arrived)

    def hand_out(self, used: Collection[nn.Parameter]) -> None:
        """Give the pieces of parameters in `used` their gradients, views of `reduced`."""
        for p, piece, span in zip(self.parameters, self.pieces, self.layout.spans, strict=True):
            if p in used:
                piece.grad = self.reduced[span].view_as(piece)

    def drop(self) -> None:
        """Forget all gradients."""
        self.wait_for_reduce()
        self.whole, self.gradients, self.reduced = None, {}, None
        for p in (*self.parameters, *self.pieces):
            p.grad = None


class ShardedOptimizer(torch.optim.Optimizer):
    """Any elementwise `torch.optim` class, with its state and its work spread over `axis`.

    Args:
        params: parameters, pairs with names, or groups, as for `optimizer_class`; alike on all
            ranks. Frozen ones may be among them.
        optimizer_class: made on this rank's pieces, which lie where the parameters do.
        bucket_mb: capacity of a bucket in MB (10^6 bytes); a larger parameter has one to itself. By
            default an eighth of the parameters, at most 25 MB.
        options: of `optimizer_class`.

    To schedulers an optimizer like any other; `param_groups` list the pieces. Alone, it takes the
    gradients from ``p.grad``, already reduced; with `apply` it costs less.

    Raises `ValueError` when nothing is trainable, for a bucket without capacity, and for an
    optimizer that does not work on pieces.
    """

    elementwise = True  # as `optimizer_class` is

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        axis: Axis,
        *,
        bucket_mb: float | None = None,
        **options: Any,
    ) -> None:
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb} must be above 0; 1 to 25 is usual")
        groups, self.names = as_groups(params)
        trainable = [
            [p for p in group["params"] if p.requires_grad and p.numel()] for group in groups
        ]
        if not any(trainable):
            raise ValueError("there is no trainable parameter to optimize")
        check_elementwise(optimizer_class)
        num_bytes = sum(p.nbytes for members in trainable for p in members)
        capacity = bucket_mb * 1e6 if bucket_mb else min(num_bytes / 8, 25e6)
        self.axis = axis
        self.buckets = [
            Bucket(parameters, axis)
            for members in trainable
            for parameters in _fill_buckets(members, capacity)
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.pieces = {p: p.piece for p in self.bucket_of}
        self.wholes = [group["params"] for group in groups]  # as the user gave them
        self.frozen = [p for whole in self.wholes for p in whole if p not in self.bucket_of]
        self.used: set[nn.Parameter] = set()  # by this rank, in this step, as its strategy sees it
        self.attached = False  # to a strategy, which brings gradients and waits for weights
        self.stepped = False  # with the gradients that are here
        cut = [
            {**group, "params": [self.pieces[p] for p in whole if self._steps(p)]}
            for group, whole in zip(groups, self.wholes, strict=True)
        ]
        self.inner = optimizer_class(cut, **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._adopt()

    def _steps(self, p: nn.Parameter) -> bool:
        """Whether there is something to do here: a step of an empty piece takes time, too."""
        return p in self.pieces and self.pieces[p].numel() > 0

    def _adopt(self) -> None:
        """What others see of us, and change, is the inner optimizer's."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def attach(self, model: nn.Module) -> None:
        """From now on a strategy brings gradients, and weights are waited for where `model` runs.

        The names of its parameters are those by which states are paired.
        """
        self.attached, self.names = True, {p: name for name, p in model.named_parameters()}

    @torch.no_grad()
    def work_in(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Compute in `dtype`: slices become master weights, and parameters are cast copies."""
        self.synchronize()
        for bucket in self.buckets:
            if bucket.shard.is_floating_point():
                bucket.work_in(dtype)
        for p in filter(torch.is_floating_point, model.parameters()):
            if p not in self.bucket_of:  # frozen, or without numbers
                p.data = p.data.to(dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's slices, and hand them out."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        if not self.attached:
            for p, piece in self.pieces.items():
                grad = p.grad
                piece.grad = None if grad is None else self.bucket_of[p].part_of(piece, grad)
        for bucket in self.buckets:
            for p in bucket.parameters if bucket.has_masters else ():
                master_of(p)
        self.inner.step()
        for bucket in reversed(self.buckets):  # from the first layer to the last
            bucket.gather()
        if not self.attached:
            self.synchronize()
        self.stepped = True
        return loss

    def synchronize(self) -> None:
        """Wait until all parameters are whole: to read them without a forward."""
        for bucket in self.buckets:
            bucket.arrive()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, of parameters and of pieces. Raises `ValueError` if told to keep
        zeros: there is no place for whole ones."""
        if not set_to_none:
            raise ValueError("set_to_none=False: zero keeps no gradients, not as zeros either")
        self.used.clear()
        for bucket in self.buckets:
            bucket.drop()
        for p in self.frozen:
            p.grad = None
        self.stepped = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: buckets are cut once. Raises `ValueError` later."""
        if "inner" in self.__dict__ and self.param_groups is self.inner.param_groups:
            raise ValueError("the parameters are cut already; make a new ShardedOptimizer")
        super().add_param_group(param_group)

    def members(self) -> Members:
        """Return its parameters as the user gave them, by group and name."""
        return labelled(self.wholes, self.names)

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Return the state, by default as `optimizer_class` itself would on one device.

        That is a collective, and puts all of it on the CPU. With ``sharded=True``: this rank's
        part, at no cost, for the same rank of as many.
        """
        if sharded:
            return {**self.inner.state_dict(), "shard": [self.axis.rank, self.axis.size]}
        return join_state(self.inner, self.members(), self.buckets)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, whole or sharded, also one of `optimizer_class` itself.

        A whole one is paired by names where both sides know them: of an optimizer made of
        `named_parameters()`, or attached to a model. Raises `ValueError` for other parameters, and
        for a shard of another rank or of as many.
        """
        mine = [self.axis.rank, self.axis.size]
        if "shard" not in state_dict:
            members = self.members()
            own = cut_state(state_dict, members, self.buckets)
            cut = [[label for label, p in group.items() if self._steps(p)] for group in members]
            parts = pack(own, cut, state_dict["param_groups"], named=False)
        elif list(state_dict["shard"]) == mine:
            parts = {key: state_dict[key] for key in ("state", "param_groups")}
        else:
            rank, size = state_dict["shard"]
            raise ValueError(
                f"this is the state of rank {rank} of {size}, and here is rank {mine[0]} of "
                f"{mine[1]}; save whole states to change the number of ranks"
            )
        self.inner.load_state_dict(parts)
        self._adopt()


def _fill_buckets(parameters: list[nn.Parameter], capacity: float) -> Iterator[list[nn.Parameter]]:
    """Pack `parameters`, in their order, by dtype and device, up to `capacity` bytes each."""
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device, copies_axis(p, None)), []).append(p)
    for members in kinds.values():
        bucket, room = [], capacity
        for p in members:
            if bucket and p.nbytes > room:
                yield bucket
                bucket, room = [], capacity
            bucket.append(p)
            room -= p.nbytes
        yield bucket
