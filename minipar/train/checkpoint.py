"""Checkpoints: what is in them, and how they are read. Writing them: saver.py.

Layout. One folder per checkpoint, `checkpoints/step_000120/`:

    weights_00002.safetensors   rank 2's share of the weights, under their serial names
    state_00002.safetensors     and of all other tensors: optimizer/state/lm_head.weight/exp_avg ...
    state.pt                    the rest of the state: numbers, and where those tensors belong
    manifest.json               length and CRC-32 of the other files; written last

Every tensor is whole, as one device would have it, in the file of whichever rank wrote it; or each
rank's file has an interval of its numbers, laid out flat, and the manifest says where it begins. So
a run can go on by another plan or on another number of ranks, and one process can read it all.

A folder of this name is complete. Its files are held against the manifest, so that one that is cut
short or changed later is noticed: `verify` looks at their lengths, `load` also into them.

Proved by: tests/train/test_checkpoint.py.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.model import hf
from minipar.model.llama import LlamaConfig, RopeScaling
from minipar.model.moe import MoEConfig
from minipar.parallel.pieces import full_shape

FORMATS = 2, 3  # of the layout above: without intervals, and with some
ALONE = Axis("world", 0, 1, (0,))
# Name of a file: {"num_bytes": ..., "crc32": ...}; "intervals": {name: [start, *shape]}, if any.
Files = dict[str, dict[str, Any]]
CHUNK = 1 << 22  # bytes of a file that are looked into at once
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


@dataclass(frozen=True)
class Stored:
    """A tensor of `shape` in the files of a checkpoint; a call reads it."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    places: tuple[tuple[str, int | None, int], ...]  # file, where it begins, numbers; None: is all

    def __call__(self) -> Tensor:
        whole = None
        for file, start, numel in self.places:
            with reading(self.folder, file), _open(self.folder / file) as contents:
                part = contents.get_tensor(self.name)
                if start is None:
                    return part
                whole = part.new_empty(math.prod(self.shape)) if whole is None else whole
                whole[start : start + numel] = part
        return whole.view(self.shape)

    def check(self) -> "Stored":
        """Raise `CheckpointError` unless the files have all of it."""
        end = 0
        for file, start, numel in sorted(self.places, key=lambda place: place[1] or 0):
            with reading(self.folder, file):
                if start is not None and start > end:
                    raise ValueError(f"of {self.name}, no file has numbers {end:,} to {start:,}")
                end = max(end, (start or 0) + numel)
        with reading(self.folder, file):
            if end != math.prod(self.shape):
                raise ValueError(f"{self.name} of shape {self.shape} has {end:,} numbers")
        return self


def load(
    folder: Path, axis: Axis = ALONE, *, lazily: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (weights, state) of a checkpoint, as they were saved.

    With `axis`, a collective: its ranks share out the check of the contents, and read them all; but
    `lazily`, there is a `Stored` in the place of every weight, and of what is of an optimizer.
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
    is_left = "optimizer/state/" if lazily else None
    tensors = {
        name: stored if is_left and name.startswith(is_left) else stored()
        for name, stored in tensors.items()
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
        what = " ".join(str(error).split())[:200]
        what = what if isinstance(error, ValueError) else f"{type(error).__name__}: {what}"
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be used: {what}") from None


def find(folder: Path, files: Files, kind: str) -> dict[str, Stored]:
    """Where the tensors of a kind are, in the files of all ranks; reads their heads alone."""
    found: dict[str, Stored] = {}
    for file in sorted(name for name in files if name.startswith(kind)):
        with reading(folder, file), _open(folder / file) as contents:
            for name in list(contents.keys()):
                shape = tuple(contents.get_slice(name).get_shape())
                start, *whole = files[file].get("intervals", {}).get(name, (None, *shape))
                stored = found.get(name, Stored(folder, name, tuple(whole), ()))
                if tuple(whole) != stored.shape or (start is not None and len(shape) != 1):
                    raise ValueError(f"{name} has another shape here than {stored.shape}")
                place = file, start, math.prod(shape)
                found[name] = replace(stored, places=(*stored.places, place))
    # In an order that does not tell who wrote what.
    return {name: found[name].check() for name in sorted(found)}


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
                "intervals": {k: _place(v) for k, v in digest.get("intervals", {}).items()},
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
            f"{' and '.join(map(str, FORMATS))}; go on with the version that wrote it"
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


def _place(told: Any) -> list[int]:
    """Where an interval begins, and the shape of what it is of."""
    if not (isinstance(told, list) and told and all(type(n) is int and n >= 0 for n in told)):
        raise TypeError(f"{str(told)[:80]} is no place of an interval")
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
