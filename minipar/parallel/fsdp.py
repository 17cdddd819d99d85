"""Fully sharded data parallelism (ZeRO-3): every rank keeps one n-th of every weight.

Idea.   A layer's weights are needed only while it computes. So a rank keeps one n-th of them, its
        *shard*; all ranks together gather the weights of one *block* just before it runs, free them
        after it, gather them again for its backward, and then reduce-scatter its gradients: each
        rank receives the gradient of its shard. The optimizer sees the shards alone.
Math.   That of `ddp`: with ``average=True`` g = (1/n) sum_r g_r, else the sum.
Shapes. A block's weights, flattened one after the other and padded: [n S] R@dp while it computes,
        [S] V@dp at rest; gradients [n S] P@dp -> [S] V@dp. A shard cuts through weights wherever it
        falls: to the optimizer, every parameter is the *piece* of it that lies on this rank, of k
        numbers: [k], or of a matrix [k, 1], so that ``p.ndim`` is that of the parameter. Right for
        optimizers that treat every number alike (SGD, Adam and their kin); others are refused at
        their first step.
Comms.  Bytes that a rank sends per step, for P bytes of weights, R of them outside of blocks and B
        in the last block, over M microbatches; N parameters:

          gather    (n-1)/n M (2 P - R - B)   R and B stay from forward to backward: see `stays`
          reduce    (n-1)/n M P               or (n-1)/n P with ``accumulate="whole"``
          used?     2 (n-1)/n (N + 8)         a byte per parameter: did any rank use it? And did
                                              all of them gather the same, in the same order?

        so 3 P as in the paper, less what stays; 2 P with ``reshard_after_forward=False``. P counts
        2 bytes per number where a 2-byte `compute_dtype` (gather) or `reduce_dtype` is set. The
        first step, in which the order of blocks is not known yet, gathers B once more. Frozen
        weights are gathered only. `replicate_axis` of m ranks: 2 (m-1)/m (P/n + N + 8) along it.
Memory. Bytes per rank: (P + G + O)/n for shards of weights, gradients and optimizer state (Adam:
        4 P/n); R + 2 B for gathered weights; and in backward R + 2 B of gradients: of the root,
        those that come into being, and those on their way, on a CPU with as much again, where
        slices arrive to be added up. With ``prefetch=k`` 1 + k blocks are gathered;
        ``accumulate="whole"`` adds P, ``reshard_after_forward=False`` all weights.
Costs you. Half as many bytes again as `ddp`, in many more calls. All ranks must run the same blocks
        in the same order, so they need as many microbatches, and no rank can evaluate alone: let
        all of them do it, or load `full_state_dict` into a model of one rank's own. A forward that
        ends in an exception leaves things in order; after a backward that did, call
        `finish_backward`, zero gradients.
Source. Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al. 2023, "PyTorch
        FSDP" (arXiv 2304.11277), sections 3 and 4 (with hybrid sharding in 3.2.2).
In torch: `torch.distributed.fsdp.fully_shard`.
Proved by tests/parallel/test_fsdp.py and tests/parity/test_fsdp.py.

Each idea further is a class of its own: `FullySharded` gathers and frees, `Prefetching` gathers
ahead; a `Hybrid` flat shard has replicas, a `Whole` one keeps gradients unsent under `no_sync`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from minipar.comm import memory
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
from minipar.parallel import guard
from minipar.parallel.blocks import Blocks, Slot, assign, find
from minipar.parallel.shards import FlatShards, Layout, mark

Init = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the first value
Reduce = Callable[[Tensor, Axis], tuple[Tensor, Tensor]]  # rows [n, S] -> sum [S], what was lost


def apply(
    model: nn.Module,
    axis: Axis,
    *,
    blocks: Blocks | None = None,
    reshard_after_forward: bool = True,
    replicate_axis: Axis | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    prefetch: int = 1,
    average: bool = True,
    accumulate: Literal["shards", "whole"] = "shards",
    reduce: Reduce | None = None,
    init: Init | None = None,
) -> "FullySharded":
    """Shard `model` (any `nn.Module`) along `axis`, in place; make the optimizer afterwards.

    Parameters keep names, ties and ``ndim``, and become pieces (`full_shape` and `shard_axes` say
    of what). Values are those of rank 0. Freeze what is to be frozen before. Whole weights come out
    of `full_state_dict`; ``model.state_dict()`` is refused, as it would be of this rank's pieces.

    Args:
        blocks: what is gathered together: classes, modules, or names of modules. By default the
            members of every `nn.ModuleList`, `nn.Sequential` and `nn.ModuleDict`, from the top
            down. What is outside of blocks, or shared between them, is gathered for the whole
            forward and backward. A block must be called (its `forward` runs) to be gathered.
        reshard_after_forward: free a block's weights between its forward and its backward.
        replicate_axis: hybrid sharding. Shard inside of `axis`, such as a node, and keep a copy
            of everything for each rank of this axis, over which gradients are all-reduced.
        compute_dtype: gather in this dtype, and cast floating point inputs of the blocks to it;
            shards stay as they are. In place of autocast, whose casts would keep all weights.
        reduce_dtype: send gradients in this dtype; by default that of computing.
        prefetch: how many blocks are gathered ahead of the one that computes.
        average: divide the sum of the gradients by the number of ranks.
        accumulate: where gradients wait under `no_sync`. In "shards": reduce-scattered after every
            microbatch, so that memory stays small. "whole": on each rank, unsent, P bytes.
        reduce: sums up gradients instead of a reduce-scatter, such as `Int8().reduce_scatter` of
            compression.py; what it leaves out is lost, and nothing of it is hidden.
        init: gives a model on the "meta" device its weights and buffers, ``init(name, shape)``,
            each alone and on every rank that holds a part of it.

    Raises `ValueError` for options that do not fit, for a model with sparse gradients, or one that
    a strategy trains already, before the first collective.
    """
    options = Options(
        axis, replicate_axis, compute_dtype, reduce_dtype, "avg" if average else "sum", reduce,
        accumulate, reshard_after_forward, prefetch,
    )  # fmt: skip
    _check(model, options, init)
    assigned = assign(model, find(model, blocks))
    guard.claim(model, "fsdp", axis)
    names = {module: name for name, module in model.named_modules()}
    units = [
        Unit(module, names[module] or "the root", slots, options, init)
        for module, slots in assigned.items()
    ]
    _replicate_buffers(model, options, init)
    return Prefetching(model, options, units)


@dataclass(frozen=True)
class Options:
    """The arguments of `apply`."""

    axis: Axis
    replicate_axis: Axis | None
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    op: Op
    reduce: Reduce | None
    accumulate: str
    reshard_after_forward: bool
    prefetch: int
    ledger: guard.Ledger = field(default_factory=guard.Ledger)

    @property
    def axes(self) -> list[Axis]:
        """Those along which something is sent."""
        return [a for a in (self.axis, self.replicate_axis) if a is not None and a.size > 1]


# ---------------------------------------------------------------------- 1. gather and free
class Flat:
    """Weights of one block and dtype in a row of n S numbers, of which this rank keeps its shard.

    `unshard` gathers the row before the block runs, `reshard` frees it, `reduce` sums its gradient
    over the ranks. The row and its views stay the same tensors, so that what autograd has saved of
    them stays right; only their memory comes and goes.
    """

    def __init__(
        self, members: dict[nn.Parameter, str], block: str, options: Options, init: Init | None
    ) -> None:
        self.options, self.block, self.home = options, block, Home()
        self.layout = Layout([p.numel() for p in members], options.axis)
        self.shard = self._initial(members, init)  # [S]
        spans = zip(members.items(), self.layout.spans, strict=True)
        self.parameters = [self._piece(p, name, span) for (p, name), span in spans]
        self.is_trainable = self.parameters[0].requires_grad
        dtype = options.compute_dtype or self.shard.dtype
        self.full = self.shard.new_empty(self.layout.total, dtype=dtype)  # [n S]
        parts = self.full.split(self.layout.splits)
        self.views = [part.view(p.shape) for part, p in zip(parts, members, strict=False)]
        self.gathering: Pending | None = None
        self.reducing: Pending | None = None
        self.used: set[nn.Parameter] = set()  # had a gradient here, in this step
        self.fresh: set[nn.Parameter] = set()  # had none before this step
        self.reshard()

    @torch.no_grad()
    def _initial(self, members: dict[nn.Parameter, str], init: Init | None) -> Tensor:
        """Return this rank's shard [S] of the first weights."""
        options, layout = self.options, self.layout
        if init is None or not next(iter(members)).is_meta:
            whole = F.pad(torch.cat([p.flatten() for p in members]), (0, layout.splits[-1]))
            shard = scatter(whole, options.axis)
            replicas = options.replicate_axis
            return shard if replicas is None else broadcast(shard, replicas)
        pieces = [
            init(name, tuple(p.shape)).to(p.dtype).flatten()[cut].clone()  # one is whole at a time
            for i, ((p, name), cut) in enumerate(zip(members.items(), layout.cuts, strict=True))
            if cut.start < cut.stop or i == 0  # the first tells the device
        ]
        filled = torch.cat(pieces)
        return F.pad(filled, (0, layout.size - len(filled)))

    def _piece(self, p: nn.Parameter, name: str, span: slice) -> nn.Parameter:
        """Return the parameter for the optimizer: what of `p` lies in the shard."""
        shape = -1, *(1 for _ in p.shape[1:])  # as many dimensions as `p`
        piece = nn.Parameter(self.shard[span].view(shape), p.requires_grad)
        vars(piece).update(vars(p))
        mark(piece, p, self.options.axis)
        piece.is_flat = True
        piece.on_use = partial(_refuse_use, name, self.block)
        p.stepped_elsewhere = (
            "fsdp has replaced the parameters of the model; make the optimizer after fsdp.apply"
        )
        return piece

    # weights
    @property
    def is_gathered(self) -> bool:
        """Whether the weights are here, or on their way."""
        return self.full.untyped_storage().nbytes() > 0

    def unshard(self) -> None:
        """Start to gather the weights, unless that was done."""
        if self.is_gathered or not self.full.numel():
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        memory.tag("gathered", self.full)
        self.options.ledger.note(f"gather {self.block}")
        shard, axis = self.home.fetch(self), self.options.axis
        # Through `.data`, or autograd would take the saved weights for modified ones.
        self.gathering = all_gather(shard, axis, out=self.full.data, async_op=True)

    def wait_for_unshard(self) -> None:
        """Return when the weights are here."""
        if self.gathering is not None:
            gathering, self.gathering = self.gathering, None
            try:
                gathering.wait()
            except RuntimeError as error:  # such as a time-out
                error.add_note(f"while gathering {self.block}. {guard.SAME_ORDER}")
                raise

    def reshard(self) -> None:
        """Free the memory of the gathered weights."""
        self.wait_for_unshard()
        self.full.untyped_storage().resize_(0)

    # gradients
    def flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Copy the gradients of all parameters into a row [n S]; zeros where there is none."""
        dtype = self.options.reduce_dtype or self.full.dtype
        flat = self.full.new_empty(self.full.numel(), dtype=dtype)
        memory.tag("gradients", flat)
        *parts, padding = flat.split(self.layout.splits)
        padding.zero_()
        for p, part, gradient in zip(self.parameters, parts, gradients, strict=True):
            if gradient is None:
                part.zero_()
            else:
                guard.check_gradient(p, gradient)
                part.view(gradient.shape).copy_(gradient)
                self.used.add(p)
        return flat

    def reduce(self, flat: Tensor, is_last: bool = True) -> None:
        """Start to reduce-scatter the gradients `flat` [n S]; `is_last`: not under `no_sync`."""
        options = self.options
        options.ledger.note(f"reduce {self.block}")
        if options.reduce is None:
            self.reducing = reduce_scatter(flat, options.axis, op=options.op, async_op=True)
        else:
            total, _ = options.reduce(flat.view(options.axis.size, -1), options.axis)
            factor = 1 / options.axis.size if options.op == "avg" else 1
            self.reducing = Pending(None, total * factor)

    def wait_for_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way; `accumulate` its result."""
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            self.accumulate(gradient)

    def accumulate(self, gradient: Tensor) -> None:
        """Add the reduced gradient [S] to ``grad`` of the parameters, where the shard lives."""
        self.home.store(self, gradient)

    def finish(self) -> None:
        """Complete the gradients of the step."""
        self.wait_for_reduce()

    def add_to_grad(self, gradient: Tensor) -> None:
        """Add the finished gradient [S] of the shard to ``grad`` of the parameters."""
        gradient = gradient.to(self.shard)
        for p, span in zip(self.parameters, self.layout.spans, strict=True):
            if p.grad is None:
                p.grad = gradient[span].view_as(p)
                self.fresh.add(p)
            else:
                p.grad += gradient[span].view_as(p)

    def forget_unused(self, users: Tensor) -> None:
        """Take ``grad`` away, as on one device, where `users` [N] of all ranks are none."""
        for p, by_any in zip(self.parameters, users, strict=False):
            # Looks at a value only where this rank has none; on "meta" all ranks are alike.
            if p in self.fresh and p not in self.used and (users.is_meta or not by_any):
                p.grad = None
        self.used, self.fresh = set(), set()

    def whole(self, shard: Tensor) -> list[Tensor]:
        """Gather `shard` [S] of all ranks, and cut it into tensors of the parameters' shapes."""
        row = all_gather(shard.to(self.full.device), self.options.axis)
        parts = row.split(self.layout.splits)
        return [part.view(v.shape).clone() for part, v in zip(parts, self.views, strict=False)]


class Home:
    """Where shards live: on the device that computes. Offload has another home for them."""

    def fetch(self, flat: Flat) -> Tensor:
        """Return the shard [S] as it is sent: on the device that computes, in its dtype."""
        return flat.shard.to(flat.full)

    def store(self, flat: Flat, gradient: Tensor) -> None:
        """Bring the finished gradient [S] to where the shard is; `Flat.add_to_grad`."""
        flat.add_to_grad(gradient)

    def finish(self) -> None:
        """Called after the last `store` of a step."""


class Unit:
    """A module, and the weights that are gathered when it runs: a block, or the root.

    Weights that differ in dtype, or of which some are frozen, are several `Flat`s.
    """

    def __init__(
        self, module: nn.Module, block: str, slots: list[Slot], options: Options, init: Init | None
    ) -> None:
        self.module = module
        kinds: dict[Any, dict[nn.Parameter, str]] = {}
        for _, _, name, p in slots:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), {}).setdefault(p, name)
        self.flats, pieces = [], {}
        for members in kinds.values():
            kind = FLATS[options.accumulate, options.replicate_axis is not None]
            self.flats.append(kind(members, block, options, init))
            pieces |= zip(members, self.flats[-1].parameters, strict=True)
        self.trainable = [flat for flat in self.flats if flat.is_trainable]
        self.parameters = [p for flat in self.flats for p in flat.parameters]
        place = {p: i for i, p in enumerate(self.parameters)}
        self.slots = [(owner, attribute, place[pieces[p]]) for owner, attribute, _, p in slots]
        self.unbind()

    @property
    def is_gathered(self) -> bool:
        """Whether its weights are here, or on their way."""
        return any(flat.is_gathered for flat in self.flats)

    def unshard(self) -> None:
        """Start to gather the weights."""
        for flat in self.flats:
            flat.unshard()

    def reshard(self) -> None:
        """Put the pieces back, and free the gathered weights."""
        self.unbind()
        for flat in self.flats:
            flat.reshard()

    def bind(self, after_backward: Callable) -> None:
        """Wait for the gathered weights, and put them in the place of the pieces."""
        for flat in self.flats:
            flat.wait_for_unshard()
        pieces = [p for flat in self.trainable for p in flat.parameters]
        entered = iter(_Enter.apply(self, after_backward, *pieces) if pieces else ())
        full = [next(entered) if f.is_trainable else view for f in self.flats for view in f.views]
        for owner, attribute, i in self.slots:
            owner._parameters[attribute] = full[i]

    def unbind(self) -> None:
        """Put the pieces back in the place of the gathered weights."""
        for owner, attribute, i in self.slots:
            owner._parameters[attribute] = self.parameters[i]


class _Enter(torch.autograd.Function):
    """Where weights enter the graph; its backward runs when all their gradients are there.

    Autograd runs newer nodes first. This node is older than every operation of the block, so its
    backward runs after all of theirs, frozen weights or not.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, after_backward: Callable, *pieces: Tensor) -> Any:
        ctx.unit, ctx.after_backward = unit, after_backward
        ctx.set_materialize_grads(False)  # None tells that a weight was not used
        return tuple(view.detach() for flat in unit.trainable for view in flat.views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.after_backward(ctx.unit, list(gradients))
        return None, None, *(None for _ in gradients)  # gradients go their own way


class FullySharded(FlatShards):
    """Hooks on every block: gather before it computes, free after, in forward and in backward."""

    def __init__(self, model: nn.Module, options: Options, units: list[Unit]) -> None:
        super().__init__(model, options.axis)
        self.shard_axes = (options.axis,)
        self.options = options
        self.root, *self.blocks = self.units = units
        self.flats = [flat for unit in units for flat in unit.flats]
        self.reducing: list[Flat] = []  # of the unit whose backward ended last
        guard.watch(self, [p for flat in self.flats for p in flat.parameters])
        for unit in units:
            # What hooks do is no part of a compiled graph: it breaks there.
            before = partial(torch.compiler.disable(type(self)._before_forward), self, unit)
            after = partial(torch.compiler.disable(type(self)._after_forward), self, unit)
            # Before all other hooks: they may compute with the weights, as weight_norm's does.
            unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(after, always_call=True)
        for module in model.modules():
            module.register_state_dict_pre_hook(_refuse_pieces)

    def _enter(self, unit: Unit, phase: str) -> None:
        """Gather the weights of `unit`, which is about to compute: "forward" or "backward"."""
        unit.unshard()
        with torch.enable_grad() if phase == "backward" else nullcontext():
            unit.bind(self._after_backward)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        recomputes = _in_backward()
        if unit is self.root and not recomputes:
            self.options.ledger.check()
            self.release()  # nothing that was gathered before the last optimizer step
            for block in self.blocks:
                guard.leave(block.parameters)
        self._enter(unit, "backward" if recomputes else "forward")
        if self.options.compute_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        if unit.flats and not unit.trainable and torch.is_grad_enabled():
            # No weight of it enters the graph: its backward ends with the gradients of its inputs.
            inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
            register_multi_grad_hook(inputs, lambda _: unit.reshard())
        return args, kwargs

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if unit is self.root and not _in_backward():
            for block in self.blocks:
                guard.come_back(block.parameters)
        tensors = list(_tensors(output)) if torch.is_grad_enabled() else []
        nodes = {t.grad_fn for t in tensors} - {None}
        for node in nodes:
            node.register_prehook(lambda _: self._enter(unit, "backward"))
        if _in_backward():
            return  # recomputed: its backward comes next
        unit.unbind()
        # An output in which we find no tensor tells no hook when its backward begins.
        opaque = torch.is_grad_enabled() and output is not None and not tensors
        if not (opaque or (nodes and self.stays(unit))):
            unit.reshard()

    def stays(self, unit: Unit) -> bool:
        """Whether the weights of `unit` stay gathered between its forward and its backward.

        The root is needed until the end of forward, and from the beginning of backward.
        """
        return not self.options.reshard_after_forward or unit is self.root

    def _after_backward(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        """Reduce the gradients of all weights of `unit`, which are complete; free the weights."""
        self.is_finished = False
        unit.reshard()
        for flat in self.reducing:  # gradients of one unit at a time are on their way
            flat.wait_for_reduce()
        self.reducing = unit.trainable
        for flat in unit.trainable:
            own, gradients = gradients[: len(flat.views)], gradients[len(flat.views) :]
            flat.reduce(flat.flatten(own), is_last=self.synchronises)

    @torch.no_grad()
    def finish_backward(self) -> None:
        super().finish_backward()
        trainable = [flat for flat in self.flats if flat.is_trainable]
        used = [p in flat.used for flat in trainable for p in flat.parameters]
        used += self.options.ledger.close()
        users = torch.tensor(used, dtype=torch.uint8).to(self.flats[0].full.device)
        for axis in self.options.axes:  # queues behind the last gradients: one wait for both
            all_reduce(users, axis, "max", out=users)
        for flat in trainable:
            flat.finish()
            flat.forget_unused(users[: len(flat.views)])
            users = users[len(flat.views) :]
        self.reducing = []
        self.flats[0].home.finish()
        self.release()
        self.options.ledger.tell(users)

    def release(self) -> None:
        """Free all weights that are gathered."""
        for unit in self.units:
            unit.reshard()

    @property
    def gathered_bytes(self) -> int:
        """Memory of gathered weights on this rank now."""
        return sum(flat.full.untyped_storage().nbytes() for flat in self.flats)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.options.compute_dtype) if is_float else value

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise TypeError("a sharded model cannot be copied: its hooks would gather for two models")


# ---------------------------------------------------------------------- 2. gather ahead
class Prefetching(FullySharded):
    """While a block computes, the next is gathered, in the order that the model shows as it runs.

    The order may change from step to step; it must be the same on all ranks.
    """

    def __init__(self, model: nn.Module, options: Options, units: list[Unit]) -> None:
        super().__init__(model, options, units)
        self.follows: dict[str, dict[Unit, Unit | None]] = {"forward": {}, "backward": {}}
        self.latest: dict[str, Unit | None] = {"forward": None, "backward": None}

    def _enter(self, unit: Unit, phase: str) -> None:
        before, self.latest[phase] = self.latest[phase], unit
        if before is not None and before is not unit:
            self.follows[phase][before] = unit
        unit.unshard()
        prefetch, ahead = self.options.prefetch, unit
        for _ in range(1 + prefetch if prefetch else 0):  # the root may be among them
            ahead = self.follows[phase].get(ahead)
            is_full = sum(block.is_gathered for block in self.blocks) > prefetch
            if ahead is None or (is_full and self.options.reshard_after_forward):
                break
            ahead.unshard()
        super()._enter(unit, phase)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        super()._after_forward(unit, module, args, output)
        if unit is self.root and not _in_backward() and output is not None:  # None: an exception
            self.follows["forward"][self.latest["forward"]] = None

    def stays(self, unit: Unit) -> bool:
        """As before; and the last block of forward, which backward needs first."""
        return super().stays(unit) or self.follows["forward"].get(unit, unit) is None

    def release(self) -> None:
        super().release()  # and what runs next does not follow on what ran
        self.latest = {"forward": None, "backward": None}


# ---------------------------------------------------------------------- 3. gradients that wait
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

    def _all_reduce(self) -> None:
        """Start to sum over the replicas."""
        inside, self.inside = self.inside, None
        axis, op = self.options.replicate_axis, self.options.op
        self.across.append(all_reduce(inside, axis, op, out=inside, async_op=True))

    def finish(self) -> None:
        super().finish()
        if self.inside is not None:  # the last backward did not reach the block
            self._all_reduce()
        while self.across:
            self.home.store(self, self.across.pop(0).wait())


class Whole(Flat):
    """Under `no_sync`, gradients add up on each rank, unsent: fewer bytes, P more of memory."""

    unsent: Tensor | None = None  # [n S]

    def reduce(self, flat: Tensor, is_last: bool = True) -> None:
        if self.unsent is not None:
            flat.add_(self.unsent)
        self.unsent = None if is_last else flat
        if is_last:
            super().reduce(flat)

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


# ---------------------------------------------------------------------- helpers
def _replicate_buffers(model: nn.Module, options: Options, init: Init | None) -> None:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if init is not None and buffer.is_meta:
                full_name = f"{path}.{name}" if path else name
                module._buffers[name] = init(full_name, tuple(buffer.shape)).to(buffer.dtype)
            else:
                for axis in options.axes:
                    broadcast(buffer.data, axis, out=buffer.data)


def _check(model: nn.Module, options: Options, init: Init | None) -> None:
    axis, other = options.axis, options.replicate_axis
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameter: there is nothing to shard")
    if other is not None and set(other.ranks) & set(axis.ranks) != {axis.ranks[axis.rank]}:
        raise ValueError(
            f"replicate_axis {other.name} and axis {axis.name} must cross each other; "
            f"use two axes of one mesh, such as Mesh(replica=2, dp=2)"
        )
    for name in ("compute_dtype", "reduce_dtype"):
        dtype = getattr(options, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name}={dtype} is no float; use bfloat16, float16 or float32")
    if options.prefetch < 0:
        raise ValueError(f"prefetch={options.prefetch} must be 0 or more blocks; 1 is usual")
    if options.accumulate not in ("shards", "whole"):
        raise ValueError(f"accumulate={options.accumulate!r} is unknown; use 'shards' or 'whole'")
    if init is not None and not any(p.is_meta for p in parameters):
        raise ValueError("init= is for models on the 'meta' device; this one has its weights")


def _refuse_use(name: str, block: str) -> NoReturn:
    raise RuntimeError(
        f"fsdp: {name} belongs to block {block} and was used outside of its forward, where only a "
        f"piece of it is here; use it inside, or let blocks= name a module around both"
    )


def _refuse_pieces(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # which asks for the parameters themselves
        raise RuntimeError(
            "under fsdp, state_dict() would hold this rank's pieces: call full_state_dict() of the "
            "strategy on all ranks for whole weights, load_full_state_dict() to load them"
        )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
