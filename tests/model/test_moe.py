"""A mixture of experts is the published one, for each way to route, and counts what it should."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from minipar.model import experts, hf
from minipar.model.experts import add_up, can_group
from minipar.model.llama import PRESETS, Llama, LlamaConfig, token_loss
from minipar.model.moe import MoE, MoEConfig, Router, routers
from minipar.model.recompute import checkpoint_activations
from tests.model.oracle import exact_norm, randomised, some_tokens

BASE = dict(vocab_size=61, hidden_size=48, intermediate_size=80, num_layers=3, max_seq_len=64)
HEADS = dict(num_heads=4, num_kv_heads=2)
SIX = MoEConfig(num_experts=6, top_k=2, expert_size=24)

MODELS = {
    "mixtral": (
        LlamaConfig(**BASE, **HEADS, moe=MoEConfig(6, 2, 80)),
        MixtralForCausalLM,
        MixtralConfig,
        dict(num_local_experts=6, sliding_window=None),
    ),
    "qwen3": (
        LlamaConfig(**BASE, **HEADS, head_dim=20, moe=replace(SIX, every=2), qk_norm=True),
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        dict(
            num_experts=6,
            moe_intermediate_size=24,
            head_dim=20,
            norm_topk_prob=True,
            decoder_sparse_step=2,
        ),
    ),
}


def their_twin(name: str, model: Llama) -> nn.Module:
    """transformers' model with the weights of ours, under the same names."""
    config, cls, config_cls, more = MODELS[name]
    theirs = config_cls(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        num_experts_per_tok=config.moe.top_k,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        experts_implementation="eager",  # the other ones do not know float64
        **more,
    )
    twin = cls(theirs).to(next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict(), strict=True)
    return twin


@pytest.fixture
def exact(monkeypatch):
    """Norms and routers of transformers in float64: theirs round to fp32, whatever the model is."""
    for norm in (modeling_mixtral.MixtralRMSNorm, Qwen3MoeRMSNorm):
        monkeypatch.setattr(norm, "forward", exact_norm)
    softmax, to_float = F.softmax, torch.Tensor.float
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)
    )
    monkeypatch.setattr(F, "softmax", lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim))


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return token_loss(getattr(logits, "logits", logits), tokens[:, 1:]) / tokens[:, 1:].numel()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers_in_float64(name, exact):
    """Catches: gate for up, weights from a biased score, a wrong normalisation, a layer off."""
    model = randomised(MODELS[name][0])
    twin = their_twin(name, model)
    tokens = some_tokens(model.config)
    torch.testing.assert_close(model(tokens), twin(tokens).logits, rtol=1e-9, atol=1e-9)

    mean_loss(model, tokens).backward()
    mean_loss(twin, tokens).backward()
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    for parameter, p in model.named_parameters():
        assert p.grad.abs().max() > 1e-6, f"{parameter}: a gradient near zero proves nothing"
        torch.testing.assert_close(p.grad, theirs[parameter], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_auxiliary_loss_equals_transformers(name, exact, monkeypatch):
    """Theirs pools all layers and does not divide by k; with one layer, that is a factor of k."""
    config, *_ = MODELS[name]
    layer = config.moe.every - 1
    moe = replace(config.moe, balance="microbatch", balance_weight=1.0)
    model = randomised(replace(config, num_layers=layer + 1, moe=moe))
    logits = []
    hook = model.model.layers[layer].mlp.gate.register_forward_hook(
        lambda gate, args, _: logits.append(F.linear(args[0].flatten(0, -2), gate.weight))
    )
    tokens = some_tokens(config)
    before = gradients(model, tokens, weight=0.0)
    after = gradients(model, tokens, weight=1.0)
    model(tokens[:, :-1])
    hook.remove()

    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64})  # in which theirs adds up
    monkeypatch.setattr(modeling_mixtral, "torch", wide)
    theirs = modeling_mixtral.load_balancing_loss_func((logits[-1],), moe.num_experts, moe.top_k)
    model.zero_grad()
    (theirs / moe.top_k).backward()
    for name, parameter in model.named_parameters():
        ours = after[name] - before[name]
        expected = torch.zeros_like(ours) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    gate = f"model.layers.{layer}.mlp.gate.weight"
    assert (after[gate] - before[gate]).abs().max() > 1e-4


def gradients(model: Llama, tokens: Tensor, weight: float) -> dict[str, Tensor]:
    """Gradients with the balancing loss, a mean over tokens, taken `weight` times."""
    weight = torch.tensor(weight / tokens[:, :-1].numel(), dtype=torch.float64)
    for _, router in routers(model):
        router.loss_weight = lambda: weight
    model.zero_grad()
    mean_loss(model, tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_trap_33_the_bias_chooses_and_never_weighs():
    """By the formula of DeepSeek-V3, with a bias below zero, and with its gradient."""
    gate = Router(MoEConfig(16, 3, 8, bias_speed=0.001), 32).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 50, 32, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        gate.weight.normal_(generator=generator)
        gate.e_score_correction_bias.normal_(mean=-3, generator=generator)
    found = gate(x)
    found.weights.square().sum().backward()
    ours, gate.weight.grad = gate.weight.grad, None
    scores = (x.flatten(0, 1) @ gate.weight.t()).softmax(-1)
    experts = (scores + gate.e_score_correction_bias).topk(3).indices
    assert torch.equal(found.experts, experts)
    assert not torch.equal(experts, scores.topk(3).indices)  # so that the bias has a say
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found.weights, weights, rtol=1e-9, atol=0)
    weights.square().sum().backward()
    torch.testing.assert_close(ours, gate.weight.grad, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------- three ways to compute


def some_moe(config: MoEConfig, width: int = 16, dtype: torch.dtype = torch.float32) -> MoE:
    moe = MoE(config, width)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return moe.to(dtype)


def some_hidden(dtype: torch.dtype = torch.float32, seq_len: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, seq_len, 16, generator=generator).to(dtype).requires_grad_()


def by(how: str):
    """Multiply by the grouped product, or by the loop."""
    return mock.patch.object(experts, "can_group", lambda *_: how == "grouped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_equals_the_loop(dtype):
    outs = []
    for how in ("loop", "grouped"):
        moe, x = some_moe(MoEConfig(6, 2, 24), dtype=dtype), some_hidden(dtype)
        with by(how):
            y = moe(x)
        y.float().square().sum().backward()
        outs.append([y, x.grad, *(p.grad for p in moe.parameters())])
    for loop, grouped in zip(*outs, strict=True):
        scale = loop.abs().max().item()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype] * scale
        torch.testing.assert_close(loop, grouped, rtol=0, atol=tolerance)


def test_rows_are_added_up_as_by_torch_and_not_kept():
    """Mutants: the gradient of another row; `index_add`, which keeps them."""
    tokens, rows = torch.tensor([2, 0, 2, 3, 0]), torch.randn(5, 8).double().requires_grad_()
    grad, kept = torch.randn(4, 8).double(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        sums = add_up(rows, tokens, 4, 3)
    expected = torch.zeros(4, 8).double().index_add(0, tokens, rows)
    assert torch.equal(sums, expected)
    assert torch.equal(*(torch.autograd.grad(out, rows, grad)[0] for out in (sums, expected)))
    assert [t.shape for t in kept] == [tokens.shape]


@pytest.mark.parametrize("how", ["loop", "grouped", "padded"])
def test_under_autocast_each_way_multiplies_in_its_dtype(how):
    """As experts that are in bfloat16. Mutant: the grouped product is in float32."""
    rows, counts = some_hidden().detach().flatten(0, 1), torch.tensor([10] * 4)
    ours = some_moe(MoEConfig(4, 2, 24)).experts
    low = copy.deepcopy(ours).bfloat16()

    def compute(some: nn.Module, rows: Tensor) -> Tensor:
        if how == "padded":
            return some(rows.view(4, 10, 16)).flatten(0, 1)
        with by(how):
            return some(rows, counts)

    with torch.autocast("cpu", torch.bfloat16):
        cast = compute(ours, rows)
    assert cast.dtype == torch.bfloat16 and torch.equal(cast, compute(low, rows.bfloat16()))
    cast.sum().backward()
    assert ours.down_proj.grad.dtype == torch.float32 and ours.down_proj.grad.any()


def test_which_tensors_the_grouped_product_takes():
    on_cpu = torch.zeros(3, 16)
    assert can_group(on_cpu) and not can_group(on_cpu.double()) and not can_group(on_cpu[:, :6])
    assert can_group(on_cpu.bfloat16().to("meta")) and not can_group(on_cpu.to("meta"))


def test_full_experts_drop_those_who_come_last():
    """Against a count by hand: of each sequence, an expert computes its first C slots."""
    config = replace(SIX, capacity_factor=0.75)
    moe, x = some_moe(config, dtype=torch.float64), some_hidden(torch.float64)
    capacity = config.capacity(20)
    assert capacity == 5
    experts, weights = (t.tolist() for t in moe.gate(x)[:2])
    flat, expected, load, dropped = x.flatten(0, 1), torch.zeros(40, 16, dtype=torch.float64), {}, 0
    for token in range(40):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            of_sequence = token // 20, expert
            load[of_sequence] = load.get(of_sequence, 0) + 1
            if load[of_sequence] > capacity:
                dropped += 1
                continue
            gate, up = (moe.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
            expected[token] += weight * (moe.experts.down_proj[expert] @ (F.silu(gate) * up))
    assert dropped > 0
    torch.testing.assert_close(moe(x).flatten(0, 1), expected)
    assert moe.dropped == dropped
    valid = torch.zeros(2, 20, dtype=torch.bool)
    moe(x, valid)  # padding that is dropped is no loss
    assert moe.dropped == 0


def test_in_evaluation_nothing_is_dropped_and_no_later_token_matters():
    """So that a model can write. Mutant: seats hang on how many tokens follow."""
    moe = some_moe(replace(SIX, capacity_factor=0.3), dtype=torch.float64)
    x, dropless = some_hidden(torch.float64), some_moe(SIX, dtype=torch.float64)
    assert not torch.allclose(moe(x)[:, :9], moe(x[:, :9]))
    moe.eval()
    torch.testing.assert_close(moe(x)[:, :9], moe(x[:, :9]))
    torch.testing.assert_close(moe(x), dropless(x))


def test_under_autocast_the_router_keeps_all_digits():
    """Mutant: rounded to 16 bits, choices and counts are others."""
    layer = some_moe(replace(SIX, normalise=False)).gate
    x = some_hidden().detach()
    scores = F.linear(x, layer.weight).flatten(0, 1).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x)
    wide = scores.topk(2)
    assert torch.equal(wide.indices, cast.experts) and torch.equal(wide.values, cast.weights)
    cast.weights.sum().backward()
    assert layer.counts.sum() == 80


def test_the_gradient_of_a_sum_is_taken_by_the_grouped_product():
    """It is a view of one number, which torch's backward of that product refuses."""
    rows, counts = some_hidden().detach().flatten(0, 1).requires_grad_(), torch.tensor([40, 0])
    ours = some_moe(MoEConfig(2, 1, 8, normalise=False)).experts
    ours(rows, counts).sum().backward()
    assert rows.grad.any() and ours.down_proj.grad.any()


def test_an_expert_without_tokens_gets_zeros_and_not_none():
    """Trap T29 begins here: a missing gradient would leave the expert out of weight decay."""
    moe, x = some_moe(SIX, dtype=torch.float64), some_hidden(torch.float64)
    with torch.no_grad():
        moe.gate.weight[4] = 0
        moe.gate.weight[4, 0] = -100
        x[..., 0] = x[..., 0].abs() + 1
    moe(x).sum().backward()
    assert moe.gate.counts[4] == 0
    assert not moe.experts.gate_up_proj.grad[4].any() and not moe.experts.down_proj.grad[4].any()
    assert moe.experts.down_proj.grad[0].any()


# --------------------------------------------------------------------------------- balance


def test_trap_31_padding_takes_no_part_in_the_balance():
    """The same sequence, alone and with padding behind it: same counts, same gradient of W."""
    config = replace(SIX, balance="sequence", balance_weight=1.0)
    found = []
    for padding in (0, 7):
        moe = some_moe(config, dtype=torch.float64)
        x = F.pad(some_hidden(torch.float64).detach(), (0, 0, 0, padding), value=0.3)
        valid = torch.zeros(2, 20 + padding, dtype=torch.bool)
        valid[:, :20] = True
        (0.0 * moe(x, valid)).sum().backward()  # the balancing losses alone
        found.append((moe.gate.counts.clone(), moe.gate.weight.grad))
    assert found[0][0].tolist() == found[1][0].tolist() and found[0][0].sum() == 80
    assert found[0][1].abs().max() > 1e-4
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_trap_32_recomputation_routes_alike_and_counts_once(mode):
    config = replace(MODELS["mixtral"][0], moe=replace(SIX, balance="batch"))
    tokens, found = some_tokens(config), []
    for recomputes in (False, True):
        model = randomised(config)
        if recomputes:
            checkpoint_activations(model, mode)
        for rows in tokens.split(1):  # two microbatches
            mean_loss(model, rows).backward()
        counts = {name: router.counts.tolist() for name, router in routers(model)}
        found.append((counts, {name: p.grad for name, p in model.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert all(sum(counts) == tokens[:, :-1].numel() * 2 for counts in found[0][0].values())
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("scope, is_same", [("sequence", True), ("microbatch", False)])
def test_scope_of_the_balance(scope, is_same):
    """Per sequence, other sequences do not matter; over the microbatch they do."""
    found = []
    for rows in (slice(0, 1), slice(0, 2)):
        moe = some_moe(replace(SIX, balance=scope, balance_weight=1.0), dtype=torch.float64)
        x, moe.gate.loss_weight = some_hidden(torch.float64), partial(torch.tensor, 1.0)
        (0.0 * moe(x[rows])).sum().backward()
        found.append(x.grad[0])
    assert torch.allclose(*found) == is_same


def test_bias_finds_the_balance_that_a_loss_would_bend_gradients_for():
    gate = some_moe(replace(SIX, bias_speed=0.002)).gate
    with torch.no_grad():
        gate.weight *= 0.2
        gate.weight[0] = 0
        gate.weight[0, 0] = 0.5  # an expert that most tokens like
    x = some_hidden(seq_len=300).detach()
    x[..., 0] += 2

    def imbalance() -> float:
        gate.reset_counts()
        gate(x).weights.sum().backward()
        return (gate.counts.max() / gate.counts.double().mean()).item()

    before = imbalance()
    for _ in range(100):
        imbalance()
        gate.update_bias()
    assert before > 1.5 and imbalance() < 1.15


def test_the_bias_keeps_32_bits_in_a_model_of_16():
    """In which a step of 0.001 beside 1 would be lost. Mutant: a buffer like any other."""
    config = replace(MODELS["mixtral"][0], moe=replace(SIX, bias_speed=0.001))
    with torch.device("meta"):
        model = Llama(config).bfloat16()
    for _, gate in routers(model.to_empty(device="cpu")):
        assert gate.weight.dtype == torch.bfloat16
        bias = gate.e_score_correction_bias.fill_(1)
        gate.counts.copy_(torch.arange(6))
        gate.update_bias()
        assert bias.dtype == torch.float32 and (bias != 1).all()
        assert torch.equal(gate.half().e_score_correction_bias, bias)
        assert gate.double().e_score_correction_bias.dtype == torch.float64


# ------------------------------------------------------------------------------- the whole model


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(top_k=7), "top_k=7 experts of num_experts=6: use 1 to 6"),
        (dict(top_k=1), "no gradient; use normalise=False, or top_k=2"),
        (dict(balance="always"), "balance='always' is unknown"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(SIX, **wrong)


def test_trap_34_files_hold_every_expert_in_both_directions(tmp_path):
    """Catches a matrix of another expert, gate for up, a converter that drops experts."""
    config, cls, *_ = MODELS["mixtral"]
    model = randomised(config, torch.float32)
    ours, theirs, sharded = (tmp_path / where for where in ("ours", "theirs", "sharded"))
    hf.save(model, ours)
    twin, report = cls.from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    tokens = some_tokens(config)
    torch.testing.assert_close(model(tokens), twin(tokens).logits, rtol=1e-4, atol=1e-4)
    twin.save_pretrained(theirs)
    twin.save_pretrained(sharded, max_shard_size="50KB")
    for folder in (ours, theirs, sharded):
        found = hf.load(folder)
        assert found.config == config
        for parameter, value in found.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[parameter], rtol=0, atol=0)
        aligned = copy.deepcopy(found)  # where weights lie in a file, rounding may be another
        torch.testing.assert_close(aligned(tokens), model(tokens), rtol=0, atol=0)


def test_trap_39_utilisation_counts_the_experts_that_compute():
    """FLOPs of a token are those of its k experts and of the router, however many there are."""
    moe, dense = PRESETS["tiny-moe"], PRESETS["tiny"]
    per_token = [
        replace(moe, moe=replace(moe.moe, num_experts=e)).flops_per_token(64) for e in (8, 64)
    ]
    routers_of = [6 * dense.num_layers * e * dense.hidden_size for e in (8, 64)]
    for flops, router in zip(per_token, routers_of, strict=True):
        assert flops == dense.flops_per_token(64) + router  # 2 x 172 = 344 hidden units
