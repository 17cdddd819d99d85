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
Comms.  Bytes that a rank sends per step, for P bytes of weights, R of them outside of blocks, B in
        the last block and E in look-ups, over M microbatches; N parameters:

          gather    (n-1)/n M (2 P - R - B - E)   R and B stay from forward to backward: see
                                                  `stays`; what was looked up needs no weights
          reduce    (n-1)/n M P               or (n-1)/n P with ``accumulate="whole"``
          used?     2 (n-1)/n (N + 8)         a byte per parameter: did any rank use it? And did
                                              all of them gather the same, in the same order?

        so 3 P as in the paper, less what stays; 2 P with ``reshard_after_forward=False``. An
        embedding that is the head, too, counts twice. P counts
        2 bytes per number where a 2-byte `compute_dtype` (gather) or `reduce_dtype` is set. The
        first step, in which the order of blocks is not known yet, gathers B once more. Frozen
        weights are gathered only. `replicate_axis` of m ranks: 2 (m-1)/m (P/n + N + 8) along it.
Memory. Bytes per rank: (P + G + O)/n for shards of weights, gradients and optimizer state (Adam:
        4 P/n); R + 2 B for gathered weights; and in backward R + 2 B of gradients: of the root,
        those that come into being, and those on their way, on a CPU with as much again, up to
        `flat.SLICE`, where slices arrive to be added up. With ``prefetch=k`` 1 + k blocks are
        gathered; ``accumulate="whole"`` adds P, ``reshard_after_forward=False`` all weights.
        An embedding or a head as large as a block is one by itself.
Costs you. Half as many bytes again as `ddp`, in many more calls. All ranks must run the same blocks
        in the same order, so they need as many microbatches, and no rank can evaluate alone: let
        all of them do it, or load `full_state_dict` into a model of one rank's own. A forward that
        ends in an exception leaves things in order; after a backward that did, call
        `finish_backward`, zero gradients.
Source. Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 5.3; Zhao et al. 2023, "PyTorch
        FSDP" (arXiv 2304.11277), sections 3 and 4 (with hybrid sharding in 3.2.2).
In torch: `torch.distributed.fsdp.fully_shard`.
Proved by tests/parallel/test_fsdp.py and tests/parity/test_fsdp.py.

Two versions: `FullySharded` gathers and frees, `Prefetching` gathers ahead. Both say *when*; what
comes and goes is in flat.py, which weights go together in blocks.py.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis
from minipar.observe import watchdog
from minipar.observe.recorder import in_backward
from minipar.parallel.base import absent
from minipar.parallel.base.optimizer_state import Members
from minipar.parallel.base.replicate import broadcast_all
from minipar.parallel.base.strategy import Strategy, claim, flags, refuse_state, share_counts
from minipar.parallel.blocks import Blocks, Unit, assign, find, make_units
from minipar.parallel.flat import Flat, Options


def apply(
    model: nn.Module, axis: Axis, *, blocks: Blocks | None = None, **options: Any
) -> "FullySharded":
    """Shard `model` (any `nn.Module`) along `axis`, in place; make the optimizer afterwards.

    Parameters keep names, ties and ``ndim``, and become pieces (`full_shape` and `shard_axes` say
    of what). Values are those of rank 0. Freeze what is to be frozen before. Whole weights come out
    of `full_state_dict`, and go in by `load_full_state_dict`; ``model.state_dict()`` and its
    counterpart are refused, as they would be of this rank's pieces.

    Weights are whole in the forward of their block alone, which may not write into them. What else
    computes with them, such as a penalty on weights in the loss, or a method that is not forward,
    is refused, in backward at the latest: compute it in forward, and return it or leave it in an
    attribute of a module. What hooks have collected from inside of a block, for a loss, needs
    ``reshard_after_forward=False``. Gradients with respect to weights come from a plain
    ``backward()`` only; others with ``create_graph=True``, and outputs in which no tensor is found,
    keep the weights of their blocks gathered until `finish_backward`.

    Args:
        blocks: what is gathered together: classes, modules, or names of modules. By default the
            members of every `nn.ModuleList`, `nn.Sequential` and `nn.ModuleDict`, from the top
            down; and each `nn.Embedding` and `nn.Linear` beside these that is as large as one. What
            is outside of blocks, or shared between blocks that differ, is gathered for the whole
            forward and backward. A block must be called (its `forward` runs) to be gathered.
        options: fields of `flat.Options`, all with defaults: reshard_after_forward, prefetch,
            compute_dtype, reduce_dtype, average, accumulate, replicate_axis, reduce, init.

    Raises `ValueError` for options that do not fit, for a model with sparse gradients, one that
    torch.jit runs, or one that a strategy trains already, before the first collective.
    """
    how = Options(axis, **options)
    how.check(model)
    assigned = assign(model, find(model, blocks))
    claim(model, "fsdp", axis)
    units = make_units(model, assigned, how)
    _replicate_buffers(model, how)
    share_counts(model, *how.axes)
    return Prefetching(model, how, units)


# ---------------------------------------------------------------------- 1. gather and free
class FullySharded(Strategy):
    """Hooks on every block: gather before it computes, free after, in forward and in backward."""

    def __init__(self, model: nn.Module, options: Options, units: list[Unit]) -> None:
        super().__init__(model, options.axis)
        self.shard_axes = (options.axis,)
        self.options = options
        self.root, *self.blocks = self.units = units
        self.rows = self.flats = list(dict.fromkeys(flat for unit in units for flat in unit.flats))
        self.reducing: list[Flat] = []  # of the unit whose backward ended last
        self.inside: Unit | None = None  # of which a part ended last; freed before the next
        self.watch([p for flat in self.flats for p in flat.pieces])
        for p in self.watched:
            if p.requires_grad:
                p.register_hook(_refuse_gradients(p.on_use))
        in_blocks = {m for block in self.blocks for m in block.module.modules()}
        for unit in units:
            left_out = in_blocks if unit is self.root else ()
            unit.keepers = [m for m in unit.module.modules() if m not in left_out and _may_keep(m)]
            # What hooks do is no part of a compiled graph: it breaks there.
            before = partial(torch.compiler.disable(type(self)._before_forward), self, unit)
            after = partial(torch.compiler.disable(type(self)._after_forward), self, unit)
            # Before all other hooks: they may compute with the weights, as weight_norm's does.
            unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(after, always_call=True)
        refuse_state(model)

    def _enter(self, unit: Unit, phase: str) -> None:
        """Gather the weights of `unit`, which is about to compute: "forward" or "backward"."""
        unit.unshard(phase)
        with torch.enable_grad() if phase == "backward" else nullcontext():
            unit.bind(self._after_backward)
        if in_backward() and not unit.trainable:  # no gradient of its weights tells when it ends
            torch.autograd.Variable._execution_engine.queue_callback(unit.unbind)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit.calls += 1
        if unit.calls > 1:  # it calls itself, and its weights are here
            return args, kwargs
        recomputes = in_backward()
        if unit is self.root and not recomputes:
            for each in self.units:
                each.check_weights()
            self.release()  # what p.data wrote into the pieces has no number in their versions
            for block in self.blocks:
                absent.leave(block.parameters)
        self._enter(unit, "backward" if recomputes else "forward")
        unit.begun = torch._C._autograd._get_sequence_nr()
        if self.options.compute_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        if unit.flats and not unit.trainable and torch.is_grad_enabled():
            # No weight of it enters the graph: its backward ends with the gradients of its inputs,
            # unless these get a graph of their own (create_graph). Leaves have no hooks in
            # autograd.grad, but views of them do.
            if any(t.is_leaf and t.requires_grad for t in _tensors((args, kwargs))):
                args, kwargs = tree_map(_no_leaf, (args, kwargs))  # lists and dicts are others then
            inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
            register_multi_grad_hook(inputs, lambda _: torch.is_grad_enabled() or unit.reshard())
        return args, kwargs

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        unit.calls = max(unit.calls - 1, 0)  # less than one where another hook failed before ours
        if unit.calls:
            return output
        if unit is self.root and not in_backward():
            for block in self.blocks:
                absent.come_back(block.parameters)
        tensors = list(_tensors(output))
        if any(map(unit.has_memory_of, tensors)):  # which is freed when the block has run
            output = tree_map(lambda t: t.clone() if unit.has_memory_of(t) else t, output)
            tensors = list(_tensors(output))
        keeps = (*tensors, *_left_behind(unit)) if torch.is_grad_enabled() else ()
        nodes = {node for t in keeps for node in _nodes(t, unit.begun)}
        # The gradient of a look-up takes no weights, unless these are computed from others.
        is_lookup = type(module) is nn.Embedding and list(module._parameters) == ["weight"]
        for node in () if is_lookup else nodes:
            node.register_prehook(lambda _: self._before_backward(unit))
        if in_backward():
            return output  # recomputed: its backward comes next
        unit.unbind()
        for flat in unit.flats:
            flat.check_unwritten()
        if torch.is_grad_enabled() and output is not None and not tensors:
            unit.hold()  # an output in which we find no tensor tells no hook when backward begins
        if not (nodes and output is not None and self.stays(unit)):
            unit.reshard()
        return output

    def _before_backward(self, unit: Unit) -> None:
        if torch.is_grad_enabled():  # create_graph: no hook tells when the new graph is run
            unit.hold()
        left, self.inside = self.inside, None
        if left is not None and unit.module not in set(left.module.modules()):
            left.reshard()
        unit.backward = torch._C._current_graph_task_id()
        self._enter(unit, "backward")

    def stays(self, unit: Unit) -> bool:
        """Whether the weights of `unit` stay gathered between its forward and its backward.

        The root is needed until the end of forward, and from the beginning of backward.
        """
        return not self.options.reshard_after_forward or unit is self.root

    def _after_backward(
        self, unit: Unit, flats: list[Flat], gradients: list[Tensor | None]
    ) -> None:
        """Reduce the gradients of `flats` of `unit`, which are complete; free its weights."""
        self.is_finished = False
        if unit.backward in (None, torch._C._current_graph_task_id()):
            unit.reshard()
        else:  # it was that of a re-entrant checkpoint in the block, which may go on itself
            self.inside = unit
        for flat in self.reducing:  # gradients of one unit at a time are on their way
            flat.wait_for_reduce()
        self.reducing = flats
        for flat in flats:
            own, gradients = gradients[: len(flat.views)], gradients[len(flat.views) :]
            with watchdog.about(f"gradients of {flat.block}"):
                flat.reduce(flat.flatten(own), is_last=self.synchronises)

    @torch.no_grad()
    def finish_backward(self) -> None:
        super().finish_backward()
        trainable = [flat for flat in self.flats if flat.is_trainable]
        used = [p in flat.used for flat in trainable for p in flat.pieces]
        users = flags(used + self.options.ledger.close(), self.device)
        for axis in self.options.axes:  # queues behind the last gradients: one wait for both
            all_reduce(users, axis, "max", out=users)
        for flat in trainable:
            flat.finish()
            flat.forget_unused(users[: len(flat.views)])
            users = users[len(flat.views) :]
        self.reducing, self.inside = [], None
        self.flats[0].home.finish()
        for unit in self.units:
            unit.end_step()
        self.release()
        self.options.ledger.tell(users)
        for flat in self.flats:
            flat.version = None  # fused steps leave no number in versions
        self.note_reduced()

    def release(self) -> None:
        """Free all weights that are gathered, and not held."""
        for unit in self.units:
            unit.reshard()

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.options.compute_dtype) if is_float else value

    # whole tensors, out and in
    def members(self, optimizer: torch.optim.Optimizer) -> Members:
        self.options.ledger.check()  # before a step that went wrong is saved
        return super().members(optimizer)

    def full_masters(self) -> dict[nn.Parameter, Tensor]:
        self.options.ledger.check()
        whole: dict[nn.Parameter, Tensor] = {}
        for flat in self.flats:
            whole |= flat.join({p: p.data for p in flat.pieces}, flat.shard.dtype)
        return whole

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's pieces, and the buffers, out of what `full_state_dict` returned.

        Raises `ValueError` when names or shapes are not those of the model.
        """
        own, extra = self._own_state()
        row_of = {p: flat for flat in self.flats for p in flat.pieces}
        shapes = {n: row_of[t].shapes[t] if t in row_of else t.shape for n, t in own.items()}
        shapes |= dict.fromkeys(extra, ())
        ours = {(name, tuple(shape)) for name, shape in shapes.items()}
        theirs = {(n, () if n in extra else tuple(t.shape)) for n, t in state.items()}
        if ours != theirs:
            raise ValueError(
                f"the state is of another model: here {sorted(ours - theirs)}, "
                f"there {sorted(theirs - ours)}"
            )
        self.fill(state.__getitem__)

    @torch.no_grad()
    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Take this rank's pieces, and the buffers, out of ``read(name)``, whole, one at a time."""
        row_of = {p: flat for flat in self.flats for p in flat.pieces}
        own, extra = self._own_state()
        names = {t: name for name, t in reversed(own.items())}  # of tied ones the first
        for t, name in names.items():
            t.copy_(row_of[t].part_of(t, read(name)) if t in row_of else read(name))
        for name, module in extra.items():
            module.set_extra_state(read(name))

    def _own_state(self) -> tuple[dict[str, Tensor], dict[str, nn.Module]]:
        """Tensors by name, and the modules that have extra state beside them, by its name."""
        own = self.model.state_dict(keep_vars=True)
        modules = {f"{path}._extra_state".lstrip("."): m for path, m in self.model.named_modules()}
        extra = {name: module for name, module in modules.items() if name in own}
        return {name: t for name, t in own.items() if name not in extra}, extra

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
        unit.unshard(phase)
        prefetch, ahead = self.options.prefetch, unit
        for _ in range(1 + prefetch if prefetch else 0):  # the root may be among them
            ahead = self.follows[phase].get(ahead)
            gathered = {block.flats[0] for block in self.blocks if block.is_gathered}
            is_full = len(gathered) > prefetch and self.options.reshard_after_forward
            if ahead is None or is_full:
                break
            ahead.unshard(phase)
        super()._enter(unit, phase)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        output = super()._after_forward(unit, module, args, output)
        if unit is self.root and not in_backward() and output is not None:  # None: an exception
            self.follows["forward"][self.latest["forward"]] = None
        return output

    def stays(self, unit: Unit) -> bool:
        """As before; and the last block of forward, which backward needs first."""
        return super().stays(unit) or self.follows["forward"].get(unit, unit) is None

    def release(self) -> None:
        super().release()  # and what runs next does not follow on what ran
        self.latest = {"forward": None, "backward": None}


# ---------------------------------------------------------------------- helpers
def _replicate_buffers(model: nn.Module, options: Options) -> None:
    given = []
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if options.init is not None and buffer.is_meta:
                full_name = f"{path}.{name}" if path else name
                whole = options.init(full_name, tuple(buffer.shape))
                module._buffers[name] = whole.to(buffer.dtype)
            else:
                given.append(buffer)
    for axis in options.axes:
        broadcast_all(given, axis)


def _may_keep(module: nn.Module) -> bool:
    """Whether its forward may leave tensors in the module: those of torch and minipar do not."""
    return not type(module).__module__.startswith(("torch.nn.", "minipar.model."))


_OWN = frozenset(vars(nn.Module()))  # what every module has
_HOLDERS = Tensor, list, tuple, dict


def _left_behind(unit: Unit) -> Iterator[Tensor]:
    """The tensors that forward has left in modules, such as a loss of a layer."""
    for module in unit.keepers:
        attributes = vars(module)
        for value in (*module._buffers.values(), *map(attributes.get, attributes.keys() - _OWN)):
            yield from _held(value) if isinstance(value, _HOLDERS) else ()


def _nodes(t: Tensor, begun: int) -> Iterator[Node]:
    """What has computed `t` since `begun`: what is older, such as an input, needs no weights. Of a
    view also what has computed its base, which alone is left when the view is changed in place."""
    for node in (each.grad_fn for each in (t, t._base) if each is not None):
        if node is not None and node._sequence_nr() >= begun:
            yield node


def _held(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Its tensors, some levels deep; what is long is a table, and holds none."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, _HOLDERS) and len(value) <= 1000:
        items = value.values() if isinstance(value, dict) else value
        if any(issubclass(kind, _HOLDERS) for kind in set(map(type, items))):
            for item in items:
                yield from _held(item, depth - 1)


def _refuse_gradients(refuse: Callable) -> Callable[[Tensor | None], None]:
    """A hook that calls `refuse` where autograd has come to a piece itself: gathered weights, on
    which all computing is done, bring it None."""

    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:
            refuse()

    return hook


def _no_leaf(value: Any) -> Any:
    is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return value.view_as(value) if is_leaf else value


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
