"""The contract of README: what it refuses, with which words; and what real models need.

All strategies that share gradients are tried alike, on a model that is not ours.
"""

import copy
import gc
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from minipar.comm.mesh import Mesh
from minipar.model.moe import MoEConfig
from minipar.parallel import ddp, expert, fsdp, local_sgd, tensor, zero
from minipar.parallel.base.strategy import check_elementwise
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel import layers

README = Path(__file__).parents[2] / "README.md"
SIZE = 2
KINDS = "ddp", "bucketed", "zero 1", "zero 2", "fsdp"
SHARDED = KINDS[2:]
LATER = ("delayed gradients",)
Net = partial(layers.Layers, seed=0, num_layers=3)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """Of this rank's data."""
    return layers.loss_of(model, Mesh(dp=SIZE).dp.rank, step)


def loss_of_all(model: nn.Module, step: int = 0) -> Tensor:
    return sum(layers.loss_of(model, rank, step) / SIZE for rank in range(SIZE))


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
        strategy = ddp.apply(model, dp, version="overlapped" if kind == "ddp" else kind)
    return strategy, adamw(model.parameters())


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def refuses(match: str, kind: type[Exception] = RuntimeError):
    return pytest.raises(kind, match=match)


# ---------------------------------------------------------------------- refused at apply
def twice(kind: str) -> nn.Module:
    model = Net()
    attach(model, kind)
    return model


def embedding(**options) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, **options), nn.Linear(4, 4))


AT_APPLY: list[tuple[Callable[[str], nn.Module], str]] = [
    (twice, "is trained by .* along dp already, .* apply one of ddp, zero, fsdp, local_sgd, once"),
    (lambda _: embedding(sparse=True), "0 has sparse=True; .* make it False"),
    (lambda _: embedding(max_norm=1.0), "0 has max_norm=1: .* make it with max_norm=None"),
]


@pytest.mark.parametrize("kind", [*KINDS, "local sgd", "delayed gradients"])
@on_ranks(SIZE)
def test_refused_at_apply(kind):
    """Mutants: gradients summed twice; sparse ones; weights that a forward changes."""
    for make, words in AT_APPLY:
        with refuses(words, ValueError):
            attach(make(kind), kind)
    attach(copy.deepcopy(Net()), kind)


# ---------------------------------------------------------------------- refused at a step
def before_finish(model, strategy, optimizer):
    loss_of(model).backward()
    optimizer.step()


def clip_before_finish(model, strategy, optimizer):
    loss_of(model).backward()
    strategy.clip_grad_norm_(0.5)


def torchs_clip_before_finish(model, strategy, optimizer):
    loss_of(model).backward()
    clip_grad_norm_(model.parameters(), 0.5)
    strategy.finish_backward()


def zeroed_before_finish(model, strategy, optimizer):
    loss_of(model).backward()
    optimizer.zero_grad()
    loss_of(model).backward()


def unscale_before_finish(model, strategy, optimizer):
    loss_of(model).backward()
    strategy.unscale_(torch.amp.GradScaler("cpu"), optimizer)


def only_no_sync(model, strategy, optimizer):
    with strategy.no_sync():
        loss_of(model).backward()
    optimizer.step()


def finished(model, strategy) -> None:
    loss_of(model).backward()
    strategy.finish_backward()


def unfrozen(model, strategy, optimizer):
    model.layers[0].requires_grad_(True)
    finished(model, strategy)


def torchs_clip(model, strategy, optimizer):
    finished(model, strategy)
    clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
    optimizer.step()


def torchs_clip_of_the_model(model, strategy, optimizer):
    finished(model, strategy)
    loss_of(model.eval())
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def slices_written_to(model, strategy, optimizer):
    finished(model, strategy)
    for p in strategy.with_gradients():
        p.detach().add_(0.05)
    loss_of(model)


def slices_elsewhere(model, strategy, optimizer):
    finished(model, strategy)
    for p in strategy.with_gradients():
        p.data = p.data.clone()
    optimizer.step()
    finished(model, strategy)


def not_in_the_model(model, strategy, optimizer):
    """A learned temperature, or a head that came after `apply`."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer.add_param_group({"params": [scale]})
    (loss_of(model) * scale).backward()
    strategy.finish_backward()
    optimizer.step()


def later_in_the_model(model, strategy, optimizer):
    """As an adapter on a frozen model, which has the optimizer to itself."""
    model.layers.append(nn.Linear(6, 6).double())
    finished(model, strategy)


def torchs_scaler(model, strategy, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    strategy.finish_backward()
    scaler.step(optimizer)


class Normed(torch.optim.Optimizer):
    """Looks at all of a group."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self) -> None:
        raise AssertionError("the check comes first")


def whole_matrices(model, strategy, optimizer):
    finished(model, strategy)
    Normed(optimizer.param_groups).step()


def another_optimizer(model, strategy, optimizer):
    finished(model, strategy)
    adamw(model.parameters()).step()


def weights_replaced(model, strategy, optimizer):
    model.layers[0].weight = nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))
    loss_of(model)


def state_of_shards(model, strategy, optimizer):
    finished(model, strategy)
    optimizer.step()
    optimizer.state_dict()


AT_STEP = [
    (weights_replaced, ("fsdp",), "weight was replaced after apply"),
    (state_of_shards, ("fsdp",), r"full_optimizer_state\(optimizer\)"),
    (before_finish, (*KINDS, *LATER), r"optimizer.step\(\) came before finish_backward"),
    (clip_before_finish, KINDS, r"clip_grad_norm_\(\) came before finish_backward"),
    (unscale_before_finish, KINDS, r"unscale_\(\) came before finish_backward"),
    (torchs_clip_before_finish, ("ddp", *SHARDED), r"it comes by finish_backward\(\)"),
    (zeroed_before_finish, ("ddp", *SHARDED[:2]), r"finish_backward\(\) after (each|a) backward"),
    (only_no_sync, KINDS, "came before finish_backward"),
    (unfrozen, KINDS, "no rank shares the gradient of .*, which was frozen, or"),
    (torchs_clip, SHARDED, "clip them by strategy.clip_grad_norm_"),
    (torchs_clip_of_the_model, SHARDED, "clip (them )?by strategy.clip_grad_norm_"),
    (slices_written_to, SHARDED[:2], "write into the parameters of the model, alike"),
    (slices_elsewhere, SHARDED, r"write p.copy_\(x\), not p.data = x"),
    (not_in_the_model, (*KINDS, *LATER), r"of shape \(\), which was frozen, or not in the model"),
    (later_in_the_model, (*KINDS, *LATER), r"of shape \(6, 6\), which was frozen, or"),
    (torchs_scaler, SHARDED, r"without strategy.unscale_\(scaler, optimizer\)"),
    (whole_matrices, SHARDED, "Normed may look at whole matrices.* elementwise = True"),
    (another_optimizer, SHARDED[:2], "changes nothing: step the ShardedOptimizer"),
]


@pytest.mark.parametrize(
    ("do", "kind", "words"),
    [
        pytest.param(do, kind, words, id=f"{do.__name__}-{kind}")
        for do, kinds, words in AT_STEP
        for kind in kinds
    ],
)
@on_ranks(SIZE)
def test_refused_at_a_step(do, kind, words):
    model = Net()
    model.layers[0].requires_grad_(do is not unfrozen)
    strategy, optimizer = attach(model, kind)
    with refuses(words, ValueError if do is whole_matrices else RuntimeError):
        do(model, strategy, optimizer)


@on_ranks(SIZE)
def test_an_optimizer_made_before_fsdp_is_refused():
    """Mutant: it steps parameters that the model has no more."""
    model = Net()
    before = adamw(model.parameters())
    fsdp.apply(model, Mesh(dp=SIZE).dp)
    with refuses("make the optimizer after fsdp.apply"):
        before.step()


@on_ranks(SIZE)
def test_a_weight_kept_before_fsdp_is_refused():
    """As in a penalty on a list of weights. Mutant: it gets a gradient that nobody uses."""
    model = Net()
    kept = model.layers[0].weight
    fsdp.apply(model, Mesh(dp=SIZE).dp)
    with refuses("kept from before apply"):
        kept.square().sum().backward()


@on_ranks(SIZE)
def test_the_order_of_a_set_is_refused():
    """Mutant: slices of different weights are summed."""
    model, dp = Net(), Mesh(dp=SIZE).dp
    parameters = list(model.parameters())[:: 1 if dp.rank else -1]
    optimizer = zero.ShardedOptimizer(parameters, torch.optim.AdamW, dp, lr=0.05)
    with refuses("in another order on each rank", ValueError):
        zero.apply(model, dp, optimizer=optimizer)


@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped", "local sgd"])
@on_ranks(SIZE)
def test_a_sum_is_not_summed_again(version):
    """By a second `finish_backward`, as after a step without `zero_grad`."""
    model, dp = Net(), Mesh(dp=SIZE).dp
    if version == "local sgd":
        strategy = local_sgd.apply(model, dp, adamw(model.parameters()), average=False)
    else:
        strategy = ddp.apply(model, dp, version=version, average=False)
    loss_of(model).backward()
    strategy.finish_backward()
    with refuses("a finished sum"):
        strategy.finish_backward()


@pytest.mark.parametrize("cuts", [tensor, expert])
@on_ranks(SIZE)
def test_torchs_norm_where_nothing_but_the_model_is_cut(cuts):
    """Mutant: only strategies that share gradients are looked at."""
    model = models.llama(0, moe=None if cuts is tensor else MoEConfig(4, 2, 8))
    strategy = cuts.apply(model, Mesh(tp=SIZE).tp, **({"sequence": True} if cuts is tensor else {}))
    optimizer = adamw(model.parameters())
    model(torch.arange(8)[None]).square().sum().backward()
    if cuts is tensor:  # norms have a part of the tokens
        with refuses(r"optimizer.step\(\) came before finish_backward"):
            optimizer.step()
    strategy.finish_backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with refuses("clip them by strategy.clip_grad_norm_"):
        optimizer.step()
    if cuts is tensor:
        with refuses("Muon may look at whole matrices", ValueError):
            torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]).step()
    with refuses("full_state_dict"):
        model.state_dict()


def test_which_optimizers_can_step_shards():
    """Mutants: one that is refused by its name; one that says so itself, and is not believed."""

    class Own(Normed):
        elementwise = True

    class Faster(torch.optim.AdamW):
        pass

    for good in (torch.optim.SGD, Faster, Own, Own([nn.Parameter(torch.ones(1))])):
        check_elementwise(good)
    for bad in (Normed, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
        with refuses(f"{bad.__name__} may look at whole", ValueError):
            check_elementwise(bad)


# ---------------------------------------------------------------------- a cell that runs again
@pytest.mark.parametrize("kind", [*KINDS, *local_sgd.METHODS])
@on_ranks(SIZE)
def test_what_is_dropped_is_gone(kind):
    """Mutant: a hook that holds its strategy, and with it the model of each run of a cell."""

    def train() -> list[weakref.ref]:
        model = Net()
        strategy, optimizer = attach(model, kind)
        finished(model, strategy)
        optimizer.step()
        return [*map(weakref.ref, (strategy, model, optimizer, *model.parameters()))]

    left = train()
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


@on_ranks(SIZE)
def test_a_strategy_lives_as_long_as_its_parameters():
    """Nobody else has it. Mutant: hooks of one that is gone."""
    model = Net()
    optimizer = adamw(model.parameters())
    attach(model, "ddp")
    gc.collect()
    loss_of(model).backward()
    with refuses(r"optimizer.step\(\) came before finish_backward"):
        optimizer.step()


@on_ranks(SIZE)
def test_others_train_as_they_like_beside_a_shared_model():
    """Mutant: a frozen layer of one model, or its open backward, stops the optimizer of another."""
    shared, alone = Net(), Net()
    shared.layers[-1].requires_grad_(False)
    attach(shared, "ddp")
    shared.layers[-1].requires_grad_(True)
    loss_of(shared).backward()
    loss_of(alone).backward()
    clip_grad_norm_(alone.parameters(), 0.5)
    adamw(alone.parameters()).step()
    assert not torch.equal(alone.layers[-1].weight, Net().layers[-1].weight)


# ---------------------------------------------------------------------- what real models need
class Positions(nn.Module):
    """Returns some of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(54.0, dtype=torch.float64).view(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: len(x)]


class Learned(nn.Module):
    """Positions that are learnt, and a head outside of all lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"positions": Positions(), "body": nn.Linear(6, 6).double()})
        self.head = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts["body"](x + self.parts["positions"](x)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_a_block_may_return_its_own_weights_and_be_compiled(kind, compiled):
    """Mutants: a view of weights that are freed; a graph that reads them before they are there."""
    torch.manual_seed(0)
    model, rank = Learned(), Mesh(dp=SIZE).dp.rank
    alone = copy.deepcopy(model)
    strategy, optimizer = attach(model, kind)
    single = adamw(alone.parameters())
    call = torch.compile(model, backend="aot_eager") if compiled and kind != "fsdp" else model
    for step in range(3):
        x = torch.randn(SIZE, 4, 6, dtype=torch.float64, generator=torch.manual_seed(step))
        call(x[rank]).square().mean().backward()
        sum(alone(part).square().mean() / SIZE for part in x).backward()
        strategy.finish_backward()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    assert_close(strategy.full_state_dict(), alone.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_layers_that_are_frozen_for_a_while(kind):
    """As in adversarial training. Mutant: what is frozen is trained."""
    model, alone = Net(), Net()
    strategy, optimizer = attach(model, kind)
    single = adamw(alone.parameters())
    for step in range(4):
        for each in (model, alone):
            each.layers[-1].requires_grad_(step % 2 == 0)
            each.layers[0].weight.requires_grad_(step % 2 == 1)
        loss_of(model, step).backward()
        loss_of_all(alone, step).backward()
        for each in (model, alone):
            each.requires_grad_(True)
        strategy.finish_backward()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    assert_close(strategy.full_state_dict(), alone.state_dict())


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_goes_on_after_an_interrupted_step(kind, in_backward):
    """Under fsdp at the same place on all ranks. Mutants: buckets that stay sent, weights that
    stay gathered; gradients of the failed step in the next one."""
    model, alone = Net(), Net()
    strategy, optimizer = attach(model, kind)
    single, place = adamw(alone.parameters()), 1 if kind == "fsdp" else Mesh(dp=SIZE).dp.rank

    def boom(*_: Any) -> None:
        raise ArithmeticError("boom")

    def fail(_: nn.Module, args: tuple, out: Tensor) -> None:
        out.register_hook(boom) if in_backward else boom()

    for step in range(4):
        if step in (0, 2):
            hook = model.layers[place].register_forward_hook(fail)
            with pytest.raises(ArithmeticError, match="boom"):
                loss_of(model, step).backward()
            hook.remove()
            strategy.finish_backward()
            optimizer.zero_grad()
            if kind == "fsdp":
                assert {p.shape[1:].numel() for p in model.parameters()} == {1}  # all are shards
        loss_of(model, step).backward()
        loss_of_all(alone, step).backward()
        strategy.finish_backward()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    assert_close(strategy.full_state_dict(), alone.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(SIZE)
def test_a_gradient_scaler_skips_on_all_ranks_or_on_none(kind):
    """An overflow in what one rank has of the gradients. Mutant: that rank alone skips the step."""
    rank, model = Mesh(dp=SIZE).dp.rank, Net()
    strategy, optimizer = attach(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, overflows in enumerate([False, True, False]):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        strategy.finish_backward()
        own = [p for p in strategy.with_gradients() if p.numel() and p.grad is not None]
        if overflows and (rank == 1 or kind not in SHARDED):
            own[0].grad.view(-1)[0] = torch.inf
        before = strategy.full_state_dict()
        strategy.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        after = strategy.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) == overflows
        assert scaler.get_scale() == (4.0 if step == 0 else 2.0)


@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped"])
@on_ranks(SIZE)
def test_gradients_lie_in_memory_as_weights_do(version):
    """Fused optimizers step one number after the other. Mutant: gradients in the order of rows."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strategy = ddp.apply(model, Mesh(dp=SIZE).dp, version=version)
    model(torch.ones(1, 3, 3, 3)).square().sum().backward()
    strategy.finish_backward()
    assert model.weight.grad.stride() == model.weight.stride()


# ---------------------------------------------------------------------- optimizer state by name
@pytest.mark.parametrize("kind", ["zero 1", "fsdp"])
@on_ranks(SIZE)
def test_optimizer_state_is_paired_by_name(kind):
    """Mutant: moments that go to whichever parameter has the number."""
    model = Net()
    strategy, optimizer = attach(model, kind)
    for _ in range(2):
        finished(model, strategy)
        optimizer.step()
        optimizer.zero_grad()
    state = strategy.full_optimizer_state(optimizer)
    assert state["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]

    # Of an optimizer that counts its parameters the other way round.
    turned = copy.deepcopy(state)
    [group] = turned["param_groups"]
    for key in ("params", "param_names"):
        group[key].reverse()
    strategy, optimizer = attach(Net(), kind)
    strategy.load_full_optimizer_state(optimizer, turned)
    again = strategy.full_optimizer_state(optimizer)
    torch.testing.assert_close(again["state"], state["state"])

    group["param_names"][0] = "of another model"
    with refuses("of other parameters: layers.2.bias .* is only here", ValueError):
        strategy.load_full_optimizer_state(optimizer, turned)
    del group["param_names"]  # as states were before: by their order
    group["params"].reverse()
    strategy.load_full_optimizer_state(optimizer, turned)


# ---------------------------------------------------------------------- README, word for word
@pytest.mark.slow
def test_readme_runs_under_torchrun_and_in_a_notebook(tmp_path):
    """Its two blocks as files of these names; in the notebook also with ZeRO's optimizer."""
    section = README.read_text(encoding="utf-8").split("## Use it as a library")[1]
    script, notebook = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S)
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    (tmp_path / "notebook.py").write_text(notebook, encoding="utf-8")
    library = (README.parent / "book" / "library.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", library, re.S)
    begin, end = script.index("    strategy = "), script.index("    for step")
    script = script[:begin] + textwrap.indent(block, "    ") + script[end:]
    script = script.replace("parallel import fsdp", "parallel import zero")
    (tmp_path / "with_zero.py").write_text(script, encoding="utf-8")
    notebook = notebook.replace("from script", "from with_zero")
    (tmp_path / "zero_notebook.py").write_text(notebook, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "script.py"]
    for command in (launcher, ["notebook.py"], ["zero_notebook.py"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True,
            encoding="utf-8", timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    states = [torch.load(tmp_path / f"model_{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
