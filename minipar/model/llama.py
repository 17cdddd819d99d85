"""A Llama, written to be read and to be split from outside.

The model knows nothing of ranks. Four properties let a strategy split it without touching this
file:

- Parameter names are those of Hugging Face. A part that is set to `None` (the embedding, a layer,
  the final norm, the head) is skipped, so a pipeline stage keeps its names.
- Attention takes the number of heads from the projections, so narrower projections work.
- `Attention.core` is an attribute: any function of (q, k, v, mask) may take its place.
- Every parameter has its own random stream, named by (seed, parameter name). So a stage that
  creates a few parameters gets the same values as a model that creates all.

Shapes: B batch, T tokens, D width, H heads, G key/value heads, K head width, F hidden,
V vocabulary, L layers.

Sources: Touvron et al. 2302.13971 (Llama); Grattafiori et al. 2407.21783 (Llama 3); Zhang and
Sennrich 1910.07467 (RMSNorm); Su et al. 2104.09864 (RoPE); Ainslie et al. 2305.13245
(grouped-query attention); Shazeer 2002.05202 (SwiGLU).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.model.config import LlamaConfig, RopeScaling
from minipar.model.init import init_weights
from minipar.model.moe import MoE, MoEConfig

IGNORE_INDEX = -100  # a target with this value takes no part in the loss

Rope = tuple[Tensor, Tensor]  # the tables (cos, sin), each [T, 1, K] or [B, T, 1, K]
Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


# ------------------------------------------------------------------------------------ presets
_TINY = LlamaConfig(256, 128, 344, 4, 4, 2, tie_embeddings=True)
_SMALL = LlamaConfig(256, 256, 688, 6, 8, 4, tie_embeddings=True)
_LLAMA_3_2 = dict(rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0))
_LLAMA_3_2 |= dict(max_seq_len=131_072, tie_embeddings=True)

# V, D, F, L, H, G. Up to "medium" the vocabulary is the 256 bytes; `dataclasses.replace` gives
# another one. Without its router, "tiny-moe" has as many active parameters as "tiny"; "small-moe"
# has as many as "small".
PRESETS: dict[str, LlamaConfig] = {
    "tiny": _TINY,
    "small": _SMALL,
    "tiny-moe": replace(_TINY, moe=MoEConfig(8, 2, 172, balance="microbatch")),
    "small-moe": replace(_SMALL, moe=MoEConfig(16, 2, 344, balance="microbatch")),
    "medium": LlamaConfig(256, 512, 1376, 8, 8, 4),
    "large": LlamaConfig(32_000, 768, 2048, 12, 12, 4),
    "llama-3.2-1b": LlamaConfig(128_256, 2048, 8192, 16, 32, 8, **_LLAMA_3_2),
    "llama-3.2-3b": LlamaConfig(128_256, 3072, 8192, 28, 24, 8, **_LLAMA_3_2),
    "llama-3-8b": LlamaConfig(
        *(128_256, 4096, 14_336, 32, 32, 8), rope_theta=500_000.0, max_seq_len=8192
    ),
    "mixtral-8x7b": LlamaConfig(
        *(32_000, 4096, 14_336, 32, 32, 8),
        rope_theta=1e6,
        max_seq_len=32_768,
        moe=MoEConfig(8, 2, 14_336, balance="microbatch", balance_weight=0.02),
    ),
    "qwen3-30b-a3b": LlamaConfig(
        *(151_936, 2048, 6144, 48, 32, 4),
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_seq_len=40_960,
        qk_norm=True,
        moe=MoEConfig(128, 8, 768, balance="batch", balance_weight=0.001),
    ),
}


# ------------------------------------------------------------------------------- rotary positions
def rope_frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Return theta^(-2i/K), [K/2] fp32 in radians per token, stretched by Llama 3's rule if asked.

    The rule, as released with Llama 3.1, counts the turns of a pair within the original length.
    More than `high_freq_factor` turns: the pair keeps its frequency. Fewer than `low_freq_factor`:
    its frequency is divided by `factor`. Between the two: a linear blend.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    freqs = 1.0 / (config.rope_theta ** (exponent / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / freqs  # tokens per turn
    turns = scaling.original_max_seq_len / wavelength
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * freqs / scaling.factor + keep * freqs


def rope_tables(config: LlamaConfig, positions: Tensor, dtype: torch.dtype) -> Rope:
    """Return cos and sin of every angle, [..., T, 1, K], for positions [T] or [B, T].

    The tables are computed in fp32, as in the published models, and then converted to `dtype`: a
    Llama in float64 uses the same constants. A row depends on its position only, so a shard of the
    sequence passes its own positions. The sine carries the sign of the rotation, see `rotate`.
    """
    angles = positions[..., None].float() * rope_frequencies(config, positions.device)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tuple(table.unsqueeze(-2).to(dtype) for table in tables)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + K/2]) of every head by their angles: [B, T, H, K] -> the same.

    Rolling by half the head swaps the members of all pairs. With the sign in `sin`, this is the
    whole rotation.
    """
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)


# ---------------------------------------------------------------------------------------- modules
class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dim. Low precision is normalised in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def dense_core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q kᵀ / sqrt(K)) v: q [B, H, T, K] and k, v [B, G, T, K] -> [B, H, T, K].

    `mask` is boolean, [B, 1, T, T], True where a query may look; None is causal. With G < H each
    key/value head serves H/G neighbouring query heads.
    """
    if q.is_meta and mask is None:  # on meta torch would take four operations for this one kernel
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    grouped = q.shape[1] != k.shape[1]
    if grouped and _no_fused_groups(q, mask):
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def _no_fused_groups(q: Tensor, mask: Tensor | None) -> bool:
    """True if the fused kernels of a GPU need as many key heads as query heads.

    Only flash attention takes groups. Flash attention takes 16 bits only, and no mask.
    """
    in_float32 = q.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type)
    return q.is_cuda and (in_float32 or mask is not None)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads (G=1: MQA, G=H: MHA)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, width, bias=False)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.core: Core = dense_core

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None) -> Tensor:
        """Attend: [B, T, D] -> the same. The projections decide how many heads there are."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [B, T, H or G, K]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = self.core(*heads_first, mask)  # [B, H, T, K]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), D -> F -> D."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); the MLP may be a mixture."""

    def __init__(self, config: LlamaConfig, layer: int = 0):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _mlp(config, layer)
        self.checkpoint: Callable | None = None  # set by recompute.py

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None, *valid: Tensor) -> Tensor:
        if self.checkpoint is not None and torch.is_grad_enabled():
            return self.checkpoint(self._layer, x, rope, mask, *valid)
        return self._layer(x, rope, mask, *valid)

    def _layer(self, x: Tensor, rope: Rope, mask: Tensor | None, *valid: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x), *valid)


def _mlp(config: LlamaConfig, layer: int) -> nn.Module:
    width, moe = config.hidden_size, config.moe
    if moe is None or not moe.is_sparse(layer):
        return MLP(width, config.intermediate_size)
    shared = MLP(width, moe.num_shared * moe.expert_size) if moe.num_shared else None
    return MoE(moe, width, shared)


class LlamaModel(nn.Module):
    """Embedding, layers, final norm. Any part may be None: then this is a pipeline stage."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, T] (hidden states [B, T, D] if there is no embedding) -> [B, T, D].

        `positions`, [T] or [B, T], default to 0, 1, ... T-1; `mask` as in `dense_core`; `valid`
        [B, T] says which tokens count in the balance of experts (default: all).
        """
        if positions is None:
            self.config.check_length(x.shape[1])
            positions = torch.arange(x.shape[1], device=x.device)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        rope = rope_tables(self.config, positions, x.dtype)
        for layer in self.layers:
            if layer is not None:
                sparse = valid is not None and isinstance(layer.mlp, MoE)
                x = layer(x, rope, mask, valid) if sparse else layer(x, rope, mask)
        return x if self.norm is None else self.norm(x)


class Llama(nn.Module):
    """The language model: `LlamaModel` and the head that turns hidden states into logits.

    `init_weights` draws the weights from `seed` and from nothing else. Built inside
    `with torch.device("meta")`, the model allocates and draws nothing. To give it weights, drop the
    parts that are not wanted (`model.model.layers[0] = None`), call `model.to_empty(device=...)`,
    then `init_weights`.
    """

    def __init__(self, config: LlamaConfig, seed: int = 0):
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would draw from the global stream
            self.model = LlamaModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to_empty(device=device)
        init_weights(self, seed)

    def tie_weights(self) -> None:
        """Make the head and the embedding one parameter again: `to_empty` makes two of them."""
        if self.config.tie_embeddings and None not in (self.lm_head, self.model.embed_tokens):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, T] -> logits [B, T, V] (hidden states [B, T, D] if there is no head)."""
        hidden = self.model(tokens, positions, mask, valid)
        return hidden if self.lm_head is None else self.lm_head(hidden)


# ---------------------------------------------------------------------------------- the loss
def token_loss(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return the *sum* of the cross entropies (nats) of logits [..., V] against targets [...].

    The caller divides by the number of targets that count in the *whole* batch: a mean here would
    become a mean of means over ranks and microbatches (T10). The sum is in fp32 at least. If every
    target is ignored, it is 0 and not NaN.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.flatten(0, -2).to(wide)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="sum")


def loss_on(model: nn.Module, inputs: Tensor, targets: Tensor, context: Sequence[Tensor]) -> Tensor:
    """Return the summed loss of `model` on a microbatch; `context` is its positions and mask."""
    return loss_of(model)(model(inputs, *beside(model, targets, context)), targets)


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that compares outputs of `model` with targets.

    That is `token_loss`, except after a strategy that changes the outputs has set
    `model.token_loss`: under tensor parallelism a rank has the logits of a part of the vocabulary.
    """
    return getattr(model, "token_loss", token_loss)


def beside(model: nn.Module, targets: Tensor, context: Sequence[Tensor]) -> Sequence[Any]:
    """Return the inputs of `model` beside its tokens: `context`, and for experts, `valid`.

    Tokens with a target are valid, so padding takes no part in the balance of experts.
    """
    if getattr(getattr(model, "config", None), "moe", None) is None:
        return context
    return *(*context, None, None)[:2], targets != IGNORE_INDEX


# ------------------------------------------------------------------------------------- generation
@torch.no_grad()
def generate(
    model: Llama,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue tokens [B, T] by sampling -> [B, T + max_new_tokens].

    `temperature=0` takes the likeliest token; `top_k` keeps only the k likeliest. There is no cache
    of keys and values: every new token runs the last `max_seq_len` tokens again, which is fast
    enough for a sample, not for serving.
    """
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -model.config.max_seq_len :])[:, -1].float()  # [B, V]
        if temperature < 1e-6:  # float32 could not hold the quotients
            chosen = logits.argmax(-1, keepdim=True)
        else:
            if top_k is not None and top_k < logits.shape[-1]:
                smallest_kept = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
            probabilities = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat((tokens, chosen), dim=1)
    return tokens
