"""What a compressor is: vectors in; out, their sum over all ranks and what was not sent of mine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.mesh import Axis

Reduced = tuple[Tensor, Tensor]  # w sum_r s_r, the same on all ranks; and this rank's residue


class Compressor:
    """A way to add up vectors over all ranks with fewer bytes.

    Keeps state (random numbers, warm starts): every strategy needs one of its own.
    """

    feedback = True
    """Whether residues are kept unless the user says otherwise: where the error has a bias."""
    generator = None
    """Random numbers, from the first call on."""

    def reduce(
        self, vector: Tensor, axis: Axis, weight: float, parameters: Sequence[nn.Parameter]
    ) -> Reduced:
        """Return ``weight * sum`` over ranks of what was sent of `vector`, and what was not.

        `vector` [N] holds the gradients of `parameters` one after the other, in float32 or float64.
        """
        raise NotImplementedError

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Return what the next call depends on besides its arguments, by the `names` given."""
        return {"generator": self.generator and self.generator.get_state()}

    def load_state_dict(
        self, state: dict[str, Any], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Go on from what `state_dict` returned."""
        if state["generator"] is not None:
            self.generator = make_generator(next(iter(parameters.values())).device, seed=0)
            self.generator.set_state(state["generator"])


def check(is_good: bool, name: str, value: Any, rule: str) -> None:
    if not is_good:
        raise ValueError(f"{name}={value} does not work here; use {rule}")


def make_generator(device: torch.device, seed: int) -> torch.Generator | None:
    """Random numbers that leave those of the caller alone; "meta" has none to give."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
