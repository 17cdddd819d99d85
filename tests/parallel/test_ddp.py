"""Data parallelism in its corners: accumulation, unused weights, order, overlap, failures.

That training equals one device is proved by tests/law/test_law.py. Here every rank computes the
gradients of *all* ranks on a plain copy of the model (`expected`), and compares.
"""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.observe import timeline
from minipar.parallel import ddp
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel.layers import (
    ALL,
    BACKWARD,
    FORWARD,
    NUM_LAYERS,
    SLACK,
    USED,
    Branches,
    Layers,
    Reentrant,
    loss_of,
)
from tests.parallel.timed import SlowLayer, fastest, slow_model

VERSIONS = pytest.mark.parametrize("version", ddp.VERSIONS)
IN_BUCKETS = pytest.mark.parametrize("version", ["bucketed", "overlapped"])


def expected(model: nn.Module, losses, divide_by: int = 1) -> list[Tensor | None]:
    """Gradients of ``sum(losses(model)) / divide_by``, without communication."""
    twin = copy.deepcopy(model)
    with timeline.record() as recorded:
        (sum(losses(twin)) / divide_by).backward()
    assert not recorded.spans
    return [p.grad for p in twin.parameters()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found: list[Tensor | None], wanted: list[Tensor | None], rtol=1e-12) -> None:
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (ours is None) == (theirs is None), f"parameter {i}: {ours} instead of {theirs}"
        if theirs is not None:
            error = (ours - theirs).abs().max().item()
            assert error <= rtol * theirs.abs().max().item(), f"parameter {i} is off by {error}"


def attach(model: nn.Module, axis, version: str, **options):
    """Apply with buckets of two layers each, or so."""
    return ddp.apply(model, axis, version=version, **{"bucket_mb": 7e-4, **options})


def check_step(model, strategy, rank, step, loss=loss_of, size=2, divide_by=1) -> None:
    """Assert that a step has the gradients of all ranks; ``loss(model, rank, step)``."""
    model.zero_grad()
    wanted = expected(model, lambda m: [loss(m, r, step) for r in range(size)], divide_by)
    loss(model, rank, step).backward()
    strategy.finish_backward()
    assert_equal(gradients(model), wanted)


def sent_order(model: nn.Module):
    """Note which parameters travel: a list of tuples of names, and the patch that fills it."""
    names = {p: name for name, p in model.named_parameters()}
    order, real = [], ddp.Bucket.launch

    def noting(bucket, axis, op):
        order.append(tuple(names[p] for p in bucket.parameters))
        real(bucket, axis, op)

    return order, mock.patch.object(ddp.Bucket, "launch", noting)


# ---------------------------------------------------------------------- what is reduced
@VERSIONS
@on_ranks(2)
def test_trap_03_gradients_are_reduced_weights_are_not(version):
    """Mutant: the hook all-reduces the parameter that it is handed, not its gradient."""
    mesh = Mesh(dp=2)
    model = Layers(seed=mesh.rank)
    strategy = attach(model, mesh.dp, version, average=False)
    with torch.no_grad():  # an average of equal weights would go unnoticed
        for p in model.parameters():
            p.add_(0.1 * (mesh.rank + 1))
    for step in range(3):
        model.zero_grad()
        before = copy.deepcopy(model)
        own = expected(model, lambda m, s=step: [loss_of(m, mesh.rank, s)])
        both = all_gather_object(own, mesh.dp)
        assert not any(torch.allclose(a, b) for a, b in zip(*both, strict=True))
        loss_of(model, mesh.rank, step).backward()
        strategy.finish_backward()
        for p, same in zip(model.parameters(), before.parameters(), strict=True):
            assert torch.equal(p, same)
        assert_equal(gradients(model), [a + b for a, b in zip(*both, strict=True)])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("average", [True, False])
@VERSIONS
@on_ranks(2)
def test_trap_05_the_accumulated_gradient_is_reduced(version, average):
    """Mutant: a hook on the tensor reduces only what the last microbatch adds."""
    mesh = Mesh(dp=2)
    model = Layers(seed=mesh.rank)
    strategy = attach(model, mesh.dp, version, average=average)
    for step in range(0, 9, 3):

        def loss(m, rank, step):
            first = [loss_of(m, rank, step + i) for i in range(2)]
            if m is model:
                with strategy.no_sync(), timeline.record() as recorded:
                    sum(first).backward()
                assert not recorded.spans
                first = []
            return sum(first, loss_of(m, rank, step + 2))

        check_step(model, strategy, mesh.rank, step, loss, divide_by=2 if average else 1)


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("forward_inside", [True, False])
@IN_BUCKETS
@on_ranks(2)
def test_trap_16_no_sync_is_about_backward(version, forward_inside, backward_inside):
    """Mutants: a `no_sync` that looks at the forward; one that is not undone."""
    mesh = Mesh(dp=2)
    model = Layers(seed=mesh.rank)
    strategy = attach(model, mesh.dp, version, average=False)
    for step in range(3):
        model.zero_grad()
        own = expected(model, lambda m, s=step: [loss_of(m, mesh.rank, s)])
        wanted = expected(model, lambda m, s=step: [loss_of(m, r, s) for r in range(2)])
        with timeline.record() as recorded:
            with strategy.no_sync() if forward_inside else nullcontext():
                loss = loss_of(model, mesh.rank, step)
            with strategy.no_sync() if backward_inside else nullcontext():
                loss.backward()
            for bucket in strategy.buckets:
                if bucket.pending is not None:
                    bucket.pending.wait()
        if backward_inside:
            assert not recorded.spans
            assert_equal(gradients(model), own)
        elif version == "overlapped":
            assert len(recorded.spans) == len(strategy.buckets)
        strategy.finish_backward()
        assert_equal(gradients(model), wanted)


def test_no_sync_is_undone_by_an_exception_and_nests():
    strategy = ddp.apply(Layers(0), Mesh().dp)
    with pytest.raises(KeyError), strategy.no_sync():
        with strategy.no_sync():
            pass
        assert not strategy.synchronises
        raise KeyError
    assert strategy.synchronises


# ---------------------------------------------------------------------- order of the buckets
@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_trap_16_buckets_go_in_one_order_on_all_ranks(size):
    """Mutant: send a bucket when it is full, whatever its turn."""
    mesh = Mesh(dp=size)
    model = Branches(seed=mesh.rank)
    strategy = attach(model, mesh.dp, "overlapped", average=False, bucket_mb=3.5e-4)
    uses = [tuple(range(6)), (3, 1, 5, 0, 4, 2), (5, 4, 3, 2, 1, 0)]
    arrivals = []
    for i, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: arrivals.append(i))
    for step in range(4):
        arrivals.clear()
        order, patch = sent_order(model)
        loss = lambda m, r, s: loss_of(m, r, s, uses[(r + s // 2) % 3])  # noqa: E731
        with patch:
            check_step(model, strategy, mesh.rank, step, loss, size)
        assert len(order) == len(strategy.buckets) >= 3
        orders, arrived = zip(*all_gather_object((order, arrivals), mesh.dp), strict=True)
        assert len({tuple(a) for a in arrived}) == size  # or nothing is proved
        assert all(o == orders[0] for o in orders)


def test_trap_16_several_buckets_are_filled():
    """Mutant: parameters left out, or in two buckets; everything in one bucket."""
    for version in ("bucketed", "overlapped"):
        model = models.llama(0)
        strategy = ddp.apply(model, Mesh().dp, version=version, reduce=ddp.all_reduce_bucket)
        assert len(strategy.buckets) >= 5
        packed = [id(p) for bucket in strategy.buckets for p in bucket.parameters]
        assert packed == [id(p) for p in reversed(list(model.parameters()))]
        for bucket in strategy.buckets:
            num_bytes = sum(p.nbytes for p in bucket.parameters)
            assert num_bytes <= strategy.capacity or len(bucket.parameters) == 1


def test_the_first_buckets_and_the_last_are_small():
    """Mutant: all alike, so that the link starts late and ends late."""
    parameters = [torch.nn.Parameter(torch.zeros(25)) for _ in range(40)]  # of 100 bytes
    sizes = [sum(p.nbytes for p in own) for own in ddp.fill_buckets(parameters, capacity=800)]
    assert sizes == [200, 400, 800, 800, 800, 800, 200]


@VERSIONS
@on_ranks(2)
def test_trap_16_reentrant_checkpoints_that_share_a_weight(version):
    """Such a weight receives its gradient in three parts. Mutant: one is added to a buffer that is
    being reduced, and lost."""
    mesh = Mesh(dp=2)
    model = Reentrant(seed=mesh.rank)
    strategy = attach(model, mesh.dp, version, average=False)
    if version in ("overlapped", "tuned"):
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss_of(model, mesh.rank).backward()
        strategy.finish_backward()
    else:
        check_step(model, strategy, mesh.rank, 0)


# ---------------------------------------------------------------------- unused parameters
def _unused(version, average, name):
    mesh, uses = Mesh(dp=2), USED[name]
    model = Layers(seed=mesh.rank)
    strategy = attach(model, mesh.dp, version, average=average, bucket_mb=3.5e-4)
    loss = lambda m, rank, step: loss_of(m, rank, step, uses(step, rank))  # noqa: E731
    for step in range(4):
        check_step(model, strategy, mesh.rank, step, loss, divide_by=2 if average else 1)
        used = {i for i in ALL for rank in range(2) if i in uses(step, rank)}
        assert [p.grad is None for p in model.parameters()] == [
            i not in used for i in ALL for _ in range(2)
        ]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", USED)
@VERSIONS
def test_trap_16_unused_parameters(ranks, version, name):
    """Mutants: wait for gradients that never come; zeros for None; None where others have some."""
    ranks(2).run(_unused, version, True, name)
    ranks(2).run(_unused, version, False, name)


# ---------------------------------------------------------------------- what ranks start with
class Mixture(nn.Module):
    """Parameters and buffers of all sorts, different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.plain = nn.Parameter(torch.randn(5, 7, generator=generator))
        self.transposed = nn.Parameter(torch.randn(7, 5, generator=generator).T)
        self.coarse = nn.Parameter(torch.randn(5, 7, generator=generator).bfloat16())
        self.frozen = nn.Parameter(torch.randn(5, generator=generator), requires_grad=False)
        self.tied = self.plain
        self.register_buffer("mask", torch.arange(6) % 2 == rank % 2)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("hidden", torch.randn(3, generator=generator), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.plain * self.transposed + self.tied).mT + self.frozen
        return y + (x.bfloat16() @ self.coarse.mT).float()


def _tensors_of(model):
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("version", ["overlapped", "tuned"])
@on_ranks(2)
def test_ranks_start_equal_and_the_state_is_a_copy(version):
    """Mutants: no broadcast of buffers, of frozen parameters; dtypes mixed; a state of views."""
    mesh = Mesh(dp=2)
    model = Mixture(mesh.rank)
    ids = {n: id(p) for n, p in model.named_parameters()}
    before = all_gather_object(_tensors_of(model), mesh.dp)
    assert not any(torch.equal(before[0][n], before[1][n]) for n in before[0])
    strategy = attach(model, mesh.dp, version, average=False, bucket_mb=1)  # all would fit into one
    after = _tensors_of(model)
    assert all(torch.equal(after[name], before[0][name]) for name in before[0])
    assert not model.transposed.is_contiguous() and model.tied is model.plain
    assert {n: id(p) for n, p in model.named_parameters()} == ids
    shares = [torch.full((2, 7), rank + 1.0) for rank in range(2)]
    for _ in range(3):
        kinds = [{p.dtype for p in bucket.parameters} for bucket in strategy.buckets]
        assert sorted(map(len, kinds)) == [1, 1] and len(set.union(*kinds)) == 2
        model.zero_grad()
        wanted = expected(model, lambda m: [m(x).sum() for x in shares])
        model(shares[mesh.rank]).sum().backward()
        strategy.finish_backward()
        assert_equal(gradients(model), wanted, rtol=1e-6)
    state = strategy.full_state_dict()
    assert list(state) == list(model.state_dict())
    assert state["tied"] is state["plain"]
    state["plain"].zero_(), state["mask"].zero_()
    assert model.plain.abs().min() > 0 and model.mask.any()


# ---------------------------------------------------------------------- overlap
def _timed(version, bucket_seconds, count=3):
    mesh = Mesh(dp=2)
    model, x = slow_model(NUM_LAYERS, FORWARD, BACKWARD), torch.ones(2, 64)
    strategy = ddp.apply(model, mesh.dp, version=version, bucket_mb=SlowLayer.NUM_BYTES / 1e6)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()
        strategy.finish_backward()

    return fastest(step, mesh.dp, SlowLayer.NUM_BYTES / bucket_seconds, count=count)


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize("bucket_seconds", [0.03, 0.07], ids=["compute-bound", "link-bound"])
def test_overlap_hides_all_but_the_last_bucket(ranks, bucket_seconds):
    """Mutants: buckets sent after backward; waiting for each bucket before going on."""
    compute, comm = NUM_LAYERS * (FORWARD + BACKWARD), NUM_LAYERS * bucket_seconds
    for seconds, hidden in ranks(2, "link").run(_timed, "bucketed", bucket_seconds, 2):
        assert compute + comm <= seconds <= compute + comm + SLACK
        assert hidden < 0.05
    # Layers go through two stations one after the other; the slower one sets the pace.
    pace = max(BACKWARD, bucket_seconds)
    best = NUM_LAYERS * FORWARD + BACKWARD + (NUM_LAYERS - 1) * pace + bucket_seconds
    assert best + SLACK < compute + comm  # the two ranges do not touch
    for seconds, hidden in ranks(2, "link").run(_timed, "overlapped", bucket_seconds):
        assert best <= seconds <= best + SLACK
        hideable = (NUM_LAYERS - 1) * min(BACKWARD, bucket_seconds) / comm
        assert hideable - 0.15 < hidden < hideable + 0.05


# ---------------------------------------------------------------------- self-tuned buckets
def _tuned(wire):
    mesh = Mesh(dp=2)
    model, x = slow_model(8, 0.0, 0.01 * (1 + mesh.rank)), torch.ones(2, 64)
    strategy = ddp.apply(model, mesh.dp, version="tuned", bucket_mb=SlowLayer.NUM_BYTES / 1e6)
    link.use(wire)
    try:
        for _ in range(3):
            barrier(mesh.dp)
            model.zero_grad()
            model(x).sum().backward()
            strategy.finish_backward()
        return [len(bucket.parameters) for bucket in strategy.buckets]
    finally:
        link.use("none")


SLOW_CALLS = link.Link("slow calls", 0.03, 1e9)  # 60 ms each, as an all-reduce has two steps
SLOW_BYTES = link.Link("slow bytes", 0.0, SlowLayer.NUM_BYTES / 0.018)


@pytest.mark.slow
def test_buckets_tune_themselves_to_the_link(ranks):
    """Few where a call takes long, many where a byte does; the slowest rank's times count.

    Backward takes 20 ms per layer on the slower rank. Mutants: each rank its own cut; times of the
    first backward, which sends nothing early; a cut that is computed and not used.
    """
    cuts = []
    for wire in (SLOW_CALLS, SLOW_BYTES):
        cut, other = ranks(2, "link").run(_tuned, wire)
        assert cut == other and sum(cut) == 8
        cuts.append(cut)
    assert len(cuts[0]) < len(cuts[1])


# ---------------------------------------------------------------------- what real models need
@pytest.mark.parametrize("version", ["naive", "bucketed", "overlapped"])
@pytest.mark.parametrize("set_to_none", [True, False, None])
@on_ranks(2)
def test_a_mean_may_be_left_in_place_a_sum_may_not(version, set_to_none):
    """`zero_grad()` was forgotten. Mutant: the sum of the ranks is summed over them again."""
    rank, dp = Mesh(dp=2).rank, Mesh(dp=2).dp
    for average in (True, False):
        model, twin = Layers(seed=0), Layers(seed=0)
        strategy = attach(model, dp, version, average=average)
        for step in range(3):
            if set_to_none is not None:
                model.zero_grad(set_to_none)
                twin.zero_grad(set_to_none)
            uses = [ALL, (0, 1), (2, 3)][step]  # also where no gradient is added to a sum
            sum(loss_of(twin, r, step, uses) for r in range(2)).backward()
            if average or set_to_none or step == 0:
                loss_of(model, rank, step, uses).backward()
                strategy.finish_backward()
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    ours = torch.zeros_like(p) if p.grad is None else (1 + average) * p.grad
                    theirs = torch.zeros_like(p) if q.grad is None else q.grad
                    torch.testing.assert_close(ours, theirs)
            else:
                with pytest.raises(RuntimeError, match="call zero_grad"):
                    loss_of(model, rank, step, uses).backward()


@IN_BUCKETS
@on_ranks(2)
def test_a_penalty_on_gradients(version):
    """Of no_sync, with a graph. Mutant: a bucket that cuts the graph of what it takes in."""
    rank, model = Mesh(dp=2).rank, Layers(seed=0)
    strategy = attach(model, Mesh(dp=2).dp, version, average=False)

    def penalised(m: nn.Module, rank: int, step: int) -> Tensor:
        with strategy.no_sync() if m is model else nullcontext():
            loss_of(m, rank, step).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in m.parameters())
        m.zero_grad()
        return loss_of(m, rank, step) + penalty

    for step in range(2):
        check_step(model, strategy, rank, step, penalised)


@on_ranks(2)
def test_models_that_differ_between_ranks_are_refused():
    """As many numbers on each rank, in another order. Mutant: they are taken as they come."""
    axis = Mesh(dp=2).dp
    sizes = (3, 5) if axis.rank == 0 else (5, 3)
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    says = r"ranks 0 and 1 of dp have different models: 0 \(3,\) of torch.float32 and 0 \(5,\)"
    with pytest.raises(ValueError, match=says):
        ddp.apply(model, axis)
    model = Layers(0)
    model.layers[axis.rank].requires_grad_(False)
    with pytest.raises(ValueError, match="different models: .* that learns and "):
        ddp.apply(model, axis)


@pytest.mark.parametrize("version", ["naive", "tuned"])
@on_ranks(2)
def test_a_reducer_that_nobody_would_call_is_refused(version):
    with pytest.raises(ValueError, match="reduces exactly; with reduce="):
        ddp.apply(Layers(0), Mesh(dp=2).dp, version=version, reduce=print)
