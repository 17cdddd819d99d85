"""Compiled blocks compute the same under every strategy."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel import compose, ddp, fsdp, tensor
from minipar.parallel.plan import Plan
from minipar.ranks.launch import Ranks
from minipar.train import compiled, trainer
from minipar.train.config import TrainConfig
from minipar.train.optim import make_optimizer
from minipar.train.step import train_step
from tests.on_ranks import on_ranks

COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
CONFIG = LlamaConfig(61, 32, 64, num_layers=2, num_heads=4, num_kv_heads=4)
PLANS = ["dp=2,zero=1", "dp=2,zero=3", "tp=2,sequence_parallel,tp_overlap", "ep=2"]


def train(text: str, backend: str | None) -> tuple[list[float], int]:
    """Losses and norms of three steps, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    plan = Plan.parse(text)
    mesh = Mesh(**plan.mesh_sizes())
    mixed = MoEConfig(4, 2, 16, balance="batch") if plan.ep > 1 else None
    shape = replace(CONFIG, vocab_size=62, moe=mixed)
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


# ---------------------------------------------------------------------- torch's own call
APPLY = {
    "ddp": lambda model, dp: ddp.apply(model, dp),
    "fsdp": lambda model, dp: fsdp.apply(model, dp),
    "tensor, sequence": lambda model, tp: tensor.apply(model, tp, sequence=True),
}


def trained(name: str, backend: str | None) -> dict[str, torch.Tensor]:
    """Weights after three steps along an axis of two ranks, compiled when `name` is applied."""
    torch._dynamo.reset()
    axis = Mesh(x=2).x
    model = Llama(CONFIG, seed=axis.rank).double()
    strategy = APPLY[name](model, axis)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = torch.compile(model, backend=backend) if backend else model
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
@pytest.mark.parametrize("name", APPLY)
@on_ranks(2)
def test_what_the_table_says_to_work_does(name):
    """The table of book/library.md, of which these are the hardest rows.

    Mutants: collectives that the compiler looks into; hooks that it leaves out."""
    counters.clear()
    expected, found = trained(name, None), trained(name, "aot_eager")
    assert counters["stats"]["unique_graphs"] > 0
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11)
