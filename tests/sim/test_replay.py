"""A replayed step keeps the laws of all steps, on a machine whose speeds are round numbers."""

from dataclasses import dataclass, replace
from functools import cache

import pytest

from minipar.emulate import operations
from minipar.model.llama import LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.pipeline import simulate
from minipar.parallel.plan import Plan
from minipar.sim.replay import replay
from minipar.sim.trace import trace
from minipar.sim.tracer import Compute
from tests.sim.jobs import flops

CONFIG = LlamaConfig(64, 64, 128, num_layers=4, num_heads=4, num_kv_heads=2)


@dataclass(frozen=True)
class Round:
    """A device and a network, each of one speed."""

    bytes_per_second: float = 1e9  # of links
    latency: float = 0.0
    flops: float = 1e9
    gpus: int = 8

    @property
    def device(self):
        return self

    def seconds_of_matmul(self, m, n, k, dtype, *, batch):
        return 2 * batch * m * n * k / self.flops

    def seconds_of_attention(
        self, batch, heads, queries, keys, head_dim, dtype, *, causal, backward
    ):
        return 4 * batch * heads * queries * keys * head_dim * (1 + backward) / self.flops

    def seconds_of_bytes(self, num_bytes):
        return 0.0

    def seconds_of_collective(self, verb, num_bytes, ranks, nodes):
        return self.latency + num_bytes / self.bytes_per_second


FAST = Round(bytes_per_second=1e18)


def computing(step) -> float:
    """Seconds that a rank computes in a step, in the mean."""
    spans = (span.duration for span in step.timeline if span.kind != "comm")
    return sum(spans) / len(step.timeline.ranks)


@cache
def traced(text, **sizes):
    return trace(CONFIG, Plan.parse(text), **{"seq_len": 32, **sizes})


def test_a_rank_alone_computes_all_the_time():
    """Seconds are FLOPs / speed. Mutant: a step counted from the start of the first."""
    found = traced("dp=1,microbatches=3")
    step = replay(found, FAST)
    assert step.seconds == pytest.approx(flops(found.ranks[0]) / 1e9, rel=0.1)
    assert computing(step) == pytest.approx(step.seconds) == step.timeline.duration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "m"), [("gpipe", 4, 4), ("1f1b", 4, 8), ("1f1b", 2, 3), ("zb_h1", 4, 8)]
)
def test_bubble_is_that_of_the_schedule(schedule, stages, m):
    """Beside `pipeline.simulate`, with its costs set to what a stage of this model takes."""
    plan = Plan(pp=stages, microbatches=m, schedule=schedule)
    config = replace(CONFIG, vocab_size=8)  # the head is next to nothing
    step = replay(trace(config, plan, seq_len=32), FAST)
    work = [(span.kind, span.duration) for span in step.timeline.select(rank=1)]
    forward = sum(s for kind, s in work if kind == "forward")
    weights = sum(s for kind, s in work if kind == "weight_gradient") or forward
    backward = sum(s for kind, s in work if kind == "backward")
    inputs = backward if schedule == "zb_h1" else backward - weights
    costs = simulate.Costs(forward / m, inputs / m, weights / m)
    expected = simulate.bubble(simulate.simulate(plan.make_schedule(), costs))
    assert step.seconds / computing(step) - 1 == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_stages_reduce_at_once(zero):
    """None waits for what another reduces. Mutant: backward waits for buckets that have left."""
    step = replay(traced(f"dp=2,pp=4,zero={zero},microbatches=4"), Round(bytes_per_second=1e6))
    verb = "reduce_scatter" if zero else "all_reduce"
    spans = [s for s in step.timeline if s.name == verb and s.axis == "dp" and s.duration > 0.01]
    firsts = [min(s.start for s in spans if s.rank == rank) for rank in step.timeline.ranks]
    lasts = [max(s.end for s in spans if s.rank == rank) for rank in step.timeline.ranks]
    assert max(firsts) < min(lasts)


def test_who_waits_goes_on_when_the_call_has_ended():
    """Calls of tp, of a second each, are added to what is computed. Mutant: as soon as it has
    begun, so that what comes after it is computed meanwhile."""
    found = traced("tp=2")
    slow = Round(bytes_per_second=1e18, flops=1e6)
    step, alone = replay(found, replace(slow, latency=1.0)), replay(found, slow).seconds
    calls = len(step.timeline.select(rank=0, kind="comm"))
    assert 0.2 * calls < alone < 5 * calls
    assert step.seconds == pytest.approx(calls + alone, rel=0.01)
    assert step.exposed["tp"] == pytest.approx(calls, rel=0.01)


@pytest.mark.slow
def test_routers_do_not_wait_for_weights_that_are_fetched_ahead():
    """What each layer counts is few bytes, over the ranks whose weights are on their way.

    Mutants: one process group for both; a replay that knows but one group along an axis.
    """
    seconds = {}
    for balance in ("microbatch", "batch"):
        config = replace(CONFIG, moe=MoEConfig(8, 2, 128, balance=balance))
        found = trace(config, Plan.parse("dp=4,zero=3"), sequences=4, seq_len=64)
        seconds[balance] = replay(found, Round(bytes_per_second=2e7)).seconds
    assert seconds["batch"] == pytest.approx(seconds["microbatch"], rel=0.01)


def test_what_zero_1_leaves_to_the_next_step_is_in_its_time():
    """Parameters arrive in the next forward. Mutant: one step played instead of two."""
    slow = Round(bytes_per_second=1e6)
    one, none = replay(traced("dp=8,zero=1"), slow), replay(traced("dp=8"), slow)
    assert one.seconds == pytest.approx(2 * none.seconds, rel=0.1)  # two calls for one


@pytest.mark.slow
def test_a_host_sets_the_pace_where_kernels_are_short():
    """A second per layer and direction, and another for a recomputation.

    Mutant: one each time that a block is entered, which a recomputation with calls on tp leaves.
    """
    full = "checkpointing=full"
    for text, directions in (("dp=2", 2), (f"dp=2,{full}", 3), (f"tp=2,{full}", 3)):
        step = replay(traced(text), FAST, host=1.0)
        assert step.seconds == pytest.approx(directions * CONFIG.num_layers, rel=0.01)


def test_attention_may_be_slower_than_its_kernel_by_itself():
    """Mutants: products are slower as well; attention is not."""
    found = traced("dp=2")
    one, three = (computing(replay(found, FAST, attention=factor)) for factor in (1.0, 3.0))
    works = [e.work for e in found.ranks[0].events() if type(e) is Compute]
    kernels = sum(operations.seconds_of(work, FAST) for work in works if work.work == "attention")
    assert three - one == pytest.approx(2 * kernels) and kernels > 0
