"""bf16 that computes beside float32 that learns: what ranks have is what one process has.

Bits of bf16 depend on which numbers a product sums, so the law of parity holds in two ways: to the
bit, where ranks multiply the same matrices as one process with as many microbatches does (dp, ZeRO,
pipelines); and to 1e-10 for every plan, if what computes is in float64 as well.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.parallel import compose
from minipar.parallel.base.shards import region_of
from minipar.parallel.plan import Plan
from minipar.train.optim import make_optimizer
from minipar.train.precision import Precision
from minipar.train.step import train_step
from tests.law.harness import (
    Outcome,
    assert_parity,
    attach_plan,
    gradients_of_plan,
    muted,
    parallel,
    serial,
)
from tests.law.plans import Case

SHAPE = LlamaConfig(64, 32, 64, num_layers=4, num_heads=4, num_kv_heads=2)
MIXTURE = replace(SHAPE, moe=MoEConfig(4, 2, 32, balance="microbatch"))


class Run:
    """A model under a plan, that trains on the same sequences whatever the plan is."""

    def __init__(self, text: str, shape: LlamaConfig = SHAPE, **options: str) -> None:
        self.plan = Plan.parse(text)
        self.mesh = Mesh(**self.plan.mesh_sizes())
        self.model = Llama(shape, seed=self.mesh.rank)  # that of rank 0 counts
        make = partial(make_optimizer, lr=1e-2, weight_decay=0.1)
        self.composed = compose.apply(self.model, self.mesh, self.plan, make, **options)
        self.num_steps = 0

    def step(self) -> float:
        """Two microbatches of two sequences, of whichever rank; return the loss."""
        generator = torch.Generator().manual_seed(self.num_steps)
        tokens = torch.randint(64, (2, 2, 17), generator=generator)
        axis, mine = self.mesh.joint("dp", "ep"), self.plan.microbatches
        tokens = tokens[axis.rank * mine :][:mine]
        batch = [self.composed.shard((t[:, :-1], t[:, 1:])) for t in tokens]
        how, self.num_steps = Precision(self.plan.autocast), self.num_steps + 1
        composed = self.composed
        told = train_step(
            self.model, [composed], composed.optimizer, batch, composed.axis, precision=how
        )
        return told.loss.item()

    def check_rounded(self) -> None:
        """Assert that what computes is what learns, rounded, on this rank: to the bit."""
        full = self.composed.parts.data.full_state_dict()
        if hasattr(self.composed.optimizer, "synchronize"):
            self.composed.optimizer.synchronize()
        for name, p in self.model.named_parameters():
            own = region_of(p).cut(full[name]).view_as(p)
            assert p.dtype == torch.bfloat16 and own.dtype == torch.float32
            assert torch.equal(p, own.bfloat16()), name
            assert self.num_steps == 0 or not torch.equal(p.float(), own), name


def train(text: str, steps: int = 3, shape: LlamaConfig = SHAPE, mute: bool = False):
    """Return losses, masters, and gradients of the last step."""
    run = Run(text, shape)
    has_both = run.plan.precision == "bf16" and run.plan.zero < 3 and not mute
    if has_both:
        run.check_rounded()
    losses = []
    with muted() if mute else nullcontext():
        for _ in range(steps):
            losses.append(run.step())
            if has_both:
                run.check_rounded()
    return losses, run.composed.full_state_dict(), run.composed.full_gradients()


@cache
def alone(precision: str = "bf16", shape: LlamaConfig = SHAPE):
    return train(f"microbatches=2,precision={precision}", shape=shape)


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of any gradient, of its norm."""
    return max(((found[name] - g).norm() / g.norm()).item() for name, g in expected.items())


SAME_PRODUCTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,checkpointing=full"]
SAME_PRODUCTS += [f"pp=2,microbatches=2,zero={zero}" for zero in (0, 1)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("text", SAME_PRODUCTS)
def test_equals_one_process_to_the_bit(ranks, text):
    """Losses, gradients, masters; and on each rank what computes is what learns, rounded. Mutants:
    gradients summed in bf16; masters that begin, or go on, with the digits of bf16."""
    losses, masters, gradients = alone()
    for found in ranks(2).run(train, f"{text},precision=bf16"):
        assert found[0] == losses != alone("float32")[0]
        for name, expected in masters.items():
            assert torch.equal(found[1][name], expected), name
            assert torch.equal(found[2][name], gradients[name]), name


OTHER_PRODUCTS = ["tp=2,microbatches=2", "cp=2,microbatches=2", "dp=2,zero=3"]
OTHER_PRODUCTS += ["tp=2,sequence_parallel,microbatches=2", "pp=2,zero=3,microbatches=2"]
OTHER_PRODUCTS += ["pp=2,schedule=dualpipe_v,microbatches=2"]
CLOSE = 0.03  # of a gradient's norm, in the first step: some 2^-8 for each layer


def some_slow(texts: list[str]) -> list:
    return [pytest.param(t, marks=pytest.mark.slow) if i % 2 else t for i, t in enumerate(texts)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("text", some_slow(OTHER_PRODUCTS))
def test_is_close_to_one_process_where_other_numbers_are_rounded(ranks, text):
    """As close as bf16 is to float32. The control: without communication none is."""
    gradients = train("microbatches=2,precision=bf16", steps=1)[2]
    wide = train("microbatches=2", steps=1)[2]
    assert 0 < farthest(gradients, wide) < CLOSE
    for found in ranks(2).run(train, f"{text},precision=bf16", 1):
        assert farthest(found[2], gradients) < CLOSE
    if text in ("tp=2,microbatches=2", "dp=2,zero=3"):
        for found in ranks(2).run(train, f"{text},precision=bf16", 1, mute=True):
            assert not farthest(found[2], gradients) < 10 * CLOSE  # or no number at all


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather"])
def test_experts_work_in_bf16_too(ranks, dispatch):
    """On other ranks they multiply other rows together, so bits differ; routers compute wide."""
    gradients = train("microbatches=2,precision=bf16", 1, MIXTURE)[2]
    for found in ranks(2).run(train, f"ep=2,precision=bf16,dispatch={dispatch}", 1, MIXTURE):
        assert farthest(found[2], gradients) < CLOSE


# ---------------------------------------------------------------------- the law, in float64
PLANS = ["dp=2,tp=2,zero=1,sequence_parallel", "dp=2,pp=2,zero=2,microbatches=3"]
PLANS += ["pp=2,tp=2,schedule=dualpipe_v,microbatches=4", "dp=2,cp=2,zero=2,checkpointing=full"]
PLANS += ["dp=2,pp=2,microbatches=3,schedule=zb_h1", "dp=4"]


def exact(case: Case, working: bool) -> Outcome:
    """Train in float64, with masters or without."""
    plan = replace(case.plan, precision="bf16" if working else "float32")
    with mock.patch.dict(compose.WORKING_DTYPES, bf16=torch.float64):
        return parallel(
            case.task,
            case.mesh_sizes(),
            partial(attach_plan, plan=plan),
            gradients=gradients_of_plan,
        )


@pytest.mark.slow
@pytest.mark.parametrize("text", some_slow(PLANS))
def test_masters_in_the_dtype_of_what_computes_change_no_bit(ranks, text):
    """And so the law of parity holds for this path as for the plain one. Mutants: a gradient that
    is left in the working weight; a weight that is handed out before its master has stepped."""
    case = Case(Plan.parse(text))
    for found, plain in zip(
        ranks(4).run(exact, case, True), ranks(4).run(exact, case, False), strict=True
    ):
        assert_parity(found, serial(case.task))
        assert found.losses == plain.losses and found.norms == plain.norms
        for name, expected in plain.after.items():
            assert torch.equal(found.after[name], expected), name


# ---------------------------------------------------------------------- bytes, checkpoints
def _sent(text: str) -> tuple[dict[str, int], int]:
    """Bytes along dp of a step and of the weights that it hands out, by verb; and of parameters."""
    run = Run(text)
    run.step()
    with timeline.record() as recorded:
        run.step()
        if hasattr(run.composed.optimizer, "synchronize"):
            run.composed.optimizer.synchronize()
    found: dict[str, int] = {}
    for span in recorded.select(kind="comm", axis="dp"):
        found[span.name] = found.get(span.name, 0) + span.num_bytes
    return found, sum(p.numel() for p in run.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_weights_are_gathered_in_two_bytes_and_gradients_reduced_in_four(ranks, zero):
    """Mutants: masters that are sent; gradients that are rounded on their way."""
    for found, numel in ranks(2).run(_sent, f"dp=2,zero={zero},precision=bf16"):
        assert found["all_gather"] == pytest.approx(2 * numel / 2, rel=0.01)
        assert found["reduce_scatter"] == pytest.approx(4 * numel / 2, rel=0.01)
    wide, numel = ranks(2).run(_sent, f"dp=2,zero={zero}")[0]
    assert wide["all_gather"] == pytest.approx(4 * numel / 2, rel=0.01)


def _messages(precision: str) -> int:
    run = Run(f"pp=2,microbatches=2,precision={precision}")
    with timeline.record() as recorded:
        run.step()
    return recorded.bytes_by_axis()["pp"]


def test_stages_send_two_bytes_a_number(ranks):
    activations = 2 * 2 * 16 * SHAPE.hidden_size  # microbatches [2, 16, D], one way from each rank
    for precision, size in {"bf16": 2, "autocast-bf16": 4}.items():
        for found in ranks(2).run(_messages, precision):
            assert found == pytest.approx(size * activations, rel=0.02)


def _stop_and_go_on(first: str, then: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters after three steps: in one go, and with a checkpoint before the last."""
    run = Run(first)
    run.step(), run.step()
    weights = run.composed.full_state_dict()
    state = copy.deepcopy(run.composed.full_optimizer_state())  # some are those that it steps
    run.step()
    other = Run(then)
    other.composed.load_full_state_dict(weights)
    other.composed.load_full_optimizer_state(state)
    other.check_rounded()
    other.num_steps = 2
    other.step()
    return run.composed.full_state_dict(), other.composed.full_state_dict()


PAIRS = [("dp=2", "dp=2"), ("dp=2,zero=1", "dp=2,zero=2"), ("dp=2,zero=2", "dp=2")]
PAIRS += [("dp=2", "pp=2,microbatches=2"), ("pp=2,microbatches=2,zero=1", "dp=2,zero=1")]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("first, then", PAIRS)
def test_goes_on_exactly_by_any_plan(ranks, first, then):
    """The checkpoint has the masters. Mutants: that of the rounded weights; masters not loaded."""
    plans = f"{first},precision=bf16", f"{then},precision=bf16"
    for whole, resumed in ranks(2).run(_stop_and_go_on, *plans):
        for name, expected in whole.items():
            assert expected.dtype == torch.float32
            assert torch.equal(resumed[name], expected), name
