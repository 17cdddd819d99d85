"""Compiled blocks compute the same under every strategy; the table of book/library.md."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel import (
    compose,
    context,
    ddp,
    expert,
    fsdp,
    local_sgd,
    offload,
    tensor,
    ulysses,
    zero,
)
from minipar.parallel.plan import Plan
from minipar.ranks.launch import Ranks
from minipar.train import compiled, trainer
from minipar.train.config import TrainConfig
from minipar.train.optim import make_optimizer
from minipar.train.step import train_step
from tests.on_ranks import on_ranks

COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
CONFIG = LlamaConfig(61, 32, 64, num_layers=2, num_heads=4, num_kv_heads=4)
PLANS = ["dp=2,zero=3", "tp=2,sequence_parallel,tp_overlap", "ep=2"]


def train(text: str, backend: str | None, num_layers: int = 2) -> tuple[list[float], int]:
    """Losses and norms of three steps, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    plan = Plan.parse(text)
    mesh = Mesh(**plan.mesh_sizes())
    mixed = MoEConfig(4, 2, 16, balance="batch") if plan.ep > 1 else None
    shape = replace(CONFIG, vocab_size=62, num_layers=num_layers, moe=mixed)
    model = Llama(shape, seed=mesh.rank).double()
    make = partial(make_optimizer, lr=0.01, weight_decay=0.1)
    strategy = compose.apply(model, mesh, plan, make)
    if backend:
        compiled.compile_blocks(model, backend)
    told = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step * 10 + mesh.dp.rank)
        tokens = torch.randint(61, (2, 16), generator=draw)
        batch = [strategy.shard((tokens, tokens.roll(-1, 1)))] * plan.microbatches
        result = train_step(model, [strategy], strategy.optimizer, batch, strategy.axis, max_norm=1)
        told += [result.loss.item(), result.grad_norm.item()]
    return told, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.exhaustive, COMPILER])]
)
def test_a_compiled_model_trains_as_before(text, backend):
    """Mutants: nothing is compiled; hooks that run inside of the graph, once."""
    with Ranks(2, timeout=300) as pool:  # while a rank compiles, others wait
        runs = pool.run(train, text, None), pool.run(train, text, backend)
    for (expected, none), (found, graphs) in zip(*runs, strict=True):
        assert found == pytest.approx(expected, rel=1e-10)
        assert none == 0 < graphs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", ["dp=2,tp=2,zero=1", "dp=2,zero=1"])
def test_all_blocks_share_their_graphs(text):
    """In 12 layers there are as many as in 2. Mutants: a graph that begins while its weights are on
    their way; the number of a layer in its graph."""
    with Ranks(Plan.parse(text).num_ranks, timeout=300) as pool:
        few, many = (pool.run(train, text, "aot_eager", num_layers) for num_layers in (2, 12))
        assert [graphs for _, graphs in many] == [graphs for _, graphs in few]
        for (found, _), (expected, _) in zip(many, pool.run(train, text, None, 12), strict=True):
            assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(plan="pp=2,microbatches=4,schedule=zb_h1"), "zb_h1 computes gradients of weights"),
        (dict(plan="dp=4", recompute="selective"), "looks at single operations; use none or full"),
    ],
)
def test_what_takes_blocks_apart_is_refused(changes, says):
    """Before any process starts. Mutant: gradients of weights that are never computed."""
    with pytest.raises(ValueError, match=says):
        TrainConfig(compile="aot_eager", **changes).check()
    plan = "pp=2,microbatches=4,schedule=interleaved_1f1b"
    TrainConfig(plan=plan, compile="aot_eager").check()


@pytest.mark.slow
def test_one_that_is_compiled_runs_as_minipar_train(text, tmp_path):
    """Mutant: a flag that does nothing."""
    torch._dynamo.reset()
    counters.clear()
    config = TrainConfig(
        data=str(text),
        mesh="dp=1",
        steps=1,
        batch_size=1,
        seq_len=16,
        sample_tokens=0,
        compile="aot_eager",
    )
    trainer.train(config, str(tmp_path))
    assert counters["stats"]["unique_graphs"] > 0


# ---------------------------------------------------------------------- the table of the book
APPLY = {
    "ddp": lambda model, dp, _: ddp.apply(model, dp),
    "local_sgd": partial(local_sgd.apply, method="diloco", every=2),
    "fsdp": lambda model, dp, _: fsdp.apply(model, dp),
    "tensor": lambda model, tp, _: tensor.apply(model, tp),
    "tensor, sequence": lambda model, tp, _: tensor.apply(model, tp, sequence=True),
    "tensor, overlap": lambda model, tp, _: tensor.apply(model, tp, sequence=True, overlap=True),
    "context": lambda model, cp, _: context.apply(model, cp),
    "ulysses": lambda model, cp, _: ulysses.apply(model, cp),
    "expert": lambda model, ep, _: expert.apply(model, ep),
}
FLAGS = {
    "ddp": dict(plan="dp=2"),
    "zero 1": dict(plan="dp=2,zero=1"),
    "zero 2": dict(plan="dp=2,zero=2"),
    "fsdp": dict(plan="dp=2,zero=3"),
    "fsdp on the host": dict(plan="dp=2,zero=3"),  # where the shards are is none of the blocks'
    "tensor": dict(plan="tp=2"),
    "tensor, sequence": dict(plan="tp=2,sequence_parallel"),
    "tensor, overlap": dict(plan="tp=2,sequence_parallel,tp_overlap"),
    "context": dict(plan="cp=2"),
    "ulysses": dict(plan="cp=2,context=ulysses"),
    "expert": dict(plan="ep=2", preset="tiny-moe"),
    "pipeline: 1f1b": dict(plan="pp=2,microbatches=4"),
    "pipeline: interleaved_1f1b": dict(plan="pp=2,microbatches=4,schedule=interleaved_1f1b"),
    "pipeline: zb_h1": dict(plan="pp=2,microbatches=4,schedule=zb_h1"),
}
TABLE = {
    name: cells
    for names, *cells in re.findall(
        r"^\| (`.+`) \| (yes|no).* \| (yes|refused|no flag) \|$",
        Path(compiled.__file__).parents[2].joinpath("book/library.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for name in re.findall("`(.+?)`", names)
}


def test_the_table_says_what_is_refused():
    """Mutant: a strategy that the command line lets through, or the table leaves out."""
    assert TABLE.keys() == {*FLAGS, *APPLY}
    assert {name for name, (works, _) in TABLE.items() if works == "yes"} == {
        *APPLY, "zero 1", "zero 2", "fsdp on the host"
    }  # fmt: skip
    for name, (_, told) in TABLE.items():
        config = TrainConfig(compile="aot_eager", **FLAGS.get(name, {}))
        if told == "refused":
            with pytest.raises(ValueError, match="--compile makes graphs of each block, and"):
                config.check()
        else:
            config.check()
            assert (told == "yes") == (name in FLAGS)


def trained(name: str, backend: str | None, of: str) -> dict[str, torch.Tensor]:
    """Weights after three steps along an axis of two ranks, compiled when `name` is applied."""
    torch._dynamo.reset()
    axis = Mesh(x=2).x
    shape = replace(CONFIG, moe=MoEConfig(4, 2, 16) if name == "expert" else None)
    run = model = Llama(shape, seed=axis.rank).double()

    def make() -> torch.optim.AdamW:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    if name.startswith("zero"):
        optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, axis, lr=0.01)
        strategy = zero.apply(model, axis, optimizer=optimizer, stage=int(name[-1]))
    else:
        strategy = APPLY[name.removesuffix(" on the host")](model, axis, optimizer := make())
        if name.startswith("fsdp"):
            optimizer = make()  # of the pieces
        if name == "fsdp on the host":
            offload.shards_on_host(strategy, HostCopy())
    if backend and of == "model":
        run = torch.compile(model, backend=backend)
    for layer in model.model.layers if backend and of == "blocks" else ():
        layer.compile(backend=backend)
    for step in range(3):
        seed = 10 * step + (0 if name.startswith("tensor") else axis.rank)
        tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(seed))
        run(tokens).square().mean().backward()
        strategy.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    return strategy.full_state_dict()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("of", ["model", pytest.param("blocks", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "tensor, sequence" else pytest.mark.exhaustive)
        for name, (works, _) in TABLE.items()
        if works == "yes"
    ],
)
@on_ranks(2)
def test_what_the_table_says_to_work_does(name, of):
    """Mutants: collectives that the compiler looks into; hooks that it leaves out."""
    counters.clear()
    expected, found = trained(name, None, of), trained(name, "aot_eager", of)
    assert counters["stats"]["unique_graphs"] > 0
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11)
