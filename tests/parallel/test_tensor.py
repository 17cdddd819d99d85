"""Tensor parallelism in its corners: pieces, traps, loss, memory, overlap, refusals.

That training equals one device is proved by tests/law/test_law.py.
"""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object, all_reduce
from minipar.comm.mesh import Axis, Mesh
from minipar.lab.memory import LiveBytes
from minipar.model import hf
from minipar.model.llama import IGNORE_INDEX, Llama, generate, token_loss
from minipar.observe import timeline
from minipar.parallel import matrices, tensor
from minipar.parallel.base import shards
from minipar.parallel.base.norm import clip_grad_norm
from minipar.parallel.base.shards import region_of
from minipar.parallel.pipeline import split_backward
from minipar.train.optim import make_optimizer
from tests.law import models
from tests.parallel.layers import on_paper

pytestmark = pytest.mark.trains

MODES = {
    "plain": {},
    "sequence": dict(sequence=True),
    "overlap": dict(sequence=True, overlap=True),
}


def batch(seq_len: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets [3, T], some of them ignored; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(61, (3, seq_len + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[1, 4:] = IGNORE_INDEX
    return tokens[:, :-1], targets


def backward(model: nn.Module) -> None:
    inputs, targets = batch()
    getattr(model, "token_loss", token_loss)(model(inputs), targets).backward()


def serial_gradients(model: nn.Module) -> dict[str, Tensor]:
    backward(model)
    return {name: p.grad for name, p in model.named_parameters()}


def cut_llama(
    size: int, mode: str, frozen: bool = False, **changes
) -> tuple[Llama, tensor.TensorParallel, Axis]:
    """A Llama in float64, born with a seed of this rank's own, then cut; a layer may be frozen."""
    axis = Mesh(tp=size).tp
    model = models.llama(axis.rank, **changes).double()
    model.model.layers[0].requires_grad_(not frozen)
    return model, tensor.apply(model, axis, **MODES[mode]), axis


# ---------------------------------------------------------------------- pieces
def test_pieces_cover_everything_once_or_are_copies():
    assert matrices.evenly(61, 3) == ((0, 20), (20, 40), (40, 61))
    assert matrices.by_heads(4, 8, 2) == ((0, 16), (16, 32))
    assert matrices.by_heads(2, 8, 4) == ((0, 8), (0, 8), (8, 16), (8, 16))


def _weights(size: int, steps: int):
    model, strategy, axis = cut_llama(size, "plain", tie_embeddings=False)
    initial = strategy.full_state_dict()
    optimizer = make_optimizer(model, lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        model.zero_grad()
        backward(model)
        strategy.finish_backward()
        optimizer.step()
    own = {name: model.get_parameter(name).detach().clone() for name in strategy.spans}
    strategy.load_full_state_dict(initial)
    again = strategy.full_state_dict()
    assert all(torch.equal(again[name], initial[name]) for name in initial)
    return initial, all_gather_object(own, axis)


def test_trap_01_pieces_are_those_of_one_model_and_differ(ranks):
    """Mutant: layers made anew on every rank, from one seed: equal pieces."""
    expected = models.llama(0, tie_embeddings=False).double().state_dict()
    for steps in (0, 3):
        for initial, own in ranks(2).run(_weights, 2, steps):
            assert initial.keys() == expected.keys()
            assert all(torch.equal(initial[name], expected[name]) for name in expected)
            assert len(own[0]) == 2 + 3 * 7  # two tables, seven matrices in each of three layers
            for name, piece in own[0].items():
                rows = min(len(piece), len(own[1][name]))
                assert not torch.isclose(piece[:rows], own[1][name][:rows]).any(), name


def _hf_logits(size: int, folder, tokens: Tensor, mode: str):
    model = hf.load(folder, dtype=torch.float64)
    tensor.apply(model, Mesh(tp=size).tp, **MODES[mode])
    with torch.no_grad():
        return model(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_trap_04_a_hugging_face_checkpoint_gives_its_logits(ranks, tmp_path, name):
    """Mutant: every rank takes the first rows of q, k and v."""
    from tests.model.oracle import CONFIGS, randomised, some_tokens, their_twin  # not on the ranks

    twin = their_twin(randomised(CONFIGS[name])).double()
    twin.save_pretrained(tmp_path)
    tokens = some_tokens(CONFIGS[name])
    expected = twin(tokens).logits.detach()
    for mode in ("plain", "sequence"):
        for logits in ranks(2).run(_hf_logits, 2, tmp_path, tokens, mode):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- gradients
def _norms(size: int, mode: str):
    model, strategy, axis = cut_llama(size, mode)
    backward(model)
    strategy.finish_backward()
    norm = clip_grad_norm(model.parameters(), math.inf, [axis])
    for p in model.parameters():
        p.is_copy = False
    with_copies = clip_grad_norm(model.parameters(), math.inf, [axis])
    return norm.item(), with_copies.item()


@pytest.mark.parametrize("size, mode", [(2, "plain"), (4, "sequence")])
def test_trap_09_the_norm_is_that_of_one_device(ranks, size, mode):
    """Mutant: copies of k and v counted on every rank that has them. The embedding is tied."""
    gradients = serial_gradients(models.llama(0).double())
    expected = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    for norm, with_copies in ranks(size).run(_norms, size, mode):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert (with_copies > 1.001 * expected) == (size == 4)


def _finished(size: int, mode: str, names: list[str], frozen: bool = False):
    """Gradients of some parameters before and after they are finished, by rank."""
    model, strategy, _ = cut_llama(size, mode, frozen)
    backward(model)
    before = [model.get_parameter(name).grad.clone() for name in names]
    strategy.finish_backward()
    return before, [model.get_parameter(name).grad.clone() for name in names]


@pytest.mark.parametrize("mode", ["sequence", "overlap"])
def test_trap_12_norm_gradients_are_summed_over_the_tokens_of_all_ranks(ranks, mode):
    """Mutant: no finish_backward. Ranks would differ: each has seen its own tokens.

    In a frozen layer nothing is summed. Mutant: its norms are hooked, which torch refuses.
    """
    names = ["norm", "layers.1.input_layernorm", "layers.2.post_attention_layernorm"]
    names = [f"model.{name}.weight" for name in names]
    expected = serial_gradients(models.llama(0).double())
    results = ranks(2).run(_finished, 2, mode, names, mode == "sequence")
    for i, name in enumerate(names):
        parts = [before[i] for before, _ in results]
        assert not torch.allclose(parts[0], parts[1], rtol=0.1)
        for _, after in results:
            torch.testing.assert_close(after[i], expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", ["plain", "overlap"])
def test_trap_13_shared_keys_and_values_sum_their_gradients(ranks, mode):
    """4 ranks, 2 heads of keys: ranks 0 and 1 have one, 2 and 3 the other.

    Mutants: no sum (in step with each other by luck only); a sum over all four ranks.
    """
    names = [f"model.layers.{i}.self_attn.{p}.weight" for i in (0, 2) for p in ("k_proj", "v_proj")]
    expected = serial_gradients(models.llama(0).double())
    results = ranks(4).run(_finished, 4, mode, names)
    for i, name in enumerate(names):
        befores = [before[i] for before, _ in results]
        assert not torch.allclose(befores[0], befores[1], rtol=0.1)
        for rank, (_, after) in enumerate(results):
            half = expected[name].chunk(2)[rank // 2]
            torch.testing.assert_close(after[i], half, rtol=1e-10, atol=1e-14)


# ---------------------------------------------------------------------- the loss
def logits_and_targets(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of 7 words for [2, 5] targets, of which three are ignored; large, to overflow exp."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator) * 5
    logits[0, 0] += 2000
    targets = torch.randint(7, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 3] = targets[1, 4] = IGNORE_INDEX
    return logits.to(dtype), targets


def _loss(size: int, logits: Tensor, targets: Tensor):
    axis, spans = Mesh(tp=size).tp, matrices.evenly(7, size)
    words = slice(*spans[axis.rank])
    own = logits[..., words].clone().requires_grad_()
    with timeline.record() as recorded:
        loss = matrices.vocab_loss(own, targets, axis, spans[axis.rank][0])
        (3 * loss).backward()
    whole = torch.zeros_like(logits)
    whole[..., words] = own.grad
    return loss.detach(), all_reduce(whole, axis), recorded.bytes_by_axis()["tp"]


@pytest.mark.parametrize(
    "size, dtype, rtol", [(2, "float64", 1e-10), (3, "float64", 1e-10), (2, "bfloat16", 1e-2)]
)
def test_vocabulary_loss_equals_that_of_one_device_and_gathers_no_logits(ranks, size, dtype, rtol):
    """Summed in float32 at least; without any target it is zero."""
    logits, targets = logits_and_targets(getattr(torch, dtype))
    leaf = logits.clone().requires_grad_()
    expected = token_loss(leaf, targets)
    (3 * expected).backward()
    for loss, gradient, sent in ranks(size).run(_loss, size, logits, targets):
        assert loss.dtype == expected.dtype and gradient.dtype == logits.dtype
        torch.testing.assert_close(loss, expected.detach(), rtol=min(rtol, 1e-5), atol=0)
        torch.testing.assert_close(gradient, leaf.grad, rtol=rtol, atol=rtol / 10)
        numbers = 3 * targets.numel()  # per token: largest, sum, target's logit; nothing backward
        assert sent == pytest.approx(2 * (size - 1) / size * numbers * loss.itemsize, abs=2)
    for loss, gradient, _ in ranks(size).run(_loss, size, logits, targets * 0 + IGNORE_INDEX):
        assert loss == 0 and not gradient.any()


def _losses(size: int, mode: str):
    model, _, _ = cut_llama(size, mode)
    inputs, targets = batch()
    losses = [model.token_loss(model(inputs), targets)]
    with torch.no_grad():
        logits = model(inputs)
        losses.append(model.token_loss(logits, targets))
    losses.append(model.token_loss(logits, targets))
    model.requires_grad_(False)  # and yet gradients are enabled
    losses.append(model.token_loss(model(inputs), targets))
    return logits.shape[-1], *(loss.item() for loss in losses)


def test_trap_14_whole_logits_do_not_add_the_log_of_the_ranks(ranks):
    """What the model returns, its loss understands, with gradients and without."""
    inputs, targets = batch()
    expected = token_loss(models.llama(0).double()(inputs), targets).item()
    for width, *losses in ranks(2).run(_losses, 2, "plain"):
        assert width == 61
        assert losses == pytest.approx([expected] * 4, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_loss_makes_one_copy_of_the_logits(dtype):
    """Mutants: cast, shifted and exponentials side by side; the caller's logits overwritten."""
    logits = torch.randn(16, 1000, dtype=dtype).requires_grad_()
    before, targets = logits.detach().clone(), torch.arange(16)
    with LiveBytes() as live:
        loss = matrices.vocab_loss(logits, targets, Mesh().tp, 0)
    assert live.peak < 1.1 * 4 * logits.numel()
    loss.backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("word", [-1, 61])
def test_what_is_no_word_is_not_swallowed(rank, word):
    """One of the ranks looks it up, and fails; mutant: all ranks count it as another's."""
    start, stop = matrices.evenly(61, 3)[rank]
    tokens = torch.tensor([5, 25, 45, word])
    rows, own = matrices.local_words(tokens, start, stop - start, on_paper("tp", 3, rank))
    assert own[:3].tolist() == [start <= token < stop for token in tokens[:3]]
    assert own[3] == (rank == (0 if word < 0 else 2))
    if own[3]:
        with pytest.raises(IndexError):
            F.embedding(rows, torch.zeros(stop - start, 2))


# ---------------------------------------------------------------------- forward
def _generated(size: int, mode: str, prompt: Tensor):
    model, _, _ = cut_llama(size, mode)
    return generate(model, prompt, 5, 1.0, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", MODES)
def test_sampling_works_as_ever(ranks, mode):
    """Sequences of 3, 4, 5 ... tokens: `sequence` pads those that are odd."""
    prompt = batch()[0][:2, :3]
    sampler = torch.Generator().manual_seed(1)
    expected = generate(models.llama(0).double(), prompt, 5, 1.0, generator=sampler)
    for found in ranks(2).run(_generated, 2, mode, prompt):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------------- overlap
def _autocast(size: int, mode: str):
    model = models.llama(0)
    strategy = tensor.apply(model, Mesh(tp=size).tp, **MODES[mode])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(model)
    strategy.finish_backward()
    return strategy.full_gradients()


def test_overlap_computes_in_the_dtype_of_autocast(ranks):
    model = models.llama(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = serial_gradients(model)
    for gradients in ranks(2).run(_autocast, 2, "overlap"):
        for name, theirs in expected.items():
            assert gradients[name].dtype == torch.float32
            error = (gradients[name] - theirs).abs().max() / theirs.abs().max()
            assert error < 0.05, name  # eight bits of mantissa


@pytest.mark.parametrize("mode", ["plain", "sequence"])
def test_a_pipeline_that_splits_backward_puts_off_all_matrices(mode):
    """Else W has less to do, and gradients as large as the weights wait for it. Mutant: those of
    matrices that are cut by rows, and of the head, are computed at once."""
    model = models.llama(0)
    twin = copy.deepcopy(model)
    tensor.apply(model, on_paper("tp", 1), **MODES[mode])
    split_backward.enable(model)
    tokens, targets = batch()
    token_loss(twin(tokens), targets).backward()
    with split_backward.put_off(jobs := []):
        model.token_loss(model(tokens), targets).backward()
    every = {name for name, p in model.named_parameters() if p.ndim == 2}
    waiting = {name for name, p in model.named_parameters() if p.grad is None}
    assert waiting == every - {"model.embed_tokens.weight"}
    split_backward.do(jobs)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad)


# ---------------------------------------------------------------------- refusals


def test_trap_14_a_bias_that_all_ranks_would_add_is_refused():
    """No Llama has one. Mutant: the second matrix adds it on each rank, before the sum."""
    model = models.llama(0)
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.zeros(16))
    with pytest.raises(ValueError, match="layers.1.mlp.down_proj.bias: .* once per rank"):
        tensor.apply(model, on_paper("tp", 2))


def test_a_model_is_cut_once():
    model, axis = models.llama(0), on_paper("tp", 1)
    tensor.apply(model, axis)
    with pytest.raises(ValueError, match="is cut along tp already"):
        tensor.apply(model, axis)


def test_pieces_are_joined_on_the_device_that_computes():
    """The state of an optimizer is on the CPU, which NCCL cannot send from. Meta stands in."""
    with torch.device("meta"):
        model = models.llama(0)
    strategy = tensor.apply(model, Mesh().tp)
    with mock.patch.object(shards, "all_reduce", wraps=shards.all_reduce) as sums:
        region_of(model.lm_head.weight).join(torch.zeros(64, 16), strategy.device)
    [added] = sums.mock_calls
    assert added.args[0].is_meta
