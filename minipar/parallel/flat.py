"""Weights that come and go: a row of them, gathered for a block, its gradient reduce-scattered.

For fsdp, which says when. Each idea further is a class of its own: of a `Flat` each rank has one
shard; a `Hybrid` one has replicas; a `Whole` one keeps gradients unsent under `no_sync`. `Home` is
where shards live; offload has another.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import (
    Op,
    Pending,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    scatter,
)
from minipar.comm.mesh import Axis
from minipar.comm.values import look
from minipar.observe import memory, watchdog
from minipar.parallel.base import absent
from minipar.parallel.base.shards import Layout, Row, copies_axis
from minipar.parallel.same_order import SAME_ORDER, Ledger

SLICE = 1 << 26
"""Bytes of gradients that a CPU sends at once; of more, it waits for one slice after the other."""
Init = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the first value
Reduce = Callable[[Tensor, Axis], tuple[Tensor, Tensor]]  # rows [n, S] -> sum [S], what was lost


@dataclass(frozen=True)
class Options:
    """How weights are sharded along `axis`: the options of `fsdp.apply`."""

    axis: Axis
    reshard_after_forward: bool = True
    """Free a block's weights between its forward and its backward."""
    prefetch: int = 1
    """How many blocks are gathered ahead of the one that computes."""
    compute_dtype: torch.dtype | None = None
    """Gather floats in this dtype, and cast floating point inputs of the blocks to it; shards stay
    as they are. In place of autocast, whose casts would keep all weights."""
    reduce_dtype: torch.dtype | None = None
    """Send gradients in this dtype, but complex ones as they are; by default that of computing."""
    average: bool = True
    """Divide the sum of the gradients by the number of ranks."""
    accumulate: Literal["shards", "whole"] = "shards"
    """Where gradients wait under `no_sync`. In "shards": reduce-scattered after every microbatch,
    so that memory stays small. "whole": on each rank, unsent, P bytes."""
    replicate_axis: Axis | None = None
    """Hybrid sharding. Shard inside of `axis`, such as a node, and keep a copy of everything for
    each rank of this axis, over which gradients are all-reduced."""
    reduce: Reduce | None = None
    """Sums up gradients instead of a reduce-scatter, such as `Int8().reduce_scatter` of
    compression/; what it leaves out is lost, and nothing of it is hidden."""
    init: Init | None = None
    """Gives a model on the "meta" device its weights and buffers, ``init(name, shape)``, each alone
    and on every rank that holds a part of it."""
    ledger: Ledger = field(default_factory=Ledger, init=False)

    @property
    def op(self) -> Op:
        """What becomes of the gradients of all ranks."""
        return "avg" if self.average else "sum"

    @property
    def axes(self) -> list[Axis]:
        """Those along which something is sent."""
        return [a for a in (self.axis, self.replicate_axis) if a is not None and a.size > 1]

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` for what does not go together, or not with `model`."""
        axis, other = self.axis, self.replicate_axis
        if other is not None and set(other.ranks) & set(axis.ranks) != {axis.ranks[axis.rank]}:
            raise ValueError(
                f"replicate_axis {other.name} and axis {axis.name} must cross each other; "
                f"use two axes of one mesh, such as Mesh(replica=2, dp=2)"
            )
        for name in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name}={dtype} is no float; use bfloat16, float16 or float32")
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch} must be 0 or more blocks; 1 is usual")
        if self.accumulate not in ("shards", "whole"):
            raise ValueError(f"accumulate={self.accumulate!r} is unknown; use 'shards' or 'whole'")
        parameters = list(model.parameters())
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameter: there is nothing to shard")
        if self.init is not None and not any(p.is_meta for p in parameters):
            raise ValueError("init= is for models on the 'meta' device; this one has its weights")


class Home:
    """Where shards live: on the device that computes. Offload has another home for them."""

    def fetch(self, flat: "Flat") -> Tensor:
        """Return the shard [S] as it is sent: on the device that computes, in its dtype."""
        return flat.shard.to(flat.full)

    def store(self, flat: "Flat", gradient: Tensor) -> None:
        """Bring the finished gradient [S] to where the shard is; `Flat.add_to_grad`."""
        flat.add_to_grad(gradient)

    def finish(self) -> None:
        """Called after the last `store` of a step."""


# ---------------------------------------------------------------------- 1. gather and free
class Flat(Row):
    """Weights of one block, dtype and device in a row of n S numbers; this rank keeps its shard.

    `unshard` gathers the row before the block runs, `reshard` frees it, `reduce` sums its gradient
    over the ranks. The row and its views stay the same tensors, so that what autograd has saved of
    them stays right; only their memory comes and goes.
    """

    changes_rows = False  # whether `reduce` writes into what it is given

    def __init__(self, members: dict[nn.Parameter, str], block: str, options: Options) -> None:
        self.options, self.block, self.home = options, block, Home()
        axis = copies_axis(next(iter(members)), options.axis)
        layout = Layout([p.numel() for p in members], axis)
        super().__init__(list(members), layout, axis, _initial(members, layout, options, axis))
        for (p, name), piece in zip(members.items(), self.pieces, strict=True):
            piece.is_flat = True
            piece.on_use = partial(_refuse_use, name, block)
            p.stepped_elsewhere = (
                "fsdp has replaced the parameters of the model; make the optimizer after fsdp.apply"
            )
            if absent.can_leave(p):
                p.on_use = partial(_refuse_replaced, name)
                absent.leave([p])
        self.is_trainable = self.pieces[0].requires_grad  # when it was made
        is_float = self.shard.is_floating_point()  # whole and complex numbers are never cast
        dtype = options.compute_dtype if is_float else None
        self.full = self.shard.new_empty(layout.total, dtype=dtype)  # [n S]
        self.reduce_dtype = (options.reduce_dtype if is_float else None) or self.full.dtype
        self.views = self.split(self.full)
        self.gathering: Pending | None = None
        self.reducing: Pending | None = None
        self.used: set[nn.Parameter] = set()  # had a gradient here, in this step
        self.fresh: set[nn.Parameter] = set()  # had none before this step
        self.version: int | None = None  # of all pieces, when gathered; None: a step ago
        self.unwritten = _version(self.full)  # as it was gathered
        self.is_held = False  # until the step ends: a graph needs it whose backward calls no hook
        self.reshard()

    @property
    def learns(self) -> bool:
        """Whether some of its weights have a gradient now: they may be frozen for a while."""
        return self.is_trainable and any(p.requires_grad for p in self.pieces)

    # weights
    @property
    def is_gathered(self) -> bool:
        """Whether the weights are here, or on their way."""
        return self.full.untyped_storage().nbytes() > 0

    def unshard(self) -> None:
        """Start to gather the weights, unless that was done."""
        if self.is_gathered or not self.full.numel():
            return
        self.check_place()
        self.full.untyped_storage().resize_(self.full.nbytes)
        memory.tag("gathered", self.full)
        self.version, self.unwritten = _version(self.pieces[0]), _version(self.full)
        self.options.ledger.note(f"gather {self.block}")
        # Through `.data`, or autograd would take the saved weights for modified ones.
        shard, row = self.home.fetch(self), self.full.data
        with watchdog.about(f"weights of {self.block}"):
            self.gathering = all_gather(shard, self.axis, out=row, async_op=True)

    def wait_for_unshard(self) -> None:
        """Return when the weights are here."""
        if self.gathering is not None:
            gathering, self.gathering = self.gathering, None
            try:
                gathering.wait()
            except RuntimeError as error:  # such as a time-out
                error.add_note(f"while gathering {self.block}. {SAME_ORDER}")
                raise

    def reshard(self) -> None:
        """Free the memory of the gathered weights, unless they are held."""
        self.wait_for_unshard()
        if not self.is_held:
            self.full.untyped_storage().resize_(0)

    def drop_old(self) -> None:
        """Free gathered weights, held or not, that have changed since."""
        if self.version != _version(self.pieces[0]):
            self.is_held = False
            self.reshard()

    def check_unwritten(self) -> None:
        """Raise `RuntimeError` if something was written into the gathered weights."""
        if _version(self.full) != self.unwritten:
            self.is_held = False
            self.reshard()
            raise RuntimeError(
                f"fsdp: forward wrote into the weights of {self.block}, which are gathered for it "
                f"and freed after it, so that what it wrote would be lost. Compute new weights "
                f"from them, as torch.nn.utils.parametrizations does; or write after the step, "
                f"into what full_state_dict() returns, and give it to load_full_state_dict()"
            )

    # gradients
    def flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of all parameters as a row [n S]; zeros where there is none.

        The only one is a row as it is. Others are copied into one.
        """
        dtype = self.reduce_dtype
        only = gradients[0]
        if only is not None and only.numel() == self.layout.total and not self.changes_rows:
            self.used.add(self.pieces[0])
            return only.detach().reshape(-1).to(dtype)
        flat = self.full.new_empty(self.full.numel(), dtype=dtype)
        memory.tag("gradients", flat)
        *parts, padding = flat.split(self.layout.splits)
        padding.zero_()
        for p, part, gradient in zip(self.pieces, parts, gradients, strict=True):
            if gradient is None:
                part.zero_()
            else:
                part.view(gradient.shape).copy_(gradient.detach())
                self.used.add(p)
        return flat

    def reduce(self, flat: Tensor, is_last: bool = True) -> None:
        """Start to reduce-scatter the gradients `flat` [n S]; `is_last`: not under `no_sync`."""
        options = self.options
        options.ledger.note(f"reduce {self.block}")
        if options.average and self.axis.size < options.axis.size:  # it is over all ranks anyway
            flat = flat * (self.axis.size / options.axis.size)
        if options.reduce is None and flat.nbytes > SLICE and flat.device.type == "cpu":
            self.reducing = self._reduce_in_slices(flat)
        elif options.reduce is None:
            self.reducing = reduce_scatter(flat, self.axis, op=options.op, async_op=True)
        else:
            total, _ = options.reduce(flat.view(self.axis.size, -1), self.axis)
            factor = 1 / self.axis.size if options.op == "avg" else 1
            self.reducing = Pending(None, total * factor)

    def _reduce_in_slices(self, flat: Tensor) -> Pending:
        """On a CPU what all ranks send has to arrive before it is added up: not all at once."""
        rows, total = flat.view(self.axis.size, -1), flat.new_empty(self.layout.size)
        width = math.ceil(SLICE / rows[:, :1].nbytes)
        coming: Pending | None = None
        for part, out in zip(rows.split(width, dim=1), total.split(width), strict=True):
            before, sent = coming, part.reshape(-1)
            coming = reduce_scatter(sent, self.axis, op=self.options.op, out=out, async_op=True)
            if before is not None:
                before.wait()
        coming.wait()
        return Pending(None, total)

    def wait_for_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way; `accumulate` its result."""
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            self.accumulate(gradient)

    def accumulate(self, gradient: Tensor) -> None:
        """Add the reduced gradient [S] to ``grad`` of the pieces, where the shard lives."""
        self.home.store(self, gradient)

    def finish(self) -> None:
        """Complete the gradients of the step."""
        self.wait_for_reduce()

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        """Forget gradients of `zeroed` that are not in ``grad`` yet; that is zeroed next."""
        self.wait_for_reduce()
        self.used -= zeroed

    def add_to_grad(self, gradient: Tensor) -> None:
        """Add the finished gradient [S] of the shard to ``grad`` of the pieces."""
        gradient = gradient.to(self.shard)
        for p, span in zip(self.pieces, self.layout.spans, strict=True):
            if p.grad is None:
                p.grad = gradient[span].view_as(p)
                self.fresh.add(p)
            else:
                p.grad += gradient[span].view_as(p)

    def forget_unused(self, users: Tensor) -> None:
        """Take ``grad`` away, as on one device, where `users` [N] of all ranks are none."""
        unused = self.fresh - self.used  # by this rank; of the others it asks only if there are any
        by_others = look(users, on_meta=[0] * len(users)) if unused else ()
        for p, by_any in zip(self.pieces, by_others, strict=False):
            if p in unused and not by_any:
                p.grad = None
        self.used, self.fresh = set(), set()


@torch.no_grad()
def _initial(
    members: dict[nn.Parameter, str], layout: Layout, options: Options, axis: Axis
) -> Tensor:
    """Return this rank's shard [S] of the first weights."""
    if options.init is None or not next(iter(members)).is_meta:
        whole = F.pad(torch.cat([p.flatten() for p in members]), (0, layout.splits[-1]))
        shard = scatter(whole, axis)
        replicas = options.replicate_axis
        return shard if replicas is None else broadcast(shard, replicas)
    pieces = [
        options.init(name, tuple(p.shape)).to(p.dtype).flatten()[cut].clone()  # one is whole
        for i, ((p, name), cut) in enumerate(zip(members.items(), layout.cuts, strict=True))
        if cut.start < cut.stop or i == 0  # the first tells the device
    ]
    filled = torch.cat(pieces)
    return F.pad(filled, (0, layout.size - len(filled)))


def _version(t: Tensor) -> int:
    """How often `t` was written into; of what is made in inference_mode torch keeps no count."""
    with torch._C.DisableTorchFunctionSubclass():  # also where it is elsewhere
        return 0 if t.is_inference() else t._version


def _refuse_use(name: str, block: str) -> NoReturn:
    raise RuntimeError(
        f"fsdp: {name} belongs to block {block} and was used outside of its forward, where only a "
        f"piece of it is here; use it inside, or let blocks= name a module around both, or the "
        f"classes of the layers alone"
    )


def _refuse_replaced(name: str) -> NoReturn:
    raise RuntimeError(
        f"fsdp: {name} was replaced by a piece when fsdp.apply was called, and is used all the "
        f"same, as from a list of weights made before: it would never learn. Read weights from the "
        f"modules that have them"
    )


# ---------------------------------------------------------------------- 2. gradients that wait
class Hybrid(Flat):
    """Hybrid sharding: every rank of `replicate_axis` has a shard of the same weights.

    The gradients of all microbatches add up inside of each replica; the sums are all-reduced over
    the replicas once a step, during the backward that `is_last`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inside: Tensor | None = None  # [S], the sum over this replica's ranks
        self.is_last = True
        self.across: list[Pending] = []  # all-reduces of such sums, under way

    def reduce(self, flat: Tensor, is_last: bool = True) -> None:
        super().reduce(flat, is_last)
        self.is_last = is_last

    def accumulate(self, gradient: Tensor) -> None:
        self.inside = gradient if self.inside is None else self.inside.add_(gradient)
        if self.is_last:
            self._all_reduce()

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        super().drop(zeroed)
        self._arrive()
        for p, span in zip(self.pieces, self.layout.spans, strict=True):
            if self.inside is not None and p in zeroed:
                self.inside[span].zero_()

    def _all_reduce(self) -> None:
        """Start to sum over the replicas."""
        inside, self.inside = self.inside, None
        axis, op = self.options.replicate_axis, self.options.op
        self.across.append(all_reduce(inside, axis, op, out=inside, async_op=True))

    def finish(self) -> None:
        super().finish()
        if self.inside is not None:  # the last backward did not reach the block
            self._all_reduce()
        self._arrive()

    def _arrive(self) -> None:
        while self.across:
            self.home.store(self, self.across.pop(0).wait())


class Whole(Flat):
    """Under `no_sync`, gradients add up on each rank, unsent: fewer bytes, P more of memory."""

    changes_rows = True
    unsent: Tensor | None = None  # [n S]

    def reduce(self, flat: Tensor, is_last: bool = True) -> None:
        if self.unsent is not None:
            flat.add_(self.unsent)
        self.unsent = None if is_last else flat
        if is_last:
            super().reduce(flat)

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        super().drop(zeroed)
        if self.unsent is not None:
            for p, part in zip(self.pieces, self.unsent.split(self.layout.splits), strict=False):
                if p in zeroed:
                    part.zero_()

    def finish(self) -> None:
        if self.unsent is not None:  # the last backward did not reach the block
            unsent, self.unsent = self.unsent, None
            super().reduce(unsent)
        super().finish()


FLATS: dict[tuple[str, bool], type[Flat]] = {  # by `accumulate`, and whether there are replicas
    ("shards", False): Flat,
    ("shards", True): Hybrid,
    ("whole", False): Whole,
    ("whole", True): type("WholeHybrid", (Whole, Hybrid), {}),
}
