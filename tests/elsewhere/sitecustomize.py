"""Moves every initial weight by about one part in 10^7, in every Python that finds this file.

Another processor rounds otherwise, and after some steps of training in float32 that is as if it had
begun with other last bits. With MINIPAR_NUDGE set to a number and this folder on PYTHONPATH, a
Python imports this file at its start and begins with such bits: the tests, a notebook's kernel, its
ranks, and what they start. The package knows nothing of it. How far a weight moves is a function of
the number and of the weights of its tensor alone: ranks and a serial model are moved alike, and no
random stream is drawn from.
"""

import functools
import importlib.abc
import os
import sys
from importlib.machinery import PathFinder

NUDGE = os.environ.get("MINIPAR_NUDGE")
DRAWN_BY = {
    "minipar.model.init": ("initial_weight",),
    "torch.nn.init": ("normal_", "uniform_", "kaiming_uniform_"),
}
"""The functions whose result is a parameter's first value, in it already or not yet."""


def nudged(weight):
    """Move `weight` in place by a normal number of parts in 10^7; return it."""
    import hashlib

    import torch

    if weight.is_meta or type(weight).__name__ == "FakeTensor":
        return weight
    with torch.no_grad():
        exact = weight.detach().cpu().double()
        digest = hashlib.blake2b(exact.numpy().tobytes(), digest_size=7, key=NUDGE.encode())
        dice = torch.Generator().manual_seed(int(digest.hexdigest(), 16))
        return weight.copy_(exact * (1 + 1e-7 * torch.empty_like(exact).normal_(generator=dice)))


def patch(module):
    """Nudge what the functions of `module` return that draw weights."""

    def and_nudge(draw):
        return functools.wraps(draw)(lambda *args, **kwargs: nudged(draw(*args, **kwargs)))

    for name in DRAWN_BY[module.__name__]:
        setattr(module, name, and_nudge(getattr(module, name)))


class Importer(importlib.abc.MetaPathFinder):
    """Patches the modules of `DRAWN_BY` as soon as they have been imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in DRAWN_BY:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), patch(module))
        return spec


if NUDGE and __name__ == "sitecustomize":  # not where a test imports this file once more
    for imported in DRAWN_BY.keys() & sys.modules.keys():
        patch(sys.modules[imported])
    sys.meta_path.insert(0, Importer())
