"""Nothing looks at a value: every strategy trains on tensors that have none, on many ranks.

What only a GPU would punish fails here on any machine: on the meta device `.item()`, `.tolist()`,
`.cpu()` and `bool(tensor)` raise, and this file adds two more: a tensor of another device in a
collective, and one that is pickled.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipar.comm import calls
from minipar.comm.calls import Pending
from minipar.comm.hostcopy import to_host
from minipar.model.experts import Experts
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.parallel import fsdp, local_sgd, offload, zero
from minipar.parallel.base import optimizer_state, strategy
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.expert import DispatchPlan
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.plan import Plan
from minipar.sim import trace as sim_trace
from minipar.sim.trace import Actor, pretend
from minipar.sim.tracer import Tracer
from minipar.train import shards
from minipar.train.optim import make_optimizer
from minipar.train.step import train_step

CONFIG = LlamaConfig(256, 64, 128, num_layers=4, num_heads=8, num_kv_heads=8)
MIXTURE = replace(CONFIG, moe=MoEConfig(8, 2, 32, balance="microbatch"))

EIGHT_RANKS = [
    "dp=8",
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
    "dp=2,ep=4,dispatch=hierarchical,expert_nodes=2",
    "dp=2,ep=2,tp=2,zero=3,precision=bf16",
    "pp=2,ep=2,zero=2,schedule=dualpipe_v,dispatch=paired,microbatches=4",
]


class Strict(calls.Tap):
    """A tap that wants meta tensors, and them alone."""

    def begin(self, call):
        for tensor in tree_leaves(call.result):
            assert not isinstance(tensor, Tensor) or tensor.is_meta, (
                f"{call.verb} along {call.axis.name}"
            )


@pytest.fixture
def strict(monkeypatch):
    brought, usual = [], Tensor.__reduce_ex__

    def bring(tensor: Tensor) -> Tensor:
        brought.append(tensor)
        return to_host(tensor)

    def refuse_to_pickle(tensor: Tensor, protocol: int) -> object:
        is_here = tensor.device.type == "cpu" or any(tensor is other for other in brought)
        if is_here and tensor.ndim == 0:
            return usual(tensor, protocol)  # a number of the host, such as Adam's count of steps
        raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} is pickled")

    for module in (optimizer_state, shards):  # what they save comes to the host by it
        monkeypatch.setattr(module, "to_host", bring)
    monkeypatch.setattr(calls, "taps", [Strict()])
    monkeypatch.setattr(Tensor, "__reduce_ex__", refuse_to_pickle)


@pytest.fixture
def fused(monkeypatch):
    """AdamW in one kernel, as on a GPU, which reads on the device whether gradients overflowed."""
    which = "_get_fused_kernels_supported_devices"
    supported = [*getattr(torch_optimizer, which)(), "meta"]
    monkeypatch.setattr(torch_optimizer, which, supported.copy)

    def make_fused(model, make=torch.optim.AdamW, **options):
        with_kernel = lambda groups, **rest: make(groups, **rest | {"fused": True})  # noqa: E731
        return make_optimizer(model, make=with_kernel, **options)

    monkeypatch.setattr(sim_trace, "make_optimizer", make_fused)


EVERY = [*EIGHT_RANKS, *EXPERTS]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("text", EVERY)
def test_trains_and_is_saved_without_values(text, strict, fused):
    """Two whole steps, clipping and loss scaling, one of them recorded; then weights and optimizer
    out and in again."""
    plan = Plan.parse(text)
    config = MIXTURE if plan.ep > 1 else CONFIG
    with pretend(plan, rank=plan.num_ranks - 1) as mesh, Tracer():  # which remembers shapes: faster
        actor = Actor(config, plan, mesh, sequences=1, seq_len=64)
        for recorded in (nullcontext(), timeline.record(actor.model)):
            with recorded as spans:
                actor.step()
        assert {"backward", "optimizer", "comm"} <= {span.kind for span in spans}
        assert all(group["fused"] for group in actor.strategy.optimizer.param_groups)
        whole = actor.strategy.full_state_dict()
        shapes = {name: tuple(t.shape) for name, t in whole.items() if t is not None}
        assert shapes and shapes.items() <= actor.strategy.shapes.items()
        actor.strategy.load_full_state_dict(whole)
        if plan.pp == 1:  # other stages, which are not there, have the rest of it
            state = actor.strategy.full_optimizer_state()
            assert len(state["state"]) == len(list(actor.model.parameters()))
            actor.strategy.load_full_optimizer_state(state)
        # Of what other ranks have, and write, this one is not told here.
        weights, packed, entries = shards.parts(actor.strategy)
        assert len(entries) <= 2 * len(packed)
        if plan.zero == 3 and plan.tp == plan.ep == 1:
            assert weights and len(entries) == 2 * len(packed)


# ---------------------------------------------------------------------- what no plan names
def local(method: str, model: Llama, mesh) -> tuple[list[Strategy], torch.optim.Optimizer]:
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    options = {} if method == "delayed gradients" else {"every": 1}
    return [local_sgd.apply(model, mesh.dp, optimizer, method=method, **options)], optimizer


def offloaded(_: str, model: Llama, mesh) -> tuple[list[Strategy], torch.optim.Optimizer]:
    """Gradients and weights travel to a host that has no values either."""
    strategy = fsdp.apply(model, mesh.dp, average=False)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    offload.HostShards(strategy, optimizer)
    return [strategy], optimizer


def sharded(_: str, model: Llama, mesh) -> tuple[list[Strategy], torch.optim.Optimizer]:
    """Whose part of the state goes out and in."""
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh.dp)
    strategy = zero.apply(model, mesh.dp, optimizer=optimizer, average=False)
    strategy.load_full_optimizer_state(optimizer, strategy.full_optimizer_state(optimizer))
    return [strategy], optimizer


OTHERS = [
    *(pytest.param(local, method, id=method) for method in local_sgd.METHODS),
    pytest.param(offloaded, "", id="shards on the host"),
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


# ---------------------------------------------------------------------- on the way to the host
class Copies(TorchDispatchMode):
    """Notes what leaves the host for a GPU, and whether the host waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to = torch.device(kwargs.get("device") or "cpu")
        is_copy = function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"
        if is_copy and to.type == "cuda":
            self.seen.append(not kwargs.get("non_blocking", False))
        return function(*args, **kwargs)


def test_few_numbers_leave_for_a_gpu_unwaited(monkeypatch):
    """From pinned memory, by promise: the host would wait until all else on the stream is done.

    Mutants: lengths of what arrived, ends of experts' rows, who used what: `.to(device)`.
    """
    pinned = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda own: pinned.append(own) or own)
    table = torch.full((2 * 4,), 3)
    plan = DispatchPlan(torch.arange(24), table, SimpleNamespace(rank=0, size=2))
    sent = {}
    # Autograd would call a driver that is not there.
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda", 0):
            moe = SimpleNamespace(experts=Experts(2, 64, 32), how="grouped")
            for name, p in list(moe.experts.named_parameters()):
                setattr(moe.experts, name, nn.Parameter(torch.empty_like(p, dtype=torch.bfloat16)))
            rows = torch.empty(12, 64, dtype=torch.bfloat16)
        monkeypatch.setattr(strategy, "all_reduce", lambda told, *_, **__: Pending(None, told))
        data = SimpleNamespace(device=rows.device, axis=None)
        for name, send in {
            "experts": lambda: plan.compute(moe, rows),
            "used": lambda: Strategy.tell_used(data, [True, False]),
        }.items():
            with Copies() as copies:
                send()
            sent[name] = copies.seen
        with Copies() as copies:
            torch.tensor([1, 2]).to(rows.device)
    assert sent == {"experts": [False, False], "used": [False]}
    assert len(pinned) == 3 and copies.seen == [True]
