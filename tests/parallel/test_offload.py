"""Offloading by itself: where the bytes are, when they travel, and what users may do meanwhile."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Mesh
from minipar.lab.memory import MemoryLedger
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.observe import timeline
from minipar.parallel import ddp, fsdp, offload
from minipar.sim.memory import model_state

pytestmark = pytest.mark.trains

TOKENS = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(0))


def llama(num_layers: int = 4) -> Llama:
    return Llama(LlamaConfig(61, 32, 64, num_layers, 4, 2))


def step(model, optimizer, *strategies):
    optimizer.zero_grad()
    loss = token_loss(model(TOKENS), TOKENS)
    loss.backward()
    for strategy in strategies:
        strategy.finish_backward()
    optimizer.step()
    return loss.item()


def sent_by(recorded: timeline.Timeline) -> dict[str, int]:
    return {
        name: sum(s.num_bytes for s in recorded.select(name=name))
        for name in ("to_host", "to_device")
    }


# ---------------------------------------------------------------------- around the step
OPTIMIZERS = {
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}


def train(make, on_host: bool) -> tuple[list[float], dict, dict]:
    """Losses, weights and optimizer state of a small run; weights are written in between."""
    model = llama(2)
    optimizer = make(model.parameters())
    if on_host:
        offload.step_on_host(optimizer, HostCopy())
    losses = []
    for _ in range(3):
        losses.append(step(model, optimizer))
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(0.9)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, weights, optimizer.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_computes_the_same_to_the_bit(name):
    """Mutants: weights that do not come back; state that is lost; a host that overwrites weights
    which were written, as by loading, after the step before."""
    ours, theirs = (train(OPTIMIZERS[name], on_host) for on_host in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_around_the_step_gradients_stay_on_the_device():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    offload.step_on_host(optimizer, HostCopy())
    num_bytes = sum(p.nbytes for p in model.parameters())
    with MemoryLedger(model) as ledger:
        for _ in range(2):
            step(model, optimizer)
    history = ledger.history()
    assert history.peak_of("parameters") == num_bytes
    assert history.peak_of("gradients") == pytest.approx(num_bytes, rel=0.06)  # and one arriving
    assert history.peak_of("optimizer") == 0
    assert history.peak_of("parameters", host=True) == num_bytes
    assert history.peak_of("optimizer", host=True) == pytest.approx(2 * num_bytes, rel=0.01)


def test_pcie_carries_gradients_down_and_weights_up():
    """2 P bytes a step. Mutant: everything is copied, frozen weights included."""
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    offload.step_on_host(optimizer, HostCopy())
    num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    step(model, optimizer)
    with timeline.record() as recorded:
        step(model, optimizer)
    assert sent_by(recorded) == {"to_host": num_bytes, "to_device": num_bytes}


def test_a_group_that_is_added_later_steps_on_the_host_too():
    """Mutant: a KeyError at the next step."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    offload.step_on_host(optimizer, HostCopy())
    optimizer.add_param_group({"params": list(second.parameters())})
    before = second.bias.detach().clone()
    second(first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert torch.allclose(second.bias, before - 0.1)


# ---------------------------------------------------------------------- shards of fsdp
def _step_of_fsdp(num_layers: int) -> tuple[dict, dict, dict]:
    """What a rank holds over two steps: bytes at most, of the host, and of the closed form."""
    mesh = Mesh(dp=2)
    model = llama(num_layers)
    num_parameters = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    strategy = fsdp.apply(model, mesh.dp)
    offload.shards_on_host(strategy, HostCopy())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # to learn the order: the first step gathers more
        step(model, optimizer, strategy)
    optimizer.zero_grad()
    with MemoryLedger(model) as ledger, timeline.record() as recorded:
        for _ in range(2):
            step(model, optimizer, strategy)
            optimizer.zero_grad()
    history = ledger.history()
    names = ("parameters", "gradients", "optimizer", "gathered")
    device = {name: history.peak_of(name) for name in names}
    host = {name: history.peak_of(name, host=True) for name in names}
    formula = model_state(
        num_parameters, 2, "zero3", offload=["parameters", "gradients", "optimizer"]
    ).host
    root = num_parameters - sum(blocks)
    sizes = {"root": 4 * root, "block": 4 * max(blocks), "P": 4 * num_parameters}
    return device, host, formula | sizes | sent_by(recorded)


@pytest.mark.slow
def test_with_shards_on_the_host_the_device_holds_only_blocks_in_use(ranks):
    """Mutant: a shard that stays on the device; copies that are prefetched and thrown away."""
    for device, host, formula in ranks(2).run(_step_of_fsdp, 8):
        assert device["parameters"] == device["optimizer"] == 0
        for part in ("parameters", "gradients", "optimizer"):
            assert host[part] == pytest.approx(formula[part], rel=0.05)
        # The root, two blocks, and four shards (halves) on their way from the host to a gather.
        assert device["gathered"] <= formula["root"] + (2 + 4 / 2) * formula["block"]
        assert device["gathered"] < 0.6 * formula["P"]
        assert formula["to_host"] / 2 == pytest.approx(formula["P"] / 2, rel=0.01)
        # Down to the root and the last block, every shard comes for forward and for backward.
        twice = formula["P"] - (formula["root"] + formula["block"]) / 2
        assert formula["to_device"] / 2 == pytest.approx(twice, rel=0.01)


def test_weights_loaded_into_shards_on_the_host_are_used():
    """Mutant: a shard that was brought ahead is of before the load."""
    model, other = llama(2), llama(2)
    strategy = fsdp.apply(model, Mesh().dp)
    offload.shards_on_host(strategy, HostCopy())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, strategy)
    with torch.no_grad():
        model(TOKENS)
        for p in other.parameters():
            p.mul_(1.5)
    strategy.load_full_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), other(TOKENS))


class Pinned(HostCopy):
    """Knows the memory that it gave out, which would be pinned on a GPU, and who waits for what."""

    def __init__(self):
        super().__init__()
        self.given, self.sources, self.waited = [], [], []

    def empty_like(self, tensor):
        self.given.append(super().empty_like(tensor))
        return self.given[-1]

    def to_device(self, pairs):
        pairs = list(pairs)
        self.sources += [source for source, _ in pairs]
        return super().to_device(pairs)

    def to_host(self, tensors):
        copy = super().to_host(tensors)
        wait = copy.wait
        copy.wait = lambda **options: self.waited.append(copy) or wait(**options)
        return copy


def test_what_a_gpu_takes_is_pinned_though_it_computes_in_half_precision():
    """And no gradient is waited for in backward. Mutants: casts in memory like any other."""
    model, copies = llama(2), Pinned()
    strategy = fsdp.apply(model, Mesh().dp, compute_dtype=torch.bfloat16)
    offload.shards_on_host(strategy, copies)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        copies.waited.clear()
        token_loss(model(TOKENS), TOKENS).backward()
        assert len(copies.waited) <= 2  # of the tied table, which is added up
        strategy.finish_backward()
        assert len(copies.waited) > 2
        optimizer.step()
        optimizer.zero_grad()
    pinned = {tensor.untyped_storage().data_ptr() for tensor in copies.given}
    assert copies.sources
    for source in copies.sources:
        assert source.dtype == torch.bfloat16
        assert source.untyped_storage().data_ptr() in pinned


def test_shards_may_be_collected_in_the_middle_of_a_step():
    """Mutant: hooks that go with them, while torch goes through its hooks."""
    kept: list[tuple] = []

    def forget(*_) -> None:
        del kept[1:]
        gc.collect()

    handle = torch_optimizer.register_optimizer_step_pre_hook(forget)  # others come after it
    try:
        for _ in range(2):
            model = llama(1)
            strategy = fsdp.apply(model, Mesh().dp)
            kept.append((model, strategy, offload.shards_on_host(strategy, HostCopy())))
        gone = weakref.ref(kept[1][2])
        model, strategy, _ = kept[0]
        step(model, torch.optim.AdamW(model.parameters()), strategy)
        assert gone() is None
    finally:
        handle.remove()


def test_a_strategy_without_shards_is_refused():
    with pytest.raises(ValueError, match="has no flat shards; use fsdp.apply"):
        offload.shards_on_host(ddp.apply(llama(1), Mesh().dp))
