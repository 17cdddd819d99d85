"""The contract of README: what it refuses, with which words; and what real models need.

All strategies that share gradients are tried alike, on a model that is not ours.
"""

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from minipar.comm.mesh import Mesh
from minipar.model.moe import MoEConfig
from minipar.parallel import compose, ddp, expert, fsdp, local_sgd, tensor, zero
from minipar.parallel.base.shards import mark
from minipar.parallel.base.strategy import check_elementwise
from minipar.parallel.plan import Plan
from minipar.train.optim import make_optimizer
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel.layers import data

README = Path(__file__).parents[2] / "README.md"
SIZE = 2
KINDS = "ddp", "bucketed", "zero 1", "zero 2", "fsdp"
SHARDED = KINDS[2:]


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """Of this rank's data."""
    return model(data(Mesh(dp=SIZE).dp.rank, step)).square().sum()


def loss_of_all(model: nn.Module, step: int = 0) -> Tensor:
    return sum(model(data(rank, step)).square().sum() / SIZE for rank in range(SIZE))


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
    finished(model, strategy)
    model.blocks[0].requires_grad_(True)
    optimizer.step()


def torchs_clip(model, strategy, optimizer):
    finished(model, strategy)
    clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
    optimizer.step()


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


AT_STEP = [
    (before_finish, KINDS, r"optimizer.step\(\) came before finish_backward"),
    (clip_before_finish, KINDS, r"clip_grad_norm_\(\) came before finish_backward"),
    (unscale_before_finish, KINDS, r"unscale_\(\) came before finish_backward"),
    (only_no_sync, KINDS, "came before finish_backward"),
    (unfrozen, KINDS, "was frozen when .* was applied along dp"),
    (torchs_clip, SHARDED, "clip them by strategy.clip_grad_norm_"),
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
    model.blocks[0].requires_grad_(do is not unfrozen)
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
    strategy.finish_backward()
    optimizer.step()
    optimizer.step()  # twice with the same gradients is nobody's mistake


@pytest.mark.parametrize("cuts", [tensor, expert])
@on_ranks(SIZE)
def test_torchs_norm_where_nothing_but_the_model_is_cut(cuts):
    """Mutant: only strategies that share gradients are looked at."""
    model = models.llama(0, moe=None if cuts is tensor else MoEConfig(4, 2, 8))
    strategy = cuts.apply(model, Mesh(tp=SIZE).tp)
    optimizer = adamw(model.parameters())
    model(torch.arange(8)[None]).square().sum().backward()
    strategy.finish_backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with refuses("clip them by strategy.clip_grad_norm_"):
        optimizer.step()
    if cuts is tensor:
        with refuses("Muon may look at whole matrices", ValueError):
            torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]).step()
    with refuses("full_state_dict"):
        model.state_dict()


@on_ranks(SIZE)
def test_a_step_without_clipping_where_the_model_is_cut():
    """Mutant: what ddp itself writes, after the first look, is taken for a change by others."""
    mesh, model = Mesh(dp=SIZE, pp=1), Net()
    for p in model.parameters():
        mark(p, mesh.pp)  # as a pipeline does
    strategy = ddp.apply(model, mesh.dp, version="bucketed")
    optimizer = adamw(model.parameters())
    finished(model, strategy)
    optimizer.step()


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(SIZE)
def test_gradients_of_shards_may_be_changed_number_by_number(kind):
    """Mutant: a change of the user's own, which is right, has no way."""
    model = Net()
    strategy, optimizer = attach(model, kind)
    finished(model, strategy)
    for p in strategy.with_gradients():
        if p.grad is not None:
            p.grad.clamp_(-0.05, 0.05)
    strategy.note_reduced()
    optimizer.step()


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
    """Nobody else has it. Mutants: hooks of one that is gone; parameters that take theirs along to
    where it cannot go; what was loaded is trained by ddp already."""
    model, file = Net(), io.BytesIO()
    optimizer = adamw(model.parameters())
    attach(model, "ddp")
    gc.collect()
    loss_of(model).backward()
    with refuses(r"optimizer.step\(\) came before finish_backward"):
        optimizer.step()
    copied = pickle.loads(pickle.dumps(model.head.weight))
    assert copied.equal(model.head.weight) and [*copied.watched_by] == []
    torch.save(model.head.weight, file)
    file.seek(0)
    loaded = Net()
    loaded.head.weight = torch.load(file, weights_only=False)
    ddp.apply(loaded, Mesh(dp=SIZE).dp)


@on_ranks(SIZE)
def test_others_train_as_they_like_beside_a_shared_model():
    """Mutant: a frozen layer of one model, or its open backward, stops the optimizer of another."""
    shared, alone = Net(), Net()
    shared.head.requires_grad_(False)
    attach(shared, "ddp")
    shared.head.requires_grad_(True)
    loss_of(shared).backward()
    loss_of(alone).backward()
    clip_grad_norm_(alone.parameters(), 0.5)
    adamw(alone.parameters()).step()
    assert not torch.equal(alone.head.weight, Net().head.weight)


# ---------------------------------------------------------------------- what real models need
@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(SIZE)
def test_layers_that_are_frozen_for_a_while(kind):
    """As in adversarial training. Mutant: what is frozen is trained."""
    model, alone = Net(), Net()
    strategy, optimizer = attach(model, kind)
    single = adamw(alone.parameters())
    for step in range(4):
        for each in (model, alone):
            each.head.requires_grad_(step % 2 == 0)
            each.blocks[0].weight.requires_grad_(step % 2 == 1)
        loss_of(model, step).backward()
        loss_of_all(alone, step).backward()
        for each in (model, alone):
            each.requires_grad_(True)
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
    with refuses("of other parameters: head.bias .* is only here", ValueError):
        strategy.load_full_optimizer_state(optimizer, turned)
    del group["param_names"]  # as states were before: by their order
    group["params"].reverse()
    strategy.load_full_optimizer_state(optimizer, turned)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@on_ranks(SIZE)
def test_a_plan_clips_and_names_its_state(zero_stage):
    """Mutant: moments by number."""
    composed = compose.apply(
        models.llama(0).double(),
        Mesh(dp=SIZE),
        Plan(dp=SIZE, zero=zero_stage),
        lambda model, make: make_optimizer(model, lr=1.0, weight_decay=0.1, make=make),
    )
    composed.model(torch.arange(14).view(2, 7)).square().mean().backward()
    with refuses("came before finish_backward"):
        composed.clip_grad_norm_(0.1)
    composed.finish_backward()
    composed.optimizer.step()
    state = composed.full_optimizer_state()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in models.llama(0).named_parameters())
    state["param_groups"][0]["param_names"][0] = "another"
    with refuses("another", ValueError):
        composed.load_full_optimizer_state(state)


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
