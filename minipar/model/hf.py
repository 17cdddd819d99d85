"""Hugging Face checkpoints: a folder with `config.json` and the weights as safetensors.

This file reads and writes the dense Llama and Mixtral. Weights are in one file,
`model.safetensors`, or in several, listed in `model.safetensors.index.json`; `save` writes one.
Parameter names are the same in files and here, except for experts: a Mixtral file has one matrix
per expert, our model has one tensor for all experts (`_names_in_files`). Mixtral's balancing loss
is not loaded: set it in `MoEConfig`. If `config.json` describes another function than this Llama's,
`load` raises `ValueError`. Proved by tests/model/test_hf.py, against transformers.
"""

import json
import os
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minipar.model.config import LlamaConfig, RopeScaling
from minipar.model.llama import Llama
from minipar.model.moe import MoEConfig
from minipar.text import one_line

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Device = torch.device | str | None

# ----------------------------------------------------------------------------- 1. the configuration
_NAMES = {  # our names, and the names in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_EXPERTS = {
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "intermediate_size",
}
_PLAIN = {  # settings that change what a model computes: the value of this Llama
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
}


def load_config(path: str | Path) -> LlamaConfig:
    """Read `config.json` in the folder `path`, as transformers 4 or 5 wrote it."""
    file = Path(path) / CONFIG
    with _reading(file):
        return _parse(json.loads(file.read_text(encoding="utf-8")))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn the errors of a damaged file in the body into a `ValueError` that names the file."""
    try:
        yield
    except (OSError, AttributeError, KeyError, TypeError, ValueError, SafetensorError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        if file.is_file() and file.stat().st_size < 1024 and b"git-lfs" in file.read_bytes():
            what += "; it is a pointer of git-lfs: run git lfs pull in this folder"
        raise ValueError(f"{file}: {what}") from None


def _parse(raw: dict[str, Any]) -> LlamaConfig:
    kind = raw.get("model_type")
    if kind not in ("llama", "mixtral"):
        raise ValueError(f"model_type={kind!r}; only 'llama' and 'mixtral' are known here")
    for name, plain in _PLAIN.items():
        if raw.get(name) not in (plain, None):
            raise ValueError(f"{name}={raw[name]!r} is not supported, only {plain!r} is")
    defaults = {"num_key_value_heads": raw["num_attention_heads"], "rms_norm_eps": 1e-6}
    given = defaults | {name: value for name, value in raw.items() if value is not None}
    theta, scaling = _parse_rope(raw)
    return LlamaConfig(
        **{ours: given[theirs] for ours, theirs in _NAMES.items() if theirs in given},
        rope_theta=theta,
        rope_scaling=scaling,
        moe=_named(raw, _EXPERTS, MoEConfig) if kind == "mixtral" else None,
    )


def _parse_rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return theta and Llama 3's scaling, if any.

    transformers 5 has both in `rope_parameters`; version 4 has `rope_theta` and `rope_scaling`.
    """
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    if old and new:
        raise ValueError("rope_scaling and rope_parameters are both given; keep one of the two")
    sources = {"rope_theta": raw.get("rope_theta")}, old, new  # the last one with a value wins
    rope = {k: value for given in sources for k, value in given.items() if value is not None}
    theta = rope.pop("rope_theta", 10_000.0)
    kinds = {rope.pop("rope_type", None), rope.pop("type", None)} - {None}
    if kinds <= {"default"} and not rope:
        return theta, None
    if kinds != {"llama3"} or rope.keys() - _SCALING.values():
        kind = " and ".join(sorted(map(repr, kinds))) or "not given"
        use = f"use 'llama3' with {sorted(_SCALING.values())}, or 'default' with none"
        raise ValueError(f"a rope_type that is {kind} is not supported with {sorted(rope)}; {use}")
    return theta, _named(rope, _SCALING, RopeScaling)


def _named(raw: dict[str, Any], names: dict[str, str], make: type) -> Any:
    """Make an object from the values in `raw`, a dict with the names of config.json."""
    return make(**{ours: raw[theirs] for ours, theirs in names.items()})


def config_json(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json in the layout of transformers 4, which 5 reads as well.

    Raises `ValueError` for a model that is neither a Llama nor a Mixtral.
    """
    moe, scaling = config.moe, config.rope_scaling
    said = (*_EXPERTS, "balance", "balance_weight")  # all other fields must have their defaults
    plain = moe and MoEConfig(**{name: getattr(moe, name) for name in said})
    if config.qk_norm or moe != plain:
        raise ValueError(f"no Llama and no Mixtral of Hugging Face's is like this: {config}")
    kind = "llama" if moe is None else "mixtral"
    content = {"architectures": [f"{kind.title()}ForCausalLM"], "model_type": kind}
    content |= {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    content |= {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_scaling": None}
    if scaling is not None:
        named = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()}
        content["rope_scaling"] = {"rope_type": "llama3", **named}
    if moe is not None:
        content |= {theirs: getattr(moe, ours) for ours, theirs in _EXPERTS.items()}
    # The tokenizer has the special tokens. Without these lines transformers assumes 1 and 2.
    content |= {"bos_token_id": None, "eos_token_id": None}
    return content | {"torch_dtype": str(dtype).removeprefix("torch.")}


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------- 2. reading
def load(path: str | Path, dtype: torch.dtype | None = None, device: Device = None) -> Llama:
    """Return the model in the folder `path`, on the CPU and in the dtype of its files by default.

    Raises `ValueError` where names, shapes or types do not fit `config.json`.
    """
    folder = Folder(path)
    weights = {name: folder.read(name, dtype, device) for name in folder.shapes}
    with torch.device("meta"):
        model = Llama(folder.config)
    return fill(model, weights, device)


def fill(model: Llama, weights: Mapping[str, Tensor], device: Device = None) -> Llama:
    """Make `weights` the parameters of `model`, which is on the meta device, without a copy.

    Parameters that are not in `weights` stay on meta. Buffers (the counts of routers) become zeros,
    on the CPU by default. Returns the model.
    """
    model.load_state_dict(weights, strict=False, assign=True)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.zeros_like(buffer, device=device or "cpu"))
    model.tie_weights()
    return model


class Folder:
    """A checkpoint folder: its table of contents is read once, its tensors one at a time.

    A tied head is not a parameter of its own: read `model.embed_tokens.weight`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.config = Path(path), load_config(path)
        self.files, self.shapes = _files_of(self.path), _shapes(self.config)
        names = [_names_in_files(self.config, name) for name in self.shapes]
        expected = {stored for experts in names for parts in experts for stored in parts}
        # Old files also have rotary frequencies. Some files repeat a tied embedding as the head.
        ignored = {name for name in self.files if name.endswith("rotary_emb.inv_freq")} | {HEAD}
        missing, foreign = expected - self.files.keys(), self.files.keys() - expected - ignored
        if missing or foreign:
            found = f"missing {_some(missing)}; not known {_some(foreign)}"
            raise ValueError(f"{self.path}: the weights are not those of {CONFIG}: {found}")
        stored_head = self.config.tie_embeddings and HEAD in self.files
        if stored_head and not torch.equal(self._stored(HEAD), self._stored(EMBEDDING)):
            differs = f"{HEAD} is not {EMBEDDING}, although {CONFIG} says that they are tied"
            raise ValueError(f"{self.path}: {differs}; write tie_word_embeddings: false there")

    def read(self, name: str, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        """Return the parameter `name`, by default on the CPU and in the dtype of its file."""
        names = _names_in_files(self.config, name)
        experts = [torch.cat([*map(self._stored, parts)]) for parts in names]
        tensor = torch.stack(experts) if ".experts." in name else experts[0]
        if tuple(tensor.shape) != self.shapes[name]:
            found = f"{name} has shape {tuple(tensor.shape)}"
            raise ValueError(f"{self.path}: {found}, but by {CONFIG} it is {self.shapes[name]}")
        return tensor.to(device=device or "cpu", dtype=dtype)

    def _stored(self, name: str) -> Tensor:
        path = self.files[name]
        with _reading(path), safe_open(path, framework="pt") as file:
            return file.get_tensor(name)


def _files_of(path: Path) -> dict[str, Path]:
    """Return the file of each stored tensor, by the tensor's name; one file goes before several."""
    single, index = path / SINGLE, path / INDEX
    if single.exists():
        with _reading(single), safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.exists():
        raise ValueError(f"{path}: neither {SINGLE} nor {INDEX} is in this folder")
    with _reading(index):
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: path / file for name, file in weight_map.items()}


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter; a tied one is named once, as the embedding."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}


def _names_in_files(config: LlamaConfig, name: str) -> list[list[str]]:
    """Return the names of the matrices in files that make up our parameter `name`.

    Experts: one list per expert; its matrices are concatenated along dim 0. Otherwise: one list of
    one name.
    """
    if ".experts." not in name:
        return [[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")]]
    layer, kind = name.split(".mlp.experts.")
    matrices = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
    stems = (f"{layer}.block_sparse_moe.experts.{e}" for e in range(config.moe.num_experts))
    return [[f"{stem}.{matrix}.weight" for matrix in matrices] for stem in stems]


def _some(things: Set) -> str:
    more = f" and {len(things) - 3} more" if len(things) > 3 else ""
    return ", ".join(map(str, sorted(things)[:3])) + more or "nothing"


# ------------------------------------------------------------------------------------- 3. writing
def save(model: Llama, path: str | Path) -> None:
    """Write a whole model to the folder `path`.

    `save` replaces weights and config.json, and leaves other files. If the model has only a part of
    its weights, as under some strategies, `save` raises `ValueError` and writes nothing.
    """
    path, state, config = Path(path), model.state_dict(), model.config
    if config.tie_embeddings:
        state.pop(HEAD, None)
    described = config_json(config, next(iter(state.values())).dtype)
    found = {(name, tuple(tensor.shape)) for name, tensor in state.items()}
    expected = set(_shapes(config).items())
    if found != expected:
        raise ValueError(f"not a whole model: missing {_some(expected - found)}")
    tensors = {}
    for name, tensor in state.items():
        experts = tensor if ".experts." in name else [tensor]
        for parts, one in zip(_names_in_files(config, name), experts, strict=True):
            tensors |= zip(parts, one.contiguous().chunk(len(parts)), strict=True)

    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f".{SINGLE}.tmp"
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})  # transformers wants the format
    except SafetensorError as error:  # as on a full disk
        raise OSError(f"cannot write {path}: {error}") from None
    for old in (path / INDEX, *path.glob("model-*-of-*.safetensors")):
        old.unlink(missing_ok=True)
    os.replace(unfinished, path / SINGLE)
    write_json(path / CONFIG, described)
