"""Does an optimizer step on each number alone? Only then can it work on pieces of parameters."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer like this one, over other parameters, without its hooks."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.param_groups, twin.state = groups, defaultdict(dict)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def check_elementwise(
    make: Callable[..., Optimizer], name: str, group: dict[str, Any], like: Tensor
) -> None:
    """Raise `ValueError` unless two steps on pieces of a matrix are those on the matrix."""
    weights = torch.linspace(-1, 1, 20, device=like.device)

    def train(*parts: Tensor) -> Tensor:
        parts = [nn.Parameter(part.clone()) for part in parts]
        for part in parts:  # each by itself, as ranks have them: some look at all of a group
            # A warm-up may begin with a rate of 0, which would prove nothing.
            optimizer = make([{**group, "lr": 0.1, "params": [part]}])
            for step in range(2):
                part.grad = (5 * part + step).cos().detach()
                type(optimizer).step(optimizer)  # schedulers put a method of their own over it
        return torch.cat([part.detach().flatten() for part in parts])

    # What is wrong with options is raised as it is.
    make([{**group, "params": [nn.Parameter(weights.view(4, 5).clone())]}])
    pieces, why = [piece[:, None] for piece in weights.split([7, 13])], None
    try:  # on "meta" there are no values, and nothing to compare
        is_same = like.is_meta or torch.allclose(train(*pieces), train(weights.view(4, 5)))
    except Exception as error:
        is_same, why = False, error
    if not is_same:
        raise ValueError(
            f"{name} does not step on each number alone, so it cannot work on pieces of "
            f"parameters; use AdamW, SGD or another that is elementwise"
        ) from why
