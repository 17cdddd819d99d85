"""What a rank keeps of a row of parameters, and how whole tensors come out of flat shards again.

zero and fsdp cut alike: parameters lie one after the other, the row is padded to n S numbers, and
rank r keeps the S from r S on. Three parameters of 4, 5 and 2 numbers on two ranks, S = 6::

    parameter   a a a a b b | b b b c c .
    rank        0 0 0 0 0 0 | 1 1 1 1 1 1
                                            on rank 1:   a           b            c
    span, where it lies in the shard                     [0:0]       [0:3]        [3:5]
    cut, what part of the parameter it is                [0:0]       [2:5]        [0:2]
"""

import math
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.parallel.optimizer_state import labelled, pack, unpack
from minipar.parallel.strategy import Strategy


class Layout:
    """Parameters of `numels` numbers in a row, cut over `axis`; see above."""

    def __init__(self, numels: Sequence[int], axis: Axis) -> None:
        self.size = size = math.ceil(sum(numels) / axis.size)  # S
        self.total = axis.size * size
        self.splits = [*numels, self.total - sum(numels)]  # and the padding
        self.spans, self.cuts = [], []
        place = -axis.rank * size  # where a parameter begins, as seen from the shard
        for numel in numels:
            start, end = (min(max(at, 0), size) for at in (place, place + numel))
            self.spans.append(slice(start, end))
            self.cuts.append(slice(start - place, end - place) if start < end else slice(0, 0))
            place += numel


def mark(piece: nn.Parameter, p: nn.Parameter, axis: Axis) -> None:
    """Let `piece` say that it is a part of `p`, cut over `axis` besides the axes of `p`."""
    piece.shard_axes = (*getattr(p, "shard_axes", ()), axis)
    piece.full_shape = getattr(p, "full_shape", p.shape)
    piece.is_copy = getattr(p, "is_copy", False)


class FlatShards(Strategy):
    """A strategy whose `flats` hold all parameters: whole tensors out of it, and into it."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        state = self.model.state_dict(keep_vars=True)
        copies: dict[Tensor, Tensor] = {}
        for flat in self.flats:
            copies |= zip(flat.parameters, flat.whole(flat.shard), strict=True)
        copies |= {t: t.detach().clone() for t in state.values() if t not in copies}
        return {name: copies[t] for name, t in state.items()}

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return gradients by name, shaped as in the serial model; all ranks call it."""
        whole: dict[Tensor, Tensor | None] = {}
        for flat in self.flats:
            gradients = {p: p.grad for p in flat.parameters if p.grad is not None}
            for p, gradient in _whole(flat, gradients, flat.shard.dtype).items():
                whole[p] = gradient if p in gradients else None
        return {name: whole[p] for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's pieces, and the buffers, out of what `full_state_dict` returned.

        Raises `ValueError` when names or shapes are not those of the model.
        """
        own, cuts = self.model.state_dict(keep_vars=True), self._cuts()
        shapes = {
            p: v.shape for f in self.flats for p, v in zip(f.parameters, f.views, strict=True)
        }
        ours = {(name, tuple(shapes.get(t, t.shape))) for name, t in own.items()}
        theirs = {(name, tuple(t.shape)) for name, t in state.items()}
        if ours != theirs:
            raise ValueError(
                f"the state is of another model: here {sorted(ours - theirs)}, "
                f"there {sorted(theirs - ours)}"
            )
        for name, t in own.items():
            t.copy_(_cut(state[name], cuts[t], t) if t in cuts else state[name])

    @torch.no_grad()
    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer`, made of the pieces, as on one device, on the CPU.

        For any number of ranks, and for an optimizer of a serial model; "param_names" say what is
        whose. All ranks call it.
        """
        state, labels = optimizer.state_dict(), self._labels(optimizer)
        whole = {label: dict(entries) for label, entries in unpack(state, labels).items()}
        label_of = {p: label for group in labels for label, p in group.items()}
        for flat in self.flats:
            states = {p: optimizer.state[p] for p in flat.parameters if p in optimizer.state}
            for key, like in next(iter(states.values()), {}).items():
                if _is_elementwise(key, like):
                    values = {p: entries[key] for p, entries in states.items()}
                    for p, tensor in _whole(flat, values, like.dtype).items():
                        if p in states:
                            whole[label_of[p]][key] = tensor.cpu()
        return pack(whole, labels, state["param_groups"])

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Take this rank's pieces out of what `full_optimizer_state` returned, paired by name.

        Raises `ValueError` for the state of other parameters.
        """
        labels, cuts, pieces = self._labels(optimizer), self._cuts(), {}
        for label, entries in unpack(state, labels).items():
            p = ChainMap(*labels)[label]
            pieces[label] = {
                key: _cut(value, cuts[p], p) if p in cuts and _is_elementwise(key, value) else value
                for key, value in entries.items()
            }
        optimizer.load_state_dict(pack(pieces, labels, state["param_groups"], named=False))

    def _cuts(self) -> dict[Tensor, slice]:
        return {p: c for f in self.flats for p, c in zip(f.parameters, f.layout.cuts, strict=True)}

    def _labels(self, optimizer: torch.optim.Optimizer) -> list[dict[Any, nn.Parameter]]:
        names = {p: name for name, p in self.model.named_parameters()}
        return labelled([group["params"] for group in optimizer.param_groups], names)


class StateOfPieces:
    """An optimizer whose state, of `pieces` and with an `inner` optimizer, is saved whole."""

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Return the state, by default as `optimizer_class` itself would on one device.

        That is a collective, and puts all of it on the CPU. With ``sharded=True``: this rank's
        part, at no cost, for the same rank of as many.
        """
        if sharded:
            return {**self.inner.state_dict(), "shard": [self.axis.rank, self.axis.size]}
        labels = labelled(self.wholes, self.names)
        own = {
            label: tree_map_only(Tensor, Tensor.cpu, self.state[piece])
            for label, p in ChainMap(*labels).items()
            if (piece := self.pieces.get(p)) in self.state
        }
        parts, state = all_gather_object(own, self.axis), {}
        for label, p in ChainMap(*labels).items():
            if found := [part[label] for part in parts if label in part]:
                state[label] = {key: _join([piece[key] for piece in found], p) for key in found[0]}
        return pack(state, labels, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, whole or sharded, also one of `optimizer_class` itself.

        A whole one is paired by names where both sides know them (see `pack`): of an optimizer made
        of `named_parameters()`, or attached to a model. Raises `ValueError` for other parameters,
        and for a shard of another rank or of as many.
        """
        mine = [self.axis.rank, self.axis.size]
        if "shard" in state_dict:
            if list(state_dict["shard"]) != mine:
                rank, size = state_dict["shard"]
                raise ValueError(
                    f"this is the state of rank {rank} of {size}, and here is rank {mine[0]} of "
                    f"{mine[1]}; save whole states to change the number of ranks"
                )
            parts = {key: state_dict[key] for key in ("state", "param_groups")}
        else:
            parts = self._part_of(state_dict)
        self.inner.load_state_dict(parts)
        self._adopt()

    def _part_of(self, whole: dict[str, Any]) -> dict[str, Any]:
        """What the inner optimizer is to load of a whole state."""
        labels, parts = labelled(self.wholes, self.names), {}
        for label, entries in unpack(whole, labels).items():
            if (p := ChainMap(*labels)[label]) in self.pieces:
                parts[label] = {key: self._part(p, value) for key, value in entries.items()}
        mine = [[label for label, p in own.items() if p in self.pieces] for own in labels]
        return pack(parts, mine, whole["param_groups"], named=False)

    def _part(self, p: nn.Parameter, value: Any) -> Any:
        """My piece's part of one entry of the state of a parameter."""
        if not isinstance(value, Tensor):
            return value
        return (self.bucket_of[p].part_of(p, value) if value.shape == p.shape else value).clone()


def _whole(
    flat: Any, pieces: dict[nn.Parameter, Tensor], dtype: torch.dtype
) -> dict[nn.Parameter, Tensor]:
    """Gather one tensor for each parameter of `flat` from the `pieces` of all ranks, or zeros."""
    shard = flat.shard.new_zeros(flat.shard.shape, dtype=dtype)
    for p, span in zip(flat.parameters, flat.layout.spans, strict=True):
        if p in pieces:
            shard[span] = pieces[p].flatten()
    return dict(zip(flat.parameters, flat.whole(shard), strict=True))


def _cut(whole: Tensor, cut: slice, like: Tensor) -> Tensor:
    return whole.flatten()[cut].view_as(like).clone()  # not a view, which would keep the whole


def _is_elementwise(key: str, value: Any) -> bool:
    """Whether an entry of the state of a parameter has a number for each of its numbers."""
    return isinstance(value, Tensor) and key != "step"


def _join(pieces: list[Any], like: Tensor) -> Any:
    """One entry of the state of a parameter, from those of its pieces in their order."""
    if isinstance(pieces[0], Tensor) and pieces[0].ndim:
        return torch.cat([piece.flatten() for piece in pieces]).view_as(like)
    return pieces[0]  # no more than a number, such as a count of steps
