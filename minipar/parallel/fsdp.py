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

Three parts: a flat shard and its collectives, the blocks that use them, and who goes when.
"""

import itertools
import math
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
from minipar.parallel.optimizer_state import pack, unpack
from minipar.parallel.strategy import Strategy

Blocks = Sequence[type[nn.Module] | nn.Module | str]
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
        axis,
        replicate_axis,
        compute_dtype,
        reduce_dtype,
        "avg" if average else "sum",
        reduce,
        accumulate,
        reshard_after_forward,
        prefetch,
    )
    _check(model, options, init)
    assigned = _assign(model, _find_blocks(model, blocks))
    guard.claim(model, "fsdp", axis)
    names = {module: name for name, module in model.named_modules()}
    units = [
        Unit(module, names[module] or "the root", slots, options, init)
        for module, slots in assigned.items()
    ]
    _replicate_buffers(model, options, init)
    return FullySharded(model, options, units)


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


# ---------------------------------------------------------------------- 1. a flat shard
class Flat:
    """Weights in one buffer of n S numbers, of which this rank keeps S; all of one dtype.

    The buffer and its views stay the same tensors, so that what autograd has saved of them stays
    right; only their memory comes and goes. `parameters` are this rank's pieces, views of `shard`.
    """

    def __init__(
        self, members: dict[nn.Parameter, str], block: str, options: Options, init: Init | None
    ) -> None:
        self.options, self.block, axis = options, block, options.axis
        numels = [p.numel() for p in members]
        size = math.ceil(sum(numels) / axis.size)  # S
        self.splits = [*numels, axis.size * size - sum(numels)]  # and the padding
        self.spans, self.cuts = [], []  # of each parameter: its part of the shard, and vice versa
        place = -axis.rank * size  # where it begins, as seen from the shard
        for numel in numels:
            start, end = (min(max(at, 0), size) for at in (place, place + numel))
            self.spans.append(slice(start, end))
            self.cuts.append(slice(start - place, end - place) if start < end else slice(0, 0))
            place += numel
        self.shard = self._initial(members, init)  # [S]
        self.parameters = []
        for (p, name), span in zip(members.items(), self.spans, strict=True):
            shape = (
                -1,
                *(1 for _ in p.shape[1:]),
            )  # as many dimensions as `p`
            piece = nn.Parameter(self.shard[span].view(shape), p.requires_grad)
            vars(piece).update(vars(p))
            piece.full_shape = getattr(p, "full_shape", p.shape)
            piece.shard_axes = (*getattr(p, "shard_axes", ()), axis)
            piece.is_flat = True
            piece.on_use = partial(_refuse_use, name, block)
            p.stepped_elsewhere = (
                "fsdp has replaced the parameters of the model; make the optimizer after fsdp.apply"
            )
            self.parameters.append(piece)
        self.is_trainable = self.parameters[0].requires_grad
        dtype = options.compute_dtype or self.shard.dtype
        self.full = self.shard.new_empty(axis.size * size, dtype=dtype)
        parts = self.full.split(self.splits)
        self.views = [part.view(p.shape) for part, p in zip(parts, members, strict=False)]
        self.gathering: Pending | None = None
        self.unsent: Tensor | None = None  # [n S] gradients held back
        self.reducing: Pending | None = None
        self.partial: Tensor | None = None  # [S] gradients that other replicas have not seen yet
        self.crossing: list[Pending] = []
        self.crosses = True
        self.used: set[int] = set()  # parameters that have had a gradient here, in this step
        self.fresh: set[int] = set()  # parameters whose ``grad`` was None before this step
        self.free()

    @torch.no_grad()
    def _initial(self, members: dict[nn.Parameter, str], init: Init | None) -> Tensor:
        """Return this rank's shard [S] of the first weights."""
        options, size = self.options, sum(self.splits) // self.options.axis.size
        if init is None or not next(iter(members)).is_meta:
            whole = F.pad(torch.cat([p.flatten() for p in members]), (0, self.splits[-1]))
            shard = scatter(whole, options.axis)
            replicas = options.replicate_axis
            return shard if replicas is None else broadcast(shard, replicas)
        pieces = [
            init(name, tuple(p.shape)).to(p.dtype).flatten()[cut].clone()  # one is whole at a time
            for i, ((p, name), cut) in enumerate(zip(members.items(), self.cuts, strict=True))
            if cut.start < cut.stop or i == 0  # the first tells the device
        ]
        filled = torch.cat(pieces)
        return F.pad(filled, (0, size - len(filled)))

    # Where a shard lives, and how it comes and goes: with these two, it could live elsewhere.
    def fetch(self) -> Tensor:
        """Return the shard [S] as it is sent: on the device that computes, in its dtype."""
        return self.shard.to(self.full)

    def store(self, gradient: Tensor) -> None:
        """Add the finished gradient of the shard [S] to ``grad`` of the parameters."""
        gradient = gradient.to(self.shard)
        for i, (p, span) in enumerate(zip(self.parameters, self.spans, strict=True)):
            if p.grad is None:
                p.grad = gradient[span].view_as(p)
                self.fresh.add(i)
            else:
                p.grad += gradient[span].view_as(p)

    # weights
    @property
    def is_gathered(self) -> bool:
        """Whether the weights are here, or on their way."""
        return self.full.untyped_storage().nbytes() > 0

    def launch(self) -> None:
        """Start to gather, unless that was done."""
        if self.is_gathered or not self.full.numel():
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        memory.tag("gathered", self.full)
        self.options.ledger.note(f"gather {self.block}")
        # Through `.data`, or autograd would take the saved weights for modified ones.
        self.gathering = all_gather(
            self.fetch(), self.options.axis, out=self.full.data, async_op=True
        )

    def wait(self) -> None:
        """Return when the weights are here."""
        if self.gathering is not None:
            gathering, self.gathering = self.gathering, None
            try:
                gathering.wait()
            except RuntimeError as error:  # such as a time-out
                error.add_note(f"while gathering {self.block}. {guard.SAME_ORDER}")
                raise

    def free(self) -> None:
        """Give the memory of the weights back."""
        self.wait()
        self.full.untyped_storage().resize_(0)

    # gradients
    def reduce(self, gradients: Sequence[Tensor | None], synchronise: bool = True) -> None:
        """Start to reduce-scatter the gradients of this rank, one per parameter or None.

        Unless `synchronise`: then they are kept for the next call, or, with "shards", reduced but
        not shown to the replicas yet.
        """
        options, flat = self.options, self._flatten(gradients)
        if self.unsent is not None:
            flat, self.unsent = flat.add_(self.unsent), None
        self.crosses = synchronise
        if options.accumulate == "whole" and not synchronise:
            self.unsent = flat
            return
        options.ledger.note(f"reduce {self.block}")
        if options.reduce is None:
            self.reducing = reduce_scatter(flat, options.axis, op=options.op, async_op=True)
        else:
            total, _ = options.reduce(flat.view(options.axis.size, -1), options.axis)
            factor = 1 / options.axis.size if options.op == "avg" else 1
            self.reducing = Pending(None, total * factor)

    def _flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """One after the other, [n S]; zeros where there is none."""
        dtype = self.options.reduce_dtype or self.full.dtype
        flat = self.full.new_empty(self.full.numel(), dtype=dtype)
        memory.tag("gradients", flat)
        *parts, padding = flat.split(self.splits)
        padding.zero_()
        for i, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
            if gradient is None:
                part.zero_()
            else:
                guard.check_gradient(self.parameters[i], gradient)
                part.view(gradient.shape).copy_(gradient)
                self.used.add(i)
        return flat

    def settle(self) -> None:
        """Wait for `reduce`, if one is under way; with replicas, start to sum over these."""
        axis, op = self.options.replicate_axis, self.options.op
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            if axis is None:
                return self.store(gradient)
            self.partial = gradient if self.partial is None else self.partial.add_(gradient)
        if self.crosses and self.partial is not None:
            partial, self.partial = self.partial, None
            self.crossing.append(all_reduce(partial, axis, op, out=partial, async_op=True))

    def finish(self) -> None:
        """Complete all that is under way, or was kept."""
        self.crosses = True
        self.settle()
        if self.unsent is not None:
            self.reduce([None] * len(self.parameters))
            self.settle()
        while self.crossing:
            self.store(self.crossing.pop(0).wait())

    def forget_unused(self, users: Tensor) -> None:
        """Take ``grad`` away, as on one device, where `users` [N] of all ranks are none."""
        for i in self.fresh - self.used:
            # Looks at a value only where this rank has none; on "meta" all ranks are alike.
            if users.is_meta or not users[i]:
                self.parameters[i].grad = None
        self.used, self.fresh = set(), set()

    def whole(self, shards: Tensor) -> list[Tensor]:
        """Gather the [S] of all ranks, and cut it into tensors of the parameters' shapes."""
        *parts, _ = all_gather(shards, self.options.axis).split(self.splits)
        return [part.view(v.shape).clone() for part, v in zip(parts, self.views, strict=True)]


# ---------------------------------------------------------------------- 2. a block that uses it
Slot = tuple[nn.Module, str, str, nn.Parameter]  # a module's attribute, its name, what it holds


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
            self.flats.append(Flat(members, block, options, init))
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

    def launch(self) -> None:
        """Start to gather."""
        for flat in self.flats:
            flat.launch()

    def bind(self, after_backward: Callable) -> None:
        """Put the gathered weights in the place of the pieces."""
        for flat in self.flats:
            flat.wait()
        pieces = [p for flat in self.trainable for p in flat.parameters]
        entered = iter(_Enter.apply(self, after_backward, *pieces) if pieces else ())
        full = [next(entered) if f.is_trainable else view for f in self.flats for view in f.views]
        for owner, attribute, i in self.slots:
            owner._parameters[attribute] = full[i]

    def unbind(self) -> None:
        """Put the pieces back."""
        for owner, attribute, i in self.slots:
            owner._parameters[attribute] = self.parameters[i]

    def free(self) -> None:
        """Let go of the gathered weights."""
        self.unbind()
        for flat in self.flats:
            flat.free()


class _Enter(torch.autograd.Function):
    """Where weights enter the graph; its backward runs when all their gradients are there.

    And last of its block, frozen weights or not: autograd prefers what forward did later.
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


# ---------------------------------------------------------------------- 3. who goes when
class FullySharded(Strategy):
    """Hooks on every block, and the order in which they run: learned as they do.

    Whoever enters a block has the next one gathered meanwhile, in forward and in backward. The
    order may change from step to step; it must be the same on all ranks.
    """

    def __init__(self, model: nn.Module, options: Options, units: list[Unit]) -> None:
        super().__init__(model, options.axis)
        self.shard_axes = (options.axis,)
        self.options = options
        self.root, *self.blocks = self.units = units
        self.flats = [flat for unit in units for flat in unit.flats]
        self.follows: dict[str, dict[Unit, Unit | None]] = {"forward": {}, "backward": {}}
        self.latest: dict[str, Unit | None] = {"forward": None, "backward": None}
        self.reducing: list[Flat] = []
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
        """`unit` is about to compute: its weights must be here, those of the next on their way."""
        before, self.latest[phase] = self.latest[phase], unit
        if before is not None and before is not unit:
            self.follows[phase][before] = unit
        unit.launch()
        prefetch, ahead = self.options.prefetch, unit
        for _ in range(1 + prefetch if prefetch else 0):
            ahead = self.follows[phase].get(ahead)
            is_full = sum(block.is_gathered for block in self.blocks) > prefetch
            if ahead is None or (is_full and self.options.reshard_after_forward):
                break
            ahead.launch()
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
            # Nothing of it enters the graph; when its inputs have their gradients, it is over.
            inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
            register_multi_grad_hook(inputs, lambda _: unit.free())
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
        # Where we cannot look into the output, no hook will tell when its backward begins.
        opaque = torch.is_grad_enabled() and output is not None and not tensors
        if not (opaque or (nodes and self.stays(unit))):
            unit.free()
        if unit is self.root and output is not None:  # None: an exception
            self.follows["forward"][self.latest["forward"]] = None

    def stays(self, unit: Unit) -> bool:
        """Whether `unit` is not freed between forward and backward.

        The root is needed until the end of forward, and from the beginning of backward; the last
        block is the first to be needed again.
        """
        is_last = self.follows["forward"].get(unit, unit) is None
        return not self.options.reshard_after_forward or unit is self.root or is_last

    def _after_backward(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        """All gradients of the weights of `unit` are there."""
        self.is_finished = False
        unit.free()
        for flat in self.reducing:  # those of one block at a time are on their way
            flat.settle()
        self.reducing = unit.trainable
        for flat in unit.trainable:
            own, gradients = gradients[: len(flat.views)], gradients[len(flat.views) :]
            flat.reduce(own, self.synchronises)

    @torch.no_grad()
    def finish_backward(self) -> None:
        super().finish_backward()
        trainable = [flat for flat in self.flats if flat.is_trainable]
        used = [i in flat.used for flat in trainable for i in range(len(flat.views))]
        used += self.options.ledger.close()
        users = torch.tensor(used, dtype=torch.uint8).to(self.flats[0].full.device)
        for axis in self.options.axes:  # queues behind the last gradients: one wait for both
            all_reduce(users, axis, "max", out=users)
        for flat in trainable:
            flat.finish()
            flat.forget_unused(users[: len(flat.views)])
            users = users[len(flat.views) :]
        self.reducing = []
        self.release()
        self.options.ledger.tell(users)

    def release(self) -> None:
        """Free all weights that are gathered. What comes next does not follow on what was."""
        for unit in self.units:
            unit.free()
        self.latest = {"forward": None, "backward": None}

    @property
    def gathered_bytes(self) -> int:
        """Memory of gathered weights on this rank now."""
        return sum(flat.full.untyped_storage().nbytes() for flat in self.flats)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.options.compute_dtype) if is_float else value

    # whole tensors, out and in
    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        state = self.model.state_dict(keep_vars=True)
        copies: dict[Tensor, Tensor] = {}
        for flat in self.flats:
            copies |= zip(flat.parameters, flat.whole(flat.shard), strict=True)
        copies |= {t: t.detach().clone() for t in state.values() if t not in copies}
        return {name: copies[t] for name, t in state.items()}

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return gradients by name, shaped as in the serial model; all ranks call it."""
        whole: dict[Tensor, Tensor | None] = {}
        for flat in self.flats:
            shard = torch.zeros_like(flat.shard)
            for p, span in zip(flat.parameters, flat.spans, strict=True):
                if p.grad is not None:
                    shard[span] = p.grad.flatten()
            for p, gradient in zip(flat.parameters, flat.whole(shard), strict=True):
                whole[p] = None if p.grad is None else gradient
        return {name: whole[p] for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's pieces, and the buffers, out of what `full_state_dict` returned.

        Raises `ValueError` when names or shapes are not those of the model.
        """
        own = self.model.state_dict(keep_vars=True)
        shapes = {
            p: v.shape for f in self.flats for p, v in zip(f.parameters, f.views, strict=True)
        }
        ours = {(name, tuple(shapes.get(t, t.shape))) for name, t in own.items()}
        theirs = {(name, tuple(t.shape)) for name, t in state.items()}
        if ours != theirs:
            raise ValueError(
                f"the state is of another model: here {sorted(ours - theirs)}, "
                f"there {sorted(theirs - ours)}"
            )
        cuts = {p: c for f in self.flats for p, c in zip(f.parameters, f.cuts, strict=True)}
        for name, t in own.items():
            t.copy_(_cut(state[name], cuts[t], t) if t in cuts else state[name])

    @torch.no_grad()
    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer`, made of the pieces, as on one device, on the CPU.

        For any number of ranks, and for an optimizer of a serial model; "param_names" say what is
        whose. All ranks call it.
        """
        state, labels = optimizer.state_dict(), self._labels(optimizer)
        whole = {label: dict(entries) for label, entries in unpack(state, labels).items()}
        label_of = dict(zip(_members(optimizer), itertools.chain(*labels), strict=True))
        for flat in self.flats:
            states = {p: optimizer.state[p] for p in flat.parameters if p in optimizer.state}
            for key, like in next(iter(states.values()), {}).items():
                if not _is_elementwise(key, like):
                    continue
                shard = flat.shard.new_zeros(flat.shard.shape, dtype=like.dtype)
                for p, span in zip(flat.parameters, flat.spans, strict=True):
                    if p in states:
                        shard[span] = states[p][key].flatten()
                for p, tensor in zip(flat.parameters, flat.whole(shard), strict=True):
                    if p in states:
                        whole[label_of[p]][key] = tensor.cpu()
        return pack(whole, labels, state["param_groups"])

    def _labels(self, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
        """Names of its parameters, by groups; a number for what is not of this model."""
        names = {p: name for name, p in self.model.named_parameters()}
        count = itertools.count()
        return [
            [names.get(p, i) for p, i in zip(group["params"], count, strict=False)]
            for group in optimizer.param_groups
        ]

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Take this rank's pieces out of what `full_optimizer_state` returned, paired by name.

        Raises `ValueError` for the state of other parameters.
        """
        cuts = {p: c for f in self.flats for p, c in zip(f.parameters, f.cuts, strict=True)}
        labels, pieces = self._labels(optimizer), {}
        members = dict(zip(itertools.chain(*labels), _members(optimizer), strict=True))
        for label, entries in unpack(state, labels).items():
            p = members[label]
            pieces[label] = {
                key: _cut(value, cuts[p], p) if p in cuts and _is_elementwise(key, value) else value
                for key, value in entries.items()
            }
        optimizer.load_state_dict(pack(pieces, labels, state["param_groups"], named=False))

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise TypeError("a sharded model cannot be copied: its hooks would gather for two models")


# ---------------------------------------------------------------------- which weights, which block
def _find_blocks(model: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the modules that `blocks` means, see `apply`."""
    if blocks is None:
        return list(_members_of_lists(model))
    found: dict[nn.Module, None] = {}
    named = dict(model.named_modules())
    for item in blocks:  # a class means itself: a subclass may never be called, as in attention
        meant = [m for name, m in named.items() if item in (name, type(m)) or m is item]
        if not meant:
            raise ValueError(f"blocks: the model has no {item!r}; it has {list(named)[1:9]}")
        found |= dict.fromkeys(meant)
    return [module for module in found if module is not model]


def _members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for child in module.children():
        if not is_list:
            yield from _members_of_lists(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _assign(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list[Slot]]:
    """Give every parameter to the innermost block around it; what several share, to the root."""
    paths = dict(model.named_modules(remove_duplicate=False))
    home: dict[nn.Parameter, set[nn.Module]] = {}
    slots: dict[tuple[nn.Module, str], Slot] = {}
    for path, owner in paths.items():
        parents = [path.rsplit(".", i)[0] for i in range(path.count(".") + 1)] if path else []
        inside = next((paths[p] for p in parents if paths[p] in blocks), model)
        for attribute, p in owner._parameters.items():
            if p is not None:
                home.setdefault(p, set()).add(inside)
                name = f"{path}.{attribute}" if path else attribute
                slots.setdefault((owner, attribute), (owner, attribute, name, p))
    found: dict[nn.Module, list[Slot]] = {module: [] for module in (model, *blocks)}
    for slot in slots.values():
        homes = home[slot[-1]]
        found[next(iter(homes)) if len(homes) == 1 else model].append(slot)
    return {module: slots for module, slots in found.items() if slots or module is model}


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


def _members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All that it steps, in the order by which its `state_dict` numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _cut(whole: Tensor, cut: slice, like: Tensor) -> Tensor:
    return whole.flatten()[cut].view_as(like).clone()  # not a view, which would keep the whole


def _is_elementwise(key: str, value: Any) -> bool:
    """Whether an entry of the state of a parameter has a number for each of its numbers."""
    return isinstance(value, Tensor) and key != "step"


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
