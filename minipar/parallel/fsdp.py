"""Fully sharded data parallelism (ZeRO-3): every rank keeps one n-th of every weight.

Idea.   A layer needs its weights only while the layer computes. So a rank keeps one n-th of them,
        its *shard*. All ranks together gather the weights of one *block* just before the block
        runs, free them after it, and gather them again for its backward. Then they reduce-scatter
        its gradients: each rank receives the gradient of its own shard. The optimizer steps shards.
Math.   As ddp: with ``average=True`` g = (1/n) sum_r g_r, else the sum.
Shapes. A block's weights lie one after the other in a *flat buffer*, padded to n S numbers: [n S]
        R@dp while the block computes, [S] V@dp at rest; gradients [n S] P@dp -> [S] V@dp. The
        optimizer sees the k numbers of a parameter that lie in this rank's shard: [k], or [k, 1]
        of a matrix, so that ``p.ndim`` is kept.
Comms.  A rank sends per step, for P bytes of weights (R of them outside of blocks, B in the last
        block), M microbatches and N parameters that learn:

          gather    (n-1)/n M (2 P - R - B)   R and B stay from forward to backward
          reduce    (n-1)/n M P               frozen weights are only gathered
          used?     2 (n-1)/n N               a byte per parameter: did any rank use it?

        The first step gathers B once more. An embedding that is a block is gathered for forward
        alone. Weights are sent in `compute_dtype`, gradients in `reduce_dtype`. Along a
        `replicate_axis` of m ranks, a rank sends 2 (m-1)/m (P/n + N).
Memory. Bytes per rank: (P + G + O)/n for shards of weights, gradients and optimizer state (Adam:
        4 P/n); R + 2 B of gathered weights; in backward R + 2 B of gradients: of the root, of the
        block that computes, and of the block that is being reduced.
Costs you. 50 % more bytes than ddp, in many more calls. All ranks run the same blocks in the same
        order, in evaluation too. Weights are whole only inside of forward. A tensor taken out of a
        block may be used in the loss together with the block's output, but not alone.
Source. Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al. 2023, "PyTorch
        FSDP" (arXiv 2304.11277), sections 3, 4. In torch: `fully_shard`, with the same phases.
Proved by tests/parallel/test_fsdp.py and tests/law/test_law.py.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from minipar.comm.collectives import Op, Pending, all_gather, all_reduce
from minipar.comm.mesh import Axis
from minipar.observe import memory
from minipar.observe.recorder import in_backward
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import Elsewhere, Row, copies_axis, region_of
from minipar.parallel.base.strategy import (
    Strategy,
    check_hooks,
    claim,
    find_blocks,
    refuse_state,
    share_counts,
)

Gradients = Sequence[Tensor | None]
REENTRANT = "a re-entrant checkpoint loses gradients; use checkpoint(..., use_reentrant=False)"
Names = dict[nn.Parameter, str]  # parameters of one kind, and their names in the model


# ---------------------------------------------------------------------- 1. when blocks run
class FullySharded(Strategy):
    """Hooks on every block: gather before the block computes, free after, forward and backward."""

    def __init__(self, model: nn.Module, options: "Options", units: "list[Unit]") -> None:
        super().__init__(model, options.axis)
        self.options, self.shard_axes, self.rows = options, (options.axis,), units
        blocks = dict.fromkeys([model, *(unit.block for unit in units)])  # the root, too
        self.units = {block: [u for u in units if u.block is block] for block in blocks}
        self.in_forward = False
        self.follows: dict[str, dict] = {"forward": {}, "backward": {}}  # a block -> the next block
        self.latest: dict[str, nn.Module] = {}
        for block in self.units:  # torch.compile leaves hooks out of its graphs
            before = partial(torch.compiler.disable(type(self).pre_forward), self, block)
            after = partial(torch.compiler.disable(type(self).post_forward), self, block)
            # These hooks run first: other hooks may use the weights, and keep the output.
            block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            block.register_forward_hook(after, prepend=True)

    def pre_forward(self, block: nn.Module, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the weights of `block`, and put them into its modules."""
        recomputes = in_backward()  # a checkpoint around the block
        if block is self.model and not recomputes:
            self.release()  # weights that were gathered before the last optimizer step
            self.in_forward = True
        if not (self.in_forward or recomputes):
            how = 'name the methods that call it: fsdp.apply(..., forward_methods=("encode",))'
            refuse(f"a {type(block).__name__} was called outside of the model's forward; {how}")
        self.unshard(block, "backward" if recomputes else "forward")
        for unit in self.units[block]:
            after = partial(self.post_backward, unit)
            unit.bind(partial(refuse, REENTRANT) if recomputes else after)
        if dtype := self.options.compute_dtype:
            is_float = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
            args, kwargs = tree_map(lambda x: x.to(dtype) if is_float(x) else x, (args, kwargs))
        if not any(p.requires_grad for unit in self.units[block] for p in unit.pieces):
            # All weights are frozen. The gradients of the inputs tell when its backward ends.
            view = lambda x: x.view_as(x) if wants_gradient(x) else x  # noqa: E731
            args, kwargs = tree_map(view, (args, kwargs))  # autograd.grad calls no hooks on leaves
            inputs = list(filter(wants_gradient, tree_leaves((args, kwargs))))
            register_multi_grad_hook(inputs, lambda _: [u.reshard() for u in self.units[block]])
        return args, kwargs

    def post_forward(self, block: nn.Module, _: nn.Module, args: Any, output: Any) -> Any:
        """Free the weights of `block`; autograd calls `pre_backward` when it comes to the block."""
        if in_backward():
            return output  # recomputed: its backward comes next
        if block is self.model:
            self.in_forward = False
        # Backward needs the root from its beginning, and the last block first.
        is_first = block is self.model or self.follows["forward"].get(block, block) is None
        stays = is_first or not self.options.reshard_after_forward
        has_backward = any(map(wants_gradient, tree_leaves(output)))
        # An output that is a view of weights would lose its memory with them.
        full = {unit.full.untyped_storage() for unit in self.units[block]}
        is_weight = lambda x: x.layout == torch.strided and x.untyped_storage() in full  # noqa: E731
        output = tree_map_only(Tensor, lambda x: x.clone() if is_weight(x) else x, output)
        for unit in self.units[block]:
            unit.put(unit.pieces) if stays and has_backward else unit.reshard()
        if type(block) is nn.Embedding and list(block._parameters) == ["weight"]:
            return output  # the gradient of a look-up needs no weights
        leave = partial(Border.apply, partial(self.pre_backward, block))
        return tree_map(lambda x: leave([x], x)[0] if wants_gradient(x) else x, output)

    def pre_backward(self, block: nn.Module, gradients: Gradients) -> Gradients:
        """Gather the weights of `block` again, also for checkpoints inside of it."""
        if torch.is_grad_enabled():
            refuse("weights are freed after backward; use ddp or zero for create_graph=True")
        self.unshard(block, "backward")
        with torch.enable_grad():
            for unit in self.units[block]:
                unit.bind(partial(refuse, REENTRANT))
        return gradients

    def post_backward(self, unit: "Unit", gradients: Gradients) -> Gradients:
        """Free the weights of the block, and start to reduce the gradients of `unit`."""
        self.is_finished = False
        for other in self.rows:  # the gradients of one block at a time are in flight
            other.reshard() if other.block is unit.block else other.wait_for_reduce()
        unit.reduce(gradients)
        unit.is_last = self.synchronises
        return [None for _ in gradients]  # shards get gradients in `finish_backward`

    @torch.no_grad()
    def finish_backward(self) -> None:
        for unit in self.rows:
            unit.check_memory(unit.pieces, [unit.shard])
            unit.drop_if_zeroed()
        unit_of = {p: unit for unit in self.rows for p in unit.pieces if p.requires_grad}
        used = [p in unit.used for p, unit in unit_of.items()]
        used_by_any = self.tell_used(used, self.options.replicate_axis)
        for unit in self.rows:
            unit.finalize_backward()
        for (p, unit), is_used in zip(unit_of.items(), used_by_any(), strict=True):
            if is_used:  # else it has no gradient, as on one device: AdamW would decay it
                own = unit.reduced[unit.spans[p]].view_as(p)
                p.grad = own if p.grad is None else p.grad.add_(own)
        for unit in self.rows:
            unit.reduced, unit.used = None, set()
        self.release()
        super().finish_backward()

    def unshard(self, block: nn.Module, phase: str) -> None:
        """Start to gather `block`; and the next block, which is the one that followed last time."""
        before, self.latest[phase] = self.latest.get(phase), block
        if before is not block:
            self.follows[phase][before] = block
        ahead = self.follows[phase].get(block) if self.options.prefetch else None
        for unit in (*self.units[block], *self.units.get(ahead, ())):
            unit.unshard()

    def release(self) -> None:
        """Free all weights that are gathered, also after a forward that an error ended."""
        for unit in self.rows:
            unit.reshard()
        self.follows["forward"][self.latest.get("forward")] = None  # the last block
        self.latest, self.in_forward = {}, False

    def as_forward(self, method: Callable, entry: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call `method` of the model with the hooks of forward, unless forward is the caller."""
        return (method if self.in_forward else entry)(*args, **kwargs)


class Border(torch.autograd.Function):
    """The node by which the weights of a block enter the graph, or an output leaves the block.

    Autograd runs newer nodes first. The node of the weights is older than all operations of the
    block, so its backward runs last. The node of an output is newer, so its backward runs first.
    """

    @staticmethod
    def forward(ctx: Any, then: Callable, tensors: Sequence[Tensor], *inputs: Tensor) -> Any:
        ctx.then = then
        ctx.set_materialize_grads(False)  # None tells that a tensor was not used
        outputs = tuple(t.detach() for t in tensors)
        learns = zip(outputs, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*(t for t, does in learns if not does))  # frozen for a while
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.then(gradients)


# ---------------------------------------------------------------------- 2. the weights of a block
class Unit(Row):
    """Weights of one block in a flat buffer of n S numbers; this rank keeps S of them, its shard.

    The buffer and its views stay the same tensors, so that tensors saved by autograd stay valid.
    Only their memory is freed and allocated again.
    """

    def __init__(self, block: nn.Module, members: Names, options: "Options") -> None:
        super().__init__(list(members), options.axis)
        self.block, self.options = block, options
        self.hold(list(members), shard := self.first_shard(members))
        place = {p: i for i, p in enumerate(members)}
        owners = [m._parameters for m in block.modules()]
        self.slots = [
            (own, name, place[p]) for own in owners for name, p in own.items() if p in place
        ]
        for piece, name in zip(self.pieces, members.values(), strict=True):
            if piece.requires_grad:
                words = f"{name} was used outside of its block's forward, where ranks have shards"
                piece.register_hook(partial(refuse, words))  # gathered weights bring None
        cast = options if shard.is_floating_point() else Options(self.axis)  # integers stay
        self.full = shard.new_empty(sum(self.splits), dtype=cast.compute_dtype)  # [n S]
        self.views, self.reduce_dtype = self.split(self.full), cast.reduce_dtype or self.full.dtype
        self.op: Op = "avg" if options.average else "sum"
        self.placed = [own[name] for own, name, _ in self.slots]  # in the modules now
        self.is_gathered = True  # memory has been allocated
        self.gathering: Pending | None = None
        self.used: set[nn.Parameter] = set()  # by this rank in this step
        self.is_last = True  # True if the latest gradients are of the step's last microbatch
        self.reshard()

    def first_shard(self, members: Names) -> Tensor:
        """Return this rank's shard [S] of the first weights: the model's weights, or `init`."""
        parts, init = [], self.options.init  # (name, shape) -> the first value
        for (p, name), (_, cut) in zip(members.items(), self.places, strict=True):
            if cut.start < cut.stop or not parts:  # the first tells the device
                if init is None:
                    parts.append(p.detach().flatten()[cut].clone())
                else:
                    first = init(name, region_of(p).shape).to(p.dtype)
                    parts.append(region_of(p)._replace(flat=cut).cut(first))
        return torch.cat([*parts, parts[0].new_zeros(self.size - sum(map(len, parts)))])

    def unshard(self) -> None:
        """Start to gather the weights, unless that was done."""
        if self.is_gathered:
            return
        self.is_gathered = True  # or on the way
        self.full.untyped_storage().resize_(self.full.nbytes)
        memory.tag("gathered", self.full)
        saved = self.full._version - 1  # see `reshard`
        torch._C._autograd._unsafe_set_version_counter((self.full,), (saved,))
        # Through `.data`, or autograd would take the saved weights for modified ones.
        shard, buffer = self.fetch(), self.full.data
        self.gathering = all_gather(shard, self.axis, out=buffer, async_op=True)

    def wait_for_unshard(self) -> None:
        """Wait until the weights are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def bind(self, after_backward: Callable[[Gradients], Gradients]) -> None:
        """Put the gathered weights into the modules; `after_backward` is called with gradients."""
        self.wait_for_unshard()
        self.put(Border.apply(after_backward, self.views, *self.pieces))

    def put(self, weights: Sequence[Tensor]) -> None:
        """Put `weights` into the modules: gathered ones, or the shards."""
        for at, (parameters, name, i) in enumerate(self.slots):
            if parameters.get(name) is not self.placed[at]:
                refuse(f"{name} was replaced after apply: replace it first, and apply fsdp then")
            parameters[name] = self.placed[at] = weights[i]

    def reshard(self) -> None:
        """Free the gathered weights, and put the shards in their place."""
        self.put(self.pieces)
        self.wait_for_unshard()
        if self.is_gathered:
            self.is_gathered = False
            self.full.untyped_storage().resize_(0)
            increment_version(self.full)  # autograd refuses to read the freed weights

    def reduce(self, gradients: Gradients) -> None:
        """Start to reduce-scatter the gradients of all weights; None counts as zero."""
        self.wait_for_reduce()  # if the block runs twice
        self.drop_if_zeroed()
        if self.pieces[0].grad is None:
            self.pieces[0].grad = Elsewhere(self.pieces[0])
        self.used |= {p for p, g in zip(self.pieces, gradients, strict=True) if g is not None}
        padded = zip([*gradients, None], self.splits, strict=True)
        parts = [self.full.new_zeros(n) if g is None else g.reshape(-1) for g, n in padded if n]
        flat = self.full.new_empty(0, dtype=self.reduce_dtype)
        flat = parts[0].to(flat) if len(parts) == 1 else torch.cat(parts, out=flat)
        memory.tag("gradients", flat)
        self.start_to_reduce(flat, self.op)

    def drop_if_zeroed(self) -> None:
        """Drop the step's sum if `zero_grad` has cleared the placeholder that `reduce` set."""
        first = self.pieces[0]
        if self.used and first.grad is None:
            self.finalize_backward()
            self.reduced, self.used = None, set()
        elif type(first.grad) is Elsewhere:
            first.grad = None

    def finalize_backward(self) -> None:
        """Complete the gradient of the step."""
        self.wait_for_reduce()

    def fetch(self) -> Tensor:
        """Return the shard [S] on the device that computes, in the dtype of the buffer."""
        return self.shard.to(self.full)  # offload replaces this method, and `store`


class Hybrid(Unit):
    """Hybrid sharding: all ranks of `replicate_axis` have copies of the same shard.

    Gradients of all microbatches add up inside of each replica. Their sum is all-reduced over the
    replicas once a step, in the backward that `is_last`.
    """

    inside: Tensor | None = None  # [S], the sum over this replica's ranks
    across: Sequence[Pending] = ()  # all-reduces of such sums, under way

    def wait_for_reduce(self) -> None:
        if self.reducing is not None:
            gradient, self.reducing = self.reducing.wait(), None
            self.inside = gradient if self.inside is None else self.inside.add_(gradient)
        if self.inside is not None and self.is_last:
            inside, self.inside = self.inside, None
            axis = self.options.replicate_axis
            self.across = *self.across, all_reduce(inside, axis, self.op, out=inside, async_op=True)

    def finalize_backward(self) -> None:
        self.is_last = True
        self.wait_for_reduce()
        for pending in self.across:
            self.store(pending.wait())
        self.across = ()


# ---------------------------------------------------------------------- 3. put on a model
@dataclass(frozen=True)
class Options:
    """The options of `apply`: how weights are sharded along `axis`."""

    axis: Axis
    blocks: Sequence[type[nn.Module] | nn.Module] | None = None  # or classes; see `find_blocks`
    reshard_after_forward: bool = True  # free a block's weights between forward and backward
    prefetch: bool = True  # gather the next block while a block computes
    compute_dtype: torch.dtype | None = None  # of gathered weights, and of floats that blocks take
    reduce_dtype: torch.dtype | None = None  # of gradients that are sent; by default of computing
    average: bool = True  # divide the sum of the gradients by the number of ranks
    replicate_axis: Axis | None = None  # hybrid: ranks of this other axis have copies of shards
    forward_methods: Sequence[str] = ()  # methods of the model that run blocks, beside `forward`
    init: Callable[[str, tuple[int, ...]], Tensor] | None = None  # first values, for a meta model


def apply(model: nn.Module, axis: Axis, **options: Any) -> FullySharded:
    """Shard `model` along `axis`, in place; make the optimizer afterwards.

    Parameters keep names, ties and ``ndim``, and become shards. All ranks start with the values of
    rank 0. Weights outside of blocks, and tied ones, stay gathered. `options` are `Options` fields.

    Before the first collective, raises `ValueError` for options that do not fit, and for a model
    with sparse gradients, with hooks on gradients, or with another strategy.
    """
    how = Options(axis, **options)
    axes = [each for each in (axis, how.replicate_axis) if each is not None]
    before = [p for p in model.parameters() if p.requires_grad]
    blocks = find_blocks(model, how.blocks)
    check_hooks(model)
    claim(model, "fsdp", axis)
    share_counts(model, *axes)
    for each in axes:
        replicate(model, each, is_data=each is axis)
    strategy = FullySharded(model, how, make_units(model, blocks, how))
    for name in how.forward_methods:
        method, entry = getattr(model, name), copy.copy(model)  # which shares the hooks
        entry.forward = method
        setattr(model, name, partial(strategy.as_forward, method, entry))
    strategy.watch(model.parameters())
    for p in before:
        p.stepped_elsewhere = "make the optimizer after fsdp.apply"
        p.register_hook(partial(refuse, "a weight was used that was kept from before apply"))
    refuse_state(model)
    return strategy


def make_units(model: nn.Module, blocks: list[nn.Module], options: Options) -> list[Unit]:
    """Replace the parameters of `model` by shards.

    A parameter belongs to the innermost block around it; a tied one, to the root. The weights of a
    flat buffer share block, dtype, device and ranks with copies, and all or none are frozen.
    """
    home = {p: block for block in (model, *blocks) for p in block.parameters()}  # inner blocks win
    times = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    kinds: dict[tuple, Names] = defaultdict(dict)
    for name, p in model.named_parameters():
        block = home[p] if times[p] == 1 else model
        kind = block, p.dtype, p.device, p.requires_grad, copies_axis(p, options.axis)
        kinds[kind][p] = name
    for name, buffer in model.named_buffers():
        if buffer.is_meta and options.init is not None:
            path, _, own = name.rpartition(".")
            first = options.init(name, tuple(buffer.shape)).to(buffer.dtype)
            model.get_submodule(path)._buffers[own] = first
    make = Unit if options.replicate_axis is None else Hybrid
    return [make(block, members, options) for (block, *_), members in kinds.items()]


# ---------------------------------------------------------------------- refused
def refuse(words: str, gradients: Any = ()) -> None:
    """Raise a `RuntimeError`; as a hook on a gradient, unless the gradient is None."""
    if gradients is not None:
        raise RuntimeError(f"fsdp: {words}")


def wants_gradient(x: Any) -> bool:
    """True for a tensor that will get a gradient from autograd."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
