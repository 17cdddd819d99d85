"""Checkpoints: written whole or not at all, and resumed to the bit.

Layout. One folder per checkpoint, `checkpoints/step_000120/`:

    model.safetensors     full weights under their serial names
    state.pt              optimizer, data position, random states of all ranks, step; and what
                          ranks hold for themselves, where they do (compression, local SGD)
    manifest.json         length and CRC-32 of the other files; written last

Atomic. The files are written into a folder of another name, forced to disk, and the folder is then
renamed; one that is to be deleted is renamed first. So a checkpoint under its final name is
complete, at whatever moment the process was killed, and the next `save` clears away the rest.
Reading checks the manifest, so that a file cut short later is noticed, too.
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_NAME = re.compile(r"step_(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model."""


def save(
    folder: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any], keep: int = 2
) -> None:
    """Write checkpoint `step` below `folder`; of it and those before it, keep the newest `keep`.

    `weights` are full tensors; `state` is what `torch.load(weights_only=True)` can read back.
    Called by one rank. Raises `OSError` where it cannot be written, such as on a full disk; the
    checkpoints before it are then as they were.
    """
    final, unfinished = folder / f"step_{step:06d}", folder / f".unfinished_{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in (*folder.glob(".unfinished_*"), *folder.glob(".removed_*")):
            shutil.rmtree(left)  # by a process that was killed
        _write(unfinished, step, weights, state)
        _remove(final)
        os.replace(unfinished, final)
        _force_to_disk(folder)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch and safetensors wrap OSError
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(f"cannot write checkpoint {final}: {error}") from error
    up_to_this = [path for path in available(folder) if step_of(path) <= step]
    for old in up_to_this[:-keep]:
        _remove(old)


def _write(folder: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write the files of a checkpoint into a new `folder`, down to the disk."""
    folder.mkdir()
    unique = {name: _alone(tensor) for name, tensor in _untied(weights).items()}
    save_file(unique, folder / "model.safetensors")
    torch.save(state, folder / "state.pt")
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    manifest = {"step": step, "tied": _ties(weights), "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for path in folder.iterdir():
        _force_to_disk(path)


def _remove(checkpoint: Path) -> None:
    """Delete `checkpoint`, if there is one; under its name there is never a part of it."""
    if checkpoint.exists():
        removed = checkpoint.with_name(f".removed_{checkpoint.name}")
        os.replace(checkpoint, removed)
        shutil.rmtree(removed, ignore_errors=True)


def available(folder: Path) -> list[Path]:
    """The complete checkpoints below `folder`, oldest first."""
    found = folder.glob("step_*") if folder.is_dir() else []
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps done when `checkpoint` was written."""
    return int(checkpoint.name.removeprefix("step_"))


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (weights, state) of a checkpoint. Raises `CheckpointError` if it is damaged."""
    files, tied = verify(folder)
    for name, (_, crc32) in files.items():
        if _digest(folder / name)["crc32"] != crc32:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: the contents of {name} do not match their "
                f"CRC-32; resume from an earlier one"
            )
    try:
        weights = load_file(folder / "model.safetensors")
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        weights |= {alias: weights[name] for alias, name in tied.items()}
    except (SafetensorError, RuntimeError, OSError, KeyError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from None
    return weights, state


def verify(folder: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Return what the manifest says: {file: (num_bytes, crc32)} and {alias: name} of tied weights.

    Quick: looks at the lengths of the files, not into them. Raises `CheckpointError`.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {name: (f["num_bytes"], f["crc32"]) for name, f in manifest["files"].items()}
        tied = dict(manifest["tied"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: its manifest.json: {error}") from None
    for name, (num_bytes, _) in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            there = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} {there} instead of {num_bytes} bytes; "
                f"resume from an earlier one"
            )
    return files, tied


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy `weights` into `model`. Raises `CheckpointError` as `check_weights`."""
    check_weights(model, weights, where)
    model.load_state_dict(weights)


def check_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Raise `CheckpointError` naming what differs, if `weights` are not those of `model`.

    Of a parameter that is a piece here, the shape that counts is its `full_shape`.
    """
    own = {
        name: tuple(getattr(tensor, "full_shape", tensor.shape))
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    problems = [f"lacks {name}" for name in own.keys() - weights.keys()]
    problems += [f"has {name}, which the model has not" for name in weights.keys() - own.keys()]
    problems += [
        f"has {name} of shape {tuple(weights[name].shape)} where the model has {own[name]}"
        for name in own.keys() & weights.keys()
        if own[name] != tuple(weights[name].shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{where} is of another model: it {sorted(problems)[0]}{more}")


def _ties(weights: dict[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is stored under an earlier name: {"lm_head.weight": "embed..."}."""
    first: dict[tuple, str] = {}
    ties = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(key, name) != name:
            ties[name] = first[key]
    return ties


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    ties = _ties(weights)
    return {name: tensor for name, tensor in weights.items() if name not in ties}


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and not a part of a larger storage: safetensors insists on it."""
    tensor = tensor.cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _digest(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return {"num_bytes": path.stat().st_size, "crc32": crc}


def _force_to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
