"""Local SGD, DiLoCo and delayed gradients: bytes, agreement at the end, overlap, refusals.

What they compute is proved by tests/law/test_local_sgd.py.
"""

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model.llama import token_loss
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.parallel import local_sgd
from minipar.parallel.base import masters
from minipar.parallel.local_sgd import DelayedGradients
from minipar.train.optim import make_optimizer
from tests.law import models
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.trains


def train(model, strategy, optimizer, rank: int, steps: range) -> None:
    """Steps on batches that differ between ranks, without the trainer's own collectives."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs, targets = torch.randint(61, (2, 2, 7), generator=generator)
        optimizer.zero_grad()
        (token_loss(model(inputs), targets) / targets.numel()).backward()
        strategy.finish_backward()
        optimizer.step()


def start(method: str, mesh: Mesh, seed: int = 0, **options):
    model = models.llama(seed)
    optimizer = make_optimizer(model, lr=0.02, weight_decay=0.1)
    return model, optimizer, local_sgd.apply(model, mesh.dp, optimizer, method=method, **options)


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """P in bytes and N of the docstring."""
    parameters = list(model.parameters())
    return sum(p.nbytes for p in parameters), len(parameters)


# ---------------------------------------------------------------------- traffic
BYTES = {  # options, and in 8 steps: how many are quiet, how often go P and P + N
    "local sgd": ({"every": 4}, 6, 2, 0),
    "diloco": ({"every": 4}, 6, 2, 0),
    "diloco delayed": ({"every": 4, "delay": 2}, 6, 2, 0),
    "delayed gradients": ({}, 0, 0, 8),
}


def _sent(method: str) -> tuple[list[int], list[int]]:
    """Bytes of each collective, and of all that each step started to send."""
    mesh = Mesh(dp=dist.get_world_size())
    model, optimizer, strategy = start(method, mesh, **BYTES[method][0])
    with timeline.record() as recorded:
        times = [time.monotonic()]
        for step in range(8):
            train(model, strategy, optimizer, mesh.rank, range(step, step + 1))
            times.append(time.monotonic())
        if getattr(strategy, "pending", None):
            strategy.pending.wait()
        if isinstance(strategy, DelayedGradients):
            strategy.finish()
    sent = [(s.start, s.num_bytes) for s in recorded.select(kind="comm", axis="dp")]
    per_step = [sum(num for at, num in sent if a <= at < b) for a, b in pairwise(times)]
    return [num for _, num in sent], per_step


@pytest.mark.mostly_slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", BYTES)
def test_sends_what_the_docstring_says(ranks, method, size):
    """Mutants: averaging in every step; sending Adam's state too; gradients beside parameters."""
    _, quiet, parameters, gradients = BYTES[method]
    num_bytes, count = sizes_of(models.llama(0))
    ring = 2 * (size - 1) / size
    formula = ring * (parameters * num_bytes + gradients * (num_bytes + count))
    for calls, per_step in ranks(size).run(_sent, method):
        assert sum(calls) == pytest.approx(formula, abs=len(calls))  # each call rounds down
        assert sum(per_step) == sum(calls)
        assert per_step.count(0) == quiet


# ---------------------------------------------------------------------- agreeing
@on_ranks(2)
def test_a_model_that_is_loaded_begins_anew():
    """Mutants: the outer momentum, or an outer gradient under way, of the model before moves it."""
    mesh = Mesh(dp=2)
    model, optimizer, strategy = start("diloco delayed", mesh, every=2, delay=2)
    train(model, strategy, optimizer, mesh.rank, range(4))
    state = models.llama(1).state_dict()
    assert strategy.pending
    strategy.load_full_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, strategy, optimizer, mesh.rank, range(4, 10))
    for name, p in model.state_dict().items():
        torch.testing.assert_close(p, state[name], rtol=1e-12, atol=0)


# ---------------------------------------------------------------------- errors
@on_ranks(2)
def test_bad_options_are_refused_before_the_first_collective():
    with timeline.record() as recorded, pytest.raises(ValueError, match="use at most every=3"):
        start("diloco delayed", Mesh(dp=2), every=3, delay=5)
    assert not recorded.spans


@on_ranks(2)
def test_a_late_gradient_of_a_layer_that_one_rank_alone_has_used_is_everybodys():
    """And where nobody has, there is none. Mutants: none where this rank had none; zeros."""
    axis, layers = Mesh(dp=2).dp, nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
    strategy = local_sgd.apply(layers, axis, None, method="delayed gradients")
    layers[axis.rank](torch.ones(1, 2)).sum().backward()
    strategy.finish_backward()
    assert all(p.grad is None for p in layers.parameters())  # the step before is yet to come
    strategy.finish()
    for layer in layers[:2]:
        assert layer.weight.grad.tolist() == [[0.5, 0.5]]
    assert layers[2].weight.grad is None


@on_ranks(2)
def test_state_on_which_ranks_would_never_agree_is_refused():
    """Weights whose float32 masters lie elsewhere, and biases that each router moves."""
    mesh, refused = Mesh(dp=2), []
    kept = models.llama(0)
    masters.keep(kept, torch.optim.SGD(kept.parameters(), lr=0.1), torch.bfloat16)
    for model in (kept, models.llama(0, moe=MoEConfig(4, 2, 12, bias_speed=0.1))):
        with timeline.record() as recorded, pytest.raises(ValueError) as error:
            local_sgd.apply(model, mesh.dp, torch.optim.SGD(model.parameters(), lr=0.1))
        refused.append(str(error.value))
        assert not recorded.spans
    assert "masters.keep() came before" in refused[0] and "biases of its routers" in refused[1]
