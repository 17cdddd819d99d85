"""Master weights learn in 32 bits beside weights that compute in 16; and what forgets them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import ddp, fsdp, local_sgd, zero
from minipar.parallel.base import masters
from minipar.parallel.explain import explain
from minipar.parallel.plan import Plan
from minipar.sim.memory import FP32_ADAM, MASTER_ADAM, model_state
from minipar.sim.trace import Actor, pretend
from minipar.sim.tracer import Tracer
from minipar.train.optim import make_optimizer
from minipar.train.step import train_step
from tests.on_ranks import on_ranks

SHAPE = LlamaConfig(64, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2)


make = partial(make_optimizer, lr=1e-2, weight_decay=0.1)


def batch(step: int):
    """Sequences that can be learnt: each adds 7, 14 or 21 from token to token, modulo 64."""
    first = torch.randint(64, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + 7 * (1 + first % 3) * torch.arange(33)) % 64
    return tokens[:, :-1], tokens[:, 1:]


def test_small_updates_are_kept():
    """2^-10 of a weight of 1 rounds to nothing in bf16. Mutant: a master that is made of the weight
    in each step."""
    model, step = nn.Linear(3, 1, bias=False), 2.0**-10
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters.keep(model, optimizer, torch.bfloat16)
    alone = nn.Parameter(torch.ones(1, 3, dtype=torch.bfloat16))
    forgets = torch.optim.SGD([alone], lr=1.0)
    for i in range(1000):
        for p in (model.weight, alone):
            p.grad = torch.full_like(p, step, dtype=p.grad_dtype)
        optimizer.step()
        forgets.step()
        exact = torch.full((1, 3), 1 - (i + 1) * step)
        assert torch.equal(model.weight.master, exact)
        assert torch.equal(model.weight, exact.bfloat16()) and model.weight.dtype == torch.bfloat16
    assert torch.equal(alone, torch.ones_like(alone))


@pytest.mark.parametrize("is_sliced", [False, True])
@on_ranks(2)
def test_what_is_written_into_the_model_is_not_lost(is_sliced):
    """One number in eight, by hand; the others keep what they had. Under zero each rank has a slice
    of the masters. Mutants: the next step brings old masters back; a write rounds all others."""
    dp, half = Mesh(dp=2).dp, torch.bfloat16
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    if is_sliced:
        optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.SGD, dp, lr=1.0)
        strategy = zero.apply(model, dp, optimizer=optimizer, working_dtype=half)
    else:
        strategy, optimizer = ddp.apply(model, dp), torch.optim.SGD(model.parameters(), lr=1.0)
        masters.keep(model, optimizer, half)
    expected = strategy.full_state_dict()
    with torch.no_grad():
        for p in (*model.parameters(), *expected.values()):
            p.view(-1)[::8] = 0.75
    assert is_sliced or strategy.full_state_dict()["weight"].equal(expected["weight"])
    for _ in range(2):
        optimizer.zero_grad()
        (0.0 * model(torch.ones(1, 8, dtype=half))).sum().backward()
        strategy.finish_backward()
        optimizer.step()
        for name, wide in strategy.full_state_dict().items():
            assert torch.equal(wide, expected[name]), name
            assert torch.equal(model.get_parameter(name), wide.to(half)), name


def test_the_state_of_the_optimizer_is_as_wide_as_the_masters():
    """Also when it is loaded, which torch casts to the dtype of the parameters. Mutant: moments
    that were bf16 for a moment."""
    model, state = Llama(SHAPE, seed=0), None
    for _ in range(2):
        optimizer = make(model)
        masters.keep(model, optimizer, torch.bfloat16)
        if state is not None:
            optimizer.load_state_dict(state)
            for own, was in zip(optimizer.state.values(), state["state"].values(), strict=True):
                assert own["exp_avg"].dtype == torch.float32
                assert torch.equal(own["exp_avg"], was["exp_avg"])
                assert not torch.equal(was["exp_avg"], was["exp_avg"].bfloat16().float())
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        train_step(model, [], optimizer, [batch(0)], Mesh().dp)
        state, model = optimizer.state_dict(), Llama(SHAPE, seed=0)


class Mixed(nn.Module):
    """A float that learns, one that is frozen, and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.index = nn.Parameter(torch.tensor([1001, 2003]), requires_grad=False)  # odd in bf16

    def forward(self) -> torch.Tensor:
        self.seen = self.weight.dtype, self.frozen.dtype, self.index.tolist()
        return (self.weight * self.frozen).float().sum()


@pytest.mark.parametrize("kind", ["keep", "zero", "fsdp"])
@on_ranks(2)
def test_only_floats_are_cast(kind):
    """And what is frozen has no master. Mutant: an index that is rounded."""
    model, dp, half = Mixed(), Mesh(dp=2).dp, torch.bfloat16
    if kind == "zero":
        optimizer = zero.ShardedOptimizer([model.weight], torch.optim.SGD, dp, lr=0.1)
        strategy = zero.apply(model, dp, optimizer=optimizer, working_dtype=half)
    elif kind == "fsdp":
        strategy = fsdp.apply(model, dp, compute_dtype=half, reduce_dtype=half)
    else:
        strategy = ddp.apply(model, dp)
        masters.keep(model, torch.optim.SGD([model.weight], lr=0.1), half)
    model().backward()
    strategy.finish_backward()
    assert model.seen == (half, half, [1001, 2003]) and not hasattr(model.frozen, "master")
    assert strategy.full_gradients()["weight"].dtype == torch.float32
    assert strategy.full_state_dict()["index"].tolist() == [1001, 2003]


def test_two_optimizers_have_masters_of_their_own():
    """Mutant: the second one's begin with the digits of bf16."""
    model = nn.Linear(3, 1)
    wide = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        masters.keep(model, torch.optim.SGD([p], lr=0.1), torch.bfloat16)
        assert p.dtype == torch.bfloat16 and torch.equal(p.master, wide[name])


def test_a_model_that_is_all_frozen_takes_steps():
    """As a stage of a pipeline may be. Mutant: a copy of nothing, which torch refuses."""
    model = nn.Linear(4, 4).requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    masters.keep(model, optimizer, torch.bfloat16)
    optimizer.step()


@pytest.mark.mostly_slow
@pytest.mark.parametrize("precision, recipe", [("bf16", MASTER_ADAM), ("autocast-bf16", FP32_ADAM)])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_bytes_per_parameter_are_those_of_the_closed_form(zero, precision, recipe):
    """Of a rank without values, of the formula, and of what a plan explains."""
    config = replace(SHAPE, num_layers=4, hidden_size=64)
    plan = Plan(dp=8, zero=zero, precision=precision)
    with pretend(plan) as mesh, Tracer() as tracer:
        actor = Actor(config, plan, mesh, 1, 32)
        actor.step()
        with tracer.watching(actor.model, actor.strategy.optimizer):
            held = tracer.held()
    formula = model_state(config.num_parameters, 8, f"zero{zero}" if zero else "ddp", recipe)
    explained = explain(plan, config).bytes_on()
    for part, ours in {"parameters": "weights", "optimizer": "optimizer"}.items():
        assert held[part] == pytest.approx(formula[part], rel=0.02), part
        assert explained[ours] == pytest.approx(formula[part], rel=0.02), part
    if zero != 1:  # which has whole ones in backward only
        assert held["gradients"] == pytest.approx(formula["gradients"], rel=0.02)
    assert explained["gradients"] == pytest.approx(formula["gradients"], rel=0.02)


def test_gradients_that_travel_as_one_vector_are_as_wide_as_masters():
    """Mutants: in the 16 bits of the weights, which torch refuses; of weights in channels_last."""
    model = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    strategy = local_sgd.apply(model, Mesh().dp, optimizer, method="delayed gradients")
    masters.keep(model, optimizer, torch.bfloat16)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3, 2, 2, dtype=torch.bfloat16)).sum().backward()
        strategy.finish_backward()
        optimizer.step()
    assert model.weight.grad.dtype == model.weight.master.dtype == torch.float32
    assert model.weight.grad.stride() == model.weight.stride()
