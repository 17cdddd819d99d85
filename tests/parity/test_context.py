"""Tokens apart equals one device: ring, gather and Ulysses, alone and beside other strategies.

The gradients are summed by a data strategy over the joint axis of dp and cp.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama
from minipar.model.masks import document_mask, document_positions
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import context, ddp, fsdp, tensor, ulysses, zero
from minipar.train.data import IGNORE
from minipar.train.step import Microbatch, train_step
from tests.parity import models
from tests.parity.harness import (
    Outcome,
    Task,
    assert_parity,
    make_optimizer,
    parallel,
    reference,
)

METHODS = {
    "ring": dict(order="zigzag"),
    "plain ring": dict(order="plain"),
    "gather": dict(order="zigzag", exchange="gather"),
    "plain gather": dict(order="plain", exchange="gather"),
    "math": dict(order="zigzag", kernel="math"),
    "ulysses": None,
}
QUICK = [
    m if m in ("ring", "ulysses") else pytest.param(m, marks=pytest.mark.slow) for m in METHODS
]


@dataclass(frozen=True)
class Packed(Task):
    """Several documents in a row, which do not look at each other."""

    def microbatches_of(self, step: int, rank: int, size: int) -> list[Microbatch]:
        result = []
        for inputs, targets in super().microbatches_of(step, rank, size):
            documents = (inputs % 9 == 0).cumsum(1)
            result.append(
                (inputs, targets, document_positions(documents), document_mask(documents))
            )
        return result


@dataclass(frozen=True)
class Silent(Task):
    """No target in the second half of any sequence: in plain order, nothing for the last rank."""

    def batch(self, step: int) -> Microbatch:
        inputs, targets = super().batch(step)
        targets[:, self.seq_len // 2 :] = IGNORE
        return inputs, targets


def selective_llama(seed: int) -> Llama:
    """Keeps the results of matrix products and of attention, computes the rest again."""
    model = models.llama(seed)
    checkpoint_activations(model, "selective")
    return model


task = partial(Task, seq_len=24)
TASKS = {
    "llama": task(models.llama),
    "untied": task(models.untied_llama),
    "recomputing": task(models.recomputing_llama),
    "selective": task(selective_llama),
    "accumulating": task(models.llama, microbatches=3, num_sequences=5),
    "one kv head": task(partial(models.llama, num_kv_heads=1)),
    "no groups": task(partial(models.llama, num_kv_heads=4)),
    "documents": Packed(models.llama, seq_len=24),
    "silent": Silent(models.llama, seq_len=24),
    "six heads": task(partial(models.llama, hidden_size=24, num_heads=6)),
    "six documents": Packed(partial(models.llama, hidden_size=24, num_heads=6), seq_len=24),
}
ON_TWO = [
    "untied",
    "recomputing",
    "selective",
    "accumulating",
    "no groups",
    "one kv head",
    "silent",
]


def attach(model, mesh, method, other="none"):
    if other == "tensor":
        model.strategy = tensor.apply(model, mesh.tp)
    options, axis = METHODS[method], mesh.joint("dp", "cp")
    apply = ulysses.apply if options is None else partial(context.apply, **options)
    attention = apply(model, mesh.cp)
    if other == "zero":
        make = partial(zero.ShardedOptimizer, bucket_mb=0.004)
        optimizer = make_optimizer(model, make, torch.optim.AdamW, axis)
        data = model.zero = zero.apply(model, axis, optimizer=optimizer, average=False)
    elif other == "fsdp":
        data = model.strategy = fsdp.apply(model, axis, average=False)
    else:
        data = ddp.apply(model, axis, bucket_mb=0.004, average=False)
    return [attention, data]


def cut(microbatch, mesh, method):
    options = METHODS[method]
    if options is None:
        return ulysses.shard_batch(microbatch, mesh.cp)
    return context.shard_batch(microbatch, mesh.cp, options["order"])


def train(
    ranks, name: str, method: str, mute: bool = False, steps: int = 3, **sizes: int
) -> list[Outcome]:
    own = dataclasses.replace(TASKS[name], steps=steps)
    options = dict(mute=mute, cut=partial(cut, method=method))
    pool = ranks(math.prod(sizes.values()))
    return pool.run(parallel, own, sizes, partial(attach, method=method), **options)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("method", QUICK)
@pytest.mark.parametrize("name", ["llama", "documents"])
def test_equals_one_device(ranks, name, method):
    """Gradients, norms, losses and weights; mutants: positions that start at 0 on every rank; the
    mask of the wrong keys; gradients of keys that stay where they were computed."""
    for outcome in train(ranks, name, method, cp=2):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name, method", models.crossed(ON_TWO, list(METHODS)))
def test_every_model_equals_one_device(ranks, name, method):
    for outcome in train(ranks, name, method, cp=2):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("size, method", models.crossed([3, 4], list(METHODS), every=2))
def test_more_ranks_equal_one_device(ranks, size, method):
    """Three ranks is the first ring in which the gradients of keys are passed on, not just home."""
    heads = "six " if size == 3 else ""
    for name in ["six heads" if size == 3 else "llama", f"{heads}documents"]:
        for outcome in train(ranks, name, method, cp=size):
            assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, method",
    models.crossed(["llama", "accumulating", "documents", "silent"], list(METHODS), every=6),
)
def test_with_ddp_equals_one_device(ranks, name, method):
    """Mutant: gradients summed over dp alone, or divided by cp."""
    for outcome in train(ranks, name, method, dp=2, cp=2):
        assert_parity(outcome, reference(TASKS[name]))


def attach_beside(model, mesh, method, other):
    """With another strategy in the place of ddp, or beside it."""
    attention, data = attach(model, mesh, method, other)
    if other == "tensor":
        return [attention, data, model.strategy]
    return [attention, data]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("other", ["zero", "fsdp", "tensor"])
def test_beside_other_strategies_equals_one_device(ranks, other, method):
    """Mutants: heads counted in the configuration; shards over dp alone."""
    sizes = {"cp": 2, "tp": 2} if other == "tensor" else {"dp": 2, "cp": 2}
    for outcome in ranks(4).run(
        parallel,
        TASKS["documents"],
        sizes,
        partial(attach_beside, method=method, other=other),
        cut=partial(cut, method=method),
    ):
        assert_parity(outcome, reference(TASKS["documents"]))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("method", ["ring", "math", "gather", "ulysses"])
def test_without_communication_parity_is_violated(ranks, method):
    for outcome in train(ranks, "llama", method, mute=True, cp=2):
        with pytest.raises(AssertionError, match="loss of step 0"):
            assert_parity(outcome, reference(TASKS["llama"]))


def _forward(name, method, size):
    mesh = Mesh(cp=size)
    model = TASKS[name].build(0).double()
    attach(model, mesh, method)
    [microbatch] = TASKS[name].microbatches_of(0, 0, 1)
    inputs, _, *rest = cut(microbatch, mesh, method)
    order = (METHODS[method] or {"order": "plain"})["order"]
    return context.unshard(model(inputs, *rest).detach(), mesh.cp, order, dim=1)


@pytest.mark.parametrize("method", QUICK)
@pytest.mark.parametrize("name", ["llama", "documents"])
def test_forward_equals_one_device(ranks, name, method):
    """Mutant: one block too few, or the output of a block not rescaled when another is merged."""
    [(inputs, _, *rest)] = TASKS[name].microbatches_of(0, 0, 1)
    expected = TASKS[name].build(0).double()(inputs, *rest)
    for logits in ranks(4).run(_forward, name, method, 4):
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- the loss, by tokens
def _counted(name, data_axes):
    """Sizes of a step, as every rank reports them; microbatches of very uneven length."""
    mesh = Mesh(dp=2, cp=2)
    own = dataclasses.replace(TASKS[name], microbatches=3)
    model = own.build(mesh.rank).double()
    strategies = attach(model, mesh, "plain ring")
    whole = own.microbatches_of(0, mesh.dp.rank, mesh.dp.size)
    batches = [cut(microbatch, mesh, "plain ring") for microbatch in whole]
    num_own = sum((targets != IGNORE).sum().item() for _, targets in batches)
    optimizer, axis = make_optimizer(model), mesh.joint(*data_axes)
    result = train_step(model, strategies, optimizer, batches, axis)
    return num_own, result.num_tokens.item(), result.loss.item(), result.grad_norm.item()


def test_trap_10_tokens_are_counted_once_over_dp_and_cp(ranks):
    """dp=2, cp=2, three uneven microbatches, and two ranks without any target: no nan, no mean of
    means, and no token counted by all ranks of cp. Mutant: dp alone as the axis of the data."""
    expected = reference(TASKS["silent"])
    found = ranks(4).run(_counted, "silent", ("dp", "cp"))
    assert [num_own for num_own, *_ in found[1::2]] == [0, 0]  # the second half of all sequences
    assert sum(num_own for num_own, *_ in found) == expected.num_tokens[0]
    for _, num_tokens, loss, norm in found:
        assert num_tokens == expected.num_tokens[0]
        assert loss == pytest.approx(expected.losses[0], rel=1e-10)
        assert norm == pytest.approx(expected.norms[0], rel=1e-10)
    for _, num_tokens, _, norm in ranks(4).run(_counted, "llama", ("dp",)):
        assert num_tokens < reference(TASKS["llama"]).num_tokens[0]
        assert norm > 1.1 * reference(TASKS["llama"]).norms[0]


# ---------------------------------------------------------------------- bytes
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sends_what_the_docstring_says(ranks, size):
    own = TASKS["llama"]
    config = own.build(0).config
    tokens, kept = own.num_sequences * own.seq_len, (size - 1) / size
    head = tokens * config.head_dim * 8  # bytes of one head of everything, in float64
    ring = 3 * kept * 2 * config.num_kv_heads * head  # forward once, backward twice
    kv_heads = max(config.num_kv_heads, size)  # 2 repeated for 4 ranks
    swapped = 2 * kept * (2 * config.num_heads + 2 * kv_heads) * head / size
    for method in METHODS:
        expected = config.num_layers * (swapped if method == "ulysses" else ring)
        for outcome in train(ranks, "llama", method, steps=2, cp=size):
            assert outcome.sent == {"cp": pytest.approx(expected + _ddp_bytes(own, size), abs=50)}


def _ddp_bytes(own: Task, size: int) -> float:
    parameters = list(own.build(0).parameters())
    gradients = sum(8 * p.numel() for p in parameters) + 8 * len(parameters)
    return 2 * (size - 1) / size * (gradients + 16)  # and the trainer's two numbers
