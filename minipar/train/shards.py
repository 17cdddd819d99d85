"""What a rank has of a run under a plan, told in terms of whole tensors: to save it, to load it.

A rank has slices of weights, where tensor and expert parallelism cut, and flat ranges of these,
where ZeRO does; under a pipeline, those of its layers. `parts` says of each which numbers of the
whole tensor it is (`shards.Region`), so that nothing is gathered for a save; `fill` reads the
numbers that are this rank's, and no others. Of several ranks that have the same, one writes; which
one all know without asking.

Proved by: tests/train/test_shards.py.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.values import to_host
from minipar.parallel.base.masters import master_of
from minipar.parallel.base.optimizer_state import pack
from minipar.parallel.base.shards import Part, Region, Row, copies_axis, piece_of
from minipar.parallel.compose import Composed
from minipar.train.checkpoint import by_name
from minipar.train.saver import Saver, deal


def save(
    strategy: Composed,
    saver: Saver,
    step: int,
    state: dict[str, Any],
    names: Sequence[str],
    own: Mapping[str, Part] | None = None,
) -> None:
    """Write a checkpoint of weights, optimizer and `state`, of parameters of these `names`.

    `own` has more tensors of `state` that this rank alone writes, by their path in it. A
    collective; what is gathered are names and numbers. Raises `OSError` as `Saver.save`.
    """
    weights, optimizer, entries = parts(strategy)
    own = {f"optimizer/state/{name}": part for name, part in entries.items()} | (own or {})
    tied = {n: strategy.serial_name(n) for n in strategy.shapes if n != strategy.serial_name(n)}
    state = state | {"optimizer": by_name(optimizer, names)}
    saver.save(step, {}, state, {"weights": weights, "state": own}, tied)


def parts(strategy: Composed) -> tuple[dict[str, Part], dict[str, Any], dict[str, Part]]:
    """Return (weights, optimizer, entries): what this rank writes, by serial names.

    `optimizer` is the state dict of `full_optimizer_state`, alike on all ranks, with meta tensors
    in the place of all that has the shape of a parameter. What this rank writes of these is in
    `entries`, by "NAME/ENTRY". A collective, of names and numbers.
    """
    rows, mine = _rows(strategy), _mine(strategy)
    weights, entries, found = {}, {}, {}

    def part(name: str, piece: Tensor, values: Tensor) -> Part:
        return Part(values.detach().flatten(), _region(strategy, name, piece, rows))

    for name, t in _tensors(strategy).items():
        if ("weights", name) in mine:
            piece = piece_of(t)
            values = master_of(t) if hasattr(t, "master") else piece
            weights[strategy.serial_name(name)] = part(name, piece, values)
    members = strategy.parts.data.members(strategy.optimizer)
    for name, p in itertools.chain(*(group.items() for group in members)):
        piece, serial = piece_of(p), strategy.serial_name(name)
        numbers = found[serial] = {}
        for key, value in strategy.optimizer.state.get(piece, {}).items():
            if isinstance(value, Tensor) and value.shape == piece.shape:
                if ("state", name) in mine:
                    entries[f"{serial}/{key}"] = part(name, piece, value)
                value = value.dtype
            numbers[key] = to_host(value) if isinstance(value, Tensor) else value
    told: dict[str, dict[str, Any]] = defaultdict(dict)
    for theirs in all_gather_object(found, strategy.mesh.world)[::-1]:  # the first counts
        for name, numbers in theirs.items():
            told[name] |= numbers
    for name, numbers in told.items():
        for key, kind in numbers.items():
            if isinstance(kind, torch.dtype):
                shape = strategy.shapes[name]
                numbers[key] = torch.empty(shape, dtype=kind, device="meta")
    return weights, pack(told, strategy.names, strategy.optimizer.param_groups), entries


@torch.no_grad()
def fill(strategy: Composed, read: Mapping[str, Callable[[Region], Tensor]]) -> None:
    """Take this rank's part of the weights, one after the other.

    ``read[name](region)`` returns numbers [k] of a weight by its serial name.
    """
    rows = _rows(strategy)
    for name, t in _tensors(strategy).items():
        values = read[strategy.serial_name(name)](_region(strategy, name, t, rows)).view_as(t)
        t.copy_(values)
        if (piece := piece_of(t)) is not t:
            piece.copy_(rows[piece].part_of(piece, values))  # with all digits, if it is a master
        elif hasattr(t, "master"):
            t.master.copy_(values)


def _tensors(strategy: Composed) -> dict[str, Tensor]:
    """Parameters and buffers of this rank, each by the first of its names."""
    state = strategy.model.state_dict(keep_vars=True)
    return {name: t for t, name in {t: name for name, t in reversed(state.items())}.items()}


def _rows(strategy: Composed) -> dict[nn.Parameter, Row]:
    return {piece: row for row in strategy.rows for piece in row.pieces}


def _region(strategy: Composed, name: str, t: Tensor, rows: Mapping[nn.Parameter, Row]) -> Region:
    """What of the whole tensor `t` is: this rank's slice, and of that the part in a row."""
    region = strategy.parts.region(name, strategy.shapes[strategy.serial_name(name)])
    return region._replace(flat=rows[t].cuts[t]) if t in rows else region


def _mine(strategy: Composed) -> set[tuple[str, str]]:
    """Return of which weights, and of which weights' "state", this rank writes what it has.

    All ranks with the same slice share out by bytes what is theirs; not over the ranks that have
    different ranges of it. Of stages with the same weight, they take turns.
    """
    parts, rows = strategy.parts, _rows(strategy)
    homes: dict[str, int] = {}
    if parts.pipeline is not None:
        for i, weight in enumerate(parts.pipeline.weights):
            homes |= dict.fromkeys(weight.names, weight.ranks[i % len(weight.ranks)])
    groups: dict[tuple, dict[tuple[str, str], int]] = defaultdict(dict)
    for name, t in _tensors(strategy).items():
        if name in homes and homes[name] != parts.pipeline.axis.rank:
            continue
        index, count, who = 0, 1, ()
        if parts.tensor is not None:
            who = parts.tensor.holders(name)
            index, count = who.index(parts.tensor.axis.rank), len(who)
        axis = copies_axis(t, strategy.axis)
        if piece_of(t) not in rows:
            index, count = index * axis.size + axis.rank, count * axis.size
        numel = _region(strategy, name, t, {}).numel
        members = groups[index, count, who, axis.name]
        members |= {("weights", name): numel, ("state", name): 2 * numel}
    shares = (deal(own, count)[index] for (index, count, *_), own in groups.items())
    return set(itertools.chain(*shares))
