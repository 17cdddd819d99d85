"""Tensor parallelism equals one device: plain, sequence parallel and overlapped; 2, 3, 4 ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from minipar.comm.mesh import Mesh
from minipar.parallel import ddp, tensor
from tests.parity import models
from tests.parity.harness import Outcome, Task, assert_parity, parallel, reference


def freeze_matrices(model: nn.Module) -> None:
    """All but the vectors, as in some kinds of fine-tuning."""
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)


six_heads = partial(models.llama, num_heads=6, num_kv_heads=3, head_dim=4)

# The vocabulary of 61 words is cut unevenly by 2, 3 and 4; 7 tokens are padded by `sequence`.
TASKS = {
    "llama": Task(models.llama),  # 4 heads on 2 of keys: copies of those on 4 ranks
    "untied": Task(models.untied_llama, seq_len=12),
    "one kv head": Task(partial(models.llama, num_kv_heads=1)),
    "no grouping": Task(partial(models.llama, tie_embeddings=False, num_kv_heads=4), seq_len=8),
    "recomputing": Task(models.recomputing_llama),
    "accumulating": Task(models.llama, microbatches=3, num_sequences=5),
    "six heads": Task(six_heads),
    "six heads, one kv head": Task(partial(six_heads, num_kv_heads=1), seq_len=12),
    "frozen": Task(models.untied_llama, fine_tune=models.frozen_embedding),
    "norms of heads": Task(partial(models.llama, qk_norm="head"), seq_len=8),
    "only vectors": Task(models.untied_llama, seq_len=12, fine_tune=freeze_matrices),
}

MODES = {
    "plain": {},
    "sequence": dict(sequence=True),
    "overlap": dict(sequence=True, overlap=True),
}

ON_TWO = [name for name in TASKS if not name.startswith("six")]
ON_THREE = ["six heads", "six heads, one kv head"]
ON_FOUR = ["llama", "untied", "one kv head", "accumulating", "norms of heads"]


def attach(model: nn.Module, mesh: Mesh, **options) -> list:
    model.strategy = tensor.apply(model, mesh.tp, **options)
    return [model.strategy]


def attach_with_ddp(model: nn.Module, mesh: Mesh, **options) -> list:
    model.strategy = tensor.apply(model, mesh.tp, **options)
    data = ddp.apply(model, mesh.dp, bucket_mb=0.004, average=False)
    return [data, model.strategy]


def train(ranks, sizes: dict[str, int], task: Task, mode: str, mute=False) -> list[Outcome]:
    size = sizes["tp"] * sizes.get("dp", 1)
    plug = partial(attach_with_ddp if "dp" in sizes else attach, **MODES[mode])
    return ranks(size).run(parallel, task, sizes, plug, mute=mute)


def _forward(task: Task, size: int, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits before, after, and after with gradients, on a seed of this rank's own."""
    mesh = Mesh(tp=size)
    model = task.build(mesh.rank).double()
    inputs, _ = task.batch(0)
    with torch.no_grad():
        before = model(inputs)
        attach(model, mesh, **MODES[mode])
        after = model(inputs)
    return before, after, model(inputs).detach()


@pytest.mark.parametrize("mode", MODES)
def test_forward_equals_one_device(ranks, mode):
    """Mutants: ranks that keep their own weights; a sum that is missing."""
    task = TASKS["llama"]
    expected = task.build(0).double()(task.batch(0)[0]).detach()
    results = ranks(2).run(_forward, task, 2, mode)
    for rank, (before, after, _) in enumerate(results):
        assert torch.allclose(after, expected, rtol=1e-10, atol=1e-12)
        assert torch.allclose(before, expected) == (rank == 0)
    own = [logits for _, _, logits in results]
    assert [logits.shape[-1] for logits in own] == [30, 31]
    assert torch.allclose(torch.cat(own, -1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["llama", "accumulating"])
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_device(ranks, mode, name):
    for outcome in train(ranks, {"tp": 2}, TASKS[name], mode):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mode",
    models.crossed([n for n in ON_TWO if n not in ("llama", "accumulating")], list(MODES), every=2),
)
def test_equals_one_device_for_every_model(ranks, mode, name):
    for outcome in train(ranks, {"tp": 2}, TASKS[name], mode):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name, mode", models.crossed(ON_THREE + ON_FOUR, list(MODES), every=2))
def test_equals_one_device_on_more_ranks(ranks, mode, name):
    """On 4 ranks, 2 have the same keys and values: T13, and the norm that counts them once (T9)."""
    size = 3 if name in ON_THREE else 4
    for outcome in train(ranks, {"tp": size}, TASKS[name], mode):
        assert_parity(outcome, reference(TASKS[name]))


@pytest.mark.slow
@pytest.mark.exhaustive  # of which test_compose.py has a sample
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "accumulating", "untied"])
def test_equals_one_device_together_with_data_parallelism(ranks, mode, name):
    for outcome in train(ranks, {"dp": 2, "tp": 2}, TASKS[name], mode):
        assert_parity(outcome, reference(TASKS[name]))


def promised_bytes(task: Task, size: int, mode: str) -> float:
    """What the docstring says a rank sends along tp in one step, in float64."""
    config, share = task.build(0).config, (size - 1) / size
    layers, width, kv_heads = config.num_layers, config.hidden_size, config.num_kv_heads
    tokens = task.num_sequences * task.seq_len
    padded = tokens if mode == "plain" else task.num_sequences * -(-task.seq_len // size) * size
    sent = (8 * layers + 4 + 2 * layers * (mode == "overlap")) * share * padded * width
    sent += 6 * share * tokens
    if mode != "plain":
        sent += 2 * share * (2 * layers + 1) * width
    if size > kv_heads:
        sent += 2 * share * 2 * layers * kv_heads * config.head_dim * width
    return 8 * (sent + 2 * share)  # the trainer's gradient norm is one number


@pytest.mark.mostly_slow
@pytest.mark.parametrize("size, name", [(2, "llama"), (2, "untied"), (4, "llama")])
@pytest.mark.parametrize("mode", MODES)
def test_sends_what_the_docstring_says(ranks, mode, size, name):
    """Mutants: q, k and v that enter one by one (8 L more); logits that are gathered."""
    for outcome in train(ranks, {"tp": size}, replace(TASKS[name], steps=1), mode):
        expected = promised_bytes(TASKS[name], size, mode)
        assert outcome.sent == {"tp": pytest.approx(expected, abs=50)}  # each call rounds down


@pytest.mark.mostly_slow
@pytest.mark.parametrize("mode", MODES)
def test_without_communication_parity_is_violated(ranks, mode):
    """The mutant: what the harness compares must notice that nothing was summed."""
    for outcome in train(ranks, {"tp": 2}, TASKS["untied"], mode, mute=True):
        with pytest.raises(AssertionError, match="loss of step 0"):
            assert_parity(outcome, reference(TASKS["untied"]))
