"""Tensor parallelism in its corners: pieces, traps, loss, traffic, memory, overlap, refusals.

That training equals one device is proved by tests/parity/test_tensor.py.
"""

import copy
import math
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis, Mesh
from minipar.emulate import link
from minipar.lab.memory import LiveBytes
from minipar.model import hf
from minipar.model.llama import IGNORE_INDEX, Llama, LlamaConfig, generate, token_loss
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.parallel import matrices, overlap, tensor
from minipar.parallel.base.norm import clip_grad_norm
from minipar.parallel.base.replicate import replicate
from minipar.parallel.pipeline import split_backward
from minipar.train.optim import make_optimizer
from tests.parallel.layers import on_paper
from tests.parity import models

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


def cut_llama(size: int, mode: str, **changes) -> tuple[Llama, tensor.TensorParallel, Axis]:
    """A Llama in float64, born with a seed of this rank's own, then cut."""
    axis = Mesh(tp=size).tp
    model = models.llama(axis.rank, **changes).double()
    return model, tensor.apply(model, axis, **MODES[mode]), axis


# ---------------------------------------------------------------------- pieces
def test_pieces_cover_everything_once_or_are_copies():
    assert matrices.evenly(0, 61, 3).spans == ((0, 20), (20, 40), (40, 61))
    assert matrices.by_heads(0, 4, 8, 2).spans == ((0, 16), (16, 32))
    assert matrices.by_heads(1, 2, 8, 4).spans == ((0, 8), (0, 8), (8, 16), (8, 16))
    for length in range(3, 30):
        for n in range(1, length + 1):
            spans = matrices.evenly(0, length, n).spans
            assert [i for start, stop in spans for i in range(start, stop)] == list(range(length))
            widths = [stop - start for start, stop in spans]
            assert max(widths) - min(widths) <= 1


def _round_trip(size: int):
    axis = Mesh(tp=size).tp
    whole = torch.arange(7 * 5.0).view(7, 5)
    for dim, pieces in [
        (0, matrices.evenly(0, 7, size)),
        (1, matrices.evenly(1, 5, size)),
        (-1, matrices.evenly(-1, 5, size)),
        (0, matrices.Pieces(0, ((0, 3), (0, 3), (3, 7)))),
    ]:
        own = pieces.own(whole, axis.rank)
        assert own.shape[dim] < whole.shape[dim]
        assert own.untyped_storage().nbytes() == own.nbytes  # no view that keeps the whole alive
        assert torch.equal(pieces.join(own, axis), whole)


def test_pieces_of_uneven_width_and_copies_are_joined(ranks):
    ranks(3).run(_round_trip, 3)


# ---------------------------------------------------------------------- weights
def _weights(size: int, steps: int):
    model, strategy, axis = cut_llama(size, "plain", tie_embeddings=False)
    initial = strategy.full_state_dict()
    optimizer = make_optimizer(model, lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        model.zero_grad()
        backward(model)
        strategy.finish_backward()
        optimizer.step()
    own = {name: model.get_parameter(name).detach().clone() for name in strategy.pieces}
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
    axis = Mesh(tp=size).tp
    model = hf.load(folder, dtype=torch.float64)
    tensor.apply(model, axis, **MODES[mode])
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
    for size, mode in [(1, "plain"), (2, "plain"), (2, "sequence")]:
        for logits in ranks(size).run(_hf_logits, size, tmp_path, tokens, mode):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def _resumed(size: int, mode: str, state: dict[str, Tensor]):
    model, strategy, _ = cut_llama(size, mode)
    strategy.load_full_state_dict(state)
    with torch.no_grad():
        return strategy.full_state_dict(), model(batch()[0]), model.lm_head.weight.data_ptr()


@pytest.mark.slow
def test_a_full_state_dict_fits_any_number_of_ranks(ranks):
    source = models.llama(7).double()
    state, logits = source.state_dict(), source(batch()[0]).detach()
    for size, mode in [(2, "plain"), (4, "sequence")]:
        for found, ours, _ in ranks(size).run(_resumed, size, mode, state):
            assert all(torch.equal(found[name], state[name]) for name in state)
            assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
            torch.testing.assert_close(ours, logits, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- gradients
def _norms(size: int, mode: str):
    model, strategy, axis = cut_llama(size, mode)
    backward(model)
    strategy.finish_backward()
    norm = clip_grad_norm(model.parameters(), math.inf, [axis])
    for p in model.parameters():
        p.is_copy = False
    with_copies = clip_grad_norm(model.parameters(), math.inf, [axis])
    for p in model.parameters():
        p.shard_axes = ()
    own = clip_grad_norm(model.parameters(), math.inf, [axis])
    clipped = clip_grad_norm(model.parameters(), 0.1, [axis])
    return [x.item() for x in (norm, with_copies, own, clipped)]


@pytest.mark.parametrize("size, mode", [(2, "plain"), (2, "sequence"), (4, "sequence")])
def test_trap_09_the_norm_is_that_of_one_device(ranks, size, mode):
    """Mutants: copies of k and v counted on every rank that has them; pieces taken for the whole.

    The embedding is tied, so it counts once.
    """
    gradients = serial_gradients(models.llama(0).double())
    expected = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    for norm, with_copies, own, _ in ranks(size).run(_norms, size, mode):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert own < 0.95 * expected
        assert (with_copies > 1.001 * expected) == (size == 4)


def _replicated(size: int, mode: str, names: list[str]):
    """Gradients of some parameters before and after they are finished, by rank."""
    model, strategy, axis = cut_llama(size, mode)
    backward(model)
    before = [model.get_parameter(name).grad.clone() for name in names]
    strategy.finish_backward()
    after = [model.get_parameter(name).grad.clone() for name in names]
    return before, after


@pytest.mark.parametrize("mode", ["sequence", "overlap"])
def test_trap_12_norm_gradients_are_summed_over_the_tokens_of_all_ranks(ranks, mode):
    """Mutant: no finish_backward. Ranks would differ: each has seen its own tokens."""
    names = ["model.norm.weight"]
    names += [f"model.layers.1.{norm}.weight" for norm in ("input_layernorm",)]
    names += ["model.layers.2.post_attention_layernorm.weight"]
    expected = serial_gradients(models.llama(0).double())
    results = ranks(2).run(_replicated, 2, mode, names)
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
    results = ranks(4).run(_replicated, 4, mode, names)
    for i, name in enumerate(names):
        befores = [before[i] for before, _ in results]
        assert not torch.allclose(befores[0], befores[1], rtol=0.1)
        for rank, (_, after) in enumerate(results):
            half = expected[name].chunk(2)[rank // 2]
            torch.testing.assert_close(after[i], half, rtol=1e-10, atol=1e-14)


# ---------------------------------------------------------------------- bias and loss
def _row_bias(size: int, module: type[matrices.RowLinear]):
    axis = Mesh(tp=size).tp
    linear = nn.Linear(8, 5).double()
    replicate(linear, axis)
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected, sequence = linear(x).detach(), module is overlap.OverlappedRowLinear
    pieces = matrices.evenly(1, 8, size)
    linear.weight.data = pieces.own(linear.weight.data, axis.rank)
    row = module(linear, matrices.Border(axis, sequence))
    out = row(x.chunk(size, -1)[axis.rank]).detach()
    return out, expected.chunk(size, 1)[axis.rank] if sequence else expected


@pytest.mark.parametrize("module", [matrices.RowLinear, overlap.OverlappedRowLinear])
def test_trap_14_the_bias_of_a_row_is_added_once(ranks, module):
    """Mutant: the bias as part of the product, and so of every summand."""
    for found, expected in ranks(2).run(_row_bias, 2, module):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def logits_and_targets(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits of 7 words for [2, 5] targets, of which three are ignored; large, to overflow exp."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator) * 5
    logits[0, 0] += 2000
    targets = torch.randint(7, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 3] = targets[1, 4] = IGNORE_INDEX
    return logits.to(dtype), targets


def _loss(size: int, dtype: torch.dtype, z_loss: float, all_ignored: bool):
    axis = Mesh(tp=size).tp
    logits, targets = logits_and_targets(dtype)
    if all_ignored:
        targets.fill_(IGNORE_INDEX)
    words = matrices.evenly(-1, 7, size)
    own = words.own(logits, axis.rank).requires_grad_()
    start = words.spans[axis.rank][0]
    with timeline.record() as recorded:
        loss = matrices.vocab_loss(own, targets, axis, start, z_loss=z_loss)
        (3 * loss).backward()
    return loss.detach(), words.join(own.grad, axis), recorded.bytes_by_axis()["tp"]


def _expected_loss(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = token_loss(logits, targets)
    loss = loss + z_loss * (logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)).sum()
    (3 * loss).backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_vocabulary_loss_equals_that_of_one_device_and_gathers_no_logits(ranks, size, z_loss):
    logits, targets = logits_and_targets()
    loss, gradient = _expected_loss(logits, targets, z_loss)
    assert loss.isfinite() and gradient.abs().max() > 0.1
    for ours, our_gradient, sent in ranks(size).run(_loss, size, torch.float64, z_loss, False):
        torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-10, atol=1e-13)
        numbers = 3 * targets.numel()  # per token: largest, sum, target's logit; nothing backward
        assert sent == pytest.approx(2 * (size - 1) / size * numbers * 8, abs=2)


def test_vocabulary_loss_of_low_precision_is_summed_in_float32(ranks):
    logits, targets = logits_and_targets(torch.bfloat16)
    expected, gradient = _expected_loss(logits, targets, 0.0)
    for ours, our_gradient, _ in ranks(2).run(_loss, 2, torch.bfloat16, 0.0, False):
        assert ours.dtype == torch.float32 and our_gradient.dtype == torch.bfloat16
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-2, atol=1e-3)


def test_vocabulary_loss_without_any_target_is_zero(ranks):
    for ours, our_gradient, _ in ranks(2).run(_loss, 2, torch.float64, 0.01, True):
        assert ours == 0 and not our_gradient.any()


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


def _generated(size: int, mode: str, prompt: Tensor):
    model, _, axis = cut_llama(size, mode)
    sampler = torch.Generator().manual_seed(1)
    return generate(model, prompt, 5, 1.0, generator=sampler)


@pytest.mark.parametrize("mode", MODES)
def test_sampling_works_as_ever(ranks, mode):
    """Sequences of 3, 4, 5 ... tokens: `sequence` pads those that are odd."""
    prompt = batch()[0][:2, :3]
    sampler = torch.Generator().manual_seed(1)
    expected = generate(models.llama(0).double(), prompt, 5, 1.0, generator=sampler)
    for found in ranks(2).run(_generated, 2, mode, prompt):
        assert torch.equal(found, expected)


def _stages(size: int, mode: str):
    """Logits of two stages of a pipeline, each with parts of the model, one after the other."""
    axis = Mesh(tp=size).tp
    first, last = models.llama(axis.rank).double(), models.llama(axis.rank).double()
    first.model.norm = first.lm_head = first.model.layers[1] = first.model.layers[2] = None
    last.model.embed_tokens = last.model.layers[0] = None
    for stage in (first, last):
        tensor.apply(stage, axis, **MODES[mode])
    with torch.no_grad():
        return last(first(batch()[0]))


@pytest.mark.parametrize("mode", ["plain", "sequence"])
def test_parts_of_a_model_are_cut_as_the_whole(ranks, mode):
    """Mutant: positions of a stage without embedding counted from its own tokens."""
    expected = models.llama(0).double()(batch()[0]).detach()
    for found in ranks(2).run(_stages, 2, mode):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("word", [-1, 61])
def test_what_is_no_word_is_not_swallowed(rank, word):
    """One of the ranks looks it up, and fails; mutant: all ranks count it as another's."""
    axis = on_paper("tp", 3, rank)
    start, stop = matrices.evenly(0, 61, 3).spans[rank]
    tokens = torch.tensor([5, 25, 45, word])
    rows, own = matrices.local_words(tokens, start, stop - start, axis)
    assert own[:3].tolist() == [start <= token < stop for token in tokens[:3]]
    if own[3]:
        with pytest.raises(IndexError):
            F.embedding(rows, torch.zeros(stop - start, 2))
    assert own[3] == (rank == (0 if word < 0 else 2))


# ---------------------------------------------------------------------- memory
def _saved_per_layer(size: int, mode: str):
    """Bytes that one layer keeps for its backward: two layers more, halved."""
    axis = Mesh(tp=size).tp
    found = []
    for num_layers in (1, 3):
        model = models.llama(0, num_layers=num_layers, hidden_size=64, intermediate_size=160)
        tensor.apply(model, axis, **MODES[mode])
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(t: Tensor, own=own, kept=kept) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = t  # kept alive: no address is used twice
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(torch.ones(2, 32, dtype=torch.int64))
        found.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize("mode", MODES)
def test_activations_of_a_layer_take_the_bytes_of_the_docstring(ranks, mode):
    """Within 5 %; mutants: gathered inputs kept (sequence in place of overlap), a view of more."""
    size, tokens, width, hidden, heads, kv_heads, head_dim = 2, 2 * 32, 64, 160, 4, 2, 16
    inside = (2 * heads + 2 * kv_heads) * head_dim + 4 * hidden
    outside = {"plain": 4.0, "sequence": 2 + 2 / size, "overlap": 4 / size}[mode] * width
    outside += 2 * width / (1 if mode == "plain" else size)  # RMSNorm on a CPU: x / rms
    expected = 4 * tokens * (outside + inside / size)
    for found in ranks(size).run(_saved_per_layer, size, mode):
        assert found == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------------- overlap
def _autocast(size: int, mode: str):
    axis = Mesh(tp=size).tp
    model = models.llama(0)
    strategy = tensor.apply(model, axis, **MODES[mode])
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


STEP = 0.05  # seconds: of the link for one piece, of the rank for one product


def _timed_ring(size: int):
    """Seconds of a gather and of a scatter with products in between, the fastest of three."""
    axis = Mesh(tp=size).tp
    x = torch.ones(2, 500)
    link.check_calls(False)
    link.use(link.Link("test", 0.0, x.nbytes / STEP))

    def product(target: int) -> Tensor:
        time.sleep(STEP)
        return x

    def gather() -> None:
        for source, _ in overlap.ring_gather(x, axis):
            product(source)

    try:
        found = []
        for work in (gather, lambda: overlap.ring_reduce_scatter(product, axis)):
            seconds = []
            for _ in range(3):
                barrier(axis)
                start = time.monotonic()
                work()
                seconds.append(time.monotonic() - start)
            found.append(min(seconds))
        return found
    finally:
        link.use("none")
        link.check_calls(True)


@pytest.mark.timed
@pytest.mark.slow
def test_a_ring_sends_while_products_are_computed(ranks):
    """n products and n-1 messages, of the same length: only the products take time.

    Mutants: waiting for a message before the product that could hide it.
    """
    n = 3
    for gather, scatter in ranks(n, "link").run(_timed_ring, n):
        for seconds in (gather, scatter):
            assert n * STEP <= seconds < (n + 0.5 * (n - 1)) * STEP


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize("mode", ["plain", "sequence"])
def test_a_pipeline_that_splits_backward_puts_off_all_matrices(mode):
    """Else W has less to do, and gradients as large as the weights wait for it. Mutant: those of
    matrices that are cut by rows, and of the head, are computed at once."""
    model, put_off = models.llama(0), split_backward.PutOff()
    twin = copy.deepcopy(model)
    tensor.apply(model, on_paper("tp", 1), **MODES[mode])
    split_backward.enable(model, put_off)
    tokens, targets = batch()
    token_loss(twin(tokens), targets).backward()
    with put_off.to(jobs := []):
        model.token_loss(model(tokens), targets).backward()
    every = {name for name, p in model.named_parameters() if p.ndim == 2}
    waiting = {name for name, p in model.named_parameters() if p.grad is None}
    assert waiting == every - {"model.embed_tokens.weight"}
    split_backward.do(jobs)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad)


def test_sizes_that_do_not_fit_are_refused_with_the_good_ones():
    llama = models.llama(0)
    with pytest.raises(ValueError, match="tp=3 does not divide num_heads=4; use one of 1, 2, 4"):
        tensor.check(llama, on_paper("tp", 3))
    with pytest.raises(ValueError, match="tp=4 does not divide intermediate_size=22; use one of 1"):
        tensor.check(models.llama(0, intermediate_size=22), on_paper("tp", 4))
    sparse = LlamaConfig(61, 16, 22, 2, 4, 2, moe=MoEConfig(4, 2, 8))
    tensor.check_sizes(sparse, 4)  # no matrix has intermediate_size
    twelve = models.llama(0, num_heads=12, num_kv_heads=4, head_dim=4)
    message = "tp=3 neither divides num_kv_heads=4 nor is a multiple of it; use one of 1, 2, 4, 12"
    with pytest.raises(ValueError, match=message):
        tensor.check(twelve, on_paper("tp", 3))
    with pytest.raises(ValueError, match="tp=4 ranks for vocab_size=3 words"):
        tensor.check(models.llama(0, vocab_size=3), on_paper("tp", 4))
    with pytest.raises(ValueError, match="set both"):
        tensor.check(llama, on_paper("tp", 2), overlap=True)
    with pytest.raises(ValueError, match="cuts a Llama"):
        tensor.check(models.Foreign(0), on_paper("tp", 2))
    for n in (1, 2, 4):
        tensor.check(llama, on_paper("tp", n))
    tensor.check(twelve, on_paper("tp", 12))


def _refused(size: int):
    axis = Mesh(tp=size).tp
    model = models.llama(axis.rank)
    before = copy.deepcopy(model.state_dict())
    with timeline.record() as recorded, pytest.raises(ValueError, match="does not divide"):
        tensor.apply(model, axis)
    assert not recorded.spans
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return True


def test_refusals_come_on_every_rank_before_the_first_collective(ranks):
    assert ranks(3).run(_refused, 3) == [True] * 3


def _refused_later(size: int):
    model, _, axis = cut_llama(size, "sequence")
    with pytest.raises(ValueError, match="cut along tp already"):
        tensor.apply(model, axis)
    with timeline.record() as recorded, pytest.raises(ValueError, match="pad to 8"):
        model(batch(7)[0], positions=torch.arange(7))
    assert not recorded.spans
    model.model.norm = model.lm_head = None
    with pytest.raises(ValueError, match="a pipeline, needs a multiple of 2 tokens, not 7; pad"):
        model(batch(7)[0])  # the stage with the head could not tell how many were added


def test_a_second_cut_and_odd_positions_are_refused(ranks):
    ranks(2).run(_refused_later, 2)


def test_one_rank_needs_no_process_group():
    model, expected = models.llama(0).double(), models.llama(0).double()
    for mode in MODES.values():
        ours = copy.deepcopy(model)
        strategy = tensor.apply(ours, Mesh().tp, **mode)
        backward(ours)
        strategy.finish_backward()
        expected.zero_grad()
        for name, theirs in serial_gradients(expected).items():
            assert torch.allclose(strategy.full_gradients()[name], theirs, rtol=1e-10, atol=1e-13)


def test_pieces_are_joined_on_the_device_that_computes():
    """The state of an optimizer is on the CPU, which NCCL cannot send from. Meta stands in."""
    with torch.device("meta"):
        model = models.llama(0)
    strategy = tensor.apply(model, Mesh().tp)
    with mock.patch.object(matrices, "all_gather", wraps=matrices.all_gather) as gathers:
        strategy.join({"lm_head.weight": torch.zeros(3, 2)})
    [gathered] = gathers.mock_calls
    assert gathered.args[0].is_meta


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
    expected = logits.detach().float().requires_grad_()
    F.cross_entropy(expected, targets, reduction="sum").backward()
    torch.testing.assert_close(logits.grad.float(), expected.grad, rtol=1e-2, atol=1e-4)


def _sums(large: int) -> tuple[list[tuple[bool, Tensor]], int]:
    """The summed gradients of whole parameters, and whether each still lies where it lay."""
    axis, model = Mesh(tp=2).tp, models.llama(0)
    strategy = tensor.apply(model, axis, sequence=True)
    whole = [model.get_parameter(name) for name in strategy.whole]
    for i, p in enumerate(whole):
        p.grad = torch.full_like(p, i + 10.0**axis.rank)
    before = [p.grad.data_ptr() for p in whole]
    with mock.patch.object(tensor, "LARGE", large), LiveBytes() as live:
        strategy._sum(strategy.whole, num_groups=1)
    found = [(p.grad.data_ptr() == at, p.grad) for p, at in zip(whole, before, strict=True)]
    return found, live.peak


def test_what_is_large_is_summed_where_it_lies(ranks):
    """Copies of experts are. Mutants: beside all others in a buffer; not at all."""
    (one, buffered), (other, in_place) = (ranks(2).run(_sums, n)[0] for n in (2**20, 1))
    assert in_place < 0.5 * buffered
    for i, ((lies, ours), (_, theirs)) in enumerate(zip(one, other, strict=True)):
        assert lies and torch.equal(ours, theirs) and (ours == 2 * i + 11).all()
