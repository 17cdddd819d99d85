"""config.json of Hugging Face: read with care, refused where it would be ignored, and written."""

import json
import re
from pathlib import Path

import torch

from minipar.model.config import LlamaConfig, RopeScaling
from minipar.model.moe import MoEConfig

CONFIG = "config.json"


def load_config(path: str | Path) -> LlamaConfig:
    """Read `config.json` of the checkpoint folder `path`, as transformers 4 or 5 wrote it.

    Version 5 keeps all about RoPE in `rope_parameters`; version 4 keeps `rope_theta` at the top and
    the rest in `rope_scaling`.
    """
    file = Path(path) / CONFIG
    raw = read_json(file)
    model_type = raw.get("model_type")
    if model_type not in ("llama", *_EXPERTS):
        known = ", ".join(map(repr, _EXPERTS))
        raise ValueError(f"{file}: model_type={model_type!r}; only 'llama', {known} are known here")
    _refuse_what_would_be_ignored(file, raw)
    try:
        moe = _mixture(raw, model_type) if model_type in _EXPERTS else None
        qk_norm = {"qwen3_moe": "head", "olmoe": "all"}.get(model_type, "")
        rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError("RoPE that differs from layer to layer is not supported")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']!r}: use 1")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"rope_type={kind!r} is not supported; use 'default' or 'llama3'")
        max_seq_len = _size(raw, "max_position_embeddings", 2048)
        scaling = None
        if kind == "llama3":
            scaling = RopeScaling(
                factor=_real(rope, "factor"),
                low_freq_factor=_real(rope, "low_freq_factor"),
                high_freq_factor=_real(rope, "high_freq_factor"),
                original_max_seq_len=_size(rope, "original_max_position_embeddings", max_seq_len),
            )
        num_heads, tied = _size(raw, "num_attention_heads"), raw.get("tie_word_embeddings") or False
        if not isinstance(tied, bool):
            raise ValueError(f"tie_word_embeddings={tied!r} is neither true nor false")
        return LlamaConfig(
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=_size(raw, "hidden_size"),
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=_size(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_size(raw, "num_key_value_heads", num_heads),
            head_dim=_size(raw, "head_dim", 0),
            norm_eps=_real(raw, "rms_norm_eps", 1e-6),
            rope_theta=_real(rope, "rope_theta", _real(raw, "rope_theta", 10_000.0)),
            rope_scaling=scaling,
            max_seq_len=max_seq_len,
            tie_embeddings=tied,
            moe=moe,
            qk_norm=qk_norm,
        )
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


_EXPERTS = {  # model type -> what it calls E, F and the normalised weights, and their defaults
    "mixtral": (("num_local_experts", 8), ("intermediate_size", None), 2, True),
    "qwen3_moe": (("num_experts", 128), ("moe_intermediate_size", 768), 8, False),
    "olmoe": (("num_experts", 64), ("intermediate_size", None), 8, False),
}


def _mixture(raw: dict, kind: str) -> MoEConfig:
    (experts, num_experts), (size, expert_size), top_k, normalise = _EXPERTS[kind]
    experts = experts if experts in raw else "num_local_experts"  # as transformers 5 writes it
    dense = raw.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers={dense!r}: dense layers are the first ones or none")
    return MoEConfig(
        num_experts=_size(raw, experts, num_experts),
        top_k=_size(raw, "num_experts_per_tok", top_k),
        expert_size=_size(raw, size, expert_size),
        first_dense=len(dense),
        every=_size(raw, "decoder_sparse_step", 1),
        normalise=normalise if kind == "mixtral" else bool(raw.get("norm_topk_prob", normalise)),
    )


def _kind_of(config: LlamaConfig) -> str:
    """The model type that stands for `config`. Raises `ValueError` where there is none."""
    moe = config.moe
    if moe is None and not config.qk_norm:
        return "llama"
    kind = {"": "mixtral", "head": "qwen3_moe", "all": "olmoe"}[config.qk_norm]
    plain = MoEConfig(1, 1, 1)
    names = "num_shared", "score", "scale", "num_groups", "bias_speed", "capacity_factor", "forced"
    names += () if kind == "qwen3_moe" else ("first_dense", "every")
    for name in names if moe is not None else ():
        if getattr(moe, name) != getattr(plain, name):
            raise ValueError(f"{name}={getattr(moe, name)!r}: no {kind} has experts like these")
    if moe is None or (kind == "mixtral" and not moe.normalise):
        raise ValueError(f"qk_norm={config.qk_norm!r}, moe={moe}: no known model type has these")
    return kind


_SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

_ALTERS = re.compile(
    r"window|logit|multiplier|scal(e|ing|ar)|cap(ping)?$|clip|drop|bias|qk_|expert|quantiz|rope"
    r"|rotary|alibi|chunk_size|layer_types|per_layer|norm_(type|before|after)|residual"
    r"|attn_temperature"
)

_READ = {"rope_scaling", "rope_parameters", "rope_theta", *_SUPPORTED}
_READ_OF_EXPERTS = {"num_local_experts", "num_experts", "num_experts_per_tok"}


def _refuse_what_would_be_ignored(file: Path, raw: dict) -> None:
    """Raise ValueError for a setting that would make another function of this Llama.

    Such as Mistral's sliding_window or Granite's logits_scaling, which may stand under model_type
    llama: known by what their names are made of, and by a value that is not "off". Other keys are
    about tokens, generation and files; pretraining_tp asks for sums in another order.
    """
    for name, known in _SUPPORTED.items():
        if raw.get(name, known) != known:
            raise ValueError(f"{file}: {name}={raw[name]!r} is not supported, only {known!r} is")
    read = _READ | (_READ_OF_EXPERTS if raw["model_type"] in _EXPERTS else set())
    for name, value in raw.items():
        off = value in (None, False, 0, 1, "", [], {}) and value is not True
        off |= isinstance(value, list) and all(layer == "full_attention" for layer in value)
        off |= "window" in name and raw.get("use_sliding_window") is False
        if not off and name not in read and _ALTERS.search(name):
            raise ValueError(
                f"{file}: {name}={value!r} is not supported: it would be ignored, and the model be "
                "another one; if it means nothing, take the line out"
            )


def _size(raw: dict, name: str, default: int | None = None) -> int:
    """A whole number that some model may have; `default` where it is null or not there."""
    value = _real(raw, name, default)
    if value != default and not (type(value) is int and 0 < value <= 1 << 24):
        raise ValueError(f"{name}={value!r} is no whole number from 1 to {1 << 24}")
    return value


def _real(raw: dict, name: str, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise KeyError(name)
    if type(value) not in (int, float) or not -1e30 < value < 1e30:
        raise ValueError(f"{name}={value!r} is no number")
    return value


def config_json(config: LlamaConfig, dtype: torch.dtype) -> dict:
    """The layout of transformers 4, which version 5 reads as well."""
    scaling = config.rope_scaling
    rope_scaling = scaling and {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
    kind, moe, experts = _kind_of(config), config.moe, {}
    if moe is not None:
        (num_experts, _), (size, _), *_ = _EXPERTS[kind]
        experts = {num_experts: moe.num_experts, size: moe.expert_size}
        experts["num_experts_per_tok"] = moe.top_k
        if kind != "mixtral":
            experts["norm_topk_prob"] = moe.normalise
        if kind == "qwen3_moe":
            experts["decoder_sparse_step"] = moe.every
            experts["mlp_only_layers"] = list(range(moe.first_dense))
    names = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}
    return {
        "architectures": [f"{names.get(kind, 'Llama')}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        # The tokenizer's business: without these lines transformers would assume 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": short(dtype),
        **experts,
    }


LARGEST_FILE = 64 << 20
"""Bytes of a configuration, or of an index of weights."""


def read_json(file: Path) -> dict:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it holds over {LARGEST_FILE >> 20} MiB")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not a JSON object")
    return content


def write_json(file: Path, content: dict) -> None:
    """Write `content` as indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def short(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
