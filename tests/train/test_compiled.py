"""Blocks that are compiled do what they did before, under every strategy."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from minipar.comm.launch import Ranks
from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import compose
from minipar.parallel.plan import Plan
from minipar.train import compiled, trainer
from minipar.train.config import TrainConfig
from minipar.train.optim import make_optimizer
from minipar.train.step import train_step

CONFIG = LlamaConfig(61, 32, 64, num_layers=2, num_heads=4, num_kv_heads=4)
PLANS = [
    "dp=2,zero=3",
    *(
        pytest.param(text, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])
        for text in (
            "dp=2",
            "dp=2,zero=1",
            "dp=2,zero=2",
            "dp=2,zero=3,checkpointing=full",
            "pp=2,microbatches=2",
        )
    ),
]


def train(text: str, backend: str | None) -> tuple[list[float], int]:
    """Losses and norms of three steps, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    plan = Plan.parse(text)
    mesh = Mesh(**plan.mesh_sizes())
    model = Llama(CONFIG, seed=mesh.rank).double()
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
def test_a_compiled_model_trains_as_before(text):
    """Mutants: nothing is compiled; hooks that run inside of the graph, once."""
    with Ranks(2, timeout=300) as pool:  # while a rank compiles, others wait
        runs = pool.run(train, text, None), pool.run(train, text, "aot_eager")
    for (expected, none), (found, graphs) in zip(*runs, strict=True):
        assert found == pytest.approx(expected, rel=1e-10)
        assert none == 0 < graphs


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(plan="pp=2,microbatches=4,schedule=zb_h1"), "zb_h1 computes gradients of weights"),
        (dict(plan="tp=2"), "ranks of tp talk inside of blocks; use tp=1"),
        (dict(preset="tiny-moe"), "experts look at how many tokens"),
        (dict(recompute="selective"), "looks at single operations; use none or full"),
    ],
)
def test_what_reaches_into_blocks_is_refused(changes, says):
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
        eval_batches=1,
        sample_tokens=0,
        compile="aot_eager",
    )
    trainer.train(config, str(tmp_path))
    assert counters["stats"]["unique_graphs"] > 0
