"""Checkpoints: what is in them, and how they are read. Writing them: saver.py.

Layout. One folder per checkpoint, `checkpoints/step_000120/`:

    weights_00002.safetensors   rank 2's share of the weights, under their serial names
    state_00002.safetensors     and of all other tensors: optimizer/state/lm_head.weight/exp_avg ...
    state.pt                    the rest of the state: numbers, and where those tensors belong
    manifest.json               length and CRC-32 of the other files, and a number that grows with
                                each save of a run; written last

A tensor is whole, as one device would have it, in the file of whichever rank wrote it; or files
have boxes of it, of which a file keeps the second under the key "NAME#1". What a box is of, the
file tells in its metadata, by key: `["NAME", [whole shape], [offset along each dim]]`. So a run can
go on by another plan or on another number of ranks, each of which reads what it needs, and one
process can read it all. In files of format 3, there are intervals of tensors laid out flat; the
manifest says where they begin.

A folder of this name is complete. Its files are held against the manifest, so that one that is cut
short or changed later is noticed: `verify` looks at their lengths, `load` also into them.

Proved by: tests/train/test_checkpoint.py.
"""

import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.model import hf
from minipar.model.llama import LlamaConfig, RopeScaling
from minipar.model.moe import MoEConfig
from minipar.parallel.base.shards import Region, boxes_of, full_shape
from minipar.text import one_line

FORMATS = 2, 3, 4  # of the layout above: whole tensors; some in intervals; some in boxes
ALONE = Axis("world", 0, 1, (0,))
# Name of a file: {"num_bytes": ..., "crc32": ...}; "boxes": how many, if any; in format 3,
# "intervals": {name: [start, *shape]}.
Files = dict[str, dict[str, Any]]
CHUNK = 1 << 22  # bytes of a file that are looked into at once
DTYPES = {  # in safetensors' words
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_OF = {word: dtype for dtype, word in DTYPES.items()}
_NAME = re.compile(r"step_([0-9]{6,18})")
_FILE = re.compile(r"(weights|state)_[0-9]{1,9}\.safetensors|state\.pt")  # in this folder, always
_NOT_JSON = (ValueError, TypeError, OverflowError, RecursionError)


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model."""


# ---------------------------------------------------------------------- reading
def available(folder: Path) -> list[Path]:
    """The complete checkpoints below `folder`, oldest first."""
    found = folder.glob("step_*") if folder.is_dir() else []
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps done when `checkpoint` was written."""
    return int(checkpoint.name.removeprefix("step_"))


def number_of(checkpoint: Path) -> int:
    """The number that its manifest has: of two, the one with the higher was written later.

    It is 0 for checkpoints of versions that had no numbers, and -1 if it cannot be read.
    """
    try:
        return int(
            json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8")).get("number", 0)
        )
    except (OSError, *_NOT_JSON, AttributeError):
        return -1


class Box(NamedTuple):
    """A part of a tensor, in a file under `key`: of `size` along each dim, from `offset` on."""

    file: str
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int | None = None  # what `key` has is laid out flat, and the box begins here

    def meets(self, offset: tuple[int, ...], size: tuple[int, ...]) -> list[slice] | None:
        """Return what it has in common with another box, in terms of the whole; None: nothing."""
        found = [
            slice(max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.offset, self.size, offset, size, strict=True)
        ]
        return found if all(part.start < part.stop for part in found) else None

    def read(self, contents: safe_open, where: list[slice]) -> Tensor:
        """Return the numbers at `where` of the whole, reading no others."""
        own = tuple(_seen_from(self.offset, where))
        if self.start is not None:
            flat = contents.get_slice(self.key)[self.start : self.start + math.prod(self.size)]
            return flat.view(self.size)[own]
        return contents.get_slice(self.key)[own] if own else contents.get_tensor(self.key)


def _seen_from(offset: tuple[int, ...], where: list[slice]) -> Iterator[slice]:
    return (slice(w.start - at, w.stop - at) for w, at in zip(where, offset, strict=True))


@dataclass(frozen=True)
class Stored:
    """A tensor of `shape` in the files of a checkpoint; a call reads it, or a region of it."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    def __call__(self, region: Region | None = None) -> Tensor:
        """Return the whole, or the numbers [k] of `region`. Opens only files that have some."""
        wanted = Region.whole(self.shape) if region is None else region
        numbers = torch.empty(wanted.numel, dtype=self.dtype)
        targets = list(wanted.boxes(numbers))
        for box in self.boxes:
            meetings = [(box.meets(at, tuple(part.shape)), at, part) for at, part in targets]
            if not any(where is not None for where, *_ in meetings):
                continue
            with reading(self.folder, box.file), _open(self.folder / box.file) as contents:
                for where, offset, part in meetings:
                    if where is not None:
                        part[tuple(_seen_from(offset, where))] = box.read(contents, where)
        return numbers.view(self.shape) if region is None else numbers

    def check(self) -> "Stored":
        """Raise `CheckpointError` unless the files have each number of it once."""
        numel, open_boxes = 0, []  # those that go on along the first dim
        for box in sorted(self.boxes, key=lambda box: box.offset):
            with reading(self.folder, box.file):
                ends = [at + size for at, size in zip(box.offset, box.size, strict=True)]
                if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                    raise ValueError(f"{box.key}, to {ends}, is not in {self.name} {self.shape}")
                open_boxes = [b for b in open_boxes if b.offset[0] + b.size[0] > box.offset[0]]
                for other in open_boxes:
                    if other.meets(box.offset, box.size):
                        raise ValueError(f"{box.key} at {box.offset} is in {other.file}, too")
                numel += math.prod(box.size)
                open_boxes += [box] if box.size else []
        with reading(self.folder, self.boxes[-1].file if self.boxes else "manifest.json"):
            if numel != math.prod(self.shape):
                raise ValueError(f"{self.name} of shape {self.shape} has {numel:,} numbers")
        return self


def load(
    folder: Path, axis: Axis = ALONE, *, lazily: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (weights, state) of a checkpoint, as they were saved.

    With `axis`, a collective: its ranks share out the check of the contents, and read them all; but
    `lazily`, there is a `Stored` in the place of every weight, and of what is of an optimizer or of
    compression, for each rank to read its part of.
    Raises `CheckpointError` if it is damaged, on all ranks of `axis` alike.
    """
    manifest = verify(folder)
    own = sorted(manifest["files"])[axis.rank :: axis.size]
    damaged = [name for name in own if _damage(folder / name, manifest["files"][name])]
    for names in all_gather_object(damaged, axis):
        if names:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: the contents of {names[0]} do not match their "
                f"CRC-32; resume from an earlier one"
            )
    weights, tensors = (find(folder, manifest["files"], k) for k in ("weights_", "state_"))
    if not lazily:
        weights = {name: stored() for name, stored in weights.items()}
    left = ("optimizer/state/", "compression/") if lazily else ()  # of which a rank needs a part
    tensors = {
        name: stored if name.startswith(left) else stored() for name, stored in tensors.items()
    }
    with reading(folder, "state.pt"):
        skeleton = torch.load(folder / "state.pt", weights_only=True)
        if not isinstance(skeleton, dict):
            raise TypeError(f"a {type(skeleton).__name__} in the place of a dict")
        state = map_tensors(skeleton, lambda name, t: tensors[name] if t.is_meta else t)
    with reading(folder, "manifest.json"):
        weights |= {alias: weights[name] for alias, name in manifest["tied"].items()}
    return weights, state


@contextmanager
def reading(folder: Path, name: str = "state.pt") -> Iterator[None]:
    """Turn what goes wrong in the body into a `CheckpointError` that names the file.

    That is any error: who has written the file may have put anything there, and torch's reader,
    which runs nothing of it (weights_only=True), raises whatever it stumbles over.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) and str(folder) in str(error):
            raise
        what = one_line(error, 200)
        what = what if isinstance(error, ValueError) else f"{type(error).__name__}: {what}"
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be used: {what}") from None


def find(folder: Path, files: Files, kind: str) -> dict[str, Stored]:
    """Where the tensors of a kind are, in the files of all ranks; reads their heads alone."""
    facts: dict[str, tuple] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for file in sorted(name for name in files if name.startswith(kind)):
        intervals = files[file].get("intervals", {})
        with reading(folder, file), _open(folder / file) as contents:
            told = contents.metadata() or {}
            for key in list(contents.keys()):
                head = contents.get_slice(key)
                size, start = tuple(head.get_shape()), None
                name, shape, offset = key, size, (0,) * len(size)
                if key in told:
                    name, *place = json.loads(told[key])
                    shape, offset = (tuple(_whole_numbers(numbers)) for numbers in place)
                elif key in intervals:
                    start, *shape = intervals[key]
                    offset, shape = (start,), tuple(shape)
                fact = shape, _DTYPE_OF[head.get_dtype()], start is None
                dims = len(shape) if start is None else 1
                if facts.setdefault(name, fact) != fact or not len(size) == len(offset) == dims:
                    raise ValueError(f"{name} has another shape here than {facts[name][0]}")
                boxes[name].append(Box(file, key, offset, size, start))
    # In an order that does not tell who wrote what.
    return {
        name: Stored(folder, name, shape, dtype, _in_boxes(folder, shape, boxes[name])).check()
        for name, (shape, dtype, _) in sorted(facts.items())
    }


def _in_boxes(folder: Path, shape: tuple[int, ...], own: list[Box]) -> tuple[Box, ...]:
    """Of a tensor in intervals, which may overlap, the boxes that are all of it."""
    if own[0].start is None:
        return tuple(own)
    found, end = [], 0
    for file, key, _, (numel,), start in sorted(own, key=lambda box: (box.start, box.file)):
        if start > end:
            with reading(folder, file):
                raise ValueError(f"of {key}, no file has numbers {end:,} to {start:,}")
        at = max(start, end) - start
        for offset, size in boxes_of(shape, start + at, start + numel):
            found.append(Box(file, key, offset, size, at))
            at += math.prod(size)
        end = max(end, start + numel)
    return tuple(found)


def _open(path: Path) -> safe_open:
    return safe_open(path, framework="pt")


def _damage(path: Path, digest: dict[str, int]) -> bool:
    """Whether the contents of a file are not those that were written."""
    try:
        return digest_of(path) != {key: digest[key] for key in ("num_bytes", "crc32")}
    except OSError:
        return True


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest: "files", with the length and CRC-32 of each, and "tied" weights.

    Quick: looks at the lengths of the files, not into them. Raises `CheckpointError`.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        layout, tied = manifest.get("format", 1), dict(manifest["tied"])
        files = {
            name: {
                **{key: int(digest[key]) for key in ("num_bytes", "crc32")},
                "intervals": {
                    key: _whole_numbers(place, at_least=1)
                    for key, place in digest.get("intervals", {}).items()
                },
            }
            for name, digest in manifest["files"].items()
        }
        if strange := [name for name in files if not _FILE.fullmatch(name)]:
            raise ValueError(f"{strange[0][:80]!r} is no name of a file of a checkpoint")
        if "state.pt" not in files:
            raise ValueError("it does not list state.pt")
        if not all(isinstance(name, str) for name in tied.values()):
            raise TypeError("tied weights must be names")
    except (OSError, *_NOT_JSON, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: its manifest.json: {error}") from None
    if layout not in FORMATS:
        raise CheckpointError(
            f"checkpoint {folder} has format {layout}, and this version of minipar reads "
            f"{FORMATS[0]} to {FORMATS[-1]}; go on with the version that wrote it"
        )
    for name, digest in files.items():
        path, num_bytes = folder / name, digest["num_bytes"]
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            there = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} {there} instead of {num_bytes} bytes; "
                f"resume from an earlier one"
            )
    return {"files": files, "tied": tied}


def _whole_numbers(told: Any, at_least: int = 0) -> list[int]:
    """Return the offset or the shape of a box, or [start, *shape] of an interval, if it is one."""
    is_list = isinstance(told, list) and len(told) >= at_least
    if not (is_list and all(type(n) is int and n >= 0 for n in told)):
        raise TypeError(f"{str(told)[:80]} is no place of an interval or a box")
    return told


def map_tensors(tree: Any, change: Callable[[str, Tensor], Any], path: str = "") -> Any:
    """Return `tree` with ``change("key/0/key", tensor)`` in the place of every tensor."""
    if isinstance(tree, Tensor):
        return change(path.removeprefix("/"), tree)
    if isinstance(tree, dict):
        return {key: map_tensors(v, change, f"{path}/{key}") for key, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(v, change, f"{path}/{i}") for i, v in enumerate(tree))
    return tree


def digest_of(path: Path) -> dict[str, int]:
    """Return length and CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return {"num_bytes": path.stat().st_size, "crc32": crc}


# ---------------------------------------------------------------------- weights and models
def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy `weights` into `model`. Raises `CheckpointError` as `check_weights`."""
    check_weights(model, weights, where)
    model.load_state_dict(weights)


def check_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Raise `CheckpointError` naming what differs, if `weights` are not those of `model`.

    Of a parameter that is a piece here, the shape that counts is its `full_shape`.
    """
    own = {
        name: tuple(full_shape(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    check_shapes(own, weights, where)


def check_shapes(own: dict[str, tuple[int, ...]], weights: dict[str, Tensor], where: str) -> None:
    """The same for a model whose parameters have the names and shapes `own`, on all ranks."""
    problems = [f"lacks {name}" for name in own.keys() - weights.keys()]
    problems += [f"has {name}, which the model has not" for name in weights.keys() - own.keys()]
    problems += [
        f"has {name} of shape {tuple(weights[name].shape)} where the model has {own[name]}"
        for name in own.keys() & weights.keys()
        if own[name] != tuple(weights[name].shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if all("e_score_correction_bias" in problem for problem in problems):
            more += "; use the --expert-bias of the run before, which adds these for good"
        raise CheckpointError(f"{where} is of another model: it {sorted(problems)[0][:300]}{more}")


def export(checkpoint: Path, folder: Path) -> LlamaConfig:
    """Write the weights of a checkpoint of `minipar train` as a Hugging Face `folder`.

    Returns the shape of the model. Raises `CheckpointError` if the checkpoint is damaged, and
    `ValueError` where `folder` is a file.
    """
    weights, config = model_of(checkpoint)
    hf.save(weights, folder, config)
    return config


def model_of(checkpoint: Path) -> tuple[dict[str, Tensor], LlamaConfig]:
    """Return weights and shape of the model; raises `CheckpointError` if there is damage."""
    weights, state = load(checkpoint)
    with reading(checkpoint):
        shape = dict(state["model"])
        if shape["rope_scaling"] is not None:
            shape["rope_scaling"] = RopeScaling(**shape["rope_scaling"])
        if shape.get("moe") is not None:
            shape["moe"] = MoEConfig(**shape["moe"])
        return weights, LlamaConfig(**shape)


def by_name(optimizer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of an optimizer with names in the place of its parameters' numbers."""
    return _renamed(optimizer, dict(enumerate(names)))


def by_number(optimizer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Undo `by_name`, maybe for an optimizer that counts its parameters in another order."""
    numbers = {name: i for i, name in enumerate(names)}
    try:
        return _renamed(optimizer, numbers)
    except KeyError as error:
        raise CheckpointError(f"the optimizer is of another model: it has {error}") from None


def _renamed(optimizer: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    groups = [
        {**group, "params": [new[p] for p in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {new[p]: entries for p, entries in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}
