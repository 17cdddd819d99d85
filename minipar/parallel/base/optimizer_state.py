"""The whole state of an optimizer, as on one device, by the names of its parameters.

A state dict numbers the parameters: groups list numbers, and "state" has an entry for each number.
If an optimizer gets its parameters in another order, a number means another parameter. So whole
states also have names, in "param_names" of each group, as torch's own states do for
`named_parameters()`. Loading matches parameters by these names.
"""

import itertools
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from minipar.comm.hostcopy import to_host
from minipar.parallel.base.shards import region_of

Names = Sequence[Iterable[str]]  # of the parameters of each group
Members = Sequence[Mapping[str, nn.Parameter]]  # what the optimizer steps, by group and name
SCALARS = {"step", "mu_product", "eta", "mu"}  # no moments, even if the parameter's shape is ()


def pack(
    entries: Mapping[str, Any], names: Names, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state dict of `entries` (name -> state); `groups` have each group's options."""
    order = {name: i for i, name in enumerate(itertools.chain(*names))}
    packed = [
        {**group, "params": [order[name] for name in own], "param_names": list(own)}
        for group, own in zip(groups, names, strict=True)
    ]
    state = {number: entries[name] for name, number in order.items() if name in entries}
    return {"state": state, "param_groups": packed}


def unpack(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the entries of a state dict by name; match by number if the state has no names.

    Raises `ValueError` for the state of other parameters.
    """
    found = {}
    for group, own in zip(state["param_groups"], map(list, names), strict=True):
        theirs = group.get("param_names", own)
        if differ := sorted(set(theirs) ^ set(own)):
            raise ValueError(
                f"the state is of other parameters: {differ[0]} (one of {len(differ)}) is "
                f"{'only there' if differ[0] in theirs else 'only here'}"
            )
        found |= dict(zip(theirs, group["params"], strict=True))
    return {name: state["state"][i] for name, i in found.items() if i in state["state"]}


def join_state(optimizer: Optimizer, members: Members, device: torch.device) -> dict[str, Any]:
    """Return a copy of the state of `optimizer` as of one device, on the CPU; a collective.

    The collectives run on `device`. A rank steps empty pieces too, so all ranks have entries for
    the same parameters.
    """
    whole = {}
    for name, p in sorted(ChainMap(*members).items()):  # in one order on all ranks

        def join(t: Tensor, p: nn.Parameter = p) -> Tensor:  # a moment, or a count of steps
            is_moment = t.shape == p.shape
            return to_host(region_of(p).join(t, device) if is_moment else t.clone())

        if p in optimizer.state:
            whole[name] = tree_map_only(Tensor, join, optimizer.state[p])
    return pack(whole, members, optimizer.param_groups)


def cut_state(state: Mapping[str, Any], members: Members) -> dict[str, Any]:
    """Return this rank's part of a state of `join_state`, for an optimizer of `members`.

    Raises `ValueError` for the state of other parameters.
    """
    parameters = ChainMap(*members)
    own: dict[str, dict[str, Any]] = {}
    for name, entries in unpack(state, members).items():
        p, own[name] = parameters[name], {}
        region = region_of(p)
        for key, value in entries.items():
            if callable(value):  # a function that reads this rank's part from a file
                value = value(region).view_as(p)
            elif isinstance(value, Tensor):
                is_cut = region.axes and key not in SCALARS and value.shape == region.shape
                value = region.cut(value).view_as(p) if is_cut else value.clone()
            own[name][key] = value
    return pack(own, members, state["param_groups"])
