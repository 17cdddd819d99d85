"""The state of an optimizer by the names of its parameters, whole, as of one device.

A state dict numbers the parameters: groups list numbers, and "state" has an entry for each number.
A number means another parameter where the optimizer got them in another order. So whole states
name them too, in "param_names" of each group, as torch's own do for `named_parameters()`. Loading
pairs by these names.

A *label* is the name of a parameter, or its number if it has no name; `labelled` makes labels.
"""

import itertools
from collections import ChainMap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from minipar.comm.values import to_host
from minipar.parallel.base.shards import piece_of, region_of

Labels = Sequence[Iterable[Hashable]]  # of the parameters of each group
Members = Sequence[Mapping[Hashable, nn.Parameter]]  # the parameters of each group, by label
SCALARS = {"step", "mu_product", "eta", "mu"}  # numbers, also where the parameter is a number


def labelled(
    groups: Iterable[Iterable[nn.Parameter]], names: Mapping[nn.Parameter, str]
) -> list[dict[Hashable, nn.Parameter]]:
    """Return the parameters of each group by label."""
    count = itertools.count()
    return [{names.get(p, i): p for p, i in zip(g, count, strict=False)} for g in groups]


def pack(
    entries: Mapping[Hashable, Any], labels: Labels, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state dict of `entries` by label; `groups` have the options of each group."""
    order = {label: i for i, label in enumerate(itertools.chain(*labels))}
    packed = []
    for group, own in zip(groups, labels, strict=True):
        group = {**group, "params": [order[label] for label in own]}
        group.pop("param_names", None)
        if all(isinstance(label, str) for label in own):
            group["param_names"] = list(own)
        packed.append(group)
    state = {number: entries[label] for label, number in order.items() if label in entries}
    return {"state": state, "param_groups": packed}


def unpack(state: Mapping[str, Any], labels: Labels) -> dict[Hashable, Any]:
    """Return the entries of a state dict by label: paired by name, or by number without names.

    Raises `ValueError` for the state of other parameters.
    """
    groups, labels = state["param_groups"], [list(own) for own in labels]
    theirs, ours = [len(group["params"]) for group in groups], [len(own) for own in labels]
    if theirs != ours:
        raise ValueError(f"the state has groups of {theirs} parameters, and here are {ours}")
    found = {}
    for group, own in zip(groups, labels, strict=True):
        names = group.get("param_names", own)
        if differ := sorted(set(names) ^ set(own), key=str):
            raise ValueError(
                f"the state is of other parameters: {differ[0]} (one of {len(differ)}) is "
                f"{'only there' if differ[0] in names else 'only here'}"
            )
        found |= dict(zip(names, group["params"], strict=True))
    return {name: state["state"][i] for name, i in found.items() if i in state["state"]}


def join_state(optimizer: Optimizer, members: Members, device: torch.device) -> dict[str, Any]:
    """Return a copy of the state of `optimizer` as of one device, on the CPU; a collective.

    `members` are its parameters, or the parameters whose pieces it steps; ranks talk on `device`.
    A rank steps empty pieces too, so all ranks have entries for the same parameters.
    """
    whole = {}
    for label, p in ChainMap(*members).items():
        piece = piece_of(p)

        def join(t: Tensor, piece: nn.Parameter = piece) -> Tensor:  # a moment, or a count of steps
            is_moment = t.shape == piece.shape
            return to_host(region_of(piece).join(t, device) if is_moment else t.clone())

        if piece in optimizer.state:
            whole[label] = tree_map_only(Tensor, join, optimizer.state[piece])
    return pack(whole, members, optimizer.param_groups)


def cut_state(state: Mapping[str, Any], optimizer: Optimizer, members: Members) -> dict[str, Any]:
    """Return what `optimizer` on this rank can load of what `join_state` returned.

    Raises `ValueError` for the state of other parameters.
    """
    parameters = ChainMap(*members)
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    own: dict[Hashable, dict[str, Any]] = {}
    for label, entries in unpack(state, members).items():
        piece = piece_of(parameters[label])
        region, own[label] = region_of(piece), {}
        for key, value in entries.items():
            if callable(value):  # it reads this rank's part from a file
                value = value(region).view_as(piece)
            elif isinstance(value, Tensor):
                is_cut = region.axes and key not in SCALARS and value.shape == region.shape
                value = region.cut(value).view_as(piece) if is_cut else value.clone()
            own[label][key] = value
    labels = [[label for label, p in g.items() if piece_of(p) in stepped] for g in members]
    return pack(own, labels, state["param_groups"])
