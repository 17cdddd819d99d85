"""Every transition against its meaning: values, gradients, bytes.

Nothing here trusts the table. `meaning` turns what the ranks hold into the one tensor that it
stands for, by the type alone. The loss is a weighted sum of the output, and transitions are linear:
so the loss is also the sum of the input times its gradient.
"""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from minipar.comm import autograd
from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import Mesh
from minipar.observe import timeline
from tests.on_ranks import on_ranks

TRANSITIONS = {  # the function, its types, and the verbs that it sends by, forward and backward
    "all_reduce P->R": (partial(autograd.all_reduce, to="R"), "P->R", "all_reduce", "all_reduce"),
    "all_reduce P->I": (partial(autograd.all_reduce, to="I"), "P->I", "all_reduce", None),
    "convert": (autograd.convert, "I->R", None, "all_reduce"),
    "reduce_scatter": (autograd.reduce_scatter, "P->V", "reduce_scatter", "all_gather"),
    "reduce_scatter, dim 1": (
        partial(autograd.reduce_scatter, dim=1), "P->V", "reduce_scatter", "all_gather"),
    "all_gather V->R": (
        partial(autograd.all_gather, to="R"), "V->R", "all_gather", "reduce_scatter"),
    "all_gather V->R, dim 1": (
        partial(autograd.all_gather, dim=1, to="R"), "V->R", "all_gather", "reduce_scatter"),
    "all_gather V->I": (partial(autograd.all_gather, to="I"), "V->I", "all_gather", None),
    "cut": (autograd.cut, "I->V", None, "all_gather"),
    "all_to_all": (autograd.all_to_all, "V->V", "all_to_all", "all_to_all"),
    "all_to_all, dims": (
        partial(autograd.all_to_all, split_dim=0, concat_dim=1), "V->V", "all_to_all",
        "all_to_all"),
}  # fmt: skip


def dual(kind: str) -> str:
    return {"R": "P", "P": "R", "I": "I", "V": "V"}[kind]


def draw(kind: str, shape: tuple[int, ...], rank: int, seed: int) -> Tensor:
    """What a rank may hold under this type: the same for R and I, its own for P and V."""
    own = rank + 1 if kind in "PV" else 0
    generator = torch.Generator().manual_seed(100 * seed + own)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def meaning(kind: str, held: Sequence[Tensor]) -> Tensor:
    """The one tensor that all ranks' tensors stand for."""
    if kind == "P":
        return sum(held)
    if kind == "V":
        return torch.stack(list(held))
    for other in held:
        assert torch.allclose(other, held[0], rtol=1e-12), f"{kind}, and ranks differ"
    return held[0]


def _transition(name: str, size: int):
    """Input, output, gradient of the input, gradient from above, and what this rank has sent."""
    axis = Mesh(tp=size).tp
    function, types, *_ = TRANSITIONS[name]
    shape = (6, 6) if "dim" in name else (6, 2)  # 6 is cut by 2 and by 3
    x = draw(types[0], shape, axis.rank, seed=1)
    before = x.clone()
    function(x, axis).add_(1)  # the result is no window on the caller's tensor; of `convert` it is
    assert torch.equal(x, before) != (name == "convert")
    x = before.clone().requires_grad_()
    with timeline.record() as forward:
        y = function(x, axis)
    above = draw(dual(types[-1]), tuple(y.shape), axis.rank, seed=2)
    kept = above.clone()
    with timeline.record() as backward:
        (gradient,) = torch.autograd.grad(y, x, above)
    assert torch.equal(above, kept), "backward changed the gradient it was given"
    ledgers = forward.select(kind="comm"), backward.select(kind="comm")
    sent = [[(span.name, span.num_bytes) for span in ledger] for ledger in ledgers]
    return before, y.detach(), gradient, above, sent


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_values_gradients_and_bytes_are_those_of_the_table(ranks, name, size):
    """The meaning is kept: a transition changes only who holds what.

    Mutants: P->I with the backward of P->R (gradients n times too large), and the reverse.
    """
    _, types, *verbs = TRANSITIONS[name]
    source, target = types[0], types[-1]
    xs, ys, gradients, above, sent = zip(*ranks(size).run(_transition, name, size), strict=True)
    loss = (meaning(target, ys) * meaning(dual(target), above)).sum()
    by_gradient = (meaning(source, xs) * meaning(dual(source), gradients)).sum()
    assert torch.isclose(by_gradient, loss, rtol=1e-10)
    whole = max(xs[0].nbytes, ys[0].nbytes)
    ledger = [[(verb, wire_bytes(verb, whole, size))] if verb else [] for verb in verbs]
    assert all(own == ledger for own in sent)
    before, after = meaning(source, xs), meaning(target, ys)
    dim = 1 if name.endswith("dim 1") else 0
    if target == "V" and source in "PI":
        after = torch.cat(list(after), dim)
    elif source == "V" and target in "RI":
        before = torch.cat(list(before), dim)
    elif source == target == "V":
        pieces = [x.chunk(size, 0) for x in before]
        join = 1 if name.endswith("dims") else 0
        before = torch.stack([torch.cat([p[r] for p in pieces], join) for r in range(size)])
    assert torch.allclose(after, before, rtol=1e-12)


@on_ranks(3)
def test_uneven_all_to_all_returns_gradients_to_where_rows_came_from():
    axis = Mesh(tp=3).tp
    counts = [[1, 0, 2], [3, 1, 0], [2, 2, 1]]  # counts[r][s]: rows from rank r to rank s
    x = draw("V", (sum(counts[axis.rank]), 2), axis.rank, seed=3).requires_grad_()
    recv = [row[axis.rank] for row in counts]
    y = autograd.start_all_to_all(x, axis, counts[axis.rank], recv)()
    (y * (axis.rank + 1)).sum().backward()  # a row's gradient tells where it was sent
    wanted = [r + 1.0 for r, n in enumerate(counts[axis.rank]) for _ in range(n)]
    assert y.shape == (sum(recv), 2) and x.grad[:, 0].tolist() == wanted


@on_ranks(3)
def test_trap_14_a_sum_that_all_ranks_use_alike_does_not_scale_gradients():
    """The same loss on every rank: P->I gives its gradient, P->R that of n losses."""
    axis, total = Mesh(tp=3).tp, 1 + 2 + 3
    for to, losses in ("I", 1), ("R", 3):
        x = torch.full((2,), axis.rank + 1.0, dtype=torch.float64, requires_grad=True)
        autograd.all_reduce(x, axis, to=to).square().sum().backward()
        assert x.grad.tolist() == 2 * [losses * 2 * total]


@on_ranks(2)
def test_wrong_types_and_sizes_are_refused_before_anything_is_sent():
    axis, x = Mesh(tp=2).tp, torch.ones(4, 3)
    for call, error, word in (
        (partial(autograd.all_reduce, to="V"), KeyError, "V"),
        (partial(autograd.all_gather, to="P"), KeyError, "P"),
        (partial(autograd.cut, dim=1), RuntimeError, r"\[2, -1\] don't multiply up to .* dim 1"),
        (partial(autograd.reduce_scatter, dim=1), RuntimeError, "don't multiply up to .* dim 1"),
    ):
        with timeline.record() as recorded, pytest.raises(error, match=word):
            call(x, axis)
        assert not recorded.spans


def test_an_axis_of_one_rank_needs_no_process_group():
    axis = Mesh().tp
    for name, (function, *_) in TRANSITIONS.items():
        x = draw("I", (6, 6), 0, seed=7).requires_grad_()
        y = function(x, axis)
        y.mul(2).sum().backward()
        assert torch.equal(y, x) and torch.equal(x.grad, torch.full_like(x, 2)), name
