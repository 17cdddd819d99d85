"""Fully sharded data parallelism (ZeRO-3): every rank keeps one n-th of every weight.

Idea.   A layer's weights are needed only while the layer computes. So a rank keeps one n-th of
        them, its *shard*. All ranks together gather the weights of one *block* just before the
        block runs, free them after it, and gather them again for its backward. Then they
        reduce-scatter its gradients: each rank receives the gradient of its own shard. The
        optimizer sees shards alone.
Math.   That of `ddp`: with ``average=True`` g = (1/n) sum_r g_r, else the sum.
Shapes. A block's weights lie one after the other in a *flat buffer*, padded to n S numbers: [n S]
        R@dp while the block computes, [S] V@dp at rest; gradients [n S] P@dp -> [S] V@dp. To the
        optimizer, a parameter is the k numbers of it that lie in this rank's shard: [k], or of a
        matrix [k, 1], so that ``p.ndim`` is kept. Right for optimizers that treat every number
        alike (SGD, Adam and their kin).
Comms.  Bytes that a rank sends per step, for P bytes of weights, R of them outside of blocks, B in
        the last block and E in look-ups, over M microbatches; N parameters:

          gather    (n-1)/n M (2 P - R - B - E)   R and B stay from forward to backward: see
                                                  `stays`; a look-up's gradient needs no weights
          reduce    (n-1)/n M P
          used?     2 (n-1)/n N                   a byte per parameter: did any rank use it?

        So 3 P as in the paper, less what stays; 2 P with ``reshard_after_forward=False``. An
        embedding that is also the head counts twice. P counts 2 bytes per number where a 2-byte
        `compute_dtype` (gather) or `reduce_dtype` is set. The first step does not know yet which
        block is last, and gathers B once more. Frozen weights are gathered only. With a
        `replicate_axis` of m ranks: 2 (m-1)/m (P/n + N) along it.
Memory. Bytes per rank: (P + G + O)/n for shards of weights, gradients and optimizer state (Adam:
        4 P/n); R + 2 B for gathered weights; in backward R + 2 B of gradients: those of the root,
        of the block that computes, and of the block that is being reduced. ``prefetch=k`` gathers
        1 + k blocks at a time; ``reshard_after_forward=False`` keeps all weights.
Costs you. Half as many bytes again as `ddp`, in many more calls. All ranks must run the same blocks
        in the same order: as many microbatches each, and evaluation on all ranks. Weights are whole
        inside of forward alone: write a penalty on weights as a part of forward. After an error in
        backward, call `finish_backward` and zero gradients.
Source. Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al. 2023, "PyTorch
        FSDP" (arXiv 2304.11277), sections 3 and 4 (with hybrid sharding in 3.2.2).
In torch: `torch.distributed.fsdp.fully_shard`, whose names for the phases are used here.
Proved by tests/parallel/test_fsdp.py and tests/law/test_law.py.

Two versions say *when* weights come and go: `FullySharded` gathers and frees, `Prefetching` gathers
ahead. A `Unit` is a block and its weights. A `Flat` is a flat buffer and its collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

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
from minipar.observe import memory
from minipar.observe.recorder import in_backward
from minipar.parallel.base.replicate import broadcast_all
from minipar.parallel.base.shards import Layout, Row, copies_axis
from minipar.parallel.base.strategy import Strategy, claim, flags, refuse_state, share_counts

Blocks = Sequence[type[nn.Module] | nn.Module]
Slot = tuple[nn.Module, str, nn.Parameter]  # a module, an attribute of it, the parameter there
Init = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the first value


def apply(
    model: nn.Module,
    axis: Axis,
    *,
    blocks: Blocks | None = None,
    forward_methods: Sequence[str] = (),
    **options: Any,
) -> "FullySharded":
    """Shard `model` along `axis`, in place; make the optimizer afterwards.

    Parameters keep names, ties and ``ndim``, and become shards. Values are those of rank 0. Whole
    weights come out of `full_state_dict`, and go in by `load_full_state_dict`.

    Args:
        blocks: modules that are gathered one by one, or their classes. By default the members of
            every `nn.ModuleList`, `nn.Sequential` and `nn.ModuleDict`, from the top down; and each
            `nn.Embedding` and `nn.Linear` beside them that is as large. A block returns a tensor,
            or tensors and None in tuples and lists. Weights outside of blocks are gathered for the
            whole forward and backward.
        forward_methods: methods of `model` that run blocks, beside `forward`: ("encode",).
        options: fields of `Options`.

    Raises `ValueError` for options that do not fit, for a model with sparse gradients or hooks on
    gradients, or one that a strategy trains already, before the first collective.
    """
    how = Options(axis, **options)
    how.check(model)
    assigned = assign(model, find_blocks(model, blocks))
    check_hooks(model)
    claim(model, "fsdp", axis)
    before, units = list(model.parameters()), make_units(model, assigned, how)
    replicate_buffers(model, how)
    share_counts(model, *how.axes)
    strategy = Prefetching(model, how, units, forward_methods)
    strategy.replaced(before)
    return strategy


# ---------------------------------------------------------------------- 1. gather and free
class FullySharded(Strategy):
    """Hooks on every block: gather before the block computes, free after, forward and backward."""

    def __init__(
        self,
        model: nn.Module,
        options: "Options",
        units: list["Unit"],
        forward_methods: Sequence[str],
    ) -> None:
        super().__init__(model, options.axis)
        self.shard_axes, self.options = (options.axis,), options
        self.root, *self.blocks = self.units = units
        self.rows = self.flats = list(dict.fromkeys(flat for unit in units for flat in unit.flats))
        self.reducing: list[Flat] = []  # the flat buffers of the unit whose backward ended last
        self.in_forward = False
        self.watch(p for flat in self.flats for p in flat.pieces)
        refuse_state(model)
        for unit in units:  # what hooks do is not compiled: torch.compile breaks its graph there
            before = partial(torch.compiler.disable(type(self).pre_forward), self, unit)
            after = partial(torch.compiler.disable(type(self).post_forward), self, unit)
            # First of all hooks: others may compute with the weights, and keep the output.
            unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(after, prepend=True)
        for name in forward_methods:
            setattr(model, name, self.as_forward(getattr(model, name)))

    def unshard(self, unit: "Unit", phase: str) -> None:
        """Start to gather the weights of `unit`, which computes next: "forward" or "backward"."""
        for flat in unit.flats:
            flat.unshard()

    def pre_forward(self, unit: "Unit", module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the weights of `unit`, and put them into its modules."""
        recomputes = in_backward()  # a checkpoint around the block
        if unit is self.root and not recomputes:
            self.release()  # weights that were gathered before the last optimizer step
            self.in_forward = True
        if not (self.in_forward or recomputes):
            raise RuntimeError(
                f"fsdp: block {unit.name} was called outside of the model's forward; call the "
                f"model, or name the method of the model that calls the block, as in "
                f'fsdp.apply(model, axis, forward_methods=("encode",))'
            )
        self.unshard(unit, "backward" if recomputes else "forward")
        unit.bind(refuse_reentrant if recomputes else partial(self.post_backward, unit))
        if dtype := self.options.compute_dtype:
            is_float = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
            args, kwargs = tree_map(lambda x: x.to(dtype) if is_float(x) else x, (args, kwargs))
        if torch.is_grad_enabled() and not any(flat.learns for flat in unit.flats):
            # No gradient of a weight tells when its backward ends: those of its inputs do.
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            register_multi_grad_hook(inputs, lambda _: unit.reshard())
        return args, kwargs

    def post_forward(self, unit: "Unit", module: nn.Module, args: Any, output: Any) -> Any:
        """Free the weights of `unit`; let autograd call `pre_backward` when it comes to `unit`."""
        if in_backward():
            return output  # recomputed: its backward comes next
        self.in_forward = self.in_forward and unit is not self.root
        unit.unbind()
        returned = []
        if torch.is_grad_enabled():
            if unit is not self.root:
                check_output(unit, output)
            returned = [t for t in tensors_in(output) if t.requires_grad]
        if not returned or not self.stays(unit):
            unit.reshard()
        is_lookup = type(module) is nn.Embedding and list(module._parameters) == ["weight"]
        if not returned or is_lookup:  # the gradient of a look-up needs no weights
            return output
        left = iter(_Leave.apply(partial(self.pre_backward, unit), *returned))
        replace = lambda x: next(left) if isinstance(x, Tensor) and x.requires_grad else x  # noqa: E731
        return tree_map(replace, output)

    def stays(self, unit: "Unit") -> bool:
        """True if the weights of `unit` stay gathered between its forward and its backward.

        The root is needed until the end of forward, and from the beginning of backward.
        """
        return not self.options.reshard_after_forward or unit is self.root

    def pre_backward(self, unit: "Unit") -> None:
        """Gather the weights of `unit` again; checkpoints inside of it find them in its modules."""
        creates_graph = torch.is_grad_enabled()
        if creates_graph:
            raise RuntimeError(
                "fsdp frees weights after backward, and create_graph=True would need them later; "
                "use ddp or zero, or take such a gradient inside of one block's forward"
            )
        self.unshard(unit, "backward")
        with torch.enable_grad():
            unit.bind(refuse_reentrant)

    def post_backward(self, unit: "Unit", gradients: Sequence[Tensor | None]) -> None:
        """Free the weights of `unit`, and start to reduce its gradients, which are complete."""
        self.is_finished = False
        unit.reshard()
        for flat in self.reducing:  # gradients of one unit at a time are on their way
            flat.wait_for_reduce()
        self.reducing, left = [flat for flat in unit.flats if flat.learns], iter(gradients)
        for flat in unit.flats:
            own = [next(left) for _ in flat.pieces]
            if flat.learns:
                flat.reduce(own, is_last=self.synchronises)

    @torch.no_grad()
    def finish_backward(self) -> None:
        sizes = [len(flat.pieces) for flat in self.flats]
        used = [i in flat.used for flat, n in zip(self.flats, sizes, strict=True) for i in range(n)]
        by_any = flags(used, self.device)
        for axis in self.options.axes:  # queues behind the last gradients: one wait for both
            all_reduce(by_any, axis, "max", out=by_any)
        for flat in self.flats:
            flat.finish()
        for flat, own in zip(self.flats, by_any.split(sizes), strict=True):
            flat.hand_out(own)
        self.reducing = []
        self.release()
        super().finish_backward()

    def release(self) -> None:
        """Free all weights that are gathered, also those of a forward that an error ended."""
        self.in_forward = False
        for unit in self.units:
            unit.reshard()

    def as_forward(self, method: Callable) -> Callable:
        """Return `method` of the model between `pre_forward` and `post_forward` of the root."""

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.in_forward:  # forward itself calls it
                return method(*args, **kwargs)
            args, kwargs = self.pre_forward(self.root, self.model, args, kwargs)
            return self.post_forward(self.root, self.model, args, method(*args, **kwargs))

        return run

    # whole tensors, out and in
    def full_masters(self) -> dict[nn.Parameter, Tensor]:
        whole: dict[nn.Parameter, Tensor] = {}
        for flat in self.flats:
            whole |= flat.join({p: p.data for p in flat.pieces}, flat.shard.dtype)
        return whole

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's shards, and the buffers, out of what `full_state_dict` returned.

        Raises `ValueError` when names or shapes are not those of the model.
        """
        own = self.model.state_dict(keep_vars=True)
        flat_of = {p: flat for flat in self.flats for p in flat.pieces}
        shapes = {n: flat_of[t].shapes[t] if t in flat_of else t.shape for n, t in own.items()}
        ours, theirs = set(shapes.items()), {(name, t.shape) for name, t in state.items()}
        if ours != theirs:
            raise ValueError(
                f"the state is of another model: here {sorted(ours - theirs)}, "
                f"there {sorted(theirs - ours)}"
            )
        for name, t in own.items():
            t.copy_(flat_of[t].part_of(t, state[name]) if t in flat_of else state[name])


# ---------------------------------------------------------------------- 2. gather ahead
class Prefetching(FullySharded):
    """While a block computes, the next is gathered, in the order that the model shows as it runs.

    The order may change from step to step; it must be the same on all ranks.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.follows: dict[str, dict[Unit, Unit | None]] = {"forward": {}, "backward": {}}
        self.latest: dict[str, Unit | None] = {"forward": None, "backward": None}

    def unshard(self, unit: "Unit", phase: str) -> None:
        before, self.latest[phase] = self.latest[phase], unit
        if before is not None and before is not unit:
            self.follows[phase][before] = unit
        super().unshard(unit, phase)
        prefetch, ahead = self.options.prefetch, unit
        for _ in range(1 + prefetch if prefetch else 0):  # the root may be among them
            ahead = self.follows[phase].get(ahead)
            gathered = {block.flats[0] for block in self.blocks if block.is_gathered}
            is_full = len(gathered) > prefetch and self.options.reshard_after_forward
            if ahead is None or is_full:
                break
            super().unshard(ahead, phase)

    def post_forward(self, unit: "Unit", module: nn.Module, args: Any, output: Any) -> Any:
        output = super().post_forward(unit, module, args, output)
        if unit is self.root and not in_backward():
            self.follows["forward"][self.latest["forward"]] = None
        return output

    def stays(self, unit: "Unit") -> bool:
        """As before; and the last block of forward, which backward needs first."""
        return super().stays(unit) or self.follows["forward"].get(unit, unit) is None

    def release(self) -> None:
        super().release()  # what runs next does not follow on what ran
        self.latest = {"forward": None, "backward": None}


# ---------------------------------------------------------------------- 3. a block's weights
class Unit:
    """A block, or the root, and the flat buffers of its weights. Tied blocks have the same ones."""

    def __init__(self, module: nn.Module, name: str, slots: list[Slot], flats: list["Flat"]):
        self.module, self.name, self.slots, self.flats = module, name, slots, flats
        self.pieces = [p for flat in flats for p in flat.pieces]
        self.unbind()

    @property
    def is_gathered(self) -> bool:
        """True if the weights are here, or on their way."""
        return any(flat.is_gathered for flat in self.flats)

    def bind(self, after_backward: Callable[[Sequence[Tensor | None]], None]) -> None:
        """Wait for the gathered weights, and put them into the modules, in the place of shards.

        Autograd calls `after_backward` with all their gradients when the last one is there.
        """
        for flat in self.flats:
            flat.wait_for_unshard()
        if self.flats:
            views = [view for flat in self.flats for view in flat.views]
            entered = _Enter.apply(after_backward, views, *self.pieces)
            weights = dict(zip(self.pieces, entered, strict=True))
            for owner, attribute, piece in self.slots:
                owner._parameters[attribute] = weights[piece]

    def unbind(self) -> None:
        """Put the shards back in the place of the gathered weights."""
        for owner, attribute, piece in self.slots:
            owner._parameters[attribute] = piece

    def reshard(self) -> None:
        """Put the shards back, and free the gathered weights."""
        self.unbind()
        for flat in self.flats:
            flat.reshard()


class _Enter(torch.autograd.Function):
    """The node by which a block's weights enter the graph.

    Autograd runs newer nodes first. This node is older than every operation of the block, so its
    backward runs after theirs: also where a tensor was taken out of the block for the loss.
    """

    @staticmethod
    def forward(ctx: Any, after_backward: Callable, views: list[Tensor], *pieces: Tensor) -> Any:
        ctx.after_backward = after_backward
        ctx.set_materialize_grads(False)  # None tells that a weight was not used
        weights = [view.detach() for view in views]
        pairs = zip(weights, pieces, strict=True)
        ctx.mark_non_differentiable(*(weight for weight, p in pairs if not p.requires_grad))
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.after_backward(gradients)
        return None, None, *(None for _ in gradients)  # gradients go their own way


class _Leave(torch.autograd.Function):
    """The node by which a block's output leaves: newer than every operation of the block."""

    @staticmethod
    def forward(ctx: Any, before_backward: Callable, *output: Tensor) -> tuple[Tensor, ...]:
        ctx.before_backward = before_backward
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.before_backward()
        return None, *gradients


class Flat(Row):
    """Weights of one block in a flat buffer of n S numbers; this rank keeps S of them, its shard.

    The buffer and its views stay the same tensors, so that what autograd has saved of them stays
    right. Only their memory comes and goes.
    """

    def __init__(self, members: dict[nn.Parameter, str], options: "Options") -> None:
        self.options, axis = options, copies_axis(next(iter(members)), options.axis)
        layout = Layout([p.numel() for p in members], axis)
        super().__init__(list(members), layout, axis, first_shard(members, layout, options, axis))
        for piece, name in zip(self.pieces, members.values(), strict=True):
            piece.is_flat = True
            if piece.requires_grad:
                piece.register_hook(partial(refuse_use, name))
        is_float = self.shard.is_floating_point()  # integers are never cast
        dtype = options.compute_dtype if is_float else None
        self.full = self.shard.new_empty(layout.total, dtype=dtype)  # [n S]
        self.reduce_dtype = (options.reduce_dtype if is_float else None) or self.full.dtype
        self.views = self.split(self.full)
        self.gathering: Pending | None = None
        self.reducing: Pending | None = None
        self.gradient: Tensor | None = None  # [S], reduced, of this step's microbatches
        self.used: set[int] = set()  # parameters that had a gradient on this rank in this step
        self.reshard()

    @property
    def learns(self) -> bool:
        """True if one of the weights wants a gradient now: they may be frozen for a while."""
        return any(p.requires_grad for p in self.pieces)

    @property
    def is_gathered(self) -> bool:
        """True if the weights are here, or on their way."""
        return self.full.untyped_storage().nbytes() > 0

    def unshard(self) -> None:
        """Start to gather the weights, unless that was done."""
        if self.is_gathered or not self.full.numel():
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        memory.tag("gathered", self.full)
        # Through `.data`, or autograd would take the saved weights for modified ones.
        shard, buffer = self.fetch(), self.full.data
        self.gathering = all_gather(shard, self.axis, out=buffer, async_op=True)

    def wait_for_unshard(self) -> None:
        """Return when the weights are here."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def reshard(self) -> None:
        """Free the memory of the gathered weights."""
        self.wait_for_unshard()
        self.full.untyped_storage().resize_(0)

    def reduce(self, gradients: Sequence[Tensor | None], is_last: bool) -> None:
        """Start to reduce-scatter the gradients, one per parameter; `is_last`: not in `no_sync`."""
        self.used |= {i for i, gradient in enumerate(gradients) if gradient is not None}
        flat, all_ranks = self.flatten(gradients), self.options.axis.size
        if self.options.average and self.axis.size < all_ranks:  # experts, of which few have a copy
            flat = flat * (self.axis.size / all_ranks)
        self.reducing = reduce_scatter(flat, self.axis, op=self.options.op, async_op=True)

    def flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients as a flat buffer [n S], with zeros where there is none."""
        only = gradients[0]
        if only is not None and only.numel() == self.layout.total:  # it is a flat buffer by itself
            return only.reshape(-1).to(self.reduce_dtype)
        flat = self.full.new_empty(self.layout.total, dtype=self.reduce_dtype)
        memory.tag("gradients", flat)
        parts = flat.split(self.layout.splits)
        for part, gradient in zip(parts, [*gradients, None], strict=True):  # None for the padding
            part.zero_() if gradient is None else part.view(gradient.shape).copy_(gradient)
        return flat

    def wait_for_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way, and keep its result."""
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            self.store(gradient)

    def finish(self) -> None:
        """Complete the gradient of the step."""
        self.wait_for_reduce()

    def hand_out(self, by_any: Tensor) -> None:
        """Give each parameter its ``grad``; None if no rank has used it, `by_any` [N] says."""
        used = [i in self.used for i in range(len(self.pieces))]
        if not all(used):  # did other ranks use the others?
            used = look(by_any, on_meta=used)
        for p, span, is_used in zip(self.pieces, self.layout.spans, used, strict=True):
            if is_used:
                own = self.gradient[span].view_as(p)
                p.grad = own if p.grad is None else p.grad.add_(own)
        self.gradient, self.used = None, set()

    # Where the shard lives: on the device that computes, unless offload replaces these two.
    def fetch(self) -> Tensor:
        """Return the shard [S] as it is sent: on the device that computes, in its dtype."""
        return self.shard.to(self.full)

    def store(self, gradient: Tensor) -> None:
        """Add a reduced gradient [S] to that of the microbatches before."""
        gradient = gradient.to(self.shard)
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)


class Hybrid(Flat):
    """Hybrid sharding: every rank of `replicate_axis` has a shard of the same weights.

    Gradients of all microbatches add up inside of each replica. Their sum is all-reduced over the
    replicas once a step, during the backward that `is_last`.
    """

    def __init__(self, members: dict[nn.Parameter, str], options: "Options") -> None:
        super().__init__(members, options)
        self.inside: Tensor | None = None  # [S], the sum over this replica's ranks
        self.across: list[Pending] = []  # all-reduces of such sums, under way
        self.is_last = True

    def reduce(self, gradients: Sequence[Tensor | None], is_last: bool) -> None:
        super().reduce(gradients, is_last)
        self.is_last = is_last

    def wait_for_reduce(self) -> None:
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            self.inside = gradient if self.inside is None else self.inside.add_(gradient)
        if self.inside is not None and self.is_last:
            inside, self.inside = self.inside, None
            axis, op = self.options.replicate_axis, self.options.op
            self.across.append(all_reduce(inside, axis, op, out=inside, async_op=True))

    def finish(self) -> None:
        self.is_last = True
        self.wait_for_reduce()
        while self.across:
            self.store(self.across.pop(0).wait())


# ---------------------------------------------------------------------- which weights, which block
def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> list[nn.Module]:
    """Return the modules that `blocks` names; see `apply`."""
    if blocks is not None:
        found = [m for m in model.modules() if m in blocks or type(m) in blocks]
        if blocks and not found:
            has = sorted({type(m).__name__ for m in model.modules()})
            raise ValueError(f"blocks={blocks!r}: the model has none of them; it has {has}")
        return [m for m in found if m is not model]
    members = list(members_of_lists(model))
    least = max(map(numel, members), default=float("inf"))
    inside = {module for member in members for module in member.modules()}
    # No other classes: weights of a subclass may be used without its forward, as in attention.
    tables = (m for m in model.modules() if type(m) in (nn.Embedding, nn.Linear))
    return members + [m for m in tables if m not in inside and numel(m) >= least]


def members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of lists in `module` that have parameters."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for child in module.children():
        if not is_list or type(child).forward is nn.Module.forward:  # never called: a list in it
            yield from members_of_lists(child)
        elif numel(child):
            yield child


def numel(module: nn.Module) -> int:
    """Return the number of weights in `module`."""
    return sum(p.numel() for p in module.parameters())


def assign(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list[Slot]]:
    """Give every parameter to the innermost block around it.

    A parameter in several blocks goes to the root, unless these blocks have all parameters in
    common: a tied embedding and head are two blocks with the same weights.
    """

    def own_modules(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if child not in inner:
                yield from own_modules(child)

    inner, slots = set(blocks), {}
    for block in (model, *blocks):
        modules = dict.fromkeys(own_modules(block))
        slots[block] = [
            (m, a, p) for m in modules for a, p in m._parameters.items() if p is not None
        ]
    has = {block: frozenset(p for *_, p in own) for block, own in slots.items()}
    for block in blocks:
        others = [own for own in has.values() if own != has[block]]
        shared = {p for p in has[block] if any(p in own for own in others)}
        slots[model] += [slot for slot in slots[block] if slot[-1] in shared]
        slots[block] = [slot for slot in slots[block] if slot[-1] not in shared]
    return {block: own for block, own in slots.items() if own or block is model}


def make_units(
    model: nn.Module, assigned: dict[nn.Module, list[Slot]], options: "Options"
) -> list[Unit]:
    """Replace parameters by shards: a unit for the root, and for each block.

    The weights of a unit lie in one flat buffer, or in several if they differ in dtype or device,
    or some are frozen.
    """
    paths = {module: path for path, module in model.named_modules()}
    names = {p: name for name, p in model.named_parameters()}
    make = Flat if options.replicate_axis is None else Hybrid
    units, flats, pieces = [], {}, {}
    for module, slots in assigned.items():
        kinds: dict[Any, dict[nn.Parameter, str]] = {}
        for *_, p in slots:
            alike = p.dtype, p.device, p.requires_grad, copies_axis(p, options.axis)
            kinds.setdefault(alike, {})[p] = names[p]
        own = []
        for members in kinds.values():
            key = frozenset(members)
            if key not in flats:  # else another block is tied to this one
                flats[key] = make(members, options)
                pieces |= zip(members, flats[key].pieces, strict=True)
            own.append(flats[key])
        placed = [(owner, attribute, pieces[p]) for owner, attribute, p in slots]
        units.append(Unit(module, paths[module] or "the root", placed, own))
    return units


# ---------------------------------------------------------------------- options and first values
@dataclass(frozen=True)
class Options:
    """How weights are sharded along `axis`: the options of `apply`."""

    axis: Axis
    reshard_after_forward: bool = True
    """Free a block's weights between its forward and its backward."""
    prefetch: int = 1
    """How many blocks are gathered ahead of the one that computes."""
    compute_dtype: torch.dtype | None = None
    """Gather floats in this dtype, and cast floating point inputs of the blocks to it; shards stay
    as they are. In place of autocast, whose casts would keep all weights."""
    reduce_dtype: torch.dtype | None = None
    """Send gradients in this dtype; by default that of computing."""
    average: bool = True
    """Divide the sum of the gradients by the number of ranks."""
    replicate_axis: Axis | None = None
    """Hybrid sharding. Shard inside of `axis`, such as a node, and keep a copy of everything for
    each rank of this axis, over which gradients are all-reduced."""
    init: Init | None = None
    """Gives a model on the "meta" device its weights and buffers, ``init(name, shape)``, one at a
    time and on every rank that holds a part of it."""

    @property
    def op(self) -> Op:
        """How the gradients of several ranks become one."""
        return "avg" if self.average else "sum"

    @property
    def axes(self) -> list[Axis]:
        """The axes along which something is sent."""
        return [a for a in (self.axis, self.replicate_axis) if a is not None and a.size > 1]

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` for options that do not fit together, or do not fit `model`."""
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
        if not numel(model):
            raise ValueError(f"{type(model).__name__} has no parameter: there is nothing to shard")
        if self.init is not None and not any(p.is_meta for p in model.parameters()):
            raise ValueError("init= is for models on the 'meta' device; this one has its weights")


def check_hooks(model: nn.Module) -> None:
    """Raise `ValueError` for a hook on a gradient: the gradients of weights come in shards."""
    for name, p in model.named_parameters():
        own, added = p._backward_hooks or {}, p._post_accumulate_grad_hooks or {}
        hooks = [*own.values(), *added.values()]  # minipar's own only read gradients
        is_claimed = hasattr(p, "claimed_by")  # which `claim` refuses
        if not is_claimed and not all(h.__module__.startswith("minipar.") for h in hooks):
            raise ValueError(
                f"{name} has a hook on its gradient, which fsdp would not call: the gradient "
                f"comes in shards; change gradients after finish_backward()"
            )


@torch.no_grad()
def first_shard(
    members: dict[nn.Parameter, str], layout: Layout, options: Options, axis: Axis
) -> Tensor:
    """Return this rank's shard [S] of the first weights."""
    if options.init is None or not next(iter(members)).is_meta:
        whole = F.pad(torch.cat([p.flatten() for p in members]), (0, layout.splits[-1]))
        shard, replicas = scatter(whole, axis), options.replicate_axis
        return shard if replicas is None else broadcast(shard, replicas)
    pieces = [
        options.init(name, tuple(p.shape)).to(p.dtype).flatten()[cut].clone()  # one is whole
        for i, ((p, name), cut) in enumerate(zip(members.items(), layout.cuts, strict=True))
        if cut.start < cut.stop or i == 0  # the first tells the device
    ]
    filled = torch.cat(pieces)
    return F.pad(filled, (0, layout.size - len(filled)))


def replicate_buffers(model: nn.Module, options: Options) -> None:
    """Give all ranks the buffers of rank 0, or those of `init`."""
    given = []
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if options.init is not None and buffer.is_meta:
                whole = options.init(f"{path}.{name}".lstrip("."), tuple(buffer.shape))
                module._buffers[name] = whole.to(buffer.dtype)
            else:
                given.append(buffer)
    for axis in options.axes:
        broadcast_all(given, axis)


# ---------------------------------------------------------------------- refused
def check_output(unit: Unit, output: Any) -> None:
    """Raise `TypeError` for a block whose output autograd cannot be asked about."""
    if not all(x is None or isinstance(x, Tensor) for x in tree_leaves(output)) or output is None:
        raise TypeError(
            f"fsdp: block {unit.name} returned {type(output).__name__}; let blocks return a "
            f"tensor, or tensors and None in a tuple or list"
        )


def refuse_reentrant(gradients: Sequence[Tensor | None]) -> NoReturn:
    """Raise: weights that were put into modules during backward have got gradients."""
    raise RuntimeError(
        "fsdp: a re-entrant checkpoint runs a backward inside of backward, whose gradients would "
        "be lost; use checkpoint(..., use_reentrant=False)"
    )


def refuse_use(name: str, gradient: Tensor | None) -> None:
    """Raise if a shard itself gets a gradient; gathered weights bring None to it."""
    if gradient is not None:
        raise RuntimeError(
            f"fsdp: {name} was used outside of its block's forward, where only a shard of it is "
            f"here; use it inside, or let blocks= name a module around both"
        )


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
