"""Save and load a rank's share of a run under any plan, as regions of whole tensors.

Under tensor and expert parallelism a rank has slices of weights, under ZeRO flat ranges of these
slices, in a pipeline the weights of its layers. For each of them, `parts` says which numbers of the
whole tensor it has (a `Region`), so a save gathers nothing. `fill` reads only the numbers of this
rank. Where several ranks have the same numbers, one of them writes; all know which one.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object
from minipar.comm.hostcopy import to_host
from minipar.parallel.base.masters import master_of
from minipar.parallel.base.shards import Region, copies_axis, is_part, piece_of, region_of
from minipar.parallel.compose import Composed
from minipar.train.saver import Part, Saver, deal


def save(strategy: Composed, saver: Saver, step: int, state: dict[str, Any]) -> None:
    """Write a checkpoint of weights, optimizer and `state`; a collective of names and numbers.

    Raises `OSError` as `Saver.save`.
    """
    weights, optimizer, entries = parts(strategy)
    own = {f"optimizer/state/{name}": part for name, part in entries.items()}
    tied = {n: strategy.serial_name(n) for n in strategy.shapes if n != strategy.serial_name(n)}
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in strategy.optimizer.param_groups
    ]
    state = state | {"optimizer": {"state": optimizer, "groups": groups}}
    saver.save(step, {}, state, {"weights": weights, "state": own}, tied)


def parts(
    strategy: Composed,
) -> tuple[dict[str, Part], dict[str, dict[str, Any]], dict[str, Part]]:
    """Return (weights, optimizer, entries): what this rank writes, by serial names.

    `optimizer` has the entries of all parameters by name, the same on all ranks. A meta tensor
    stands for an entry with the shape of its parameter. `entries` has the parts of such entries
    that this rank writes, by "NAME/ENTRY". A collective, of names and numbers.
    """
    mine = _mine(strategy)
    weights, entries, found = {}, {}, {}

    def part(piece: Tensor, values: Tensor) -> Part:
        return Part(values.detach().flatten(), region_of(piece))

    for name, t in _tensors(strategy).items():
        if name in mine:
            piece = piece_of(t)
            values = master_of(t) if hasattr(t, "master") else piece
            weights[strategy.serial_name(name)] = part(piece, values)
    members = strategy.parts.data.members(strategy.optimizer)
    for name, piece in itertools.chain(*(group.items() for group in members)):
        serial = strategy.serial_name(name)
        numbers = found[serial] = {}
        for key, value in strategy.optimizer.state.get(piece, {}).items():
            if isinstance(value, Tensor) and value.shape == piece.shape:
                if name in mine:
                    entries[f"{serial}/{key}"] = part(piece, value)
                value = value.dtype
            numbers[key] = to_host(value) if isinstance(value, Tensor) else value
    told: dict[str, dict[str, Any]] = defaultdict(dict)
    for theirs in all_gather_object(found, strategy.mesh.world)[::-1]:  # the first counts
        for name, numbers in theirs.items():
            told[name] |= numbers
    for name, numbers in told.items():
        for key, kind in numbers.items():
            if isinstance(kind, torch.dtype):
                numbers[key] = torch.empty(strategy.shapes[name], dtype=kind, device="meta")
    return weights, {name: numbers for name, numbers in told.items() if numbers}, entries


@torch.no_grad()
def fill(strategy: Composed, read: Mapping[str, Callable[[Region], Tensor]]) -> None:
    """Read this rank's part of the weights: ``read[name](region)`` returns numbers [k]."""
    for name, t in _tensors(strategy).items():
        values = read[strategy.serial_name(name)](region_of(t)).view_as(t)
        t.copy_(values)
        if (piece := piece_of(t)) is not t:
            piece.data.copy_(values.flatten()[region_of(piece).flat].view_as(piece))  # unrounded
        elif hasattr(t, "master"):
            t.master.copy_(values)


def _tensors(strategy: Composed) -> dict[str, Tensor]:
    """Return parameters and buffers of this rank, each by the first of its names."""
    state = strategy.model.state_dict(keep_vars=True)
    return {name: t for t, name in {t: name for name, t in reversed(state.items())}.items()}


def _mine(strategy: Composed) -> set[str]:
    """Return the names of the tensors that this rank writes, with their state.

    Ranks with the same weights deal them out by bytes. Of ranks of tp with the same heads, the
    first writes. Stages with the same weight take turns.
    """
    parts = strategy.parts
    homes: dict[str, int] = {}
    if parts.pipeline is not None:
        for i, weight in enumerate(parts.pipeline.weights):
            homes |= dict.fromkeys(weight.names, weight.ranks[i % len(weight.ranks)])
    groups: dict[tuple, dict[str, int]] = defaultdict(dict)
    for name, t in _tensors(strategy).items():
        if name in homes and homes[name] != parts.pipeline.axis.rank:
            continue
        region, tp = region_of(t), strategy.mesh.tp
        if region.is_copy:
            continue
        is_cut = any(is_part(tp, axis) for axis in region.axes)
        index, count = (0, 1) if is_cut else (tp.rank, tp.size)
        axis = copies_axis(t, strategy.axis)
        if region_of(piece_of(t)).flat is None:
            index, count = index * axis.size + axis.rank, count * axis.size
        groups[index, count, is_cut, axis.name][name] = region.numel
    shares = (deal(own, count)[index] for (index, count, *_), own in groups.items())
    return set(itertools.chain(*shares))
