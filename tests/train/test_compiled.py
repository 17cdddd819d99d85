"""Compiled blocks compute the same under every strategy."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import ddp, fsdp, tensor
from minipar.train.config import TrainConfig
from tests.on_ranks import on_ranks
from tests.train.runs import assert_same_run

COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
CONFIG = LlamaConfig(61, 32, 64, num_layers=2, num_heads=4, num_kv_heads=4)
PLAIN = TrainConfig(
    steps=3, batch_size=4, seq_len=16, dtype="float64", lr=0.01, warmup_steps=1, sample_tokens=0
)
PLANS = ["dp=2,zero=1", "dp=2,zero=3", "tp=2,sequence_parallel,tp_overlap", "ep=2"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.exhaustive, COMPILER])]
)
def test_a_compiled_model_trains_as_before(run, plan, backend):
    """Validation makes graphs of its own. Mutants: hooks that run inside of a graph, once; the
    compiler sees what stands in for gradients."""
    how = dict(plan=plan, mesh="", preset="tiny-moe" if "ep" in plan else "tiny")
    assert_same_run(run(2, "compiled", compile=backend, **how), run(2, "plain", **how))


@pytest.mark.slow
def test_one_that_is_compiled_runs_as_minipar_train(run):
    """Mutant: a flag that does nothing."""
    torch._dynamo.reset()
    counters.clear()
    run(1, "one", steps=1, compile="aot_eager")
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
