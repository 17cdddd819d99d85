"""The model is the published one, starts from the seed alone, and can be split from outside."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minipar.model import llama
from minipar.model.init import init_weights
from minipar.model.llama import (
    IGNORE_INDEX,
    PRESETS,
    Llama,
    LlamaConfig,
    dense_core,
    generate,
    rope_tables,
    token_loss,
)
from tests.model.oracle import CONFIGS, exact_norm, randomised, some_tokens, their_twin

TINY = PRESETS["tiny"]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return token_loss(getattr(logits, "logits", logits), tokens[:, 1:])


def explicit_core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention by the formula, on expanded key and value heads."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


# ------------------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_transformers_in_float64(name, monkeypatch):
    """Catches: pairs rotated the other way, wrong grouping of heads, a wrong eps, gate for up."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm)
    model = randomised(CONFIGS[name])
    twin = their_twin(model)
    tokens = some_tokens(model.config)

    torch.testing.assert_close(model(tokens), twin(tokens).logits, rtol=1e-9, atol=1e-9)

    loss_of(model, tokens).backward()
    loss_of(twin, tokens).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    assert ours.keys() == theirs.keys()
    for parameter, grad in ours.items():
        assert grad.abs().max() > 1e-3, f"{parameter}: a gradient near zero proves nothing"
        torch.testing.assert_close(grad, theirs[parameter], rtol=1e-9, atol=1e-9)


# ----------------------------------------------------------------------------- sizes and formulas


@pytest.mark.parametrize("name", PRESETS)
def test_num_parameters_counts_what_is_there(name):
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].num_parameters


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_flops_per_token_equal_those_counted(name):
    """Counts every matrix product of forward and backward; catches a forgotten head or KV head."""
    config = CONFIGS[name]
    with torch.device("meta"):
        model = Llama(config)
        tokens = torch.zeros(2, 32, dtype=torch.long)
    for layer in model.model.layers:
        layer.self_attn.core = explicit_core  # the counter does not know fused attention on a CPU
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    norm_weights = (2 * config.num_layers + 1) * config.hidden_size  # multiply, but no matrices
    expected = config.flops_per_token(32) - 6 * norm_weights
    assert counter.get_total_flops() == tokens.numel() * expected


def test_causal_flops_halve_attention_alone():
    whole, causal = TINY.flops_per_token(256), TINY.flops_per_token(256, causal=True)
    assert whole - causal == 6 * TINY.num_layers * TINY.num_heads * TINY.head_dim * 256


def too_long():
    Llama(replace(TINY, max_seq_len=8))(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: replace(TINY, num_kv_heads=3), "3 does not divide num_heads=4; use one of .1, 2"),
        (lambda: replace(TINY, num_heads=5, num_kv_heads=5, head_dim=0), "divide hidden_size=128"),
        (lambda: replace(TINY, head_dim=31), "head_dim=31 must be even"),
        (lambda: replace(TINY, num_layers=0), "num_layers=0 must be positive"),
        (lambda: replace(TINY, norm_eps=-1.0), "norm_eps=-1.0 must be positive"),
        (too_long, "9 tokens is longer than max_seq_len=8"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()


# --------------------------------------------------------------------------------- initialisation


def test_trap_02_no_two_layers_start_equal():
    """Catches: one seed for every layer, or a seed made of the shape."""
    model = Llama(TINY)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    corners = torch.stack([p[:16, :16].detach().flatten() for p in matrices])
    distances = torch.cdist(corners, corners) + torch.eye(len(matrices))
    assert distances.min() > 0.1
    correlations = torch.corrcoef(corners) - torch.eye(len(matrices))
    assert correlations.abs().max() < 0.35  # also none is a multiple of another


def test_initial_weights_have_the_documented_spread():
    for name, parameter in Llama(TINY, seed=3).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / (8**0.5 if residual else 1)
        assert abs(parameter.std().item() / std - 1) < 0.05, name
        assert abs(parameter.mean().item()) < std * 0.05, name


def test_initialisation_neither_reads_nor_disturbs_the_global_random_state():
    before = torch.get_rng_state()
    first = Llama(TINY, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other = Llama(TINY, seed=7), Llama(TINY, seed=8)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        assert parameter.ndim == 1 or not torch.equal(parameter, other.get_parameter(name)), name


# ------------------------------------------------------------------------------ split from outside


def stage(config: LlamaConfig, first: int, last: int, seed: int) -> Llama:
    """Layers first..last-1, with the embedding before or the head behind, without the rest."""
    with torch.device("meta"):
        model = Llama(config)
    for index in range(config.num_layers):
        if not first <= index < last:
            model.model.layers[index] = None
    if first > 0:
        model.model.embed_tokens = None
    if last < config.num_layers:
        model.model.norm = model.lm_head = None
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_trap_02_stages_made_alone_are_the_whole_model(tied):
    """Catches: a layer counted from the start of its stage, a head that forgets it is tied."""
    config = replace(TINY, tie_embeddings=tied)
    whole = Llama(config, seed=6)
    stages = [stage(config, *bounds, seed=6) for bounds in ((0, 1), (1, 3), (3, 4))]
    seen = {}
    for part in stages:
        seen |= part.state_dict()
    assert seen.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(seen[name], value), name

    x = tokens = some_tokens(config)
    for part in stages:
        x = part(x)
    assert torch.equal(x, whole(tokens))


def test_groups_that_no_kernel_of_a_gpu_takes_are_spelled_out(monkeypatch):
    """With the same result. Mutant: repeated in another order, head after head."""
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (6, 2, 2))
    expected = dense_core(q, k, v)
    monkeypatch.setattr(llama, "_no_fused_groups", lambda *_: True)
    torch.testing.assert_close(dense_core(q, k, v), expected, rtol=0, atol=1e-14)


def test_trap_19_a_shard_rotates_by_its_own_positions():
    """Bit for bit, for contiguous and zigzag shards: no row depends on its neighbours."""
    config = CONFIGS["llama3-rope"]
    whole = rope_tables(config, torch.arange(60), torch.float64)
    index = torch.arange(60)
    shards = [index[20:40], index[7:], torch.cat((index[:15], index[45:])), index[33:34]]
    for positions in shards:
        for table, rows in zip(rope_tables(config, positions, torch.float64), whole, strict=True):
            assert torch.equal(table, rows[positions])
    batch = rope_tables(config, torch.stack((index[:20], index[20:40])), torch.float64)
    assert torch.equal(batch[0][1], whole[0][20:40])


# ----------------------------------------------------------------------------------------- loss


def test_token_loss_is_a_sum_that_the_caller_divides():
    """Catches a mean: two halves of unequal size would no longer add up (T10)."""
    logits = torch.randn(3, 7, 11, dtype=torch.float64)
    targets = torch.randint(11, (3, 7))
    targets[0, :5] = IGNORE_INDEX
    counts, of_targets = targets != IGNORE_INDEX, targets.clamp(min=0)[..., None]
    by_hand = -logits.log_softmax(-1).gather(-1, of_targets)[counts].sum()
    total = token_loss(logits, targets)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, by_hand, rtol=1e-12, atol=0)
    parts = token_loss(logits[:1], targets[:1]) + token_loss(logits[1:], targets[1:])
    torch.testing.assert_close(parts, total, rtol=1e-12, atol=0)


def test_trap_10_nothing_to_predict_is_zero_and_not_nan():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_loss(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


def test_token_loss_is_wide_for_narrow_logits():
    logits = 5 * torch.randn(64, 300)
    targets = torch.randint(300, (64,))
    narrow = logits.bfloat16()
    loss = token_loss(narrow, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, token_loss(narrow.float(), targets), rtol=0, atol=0)


# ---------------------------------------------------------------------------------- generation


def test_generate_takes_the_likeliest_and_crops_to_the_longest_sequence():
    model = Llama(replace(TINY, max_seq_len=6), seed=3)
    prompt = torch.tensor([[3, 4, 5], [14, 15, 0]])
    out = generate(model, prompt, max_new_tokens=10, temperature=0)
    assert torch.equal(out[:, :3], prompt) and out.shape == (2, 13)
    for t in range(3, 13):
        logits = model(out[:, max(0, t - 6) : t])[:, -1]
        assert torch.equal(out[:, t], logits.argmax(-1))


def test_generate_draws_from_the_given_generator_alone():
    prompt, model = torch.zeros(4, 1, dtype=torch.long), Llama(TINY)
    state = torch.get_rng_state()

    def draw(seed: int, **options) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, 12, generator=generator, **options)

    hot = draw(1, temperature=50.0)
    assert torch.equal(hot, draw(1, temperature=50.0))
    assert not torch.equal(hot, draw(2, temperature=50.0))
    assert torch.equal(torch.get_rng_state(), state)
    likeliest = generate(model, prompt, 12, temperature=0)
    assert torch.equal(draw(1, temperature=50.0, top_k=1), likeliest)
    assert not torch.equal(hot, likeliest)
    assert torch.equal(draw(1, temperature=50.0, top_k=999), hot)
