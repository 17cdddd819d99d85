"""ZeRO in its corners: optimizers, saved states, accumulation, memory, overlap, failures.

That training equals one device is proved by tests/law/test_law.py. Here a plain copy of the
model and of the optimizer computes on every rank what all ranks together should, and is compared.
"""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab.memory import LiveBytes
from minipar.observe import timeline
from minipar.parallel import zero
from minipar.parallel.zero import ShardedOptimizer
from tests.on_ranks import on_ranks
from tests.parallel.layers import ALL, USED, Layers, data, loss_of

pytestmark = pytest.mark.trains

STAGES = pytest.mark.parametrize("stage", [1, 2])
ELEMENTWISE = {
    torch.optim.Adam: dict(lr=0.01, amsgrad=True),
    torch.optim.AdamW: dict(lr=0.01),
    torch.optim.Adamax: dict(lr=0.01),
    torch.optim.Adadelta: dict(lr=0.5),
    torch.optim.Adagrad: dict(lr=0.05),
    torch.optim.ASGD: dict(lr=0.05),
    torch.optim.NAdam: dict(lr=0.01),
    torch.optim.RAdam: dict(lr=0.01),
    torch.optim.RMSprop: dict(lr=0.01, momentum=0.5, centered=True),
    torch.optim.Rprop: dict(lr=0.01),
    torch.optim.SGD: dict(lr=0.05, momentum=0.9, nesterov=True),
}


def attach(model, axis, stage=1, *, bucket_mb=7e-4, average=False, **options):
    """Buckets of two layers each, or so."""
    options = options or dict(lr=0.01)
    named = model.named_parameters()
    optimizer = ShardedOptimizer(named, AdamW, axis, bucket_mb=bucket_mb, **options)
    return zero.apply(model, axis, optimizer=optimizer, stage=stage, average=average), optimizer


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


# ---------------------------------------------------------------------- any elementwise optimizer
def _groups(model: nn.Module) -> list[dict]:
    """Two groups, one parameter frozen."""
    params = list(model.parameters())
    params[3].requires_grad_(False)
    decayed, plain = [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain}]


def _sharded(model: nn.Module, cls, axis, bucket_mb=4e-4):
    optimizer = ShardedOptimizer(_groups(model), cls, axis, bucket_mb=bucket_mb, **ELEMENTWISE[cls])
    return zero.apply(model, axis, optimizer=optimizer), optimizer


def _step(model, optimizer, uses=ALL, strategy=None) -> None:
    """All ranks see the same data, and average."""
    optimizer.zero_grad()
    loss_of(model, 0, 0, uses).backward()
    if strategy is not None:
        strategy.finish_backward()
    optimizer.step()
    if strategy is not None:
        optimizer.synchronize()


def _assert_same_state(ours: dict, theirs: dict) -> None:
    for group in ours["param_groups"]:
        group.pop("param_names", None)  # which an optimizer of `parameters()` does not know
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"]
    for i, entries in theirs["state"].items():
        if i not in ours["state"]:  # frozen: Adagrad makes a state that it never uses
            assert not any(v.any() for v in entries.values())
            continue
        assert ours["state"][i].keys() == entries.keys()
        torch.testing.assert_close(ours["state"][i], entries, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ELEMENTWISE)
@on_ranks(2)
def test_any_elementwise_optimizer(cls):
    """Steps, schedules, groups, frozen and unused parameters, whole states in and out.

    Mutants: learning rates that do not reach the inner optimizer; a step for unused parameters;
    states joined in another order; loading that forgets the count of steps.
    """
    axis, model = Mesh(dp=2).dp, Layers(seed=0)
    twin = copy.deepcopy(model)
    plain = cls(_groups(twin), **ELEMENTWISE[cls])
    strategy, ours = _sharded(model, cls, axis)
    assert isinstance(ours, torch.optim.Optimizer) and len(ours.buckets) >= 4
    halve = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (ours, plain)]
    for uses in (ALL, (0, 1, 5), ALL):
        _step(model, ours, uses, strategy)
        _step(twin, plain, uses)
        for scheduler in halve:
            scheduler.step()
        assert_same(model, twin)
    with pytest.raises(RuntimeError, match="full_optimizer_state"):
        ours.state_dict()  # of this rank alone
    whole, theirs = strategy.full_optimizer_state(ours), plain.state_dict()
    _assert_same_state(whole, theirs)
    fresh_model, fresh_twin = copy.deepcopy(twin), copy.deepcopy(twin)
    fresh = cls(_groups(fresh_twin), **ELEMENTWISE[cls])
    fresh.load_state_dict(copy.deepcopy(whole))
    from_plain, again = _sharded(fresh_model, cls, axis, bucket_mb=2e-4)
    from_plain.load_full_optimizer_state(again, theirs)  # and shares nothing with it
    _step(fresh_model, again, ALL, from_plain)
    _step(fresh_twin, fresh)
    assert_same(fresh_model, fresh_twin)
    _assert_same_state(from_plain.full_optimizer_state(again), fresh.state_dict())


# ---------------------------------------------------------------------- what does not fit
REFUSED = [
    ("zero.apply(model, Mesh().tp, optimizer=fine)", "sharded along dp, not tp"),
    ("apply(make(own[:2], AdamW))", r"lacks \['layers.1.weight'"),
    ("apply(make([*own, *Layers(0).parameters()], AdamW))", "it lacks none"),
    ("make(own, torch.optim.Muon)", "Muon may look at whole"),
    ("apply(fine).load_full_optimizer_state(fine, AdamW(own[:2]).state_dict())", "is shorter"),
]


@pytest.mark.parametrize("call, says", REFUSED)
def test_refused_before_the_first_collective(call, says):
    model, axis = Layers(seed=0), Mesh().dp
    own = list(model.parameters())
    make = lambda params, cls, **options: ShardedOptimizer(params, cls, axis, **options)  # noqa: E731
    apply = lambda optimizer, **options: zero.apply(model, axis, optimizer=optimizer, **options)  # noqa: E731
    fine = make(own, AdamW, lr=0.1)
    with timeline.record() as recorded, pytest.raises(ValueError, match=says):
        eval(call, {**globals(), **locals()})
    assert not recorded.spans


def test_a_step_before_apply_is_refused():
    """Mutant: a model whose strategy was forgotten never moves."""
    optimizer = ShardedOptimizer(Layers(seed=0).parameters(), AdamW, Mesh().dp, lr=0.1)
    with pytest.raises(RuntimeError, match="no gradients come here before zero.apply"):
        optimizer.step()


def test_parameters_that_moved_are_noticed():
    """Mutant: weights that no optimizer reaches any more."""
    model = Layers(seed=0)
    strategy, optimizer = attach(model, Mesh().dp)
    model.float().double()
    loss_of(model, 0).backward()
    strategy.finish_backward()
    with pytest.raises(RuntimeError, match="was moved or cast after its ShardedOptimizer"):
        optimizer.step()


@STAGES
@on_ranks(2)
def test_a_backward_into_a_finished_sum_is_refused(stage):
    """Mutants: `model.zero_grad()`, which does not reach the pieces, and gradients add up; a
    gradient that stays on this rank, as its bucket has been sent."""
    model, axis = Layers(seed=0), Mesh(dp=2).dp
    strategy, optimizer = attach(model, axis, stage)

    def refused() -> None:
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) of the ShardedOptimizer"):
            loss_of(model, axis.rank).backward()

    loss_of(model, axis.rank).backward()
    refused()
    strategy.finish_backward()
    refused()
    strategy.finish_backward()
    model.zero_grad()  # and the step is skipped
    refused()
    strategy.finish_backward()
    optimizer.zero_grad()
    loss_of(model, axis.rank).backward()
    strategy.finish_backward()
    optimizer.step()
    refused()  # nobody called zero_grad()
    strategy.finish_backward()
    optimizer.zero_grad()
    with strategy.no_sync():
        loss_of(model, axis.rank).backward()
        if stage == 2:
            refused()


# ---------------------------------------------------------------------- gradients
def _trains(stage, size, uses, microbatches=1, make=Layers, average=False, bucket_mb=3.5e-4):
    """Train beside a plain copy that sees the data of all ranks; `uses(step, rank, m)`."""
    mesh = Mesh(dp=size)
    model, twin = make(seed=mesh.rank), make(seed=0)
    strategy, optimizer = attach(model, mesh.dp, stage, average=average, bucket_mb=bucket_mb)
    assert len(optimizer.buckets) >= 3
    plain = AdamW(twin.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        for m in range(microbatches):
            seed, is_last = step * microbatches + m, m == microbatches - 1
            losses = [loss_of(twin, rank, seed, uses(step, rank, m)) for rank in range(size)]
            (sum(losses) / (size if average else 1)).backward()
            with nullcontext() if is_last else strategy.no_sync(), timeline.record() as recorded:
                loss_of(model, mesh.rank, seed, uses(step, mesh.rank, m)).backward()
            if uses(step, mesh.rank, m) == ALL and (is_last or stage == 2):
                assert len(recorded.spans) >= 3  # while backward goes on
            if not is_last:
                whole = sum(bucket.whole is not None for bucket in optimizer.buckets)
                assert whole == 0 if stage == 2 else whole > 0
        strategy.finish_backward()
        unused = [p.grad is None for p in twin.parameters()]
        for p, is_unused in zip(model.parameters(), unused, strict=True):
            assert (p.grad is None) == (p.piece.grad is None) == is_unused
        plain.step()
        optimizer.step()
        optimizer.synchronize()
        assert_same(model, twin)
    _assert_same_state(strategy.full_optimizer_state(optimizer), plain.state_dict())


@pytest.mark.mostly_slow
@STAGES
def test_trap_18_accumulation_with_unbalanced_gradients(ranks, stage):
    """Which parameters get gradients differs by rank, by microbatch and by step.

    Mutants: the shard is overwritten by the next microbatch; the first microbatch decides what
    counts as used; a bucket that some rank does not fill is never sent.
    """
    parts = [(0, 1, 2), (3, 4), (1, 5), ALL, (2,)]

    def uses(step, rank, m):
        return parts[(step + 2 * rank + m) % 5]

    ranks(2).run(_trains, stage, 2, uses, microbatches=3)
    ranks(3).run(_trains, stage, 3, uses, microbatches=2, average=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
@STAGES
def test_trap_16_unused_parameters(ranks, stage, name):
    """Mutants: a hang; a step (decay, momentum) for what no rank used."""
    ranks(2).run(_trains_in_used_memory, stage, 2, lambda step, rank, m: USED[name](step, rank))


def _trains_in_used_memory(*given) -> None:
    """What nobody has written to is NaN, as it may be where memory is used again.

    Buckets hold two layers: of one that a rank has used, and one that it has not.
    """
    torch.use_deterministic_algorithms(True)
    try:
        _trains(*given, bucket_mb=7e-4)
    finally:
        torch.use_deterministic_algorithms(False)


class Tied(Layers):
    """An embedding that is the head, too, between layers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 4)
        self.embedding, self.head = nn.Embedding(7, 6).double(), self.layers[3]
        self.embedding.weight = nn.Parameter(torch.cat([self.head.weight, self.head.weight[:1]]))
        self.head.weight = self.embedding.weight
        self.head.bias = None

    def forward(self, x: Tensor, uses: None = None) -> Tensor:
        return super().forward(self.embedding((x[:, 0] * 100).long() % 7))


@STAGES
@on_ranks(2)
def test_trap_15_tied_weights(stage):
    """Mutants: reduced when the head's part has arrived; two owners; counted twice."""
    _trains(stage, 2, lambda *_: None, make=Tied)
    model = Tied(seed=0)
    strategy, optimizer = attach(model, Mesh(dp=2).dp, stage, bucket_mb=3e-4)
    assert model.head.weight is model.embedding.weight
    found = [p for bucket in optimizer.buckets for p in bucket.parameters]
    assert len(found) == 7 and sum(p is model.head.weight for p in found) == 1
    state = strategy.full_state_dict()
    assert state["layers.3.weight"] is state["embedding.weight"]


class Few(Layers):
    """Three numbers, each of them in a bucket of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 0)
        self.factors = nn.ParameterList([torch.full((1,), seed + i + 0.5) for i in range(3)])
        self.double()

    def forward(self, x: Tensor, uses: None = None) -> Tensor:
        return x * self.factors[0] + self.factors[1] * self.factors[2]


@STAGES
@on_ranks(4)
def test_fewer_numbers_than_ranks(stage):
    """Mutant: a rank without a piece skips a collective, or fails."""
    _trains(stage, 4, lambda *_: None, make=Few, bucket_mb=1e-5)


@on_ranks(2)
def test_a_penalty_on_gradients_follows_a_graph_of_them():
    """Mutant: a gradient loses its graph when it moves into a bucket."""
    model, twin = Layers(seed=0), Layers(seed=0)
    strategy, _ = attach(model, Mesh(dp=2).dp)
    for m in (model, twin):
        with strategy.no_sync() if m is model else nullcontext():
            loss_of(m, 0).backward(create_graph=True)
        sum(p.grad.square().sum() for p in m.parameters()).backward()
    strategy.finish_backward()
    for name, gradient in strategy.full_gradients().items():
        torch.testing.assert_close(gradient, 2 * twin.get_parameter(name).grad.detach())


# ---------------------------------------------------------------------- traffic and memory
def _memory(stage: int, size: int) -> tuple[int, int]:
    """Return (highest, after backward): bytes of model state on this rank, in a quiet step."""
    mesh, seen = Mesh(dp=size), []
    with LiveBytes() as live:
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))
        options = dict(lr=0.01, foreach=False)
        strategy, optimizer = attach(model, mesh.dp, stage, bucket_mb=0.14, **options)
        x = torch.ones(1, 128)
        for step in range(6):
            live.samples.clear()
            optimizer.zero_grad()
            with strategy.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            strategy.finish_backward()
            after_backward = live.now
            optimizer.step()
            optimizer.synchronize()
            if step:  # building the model, and the first step, have their own
                seen.append((live.peak, after_backward))
    return tuple(map(min, zip(*seen, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@STAGES
def test_memory_is_that_of_the_formula(ranks, stage, size):
    """Within 2 %, with gradients accumulated over two microbatches.

    Gloo's threads may let go of buckets, and of where they arrived, a moment late: so the least of
    several steps counts, within two buckets. Mutants: whole gradients kept to the end (stage 2), or
    beyond it; a copy of the weights or of the gradients; state for everything.
    """
    numbers = 16 * (128 * 128 + 128)
    weights, state, bucket = 4 * numbers, 8 * numbers, 2 * 4 * (128 * 128 + 128)
    shard = weights / size
    expected = {1: weights + weights, 2: weights + shard + 2 * bucket}[stage] + state / size
    expected += {1: 3, 2: 2}[stage] * bucket  # where slices of all ranks arrive, to be added up
    between = weights + shard + state / size
    for peak, after_backward in ranks(size).run(_memory, stage, size):
        assert 0.98 * expected < peak < 1.02 * expected + 2 * bucket
        assert 0.98 * between < after_backward < 1.02 * between + 2 * bucket


# ---------------------------------------------------------------------- weights on their way
class DirectReader(Layers):
    """Reads the weights of layers that it never calls, before and after those that it calls."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.factors = nn.ParameterList([torch.full((6,), 0.5 + seed)]).double()

    def forward(self, x: Tensor, uses: None = None) -> Tensor:
        x = x @ self.layers[0].weight * self.factors[0]
        return super().forward(x, (1, 2, 3, 4)) @ self.layers[5].weight


def _reads_weights(how: str) -> bool:
    axis, model, twin = Mesh(dp=2).dp, DirectReader(seed=0), DirectReader(seed=0)
    strategy, optimizer = attach(model, axis)
    plain = AdamW(twin.parameters(), lr=0.01)
    link.check_calls(False)
    try:
        for _ in range(2):
            link.use("none")
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, axis.rank, 0).backward()
            sum(loss_of(twin, rank, 0) for rank in range(2)).backward()
            strategy.finish_backward()
            link.use(link.Link("slow", 0.05, math.inf))
            optimizer.step()
            plain.step()
            stale = [bucket.weights.clone() for bucket in optimizer.buckets]
            if how == "forward":
                torch.testing.assert_close(model(data(1)), twin(data(1)))
            elif how == "load_state_dict":  # not to be overwritten by what arrives later
                changed = {k: v + 1 for k, v in twin.state_dict().items()}
                model.load_state_dict(changed)
                twin.load_state_dict(changed)
            else:
                torch.testing.assert_close(model.state_dict(), twin.state_dict())
            optimizer.synchronize()
            assert_same(model, twin)
        pairs = zip(optimizer.buckets, stale, strict=True)
        return any(not torch.equal(bucket.weights, old) for bucket, old in pairs)
    finally:
        link.use("none")
        link.check_calls(True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forward", "state_dict", "load_state_dict"])
def test_nobody_reads_weights_before_they_arrive(ranks, how):
    """Mutants: no wait before a module, before one that reads others' weights, or before a read."""
    assert all(ranks(2, "link").run(_reads_weights, how))


@on_ranks(2)
def test_weights_are_read_and_written_when_they_are_here():
    """As they are averaged, or a critic's are clamped. Mutant: nobody waits, so what is read is
    old, and what is on its way comes over what was written."""
    model, alone, axis = Layers(seed=0), Layers(seed=0), Mesh(dp=2).dp
    strategy, optimizer = attach(model, axis)
    single = AdamW(alone.parameters(), lr=0.01)
    for step in range(3):
        loss_of(model, axis.rank, step).backward()
        sum(loss_of(alone, rank, step) for rank in range(2)).backward()
        strategy.finish_backward()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
        if step == 2:
            assert_same(copy.deepcopy(model), alone)
        for each in (model, alone):
            for p in each.parameters():
                p.data.clamp_(-0.1, 0.1)
        assert_same(model, alone)
