"""Sharding in its corners: traffic, memory, ties, accumulation, precision, failures, overlap.

That training equals one device is proved by tests/law/test_law.py.
"""

import copy
import warnings
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.lab.memory import LiveBytes
from minipar.model.init import initial_weight
from minipar.model.llama import Llama, LlamaConfig, generate
from minipar.observe import timeline
from minipar.parallel import fsdp
from minipar.parallel.plan import Plan
from minipar.sim.trace import pretend
from minipar.train.optim import make_optimizer
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel.timed import SlowLayer, fastest, slow_model

pytestmark = pytest.mark.trains

NUM_BLOCKS, WIDTH = 16, 32


# ---------------------------------------------------------------------- models and data
class Layers(nn.Module):
    """Equal blocks in a list, and a head outside of it; can be told to fail."""

    def __init__(self, seed: int, num_blocks: int = 6, width: int = 6) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(
                nn.Linear(width, width, bias=False) for _ in range(num_blocks)
            )
            self.head = nn.Linear(width, width, bias=False)
        self.double()

    def forward(self, x: Tensor, fails_after: int = -1, boom_after: int = -1) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if i == boom_after:
                x = Boom.apply(x)
            if i == fails_after:
                raise ArithmeticError("boom")
        return self.head(x)


class Boom(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ArithmeticError("boom")


def data(rank: int, step: int = 0, width: int = 6) -> Tensor:
    """[4, D], different for every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, width, dtype=torch.float64, generator=generator)


def tokens(rank: int, step: int = 0) -> Tensor:
    return torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def expected(model: nn.Module, inputs: list[Tensor], divide_by: int = 1) -> dict[str, Tensor]:
    """Gradients of the sum of the losses on a plain model."""
    (sum(model(x).square().sum() for x in inputs) / divide_by).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(found: dict, wanted: dict, rtol: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        ours = found[name]
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
            error = (ours - theirs).abs().max().item()
            assert error <= rtol * theirs.abs().max().item(), f"{name} is off by {error}"


def train(model: nn.Module, strategy: fsdp.FullySharded, rank: int, steps: int = 2) -> None:
    optimizer = make_optimizer(model, lr=0.01, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(tokens(rank, step)).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()


# ---------------------------------------------------------------------- traffic
@pytest.mark.parametrize(
    "size, reshard, microbatches", [(2, True, 1), (2, False, 1), (2, True, 3), (3, True, 1)]
)
@on_ranks("size")
def test_sends_what_the_docstring_says(size, reshard, microbatches):
    """Mutants: a block that is freed and gathered once more; a second reduce-scatter."""
    mesh = Mesh(dp=dist.get_world_size())
    model = Layers(seed=mesh.rank, width=12)
    blocks = list(model.blocks)
    strategy = fsdp.apply(model, mesh.dp, blocks=blocks, reshard_after_forward=reshard)
    for step in range(2):  # in the first one the last block is not known yet
        with timeline.record() as recorded:
            for m in range(microbatches):
                x = data(mesh.rank, step, width=12)
                with nullcontext() if m == microbatches - 1 else strategy.no_sync():
                    model(x).sum().backward()
            strategy.finish_backward()
    sent = recorded.bytes_by_axis()["dp"]
    block = root = 12 * 12 * 8
    whole = 6 * block + root
    gathers = microbatches * (2 * whole - root - block if reshard else whole)
    used = 2 * 7  # a byte per parameter
    formula = (size - 1) / size * (gathers + microbatches * whole + used)
    assert sent == pytest.approx(formula, abs=30)  # each call rounds down


class Tables(nn.Module):
    """An embedding and a head, larger than the blocks between them, and perhaps tied."""

    def __init__(self, seed: int, tied: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(32, 6)
            self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
            self.head = nn.Linear(6, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, words: Tensor, look=lambda _: None) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            look("forward")
            x = torch.tanh(block(x))
            if x.requires_grad:
                x.register_hook(lambda _: look("backward"))
        return self.head(x)


def _tables(tied):
    mesh = Mesh(dp=2)
    model, plain, gathered = Tables(mesh.rank, tied), Tables(0, tied), defaultdict(list)
    strategy = fsdp.apply(model, mesh.dp, average=False)
    words = [torch.randint(32, (4,), generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    for _ in range(2):
        model.zero_grad()
        with timeline.record() as recorded:
            look = lambda phase: gathered[phase].append(models.gathered_bytes(strategy))  # noqa: E731
            model(words[mesh.rank], look).square().sum().backward()
            strategy.finish_backward()
    assert_equal(strategy.full_gradients(), expected(plain, words))
    assert_equal(strategy.full_state_dict(), plain.state_dict(), rtol=0)
    return recorded.bytes_by_axis()["dp"], gathered


@pytest.mark.parametrize("tied", [False, True])
def test_tables_come_and_go_as_blocks_do(ranks, tied):
    """Tied ones, too. Mutants: gathered for the whole step, or for the gradient of a look-up."""
    table, block = 32 * 6 * 8, 6 * 6 * 8
    gathers, reduces = 2 * table + 2 * 3 * block, 2 * table + 3 * block
    used = 2 * (5 - tied)
    for sent, gathered in ranks(2).run(_tables, tied):
        assert sent == pytest.approx((gathers + reduces + used) / 2, abs=10)
        assert max(gathered["forward"][3:5]) <= 2 * block  # the last one has the head come
        assert max(gathered["backward"]) <= 2 * block + table and len(gathered["backward"]) == 6
        assert gathered["backward"][-1] <= 2 * block


@pytest.mark.slow
@pytest.mark.parametrize("reached", [True, False])
@on_ranks(4)
def test_hybrid_sharding_crosses_once(reached):
    """Shards alone travel between replicas, once a step, also where the last backward does not
    reach a block. Mutants: all-reduce of whole gradients; one in each microbatch, or of the first
    microbatch twice."""
    grid = Mesh(replica=2, dp=2)
    model = Layers(seed=grid.rank)
    strategy = fsdp.apply(model, grid.dp, replicate_axis=grid.replica)
    inputs = [data(0), data(1), data(2), data(3)]
    with timeline.record() as recorded, strategy.no_sync():
        model(inputs[grid.rank]).square().sum().backward()
    assert recorded.bytes_by_axis().keys() == {"dp"}
    with timeline.record() as recorded:
        if reached:
            model(inputs[grid.rank]).square().sum().backward()
        strategy.finish_backward()
    times = 2 if reached else 1
    wanted = {name: times * g for name, g in expected(Layers(seed=0), inputs, 4).items()}
    assert_equal(strategy.full_gradients(), wanted)
    sent = recorded.bytes_by_axis()["replica"]
    num_bytes = 7 * 36 * 8
    assert sent == pytest.approx(2 * (1 / 2) * (num_bytes / 2 + 7), abs=10)


def test_traffic_on_512_ranks_without_values():
    """The formula of the docstring, from the real code on tensors without values.

    Mutant: code that looks at a value; a collective that is not in the ledger.
    """
    with pretend(Plan(dp=512), rank=3) as mesh:
        model = models.untied_llama(0).to("meta")
        num_bytes, count = sum(p.nbytes for p in model.parameters()), len(list(model.parameters()))
        block = sum(p.nbytes for p in model.model.layers[0].parameters())
        strategy = fsdp.apply(model, mesh.dp)
        for _ in range(2):
            with timeline.record() as recorded:
                model(tokens(0).to("meta")).sum().backward()
                strategy.finish_backward()
    assert all(p.grad is not None for p in model.parameters())
    assert models.gathered_bytes(strategy) == 0
    pad = 512 * 4  # per unit and call, at most
    formula = 511 / 512 * (2 * num_bytes + 2 * block + 2 * count)  # root + 3 blocks = all
    assert formula - 20 <= recorded.bytes_by_axis()["dp"] <= formula + 10 * pad


# ---------------------------------------------------------------------- memory
def _most_gathered(prefetch, frozen):
    mesh = Mesh(dp=2)
    model = Layers(seed=0, num_blocks=8)
    for i in (0, 3, 4, 5):
        model.blocks[i].requires_grad_(not frozen)
    strategy = fsdp.apply(model, mesh.dp, prefetch=prefetch)
    most, unshard = [], fsdp.Flat.unshard

    def counting(flat):
        unshard(flat)
        most.append(sum(block.is_gathered for block in strategy.blocks))

    fsdp.Flat.unshard = counting
    try:
        for step in range(3):
            most.clear()
            model(data(mesh.rank, step)).sum().backward()
            strategy.finish_backward()
            assert models.gathered_bytes(strategy) == 0
    finally:
        fsdp.Flat.unshard = unshard
    return max(most)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_at_most_two_blocks_are_gathered_at_a_time(ranks, prefetch, frozen):
    """1 + prefetch in general. Mutants: a block that is not freed; prefetching that runs ahead."""
    assert ranks(2).run(_most_gathered, prefetch, frozen) == [1 + prefetch] * 2


@pytest.mark.slow
@on_ranks(2)
def test_peak_memory_is_that_of_the_formula():
    """Within 3 %, in the least of five steps: gloo's threads may let go of what arrived late.
    Mutants: a second copy of gathered weights or of shards' gradients; all gradients whole until
    the end of backward."""
    mesh = Mesh(dp=2)
    model = Layers(seed=0, num_blocks=NUM_BLOCKS, width=WIDTH).to("meta")
    x = data(mesh.rank, width=WIDTH)[:1]
    with LiveBytes() as live:
        strategy = fsdp.apply(
            model, mesh.dp, init=lambda _, shape: torch.zeros(shape, dtype=torch.float64)
        )
        optimizer, peaks = torch.optim.AdamW(model.parameters(), foreach=False), []
        for _ in range(6):
            start = len(live.samples)
            optimizer.zero_grad(set_to_none=True)
            model(x).sum().backward()
            strategy.finish_backward()
            optimizer.step()
            peaks.append(max(live.samples[start:]))
    peak = min(peaks[1:])  # in the first there is no optimizer state yet
    block = WIDTH * WIDTH * 8  # the head is one, too: nothing is outside of blocks
    formula = 4 * (NUM_BLOCKS + 1) * block / 2 + 4 * block
    assert 0.97 * formula <= peak <= 1.01 * formula


# ---------------------------------------------------------------------- what the optimizer sees
@on_ranks(4)
def test_parameters_are_ordinary_pieces_under_their_names():
    mesh = Mesh(dp=4)
    model = models.llama(seed=mesh.rank)
    names = [name for name, _ in model.named_parameters()]
    plain = models.llama(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = fsdp.apply(model, mesh.dp)
        train(model, strategy, mesh.rank)
    assert [name for name, _ in model.named_parameters()] == names
    for (_, p), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.dtype == torch.float32 and p.is_leaf
        assert p.ndim == whole.ndim and p.shape[1:].numel() == 1
        assert p.full_shape == whole.shape and p.shard_axes == (mesh.dp,)
        assert p.grad.shape == p.shape
    model.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    own = sum(p.numel() for p in model.parameters())
    assert sum(all_gather_object(own, mesh.dp)) == sum(p.numel() for p in plain.parameters())
    assert abs(own - sum(p.numel() for p in plain.parameters()) / 4) <= 4 * 4


def _few():
    mesh = Mesh(dp=4)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 3)).double()
    plain = copy.deepcopy(model)
    strategy = fsdp.apply(model, mesh.dp, average=False)
    plain.load_state_dict(strategy.full_state_dict())
    inputs = [torch.full((2, 1), r + 1.0, dtype=torch.float64) for r in range(4)]
    model(inputs[mesh.rank]).square().sum().backward()
    strategy.finish_backward()
    assert_equal(strategy.full_gradients(), expected(plain, inputs))
    torch.optim.AdamW(model.parameters()).step()
    return [p.numel() for p in model.parameters()]


def test_fewer_numbers_than_ranks(ranks):
    """Mutant: pieces of which a rank has none are no parameters; padding that is summed up."""
    assert ranks(4).run(_few) == [[1, 2, 0], [0, 1, 1], [0, 0, 2], [0, 0, 0]]


# ---------------------------------------------------------------------- ties
@on_ranks(2)
def test_trap_15_tied_weights_stay_tied():
    """From "meta" on. Mutants: a shard for the head of its own; the gradient of one use lost."""
    mesh = Mesh(dp=2)
    config = models.llama(0).config
    with torch.device("meta"):
        model = Llama(config)
    strategy = fsdp.apply(
        model, mesh.dp, init=lambda name, shape: initial_weight(config, name, shape, 7)
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train(model, strategy, mesh.rank)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = strategy.full_state_dict()
    assert whole["lm_head.weight"] is whole["model.embed_tokens.weight"]
    plain = models.llama(seed=7)
    optimizer = make_optimizer(plain, lr=0.01, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        (sum(plain(tokens(r, step)).square().sum() for r in range(2)) / 2).backward()
        optimizer.step()
    assert_equal(whole, plain.state_dict(), rtol=1e-4)
    # loading, into a model with other weights
    other = models.llama(seed=1)
    again = fsdp.apply(other, mesh.dp)
    again.load_full_state_dict(whole)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert_equal(again.full_state_dict(), whole, rtol=0)
    with pytest.raises(ValueError, match="of another model"):
        again.load_full_state_dict({"head": torch.zeros(3)})


# ---------------------------------------------------------------------- accumulation
@pytest.mark.parametrize("covers_forward", [True, False])
@on_ranks(2)
def test_trap_16_no_sync_accumulates(covers_forward):
    """And sums that were not zeroed. Mutants: only the last microbatch is reduced; one is added
    twice, or to the next step; `no_sync` that must be entered before forward."""
    mesh = Mesh(dp=2)
    model = Layers(seed=mesh.rank)
    strategy, seen = fsdp.apply(model, mesh.dp), []
    for step in range(3):
        inputs = [[data(r, 10 * step + m) for r in range(2)] for m in range(3)]
        with timeline.record() as recorded:
            for m in range(3):
                x, sync = inputs[m][mesh.rank], m == 2
                with nullcontext() if sync or not covers_forward else strategy.no_sync():
                    loss = model(x).square().sum()
                    with nullcontext() if sync else strategy.no_sync():
                        loss.backward()
            strategy.finish_backward()
        assert len(recorded.select(name="reduce_scatter").spans) == 3 * 7
        seen = seen * (step != 1) + [x for pair in inputs for x in pair]  # zeroed before step 1
        assert_equal(strategy.full_gradients(), expected(Layers(seed=0), seen, 2))
        if step == 0:
            model.zero_grad()


# ---------------------------------------------------------------------- first weights
def _counted(live: LiveBytes, real, *args):
    live.seen = getattr(live, "seen", [live.now])
    result = real(*args)
    live.seen.append(live.now)
    return result


@on_ranks(4)
def test_a_model_from_meta_equals_that_of_one_process():
    """And is never whole on a rank. Mutant: every rank draws everything, or draws its shards from
    the same stream."""
    mesh = Mesh(dp=4)
    config = LlamaConfig(61, 16, 24, 6, 4, 2)
    with torch.device("meta"):
        model = Llama(config)
    plain = Llama(config, seed=3)
    total = sum(p.nbytes for p in plain.parameters())
    largest = max(p.nbytes for p in plain.parameters())
    asked = []

    def init(name: str, shape: tuple[int, ...]) -> Tensor:
        asked.append(name)
        return initial_weight(config, name, shape, seed=3)

    real = fsdp.first_shard
    with LiveBytes() as live, timeline.record() as recorded:
        fsdp.first_shard = lambda *args: _counted(live, real, *args)
        try:
            strategy = fsdp.apply(model, mesh.dp, init=init)
        finally:
            fsdp.first_shard = real
    assert not recorded.spans
    assert len(asked) < len(list(plain.parameters()))
    assert max(live.seen) - live.seen[0] <= total / 4 + 3 * largest + 2000
    assert_equal(strategy.full_state_dict(), plain.state_dict(), rtol=0)


# ---------------------------------------------------------------------- precision
def _half(reduce_dtype):
    mesh = Mesh(dp=2)
    model, plain = models.llama(seed=mesh.rank), models.llama(seed=0).bfloat16()
    strategy = fsdp.apply(model, mesh.dp, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    with timeline.record() as recorded:
        logits = model(tokens(mesh.rank))
        logits.float().square().sum().backward()
        strategy.finish_backward()
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, plain(tokens(mesh.rank)))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    own = []
    for rank in range(2):
        plain.zero_grad()
        plain(tokens(rank)).float().square().sum().backward()
        own.append({name: p.grad.float() for name, p in plain.named_parameters()})
    mean = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    exact = reduce_dtype == torch.float32
    assert_equal(strategy.full_gradients(), mean, rtol=1e-6 if exact else 2**-7)
    if exact:  # the wire did not round
        assert any((g != g.bfloat16()).any() for g in strategy.full_gradients().values())
    gathered = sum(s.num_bytes for s in recorded.select(name="all_gather"))
    reduced = sum(s.num_bytes for s in recorded.select(name="reduce_scatter"))
    return gathered, reduced


@pytest.mark.slow
def test_computes_in_bf16_on_float32_shards(ranks):
    """Mutants: gathering in float32; shards or gradients that stay in bf16."""
    num_params = sum(p.numel() for p in models.llama(0).parameters())
    rest = num_params - sum(p.numel() for p in models.llama(0).model.layers.parameters())
    for reduce_dtype, width in ((None, 2), (torch.float32, 4)):
        for gathered, reduced in ranks(2).run(_half, reduce_dtype):
            # The root stays from forward to backward; in the first step nothing else does.
            assert gathered == pytest.approx(2 * (2 * num_params - rest) / 2, abs=40)
            assert reduced == pytest.approx(width * num_params / 2, abs=40)


@on_ranks(2)
def test_a_small_convolutional_network_in_bf16():
    """Mutant: weights are cast, inputs are not."""
    mesh = Mesh(dp=2)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)]
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    strategy = fsdp.apply(model, mesh.dp, compute_dtype=torch.bfloat16)
    images = torch.randn(2, 3, 6, 6)
    found, wanted = model(images), plain(images)
    found.sum().backward()
    strategy.finish_backward()
    assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), wanted, atol=0.05)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# ---------------------------------------------------------------------- living with it
def test_one_rank_needs_no_torch_distributed():
    assert not dist.is_initialized()
    model, plain = models.Foreign(0), models.Foreign(0)
    strategy = fsdp.apply(model, Mesh().dp)
    for step in range(2):
        model.zero_grad()
        plain.zero_grad()
        model(tokens(0, step)).square().sum().backward()
        strategy.finish_backward()
        assert_equal(strategy.full_gradients(), expected(plain, [tokens(0, step)]), rtol=0)
    assert_equal(strategy.full_state_dict(), plain.state_dict(), rtol=0)


@on_ranks(2)
def test_generates_with_the_weights_of_now():
    """Mutants: weights that stay gathered although they have changed, by p.data as well, of which
    torch keeps no count; or after evaluation."""
    mesh = Mesh(dp=2)
    model, plain = models.llama(seed=mesh.rank), models.llama(seed=0)
    strategy = fsdp.apply(model, mesh.dp)
    prompt = tokens(0)
    for write in (torch.Tensor.mul_, lambda p, factor: p.data.mul_(factor), None):
        assert torch.equal(generate(model, prompt, 5, 0), generate(plain, prompt, 5, 0))
        assert models.gathered_bytes(strategy) == 0
        model(prompt)  # a forward whose backward never comes
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()) if write else ():
                write(p, -0.5)


@pytest.mark.parametrize("place, in_backward", [(0, False), (3, False), (5, False), (3, True)])
@on_ranks(2)
def test_goes_on_after_an_exception(place, in_backward):
    """Mutants: whole weights left in the model; a gather left pending; an order that got lost."""
    mesh = Mesh(dp=2)
    model = Layers(seed=mesh.rank)
    strategy = fsdp.apply(model, mesh.dp)
    for step in range(4):
        model.zero_grad()
        if step in (0, 2):
            with pytest.raises(ArithmeticError, match="boom"):
                if in_backward:
                    model(data(mesh.rank), boom_after=place).sum().backward()
                else:
                    model(data(mesh.rank), fails_after=place)
            if in_backward or step == 2:
                strategy.finish_backward()
                model.zero_grad(set_to_none=True)
                sizes = [p.shape[1:].numel() for p in model.parameters()]
                assert sizes == [1] * len(sizes)  # all shards are back in their places
        model(data(mesh.rank, step)).square().sum().backward()
        strategy.finish_backward()
        wanted = expected(Layers(seed=0), [data(0, step), data(1, step)], 2)
        assert_equal(strategy.full_gradients(), wanted)
        assert models.gathered_bytes(strategy) == 0


@on_ranks(2)
def test_the_order_may_change():
    """Blocks left out, or used twice. Mutant: a block prefetched in vain that stays."""
    mesh = Mesh(dp=2)
    model, plain = Layers(seed=mesh.rank), Layers(seed=0)
    strategy = fsdp.apply(model, mesh.dp)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        order = torch.randint(6, (5,), generator=generator).tolist()  # some twice, some never
        for m in (model, plain):
            m.zero_grad()

        def run(m, x, order=order):
            for i in order:
                x = torch.tanh(m.blocks[i](x))
            return m.head(x).square().sum()

        model.forward, plain.forward = (lambda x, m=m: run(m, x) for m in (model, plain))
        model(data(mesh.rank, step)).backward()
        strategy.finish_backward()
        (sum(plain(data(r, step)) for r in range(2)) / 2).backward()
        assert_equal(
            strategy.full_gradients(), {name: p.grad for name, p in plain.named_parameters()}
        )
        assert models.gathered_bytes(strategy) == 0


class Attends(nn.Module):
    """What torch's attention does with its last layer: it takes the weight, and never calls it."""

    def __init__(self, make) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.inner = make(), nn.MultiheadAttention(6, 2, batch_first=True)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first((x[:, 0] * 100).long() % 8)[None]
        x = x + self.inner(x, x, x)[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Shares(nn.Module):
    """Two blocks of a list are wrappers of one module, as ALBERT's layers are."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inner = nn.Linear(6, 6).double()
        self.blocks = nn.ModuleList(nn.Sequential(inner) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("how", ["computed", "uncalled", "shared"])
@on_ranks(2)
def test_blocks_that_are_found_fit_models_of_others(how):
    """An embedding whose weight is computed from others, a linear layer that is never called, a
    module inside of two blocks. Mutants: an embedding that is taken for a look-up; a subclass of
    nn.Linear as a block; a shared module that one of its blocks alone gathers."""

    def table() -> nn.Module:
        with warnings.catch_warnings():  # torch would rather have its newer form
            warnings.simplefilter("ignore", FutureWarning)
            plain = nn.Embedding(8, 6)
            return nn.utils.weight_norm(plain) if how == "computed" else plain

    def build() -> nn.Module:
        return Shares() if how == "shared" else Attends(table)

    mesh, model, plain = Mesh(dp=2), build(), build()
    strategy = fsdp.apply(model, mesh.dp, average=False)
    for step in range(2):
        model.zero_grad()
        plain.zero_grad()
        model(data(mesh.rank, step)).square().sum().backward()
        strategy.finish_backward()
        wanted = expected(plain, [data(rank, step) for rank in (0, 1)])
        assert_equal(strategy.full_gradients(), wanted, rtol=1e-11)


class Leaves(nn.Linear):
    """Leaves losses of its weights, and what these were computed from, in itself."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.register_buffer("gated", torch.zeros(()), persistent=False)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        self.gated = (x * self.scale).square().sum()
        self.kept.append((self.weight**3).sum())
        return out


@on_ranks(2)
def test_blocks_may_leave_losses_in_attributes():
    """Mutants: weights that are freed when their gradients come, whose memory is read (the rank
    dies); a block that is gathered again for what it was given."""
    mesh = Mesh(dp=2)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Leaves() for _ in range(3))).double()

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() + sum(block.gated + block.kept[-1] for block in model)

    model, plain = build(), build()
    strategy = fsdp.apply(model, mesh.dp, average=False)
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        with timeline.record() as recorded:
            loss_of(model, data(mesh.rank, step)).backward()
        strategy.finish_backward()
        sum(loss_of(plain, data(rank, step)) for rank in (0, 1)).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert_equal(strategy.full_gradients(), wanted)
    gathers = [span for span in recorded.spans if span.name == "all_gather"]
    assert len(gathers) == 5  # the last block stays


# ---------------------------------------------------------------------- what foreign blocks do
def assert_same_gradients(build, loss_of, **options) -> None:
    """As those of one device, of the sum of the losses of both ranks."""
    mesh = Mesh(dp=2)
    torch.manual_seed(0)
    model = build().double()
    plain = copy.deepcopy(model)
    strategy = fsdp.apply(model, mesh.dp, average=False, **options)
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        loss_of(model, data(mesh.rank, step)).backward()
        strategy.finish_backward()
        sum(loss_of(plain, data(rank, step)) for rank in (0, 1)).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert_equal(strategy.full_gradients(), wanted, rtol=1e-11)
        assert models.gathered_bytes(strategy) == 0


class Views(nn.Module):
    """Changes in place what its blocks return, as ``h += x`` does: a view in the second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Unflatten(-1, shape)) for shape in ((6,), (2, 3))
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(x)
            h += 1.0
            x = torch.sin(h).flatten(1)
        return x


class Encodes(nn.Module):
    """As in T5: a tensor from the first block is used in all, keywords, tuples with None."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bias = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

        def forward(self, x, *, bias=None, flag=False, states=(None,)):
            assert flag is True and isinstance(states, tuple)
            bias = self.bias.exp() if bias is None else bias
            return [torch.tanh(self.inner(x * bias) * states[0]), None, (bias,)]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-dim

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        bias, states = None, (x.cos() * self.scale,)
        for layer in self.layers:
            x, _, (bias,) = layer(x, bias=bias, flag=True, states=states)
        return {"out": x, "bias": bias}


class Recomputing(nn.Module):
    """Checkpoints inside of its blocks, and one around two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}) for _ in range(3)
        )
        for block in self.blocks:
            block.forward = partial(self.run, block)
        self.pair = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    @staticmethod
    def run(block: nn.Module, x: Tensor) -> Tensor:
        inside = lambda x: block["b"](torch.sin(block["a"](x)))  # noqa: E731
        return x + checkpoint(inside, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        both = lambda x: self.pair[1](torch.sin(self.pair[0](x)))  # noqa: E731
        return checkpoint(both, x, use_reentrant=False)


class Forces(nn.Module):
    """Takes a gradient of a block inside of the block's forward, to be differentiated again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x if x.requires_grad else x.requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sin().sum(), x, create_graph=True)
            return x + slope

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sum_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def of_all_outputs(model: nn.Module, x: Tensor) -> Tensor:
    return sum(t.square().sum() for t in model(x).values())


def of_two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)
    return model(x).sum() - model(x + 1).square().sum()


def of_two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    model(x + 1).square().sum().backward()
    return model(x).sum()


def taken_by_hooks(model: nn.Module, x: Tensor) -> Tensor:
    """What hooks of users see: inside of blocks, and of blocks."""
    taken = []
    keep = lambda module, args, out: taken.append(out)  # noqa: E731
    handles = [m.register_forward_hook(keep) for m in model.modules() if m is not model]
    model(x)  # its own output is not used
    for handle in handles:
        handle.remove()
    return sum(t.square().sum() for t in taken)


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


FOREIGN = {
    "changed in place": (Views, sum_of),
    "tuples, None and keywords": (Encodes, of_all_outputs),
    "checkpoints": (Recomputing, sum_of),
    "forces in forward": (Forces, sum_of),
    "two forwards": (chain, of_two_forwards),
    "two backwards": (chain, of_two_backwards),
    "taken by hooks": (chain, taken_by_hooks),
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("what", FOREIGN)
@on_ranks(2)
def test_what_blocks_of_others_do(what, reshard):
    """Mutants: weights that are freed before their last use; a second forward that keeps the first
    one's; nodes of outputs that are older than what was taken out of the block."""
    build, loss_of = FOREIGN[what]
    assert_same_gradients(build, loss_of, reshard_after_forward=reshard)


@pytest.mark.parametrize("all_of_it", [True, False])
@on_ranks(2)
def test_frozen_for_a_while(all_of_it):
    """As a discriminator in the generator's step. Mutants: what is frozen learns; it keeps its
    weights gathered, or its gradient of the step before."""
    mesh = Mesh(dp=2)
    torch.manual_seed(0)
    model = chain().double()
    plain = copy.deepcopy(model)
    strategy = fsdp.apply(model, mesh.dp, average=False)
    for step in range(4):
        for m in (model, plain):
            m.zero_grad()
            for p in m[1].parameters() if all_of_it else [m[1][0].bias]:
                p.requires_grad_(step % 2 == 0)
        sum_of(model, data(mesh.rank, step)).backward()
        strategy.finish_backward()
        sum(sum_of(plain, data(rank, step)) for rank in (0, 1)).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert_equal(strategy.full_gradients(), wanted, rtol=1e-11)
        assert models.gathered_bytes(strategy) == 0


class Methods(Layers):
    """Has a second way through its blocks."""

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.sin(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


@on_ranks(2)
def test_other_methods_run_as_forwards_if_they_are_named():
    """Mutants: a method that gathers nothing; one whose end ends the forward that called it."""
    mesh, model, plain = Mesh(dp=2), Methods(0), Methods(0)
    strategy = fsdp.apply(model, mesh.dp, forward_methods=("encode",), average=False)
    for step in range(2):
        with pytest.raises(TypeError):  # ends a forward, and does not count as one that goes on
            model.encode(None)
        strategy.finish_backward()
        x = [data(rank, step) for rank in (0, 1)]
        (model.encode(x[mesh.rank]).sum() + model(x[mesh.rank]).square().sum()).backward()
        strategy.finish_backward()
        sum(plain.encode(each).sum() + plain(each).square().sum() for each in x).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert_equal(strategy.full_gradients(), wanted, rtol=1e-11)


class Containers(nn.Module):
    """Lists and dicts inside of a dict: nobody calls these."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        pair = nn.ModuleDict({"gate": nn.Linear(6, 6), "up": nn.Linear(6, 6)})
        scales = nn.ParameterList([nn.Parameter(torch.full((6,), 1.5))])
        self.parts = nn.ModuleDict({"layers": layers, "pairs": nn.ModuleList([pair]), "s": scales})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.parts["layers"]:
            x = torch.tanh(layer(x)) * self.parts["s"][0]
        for pair in self.parts["pairs"]:
            x = torch.sigmoid(pair["gate"](x)) * pair["up"](x)
        return x


@on_ranks(2)
def test_containers_in_containers_are_no_blocks():
    """Mutant: a list in a dict is one, whose forward never runs."""
    assert_same_gradients(Containers, lambda model, x: model(x).square().sum())
    model = Containers()
    members = [*model.parts["layers"], *model.parts["pairs"][0].values()]
    assert set(fsdp.find_blocks(model)) == set(members)


# ---------------------------------------------------------------------- refused
def _refused():
    mesh = Mesh(dp=2)
    sharded, hooked = Layers(0), Layers(0)
    fsdp.apply(sharded, mesh.dp)
    hooked.head.weight.register_hook(lambda g: 2 * g)
    refused = [
        (Layers(0), dict(prefetch=-1), "prefetch=-1"),
        (Layers(0), dict(compute_dtype=torch.int8), "compute_dtype=torch.int8 is no float"),
        (Layers(0), dict(reduce_dtype=torch.int8), "reduce_dtype=torch.int8 is no float"),
        (Layers(0), dict(blocks=(nn.Conv2d,)), "has none of them; it has .*Linear"),
        (Layers(0), dict(replicate_axis=mesh.dp), "must cross each other"),
        (Layers(0), dict(init=lambda name, shape: torch.zeros(shape)), "'meta' device"),
        (nn.ReLU(), {}, "no parameter"),
        (sharded, {}, "trained by fsdp along dp already"),
        (hooked, {}, "head.weight has a hook on its gradient"),
    ]
    with timeline.record() as recorded:
        for model, options, message in refused:
            with pytest.raises(ValueError, match=message):
                fsdp.apply(model, mesh.dp, **options)
    assert not recorded.spans
    return len(refused)


def test_bad_options_are_refused_before_the_first_collective(ranks):
    assert ranks(2).run(_refused) == [9, 9]


def penalty(model: Layers, x: Tensor) -> None:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.sum().backward()


def recomputed(model: Layers, x: Tensor) -> None:
    block = model.blocks[1]
    inner, block.forward = block.forward, lambda x: checkpoint(inner, x, use_reentrant=True)
    model(x.requires_grad_()).sum().backward()


def recomputed_around(model: Layers, x: Tensor) -> None:
    checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()


def opaque(model: Layers, x: Tensor) -> None:
    model.blocks[1].forward = lambda x: SimpleNamespace(x=x)
    model(x)


def nothing(model: Layers, x: Tensor) -> None:
    model.blocks[1].forward = lambda x: None
    model(x)


REFUSED = [
    (lambda model, x: model.blocks[2](x), RuntimeError, r"block blocks\.2 .*forward_methods="),
    (penalty, RuntimeError, "create_graph=True"),
    (recomputed, RuntimeError, "use_reentrant=False"),
    (recomputed_around, RuntimeError, "use_reentrant=False"),
    (opaque, TypeError, r"blocks\.1 returned SimpleNamespace; .* in a tuple or list"),
    (nothing, TypeError, r"blocks\.1 returned NoneType"),
    (
        lambda model, x: (model(x).sum() + model.blocks[1].weight.norm()).backward(),
        RuntimeError,
        r"blocks\.1\.weight was used outside",
    ),
    (lambda model, x: model.state_dict(), RuntimeError, "full_state_dict"),
]


@on_ranks(2)
def test_what_would_go_wrong_is_refused():
    """On all ranks, with one sentence."""
    mesh = Mesh(dp=2)
    for call, error, words in REFUSED:
        model = Layers(0)
        before = torch.optim.AdamW(model.parameters())
        strategy = fsdp.apply(model, mesh.dp)
        with pytest.raises(error, match=words):
            call(model, data(mesh.rank))
        strategy.finish_backward()
        with pytest.raises(RuntimeError, match="make the optimizer after fsdp.apply"):
            before.step()


# ---------------------------------------------------------------------- overlap
FORWARD, BACKWARD, COLLECTIVE = 0.02, 0.04, 0.015  # seconds per block


def _timed(prefetch, num_blocks, reshard=True):
    mesh = Mesh(dp=2)
    model, x = slow_model(num_blocks, FORWARD, BACKWARD), torch.ones(2, 64)
    strategy = fsdp.apply(model, mesh.dp, prefetch=prefetch, reshard_after_forward=reshard)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()
        strategy.finish_backward()

    return fastest(step, mesh.dp, SlowLayer.NUM_BYTES / 2 / COLLECTIVE)


@pytest.mark.timed
@pytest.mark.slow
def test_prefetch_hides_all_but_the_first_and_the_last_collective(ranks):
    """Mutants: gathering when a block is entered; waiting for each reduce-scatter; blocks that
    stay gathered keep others from being prefetched."""
    num = 6
    compute, calls = num * (FORWARD + BACKWARD), 3 * num - 1
    for seconds, hidden in ranks(2, "link").run(_timed, 0, num):
        assert seconds >= compute + (2 * num - 1) * COLLECTIVE  # every gather is waited for
        assert hidden <= num / calls + 0.05  # the reduce-scatters at most
    for seconds, hidden in ranks(2, "link").run(_timed, 1, num):
        assert compute + 2 * COLLECTIVE <= seconds <= compute + 2 * COLLECTIVE + 0.1
        assert hidden >= 1 - 2 / calls - 0.15
    for seconds, _ in ranks(2, "link").run(_timed, 1, num, reshard=False):  # weights that stay
        assert compute + 2 * COLLECTIVE <= seconds <= compute + 2 * COLLECTIVE + 0.1
