"""Offloading by itself: where the bytes are, when they travel, and what users may do meanwhile."""

import pytest
import torch

from minipar.comm.hostcopy import HostCopy
from minipar.comm.mesh import Mesh
from minipar.lab.memory import MemoryLedger
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.observe import timeline
from minipar.parallel import fsdp, offload
from tests.on_ranks import on_ranks

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


@pytest.mark.slow
@on_ranks(2)
def test_with_shards_on_the_host_the_device_holds_only_blocks_in_use():
    """Mutant: a shard that stays on the device; copies that are prefetched and thrown away."""
    model = llama(8)
    whole = 4 * sum(p.numel() for p in model.parameters())
    block = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    root = whole - 8 * block
    strategy = fsdp.apply(model, Mesh(dp=2).dp)
    optimizer = torch.optim.AdamW(model.parameters())
    offload.HostShards(strategy, optimizer, HostCopy())
    for _ in range(2):  # to learn the order: the first step gathers more
        step(model, optimizer, strategy)
    optimizer.zero_grad()
    with MemoryLedger(model) as ledger, timeline.record() as recorded:
        for _ in range(2):
            step(model, optimizer, strategy)
            optimizer.zero_grad()
    history = ledger.history()
    assert history.peak_of("parameters") == history.peak_of("optimizer") == 0
    for part, copies in {"parameters": 1, "gradients": 1, "optimizer": 2}.items():
        assert history.peak_of(part, host=True) == pytest.approx(copies * whole / 2, rel=0.05)
    # The root, two blocks, and four shards (halves) on their way from the host to a gather.
    assert history.peak_of("gathered") <= root + (2 + 4 / 2) * block < 0.6 * whole
    # Down to the root and the last block, every shard comes for forward and for backward.
    twice = whole - (root + block) / 2
    sent = {"to_host": whole / 2, "to_device": twice}
    assert {k: v / 2 for k, v in sent_by(recorded).items()} == pytest.approx(sent, rel=0.01)


def test_weights_loaded_into_shards_on_the_host_are_used():
    """Mutant: a shard that was brought ahead is of before the load."""
    model, other = llama(2), llama(2)
    strategy = fsdp.apply(model, Mesh().dp)
    optimizer = torch.optim.AdamW(model.parameters())
    offload.HostShards(strategy, optimizer, HostCopy())
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

    def to_device(self, source, destination):
        self.sources.append(source)
        return super().to_device(source, destination)

    def to_host(self, tensor):
        copy = super().to_host(tensor)
        wait = copy.wait
        copy.wait = lambda **options: self.waited.append(copy) or wait(**options)
        return copy


def test_what_a_gpu_takes_is_pinned_though_it_computes_in_half_precision():
    """And no gradient is waited for in backward. Mutants: casts in memory like any other."""
    model, copies = llama(2), Pinned()
    strategy = fsdp.apply(model, Mesh().dp, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    offload.HostShards(strategy, optimizer, copies)
    for _ in range(2):
        copies.waited.clear()
        token_loss(model(TOKENS), TOKENS).backward()
        assert not copies.waited
        strategy.finish_backward()
        assert copies.waited
        optimizer.step()
        optimizer.zero_grad()
    pinned = {tensor.untyped_storage().data_ptr() for tensor in copies.given}
    assert copies.sources
    for source in copies.sources:
        assert source.dtype == torch.bfloat16
        assert source.untyped_storage().data_ptr() in pinned
