"""Which modules are blocks, and which block has which parameter; for fsdp."""

from collections.abc import Iterator, Sequence

from torch import nn

Blocks = Sequence[type[nn.Module] | nn.Module | str]
Slot = tuple[nn.Module, str, str, nn.Parameter]  # a module's attribute, its name, what it holds


def find(model: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the modules that `blocks` means: classes, modules or names; None: those of lists.

    Raises `ValueError` for what the model has not.
    """
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


def assign(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list[Slot]]:
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
