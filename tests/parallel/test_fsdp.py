"""Sharding in its corners: traffic, memory, what blocks may do, precision, failures, overlap.

That training equals one device is proved by tests/law/test_law.py.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar.comm.mesh import Mesh
from minipar.lab.memory import LiveBytes
from minipar.model.init import initial_weight
from minipar.model.llama import Llama, LlamaConfig, generate
from minipar.observe import timeline
from minipar.parallel import fsdp
from minipar.parallel.base.shards import region_of
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel.layers import data
from tests.parallel.timed import SlowLayer, fastest, slow_model

pytestmark = pytest.mark.trains

NUM_BLOCKS, WIDTH = 16, 32


# ---------------------------------------------------------------------- models and data
class Layers(nn.Module):
    """Equal blocks in a list, and a head outside of it."""

    def __init__(self, seed: int = 0, num_blocks: int = 6, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        linears = (nn.Linear(width, width, bias=False) for _ in range(num_blocks))
        self.blocks = nn.ModuleList(linears)
        self.head = nn.Linear(width, width, bias=False)
        self.double()

    def forward(self, x: Tensor, order=None) -> Tensor:
        for i in range(len(self.blocks)) if order is None else order:
            x = torch.tanh(self.blocks[i](x))
        return self.head(x)


def tokens(rank: int, step: int = 0, vocab_size: int = 61) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(vocab_size, (2, 7), generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def expected(model: nn.Module, inputs: list[Tensor], divide_by: int = 1) -> dict[str, Tensor]:
    """Gradients of the sum of the losses on a plain model."""
    (sum(loss_of(model, x) for x in inputs) / divide_by).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(found: dict, wanted: dict, rtol: float = 1e-11) -> None:
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        ours = found[name]
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
            error = (ours - theirs).abs().max().item()
            assert error <= rtol * theirs.abs().max().item(), f"{name} is off by {error}"


def assert_same_gradients(
    build: Callable, loss_of: Callable = loss_of, inputs: Callable = data, **options
) -> timeline.Timeline:
    """As those of one device, of the sum of the losses of both ranks; return the last step."""
    mesh = Mesh(dp=2)
    torch.manual_seed(0)
    model = build().double()
    plain = copy.deepcopy(model)
    strategy = fsdp.apply(model, mesh.dp, average=False, **options)
    for step in range(4):
        model.zero_grad()
        plain.zero_grad()
        with timeline.record() as recorded:
            loss_of(model, inputs(mesh.rank, step)).backward()
            strategy.finish_backward()
        sum(loss_of(plain, inputs(rank, step)) for rank in (0, 1)).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert_equal(strategy.full_gradients(), wanted)
        assert models.gathered_bytes(strategy) == 0
    return recorded


# ---------------------------------------------------------------------- traffic
@pytest.mark.parametrize(
    "size, reshard, microbatches", [(2, True, 1), (2, False, 1), (2, True, 3), (3, True, 1)]
)
@on_ranks("size")
def test_sends_what_the_docstring_says(size, reshard, microbatches):
    """Mutants: a block that is freed and gathered once more; a second reduce-scatter."""
    mesh = Mesh(dp=dist.get_world_size())
    model = Layers(seed=mesh.rank, width=12)
    strategy = fsdp.apply(model, mesh.dp, reshard_after_forward=reshard)
    for step in range(2):  # in the first one the last block is not known yet
        with timeline.record() as recorded:
            for m in range(microbatches):
                x = data(mesh.rank, step, width=12)
                with nullcontext() if m == microbatches - 1 else strategy.no_sync():
                    model(x).sum().backward()
            strategy.finish_backward()
    block = root = 12 * 12 * 8
    whole = 6 * block + root
    gathers = microbatches * (2 * whole - root - block if reshard else whole)
    used = 2 * 7  # a byte per parameter
    formula = (size - 1) / size * (gathers + microbatches * whole + used)
    assert recorded.bytes_by_axis()["dp"] == pytest.approx(formula, abs=30)  # calls round down


class Tables(Layers):
    """An embedding before the blocks, and a head after them, which may be tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__(0, num_blocks=3)
        self.embed, self.head = nn.Embedding(32, 6), nn.Linear(6, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(self.embed(words))


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_tables_may_be_blocks_unless_they_are_tied(tied):
    """Mutants: one that stays for the whole step; weights gathered for the gradient of a look-up;
    a tied table that is reduced twice."""
    table, block = 32 * 6 * 8, 6 * 6 * 8
    words = partial(tokens, vocab_size=32)
    tables = dict(inputs=words, blocks=(nn.Embedding, nn.Linear))
    recorded = assert_same_gradients(partial(Tables, tied), **tables)
    calls = (1 + 3 + 2, 1 + 3) if tied else (2 + 3 + 3, 2 + 3)  # the last block stays, or the head
    names = [span.name for span in recorded.spans]
    assert tuple(map(names.count, ("all_gather", "reduce_scatter"))) == calls
    num_tables = 1 if tied else 2
    sent = 2 * num_tables * table + (calls[0] - num_tables + 3) * block + 2 * (3 + num_tables)
    assert recorded.bytes_by_axis()["dp"] == pytest.approx(sent / 2, abs=10)


@pytest.mark.parametrize("reached", [True, False])
@on_ranks(4)
def test_hybrid_sharding_crosses_once(reached):
    """Shards alone travel between replicas, once a step, also where the last backward does not
    reach a block. Mutants: one all-reduce in each microbatch, or of the first one twice."""
    grid = Mesh(replica=2, dp=2)
    model = Layers(seed=grid.rank)
    strategy = fsdp.apply(model, grid.dp, replicate_axis=grid.replica)
    inputs = [data(rank) for rank in range(4)]
    with timeline.record() as recorded:
        with strategy.no_sync():
            loss_of(model, inputs[grid.rank]).backward()
        if reached:
            loss_of(model, inputs[grid.rank]).backward()
        strategy.finish_backward()
    wanted = expected(Layers(), (1 + reached) * inputs, 4)
    assert_equal(strategy.full_gradients(), wanted)
    sent = 7 * 36 * 8 / 2 + 7  # half of the weights, and a byte for each
    assert recorded.bytes_by_axis()["replica"] == pytest.approx(sent, abs=10)


# ---------------------------------------------------------------------- memory
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
@on_ranks(2)
def test_at_most_two_blocks_are_gathered_at_a_time(prefetch, frozen):
    """One without `prefetch`. Mutants: a block that is not freed; prefetching that runs ahead."""
    mesh = Mesh(dp=2)
    model = Layers(num_blocks=8)
    for i in (0, 3, 4, 5):
        model.blocks[i].requires_grad_(not frozen)
    strategy = fsdp.apply(model, mesh.dp, prefetch=prefetch)
    most, unshard = [], fsdp.Unit.unshard

    def counting(unit):
        unshard(unit)
        most.append(sum(u.is_gathered for u in strategy.rows if u.block is not model))

    with mock.patch.object(fsdp.Unit, "unshard", counting):
        for step in range(3):
            most.clear()
            model(data(mesh.rank, step)).sum().backward()
            strategy.finish_backward()
            assert models.gathered_bytes(strategy) == 0
    assert max(most) == 1 + prefetch


@pytest.mark.slow
@on_ranks(2)
def test_peak_memory_is_that_of_the_formula():
    """Within 3 %, in the least of five steps: gloo's threads may let go of what arrived late.
    Mutants: a second copy of gathered weights or of shards' gradients; all gradients whole until
    the end of backward."""
    mesh = Mesh(dp=2)
    model = Layers(num_blocks=NUM_BLOCKS, width=WIDTH).to("meta")
    x = data(mesh.rank, width=WIDTH)[:1]
    with LiveBytes() as live:
        zeros = partial(torch.zeros, dtype=torch.float64)
        init = lambda name, shape: zeros(shape)  # noqa: E731
        strategy = fsdp.apply(model, mesh.dp, blocks=(nn.Linear,), init=init)
        optimizer, peaks = torch.optim.AdamW(model.parameters(), foreach=False), []
        for _ in range(6):
            start = len(live.samples)
            optimizer.zero_grad(set_to_none=True)
            model(x).sum().backward()
            strategy.finish_backward()
            optimizer.step()
            peaks.append(max(live.samples[start:]))
    block = WIDTH * WIDTH * 8  # the head is one, too: nothing is outside of blocks
    formula = 4 * (NUM_BLOCKS + 1) * block / 2 + 4 * block
    assert 0.97 * formula <= min(peaks[1:]) <= 1.01 * formula  # in the first is no optimizer state


# ---------------------------------------------------------------------- parameters
@on_ranks(2)
def test_trap_15_tied_weights_stay_tied():
    """From "meta" on, and into a model with other weights; names and ``ndim`` stay, too. Mutants: a
    shard for the head of its own; the gradient of one use lost."""
    mesh = Mesh(dp=2)
    config = models.llama(0).config
    with torch.device("meta"):
        model = Llama(config)
    init = lambda name, shape: initial_weight(config, name, shape, 7)  # noqa: E731
    strategy = fsdp.apply(model, mesh.dp, init=init)
    loss_of(model, tokens(mesh.rank)).backward()
    strategy.finish_backward()
    plain = models.llama(seed=7)
    wanted = expected(plain, [tokens(0), tokens(1)], 2)
    assert_equal(strategy.full_gradients(), wanted, rtol=1e-4)
    for p, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert region_of(p).shape == whole.shape and p.shard_axes == (mesh.dp,)
        assert type(p) is nn.Parameter and p.ndim == whole.ndim and p.grad.shape == p.shape
    other = models.llama(seed=1)
    again, whole = fsdp.apply(other, mesh.dp), strategy.full_state_dict()
    again.load_full_state_dict(whole)
    assert whole["lm_head.weight"] is whole["model.embed_tokens.weight"]
    assert_equal(whole, plain.state_dict(), rtol=0)
    assert_equal(again.full_state_dict(), whole, rtol=0)
    for m in (model, other):
        assert m.lm_head.weight is m.model.embed_tokens.weight


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
                    loss = loss_of(model, x)
                    with nullcontext() if sync else strategy.no_sync():
                        loss.backward()
            strategy.finish_backward()
        assert len(recorded.select(name="reduce_scatter").spans) == 3 * 7
        seen = seen * (step != 1) + [x for pair in inputs for x in pair]  # zeroed before step 1
        assert_equal(strategy.full_gradients(), expected(Layers(), seen, 2))
        if step == 0:
            model.zero_grad()


@on_ranks(4)
def test_a_model_from_meta_equals_that_of_one_process():
    """And is never whole on a rank. Mutant: every rank draws everything, or draws its shards from
    the same stream."""
    mesh = Mesh(dp=4)
    config = LlamaConfig(61, 16, 24, 6, 4, 2)
    with torch.device("meta"):
        model = Llama(config)
    plain, asked = Llama(config, seed=3), []
    sizes = [p.nbytes for p in plain.parameters()]

    def init(name: str, shape: tuple[int, ...]) -> Tensor:
        asked.append(name)
        return initial_weight(config, name, shape, seed=3)

    with LiveBytes() as live, timeline.record() as recorded:
        live.samples.append(before := live.now)
        strategy = fsdp.apply(model, mesh.dp, init=init)
    assert not recorded.spans and len(asked) < len(sizes)
    # Besides the shards, one weight that is being cut, and one flat buffer that will be freed.
    assert max(live.samples) - before <= sum(sizes) / 4 + 4 * max(sizes) + 16_000
    assert_equal(strategy.full_state_dict(), plain.state_dict(), rtol=0)


# ---------------------------------------------------------------------- precision
@on_ranks(2)
def test_inputs_are_cast_and_gradients_travel_in_the_dtype_that_computes():
    """Mutants: weights alone are cast; shards' gradients stay in bf16."""
    torch.manual_seed(0)
    mesh, model, x = Mesh(dp=2), chain(), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    strategy = fsdp.apply(model, mesh.dp, compute_dtype=torch.bfloat16)
    with timeline.record() as recorded:
        found = model(x)
        found.float().square().sum().backward()
        strategy.finish_backward()
    assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), plain(x), atol=0.05)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    reduced = sum(span.num_bytes for span in recorded.select(name="reduce_scatter"))
    assert reduced == 4 * (6 * 6 + 6) * 2 / 2  # of the bytes of bf16, a half


# ---------------------------------------------------------------------- living with it
@on_ranks(2)
def test_generates_with_the_weights_of_now():
    """Mutants: weights that stay gathered although they have changed, by p.data as well, of which
    torch keeps no count; or after evaluation."""
    mesh = Mesh(dp=2)
    model, plain = models.llama(seed=mesh.rank), models.llama(seed=0)
    strategy = fsdp.apply(model, mesh.dp)
    prompt = tokens(0)
    for write in (torch.Tensor.mul_, lambda p, factor: p.data.mul_(factor), None):
        with torch.inference_mode():
            assert torch.equal(generate(model, prompt, 5, 0), generate(plain, prompt, 5, 0))
        assert models.gathered_bytes(strategy) == 0
        model(prompt)  # a forward whose backward never comes
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()) if write else ():
                write(p, -0.5)


# ---------------------------------------------------------------------- what blocks may do
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

    def forward(self, x: Tensor) -> Tensor:
        bias, states = None, (x.cos() * self.scale,)
        for layer in self.layers:
            x, _, (bias,) = layer(x, bias=bias, flag=True, states=states)
        return torch.cat([x, bias[None]])


def linear() -> nn.Module:
    return nn.Linear(6, 6)


class Recomputing(nn.Module):
    """Checkpoints inside of its blocks, around one and around two; lists inside of a dict."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            inside = lambda x: self.b(torch.sin(self.a(x)))  # noqa: E731
            return x + checkpoint(inside, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        pairs, last = (nn.ModuleList(make() for _ in range(3)) for make in (self.Pair, linear))
        scales = nn.ParameterList([nn.Parameter(torch.full((6,), 1.5))])
        self.parts = nn.ModuleDict({"pairs": pairs, "last": last, "scales": scales})

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.parts["pairs"]:
            x = pair(x) * self.parts["scales"][0]
        first, second, third = self.parts["last"]
        both = lambda x: second(torch.sin(first(x)))  # noqa: E731
        x = checkpoint(both, x, use_reentrant=False)
        return checkpoint(third, x, use_reentrant=False)


class Leaves(nn.Linear):
    """Leaves losses of its weights, and what these were computed from, in itself."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.register_buffer("gated", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        self.gated = (x * self.scale).square().sum()
        self.kept = (self.weight**3).sum()
        return out


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def of_leaves(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() + sum(block.gated + block.kept for block in model)


def of_two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)
    return model(x).sum() - model(x + 1).square().sum()


def of_two_backwards(model: nn.Module, x: Tensor, drop: bool = False) -> Tensor:
    model(x + 1).square().sum().backward()
    if drop:
        model.zero_grad()
    return model(x).sum()


def of_inputs_alone(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.requires_grad_(False)(x).sum(), x)
    return model.requires_grad_(True)(x * slope).sum()


BLOCKS = {
    "tuples, None and keywords": (Encodes, loss_of),
    "checkpoints": (Recomputing, loss_of),
    "losses in attributes": (lambda: nn.Sequential(*(Leaves() for _ in range(3))), of_leaves),
    "two forwards": (chain, of_two_forwards),
    "two backwards": (chain, of_two_backwards),
    "a step that zero_grad drops": (chain, partial(of_two_backwards, drop=True)),
    "gradients of inputs alone": (chain, of_inputs_alone),
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("what", BLOCKS)
@on_ranks(2)
def test_what_blocks_may_do(what, reshard):
    """Mutants: weights that are freed before their last use; a second forward that keeps the first
    one's; nodes of outputs that are older than what was taken out of the block."""
    assert_same_gradients(*BLOCKS[what], reshard_after_forward=reshard)


@on_ranks(2)
def test_the_order_may_change():
    """Blocks left out, or used twice. Mutant: a block prefetched in vain that stays."""
    orders = ([0, 1, 2, 3, 4, 5], [4, 4, 1, 0, 2], [3, 1, 3])
    assert_same_gradients(
        Layers,
        lambda model, x: model(x[0], order=orders[x[1] % 3]).square().sum(),
        lambda rank, step: (data(rank, step), step),
    )


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

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with pytest.raises(TypeError):  # ends a forward, and does not count as one that goes on
            model.encode(None)
        return model(x).square().sum() + model.encode(x).sum()

    assert_same_gradients(Methods, loss, forward_methods=("encode",))


# ---------------------------------------------------------------------- refused
@on_ranks(2)
def test_bad_options_are_refused_before_the_first_collective():
    mesh, hooked = Mesh(dp=2), Layers()
    hooked.head.weight.register_hook(lambda g: 2 * g)
    with timeline.record() as recorded:
        with pytest.raises(ValueError, match="the model has none of them"):
            fsdp.apply(Layers(), mesh.dp, blocks=(nn.Conv2d,))
        with pytest.raises(ValueError, match="head.weight has a hook on its gradient"):
            fsdp.apply(hooked, mesh.dp)
    assert not recorded.spans


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


def used_outside(model: Layers, x: Tensor) -> None:
    (model(x).sum() + model.blocks[1].weight.norm()).backward()


def taken_alone(model: Layers, x: Tensor) -> None:
    """A tensor out of a block whose output is not used."""
    taken: list[Tensor] = []
    block = model.blocks[1]
    inner = block.forward
    block.forward = lambda x: taken.append(inner(inner(x)).sum()) or inner(x)
    model(x)
    taken[0].backward()


REFUSED = [
    (lambda model, x: model.blocks[2](x), "Linear was called outside .*forward_methods="),
    (penalty, "create_graph=True"),
    (recomputed, "use_reentrant=False"),
    (recomputed_around, "use_reentrant=False"),
    (used_outside, r"blocks\.1\.weight was used outside"),
    (taken_alone, "modified by an inplace operation"),
    (lambda model, x: model.state_dict(), "full_state_dict"),
]


@on_ranks(2)
def test_what_would_go_wrong_is_refused():
    """On all ranks, with one sentence."""
    mesh = Mesh(dp=2)
    for call, words in REFUSED:
        model = Layers()
        strategy = fsdp.apply(model, mesh.dp)
        with pytest.raises(RuntimeError, match=words):
            call(model, data(mesh.rank))
        strategy.finish_backward()
        assert models.gathered_bytes(strategy) == 0


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
    for seconds, hidden in ranks(2, "link").run(_timed, False, num):
        assert seconds >= compute + (2 * num - 1) * COLLECTIVE  # every gather is waited for
        assert hidden <= num / calls + 0.05  # the reduce-scatters at most
    for seconds, hidden in ranks(2, "link").run(_timed, True, num):
        assert compute + 2 * COLLECTIVE <= seconds <= compute + 2 * COLLECTIVE + 0.1
        assert hidden >= 1 - 2 / calls - 0.15
    for seconds, _ in ranks(2, "link").run(_timed, True, num, reshard=False):  # weights that stay
        assert compute + 2 * COLLECTIVE <= seconds <= compute + 2 * COLLECTIVE + 0.1
