"""Which modules are blocks, which block has which parameter, and how weights get into it; for fsdp.

`find` the blocks, `assign` parameters to them, `make_units`: a `Unit` is a block with its weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.parallel.base.shards import copies_axis
from minipar.parallel.flat import FLATS, Flat, Options

Blocks = Sequence[type[nn.Module] | nn.Module | str]
Members = dict[nn.Parameter, str]  # parameters before they are pieces, and their names
Slot = tuple[nn.Module, str, str, nn.Parameter]  # a module's attribute, its name, what it holds


def find(model: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the modules that `blocks` means: classes, modules or names; None: the usual ones.

    These are the members of lists; and beside the lists, look-ups and linear layers that have at
    least as many weights as the largest of those members. Raises `ValueError` for what the model
    has not.
    """
    if blocks is None:
        members = list(_members_of_lists(model))
        least = max(map(_numel, members), default=math.inf)
        inside = {module for member in members for module in member.modules()}
        # No other classes: in a subclass weights may be used without a forward, as in attention.
        tables = (m for m in model.modules() if type(m) in (nn.Embedding, nn.Linear))
        return members + [m for m in tables if m not in inside and _numel(m) >= least]
    found: dict[nn.Module, None] = {}
    named = dict(model.named_modules())
    for item in blocks:  # a class means itself, for the same reason
        meant = [m for name, m in named.items() if item in (name, type(m)) or m is item]
        if not meant:
            raise ValueError(f"blocks: the model has no {item!r}; it has {list(named)[1:9]}")
        found |= dict.fromkeys(meant)
    return [module for module in found if module is not model]


def _members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for child in module.children():
        if not is_list or type(child).forward is nn.Module.forward:  # never called: a list in it
            yield from _members_of_lists(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def assign(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list[Slot]]:
    """Give every parameter to the innermost block around it.

    What several blocks share goes to the root, unless they share all they have: an embedding and a
    head that are tied have the same weights, each for itself. A module inside of several blocks
    goes to the root.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    home: dict[nn.Parameter, set[nn.Module]] = {}
    slots: dict[tuple[nn.Module, str], tuple[set[nn.Module], Slot]] = {}
    for path, owner in paths.items():
        parents = [path.rsplit(".", i)[0] for i in range(path.count(".") + 1)] if path else []
        inside = next((paths[p] for p in parents if paths[p] in blocks), model)
        for attribute, p in owner._parameters.items():
            if p is not None:
                home.setdefault(p, set()).add(inside)
                name = f"{path}.{attribute}" if path else attribute
                slot = slots.setdefault((owner, attribute), (set(), (owner, attribute, name, p)))
                slot[0].add(inside)
    has = {block: {p for p, homes in home.items() if block in homes} for block in blocks}
    found: dict[nn.Module, list[Slot]] = {module: [] for module in (model, *blocks)}
    for (inside, *others), slot in slots.values():
        homes = home[slot[-1]]
        is_own = not others and model not in homes
        is_own = is_own and all(has[block] == has[inside] for block in homes)
        found[inside if is_own else model].append(slot)
    return {module: slots for module, slots in found.items() if slots or module is model}


# ---------------------------------------------------------------------- the weights of a block
def make_units(
    model: nn.Module, assigned: dict[nn.Module, list[Slot]], options: Options
) -> list["Unit"]:
    """Replace parameters by pieces: a unit for the root, and for each block."""
    paths = {module: path for path, module in model.named_modules()}
    units, made = [], {}
    for module, slots in assigned.items():
        key = frozenset(p for *_, p in slots)
        if key not in made:
            made[key] = _make_flats(slots, paths[module] or "the root", options)
        units.append(Unit(module, slots, made[key]))
    return units


def _make_flats(slots: list[Slot], block: str, options: Options) -> dict[Flat, Members]:
    kinds: dict[Any, Members] = {}
    for _, _, name, p in slots:
        alike = p.dtype, p.device, p.requires_grad, copies_axis(p, options.axis)
        kinds.setdefault(alike, {}).setdefault(p, name)
    kind = FLATS[options.accumulate, options.replicate_axis is not None]
    return {kind(members, block, options): members for members in kinds.values()}


class Unit:
    """A module, and the weights that are gathered when it runs: a block, or the root.

    Weights that differ in dtype, or of which some are frozen, are several `Flat`s. Units that are
    tied have the same ones.
    """

    def __init__(self, module: nn.Module, slots: list[Slot], flats: dict[Flat, Members]) -> None:
        self.module, self.flats = module, list(flats)
        self.parameters = [p for flat in flats for p in flat.pieces]
        place = {p: i for i, p in enumerate(p for members in flats.values() for p in members)}
        self.slots = [(owner, attribute, place[p]) for owner, attribute, _, p in slots]
        self.names = [name for _, _, name, _ in slots]
        self.keepers: list[nn.Module] = []  # in which forward may leave tensors with a graph
        self.begun = 0  # the number of autograd's first node of the latest forward
        self.calls = 0  # of the module, under way: it may call itself
        self.backward: int | None = None  # autograd's number of the backward that is in it now
        self._put(self.parameters)

    @property
    def trainable(self) -> list[Flat]:
        """Those of which a gradient is to come."""
        return [flat for flat in self.flats if flat.learns]

    @property
    def is_gathered(self) -> bool:
        """Whether its weights are here, or on their way."""
        return any(flat.is_gathered for flat in self.flats)

    def unshard(self, phase: str) -> None:
        """Start to gather the weights; for "backward" not anew, as it needs those of forward."""
        for flat in self.flats:
            if phase == "forward":
                flat.drop_old()
            flat.unshard()

    def reshard(self) -> None:
        """Put the pieces back, and free the gathered weights."""
        self.backward = None
        self.unbind()
        for flat in self.flats:
            flat.reshard()

    def bind(self, after_backward: Callable) -> None:
        """Wait for the gathered weights, and put them in the place of the pieces."""
        for flat in self.flats:
            flat.wait_for_unshard()
        self.check_weights()
        pieces = [p for flat in self.trainable for p in flat.pieces]
        entered = iter(
            _Enter.apply(self, after_backward, self.trainable, *pieces) if pieces else ()
        )
        full = []
        for flat in self.flats:
            for p, view in zip(flat.pieces, flat.views, strict=False):
                weight = next(entered) if flat.learns else view
                full.append(weight if p.requires_grad else view)
        self._put(full)

    def check_weights(self) -> None:
        """Raise `RuntimeError` where a module has another weight than was put there."""
        for name, (owner, attribute, _), own in zip(self.names, self.slots, self.here, strict=True):
            if owner._parameters.get(attribute) is not own:
                raise RuntimeError(
                    f"fsdp: {name} is another tensor than fsdp.apply has left there, and would be "
                    f"ignored: tie and replace weights before fsdp.apply; functional_call with "
                    f"other weights does not go together with it"
                )

    def unbind(self) -> None:
        """Put the pieces back in the place of the gathered weights."""
        self._put(self.parameters)

    def hold(self) -> None:
        """Keep the gathered weights until the step ends."""
        for flat in self.flats:
            flat.is_held = True

    def end_step(self) -> None:
        """Hold nothing, and forget of calls that were interrupted."""
        self.calls = 0
        for flat in self.flats:
            flat.is_held = False

    def has_memory_of(self, t: Any) -> bool:
        """Whether `t` is one of the gathered weights, or a view of it."""
        has_memory = isinstance(t, Tensor) and torch._C._has_storage(t)
        return has_memory and any(torch._C._is_alias_of(t, flat.full) for flat in self.flats)

    def _put(self, weights: Sequence[Tensor]) -> None:
        self.here = [weights[i] for *_, i in self.slots]
        for (owner, attribute, _), weight in zip(self.slots, self.here, strict=True):
            owner._parameters[attribute] = weight


class _Enter(torch.autograd.Function):
    """Where weights enter the graph; its backward runs when all their gradients are there.

    Autograd runs newer nodes first. This node is older than every operation of the block, so its
    backward runs after all of theirs, frozen weights or not.
    """

    @staticmethod
    def forward(
        ctx: Any, unit: Unit, after_backward: Callable, flats: list[Flat], *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.what, ctx.after_backward = (unit, flats), after_backward
        ctx.set_materialize_grads(False)  # None tells that a weight was not used
        return tuple(view.detach() for flat in flats for view in flat.views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if not _goes_on(ctx):
            raise RuntimeError(
                "fsdp: the weights of a block get their gradients together, in a plain backward(): "
                "not by autograd.grad, nor by backward(inputs=...) with some of them. Freeze those "
                "that are to have none by requires_grad_(False)"
            )
        ctx.after_backward(*ctx.what, list(gradients))
        return None, None, None, *(None for _ in gradients)  # gradients go their own way


def _goes_on(node: Any) -> bool:
    """Whether autograd will go on to all that is behind `node`, as it does in a plain backward."""
    behind = [each for each, _ in node.next_functions if each is not None]
    try:
        return all(map(torch._C._will_engine_execute_node, behind))
    except RuntimeError:  # leaves, in autograd.grad
        return False
