"""What users of PyTorch do by habit, on models that are not ours: it works, or is refused at once.

Each test failed, or hung, or passed with wrong numbers before there was `guard`.
"""

import copy
import gc
import io
import math
import pickle
import re
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    weight_norm,
)

from minipar.comm.collectives import all_reduce
from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Mesh
from minipar.model.moe import MoEConfig
from minipar.observe import watchdog
from minipar.parallel import (
    compose,
    ddp,
    expert,
    fsdp,
    local_sgd,
    offload,
    same_order,
    tensor,
    zero,
)
from minipar.parallel.matrices import Border
from minipar.parallel.plan import Plan
from minipar.ranks.launch import Ranks
from minipar.train.optim import make_optimizer
from tests.on_ranks import on_ranks
from tests.parallel.layers import on_paper
from tests.parity import models

README = Path(__file__).parents[2] / "README.md"
SIZE = 2
KINDS = "ddp", "zero 1", "zero 2", "fsdp", "offload in ddp"


class Net(nn.Module):
    """Two blocks and a head; `reads` lets the second block use a weight of the first."""

    def __init__(self, reads: bool = False, chooses: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.head = nn.Linear(6, 3)
        self.reads, self.chooses = reads, chooses
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.chooses in (None, i):
                x = torch.tanh(block(x))
        return self.head(x + self.blocks[0].bias if self.reads else x)


def data(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.3)


def attach(model: nn.Module, kind: str):
    """(strategy, optimizer) along dp."""
    dp = Mesh(dp=SIZE).dp
    if kind.startswith("zero"):
        optimizer = zero.ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, dp, lr=0.05, weight_decay=0.3
        )
        return zero.apply(model, dp, optimizer=optimizer, stage=int(kind[-1])), optimizer
    if kind in local_sgd.METHODS:
        optimizer = adamw(model.parameters())
        return local_sgd.apply(model, dp, optimizer, method=kind), optimizer
    if kind == "fsdp":
        strategy = fsdp.apply(model, dp)
    else:
        version = kind if kind in ("bucketed", "tuned") else "overlapped"
        strategy = ddp.apply(model, dp, version=version)
        if kind == "offload in ddp":
            copies = HostCopy(pcie="none")
            strategy = offload.apply(model, dp, inside=strategy, copies=copies)
    return strategy, adamw(model.parameters())


def serial(max_norm: float = torch.inf, steps: int = 3, between=lambda model: None):
    """Weights and norms of one device with the data of all ranks."""
    model, norms = Net(), []
    optimizer = adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        sum(model(data(rank, step)).square().sum() / SIZE for rank in range(SIZE)).backward()
        norms.append(clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        between(model)
    return model.state_dict(), norms


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def refuses(match: str, kind: type[Exception] = RuntimeError):
    return pytest.raises(kind, match=match)


# ---------------------------------------------------------------------- a cell that runs again
@pytest.mark.parametrize("kind", [*KINDS, "bucketed", *local_sgd.METHODS])
@on_ranks(SIZE)
def test_what_is_dropped_is_gone(kind):
    """Mutant: a hook that holds its strategy, and with it the model of each run of a cell."""

    def train() -> list[weakref.ref]:
        rank, model = Mesh(dp=SIZE).dp.rank, Net()
        strategy, optimizer = attach(model, kind)
        model(data(rank)).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()
        return [*map(weakref.ref, (strategy, model, optimizer, *model.parameters()))]

    left = train()
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


@on_ranks(SIZE)
def test_a_strategy_lives_as_long_as_its_parameters():
    """Nobody else has it. Mutants: hooks of one that is gone; parameters that take theirs along to
    where it cannot go."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    optimizer = adamw(model.parameters())
    attach(model, "ddp")
    gc.collect()
    model(data(rank)).square().sum().backward()
    with refuses(r"optimizer.step\(\) came before finish_backward"):
        optimizer.step()
    optimizer.zero_grad()  # nothing is on its way
    copied = pickle.loads(pickle.dumps(model.head.weight))
    assert copied.equal(model.head.weight) and [*copied.hooked_by] == []


# ---------------------------------------------------------------------- one step, in torch's words
@pytest.mark.mostly_slow
@pytest.mark.parametrize("kind", [*KINDS, "bucketed"])
@on_ranks(SIZE)
def test_a_step_in_torchs_words(kind):
    """Mutants: no check before a step; a norm of this rank's pieces; offload without its ddp."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy, optimizer = attach(model, kind)
    expected, norms = serial(max_norm=0.5)
    for step, norm in enumerate(norms):
        optimizer.zero_grad()
        half = data(rank, step).chunk(2)
        with strategy.no_sync():
            model(half[0]).square().sum().backward()
        model(half[1]).square().sum().backward()
        with refuses(r"optimizer.step\(\) came before finish_backward"):
            optimizer.step()
        with refuses(r"clip_grad_norm_\(\) came before finish_backward"):
            strategy.clip_grad_norm_(0.5)
        strategy.finish_backward()
        if kind.startswith(("zero", "fsdp")):
            with refuses(r"strategy.clip_grad_norm_\(max_norm\)"):
                clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(strategy.clip_grad_norm_(0.5), norm, rtol=1e-9, atol=0.0)
        optimizer.step()
    assert_close(strategy.full_state_dict(), expected)


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("kind", ["zero 1", "fsdp", "fsdp, whole", "fsdp, replicas"])
@on_ranks(SIZE)
def test_a_batch_that_zero_grad_drops_is_dropped(kind, is_told):
    """Such as one of NaNs. Mutants of each kind: what is on its way, or unsent, is added later.

    `is_told` that no step follows, by no_sync; where others refuse a backward without its
    finish_backward, fsdp need not.
    """
    world = Mesh(dp=SIZE, replica=1) if kind != "fsdp, replicas" else Mesh(replica=SIZE, dp=1)
    model, rank = Net(), world.rank
    if kind.startswith("zero"):
        strategy, optimizer = attach(model, kind)
    else:
        options = {"replicate_axis": world.replica} if "replicas" in kind else {}
        options |= {"accumulate": "whole"} if "whole" in kind else {}
        strategy = fsdp.apply(model, world.dp, **options)
        optimizer = adamw(model.parameters())
    if kind.startswith("zero"):
        is_told = True
    for step in range(3):
        for is_bad in (True, False) if step < 2 else (False,):
            with strategy.no_sync() if is_bad and is_told else nullcontext():
                loss = model(data(rank, step)).square().sum()
                (loss * (math.nan if is_bad else 1)).backward()
            if is_bad:
                (optimizer if step or kind.startswith("zero") else model).zero_grad()
        strategy.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(strategy.full_state_dict(), serial()[0])


@pytest.mark.parametrize("kind", [*KINDS, "bucketed", "tuned"])
@on_ranks(SIZE)
def test_a_step_that_zero_grad_has_emptied_changes_nothing(kind):
    """On all ranks, after backward. Mutants: finish_backward brings back what was on its way; zero
    gives pieces gradients that are no more."""
    model, rank = Net(), Mesh(dp=SIZE).dp.rank
    strategy, optimizer = attach(model, kind)
    for step in range(3):
        for is_bad in (True, False):
            (model(data(rank, step)).square().sum() * (math.nan if is_bad else 1)).backward()
            if is_bad:
                optimizer.zero_grad()
            strategy.finish_backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(strategy.full_state_dict(), serial()[0])


@pytest.mark.parametrize("kind", [*KINDS, "bucketed"])
@on_ranks(SIZE)
def test_gradients_that_are_kept_stay_what_they_were(kind):
    """Of two losses, such as for gradient surgery. Mutants: buckets that are written again, whether
    a gradient is kept as it is or as a view."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy, optimizer = attach(model, kind)
    kept, wanted = [], []
    for step in range(4):
        optimizer.zero_grad()
        model(data(rank, step)).square().sum().backward()
        strategy.finish_backward()
        found = [p.grad for p in strategy.with_gradients() if p.grad is not None]
        kept.append(found if step % 2 else [gradient.view(-1) for gradient in found])
        wanted.append([gradient.clone() for gradient in kept[-1]])
        del found
    torch.testing.assert_close(kept, wanted, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [*KINDS, "bucketed"])
@on_ranks(SIZE)
def test_hooks_on_gradients_run_before_these_are_sent(kind):
    """Mutant: they change what is on its way, or each rank's own."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy, _ = attach(model, kind)
    optimizer = torch.optim.SGD
    if kind.startswith("zero"):
        model = Net()
        stepper = zero.ShardedOptimizer(model.parameters(), optimizer, Mesh(dp=SIZE).dp, lr=0.1)
        strategy = zero.apply(model, Mesh(dp=SIZE).dp, optimizer=stepper, stage=int(kind[-1]))
    else:
        stepper = optimizer(model.parameters(), lr=0.1)

    def weigh(p):
        time.sleep(0.005)  # what was sent before has arrived
        p.grad *= 1 + rank

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(weigh)
    alone = Net()
    single = optimizer(alone.parameters(), lr=0.1)
    for step in range(3):
        if kind == "fsdp":
            with refuses("hook on its gradient.*after finish_backward"):
                model(data(rank, step))
            return
        model(data(rank, step)).square().sum().backward()
        if kind == "ddp":  # all are sent early, but in the first backward
            assert strategy.next == (len(strategy.buckets) if step else 0)
        strategy.finish_backward()
        stepper.step()
        stepper.zero_grad()
        losses = [alone(data(r, step)).square().sum() for r in range(SIZE)]
        sum((1 + r) * loss / SIZE for r, loss in enumerate(losses)).backward()
        single.step()
        single.zero_grad()
    assert_close(strategy.full_state_dict(), alone.state_dict())


@pytest.mark.parametrize("kind", [*KINDS, "bucketed"])
@on_ranks(SIZE)
def test_layers_that_are_frozen_for_a_while(kind):
    """As in adversarial training. Mutant: fsdp, and it trains what is frozen."""
    rank, model, alone = Mesh(dp=SIZE).dp.rank, Net(), Net()
    strategy, optimizer = attach(model, kind)
    single = adamw(alone.parameters())
    for step in range(4):
        for each in (model, alone):
            each.head.requires_grad_(step % 2 == 0)
            each.blocks[0].weight.requires_grad_(step % 2 == 1)
        model(data(rank, step)).square().sum().backward()
        sum(alone(data(r, step)).square().sum() / SIZE for r in range(SIZE)).backward()
        for each in (model, alone):
            each.requires_grad_(True)
        assert all(p.requires_grad for p in strategy.watched)  # and no gathered view in their place
        strategy.finish_backward()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    assert_close(strategy.full_state_dict(), alone.state_dict())


@pytest.mark.parametrize("kind", ["fsdp", "offload in ddp", "zero 1"])
@on_ranks(SIZE)
def test_new_memory_is_refused_where_it_would_be_overlooked(kind):
    """Such as by exchanging weights with their average. Mutant: the old ones are sent."""
    model = Net()
    strategy, optimizer = attach(model, kind)
    model(data(0)).sum().backward()
    strategy.finish_backward()
    if kind == "zero 1":
        strategy.optimizer.synchronize()
    for p in model.parameters():
        p.data = p.data.clone()
    with refuses("has got new memory since"):
        optimizer.step()
        model(data(0))


@on_ranks(SIZE)
def test_weights_that_fsdp_would_overlook_are_refused():
    """Mutant: what was applied computes, whatever stands in its place."""
    dp = Mesh(dp=SIZE).dp
    model = Net()
    before = [*model.parameters()]
    fsdp.apply(model, dp)
    other = {name: torch.ones(p.full_shape) for name, p in model.named_parameters()}
    with refuses("head.bias.*replaced|another tensor"):
        torch.func.functional_call(model, other, data(0))
    model(data(0))  # which has the own ones again
    with refuses("was replaced by a piece"):
        before[0].T  # noqa: B018
    model.blocks[1].weight = model.blocks[0].weight
    with refuses("blocks.1.weight is another tensor"):
        model(data(0))


@on_ranks(SIZE)
def test_first_values_of_pieces_are_refused_where_they_depend_on_the_shape():
    model = Net()
    fsdp.apply(model, Mesh(dp=SIZE).dp)
    with refuses("initialise before fsdp.apply"):
        nn.init.xavier_uniform_(model.head.weight)


@pytest.mark.parametrize("kind", [*KINDS, "local_sgd"])
@on_ranks(SIZE)
def test_layers_and_ties_that_ranks_could_not_share(kind):
    dp, tied = Mesh(dp=SIZE).dp, Net()
    tied.blocks[1].weight.data = tied.blocks[0].weight.data

    def attach_to(model):
        if kind == "local_sgd":
            return local_sgd.LocalSGD(model, dp, adamw(model.parameters()))
        return attach(model, kind)

    with refuses("max_norm=1: .* with max_norm=None", ValueError):
        attach_to(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4)))
    if kind == "offload in ddp" or kind.startswith(("zero", "fsdp")):
        with refuses("two parameters in the same memory", ValueError):
            attach_to(tied)
    if kind == "local_sgd":
        model = Net()
        attach_to(model)
        with refuses("trained by local_sgd along dp already", ValueError):
            ddp.apply(model, dp)


@on_ranks(SIZE)
def test_a_closure_must_finish_its_backward():
    model = Net()
    _, optimizer = attach(model, "ddp")

    def closure():
        loss = model(data(0)).sum()
        loss.backward()
        return loss

    with refuses("the end of a closure came before finish_backward"):
        optimizer.step(closure)


@on_ranks(SIZE)
def test_an_optimizer_that_asks_for_the_loss_takes_the_mean_of_all_ranks():
    """Each rank decides by it when to stop: by its own, one would wait for another for ever."""
    axis, models = Mesh(dp=SIZE).dp, (Net(), Net())
    strategy = ddp.apply(models[0], axis)

    def mean_loss() -> Tensor:
        models[0].zero_grad()
        loss = models[0](data(axis.rank)).square().mean()
        loss.backward()
        strategy.finish_backward()
        return all_reduce(loss.detach(), axis, "avg")

    def loss_of_all() -> Tensor:
        models[1].zero_grad()
        loss = torch.stack([models[1](data(r)).square().mean() for r in range(SIZE)]).mean()
        loss.backward()
        return loss

    for model, closure in zip(models, (mean_loss, loss_of_all), strict=True):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
        for _ in range(2):
            optimizer.step(closure)
    for p, twin in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, twin, rtol=1e-6, atol=1e-9)


@on_ranks(SIZE)
def test_gradients_with_a_graph_of_their_own():
    """``backward(create_graph=True)``, for a penalty on gradients."""
    for kind in KINDS:
        model = Net()
        strategy, optimizer = attach(model, kind)
        model(data(Mesh(dp=SIZE).dp.rank)).square().sum().backward(create_graph=True)
        strategy.finish_backward()
        optimizer.step()
        assert_close(strategy.full_state_dict(), serial(steps=1)[0])


@pytest.mark.parametrize("kind", ["ddp", "bucketed", "zero 1"])
@on_ranks(SIZE)
def test_a_penalty_on_gradients_that_no_sync_has_kept(kind):
    """Mutant: these have lost their graph, and the penalty counts for nothing."""
    model, alone, rank = Net(), Net(), Mesh(dp=SIZE).dp.rank
    strategy, optimizer = attach(model, kind)
    single = adamw(alone.parameters())

    def penalised(model: nn.Module, rank: int, step: int) -> Tensor:
        model.zero_grad()
        with strategy.no_sync() if model is not alone else nullcontext():
            model(data(rank, step)).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        return model(data(rank, step)).square().sum() + 0.1 * penalty

    for step in range(3):
        loss = penalised(model, rank, step)
        optimizer.zero_grad()
        loss.backward()
        strategy.finish_backward()
        optimizer.step()
        loss = sum(penalised(alone, r, step) / SIZE for r in range(SIZE))
        single.zero_grad()
        loss.backward()
        single.step()
        optimizer.zero_grad()
    assert_close(strategy.full_state_dict(), alone.state_dict())


@on_ranks(SIZE)
def test_zero_keeps_no_zeros():
    _, optimizer = attach(Net(), "zero 1")
    with refuses("set_to_none=False: zero keeps no gradients", ValueError):
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("kind", ["tensor", "synchronous", "summed", "delayed"])
@on_ranks(SIZE)
def test_a_step_before_finish_backward_of_a_strategy_that_has_no_buckets(kind):
    """Norms of sequence parallelism, and gradients of local updates. Mutant: each steps alone."""
    axis = Mesh(dp=SIZE).dp
    model = models.llama(0) if kind == "tensor" else Net()
    optimizer = adamw(model.parameters())
    if kind == "tensor":
        strategy = tensor.apply(model, axis, sequence=True)
    elif kind == "delayed":
        strategy = local_sgd.DelayedGradients(model, axis)
    else:
        options = dict(average=False) if kind == "summed" else dict(synchronous_steps=1)
        strategy = local_sgd.LocalSGD(model, axis, optimizer, **options)
    model(torch.arange(8)[None] if kind == "tensor" else data(0)).square().sum().backward()
    with refuses(r"optimizer.step\(\) came before finish_backward"):
        optimizer.step()
    with refuses(r"clip_grad_norm_\(\) came before finish_backward"):
        strategy.clip_grad_norm_(0.5)
    strategy.finish_backward()
    optimizer.step()


@on_ranks(SIZE)
def test_gradients_kept_by_no_sync_must_be_sent():
    model = Net()
    strategy, optimizer = attach(model, "ddp")
    with strategy.no_sync():
        model(data(0)).sum().backward()
    with refuses("finish_backward"):
        optimizer.step()
    strategy.finish_backward()
    optimizer.step()
    optimizer.step()  # twice with the same gradients is nobody's mistake


@pytest.mark.parametrize("kind", ["ddp", "bucketed", "offload in ddp"])
@on_ranks(SIZE)
def test_torchs_clipping_waits_for_finish_backward_too(kind):
    """Mutant: each rank clips its own gradient by its own norm, and then they are averaged."""
    model, (_, [norm]) = Net(), serial(steps=1)
    strategy, _ = attach(model, kind)
    model(data(Mesh(dp=SIZE).dp.rank)).square().sum().backward()
    with refuses(r"clip_grad_norm_\(\) came before finish_backward"):
        clip_grad_norm_(model.parameters(), 0.5)
    strategy.finish_backward()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm, rtol=1e-9, atol=0.0)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_torchs_other_words_on_gradients(kind):
    """Mutants: the norm of this rank's pieces, or of nothing; a clip that no rank's step sees."""
    model, alone = Net(), Net()
    strategy, _ = attach(model, kind)
    model(data(Mesh(dp=SIZE).dp.rank)).square().sum().backward()
    with refuses("get_total_norm.*(finish_backward|strategy.clip_grad_norm_)"):
        get_total_norm(gradients(model))
    with refuses("clip_grad_value_.*(finish_backward|with_gradients)"):
        clip_grad_value_(model.parameters(), 0.5)
    strategy.finish_backward()
    sum(alone(data(rank)).square().sum() / SIZE for rank in range(SIZE)).backward()
    norm = get_total_norm(tensors=gradients(alone))
    if kind.startswith(("zero", "fsdp")):
        with refuses(r"get_total_norm sees .*strategy.clip_grad_norm_\(max_norm\)"):
            get_total_norm(gradients(model))
        with refuses("get_total_norm sees"):
            get_total_norm(p.grad for p in strategy.with_gradients())
    else:
        torch.testing.assert_close(get_total_norm(gradients(model)), norm, rtol=1e-9, atol=0.0)
    if kind.startswith("zero"):
        with refuses(r"clip_grad_value_ changes nothing.*strategy.with_gradients\(\)"):
            clip_grad_value_(model.parameters(), 0.5)
    for clip in (partial(clip_grads_with_norm_, max_norm=2.0, total_norm=norm), clip_by_value):
        clip(alone.parameters())
        clip(strategy.with_gradients())
        expected = {name: p.grad for name, p in alone.named_parameters()}
        assert_close(strategy.full_gradients(), expected)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_torchs_norm_of_another_model_that_has_no_gradients(kind):
    """It is 0, whatever strategy is at work beside it. Mutant: refused, as the norm of nothing."""
    model, other = Net(), Net()
    strategy, _ = attach(model, kind)
    model(data(Mesh(dp=SIZE).dp.rank)).square().sum().backward()
    assert clip_grad_norm_(other.parameters(), 0.5) == 0
    strategy.finish_backward()
    assert clip_grad_norm_(other.parameters(), 0.5) == 0


def clip_by_value(parameters) -> None:
    clip_grad_value_(parameters, 0.05)


@pytest.mark.parametrize("cuts", [tensor, expert])
@on_ranks(SIZE)
def test_torchs_norm_where_nothing_but_the_model_is_cut(cuts):
    """Mutant: only strategies that share gradients are known to torch's functions."""
    model = models.llama(0, moe=None if cuts is tensor else MoEConfig(4, 2, 8))
    strategy = cuts.apply(model, Mesh(tp=SIZE).tp)
    model(torch.arange(8)[None]).square().sum().backward()
    strategy.finish_backward()
    for norm in (
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: get_total_norm(gradients(model)),
    ):
        with refuses(r"along tp; call strategy.clip_grad_norm_\(max_norm\)"):
            norm()
    clip_grad_value_(model.parameters(), 0.05)
    assert max(g.abs().max() for g in gradients(model)) <= 0.05


@pytest.mark.parametrize("kind", [*KINDS[:-1], "local sgd", "diloco", "delayed gradients"])
@on_ranks(SIZE)
def test_what_was_frozen_or_not_there_when_the_model_was_shared(kind):
    """Mutants: an unfrozen layer that each rank trains alone, or that never moves; a new head."""
    model = Net()
    model.blocks[0].requires_grad_(False)
    strategy, optimizer = attach(model, kind)
    for _ in range(2 if kind == "delayed gradients" else 1):
        model(data(0)).square().sum().backward()
        strategy.finish_backward()
    optimizer.step()  # frozen is right
    model.blocks[0].requires_grad_(True)
    with refuses(r"blocks\.0\.\w+ was frozen, or another, when .* along dp"):
        optimizer.step()
    model.blocks[0].requires_grad_(False)
    optimizer.step()
    if kind == "ddp":
        model.head = nn.Linear(6, 3).double()
        new = adamw(model.head.parameters())  # an optimizer of its own does not help
        model(data(0)).square().sum().backward()
        strategy.finish_backward()
        with refuses(r"head\.\w+ was frozen, or another"):
            new.step()


@on_ranks(SIZE)
def test_others_train_as_they_like_beside_a_shared_model():
    """Mutant: a frozen layer of one model stops the optimizer of another."""
    shared = Net()
    shared.head.requires_grad_(False)
    strategy, _ = attach(shared, "ddp")
    shared.head.requires_grad_(True)
    alone = Net()
    alone(data(0)).sum().backward()
    adamw(alone.parameters()).step()
    assert not torch.equal(alone.head.weight, Net().head.weight)


@pytest.mark.parametrize("kind", [*KINDS, "bucketed"])
@on_ranks(SIZE)
def test_a_gradient_scaler_waits_for_the_end_of_backward(kind):
    """Torch's recipe is to unscale, then to clip. Mutant: what is here of gradients is unscaled."""
    model = Net()
    strategy, optimizer = attach(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(data(0)).square().sum()).backward()
    with refuses(r"scaler\.unscale_\(\) came before finish_backward"):
        scaler.unscale_(optimizer)
    strategy.finish_backward()


def test_a_gradient_scaler_comes_too_early_for_a_sharded_optimizer_by_itself():
    """Mutant: it finds no gradient, and scaled ones are stepped."""
    model = Net()
    strategy = ddp.apply(model, Mesh().dp)
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.SGD, Mesh().dp, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(data(0)).sum()).backward()
    strategy.finish_backward()
    with refuses("by itself takes gradients over as it steps"):
        scaler.step(optimizer)


class Normed(torch.optim.SGD):
    """Divides the gradients of a group by their norm."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.grad /= norm
        return super().step()


class Around(torch.optim.Optimizer):
    """Steps by another optimizer; every second time it goes half of the way back."""

    def __init__(self, base):
        self.base, self.num_steps = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.num_steps += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.num_steps % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))


@on_ranks(SIZE)
def test_an_optimizer_that_looks_at_all_of_a_group_is_refused_for_pieces():
    """Mutant: the trial steps both pieces in one group, where the norm is that of the whole."""
    dp = Mesh(dp=SIZE).dp
    with refuses("Normed does not step on each number alone", ValueError):
        zero.ShardedOptimizer(Net().parameters(), Normed, dp, lr=0.1)
    model = Net()
    strategy = fsdp.apply(model, dp)
    optimizer = Normed(model.parameters(), lr=0.1)
    model(data(dp.rank)).sum().backward()
    strategy.finish_backward()
    with refuses("Normed does not step on each number alone", ValueError):
        optimizer.step()


@on_ranks(SIZE)
def test_an_optimizer_around_another_takes_no_step_for_a_trial():
    """Mutant: the trial steps what it wraps, which has the real pieces."""
    dp, model, expected = Mesh(dp=SIZE).dp, Net(), Net()
    strategy = fsdp.apply(model, dp)
    optimizer, twin = (
        Around(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (model, expected)
    )
    for step in range(4):
        for each in (optimizer, twin):
            each.zero_grad()
        model(data(dp.rank, step)).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()
        (sum(expected(data(r, step)).square().sum() for r in range(SIZE)) / SIZE).backward()
        twin.step()
    assert_close(strategy.full_state_dict(), expected.state_dict())


@on_ranks(SIZE)
def test_an_optimizer_that_looks_at_whole_matrices_is_refused_where_tp_has_cut_them():
    """Mutant: only pieces of zero and fsdp are looked at."""
    mesh, model = Mesh(tp=SIZE), models.llama(0, tie_embeddings=False, vocab_size=62)
    strategy = tensor.apply(model, mesh.tp)
    optimizer = torch.optim.Adafactor(model.parameters())
    tokens = torch.arange(8)[None]
    model.token_loss(model(tokens), tokens).mean().backward()
    strategy.finish_backward()
    with refuses("Adafactor does not step on each number alone", ValueError):
        optimizer.step()


@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped", "post-local sgd"])
@on_ranks(SIZE)
def test_gradients_lie_in_memory_as_weights_do(version):
    """Fused optimizers step one number after the other. Mutant: gradients in the order of rows."""
    dp = Mesh(dp=SIZE).dp
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    model = model.to(memory_format=torch.channels_last)
    expected = copy.deepcopy(model)
    optimizer, twin = (
        torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (model, expected)
    )
    if version in local_sgd.METHODS:
        options = dict(method=version, synchronous_steps=9)
        strategy = local_sgd.apply(model, dp, optimizer, **options)
    else:
        strategy = ddp.apply(model, dp, version=version)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        images = torch.randn(SIZE, 1, 3, 3, 3, generator=generator)
        for each in (optimizer, twin):
            each.zero_grad()
        model(images[dp.rank]).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()
        (sum(expected(image).square().sum() for image in images) / SIZE).backward()
        twin.step()
    for p, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-5)


@on_ranks(SIZE)
def test_a_saved_model_is_free_of_who_trained_it():
    """Mutant: what was loaded is refused, as trained by ddp already."""
    model, file = Net(), io.BytesIO()
    torch.save(ddp.apply(model, Mesh(dp=SIZE).dp).model.head.weight, file)
    file.seek(0)
    loaded = Net()
    loaded.head.weight = torch.load(file, weights_only=False)
    ddp.apply(loaded, Mesh(dp=SIZE).dp)


def test_parameters_of_others_are_not_for_zero():
    """Mutant: each rank's own first values, never made equal, and stepped by its own gradient."""
    model, loss = Net(), nn.Linear(3, 1).double()
    both = [*model.parameters(), *loss.parameters()]
    optimizer = zero.ShardedOptimizer(both, torch.optim.SGD, Mesh().dp, lr=0.1)
    with refuses("holds 2 parameters that are not of the model", ValueError):
        zero.apply(model, Mesh().dp, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_jit_runs_is_refused_where_weights_come_and_go():
    """Mutant: it reads weights that are still on their way."""
    model = nn.Sequential(torch.jit.trace(nn.Linear(6, 6), torch.zeros(1, 6)), nn.Linear(6, 1))
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.SGD, Mesh().dp, lr=0.1)
    with refuses("0 was made by torch.jit", ValueError):
        zero.apply(model, Mesh().dp, optimizer=optimizer)
    with refuses("0 was made by torch.jit", ValueError):
        offload.apply(model, Mesh().dp, copies=HostCopy(pcie="none"))


@pytest.mark.parametrize("version", ["bucketed", "overlapped"])
@on_ranks(SIZE)
def test_a_gradient_that_was_taken_away_does_not_come_back(version):
    """A bad batch, dropped by hand. Mutant: finish_backward() brings it back from its bucket."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy = ddp.apply(model, Mesh(dp=SIZE).dp, version=version)
    for step in range(3):
        (math.nan * model(data(rank, step))).sum().backward()
        for p in model.parameters():
            p.grad = None
        strategy.finish_backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", [*KINDS, "bucketed"])
@on_ranks(SIZE)
def test_a_gradient_scaler_skips_on_all_ranks_or_on_none(kind):
    """An overflow in what one rank has of the gradients. Mutant: that rank alone skips the step."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy, optimizer = attach(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, overflows in enumerate([False, True, False]):
        optimizer.zero_grad()
        scaler.scale(model(data(rank, step)).square().sum()).backward()
        strategy.finish_backward()
        pieces = [p for p in strategy.with_gradients() if p.numel() and p.grad is not None]
        if overflows and (rank == 1 or "ddp" in kind or kind == "bucketed"):
            pieces[0].grad.view(-1)[0] = torch.inf
        before = strategy.full_state_dict()
        scaler.step(optimizer)
        scaler.update()
        after = strategy.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) == overflows
        assert scaler.get_scale() == (4.0 if step == 0 else 2.0)


@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped"])
@pytest.mark.parametrize("zeroed", [False, True])
@on_ranks(SIZE)
def test_sums_of_two_backwards_that_nobody_has_zeroed(version, zeroed):
    """Mutant: what was summed over the ranks is summed over them again."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy = ddp.apply(model, Mesh(dp=SIZE).dp, version=version, average=False)
    expected = Net()
    for step in range(3):
        if zeroed:
            model.zero_grad(set_to_none=False)
            expected.zero_grad()
        model.chooses = expected.chooses = step % 2  # only some of the parameters, by turns
        model(data(rank, step)).square().sum().backward()
        strategy.finish_backward()
        sum(expected(data(r, step)).square().sum() for r in range(SIZE)).backward()
        for p, twin in zip(model.parameters(), expected.parameters(), strict=True):
            found = torch.zeros_like(p) if p.grad is None else p.grad
            wanted = torch.zeros_like(p) if twin.grad is None else twin.grad
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["local sgd", "post-local sgd"])
@on_ranks(SIZE)
def test_sums_that_nobody_has_zeroed_before_ranks_step_alone(method):
    """Mutant: what was multiplied by the number of ranks is multiplied again."""
    axis, model, expected = Mesh(dp=SIZE).dp, Net(), Net()
    optimizer = adamw(model.parameters())
    strategy = local_sgd.apply(model, axis, optimizer, method=method, average=False)
    readers = range(SIZE) if method == "post-local sgd" else [axis.rank] * SIZE
    for step in range(3):
        model(data(axis.rank, step)).square().sum().backward()
        strategy.finish_backward()
        sum(expected(data(r, step)).square().sum() for r in readers).backward()
        for p, twin in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad, twin.grad, rtol=1e-9, atol=1e-11)


@on_ranks(SIZE)
def test_late_sums_that_nobody_has_zeroed():
    """As with means of losses n times as large. Mutant: what was summed is summed again."""
    axis, summed, averaged = Mesh(dp=SIZE).dp, Net(), Net()
    late = [
        local_sgd.apply(model, axis, None, method="delayed gradients", average=model is averaged)
        for model in (summed, averaged)
    ]
    for step in range(4):
        summed(data(axis.rank, step)).square().sum().backward()
        (SIZE * averaged(data(axis.rank, step)).square().sum()).backward()
        for strategy in late:
            strategy.finish_backward()
        for p, twin in zip(summed.parameters(), averaged.parameters(), strict=True):
            assert (p.grad is None) == (twin.grad is None) == (step == 0)
            if step:
                torch.testing.assert_close(p.grad, twin.grad, rtol=1e-9, atol=1e-11)


@on_ranks(SIZE)
def test_a_sum_that_autograd_grad_has_parted_is_not_stepped():
    """Torch calls the hooks on a weight there, too. Mutant: a step by half of the gradient."""
    model = Net()
    strategy = ddp.apply(model, Mesh(dp=SIZE).dp, average=False)
    optimizer = adamw(model.parameters())
    model(data(0)).sum().backward()
    strategy.finish_backward()
    whole = [p.grad.clone() for p in model.parameters()]
    torch.autograd.grad(model(data(1)).sum(), list(model.parameters()))
    with refuses("came before finish_backward"):
        optimizer.step()
    strategy.finish_backward()
    optimizer.step()
    for p, grad in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, grad)


# ---------------------------------------------------------------------- zero: weights on their way
def _averages(kind: str) -> None:
    rank, model, average = Mesh(dp=SIZE).dp.rank, Net(), Net().state_dict()
    strategy, optimizer = attach(model, kind)
    expected_average = Net().state_dict()

    def between(model: nn.Module, average: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.5)

    expected, _ = serial(between=lambda model: between(model, expected_average))
    for step in range(3):
        optimizer.zero_grad()
        model(data(rank, step)).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()
        between(model, average)
    assert_close(strategy.full_state_dict(), expected)
    assert_close(average, expected_average)
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(model).parameters())


@pytest.mark.parametrize("kind", ["zero 1", "zero 2"])
def test_weights_may_be_read_and_written_after_a_step(ranks, kind):
    """Mutant: a parameter that is read before the slices of the others have arrived."""
    ranks(SIZE, "link").run(_with_slow_link, _averages, kind)


def _with_slow_link(fn, *args) -> None:
    from minipar.emulate import link

    link.check_calls(False)
    link.use(link.Link("slow", 0.01, 1e9))
    try:
        fn(*args)
    finally:
        link.use("none")
        link.check_calls(True)


# ---------------------------------------------------------------------- torch.compile
def _compiled(kind: str, when: str) -> None:
    torch._dynamo.reset()
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    run = model
    if when == "before":
        run = torch.compile(model, backend="eager")
        run(data(rank))
    elif when == "equal":  # whose graph could be used again
        torch.compile(Net(), backend="eager")(data(rank))
    strategy, optimizer = attach(model, kind)
    if when != "before":
        run = torch.compile(model, backend="aot_eager" if when == "after" else "eager")
    expected, _ = serial()
    for step in range(3):
        optimizer.zero_grad()
        run(data(rank, step)).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()
    assert_close(strategy.full_state_dict(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "equal", "after"])
@pytest.mark.parametrize("kind", ["ddp", "zero 2", "fsdp"])
def test_compiled_models(ranks, kind, when):
    """Mutants: weights that only a hook waits for, which a graph made earlier does not call; hooks
    of fsdp that are traced."""
    ranks(SIZE, "link").run(_with_slow_link, _compiled, kind, when)


# ---------------------------------------------------------------------- fsdp
@on_ranks(SIZE)
def test_idioms_that_fsdp_refuses():
    dp = Mesh(dp=SIZE).dp
    model = Net()
    before = adamw(model.parameters())
    strategy = fsdp.apply(model, dp)
    with refuses("make the optimizer after fsdp.apply"):
        before.step()
    whole = {name: value + 1 for name, value in Net().state_dict().items()}
    for module in (model, model.blocks[0]):
        with refuses("full_state_dict"):
            module.state_dict()
    for state in (whole, {"head.bias": whole["head.bias"]}):  # which one rank has, and may be alone
        with refuses("load_full_state_dict"):
            model.load_state_dict(state, strict=False)
    assert_close(strategy.full_state_dict(), Net().state_dict())  # none of it was loaded
    strategy.load_full_state_dict(whole)
    assert_close(strategy.full_state_dict(), whole)
    assert {n for n, p in model.named_parameters() if p.ndim >= 2} == {
        n for n, p in Net().named_parameters() if p.ndim >= 2
    }
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim >= 2], lr=0.0)
    model(data(dp.rank)).sum().backward()
    strategy.finish_backward()
    with refuses("Muon does not step on each number alone", ValueError):
        muon.step()


@on_ranks(SIZE)
def test_the_state_of_one_ranks_pieces_is_for_that_rank():
    """Mutants: moments of rank 0 on all ranks, as pieces have one shape; whole ones in pieces;
    those of pieces in whole parameters; pieces that do not say so before the first step."""
    dp = Mesh(dp=SIZE).dp

    def made() -> tuple:
        model = nn.Linear(4, 4, bias=False)
        strategy = fsdp.apply(model, dp)
        optimizer = adamw(model.parameters())
        return model, strategy, optimizer

    model, strategy, optimizer = made()
    model(torch.ones(1, 4)).sum().backward()
    strategy.finish_backward()
    optimizer.step()
    own = optimizer.state_dict()
    _, _, again = made()
    again.load_state_dict(copy.deepcopy(own))  # each rank its own: right
    torch.testing.assert_close(again.state_dict(), own)
    with refuses("not the state of whole parameters", ValueError):
        adamw(nn.Linear(4, 4, bias=False).parameters()).load_state_dict(copy.deepcopy(own))
    told = copy.deepcopy(own)
    told["pieces"] = {n: [[1 - dp.rank, SIZE]] for n in told["pieces"]}  # as another rank told it
    whole = strategy.full_optimizer_state(optimizer)
    for wrong in (told, whole):
        with refuses("strategy.full_optimizer_state", ValueError):
            made()[2].load_state_dict(wrong)
    _, other, fresh = made()
    other.load_full_optimizer_state(fresh, whole)
    torch.testing.assert_close(fresh.state_dict()["state"], own["state"])


def test_state_dict_of_other_pieces_is_refused():
    """Mutant: matrices and experts of one rank, saved as if they were the model."""
    tp, ep = on_paper("tp", 2), on_paper("ep", 2)
    cut = models.llama(0), models.llama(0, moe=MoEConfig(num_experts=4, top_k=2, expert_size=8))
    tensor.TensorParallel(cut[0], Border(tp))
    expert.ExpertParallel(cut[1], ep, ep, "all_to_all", 1, (ep,), None)
    for model in cut:
        with refuses("full_state_dict"):
            model.state_dict()
        assert model.state_dict(keep_vars=True)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_other_tensors_in_the_place_of_parameters(kind):
    """Mutant: they take it, and no optimizer steps them."""
    model = Net()
    strategy, _ = attach(model, kind)
    state = {name: value + 1 for name, value in Net().state_dict().items()}
    with refuses("load_full_state_dict|is trained by"):
        model.load_state_dict(state, assign=True)
    assert_close(strategy.full_state_dict(), Net().state_dict())


def penalised(model: nn.Module) -> Tensor:
    return model(data(0)).sum() + model.blocks[1].weight.norm()


def with_a_weight_of_the_root(model: nn.Module) -> Tensor:
    return model(data(0)).sum() * model.head.bias.exp().mean()


@pytest.mark.parametrize("loss_of", [penalised, with_a_weight_of_the_root])
@on_ranks(SIZE)
def test_a_loss_of_pieces_is_refused(loss_of):
    """Mutant: each rank takes its piece for the weight, and trains."""
    model = Net()
    attach(model, "fsdp")
    with refuses(r"(blocks\.1\.weight|head\.bias) belongs to .* used outside of its forward"):
        loss_of(model).backward()


def by_grad(loss: Tensor, model: nn.Module) -> None:
    torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)


def by_inputs(loss: Tensor, model: nn.Module) -> None:
    loss.backward(inputs=[model.blocks[1].bias])


@pytest.mark.parametrize("backward", [by_grad, by_inputs])
@on_ranks(SIZE)
def test_fsdp_has_gradients_of_all_weights_or_of_none(backward):
    """Mutant: others than those that were asked for are added to what the optimizer sees."""
    model = Net()
    strategy, optimizer = attach(model, "fsdp")
    loss = model(data(Mesh(dp=SIZE).dp.rank)).square().sum()
    with refuses("a plain backward"):
        backward(loss, model)
    strategy.finish_backward()
    optimizer.zero_grad()
    loss = model(data(Mesh(dp=SIZE).dp.rank)).square().sum()
    loss.backward(inputs=[*model.parameters()])
    strategy.finish_backward()
    optimizer.step()
    assert_close(strategy.full_state_dict(), serial(steps=1)[0])


@on_ranks(SIZE)
def test_a_weight_read_in_another_block_is_named():
    """Mutant: a piece of a bias that is broadcast, or an error about its shape."""
    dp = Mesh(dp=SIZE).dp
    model = Net(reads=True)
    fsdp.apply(model, dp)
    with refuses(r"blocks\.0\.bias belongs to block blocks\.0 and was used outside"):
        model(data(dp.rank))
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("differs", [True, False])
@on_ranks(SIZE)
def test_blocks_in_another_order_on_another_rank(differs):
    """Mutant: gradients of one block added to those of another, as all are of one size."""
    dp = Mesh(dp=SIZE).dp
    model = Net(chooses=dp.rank if differs else 0)
    strategy = fsdp.apply(model, dp, reshard_after_forward=False, accumulate="whole")
    model(data(dp.rank)).sum().backward()
    if differs:
        with refuses(f"gather blocks.{dp.rank}"):
            strategy.finish_backward()
    else:
        strategy.finish_backward()


def test_a_gpu_tells_of_blocks_in_another_order_a_step_late(monkeypatch):
    """At the end of the next, or where something is saved. Mutants: a forward waits for it; at the
    end nobody asks; the blocks of a later step are named."""
    model, asked = nn.Linear(4, 4), []
    strategy = fsdp.apply(model, Mesh().dp)
    optimizer, ledger = adamw(model.parameters()), strategy.options.ledger
    coming = lambda arrive, _: lambda: (asked.append("waited for"), arrive())[1]  # noqa: E731
    monkeypatch.setattr(same_order, "send_to_host", coming)

    def told(*greatest: int) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda"), is_meta=False, tolist=lambda: greatest)

    asks = [strategy.full_state_dict, partial(strategy.full_optimizer_state, optimizer)]
    asks += [strategy.finish_backward, partial(ledger.tell, told(1, 254))]
    for ask in asks:
        ledger.close()
        ledger.note("gather blocks.1")
        ledger.tell(told(1, 255))  # this rank has done 1, another 0
        model(torch.ones(1, 4)).sum().backward()
        ledger.latest.clear()
        assert not asked
        with refuses("gather blocks.1"):
            ask()
        assert asked == ["waited for"]
        ledger.told = asked.clear()
    for _ in range(3):
        ledger.tell(told(1, 254))
    assert len(asked) == 2


def evaluated_on_one_rank() -> str:
    """What rank 0 is told when it alone runs a model that is cut."""
    dp, model, told = Mesh(dp=SIZE).dp, Net(), []
    attach(model, "fsdp")
    with watchdog.watch(1, told.append):
        try:
            if dp.rank == 0:
                with torch.no_grad():
                    model(data(0))
            time.sleep(4)
        except RuntimeError as error:
            told += [str(error), *error.__notes__]
    return "\n".join(told)


@pytest.mark.slow
def test_evaluation_on_one_rank_says_so():
    """Mutant: a time-out that names no module."""
    with Ranks(SIZE, timeout=3) as pool:
        alone, _ = pool.run(evaluated_on_one_rank)
    assert "rank 1 of 2 (dp=1) has not reached all_gather #" in alone
    assert "on dp of weights of the root (88 bytes on the wire), in which rank 0 of 2" in alone
    assert "time.sleep(4)" in alone  # where rank 1 is
    assert "while gathering the root. fsdp: all ranks must run" in alone
    assert "or ran the model alone" in alone


@on_ranks(SIZE)
def test_legacy_weight_norm_under_fsdp():
    """Mutant: its hook runs before the weights are gathered, and reads where nothing is."""
    dp, model = Mesh(dp=SIZE).dp, Net()
    with pytest.warns(FutureWarning):
        model.blocks[0] = weight_norm(model.blocks[0])
    expected = model(data(dp.rank)).detach()
    fsdp.apply(model, dp)
    torch.testing.assert_close(model(data(dp.rank)), expected)


# ---------------------------------------------------------------------- twice, and sparse
@on_ranks(SIZE)
def test_offload_needs_somebody_who_shares_gradients():
    """Mutant: ranks that drift apart."""
    with refuses(r"no rank would share gradients along dp=2.*inside=ddp\.apply", ValueError):
        offload.apply(Net(), Mesh(dp=SIZE).dp, copies=HostCopy(pcie="none"))


@on_ranks(SIZE)
def test_a_second_apply_and_sparse_gradients_are_refused():
    dp, kinds = Mesh(dp=SIZE).dp, [*KINDS[:-1], "delayed gradients"]
    for first in kinds:
        model = Net()
        strategy, _ = attach(model, first)
        for second in kinds:
            with refuses(f"is trained by {first} along dp already", ValueError):
                attach(model, second)
        attach(copy.deepcopy(Net()), first)
        if strategy.rows:
            with refuses("use step_on_host", ValueError):
                offload.apply(model, dp, inside=strategy)
    model = Net()
    inside = ddp.apply(model, dp)
    with refuses("compute_dtype=torch.bfloat16 beside inside=Overlapped", ValueError):
        offload.apply(model, dp, inside=inside, compute_dtype=torch.bfloat16)
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    for kind in KINDS:
        with refuses("0 has sparse=True", ValueError):
            attach(sparse, kind)


class SparseLater(nn.Module):
    """Whose layers do not tell that a gradient will be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, sparse=True)


@pytest.mark.parametrize("kind", ["ddp", "zero 1"])
@on_ranks(SIZE)
def test_sparse_gradients_that_come_later_are_named(kind):
    model = SparseLater()
    attach(model, kind)
    with refuses("only dense ones can be shared"):
        model(torch.tensor([1])).sum().backward()


class Counting(Net):
    """With state that is no tensor, and buffers that are not as most are."""

    ODD = {
        "expanded": lambda numbers: numbers[:, None].expand(4, 3),
        "transposed": lambda numbers: numbers.view(2, 2).t(),
        "conjugated": lambda numbers: (numbers * 1j).conj(),
        "fp8": lambda numbers: numbers.to(torch.float8_e4m3fn),
        "uint16": lambda numbers: numbers.to(torch.uint16),
        "int16": lambda numbers: numbers[0].to(torch.int16),
    }

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.counts = {"words": 3 - rank}
        for name, make in self.ODD.items():
            self.register_buffer(name, make(torch.arange(1.0, 5.0) - rank))

    def get_extra_state(self) -> dict[str, int]:
        return self.counts

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counts = state


@pytest.mark.parametrize("kind", [*KINDS, "local_sgd"])
@on_ranks(SIZE)
def test_extra_state_and_any_dense_buffer_come_along(kind):
    model, expected = Counting(Mesh(dp=SIZE).dp.rank), Counting()
    if kind == "local_sgd":
        strategy = local_sgd.apply(model, Mesh(dp=SIZE).dp, adamw(model.parameters()))
    else:
        strategy, _ = attach(model, kind)
    state = strategy.full_state_dict()
    for name in Counting.ODD:
        assert torch.equal(state[name].cfloat(), expected.get_buffer(name).cfloat()), name
    assert state["_extra_state"] == model.counts
    del model.expanded, state["expanded"]  # torch itself does not load it
    strategy.load_full_state_dict({**state, "_extra_state": {"words": 7}})
    assert model.counts == {"words": 7}
    sparse = Net()
    sparse.register_buffer("adjacency", torch.eye(3).to_sparse())
    with refuses("the buffer adjacency is torch.sparse_coo", ValueError):
        attach(sparse, "ddp" if kind == "local_sgd" else kind)


@pytest.mark.parametrize("kind", KINDS[:-2])
@on_ranks(SIZE)
def test_a_hook_that_takes_a_gradient_away_is_named(kind):
    model = Net()
    model.head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    attach(model, kind)
    with refuses("a hook has taken the gradient"):
        model(data(0)).sum().backward()


@on_ranks(SIZE)
def test_another_optimizer_beside_that_of_zero():
    """Mutant: it finds no gradients, and changes nothing."""
    model = Net()
    strategy, _ = attach(model, "zero 1")
    other = adamw(model.parameters())
    model(data(0)).sum().backward()
    strategy.finish_backward()
    with refuses("step that one"):
        other.step()


# ---------------------------------------------------------------------- optimizer state by name
@pytest.mark.parametrize("kind", ["zero 1", "fsdp"])
@on_ranks(SIZE)
def test_optimizer_state_is_paired_by_name(kind):
    """Mutant: moments that go to whichever parameter has the number."""

    def trained(model: nn.Module, optimizer, strategy) -> None:
        for step in range(2):
            optimizer.zero_grad()
            model(data(0, step)).square().sum().backward()
            strategy.finish_backward()
            optimizer.step()

    def whole(strategy, optimizer) -> dict:
        if kind == "fsdp":
            return strategy.full_optimizer_state(optimizer)
        return optimizer.state_dict()

    def load(strategy, optimizer, state) -> None:
        if kind == "fsdp":
            strategy.load_full_optimizer_state(optimizer, state)
        else:
            optimizer.load_state_dict(state)

    model = Net()
    strategy, optimizer = attach(model, kind)
    trained(model, optimizer, strategy)
    state = whole(strategy, optimizer)
    [group] = state["param_groups"]
    assert group["param_names"] == [name for name, _ in model.named_parameters()]

    # Of an optimizer that counts its parameters the other way round.
    turned = copy.deepcopy(state)
    for key in ("params", "param_names"):
        turned["param_groups"][0][key].reverse()
    again, twin = attach(Net(), kind), Net()
    load(*again, turned)
    for number, entries in whole(*again)["state"].items():
        torch.testing.assert_close(entries, state["state"][number])
    assert len(state["state"]) == len(list(twin.parameters()))

    turned["param_groups"][0]["param_names"][0] = "of another model"
    with refuses("of other parameters: head.bias .* is only here", ValueError):
        load(*again, turned)
    del turned["param_groups"][0]["param_names"]  # as states were before: by their order
    turned["param_groups"][0]["params"].reverse()
    load(*again, turned)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@on_ranks(SIZE)
def test_a_plan_clips_and_names_its_state(zero_stage):
    """Mutants: a norm of what lies in the model, which under ZeRO is nothing; moments by number."""
    plan = Plan(dp=SIZE, zero=zero_stage)
    composed = compose.apply(
        models.llama(0).double(),
        Mesh(dp=SIZE),
        plan,
        lambda model, make: make_optimizer(model, lr=1.0, weight_decay=0.1, make=make),
    )
    tokens = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(composed.axis.rank))
    composed.model(tokens).square().mean().backward()
    with refuses("came before finish_backward"):
        composed.clip_grad_norm_(0.1)
    composed.finish_backward()
    serial = models.llama(0).double()
    for rank in range(SIZE):
        tokens = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(rank))
        serial(tokens).square().mean().backward()
    norm = clip_grad_norm_(serial.parameters(), torch.inf)
    torch.testing.assert_close(composed.clip_grad_norm_(0.1), norm, rtol=1e-9, atol=0.0)

    composed.optimizer.step()
    state = composed.full_optimizer_state()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in serial.named_parameters())
    composed.load_full_optimizer_state(state)
    state["param_groups"][0]["param_names"][0] = "another"
    with refuses("another", ValueError):
        composed.load_full_optimizer_state(state)


# ---------------------------------------------------------------------- README, word for word
def _blocks() -> list[str]:
    section = README.read_text(encoding="utf-8").split("## Use it as a library")[1]
    return re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S)


@pytest.mark.slow
def test_readme_runs_in_the_pool(ranks):
    """Every kind computes the same, on two ranks of the pool."""
    scope: dict = {"__name__": "script"}
    exec(compile(_blocks()[0], "README.md", "exec"), scope)
    results = [ranks(SIZE).run(_train, _blocks()[0], kind) for kind in ("ddp", "zero", "fsdp")]
    for states in results:
        for state in states:
            for name, value in results[0][0].items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def _train(source: str, kind: str) -> dict:
    scope: dict = {"__name__": "script"}
    exec(compile(source, "README.md", "exec"), scope)
    torch.manual_seed(Mesh(dp=SIZE).dp.rank)
    return scope["train"](kind, SIZE)


@pytest.mark.slow
def test_readme_runs_under_torchrun_and_in_a_notebook(tmp_path):
    """Its two blocks as files of these names."""
    script, notebook = _blocks()
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    (tmp_path / "notebook.py").write_text(notebook, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "script.py"]
    for command in (launcher, ["notebook.py"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True,
            encoding="utf-8", timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    states = [torch.load(tmp_path / f"model_{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
