"""Schedules, the optimizer's groups, and one gradient norm on all ranks."""

import math

import pytest
import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.parallel.base.norm import clip_grad_norm
from minipar.parallel.base.shards import Region
from minipar.train.optim import make_optimizer, warmup_cosine

# ------------------------------------------------------------------------------------- schedules


def test_cosine_is_the_one_of_torch():
    param = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([param], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.1)
    for step in range(41):
        ours = warmup_cosine(step, peak=1.0, warmup_steps=0, total_steps=41)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_a_warm_up_rises_to_the_peak_and_short_runs_have_a_rate_at_every_step():
    run = {"peak": 3e-4, "warmup_steps": 10, "total_steps": 100}
    rates = [warmup_cosine(step, **run) for step in range(120)]
    assert rates[0] == pytest.approx(3e-5, rel=1e-15) and rates[9] == 3e-4
    assert rates[99] == pytest.approx(3e-5, rel=1e-15) and rates[100:] == [rates[99]] * 20
    assert rates[:10] == sorted(rates[:10]) and rates[9:99] == sorted(rates[9:99], reverse=True)
    for warmup_steps, total_steps in [(0, 1), (1, 1), (5, 5), (0, 2), (1, 2)]:
        run = {"peak": 1.0, "warmup_steps": warmup_steps, "total_steps": total_steps}
        rates = [warmup_cosine(step, **run) for step in range(total_steps + 2)]
        assert min(rates) > 0 and max(rates[:total_steps]) == max(rates) == 1.0


# ------------------------------------------------------------------------------------- optimizer


def test_matrices_decay_alone_and_what_is_tied_or_frozen_is_no_second_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    decayed, plain = make_optimizer(model, lr=1e-3, weight_decay=0.1).param_groups
    assert [*map(id, decayed["params"])] == [id(model[0].weight)]
    biases = model[0].bias, model[1].weight, model[1].bias, model[2].bias
    assert [*map(id, plain["params"])] == [*map(id, biases)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.9, 0.95)


def test_a_flat_piece_of_a_matrix_decays():
    model = nn.Module()
    model.piece = nn.Parameter(torch.ones(10))
    model.piece.region = Region.whole((5, 4))
    (group,) = make_optimizer(model, lr=1e-3, weight_decay=0.1).param_groups
    assert group["weight_decay"] == 0.1


# ------------------------------------------------------------------------- norm, on one device


def with_grads(*shapes, dtype=torch.float64, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        params.append(param)
    return params


@pytest.mark.parametrize("max_norm", [0.5, 1e9, math.inf])
def test_clip_is_the_one_of_torch_in_any_type(max_norm):
    """Caught: a tied parameter counted (or scaled) twice; squares summed in half precision."""
    params = with_grads((6, 4), (2, 3, 2), ()) + with_grads((5,), dtype=torch.float32)
    params += with_grads((100_000,), dtype=torch.bfloat16)
    wide = [nn.Parameter(p.detach().double()) for p in params]
    for p, ours in zip(wide, params, strict=True):
        p.grad = ours.grad.double().clone()
    expected = torch.nn.utils.clip_grad_norm_(wide, max_norm)
    unused = nn.Parameter(torch.zeros(5))
    norm = clip_grad_norm(iter([*params, params[0], unused]), max_norm)  # any iterable, read once
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for p, theirs in zip(params, wide, strict=True):
        assert p.grad.dtype == p.dtype
        rtol = 1e-5 if p.dtype != torch.bfloat16 else 4e-3  # it has steps of that size
        torch.testing.assert_close(p.grad.double(), theirs.grad, rtol=rtol, atol=0)
    assert all(clip_grad_norm(nothing, 1.0).item() == 0 for nothing in ([], [unused]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_leaves_the_gradients(bad):
    params = with_grads((3,), (4,))
    params[0].grad[1] = bad
    before = [p.grad.clone() for p in params]
    assert not clip_grad_norm(params, 1.0).isfinite()
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0, equal_nan=True)


def test_max_norm_must_be_positive():
    for max_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm=.* must be positive"):
            clip_grad_norm([], max_norm)


# ---------------------------------------------------------------------- norm, over several ranks


def full_model() -> dict[str, torch.Tensor]:
    """Gradients of a whole model, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed": (6, 4), "w0": (4, 8), "w1": (8, 4), "experts": (4, 4, 4), "norm": (4,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def piece(grad: torch.Tensor, *axes, dim: int = 0) -> nn.Parameter:
    """The parameter that a strategy would leave on this rank: `grad` cut over `axes`."""
    for axis in axes:
        grad = grad.chunk(axis.size, dim)[axis.rank]
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad.clone()
    if axes:
        param.shard_axes = tuple(axes)
    return param


def many_axes(sizes: dict[str, int]):
    """Everything at once: stages, experts, fully sharded; the tied embedding on both ends."""
    mesh = Mesh(**sizes)
    grads = full_model()
    params = []
    if mesh.pp.rank == 0:
        params += [piece(grads["embed"], mesh.dp), piece(grads["w0"], mesh.dp, mesh.tp)]
        params += [piece(grads["norm"])]
    if mesh.pp.rank == mesh.pp.size - 1:
        params += [piece(grads["w1"], mesh.tp), piece(grads["experts"], mesh.dp)]
        if mesh.pp.size > 1:
            tied = piece(grads["embed"], mesh.dp)
            tied.is_copy = True
            params.append(tied)
    for param in params:  # what one stage holds is a piece of the whole along pp
        param.shard_axes = (mesh.pp, *getattr(param, "shard_axes", ()))
    before = [param.grad.clone() for param in params]
    norm = clip_grad_norm(params, 0.25, axes=(mesh.pp, mesh.dp, mesh.tp))
    factor = 0.25 / (norm + 1e-6)
    for param, grad in zip(params, before, strict=True):  # the copy is scaled as well
        torch.testing.assert_close(param.grad, grad * factor, rtol=1e-12, atol=0)
    return norm.item()


@pytest.mark.parametrize(
    "sizes", [{"tp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}, {"pp": 4}]
)
def test_trap_09_any_combination_of_axes(ranks, sizes):
    """Caught: a stage's own norm, the tied copy counted, a sum over the wrong axes.

    With pp=4 two stages in the middle hold nothing at all, and must not keep the others waiting.
    """
    expected = torch.cat([g.flatten() for g in full_model().values()]).norm().item()
    results = ranks(math.prod(sizes.values())).run(many_axes, sizes)
    assert results[0] == pytest.approx(expected, rel=1e-12)
    assert len(set(results)) == 1, "ranks must agree to the bit"
