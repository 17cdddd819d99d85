"""Offloading by itself: where the bytes are, when they travel, and what users may do meanwhile."""

import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.memory import MemoryLedger
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.observe import timeline
from minipar.parallel import ddp, fsdp, offload
from minipar.sim.memory import Recipe, model_state
from minipar.train.optim import make_optimizer

pytestmark = pytest.mark.trains

TOKENS = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(0))


def llama(num_layers: int = 4) -> Llama:
    return Llama(LlamaConfig(61, 32, 64, num_layers, 4, 2))


def offloaded(model, pcie=None, **options):
    return offload.apply(model, Mesh().dp, copies=HostCopy(pcie=pcie), **options)


def step(model, optimizer, *strategies):
    optimizer.zero_grad()
    loss = token_loss(model(TOKENS), TOKENS)
    loss.backward()
    for strategy in strategies:
        strategy.finish_backward()
    optimizer.step()
    return loss.item()


def train(how: str, optimizer_class, steps: int = 3) -> tuple[list[float], dict, dict]:
    """Losses, weights and optimizer state of a small run."""
    model = llama(2)
    strategies = [offloaded(model)] if how == "apply" else []
    optimizer = optimizer_class(model.parameters())
    if how == "step_on_host":
        offload.step_on_host(optimizer, HostCopy())
    losses = [step(model, optimizer, *strategies) for _ in range(steps)]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, weights, optimizer.state_dict()


# ---------------------------------------------------------------------- parity
OPTIMIZERS = {
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("how", ["apply", "step_on_host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_computes_the_same_to_the_bit(how, name):
    """Mutant: weights that do not come back (the second loss differs), state that is lost."""
    losses, weights, state = train(how, OPTIMIZERS[name])
    expected_losses, expected_weights, expected_state = train("plain", OPTIMIZERS[name])
    assert losses == expected_losses
    assert all(torch.equal(weights[n], w) for n, w in expected_weights.items())
    assert state["param_groups"] == expected_state["param_groups"]
    for i, values in expected_state["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][i][key]), torch.as_tensor(value))


@pytest.mark.parametrize("lane", ["to_host", "to_device"])
def test_without_its_copies_parity_is_violated(lane, monkeypatch):
    """The mutant: copies are announced and waited for, but carry nothing."""
    expected, _, _ = train("plain", OPTIMIZERS["AdamW"])
    empty = HostCopy()

    def nothing(self, pairs):
        return real(self, [(p[0][:0], p[1][:0]) for p in pairs])

    def zeros(self, tensors):
        return real(self, [torch.zeros_like(t) for t in tensors])

    real = getattr(HostCopy, lane)
    model = llama(2)
    strategy = offload.apply(model, Mesh().dp, copies=empty)
    monkeypatch.setattr(HostCopy, lane, nothing if lane == "to_device" else zeros)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    losses = [step(model, optimizer, strategy) for _ in range(3)]
    assert losses[0] == expected[0] or lane == "to_device"
    assert losses[2] != expected[2]


def test_computing_in_half_precision_on_master_weights_of_the_host():
    """Equal to a loop that casts by hand; a step of 1e-4 is lost in bfloat16 without a master."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    masters = [p.detach().clone() for p in layers.parameters()]
    strategy = offloaded(layers, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-4)
    inputs = torch.randn(32, 8, dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        layers(inputs).square().mean().backward()
        strategy.finish_backward()
        optimizer.step()

        halves = [m.bfloat16().requires_grad_() for m in masters]
        hidden = torch.tanh(nn.functional.linear(inputs, *halves[:2]))
        loss = nn.functional.linear(hidden, *halves[2:]).square().mean()
        grads = torch.autograd.grad(loss, halves)
        masters = [m - 1e-4 * g.float() for m, g in zip(masters, grads, strict=True)]
        for p, master in zip(layers.parameters(), masters, strict=True):
            assert p.dtype == torch.float32
            assert torch.allclose(p, master, rtol=1e-6, atol=0)


def test_a_module_that_reads_the_weights_of_its_children():
    """Attention of torch never calls its `out_proj`: a hook there would wait for nothing."""
    torch.manual_seed(0)
    build = partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
    torch.manual_seed(0)
    ours = nn.Sequential(build(), build())
    torch.manual_seed(0)
    theirs = nn.Sequential(build(), build())
    strategy = offloaded(ours, pcie=Link("slow PCIe", 0.001, 2e6))  # weights of a layer take 5 ms
    x = torch.randn(2, 5, 16)
    for model, strategies in ((ours, [strategy]), (theirs, [])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            for s in strategies:
                s.finish_backward()
            optimizer.step()
    state = ours.state_dict()
    assert all(torch.equal(state[n], w) for n, w in theirs.state_dict().items())


# ---------------------------------------------------------------------- bytes
@pytest.mark.slow
def test_the_device_holds_what_the_formula_says():
    """Mutant: gradients that stay, state on the device, a fourth bucket."""
    model = llama(8)
    num_parameters = sum(p.numel() for p in model.parameters())
    strategy = offloaded(model, pcie=Link("slow PCIe", 0.0, 20e6), bucket_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryLedger(model) as ledger:
        for _ in range(3):
            step(model, optimizer, strategy)
    history = ledger.history()
    recipe = Recipe("fp32 Adam, which on the host has a copy of the weights", 4, 4, 12)
    formula = model_state(num_parameters, recipe=recipe, offload=["gradients", "optimizer"])
    assert history.peak_of("parameters") == pytest.approx(formula.device["parameters"], rel=0.01)
    assert history.peak_of("optimizer") == 0
    largest = max(p.nbytes for p in model.parameters())
    assert 0 < history.peak_of("gradients") <= 3 * (20_000 + largest) < num_parameters * 4 / 2
    kept = history.peak_of("parameters", "optimizer", host=True)
    assert kept == pytest.approx(formula.host["optimizer"], rel=0.01)
    assert history.peak_of("gradients", host=True) == formula.host["gradients"]


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
    assert history.peak_of("optimizer", host=True) == pytest.approx(2 * num_bytes, rel=0.01)


@pytest.mark.parametrize("how", ["apply", "step_on_host"])
def test_pcie_carries_gradients_down_and_weights_up(how):
    """2 P bytes a step. Mutant: everything is copied, frozen weights included."""
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    strategies = [offloaded(model)] if how == "apply" else []
    if how == "step_on_host":
        offload.step_on_host(optimizer, HostCopy())
    num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)

    def whole_step():
        step(model, optimizer, *strategies)
        optimizer.zero_grad()
        model(TOKENS)  # all weights have arrived

    whole_step()
    with timeline.record() as recorded:
        whole_step()
    sent = {
        name: sum(s.num_bytes for s in recorded.select(name=name))
        for name in ("to_host", "to_device")
    }
    assert sent == {"to_host": num_bytes, "to_device": num_bytes}


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
    sent = {
        name: sum(s.num_bytes for s in recorded.select(name=name)) / 2
        for name in ("to_host", "to_device")
    }
    return device, host, formula | sizes | sent


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
        assert formula["to_host"] == pytest.approx(formula["P"] / 2, rel=0.01)
        # Down to the root and the last block, every shard comes for forward and for backward.
        twice = formula["P"] - (formula["root"] + formula["block"]) / 2
        assert formula["to_device"] == pytest.approx(twice, rel=0.01)


def _weights_loaded_into_shards() -> bool:
    """Whether what was prefetched for the old weights is thrown away."""
    mesh = Mesh(dp=2)
    model, other = llama(2), llama(2)
    strategy = fsdp.apply(model, mesh.dp)
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
        return torch.equal(model(TOKENS), other(TOKENS))


@pytest.mark.slow
def test_weights_loaded_into_shards_on_the_host_are_used(ranks):
    assert ranks(2).run(_weights_loaded_into_shards) == [True, True]


# ---------------------------------------------------------------------- overlap
@pytest.mark.timed
@pytest.mark.slow
def test_copies_are_hidden_behind_backward_and_forward():
    """Mutant: `wait` right after each copy, which hides nothing. Measured: 0.7 hidden, and 0.2."""
    hidden = {}
    for how in ("apply", "step_on_host"):
        model = Llama(LlamaConfig(256, 96, 256, 6, 4, 2))
        strategies = [offloaded(model, pcie=link.parse("pcie5*300"))] if how == "apply" else []
        optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
        if how == "step_on_host":
            offload.step_on_host(optimizer, HostCopy(pcie=link.parse("pcie5*300")))
        tokens = torch.randint(256, (4, 96))
        with timeline.record(model) as recorded:
            for _ in range(4):
                optimizer.zero_grad()
                token_loss(model(tokens), tokens).backward()
                for strategy in strategies:
                    strategy.finish_backward()
                optimizer.step()
        hidden[how] = recorded.hidden_fraction
    assert hidden["apply"] > hidden["step_on_host"] + 0.15
    assert hidden["apply"] > 0.4


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


@pytest.mark.parametrize("how", ["apply", "shards_on_host"])
def test_what_a_gpu_takes_is_pinned_though_it_computes_in_half_precision(how):
    """And no gradient is waited for in backward. Mutants: casts in memory like any other."""
    model, copies = llama(2), Pinned()
    if how == "apply":
        options = {"copies": copies, "compute_dtype": torch.bfloat16, "bucket_mb": 100}
        strategy = offload.apply(model, Mesh().dp, **options)
    else:
        strategy = fsdp.apply(model, Mesh().dp, compute_dtype=torch.bfloat16)
        offload.shards_on_host(strategy, copies)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        copies.waited.clear()
        token_loss(model(TOKENS), TOKENS).backward()
        assert not copies.waited
        strategy.finish_backward()
        assert copies.waited
        optimizer.step()
        if how == "apply":
            model(TOKENS)  # gradients of the host come along
            assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        optimizer.zero_grad()
    pinned = {tensor.untyped_storage().data_ptr() for tensor in copies.given}
    assert copies.sources
    for source in copies.sources:
        assert source.dtype == torch.bfloat16
        assert source.untyped_storage().data_ptr() in pinned


def test_gradients_leave_before_backward_is_over():
    model = llama()
    strategy = offloaded(model, bucket_mb=0.01)
    left = []
    handle = model.model.embed_tokens.weight.register_post_accumulate_grad_hook(
        lambda p: left.append(sum(q.grad is None for q in model.parameters()))
    )
    token_loss(model(TOKENS), TOKENS).backward()
    handle.remove()
    assert (
        left and left[0] == sum(1 for _ in model.parameters()) - 1
    )  # it may still change this one
    strategy.finish_backward()
    assert all(p.grad is not None for p in model.parameters())


# ---------------------------------------------------------------------- what users do meanwhile
def test_weights_loaded_between_steps_are_used():
    """Mutant: a device that keeps what it had; fused optimizers do not count versions."""
    model, other = llama(2), llama(2)
    strategy = offloaded(model)
    step(model, torch.optim.AdamW(model.parameters(), fused=True), strategy)
    nn.init.normal_(other.model.embed_tokens.weight, std=0.1)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(TOKENS), other(TOKENS))
    with torch.no_grad():  # on the device now, as a forward that may be followed by a backward ran
        model.model.embed_tokens.weight.mul_(2), other.model.embed_tokens.weight.mul_(2)
    assert torch.equal(
        strategy.full_state_dict()["model.embed_tokens.weight"], other.model.embed_tokens.weight
    )
    assert torch.equal(model(TOKENS), other(TOKENS))


def test_gradients_accumulate_over_backward_passes_without_zeroing():
    """On the host between them; and in `no_sync`, on the device."""
    model, plain = llama(2), llama(2)
    strategy = offloaded(model)
    for _ in range(2):
        token_loss(model(TOKENS), TOKENS).backward()
        strategy.finish_backward()
        token_loss(plain(TOKENS), TOKENS).backward()
    with strategy.no_sync():
        token_loss(model(TOKENS), TOKENS).backward()
    assert not strategy.arrived and not strategy.sent
    token_loss(model(TOKENS), TOKENS).backward()
    strategy.finish_backward()
    for _ in range(2):
        token_loss(plain(TOKENS), TOKENS).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_two_backward_passes_before_the_end_add_up():
    """Gradients of the first have left already when the second comes."""
    model, plain = llama(2), llama(2)
    strategy = offloaded(model)
    for _ in range(2):
        token_loss(model(TOKENS), TOKENS).backward()
        token_loss(plain(TOKENS), TOKENS).backward()
    strategy.finish_backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_an_exception_in_forward_leaves_it_usable():
    model, plain = llama(2), llama(2)
    strategy = offloaded(model)
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 1000))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for _ in range(2):
        assert step(model, ours, strategy) == step(plain, theirs)


def test_after_evaluation_parameters_are_at_home():
    model = llama(2)
    strategy = offloaded(model)
    with torch.no_grad():
        model(TOKENS)
    assert all(home.on_host for home in strategy.homes.values())


def test_evaluating_and_saving_take_no_gradient_away():
    """Between microbatches, and before the step. Mutants: weights go home without them."""
    model, plain = llama(2), llama(2)
    strategy = offloaded(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]

    def look() -> None:
        with torch.no_grad():
            model(TOKENS)
        strategy.full_state_dict()

    for _ in range(2):
        for rows in TOKENS.chunk(2):
            with strategy.no_sync():
                token_loss(model(rows), rows).backward()
            look()
            token_loss(plain(rows), rows).backward()
        strategy.finish_backward()
        look()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = strategy.full_state_dict()
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-4, atol=1e-6)


def test_gradients_that_have_left_are_dropped_and_clipped_like_others():
    """Mutants: they come back after zero_grad; their norm is that of what is here."""
    model, plain = llama(2), llama(2)
    strategy = offloaded(model, bucket_mb=0.01)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    (model(TOKENS).sum() * math.nan).backward()
    ours.zero_grad()
    assert step(model, ours, strategy) == step(plain, theirs)
    for m, optimizer in (model, ours), (plain, theirs):
        optimizer.zero_grad()
        token_loss(m(TOKENS), TOKENS).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    assert strategy.clip_grad_norm_(0.1).item() == pytest.approx(norm, rel=1e-5)


def test_a_step_without_finish_backward_is_right_all_the_same():
    model, plain = llama(2), llama(2)
    strategy = offloaded(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    assert [step(model, ours) for _ in range(3)] == [step(plain, theirs) for _ in range(3)]
    assert strategy.full_state_dict().keys() == plain.state_dict().keys()


@pytest.mark.slow
def test_nothing_stays_behind_when_it_goes():
    gc.collect()
    owners = len(offload._owners)
    models = [llama(1), llama(1)]
    gone, hooks = [], []
    for model in models:
        gone.append(weakref.ref(offloaded(model)))
        hooks.append(len(torch_optimizer._global_optimizer_pre_hooks))
    assert len(offload._owners) == owners + 2 and hooks[0] == hooks[1]
    del models[:], model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert len(offload._owners) == owners


def test_a_strategy_may_be_collected_in_the_middle_of_a_step():
    """Mutant: hooks that go with it, while torch goes through them."""
    models: list[Llama] = []

    def forget(*_) -> None:
        del models[1:]
        gc.collect()

    handle = torch_optimizer.register_optimizer_step_pre_hook(forget)  # others come after it
    try:
        models += [llama(2), llama(2)]
        gone = [weakref.ref(offloaded(model)) for model in models][1]
        optimizer = torch.optim.AdamW(models[0].parameters(), lr=0.01)
        assert math.isfinite(step(models[0], optimizer)) and gone() is None
    finally:
        handle.remove()


# ---------------------------------------------------------------------- refusals
def test_what_cannot_be_offloaded_is_refused():
    model = llama(1)
    with pytest.raises(ValueError, match="bucket_mb=0 must be above 0"):
        offload.apply(model, Mesh().dp, bucket_mb=0)
    with pytest.raises(ValueError, match="Offloaded has no flat shards"):
        offload.shards_on_host(offloaded(llama(1)))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        offload.apply(model, Mesh().dp)


# ---------------------------------------------------------------------- models of others
class Held(nn.Module):
    """Blocks in lists of lists, and weights in lists, as U-Nets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"up": nn.Linear(4, 4)})])
            for _ in range(2)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x):
        for (block, more), scale in zip(self.downs, self.scales, strict=True):
            x = torch.tanh(more["up"](block(x))) * scale
        return x


def test_what_is_never_called_waits_for_no_weights():
    """Mutant: a list is a block, whose hook never comes; its weights are read on their way."""
    model = Held()
    groups = offload._groups(model, list(model.parameters()))
    assert [type(block) for block, _ in groups] == [Held, *[nn.Linear] * 4]
    assert groups[0][1] == list(model.scales)
    assert {p for _, own in groups for p in own} == set(model.parameters())


@pytest.mark.parametrize("who", ["itself", "a copy"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_forward_without_gradients_may_come_at_any_time(who, alone):
    """As a target of Q-learning, or of a teacher. Mutants: parameters go home although a backward
    is to come, and the next forward takes gradients along; a copy's hooks move the model's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    expected = copy.deepcopy(model)
    inside = None if alone else ddp.apply(model, Mesh().dp)
    strategy = offloaded(model, inside=inside)
    other = model if who == "itself" else copy.deepcopy(model)
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected))

    def look() -> None:
        with torch.no_grad():
            other(torch.ones(1, 4))

    for step in range(3):
        inputs = torch.full((2, 4), step + 1.0)
        optimizer.zero_grad()
        twin.zero_grad()
        loss = model(inputs).square().sum()
        look()
        assert not any(home.on_host for home in strategy.homes.values())
        loss.backward()
        look()
        strategy.finish_backward()
        look()
        optimizer.step()
        expected(inputs).square().sum().backward()
        twin.step()
        for p, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p, wanted)


def test_a_group_that_is_added_later_has_a_home_too():
    """Mutant: a KeyError at the next step."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    offload.step_on_host(optimizer, HostCopy())
    optimizer.add_param_group({"params": list(second.parameters())})
    before = second.bias.detach().clone()
    second(first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert torch.allclose(second.bias, before - 0.1)


def test_two_parameters_in_one_memory_are_refused_around_the_step_too():
    """Mutant: each gets a copy on the host, and the last one written wins."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight.data = first.weight.data
    optimizer = torch.optim.SGD([first.weight, second.weight], lr=0.1)
    with pytest.raises(ValueError, match="two parameters in the same memory"):
        offload.step_on_host(optimizer, HostCopy())
