"""Checkpoints: their content, and how they are read. Writing them: saver.py.

Layout. One folder per checkpoint, `checkpoints/step_000120/`:

    weights_00002.safetensors   rank 2's share of the weights, under their serial names
    state_00002.safetensors     and of the optimizer state: optimizer/state/lm_head.weight/exp_avg
    state.pt                    the rest of the state, with meta tensors where those belong
    manifest.json               length and CRC-32 of the other files; written last

A tensor in a file is a whole tensor of the serial model, or a *box* of one: a part with an offset
and a size along each dim. The metadata of the file say which box: `["NAME", [whole shape],
[offset along each dim]]` by key; the second box of a tensor has the key "NAME#1". So any plan on
any number of ranks can read a checkpoint, and so can one process.

A folder with such a name is complete. `load` compares its files with the manifest.
"""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.model import hf
from minipar.model.llama import Llama, LlamaConfig, RopeScaling
from minipar.model.moe import MoEConfig
from minipar.parallel.base.shards import Region
from minipar.text import one_line

FORMAT = 4  # of the layout above
ALONE = Axis("world", 0, 1, (0,))
Files = dict[str, dict[str, int]]  # by name of a file: {"num_bytes": ..., "crc32": ...}
CHUNK = 1 << 22  # bytes of a file that are read at once for its CRC
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
"""Kinds of numbers, by their names in safetensors."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model."""


# ---------------------------------------------------------------------- which checkpoints there are
def available(folder: Path) -> list[Path]:
    """Return the complete checkpoints below `folder`, by steps."""
    return sorted((p for p in folder.glob("step_*") if p.name[5:].isdecimal()), key=step_of)


def newest(run: Path) -> Path | None:
    """Return the checkpoint of a run with the highest step; None if the run has none."""
    return max(available(run / "checkpoints"), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps done when `checkpoint` was written."""
    return int(checkpoint.name.removeprefix("step_"))


# ---------------------------------------------------------------------- reading
class Box(NamedTuple):
    """A part of a tensor, in a file under `key`: of `size` along each dim, from `offset` on."""

    file: str
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def common(self, offset: Sequence[int], size: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return (start, stop) along each dim of the overlap with another box; None without one."""
        found = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.offset, self.size, offset, size, strict=True)
        ]
        return found if all(start < stop for start, stop in found) else None


@dataclass(frozen=True)
class Stored:
    """A tensor of `shape` in the files of a checkpoint; a call reads it, or a region of it."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    def __call__(self, region: Region | None = None) -> Tensor:
        """Return the whole tensor, or the numbers [k] of `region`. Open only files with some."""
        wanted = Region.whole(self.shape) if region is None else region
        numbers = torch.empty(wanted.numel, dtype=self.dtype)
        for offset, part in wanted.boxes(numbers):  # `part` is a view of `numbers`
            for box in self.boxes:
                overlap = box.common(offset, part.shape)
                if overlap is None:
                    continue
                with (
                    reading(self.folder, box.file),
                    safe_open(self.folder / box.file, "pt") as contents,
                ):
                    stored = contents.get_slice(box.key)[_seen_from(box.offset, overlap)]
                part[_seen_from(offset, overlap)] = stored
        return numbers.view(self.shape) if region is None else numbers


def _seen_from(offset: Sequence[int], place: list[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for (a, b), at in zip(place, offset, strict=True))


def load(
    folder: Path, axis: Axis = ALONE, *, lazily: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (weights, state) of a checkpoint, as they were saved.

    A collective of `axis`: each rank checks the contents of a share of the files. With `lazily`,
    every weight and every tensor of the optimizer is a `Stored`, of which each rank can read its
    part. Raises `CheckpointError` on all ranks if the checkpoint is damaged.
    """
    with reading(folder, "manifest.json"):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if (layout := manifest["format"]) != FORMAT:
            says = f"it has format {layout}, not {FORMAT}"
            raise ValueError(f"{says}; export it by the minipar that wrote it")
        files, tied = dict(manifest["files"]), dict(manifest["tied"])
    own = sorted(files)[axis.rank :: axis.size]
    damaged = [name for name in own if digest_of(folder / name) != files[name]]
    for names in all_gather_object(damaged, axis):
        if names:
            damage = f"{names[0]} is missing, or does not match its CRC-32"
            raise CheckpointError(f"checkpoint {folder}: {damage}; resume from an earlier one")
    weights, tensors = (
        {name: stored if lazily else stored() for name, stored in found.items()}
        for found in (find(folder, files, kind) for kind in ("weights_", "state_"))
    )
    weights |= {alias: weights[name] for alias, name in tied.items()}
    with reading(folder):
        state = torch.load(folder / "state.pt", weights_only=True)
        return weights, map_tensors(state, lambda name, t: tensors[name] if t.is_meta else t)


def find(folder: Path, files: Files, kind: str) -> dict[str, Stored]:
    """Return where the tensors of a kind are, in the files of all ranks; read only the headers."""
    facts: dict[str, tuple] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for file in sorted(name for name in files if name.startswith(kind)):
        with reading(folder, file), safe_open(folder / file, "pt") as contents:
            told = contents.metadata() or {}
            for key in list(contents.keys()):
                head = contents.get_slice(key)
                size = head.get_shape()
                name, shape, offset = json.loads(told[key]) if key in told else (key, size, None)
                facts[name] = tuple(shape), DTYPES[head.get_dtype()]
                boxes[name].append(Box(file, key, tuple(offset or [0] * len(size)), tuple(size)))
    for name, (shape, _) in facts.items():
        numel = sum(math.prod(box.size) for box in boxes[name])
        if numel != math.prod(shape):
            has = f"{name} of shape {shape} has {numel:,} numbers in all files"
            raise CheckpointError(f"checkpoint {folder}: {has}")
    return {name: Stored(folder, name, *facts[name], tuple(boxes[name])) for name in sorted(facts)}


def digest_of(path: Path) -> dict[str, int]:
    """Return length and CRC-32 of a file; {} if there is none."""
    if not path.is_file():
        return {}
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return {"num_bytes": path.stat().st_size, "crc32": crc}


@contextmanager
def reading(folder: Path, name: str = "state.pt") -> Iterator[None]:
    """Turn any error of the body into a `CheckpointError` that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the reader of a damaged file may raise any error
        what = one_line(error, 200)
        what = what if isinstance(error, ValueError) else f"{type(error).__name__}: {what}"
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be used: {what}") from None


def map_tensors(tree: Any, change: Any, path: str = "") -> Any:
    """Return `tree` with ``change("key/0/key", tensor)`` in the place of every tensor."""
    if isinstance(tree, Tensor):
        return change(path.removeprefix("/"), tree)
    if isinstance(tree, dict):
        return {key: map_tensors(v, change, f"{path}/{key}") for key, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(v, change, f"{path}/{i}") for i, v in enumerate(tree))
    return tree


# ---------------------------------------------------------------------- weights and models
def check_shapes(own: Mapping[str, Sequence[int]], weights: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` unless `weights` have the names and shapes `own`."""
    here = {name: tuple(shape) for name, shape in own.items()}
    there = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            shapes = f"{there.get(name)}, not {here.get(name)}"
            raise CheckpointError(f"{where} is of another model: {name[:300]} has shape {shapes}")


def model_of(checkpoint: Path) -> Llama:
    """Return the model of a checkpoint, on the CPU. Raises `CheckpointError` if it is damaged."""
    weights, state = load(checkpoint)
    with reading(checkpoint):
        shape = dict(state["model"])
        if shape["rope_scaling"] is not None:
            shape["rope_scaling"] = RopeScaling(**shape["rope_scaling"])
        if shape["moe"] is not None:
            shape["moe"] = MoEConfig(**shape["moe"])
        with torch.device("meta"):
            model = Llama(LlamaConfig(**shape))
        return hf.fill(model, weights)
