"""Hugging Face checkpoints: a folder with `config.json` and the weights as safetensors.

Weights lie in one file, `model.safetensors`, or in shards `model-00001-of-00003.safetensors` that
`model.safetensors.index.json` maps names to. Our parameter names are theirs, but for experts: files
mostly hold the matrices of each expert apart (`_stored_as`). Known are Llama, and with experts
Mixtral, Qwen3-MoE and OLMoE, whose balancing loss is not taken over: set it in `MoEConfig`. Of
DeepSeek-V3, the routers alone: `load_router`.
A safetensors file starts with a table of contents, so a reader of a few tensors reads only these.

Everything that is wrong with a checkpoint raises `ValueError` with the file and the numbers.
"""

import os
import re
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minipar.model.hf_config import CONFIG, config_json, load_config, read_json, short, write_json
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig, Router

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# --------------------------------------------------------------------------------------- reading


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Llama:
    """The model in the checkpoint folder `path`.

    On the CPU and in the dtype of the file, unless `device` and `dtype` say otherwise.
    """
    folder = Folder(path)
    weights = folder.read(dtype=dtype, device=device)  # refuses sizes that no file bears out
    with torch.device("meta"):
        model = Llama(folder.config)
    return fill(model, weights, device)


def fill(
    model: Llama, weights: Mapping[str, Tensor], device: torch.device | str | None = None
) -> Llama:
    """Make `weights` those of `model`, which is on the meta device: none is drawn, none is copied.

    Parameters that `weights` lack stay on meta; buffers become zeros, on the CPU unless `device`
    says otherwise. Returns the model.
    """
    model.load_state_dict(weights, strict=False, assign=True)
    for name, buffer in model.named_buffers():  # of routers: counts
        if buffer.is_meta:
            owner, _, attribute = name.rpartition(".")
            zeros = torch.zeros_like(buffer, device=device or "cpu")
            setattr(model.get_submodule(owner), attribute, zeros)
    model.tie_weights()
    return model


class Folder:
    """A checkpoint folder of which tensors are read time after time: what it has is read once."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config, self.files = load_config(path), _files_of(path)
        if self.config.num_layers > len(self.files):
            raise ValueError(
                f"{path / CONFIG}: num_hidden_layers={self.config.num_layers}, but there are no "
                f"weights for so many: {len(self.files)} tensors in all"
            )
        self.shapes = _expected_shapes(self.config, path / CONFIG)
        self.stored = {
            name: _stored_as(self.config, name, shape, self.files)
            for name, shape in self.shapes.items()
        }
        expected = {p: shape for parts in self.stored.values() for p, (_, shape) in parts.items()}
        # Old files store the rotary frequencies; tied ones may repeat the embedding as the head.
        unknown = self.files.keys() - expected.keys() - {HEAD}
        self.foreign = sorted(n for n in unknown if not n.endswith("rotary_emb.inv_freq"))
        if self.config.tie_embeddings and EMBEDDING in expected:
            expected[HEAD] = expected[EMBEDDING]
        self.expected = expected  # shapes by name, as in the files

    def read(
        self,
        names: Callable[[str], bool] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """Those parameters that `names` says yes to (default: all).

        Nothing else is read from the disk. A tied head is no parameter of its own: ask for
        `model.embed_tokens.weight`; a file that stores a head beside it must store the same. Names,
        shapes and types are held against `config.json` before any reading. Without `dtype`, all
        parameters have to be of one type.
        """
        config, files = self.config, self.files
        asked = [name for name in self.shapes if names is None or names(name)]
        wanted = {part for name in asked for part in self.stored[name]}
        missing = sorted(wanted - files.keys())
        if missing:
            raise ValueError(
                f"{self.path}: no weights for {_some(missing)}, which {CONFIG} asks for"
            )
        if self.foreign:
            some = _some(self.foreign)
            raise ValueError(f"{self.path}: weights for {some}, which {CONFIG} knows nothing of")

        tensors: dict[str, Tensor] = {}
        first: tuple[str, torch.dtype] | None = None
        if config.tie_embeddings and HEAD in files and EMBEDDING in wanted:
            wanted.add(HEAD)
        for file in sorted({files[name] for name in wanted}):
            with _open(file) as contents:
                there = set(contents.keys())
                for name in sorted(name for name in wanted if files[name] == file):
                    if name not in there:
                        raise ValueError(
                            f"{file}: no {name}, although {INDEX} says that it is here"
                        )
                    tensor = _read(file, contents, name, self.expected[name])
                    first, found = first or (name, tensor.dtype), tensor.dtype
                    if dtype is None and found != first[1]:
                        raise ValueError(
                            f"{file}: {name} is {short(found)}, but {first[0]} is "
                            f"{short(first[1])}; say which `dtype` all shall have"
                        )
                    tensors[name] = tensor.to(device=device or "cpu", dtype=dtype)
        head = tensors.pop(HEAD) if HEAD in wanted and config.tie_embeddings else None
        if head is not None and not torch.equal(head, tensors[EMBEDDING]):
            raise ValueError(
                f"{files[HEAD]}: {HEAD} is not {EMBEDDING}, although {CONFIG} says that they are "
                "tied; write tie_word_embeddings: false if the head is one of its own"
            )
        return {name: _assembled(self.stored[name], tensors, self.shapes[name]) for name in asked}


_ROUTER = {  # of DeepSeek-V3: our names, theirs
    "num_experts": "n_routed_experts", "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size", "normalise": "norm_topk_prob",
    "scale": "routed_scaling_factor", "num_groups": "n_group", "top_groups": "topk_group",
}  # fmt: skip


def load_router(path: str | Path, layer: int) -> Router:
    """The router of one layer of the DeepSeek-V3 in the folder `path`, in float32 at least.

    Of its files, only `weight` [E, D] and `e_score_correction_bias` [E] are read. Raises
    `ValueError` for a folder of another model, and for a layer without experts.
    """
    path, raw, gate = Path(path), read_json(Path(path) / CONFIG), f"model.layers.{layer}.mlp.gate"
    try:
        told = {ours: raw[theirs] for ours, theirs in _ROUTER.items()}
        speed = 0.001  # of the bias, which no file has: arXiv 2412.19437, section 4.2
        router = Router(MoEConfig(**told, score="sigmoid", bias_speed=speed), raw["hidden_size"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path / CONFIG}: no router of DeepSeek-V3 ({error!r})") from None
    files, found = _files_of(path), {}
    for name, value in router.state_dict().items():
        if (stored := f"{gate}.{name}") not in files:
            raise ValueError(f"{path}: no weights for {stored}; is layer {layer} dense?")
        with _open(files[stored]) as contents:
            read = _read(files[stored], contents, stored, tuple(value.shape))
        found[name] = read.to(torch.promote_types(read.dtype, torch.float32))
    router.load_state_dict(found, assign=True)
    return router


def save_router(router: Router, path: str | Path, layer: int) -> None:
    """Write `router` to the new folder `path`, as `load_router` reads it.

    Raises `ValueError` for a router of another kind, `FileExistsError` where the folder is there.
    """
    path, moe = Path(path), router.config
    if moe.score != "sigmoid" or moe.bias_speed is None:
        raise ValueError(f"a router of DeepSeek-V3 has sigmoids and a bias, this one is of {moe}")
    path.mkdir(parents=True)
    told = {theirs: getattr(moe, ours) for ours, theirs in _ROUTER.items()}
    told["hidden_size"] = router.weight.shape[1]
    write_json(path / CONFIG, told)
    named = {f"model.layers.{layer}.mlp.gate.{n}": t for n, t in router.state_dict().items()}
    save_file(named, path / SINGLE, metadata={"format": "pt"})


Parts = dict[str, tuple[tuple, tuple[int, ...]]]  # name in a file -> where in the tensor, its shape


def _stored_as(
    config: LlamaConfig, name: str, shape: tuple[int, ...], files: Container[str] = ()
) -> Parts:
    """Under which names a parameter of ours is in files: as here where `files` have it so.

    Otherwise experts are apart, and in a Mixtral they and their router have another path.
    """
    if name in files:
        return {name: ((), shape)}
    is_mixtral, theirs = config.moe is not None and not config.qk_norm, name
    if is_mixtral:
        theirs = re.sub(r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1.", name)
    if ".mlp.experts." not in name:
        return {theirs: ((), shape)}
    prefix, _, kind = theirs.rpartition(".")
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    names = names[2:] if kind == "down_proj" else names[:2]
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


def _expected_shapes(config: LlamaConfig, file: Path | str = CONFIG) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter; tied ones once, under the name of the embedding."""
    try:
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}
    except RuntimeError as error:  # sizes that multiply to more than torch can count
        raise ValueError(f"{file}: no model has such sizes ({error})") from None


_SHARD = re.compile(r"[\w\-+=.]{1,240}\.safetensors")
"""A file right here: a stranger's index must not lead to other folders, nor to devices."""


def _files_of(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{path / INDEX}: no weight_map in it")
        for name, file in weight_map.items():
            if not (isinstance(file, str) and _SHARD.fullmatch(file)):
                raise ValueError(
                    f"{path / INDEX}: {name} is said to be in {file!r:.200}, which is no name of a "
                    "safetensors file in this folder"
                )
        return {name: path / file for name, file in weight_map.items()}
    if not (path / SINGLE).exists():
        raise ValueError(f"{path}: neither {SINGLE} nor {INDEX} is in this folder")
    with _open(path / SINGLE) as contents:
        return dict.fromkeys(contents.keys(), path / SINGLE)


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


# --------------------------------------------------------------------------------------- writing


def save(
    source: Llama | Mapping[str, Tensor],
    path: str | Path,
    config: LlamaConfig | None = None,
    max_shard_bytes: int = 5 * 10**9,
    fused: bool = False,
) -> None:
    """Write a model, or a full state dict together with its `config`, to the folder `path`.

    A new folder appears at once and complete. In a folder that is there already the weights are
    replaced file by file (no file is ever seen half written) and other files are left alone. Shards
    hold at most `max_shard_bytes`, or a single tensor that is larger. The matrices of experts lie
    apart, or `fused` as here. Raises `ValueError` if names or shapes are not those of `config`.
    """
    if isinstance(source, Llama):
        source, config = source.state_dict(), source.config
    if config is None:
        raise ValueError("a state dict does not say what model it belongs to: pass config as well")
    config_json(config, torch.float32)  # raises for what no model type has
    tensors = _checked(source, config, fused)
    shards = _split(tensors, max_shard_bytes)
    path = Path(path).resolve()  # of "." there would be no name
    path.parent.mkdir(parents=True, exist_ok=True)
    workshop = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")  # beside: the same file system
    workshop.mkdir()
    try:
        _write(workshop, shards, config)
        _publish(workshop, path)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _checked(state: Mapping[str, Tensor], config: LlamaConfig, fused: bool) -> dict[str, Tensor]:
    """The parameters to write, under the names of files."""
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
        part: state[name].detach()[place].clone() if place else state[name].detach()
        for name, shape in expected.items()
        for part, (place, _) in _stored_as(config, name, shape, state if fused else ()).items()
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
        write_json(folder / INDEX, index)
    write_json(folder / CONFIG, config_json(config, next(iter(shards[0].values())).dtype))
    for file in set(weight_map.values()):
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors makes its files private


def _publish(workshop: Path, path: Path) -> None:
    if not path.exists():
        os.replace(workshop, path)
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a checkpoint is a folder")
    new = {file.name for file in workshop.iterdir()}
    # Weights first, then what points to them; meanwhile, nothing does.
    (path / INDEX).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: name.endswith(".json")):
        os.replace(workshop / name, path / name)
    for old in (*path.glob("model*.safetensors"), path / INDEX):
        if old.name not in new:
            old.unlink(missing_ok=True)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "nothing"
