"""Hugging Face checkpoints: a folder with `config.json` and the weights as safetensors.

Weights lie in one file, `model.safetensors`, or in shards `model-00001-of-00003.safetensors` that
`model.safetensors.index.json` maps names to. Our parameter names are theirs, but for experts: files
mostly hold the matrices of each expert apart (`_stored_as`). Known are Llama, and with experts
Mixtral, Qwen3-MoE and OLMoE, whose balancing loss is not taken over: set it in `MoEConfig`.
A safetensors file starts with a table of contents, so a reader of a few tensors reads only these.

Everything that is wrong with a checkpoint raises `ValueError` with the file and the numbers.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minipar.model.llama import Llama, LlamaConfig, RopeScaling
from minipar.model.moe import MoEConfig

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# --------------------------------------------------------------------------------- configuration


def load_config(path: str | Path) -> LlamaConfig:
    """Read `config.json` of the checkpoint folder `path`, as transformers 4 or 5 wrote it.

    Version 5 keeps all about RoPE in `rope_parameters`; version 4 keeps `rope_theta` at the top and
    the rest in `rope_scaling`.
    """
    file = Path(path) / CONFIG
    raw = _read_json(file)
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
    names = ("num_shared", "score", "scale", "num_groups", "bias_speed", "capacity_factor")
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
    r"|rotary|alibi|chunk_size|layer_types|per_layer|norm_(type|before|after)|residual|attn_temperature"
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


def _config_json(config: LlamaConfig, dtype: torch.dtype) -> dict:
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
        experts = {
            num_experts: moe.num_experts,
            size: moe.expert_size,
            "num_experts_per_tok": moe.top_k,
        }
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
        "torch_dtype": _short(dtype),
        **experts,
    }


# --------------------------------------------------------------------------------------- reading


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: Callable[[str], bool] | None = None,
) -> Llama:
    """The model in the checkpoint folder `path`.

    On the CPU and in the dtype of the file, unless `device` and `dtype` say otherwise. With
    `names`, only the parameters it says yes to are read; the others stay on the meta device, to be
    dropped or filled by the caller.
    """
    weights = read_tensors(path, names, dtype, device)  # refuses sizes that no file bears out
    with torch.device("meta"):
        model = Llama(load_config(path))
    for name, tensor in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor))
    for name, buffer in model.named_buffers():  # of routers: counts
        owner, _, attribute = name.rpartition(".")
        zeros = torch.zeros_like(buffer, device=device or "cpu")
        setattr(model.get_submodule(owner), attribute, zeros)
    model.tie_weights()
    return model


def read_tensors(
    path: str | Path,
    names: Callable[[str], bool] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Those parameters of the checkpoint folder `path` that `names` says yes to (default: all).

    Nothing else is read from the disk. A tied head is no parameter of its own: ask for
    `model.embed_tokens.weight`; a file that stores a head beside it must store the same. Names,
    shapes and types are held against `config.json` before any reading. Without `dtype`, all
    parameters have to be of one type.
    """
    path = Path(path)
    config, files = load_config(path), _files_of(path)
    if config.num_layers > len(files):
        raise ValueError(
            f"{path / CONFIG}: num_hidden_layers={config.num_layers}, but there are no weights for "
            f"so many: {len(files)} tensors in all"
        )
    shapes = _expected_shapes(config, path / CONFIG)
    stored = {name: _stored_as(config, name, shapes[name], files) for name in shapes}
    expected = {part: shape for parts in stored.values() for part, (_, shape) in parts.items()}
    asked = [name for name in shapes if names is None or names(name)]
    wanted = {part for name in asked for part in stored[name]}
    missing = sorted(wanted - files.keys())
    if missing:
        raise ValueError(f"{path}: no weights for {_some(missing)}, which {CONFIG} asks for")
    # Old files store the rotary frequencies; tied ones may repeat the embedding as the head.
    known = expected.keys() | {HEAD}
    foreign = sorted(n for n in files.keys() - known if not n.endswith("rotary_emb.inv_freq"))
    if foreign:
        raise ValueError(f"{path}: weights for {_some(foreign)}, which {CONFIG} knows nothing of")

    tensors: dict[str, Tensor] = {}
    first: tuple[str, torch.dtype] | None = None
    if config.tie_embeddings and HEAD in files and EMBEDDING in wanted:
        expected[HEAD] = expected[EMBEDDING]
        wanted.add(HEAD)
    for file in sorted({files[name] for name in wanted}):
        with _open(file) as contents:
            there = set(contents.keys())
            for name in sorted(name for name in wanted if files[name] == file):
                if name not in there:
                    raise ValueError(f"{file}: no {name}, although {INDEX} says that it is here")
                tensor = _read(file, contents, name, expected[name])
                first, found = first or (name, tensor.dtype), tensor.dtype
                if dtype is None and found != first[1]:
                    raise ValueError(
                        f"{file}: {name} is {_short(found)}, but {first[0]} is {_short(first[1])}; "
                        "say which `dtype` all shall have"
                    )
                tensors[name] = tensor.to(device=device or "cpu", dtype=dtype)
    head = tensors.pop(HEAD) if HEAD in wanted and config.tie_embeddings else None
    if head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise ValueError(
            f"{files[HEAD]}: {HEAD} is not {EMBEDDING}, although {CONFIG} says that they are tied; "
            "write tie_word_embeddings: false if the head is one of its own"
        )
    return {name: _assembled(stored[name], tensors, shapes[name]) for name in asked}


Parts = dict[str, tuple[tuple, tuple[int, ...]]]  # name in a file -> where in the tensor, its shape


def _stored_as(
    config: LlamaConfig, name: str, shape: tuple[int, ...], files: Mapping[str, Any] | None = None
) -> Parts:
    """Under which names a parameter of ours is in files: experts apart, unless `files` say not."""
    kind, is_mixtral = "whole", config.moe is not None and not config.qk_norm
    theirs = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if is_mixtral else name
    if ".mlp.experts." in name:
        kind = name.rpartition(".")[2]
    if kind == "whole" or (files is not None and name in files):
        there = name if files is not None and name in files else theirs
        return {there: ((), shape)}
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    names = names[2:] if kind == "down_proj" else names[:2]
    prefix = theirs.rpartition(".")[0]
    prefix = prefix.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else prefix
    rows = shape[1] // len(names)
    return {
        f"{prefix}.{e}.{part}.weight": ((e, slice(i * rows, (i + 1) * rows)), (rows, shape[2]))
        for e in range(shape[0])
        for i, part in enumerate(names)
    }


def _assembled(parts: Parts, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """One tensor of those that files have; each of them is freed."""
    first = tensors[next(iter(parts))]
    if len(parts) == 1 and first.shape == shape:
        return first
    whole = first.new_empty(shape)
    for name, (place, _) in parts.items():
        whole[place] = tensors.pop(name)
    return whole


def _read(file: Path, contents: safe_open, name: str, expected: tuple[int, ...]) -> Tensor:
    """A tensor of the open `file`, once its shape and type are known to be right."""
    try:
        part = contents.get_slice(name)
        shape, kind = tuple(part.get_shape()), part.get_dtype()
        if shape != expected:
            raise ValueError(f"{file}: {name} has shape {shape}, but by {CONFIG} it is {expected}")
        if kind not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(
                f"{file}: {name} is stored as {kind}: quantised weights are not supported; "
                "use F64, F32, F16 or BF16"
            )
        return contents.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: {name} cannot be read ({error})") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _expected_shapes(config: LlamaConfig, file: Path | str = CONFIG) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter; tied ones once, under the name of the embedding."""
    try:
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}
    except RuntimeError as error:  # sizes that multiply to more than torch can count
        raise ValueError(f"{file}: no model has such sizes ({error})") from None


def _files_of(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (path / INDEX).exists():
        weight_map = _read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{path / INDEX}: no weight_map in it")
        for name, file in weight_map.items():
            if not (isinstance(file, str) and _is_shard(file)):
                raise ValueError(
                    f"{path / INDEX}: {name} is said to be in {file!r:.200}, which is no name of a "
                    "safetensors file in this folder"
                )
        return {name: path / file for name, file in weight_map.items()}
    if not (path / SINGLE).exists():
        raise ValueError(f"{path}: neither {SINGLE} nor {INDEX} is in this folder")
    with _open(path / SINGLE) as contents:
        return dict.fromkeys(contents.keys(), path / SINGLE)


def _is_shard(name: str) -> bool:
    """A file right here: a strangers' index must not lead to other folders, nor to devices."""
    return re.fullmatch(r"[\w\-+=.]{1,240}\.safetensors", name) is not None


def _open(file: Path) -> safe_open:
    if not file.is_file():
        raise ValueError(f"{file}: the file is missing, although {INDEX} names it")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        num_bytes = file.stat().st_size
        raise ValueError(
            f"{file}: not a whole safetensors file ({error}); it has {num_bytes} bytes, "
            "perhaps a copy was cut short"
        ) from None


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not a JSON object")
    return content


# --------------------------------------------------------------------------------------- writing


def save(
    source: Llama | Mapping[str, Tensor],
    path: str | Path,
    config: LlamaConfig | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model, or a full state dict together with its `config`, to the folder `path`.

    A new folder appears at once and complete. In a folder that is there already the weights are
    replaced file by file (no file is ever seen half written) and other files are left alone. Shards
    hold at most `max_shard_bytes`, or a single tensor that is larger. Raises `ValueError` if names
    or shapes are not those of `config`.
    """
    if isinstance(source, Llama):
        source, config = source.state_dict(), source.config
    if config is None:
        raise ValueError("a state dict does not say what model it belongs to: pass config as well")
    tensors = _checked(source, config)
    shards = _split(tensors, max_shard_bytes)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    workshop = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")  # beside: the same file system
    workshop.mkdir()
    try:
        _write(workshop, shards, config)
        _publish(workshop, path)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _checked(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """The parameters to write, detached and contiguous."""
    expected = _expected_shapes(config)
    given = set(state) - ({HEAD} if config.tie_embeddings else set())
    if given != expected.keys():
        missing, foreign = sorted(expected.keys() - given), sorted(given - expected.keys())
        raise ValueError(
            f"this is not the full state dict of the config: missing {_some(missing)}; "
            f"not known {_some(foreign)}"
        )
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape or state[name].is_meta:
            where = " without data (meta)" if state[name].is_meta else ""
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)}{where}, but the config says {shape}"
            )
    return {
        part: state[name].detach()[place].contiguous().clone() if place else state[name].detach()
        for name, shape in expected.items()
        for part, (place, _) in _stored_as(config, name, shape).items()
    }


def _split(tensors: dict[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """Fill one shard after the other, in order."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write(folder: Path, shards: list[dict[str, Tensor]], config: LlamaConfig) -> None:
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard = {name: tensor.contiguous() for name, tensor in shard.items()}
        save_file(shard, folder / file, metadata={"format": "pt"})  # transformers wants the format
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtype = next(iter(shards[0].values())).dtype
    (folder / CONFIG).write_text(
        json.dumps(_config_json(config, dtype), indent=2) + "\n", encoding="utf-8"
    )
    for file in set(weight_map.values()):
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors makes its files private


def _publish(workshop: Path, path: Path) -> None:
    if not path.exists():
        os.replace(workshop, path)
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a checkpoint is a folder")
    new = {file.name for file in workshop.iterdir()}
    # Weights first, then what points to them.
    for name in sorted(new, key=lambda name: name.endswith(".json")):
        os.replace(workshop / name, path / name)
    for old in (*path.glob("model*.safetensors"), path / INDEX):
        if old.name not in new:
            old.unlink(missing_ok=True)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "nothing"
