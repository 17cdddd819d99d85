"""The parallel Llama passes the type check of `spmd_types`, from the embedding to the loss.

The letters in minipar's docstrings, R, I, V and P, are those of this package of PyTorch's makers.
In its strict mode it infers the type of every tensor, operation by operation, refuses those that do
not fit each other, and refuses ``loss.backward()`` where the gradient that begins it would not be
the right one. Here it gets the model as it is: what `matrices.py` has from `comm/autograd.py` is
replaced by the package's functions of the same name, and parameters get the type that the strategy
treats them by. One process plays any rank, on the `fake` backend: types need no values.

What types do not see, and parity tests do:

- Backward has no check of its own. The type of a value says what its gradient is, and that our
  transitions are true to it is what tests/comm/test_autograd.py measures.
- V is "something else on every rank": not which piece, and not that heads of k and v are copies
  where ranks outnumber them. A sum takes any V for a summand.
- The functions of `overlap`, with a backward of their own, are not looked into. Their types are
  declared below, in the words of the collective that they decompose.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from minipar.comm import collectives
from minipar.comm.mesh import Axis, Mesh
from minipar.model.llama import loss_of
from minipar.parallel import matrices, overlap, tensor
from tests.law import models

pytestmark = pytest.mark.filterwarnings("ignore:.*_functional_collectives:FutureWarning")

raw_all_reduce = collectives.all_reduce
TYPES = {"R": spmd.R, "I": spmd.I, "V": spmd.V, "P": spmd.P}
MODES = {
    "plain": {},
    "sequence": dict(sequence=True),
    "overlap": dict(sequence=True, overlap=True),
}


# ---------------------------------------------------------------------- minipar, in its words
def all_reduce(x: Tensor, axis: Axis, *, to: str) -> Tensor:
    return spmd.all_reduce(x, axis.group, dst=TYPES[to])


def convert(x: Tensor, axis: Axis) -> Tensor:
    return spmd.convert(x, axis.group, src=spmd.I, dst=spmd.R)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, to: str) -> Tensor:
    return spmd.all_gather(x, axis.group, src=spmd.S(dim), dst=TYPES[to])


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return spmd.reduce_scatter(x, axis.group, dst=spmd.S(dim))


@spmd.no_typecheck()
def largest_of_all(x: Tensor, axis: Axis, op: str) -> Tensor:
    """The "max" of the loss is no sum, has no gradient, and so no place in the table: V -> R."""
    assert op == "max" and not x.requires_grad, "a collective without a type"
    assert spmd.get_axis_local_type(x, axis.group) is spmd.V
    types = spmd.get_local_type(x) | {spmd.normalize_axis(axis.group): spmd.R}
    return spmd.assert_type(raw_all_reduce(x, axis, op), types)


def gather_linears_type(*, axis: Axis, x: Tensor, weights: tuple[Tensor, ...]):
    """Of `_GatherLinears`: all_gather, then a product with each weight."""
    joined = spmd.rules.all_gather(x, axis.group, src=spmd.S(1), dst=spmd.R)
    return tuple(spmd.rules.einsum("btd,fd->btf", joined, weight) for weight in weights)


def linear_scatter_type(*, axis: Axis, x: Tensor, weight: Tensor):
    """Of `_LinearScatter`: a product, then reduce_scatter."""
    product = spmd.rules.einsum("btf,df->btd", x, weight)
    return spmd.rules.reduce_scatter(product, axis.group, src=spmd.V, dst=spmd.S(1))


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch):
    """Let minipar speak the package's words; a mutant takes one of them away again."""
    for word in (all_reduce, convert, all_gather, reduce_scatter):
        monkeypatch.setattr(matrices, word.__name__, word)
    for function, rule in (
        (overlap._GatherLinears, gather_linears_type),
        (overlap._LinearScatter, linear_scatter_type),
    ):
        monkeypatch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
    monkeypatch.setattr(Mesh, "label", Mesh.label)


# ---------------------------------------------------------------------- one step, typed
def batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets [2, 8]."""
    tokens = torch.arange(18).view(2, 9)
    return tokens[:, :-1], tokens[:, 1:]


@contextmanager
def rank_of(rank: int = 0, **sizes: int) -> Iterator[Mesh]:
    """Be one rank of a mesh that nobody else is on."""
    size = math.prod(sizes.values())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Mesh(**sizes)
    finally:
        dist.destroy_process_group()


def parameter_types(strategy: tensor.TensorParallel) -> dict[str, str]:
    """By what is done to the gradient: V, nothing; R, `finish_backward` sums it; I, it is whole."""
    return {
        name: "V" if name in strategy.pieces else "R" if name in strategy.summed else "I"
        for name, _ in strategy.model.named_parameters()
    }


@contextmanager
def checked(mesh: Mesh) -> Iterator[None]:
    """Infer and check types along every axis of `mesh`."""
    axes = {name: spmd.MeshAxis.of(mesh[name].group) for name in mesh.sizes}
    with pytest.MonkeyPatch.context() as patch, spmd.set_current_mesh(axes):
        patch.setattr(collectives, "all_reduce", largest_of_all)
        with typecheck(strict_mode="strict"):
            yield


def type_of(x: Tensor, axis: Axis) -> str:
    return spmd.get_axis_local_type(x, axis.group).name


def typed_step(size: int, mode: str, rank: int = 0) -> dict[str, str]:
    """Forward and backward; returns the types met on the way. Raises what the checker raises."""
    with rank_of(rank, tp=size) as mesh:
        axis, found = mesh.tp, {}
        strategy = tensor.apply(model := models.llama(0), axis, **MODES[mode])

        def note(name: str) -> None:
            def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
                if isinstance(args[0], Tensor):
                    found[f"into {name}"] = type_of(args[0], axis)
                found[f"out of {name}"] = type_of(output, axis)

            model.get_submodule(name).register_forward_hook(hook)

        for name in ("embed_tokens", "layers.1", "layers.1.mlp.up_proj", "layers.1.mlp"):
            note(f"model.{name}")

        inputs, targets = batch()
        with checked(mesh):
            for name, kind in parameter_types(strategy).items():
                spmd.assert_type(model.get_parameter(name), {axis.group: TYPES[kind]})
            for given in (inputs, targets):
                spmd.assert_type(given, {axis.group: spmd.I})
            logits = model(inputs)
            loss = loss_of(model)(logits, targets)
            found |= {"logits": type_of(logits, axis), "loss": type_of(loss, axis)}
            loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        return found


# ---------------------------------------------------------------------- tensor parallelism
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_has_the_types_that_the_docstring_promises(mode, rank, size):
    """At the borders as drawn there. What goes wrong without one of them: the mutants below."""
    outside = "I" if mode == "plain" else "V"
    found = typed_step(size, mode, rank)
    # with overlap, no module ever sees the joined input: only its products
    for name in ("mlp", "mlp.up_proj"):
        into = found.pop(f"into model.layers.1.{name}", None)
        assert into == (None if mode == "overlap" else "R")
    assert found == {
        "into model.embed_tokens": "I",
        "out of model.embed_tokens": outside,
        "into model.layers.1": outside,
        "out of model.layers.1.mlp.up_proj": "V",
        "out of model.layers.1.mlp": outside,
        "out of model.layers.1": outside,
        "logits": "V",
        "loss": "I",
    }


def _no_convert(patch):
    """Megatron's f is missing: gradients of a layer's input are parts, and stay so."""
    patch.setattr(matrices, "convert", lambda x, axis: x)


def _no_all_reduce(patch):
    """The sum at the end of a region is missing; with ``sequence``, that of the loss."""
    patch.setattr(matrices, "all_reduce", lambda x, axis, *, to: x)


def _all_reduce_to_replicate(patch):
    """`torch.distributed.nn.all_reduce` in place of Megatron's g: n times the gradients (T14)."""
    patch.setattr(matrices, "all_reduce", lambda x, axis, *, to: all_reduce(x, axis, to="R"))


def _gather_to_invariant(patch):
    """Backward keeps its own piece where it has to add up those of all ranks."""
    patch.setattr(
        matrices, "all_gather", lambda x, axis, dim, *, to: all_gather(x, axis, dim, to="I")
    )


def _norms_left_out(patch):
    """Nobody sums the gradients of norm weights that each see some of the tokens (T12)."""
    nothing = property(lambda self: [], lambda self, names: None)
    patch.setattr(tensor.TensorParallel, "summed", nothing, raising=False)


@pytest.mark.parametrize(
    ("mutant", "mode", "complaint"),
    [
        (_no_convert, "plain", r"Invariant type .* \[I, V"),
        (_no_all_reduce, "plain", r"Invariant type .* \[V, I"),
        (_no_all_reduce, "sequence", r"backward\(\) on a Varying loss"),
        (_all_reduce_to_replicate, "plain", r"Invariant type .* \[R, I"),
        (_all_reduce_to_replicate, "sequence", r"backward\(\) on a Replicate loss"),
        (_all_reduce_to_replicate, "overlap", r"backward\(\) on a Replicate loss"),
        (_gather_to_invariant, "sequence", r"Invariant type .* \[I, V"),
        (_norms_left_out, "sequence", r"Invariant type .* \[V, I"),
        (_norms_left_out, "overlap", r"Invariant type .* \[V, I"),
    ],
)
def test_trap_14_a_model_that_is_wrong_has_no_type(monkeypatch, mutant, mode, complaint):
    """Each of these would run, with other gradients than one device has."""
    mutant(monkeypatch)
    with pytest.raises(spmd.SpmdTypeError, match=complaint):
        typed_step(2, mode)
