"""The state of an optimizer by the names of its parameters, whole, as of one device.

A state dict counts parameters through: its groups hold numbers, and its "state" has an entry for
each number. Which parameter a number means depends on the order in which the optimizer got them;
so whole states here say it as torch's own do for `named_parameters()`, in "param_names" of each
group, and are paired by these when they are loaded.

A *label* is the name of a parameter, or a number if it has none; `labelled` makes them.
"""

import itertools
from collections import ChainMap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minipar.comm.collectives import all_gather_object
from minipar.comm.values import to_host
from minipar.parallel.base.shards import Row, piece_of

Labels = Sequence[Iterable[Hashable]]  # of the parameters of each group
Members = Sequence[Mapping[Hashable, nn.Parameter]]  # and what they label
SCALARS = {"step", "mu_product", "eta", "mu"}  # never cut, also if the parameter is a scalar


def pack(
    entries: Mapping[Hashable, Any],
    labels: Labels,
    groups: Sequence[Mapping[str, Any]],
    *,
    named: bool = True,
) -> dict[str, Any]:
    """Return the state dict of `entries` by label; `groups` have the options of each group."""
    order = {label: i for i, label in enumerate(itertools.chain(*labels))}
    packed = []
    for group, own in zip(groups, labels, strict=True):
        group = {key: value for key, value in group.items() if key != "param_names"}
        group["params"] = [order[label] for label in own]
        if named and all(isinstance(label, str) for label in own):
            group["param_names"] = list(own)
        packed.append(group)
    state = {number: entries[label] for label, number in order.items() if label in entries}
    return {"state": state, "param_groups": packed}


def unpack(state: Mapping[str, Any], labels: Labels) -> dict[Hashable, Any]:
    """Return the entries of a state dict by label: paired by name, or by number if it has no names.

    Raises `ValueError` for the state of other parameters.
    """
    groups, labels = state["param_groups"], [list(own) for own in labels]
    theirs, ours = [len(group["params"]) for group in groups], [len(own) for own in labels]
    if theirs != ours:
        raise ValueError(f"the state has groups of {theirs} parameters, and here are {ours}")
    found = {}
    for group, own in zip(groups, labels, strict=True):
        names = group.get("param_names")
        if names is None or not all(isinstance(label, str) for label in own):
            names = own
        if differ := sorted(set(names) ^ set(own)):
            raise ValueError(
                f"the state is of other parameters: {differ[0]} (one of {len(differ)}) is "
                f"{'only there' if differ[0] in names else 'only here'}"
            )
        found |= dict(zip(names, group["params"], strict=True))
    return {name: state["state"][i] for name, i in found.items() if i in state["state"]}


def labelled(
    groups: Iterable[Iterable[nn.Parameter]], names: Mapping[nn.Parameter, str]
) -> list[dict[Hashable, nn.Parameter]]:
    """Return the parameters of each group by label."""
    count = itertools.count()
    return [{names.get(p, i): p for p, i in zip(g, count, strict=False)} for g in groups]


def as_groups(params: Iterable[Any]) -> tuple[list[dict[str, Any]], dict[nn.Parameter, str]]:
    """What torch's optimizers accept: tensors, pairs of name and tensor, or groups of either.

    Returns groups of tensors, and the names of those that have one.
    """
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    result, names = [], {}
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        names |= {m[1]: m[0] for m in members if isinstance(m, tuple)}
        members = [m[1] if isinstance(m, tuple) else m for m in members]
        result.append({**group, "params": list(dict.fromkeys(members))})  # tied ones once
    return result, names


# ---------------------------------------------------------------------- where parameters are cut
def join_state(optimizer: Optimizer, members: Members, rows: Iterable[Row]) -> dict[str, Any]:
    """Return a copy of the state of `optimizer` as one device would have it, on the CPU; a
    collective.

    `members` are its parameters, or those of which it steps the pieces; `rows` hold all pieces.
    """
    rows = list(rows)
    label_of = {piece_of(p): label for group in members for label, p in group.items()}
    state = {p: optimizer.state[p] for p in label_of if p in optimizer.state}
    cut = {p for row in rows for p in row.pieces}
    whole = {label_of[p]: dict(entries) for p, entries in state.items() if p not in cut}
    # A rank may step no piece without numbers, and so all tell of what they have some: along the
    # widest axis, as fewer ranks have the same experts.
    own = {label_of[p]: _kinds(entries, p) for p, entries in state.items() if p in cut}
    everyone = max((row.axis for row in rows), key=lambda axis: axis.size, default=None)
    for told in all_gather_object(own, everyone)[::-1] if everyone else ():  # the first counts
        whole |= told
    for row in rows:
        labels = {p: label_of[p] for p in row.pieces if label_of.get(p) in whole}
        for key in dict.fromkeys(key for label in labels.values() for key in whole[label]):
            kinds = {p: whole[label].get(key) for p, label in labels.items()}
            kinds = {p: kind for p, kind in kinds.items() if isinstance(kind, torch.dtype)}
            if kinds:
                here = {p: state[p][key] for p in kinds if p in state}
                joined = row.join(here, next(iter(kinds.values())))
                for p in kinds:
                    whole[labels[p]][key] = to_host(joined[p])
    for entries in whole.values():  # copies: what is here goes on changing
        entries |= {k: to_host(v).clone() for k, v in entries.items() if isinstance(v, Tensor)}
    return pack(whole, members, optimizer.param_groups)


def _kinds(entries: Mapping[str, Any], p: nn.Parameter) -> dict[str, Any]:
    """Of the state of a piece: the dtype of what has its shape; all else as it is, on the CPU."""
    return {
        key: value
        if not isinstance(value, Tensor)
        else (value.dtype if value.shape == p.shape else to_host(value))
        for key, value in entries.items()
    }


def cut_state(
    state: Mapping[str, Any], members: Members, rows: Iterable[Row]
) -> dict[Hashable, dict[str, Any]]:
    """Return, by label, this rank's part of what `join_state` returned, paired by name.

    Raises `ValueError` for the state of other parameters.
    """
    row_of, parameters = {p: row for row in rows for p in row.pieces}, ChainMap(*members)
    own: dict[Hashable, dict[str, Any]] = {}
    for label, entries in unpack(state, members).items():
        piece = piece_of(parameters[label])
        row, own[label] = row_of.get(piece), {}
        for key, value in entries.items():
            if callable(value):  # it reads this rank's part from a file
                value = value(row.cuts[piece] if row else None).view_as(piece)
            elif isinstance(value, Tensor):
                is_cut = row and key not in SCALARS and value.shape == row.shapes[piece]
                value = row.part_of(piece, value) if is_cut else value
                value = value.clone()  # not a view of the whole, nor a number that others count
            own[label][key] = value
    return own
