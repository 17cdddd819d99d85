"""The meaning of equal, and the way from pieces of ranks to tensors of one device.

The law of parity, for `minipar prove` and for minipar's own tests alike: initial weights, losses,
every gradient, gradient norms and weights agree to a relative 1e-10 in float64. Gradients come
before their norm, and before weights: Adam hides constant factors.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates, groups_along

RTOL = 1e-10
ROUNDING = 1e-14
"""Relative to the largest number of all tensors: what rounding leaves of sums that cancel, such as
the gradient of a bias in front of a softmax."""

State = dict[str, Tensor | None]
Stage = tuple[str, int | None]  # "gradient" of a step; steps count from 0, -1 is after the last


@dataclass
class Record:
    """The results of a training, by the names and in the shapes of one device."""

    before: State
    after: State
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)  # None: not known
    gradients: list[State] = field(default_factory=list)
    weights: list[State] = field(default_factory=list)  # after each step; may be left out
    buffers: list[State] = field(default_factory=list)  # likewise

    def stages(self) -> Iterator[tuple[Stage, State]]:
        """Yield all stages in the order of computation; a number is a tensor named ""."""
        yield ("initial weights", None), self.before
        for step, gradients in enumerate(self.gradients):
            yield ("loss", step), _number(self.losses[step])
            yield ("gradient", step), gradients
            yield ("gradient norm", step), _number(self.norms[step])
            yield ("weights", step), self.weights[step] if self.weights else {}
            yield ("buffer", step), self.buffers[step] if self.buffers else {}
        yield ("weights", -1), self.after


def _number(value: float | None) -> State:
    return {} if value is None else {"": torch.tensor(value, dtype=torch.float64)}


def differing(found: State, expected: State, rtol: float = RTOL) -> dict[str, str]:
    """Return the names of the tensors that differ, in the order of `expected`, and how."""
    numbers = [_largest_finite(t) for t in expected.values() if t is not None]
    floor = ROUNDING * max(numbers, default=0.0)
    told: dict[str, str] = {}
    for name, theirs in expected.items():
        ours = found.get(name)
        if name not in found:
            told[name] = "is missing"
        elif ours is None or theirs is None:
            if ours is not theirs:
                told[name] = f"is {'None' if ours is None else 'not None'}, unlike on one device"
        elif ours.shape != theirs.shape:
            told[name] = f"has shape {list(ours.shape)}, not {list(theirs.shape)}"
        elif not is_close(ours, theirs, rtol, floor):
            told[name] = f"off by {_largest(ours - theirs):.3g} of {_largest(theirs):.3g}"
    return told | {name: "is not there on one device" for name in found if name not in expected}


def is_close(ours: Tensor, theirs: Tensor, rtol: float = RTOL, floor: float = 0.0) -> bool:
    """Return True if two tensors agree, relative to the largest number of `theirs`."""
    if ours.shape != theirs.shape:
        return False
    apart = ours != theirs  # equal infinities are not; NaN is close to nothing
    bound = rtol * _largest_finite(theirs) + floor
    return not apart.any() or _largest((ours - theirs)[apart]) <= bound


def noise(gradients: State) -> State:
    """Return where gradients are only rounding of zero; Adam makes steps of any size from this.

    Such is the gradient of a key's bias, which softmax cancels, or of a bias before BatchNorm.
    """
    held = {name: g.abs() for name, g in gradients.items() if g is not None}
    floor = ROUNDING * max(map(_largest, held.values()), default=0.0)
    small = {name: g <= floor for name, g in held.items()}
    # Rounding leaves some exact zeros, too. If all small numbers of a tensor are 0, these are true.
    return {name: where for name, where in small.items() if held[name][where].any()}


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _largest_finite(tensor: Tensor) -> float:
    """Return the scale of a tensor: the mask of an attention may hold -inf."""
    return _largest(tensor[tensor.isfinite()])


# ---------------------------------------------------------------------- pieces of ranks
Form = dict[str, int | str]
"""How ranks along each axis hold a tensor: by pieces of a dim, or summands ("sum", "mean")."""


def join(pieces: Sequence[Tensor], sizes: Mapping[str, int], form: Form) -> list[Tensor]:
    """Return for each rank the tensor that its groups along the axes of `form` hold together."""
    joined = list(pieces)
    for axis, how in form.items():
        for group in groups_along([axis], sizes):
            parts = [joined[rank] for rank in group]
            if isinstance(how, int):
                together = torch.cat(parts, how)
            else:
                together = torch.stack(parts).sum(0) / (len(parts) if how == "mean" else 1)
            for rank in group:
                joined[rank] = together
    return joined


def forms(
    pieces: Sequence[Tensor], sizes: Mapping[str, int], shape: torch.Size, *words: str
) -> Iterator[tuple[Form, list[Tensor]]]:
    """Yield each form in which the pieces of all ranks make a tensor of `shape`, simple ones first.

    `words`: "sum" and "mean", where they count as forms as well.
    """
    axes = [axis for axis, size in sizes.items() if size > 1]
    choices = itertools.product([None, *words, *range(len(shape))], repeat=len(axes))
    for chosen in sorted(choices, key=lambda choice: -choice.count(None)):
        form = {axis: how for axis, how in zip(axes, chosen, strict=True) if how is not None}
        try:
            joined = join(pieces, sizes, form)
        except (RuntimeError, IndexError):  # these pieces do not fit together so
            continue
        if all(together.shape == shape for together in joined):
            yield form, joined


def whole(
    pieces: Sequence[Tensor | None], sizes: Mapping[str, int], expected: Tensor
) -> list[Tensor | None]:
    """Return for each rank the tensor that it has a piece of; unchanged where no form fits.

    A rank without a piece stays without: a stage of a pipeline is on some ranks alone, the ranks
    of one part of the mesh.
    """
    holders = [rank for rank, piece in enumerate(pieces) if piece is not None]
    held = [pieces[rank] for rank in holders]
    at = [coordinates(rank, sizes) for rank in holders]
    part = {axis: len({place[axis] for place in at}) for axis in sizes}
    if all(t.shape == expected.shape for t in held) or math.prod(part.values()) != len(holders):
        return list(pieces)
    fitting = [joined for _, joined in forms(held, part, expected.shape)]
    right = [joined for joined in fitting if all(is_close(w, expected) for w in joined)]
    found = dict(zip(holders, (right or fitting or [held])[0], strict=True))
    return [found.get(rank) for rank in range(len(pieces))]
