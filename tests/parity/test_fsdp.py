"""Fully sharded data parallelism equals one device, on 2, 3 and 4 ranks, for any module."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar.comm.mesh import Mesh
from minipar.parallel import fsdp
from minipar.train.data import share
from tests.parity import models
from tests.parity import tasks as shared
from tests.parity.harness import Outcome, Task, assert_parity, parallel, reference


class Encoder(nn.Module):
    """torch's own layers: dropout off, norms with biases, fused projections."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(61, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            for p in self.encoder.parameters():  # copies of one layer would start equal
                p.data = torch.randn_like(p) / 3
            self.head = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class Checkpointed(nn.Module):
    """Checkpoints around whole blocks, as foreign models have them; one block runs twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(61, 8)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)) for _ in range(3)
            )
            self.head = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in [*self.layers, self.layers[1]]:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def freeze_every_other_matrix(model: nn.Module) -> None:
    """Blocks of which a part is frozen, and one that is wholly."""
    models.frozen_embedding(model)
    for i, p in enumerate(model.model.layers.parameters()):
        p.requires_grad_(i % 2 == 1)  # frozen: a block's first norm, which backward needs last
    model.model.layers[1].requires_grad_(False)


TASKS = shared.TASKS | {
    "encoder": Task(Encoder),
    "checkpointed": Task(Checkpointed),
    "partly frozen": Task(models.untied_llama, fine_tune=freeze_every_other_matrix),
}

IN_LARGE = ["llama", "accumulating", "foreign", "sometimes used", "idle ranks"]

VARIANTS = {
    "kept": dict(reshard_after_forward=False),
    "without prefetch": dict(prefetch=0),
    "far ahead": dict(prefetch=5),
    "one unit": dict(blocks=()),
    "small units": dict(blocks=(nn.Linear,)),
    "dtypes given": dict(compute_dtype=torch.float64, reduce_dtype=torch.float64),
}


def attach(model: nn.Module, mesh: Mesh, **options) -> list[fsdp.FullySharded]:
    model.strategy = fsdp.apply(model, mesh.dp, **{"average": False, **options})
    return [model.strategy]


def attach_hybrid(model: nn.Module, mesh: Mesh, **options) -> list[fsdp.FullySharded]:
    """The ranks of dp as a grid: shards inside of a row, copies down the columns."""
    grid = Mesh(replica=2, shard=2)
    options |= dict(average=False, replicate_axis=grid.replica)
    model.strategy = fsdp.apply(model, grid.shard, **options)
    return [model.strategy]


def train(ranks, size: int, task: Task, mute: bool = False, **options) -> list[Outcome]:
    return ranks(size).run(
        parallel,
        task,
        {"dp": size},
        partial(attach, **options),
        mute=mute,
    )


FAST = ["llama", "foreign", "partly frozen"]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TASKS]
)
def test_equals_one_device(ranks, name):
    for outcome in train(ranks, 2, TASKS[name]):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", IN_LARGE)
def test_equals_one_device_on_more_ranks(ranks, size, name):
    for outcome in train(ranks, size, TASKS[name]):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["accumulating", "foreign"])
def test_every_variant_equals_one_device(ranks, variant, name):
    for outcome in train(ranks, 2, TASKS[name], **VARIANTS[variant]):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulating", "foreign", "checkpointed"])
def test_hybrid_sharding_equals_one_device(ranks, name):
    """2 x 2 ranks. Mutants: no sum over replicas; one per microbatch, of what was summed before."""
    for outcome in ranks(4).run(
        parallel,
        TASKS[name],
        {"dp": 4},
        attach_hybrid,
    ):
        assert_parity(outcome, reference(TASKS[name]))
        assert set(outcome.sent) == {"dp", "shard", "replica"}  # dp: the trainer's own sums


def _forward(task: Task, size: int) -> list[Tensor]:
    """This rank's logits before and after sharding, on a seed of its own; then in evaluation."""
    mesh = Mesh(dp=size)
    model = task.build(mesh.rank).double()
    [(inputs, _)] = task.microbatches_of(0, mesh.rank, size)
    found = [model(inputs)]
    attach(model, mesh)
    found.append(model(inputs))
    with torch.no_grad():
        found.append(model(inputs))
    with torch.inference_mode():
        found.append(model(inputs).clone())
    return [logits.detach() for logits in found]


def test_forward_equals_one_device(ranks):
    """Mutant: ranks that keep the weights they were born with."""
    task = TASKS["llama"]
    expected = task.build(0).double()(task.batch(0)[0])
    for rank, (before, *after) in enumerate(ranks(3).run(_forward, task, 3)):
        mine = share(expected, rank, 3)  # [B/n, T, V]
        for logits in after:
            assert torch.allclose(logits, mine, rtol=1e-10, atol=1e-12)
        assert torch.allclose(before, mine) == (rank == 0)


def test_without_communication_parity_is_violated(ranks):
    """The mutant: weights are gathered once, before training, but no gradient is reduced."""
    for outcome in train(ranks, 2, TASKS["llama"], mute=True):
        with pytest.raises(AssertionError, match="step 0"):
            assert_parity(outcome, reference(TASKS["llama"]))
        ours, theirs = outcome.gradients[0], reference(TASKS["llama"]).gradients[0]
        assert not any(torch.allclose(ours[name], theirs[name]) for name in theirs)
