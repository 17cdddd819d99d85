"""Nothing looks at a value: every strategy trains on tensors that have none, on many ranks.

What only a GPU would punish fails here on any machine: on the meta device `.item()`, `.tolist()`,
`.cpu()` and `bool(tensor)` raise, and this file adds two more: a tensor of another device in a
collective, and one that is pickled.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from minipar.comm import calls, collectives
from minipar.comm.values import look
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel import ddp, fsdp, local_sgd, offload, zero
from minipar.parallel.compression.feedback import COMPRESSORS
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.plan import Plan, meshes
from minipar.parallel.strategy import Strategy
from minipar.sim.trace import Actor, pretend, trace
from minipar.sim.tracer import Tracer
from minipar.train import shards
from minipar.train.optim import make_optimizer
from minipar.train.report import expert_slots
from minipar.train.step import train_step

CONFIG = LlamaConfig(256, 64, 128, num_layers=4, num_heads=8, num_kv_heads=8)
MIXTURE = replace(CONFIG, moe=MoEConfig(8, 2, 32, balance="microbatch"))

EIGHT_RANKS = [
    "dp=8",
    *(f"dp=8,compression={name}" for name in COMPRESSORS),
    *(f"dp=8,zero={stage},microbatches=2" for stage in (1, 2, 3)),
    "dp=8,zero=3,precision=bf16,checkpointing=full",
    "dp=8,zero=2,precision=fp16",
    *(f"dp=8,zero={stage},microbatches=2,precision=bf16" for stage in (0, 1, 2)),
    "dp=4,pp=2,microbatches=4,schedule=dualpipe_v,precision=bf16",
    "dp=2,tp=4,sequence_parallel,precision=autocast-bf16",
    "tp=8",
    "tp=8,sequence_parallel,precision=bf16,checkpointing=selective",
    "tp=8,sequence_parallel,tp_overlap,precision=fp16",
    "cp=8",
    "cp=8,context=gather,precision=bf16",
    "cp=8,context=ulysses,zero=3",
    *(f"dp=4,pp=2,microbatches=4,schedule={name}" for name in SCHEDULES),
    "dp=2,pp=2,tp=2,zero=3,microbatches=2,precision=bf16",
    "dp=2,cp=2,tp=2,zero=1,sequence_parallel",
]
EXPERTS = [
    *(f"dp=2,ep=4,dispatch={how}" for how in ("all_to_all", "gather", "overlapped", "halves")),
    "dp=2,ep=2,tp=2,zero=3,precision=bf16",
    "pp=2,ep=2,zero=2,schedule=dualpipe_v,dispatch=paired,microbatches=4",
]


def legal_plans(num_ranks: int, count: int) -> list[str]:
    """Plans out of all that `Plan.problem` lets pass, always the same ones."""
    draw, found = random.Random(0), []
    sizes = [mesh for mesh in meshes(num_ranks) if mesh["cp"] < 8]  # long rings take long
    while len(found) < count:
        plan = Plan(
            **draw.choice(sizes),
            zero=draw.randrange(4),
            sequence_parallel=draw.random() < 0.5,
            tp_overlap=draw.random() < 0.3,
            context=draw.choice(["ring", "gather", "ulysses"]),
            microbatches=draw.choice([1, 2, 4]),
            precision=draw.choice(["float32", "bf16", "fp16"]),
            checkpointing=draw.choice(["none", "selective", "full"]),
        )
        if plan.problem(CONFIG) is None and str(plan) not in found:
            found.append(str(plan))
    return found


def slow(text: str):
    return pytest.param(text, marks=pytest.mark.slow)


class Strict:
    """An observer that wants meta tensors, and them alone."""

    def launched(self, number, verb, axis, num_bytes, peers, result):
        for tensor in tree_leaves(result):
            assert not isinstance(tensor, Tensor) or tensor.is_meta, f"{verb} along {axis.name}"

    def waited(self, number):
        pass


def refuse_to_pickle(tensor, protocol, usual=Tensor.__reduce_ex__):
    if tensor.device.type == "cpu" and tensor.ndim == 0:
        return usual(tensor, protocol)  # a number of the host, such as Adam's count of steps
    raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} is pickled")


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(calls, "observers", [Strict()])
    monkeypatch.setattr(Tensor, "__reduce_ex__", refuse_to_pickle)


EVERY = [*EIGHT_RANKS, *EXPERTS, *legal_plans(64, 12)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("text", [slow(t) if i % 4 else t for i, t in enumerate(EVERY)])
def test_trains_and_is_saved_without_values(text, strict):
    """Two whole steps, clipping and loss scaling; then weights and optimizer out and in again."""
    plan = Plan.parse(text)
    config = MIXTURE if plan.ep > 1 else CONFIG
    with pretend(plan, rank=plan.num_ranks - 1) as mesh, Tracer():  # which remembers shapes: faster
        actor = Actor(config, plan, mesh, sequences=1, seq_len=64)
        for _ in range(2):
            actor.step()
            expert_slots(actor.model, mesh, torch.device("meta"))  # for the metrics
        whole = actor.strategy.full_state_dict()
        shapes = {name: tuple(t.shape) for name, t in whole.items() if t is not None}
        assert shapes and shapes.items() <= actor.strategy.shapes.items()
        actor.strategy.load_full_state_dict(whole)
        if plan.pp == 1:  # other stages, which are not there, have the rest of it
            state = actor.strategy.full_optimizer_state()
            # Of ZeRO 1 and 2, a rank has no state of pieces without numbers: others would tell.
            if plan.zero in (0, 3):
                assert len(state["state"]) == len(list(actor.model.parameters()))
            assert state["state"]
            actor.strategy.load_full_optimizer_state(state)
        # Of what other ranks have, and write, this one is not told here.
        weights, packed, entries = shards.parts(actor.strategy)
        assert len(entries) <= 2 * len(packed["state"])
        if plan.zero == 3 and plan.tp == plan.ep == 1:
            assert weights and len(entries) == 2 * len(packed["state"])


# ---------------------------------------------------------------------- what no plan names
def local(method: str, model: Llama, mesh) -> tuple[list[Strategy], torch.optim.Optimizer]:
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    options = {} if method == "delayed gradients" else {"every": 1}
    if method == "diloco streaming":
        options = {"every": 2, "fragments": 2}
    return [local_sgd.apply(model, mesh.dp, optimizer, method=method, **options)], optimizer


def offloaded(how: str, model: Llama, mesh) -> tuple[list[Strategy], torch.optim.Optimizer]:
    """Gradients and weights travel to a host that has no values either."""
    if how == "shards":
        strategy = fsdp.apply(model, mesh.dp, average=False)
        offload.shards_on_host(strategy)
    else:
        inside = ddp.apply(model, mesh.dp, average=False) if how == "offload after ddp" else None
        strategy = offload.apply(model, mesh.dp if inside else mesh.tp, inside=inside)
    return [strategy], make_optimizer(model, lr=0.1, weight_decay=0.1)


def sharded(_: str, model: Llama, mesh) -> tuple[list[Strategy], torch.optim.Optimizer]:
    """Whose part of the state goes out and in."""
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh.dp)
    strategy = zero.apply(model, mesh.dp, optimizer=optimizer, average=False)
    optimizer.load_state_dict(optimizer.state_dict(sharded=True))
    return [strategy], optimizer


OTHERS = [
    *(pytest.param(local, method, id=method) for method in local_sgd.METHODS),
    *(
        pytest.param(offloaded, how, id=f"offload {how}")
        for how in ("alone", "after ddp", "shards")
    ),
    pytest.param(sharded, "", id="sharded optimizer"),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("attach, how", OTHERS)
def test_trains_without_values_beside_any_plan(attach, how, strict):
    with pretend(Plan(dp=8)) as mesh:
        with torch.device("meta"):
            model = Llama(CONFIG)
        strategies, optimizer = attach(how, model, mesh)
        tokens = torch.empty(1, 64, dtype=torch.int64, device="meta")
        for _ in range(2):
            result = train_step(
                model, strategies, optimizer, [(tokens, tokens)], mesh.dp, max_norm=1.0
            )
        assert result.loss.is_meta and result.grad_norm.is_meta
        if attach is sharded:
            optimizer.load_state_dict(optimizer.state_dict(sharded=True))


def test_the_harness_sees_what_it_is_for(strict):
    """Each way to look at a value, or to move one, fails."""
    tensor = torch.empty(2, device="meta")
    for see in (Tensor.tolist, Tensor.cpu, bool, lambda t: t[0].item()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            see(tensor if see is not bool else tensor[0])
    assert look(tensor, on_meta="nothing") == "nothing"
    with pretend(Plan(dp=8)) as mesh:
        with pytest.raises(AssertionError, match="pickled"):
            collectives.all_gather_object(tensor, mesh.dp)
        with pytest.raises(AssertionError, match="all_reduce along dp"):
            collectives.all_reduce(torch.zeros(2), mesh.dp)


def test_a_rank_of_a_group_plays_no_other():
    """The group that there is would be gone. Mutant: no question asked."""
    with pretend(Plan(dp=2)), pytest.raises(ValueError, match="process of its own"):
        trace(CONFIG, Plan(dp=4), seq_len=64)
    assert not dist.is_initialized()
