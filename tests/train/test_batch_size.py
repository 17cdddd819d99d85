"""The size of a batch: ramps, the noise of gradients, and no sample lost when it changes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.parallel import ddp
from minipar.train.batch_size import (
    NoiseScale,
    lr_factor,
    microbatches_of,
    parse_ramp,
    ramped,
)
from minipar.train.data import IGNORE, Batches, Sequences
from minipar.train.precision import LossScaler, Precision
from minipar.train.step import train_step

# ---------------------------------------------------------------------- by a plan


def test_a_ramp_is_read_and_followed():
    ramp = parse_ramp("64@100, 128@200")
    assert ramp == [(100, 64), (200, 128)]
    sizes = {step: ramped(step, 32, ramp) for step in (0, 99, 100, 199, 200, 9999)}
    assert sizes == {0: 32, 99: 32, 100: 64, 199: 64, 200: 128, 9999: 128}
    assert [lr_factor(rule, 128, 32) for rule in ("sqrt", "linear", "fixed")] == [2.0, 4.0, 1.0]
    for wrong in ("", "64", "0@3", "64@0", "a@3", "64@3,8@3"):
        with pytest.raises(ValueError, match="ramp .* is not like 64@100"):
            parse_ramp(wrong)


@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 4), st.integers(1, 6))
def test_microbatches_never_become_larger(first, batch_size, microbatches, num_ranks):
    """Memory stays. Caught: a batch that grows by longer microbatches; one more than needed."""
    count = microbatches_of(batch_size, first, microbatches, num_ranks)
    rows = math.ceil(first / (num_ranks * microbatches))
    assert 1 <= math.ceil(batch_size / (num_ranks * count)) <= rows
    assert count == 1 or batch_size > num_ranks * (count - 1) * rows


# ---------------------------------------------------------------------- the estimate


@pytest.mark.slow
def test_the_estimate_has_no_bias_with_uneven_shares():
    """Gradients of known mean and covariance. Mutant: ranks that count alike, here beside it."""
    torch.manual_seed(0)
    mean = torch.randn(40, dtype=torch.float64)
    tokens = torch.tensor([2.0, 24.0, 4.0], dtype=torch.float64)
    sigma = 3.0
    truth = 40 * sigma**2 / float(mean.square().sum())
    noise, alike = NoiseScale(decay=0.999), NoiseScale(decay=0.999)
    total = tokens.sum()
    for _ in range(4000):
        of_ranks = mean + sigma * torch.randn(3, 40).double() / tokens[:, None].sqrt()
        squares = of_ranks.square().sum(1)
        large = (tokens / total) @ of_ranks
        weighted = [float((tokens / total) @ squares), 3.0]
        noise.update(weighted, float(total), float(large.norm()))
        alike.update([float(squares.mean()), 3.0], float(total), float(large.norm()))
    assert noise.tokens == pytest.approx(truth, rel=0.1)
    assert alike.tokens > 1.5 * truth


SHAPE = LlamaConfig(61, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1)


def uneven_batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets [12, 7], four rows for each of 3 ranks, the last without any target."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(61, (12, 7), generator=generator)
    targets = torch.randint(61, (12, 7), generator=generator)
    targets[2, 3:], targets[5:7], targets[8:] = IGNORE, IGNORE, IGNORE
    return inputs, targets


def observed_step(version: str, loss_scale: float | None):
    """Two steps of two microbatches on 3 ranks: what was summed, tokens, norm."""
    mesh = Mesh(dp=3)
    model, noise = Llama(SHAPE, seed=0).double(), NoiseScale()
    options = dict(version=version, bucket_mb=0.004, average=False, reduce=noise.watch())
    strategies = [ddp.apply(model, mesh.dp, **options)]
    inputs, targets = (t.chunk(3)[mesh.rank] for t in uneven_batch())
    batch = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    how = Precision()
    how.scaler = loss_scale and LossScaler(init_scale=loss_scale)
    numbers = []
    for _ in range(2):  # the second is no rehearsal
        own = model, strategies, optimizer, batch, mesh.dp
        result = train_step(*own, max_norm=0.1, precision=how, noise=noise)
        numbers.append((*result.noise.tolist(), int(result.num_tokens), result.grad_norm.item()))
    return numbers


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "version, loss_scale", [("overlapped", None), ("bucketed", None), ("overlapped", 1024.0)]
)
def test_train_step_notes_each_ranks_own_gradient(ranks, version, loss_scale):
    """Against gradients computed one rank after the other.

    Mutants: the norm of a bucket that has been reduced, of one microbatch only, of scaled gradients
    or of those of the step before, too; a rank without tokens that counts.
    """
    weighted, total, whole = 0.0, 0, None
    for inputs, targets in zip(*(t.chunk(3) for t in uneven_batch()), strict=True):
        model = Llama(SHAPE, seed=0).double()
        num_tokens = int((targets != IGNORE).sum())
        if num_tokens == 0:
            continue
        token_loss(model(inputs), targets).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        weighted += float((gradient / num_tokens).square().sum()) * num_tokens
        total += num_tokens
        whole = gradient if whole is None else whole + gradient
    expected = weighted / total, 2, total, float((whole / total).norm())
    assert 0 < total < 56
    for numbers in ranks(3).run(observed_step, version, loss_scale):
        for found in numbers:
            assert found == pytest.approx(expected, rel=1e-6 if loss_scale else 1e-10)


# ---------------------------------------------------------------------- the data
def test_each_sample_once_under_changing_batches_and_shares():
    """Also when the ranks are others on the way. Caught: a place counted in steps, or per rank.

    All microbatches of a step have one shape; a rank has as many as its share says.
    """
    sequences = Sequences(torch.arange(20 * 3 + 1), 3)
    seen, state = [], Batches(sequences, 4, seed=1).state_dict()
    for batch_size, shares in [(4, [1, 1]), (7, [2, 0]), (1, [1, 2]), (9, [1, 3, 1]), (4, [2])]:
        found, shapes, loaders = [], set(), []
        for rank, count in enumerate(shares):
            loaders.append(Batches(sequences, 4, rank, len(shares), seed=1))
            loaders[-1].load_state_dict(state)
            loaders[-1].deal(batch_size, shares)
            rows = next(loaders[-1].forever())
            assert len(rows) == count
            shapes |= {x.shape for x, _ in rows}
            found += [i for x, y in rows for i in x[(y != IGNORE).any(1), 0].tolist()]
        assert shapes == {(math.ceil(batch_size / sum(shares)), 3)}
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
        seen += sorted(found)
    assert sorted(seen[:20]) == [3 * i for i in range(20)]  # an epoch ends with a batch of its own
    assert len(seen) == 20 + 4 and state["epoch"] == 1
