"""Precision: master weights, loss scaling, fp8; each beside what happens without it."""

import copy
import math
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.observe import timeline
from minipar.parallel import fsdp, zero
from minipar.train import checkpoint, precision
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.precision import (
    Fp8Linear,
    LossScaler,
    Precision,
    product,
    quantise,
    reduce_in,
    use_fp8,
)
from tests.on_ranks import on_ranks

SHAPE = LlamaConfig(64, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=True)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# ---------------------------------------------------------------------- loss scaling
@pytest.mark.mostly_slow
@pytest.mark.parametrize("seed", range(8))
def test_scaler_equals_torchs_on_any_trajectory_of_overflows(seed):
    """Bit for bit: the scale, the count of good steps, the weights, the optimizer's state.

    Mutants: a count that goes on after an overflow, or that is not reset by growth; a float32
    product with a factor such as 1.7; a skipped step that still decays the weights.
    """
    chance = random.Random(seed)
    scale, factors = chance.choice([2.0**16, 777.7, 1e38]), chance.choice([(2.0, 0.5), (1.7, 0.3)])
    interval = chance.choice([1, 2, 3])
    ours = LossScaler(scale, interval)
    ours.growth_factor, ours.backoff_factor = factors
    theirs = torch.amp.GradScaler("cpu", scale, *factors, interval)
    sides = []
    for _ in range(2):
        torch.manual_seed(seed)
        weights = [nn.Parameter(torch.randn(size)) for size in ((5, 3), (0,), (2,))]
        make = partial(torch.optim.SGD, momentum=0.9) if seed % 2 else torch.optim.AdamW
        sides.append((weights, make(weights, lr=0.1, weight_decay=0.1)))  # the last is not used
    history = []
    for step in range(60):
        bad = chance.choice([None, None, math.inf, -math.inf, math.nan])
        for scaler, (weights, opt) in zip((ours, theirs), sides, strict=True):
            opt.zero_grad()
            generator = torch.Generator().manual_seed(step)
            factor = torch.randn(5, 3, generator=generator)
            if bad is not None:
                factor[4, 1] = bad
            scaler.scale((weights[0] * factor).sum() * 1e-3 + weights[1].sum()).backward()
            if scaler is ours:
                ours.unscale([*weights, weights[0]])  # a tied parameter is divided once
            else:
                theirs.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        assert ours.loss_scale.item() == theirs.get_scale()
        assert ours.good_steps.item() == theirs._growth_tracker.item()
        (mine, my_opt), (other, other_opt) = sides
        assert torch.equal(mine[0], other[0]) and mine[0].isfinite().all()
        assert str(my_opt.state_dict()) == str(other_opt.state_dict())
        history.append(ours.loss_scale.item())
    assert any(b > a for a, b in pairwise(history)) and any(b < a for a, b in pairwise(history))
    assert 0 < ours.num_skipped < 60


def test_a_large_gradient_is_no_overflow():
    """Its square is. Mutant: looking at the sum, or at the 2-norm."""
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 3e38)
    assert LossScaler().unscale([weight]) == 0


def test_scaler_says_what_it_cannot_do():
    scaler, weight = LossScaler(), nn.Parameter(torch.zeros(4, dtype=torch.float16))
    opt = torch.optim.SGD([weight])
    for too_early in (lambda: scaler.step(opt), scaler.update):
        with pytest.raises(RuntimeError, match="unscale"):
            too_early()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="float16 cannot be unscaled; keep parameters in float32"):
        scaler.unscale([weight])
    scaler.unscale([])
    with pytest.raises(RuntimeError, match="twice in one step"):
        scaler.unscale([])


# ---------------------------------------------------------------------- on several ranks
@on_ranks(2)
def test_gradients_that_the_scaler_would_not_see_are_refused():
    """Mutant: pieces that stay as large as the scale, or that one rank leaves out alone."""
    dp = Mesh(dp=2).dp
    model, cut, how = nn.Linear(4, 4), nn.Linear(4, 4), Precision("fp16")
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.SGD, dp, lr=0.1)
    strategy = zero.apply(model, dp, optimizer=optimizer)
    how.scale(model(torch.ones(1, 4)).sum()).backward()
    strategy.finish_backward()
    with pytest.raises(RuntimeError, match="use strategy.with_gradients"):
        how.unscale(model.parameters(), [dp])
    for parameters in (strategy.with_gradients(), fsdp.apply(cut, dp).with_gradients()):
        with pytest.raises(ValueError, match="is cut over dp; name each such axis in axes="):
            how.unscale(parameters)
    how.unscale(strategy.with_gradients(), [dp])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in strategy.with_gradients())


def _sharded_overflow(where: int, heed: bool):
    """Rank `where` of a 2 x 2 mesh alone has an infinity; (decision, weight, bytes sent)."""
    mesh = Mesh(dp=2, tp=2)
    weight = nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.AdamW([weight], lr=0.1), LossScaler()
    weight.grad = torch.ones(4)
    if mesh.rank == where:
        weight.grad[1] = math.inf
    with timeline.record() as recorded:
        found = scaler.unscale([weight], (mesh.tp, mesh.dp) if heed else ())
    scaler.step(optimizer)
    scaler.update()
    return found.item(), weight.tolist(), scaler.loss_scale.item(), recorded.bytes_by_axis()


@pytest.mark.parametrize("where", [0, 3, 7])
def test_all_ranks_leave_out_the_same_step_wherever_the_overflow_was(ranks, where):
    """Under any sharding. Rank 7 is nobody: then nobody skips. Mutant: a decision per rank."""
    found, weights, scales, sent = zip(*ranks(4).run(_sharded_overflow, where, True), strict=True)
    assert set(found) == {float(where < 4)}
    assert set(scales) == {2.0**15 if where < 4 else 2.0**16}
    assert all((w == [1.0] * 4) == (where < 4) for w in weights)
    assert all(bytes_of == {"tp": 4, "dp": 4} for bytes_of in sent)  # 2 (n-1)/n of one float32
    alone = [found for found, *_ in ranks(4).run(_sharded_overflow, where, False)]
    assert alone == [float(rank == where) for rank in range(4)]


def _reduced(dtype, op: str):
    """(what arrived, what it should be, bytes sent) for a different tensor on each rank."""
    mesh = Mesh(dp=3)
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    mine = rows[mesh.rank].clone()
    with timeline.record() as recorded:
        pending = reduce_in(dtype)(SimpleNamespace(flat=mine), mesh.dp, op)
        result = pending.wait()
    assert result is mine and pending.wait() is mine
    exact = rows.double().sum(0) if op == "sum" else rows.double().mean(0)
    return result, exact, rows.abs().sum(0), recorded.bytes_by_axis()["dp"]


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_reduced_in_the_dtype_of_choice(ranks, dtype, op):
    """Half the bytes; the error that the docstring allows, and no less than such a dtype has."""
    outcomes = ranks(3).run(_reduced, dtype, op)
    bits = torch.finfo(dtype).eps / 2
    for result, exact, size, sent in outcomes:
        assert result.dtype == torch.float32 and torch.equal(result, outcomes[0][0])
        error = (result.double() - exact).abs()
        assert (error <= 2 * 2 * bits * size + 1e-6).all()  # of two additions and two roundings
        assert error.max() > bits / 100 * size.max()
        assert sent == 2 * 2 * 1000 * dtype.itemsize // 3


# ---------------------------------------------------------------------- fp8
@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_quantise_keeps_the_promised_digits_at_any_size(dtype, bits, size):
    """Mutant: without the scale, 1e-30 becomes 0."""
    x = torch.randn(100, 100, generator=torch.Generator().manual_seed(0)) * size
    data, scale = quantise(x, dtype)
    assert data.dtype == dtype and scale.dtype == torch.float32 and scale.shape == ()
    assert data.float().abs().max() == torch.finfo(dtype).max
    back = data.float() * scale
    normal = data.float().abs() >= torch.finfo(dtype).smallest_normal
    assert normal.float().mean() > 0.9
    error = ((back - x) / x).abs()[normal]
    assert 2.0 ** -(bits + 2) < error.max() <= 2.0 ** -(bits + 1) * 1.001


def test_quantise_handles_the_extremes():
    data, scale = quantise(torch.zeros(3), E4M3)
    assert torch.equal(data.float() * scale, torch.zeros(3))
    for dtype in (E4M3, E5M2):
        for bad in (math.inf, -math.inf, math.nan):
            data, scale = quantise(torch.tensor([1.0, bad]), dtype)
            assert (data.float() * scale).isnan().all()  # or a loss scaler would see no overflow


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_an_fp8_layer(bias):
    """Near those of float32, off by what fp8 rounds away; wide where the inputs are wide."""
    torch.manual_seed(0)
    plain, x = nn.Linear(48, 33, bias=bias), torch.randn(2, 5, 48, requires_grad=True)
    found = copy.deepcopy(plain)
    assert use_fp8(nn.ModuleDict({"a": found})) == ["a"] and type(found) is Fp8Linear
    grad = torch.randn(2, 5, 33) * 1e-7  # as small as gradients are
    results = []
    for layer in (plain, found):
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)])
    for number, (exact, rounded) in enumerate(zip(*results, strict=True)):
        assert rounded.dtype == torch.float32 and rounded.shape == exact.shape
        error = (rounded - exact).norm() / exact.norm()
        assert error < 0.1 and (error > 0 or number == 3)  # that of a bias is a plain sum


def test_an_fp8_layer_rounds_once_under_autocast():
    """Mutant: autocast reaches into the emulation, and rounds before the scales are applied."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=False), torch.randn(40, 64)
    use_fp8(nn.Sequential(layer))
    with Precision("bf16").autocast():
        y = layer(x)
    expected = product(quantise(x, E4M3), quantise(layer.weight, E4M3), torch.bfloat16)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)


def test_fp8_leaves_names_weights_and_the_head_alone():
    model = Llama(replace(SHAPE, tie_embeddings=False), seed=0)
    before = dict(model.named_parameters())
    turned = use_fp8(model)
    assert len(turned) == 2 * 7 and type(model.lm_head) is nn.Linear
    assert all(p is before[name] for name, p in model.named_parameters())


# ---------------------------------------------------------------------- whole runs
PLAIN = TrainConfig(
    steps=8,
    batch_size=4,
    seq_len=32,
    warmup_steps=2,
    sample_tokens=0,
    save_every=5,
    record_steps=0,
)
MEASURED = ["seconds", "tokens_per_second", "mfu", "peak_memory"]


def lines(folder) -> list[dict]:
    """The metrics, without keys whose values differ between two runs that do the same."""
    of_steps = read(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in of_steps]


def with_scale(monkeypatch, scale: float, growth_interval: int = 2000) -> None:
    """Let runs in fp16 begin with this scale."""
    monkeypatch.setattr(precision, "LossScaler", partial(LossScaler, scale, growth_interval))


@pytest.mark.slow
def test_a_run_in_fp16_outlives_overflows_and_resumes_exactly(run, monkeypatch):
    """Mutants: a scaler that is not saved; a run that takes a skipped step for a disaster."""
    with_scale(monkeypatch, 2.0**18, growth_interval=2)
    folder = run(1, "whole", precision="fp16")
    whole = lines(folder)
    assert [line["step"] for line in whole] == list(range(1, 9))
    assert 1 <= whole[-1]["skipped_steps"] < 6
    assert whole[0]["grad_norm"] is None  # infinite, which JSON has no word for
    assert whole[4]["loss_scale"] != 2.0**18
    rest = run(1, "rest", start=folder / "checkpoints/step_000005", precision="fp16")
    assert lines(rest) == whole[5:]


@pytest.mark.slow
def test_a_run_in_bf16_resumes_exactly_from_its_masters(run):
    """They are what a checkpoint has. Mutant: weights as they compute, which have lost digits."""
    changes = dict(precision="bf16", zero=2)
    whole = run(2, "whole", **changes)
    start = whole / "checkpoints/step_000005"
    assert lines(run(2, "rest", start=start, **changes)) == lines(whole)[5:]
    for name, weight in checkpoint.load(start)[0].items():
        assert weight.dtype == torch.float32, name
        assert not torch.equal(weight, weight.bfloat16().float()), name
