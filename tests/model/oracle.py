"""transformers' Llama as the oracle of ours, and the configurations to compare the two on."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minipar.model.llama import Llama, LlamaConfig, RopeScaling

_BASE = dict(vocab_size=61, hidden_size=48, intermediate_size=80, num_layers=3, max_seq_len=64)

CONFIGS = {
    "mha": LlamaConfig(**_BASE, num_heads=4, num_kv_heads=4),
    "gqa": LlamaConfig(**_BASE, num_heads=6, num_kv_heads=2),
    "mqa": LlamaConfig(**_BASE, num_heads=4, num_kv_heads=1, norm_eps=1e-3),
    "tied": LlamaConfig(**_BASE, num_heads=4, num_kv_heads=2, tie_embeddings=True),
    "wide-heads": LlamaConfig(**_BASE, num_heads=4, num_kv_heads=2, head_dim=20),
    # Of its six pairs one is kept, two are blended and three are slowed down: all of the rule.
    "llama3-rope": LlamaConfig(
        **_BASE,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=500.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_seq_len=30),
        tie_embeddings=True,
    ),
}


def randomised(config: LlamaConfig, dtype: torch.dtype = torch.float64) -> Llama:
    """Our model with weights far from their initial values, so that every term of it matters."""
    model = Llama(config).to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 0.2 if parameter.ndim > 1 else 0.3
            parameter.mul_(float(parameter.ndim == 1)).add_(scale * noise)
    return model


def their_config(config: LlamaConfig) -> TheirConfig:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    return TheirConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=config.tie_embeddings,
    )


def their_twin(model: Llama) -> LlamaForCausalLM:
    """transformers' model with the weights of ours."""
    twin = LlamaForCausalLM(their_config(model.config)).to(next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict(), strict=True)
    return twin


def exact_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    """Their norm in the dtype of its input.

    Theirs rounds to fp32 even when the model is in float64, which would bury every difference under
    1e-7. A test that wants 1e-9 puts this in its place; another compares with theirs as it is.
    """
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def some_tokens(config: LlamaConfig, batch: int = 2, seq_len: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
