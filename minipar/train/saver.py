"""Saving: all ranks write a part of a checkpoint at once, in the background if they are asked to.

Shares. Of tensors that all ranks have, every rank writes some, dealt out by their bytes. Of tensors
that are cut, over tp, experts, stages or by ZeRO, a rank writes what it has, as boxes: parts of the
whole with an offset and a size along each dim. Nothing is gathered. What a file holds is said in
terms of whole tensors: so any other plan can read it, and one process.

Atomic. The files are written into a folder of another name and forced to disk. Only when all ranks
know that all have succeeded does rank 0 write the manifest and rename the folder; a checkpoint that
is to be deleted is renamed first. So a checkpoint under its final name is complete, at whatever
moment and whichever process was killed, and the next save clears away the rest. A rank that cannot
write tells the others: all raise the same error, none waits. So does rank 0 where the folder
is not the run's any more: another run may have one of that name by now.

In the background. A rank copies its share to the host, which training has to wait for, and a thread
writes it. The ranks then agree in `finish`, which the next save calls at the latest. Memory of the
host: 1/n of weights and optimizer state on each of n ranks.

The layout of the files is that of checkpoint.py; their folder must be one that all ranks see.
In torch: `torch.distributed.checkpoint`.
Proved by: tests/train/test_checkpoint.py, tests/train/test_saver.py.
"""

import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.model.hf import write_json
from minipar.parallel.base.shards import Part
from minipar.train.checkpoint import (
    ALONE,
    DTYPES,
    FORMATS,
    Files,
    available,
    digest_of,
    map_tensors,
    number_of,
    step_of,
)

Parts = Mapping[str, Mapping[str, Part]]  # by kind and name
# "weights" and "state": the tensors of one rank, by name, or what it has of them
Share = dict[str, dict[str, Tensor | Part]]
_CANNOT_WRITE = (OSError, RuntimeError)  # torch wraps OSError
_T = TypeVar("_T")


def save(
    folder: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any], keep: int = 2
) -> None:
    """Write a checkpoint by this process alone; see `Saver.save`."""
    Saver(folder, keep=keep).save(step, weights, state)


@dataclass
class _InProgress:
    """A checkpoint that is being written."""

    step: int
    tied: dict[str, str]
    files: Future[Files]  # those of this rank


class Saver:
    """Writes the checkpoints of a run below `folder`; made and used alike on all ranks of `axis`.

    Of the checkpoints up to the latest step, the `keep` that were written last stay. Once `is_ours`
    is false on rank 0, none is begun, put in place or removed.
    """

    def __init__(
        self,
        folder: Path,
        axis: Axis = ALONE,
        *,
        keep: int = 2,
        in_background: bool = False,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self.folder, self.axis, self.keep, self.in_background = folder, axis, keep, in_background
        self.is_ours = is_ours
        self._writing: _InProgress | None = None

    def save(
        self,
        step: int,
        weights: dict[str, Tensor],
        state: dict[str, Any],
        own: Parts | None = None,
        tied: dict[str, str] | None = None,
    ) -> None:
        """Write checkpoint `step`; in the background, begin to, after the save before is finished.

        `weights` are full tensors; `state` is what `torch.load(weights_only=True)` can read back,
        in nested dicts, lists and tuples. Both are equal on all ranks. A collective.

        `own` is what this rank alone writes: of "weights", and of "state", where meta tensors are
        in the place of that; over all ranks, each number once. `tied` says which weights are stored
        under another name.

        Raises `OSError` on every rank where one cannot write, such as on a full disk; the
        checkpoints before are then as they were.
        """
        self.finish()
        tied, of_state = _ties(weights) if tied is None else tied, {}
        skeleton = _take_tensors(state, of_state)
        tensors = {("weights", name): t for name, t in weights.items() if name not in tied}
        tensors |= {("state", name): t for name, t in of_state.items()}
        mine = deal({key: t.nbytes for key, t in tensors.items()}, self.axis.size)[self.axis.rank]
        self._together(step, self._clear)
        share: Share = {"weights": {}, "state": {}}
        for kind, name in mine:
            share[kind][name] = _copy_on_host(tensors[kind, name])
        for kind, parts in (own or {}).items():
            for name, part in parts.items():
                if part.numbers.numel():
                    share[kind][name] = self._still(part)
        work = _write_share, self._unfinished(step), self.axis.rank, share
        executor = ThreadPoolExecutor(1)
        files = executor.submit(*work, skeleton if self.axis.rank == 0 else None)
        executor.shutdown(wait=False)  # the thread ends with its task
        self._writing = _InProgress(step, tied, files)
        if not self.in_background:
            self.finish()

    @property
    def in_progress(self) -> bool:
        """Whether a save was begun and not finished, on all ranks."""
        return self._writing is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes its share."""
        return self._writing is not None and not self._writing.files.done()

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write its share: the next `finish` tells all."""
        ended = self._writing is not None and self._writing.files.done()
        return ended and self._writing.files.exception() is not None

    def finish(self) -> None:
        """Wait for the save in progress, if any, and put its checkpoint in place.

        A collective. Raises `OSError` as `save`.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        shares = self._together(writing.step, writing.files.result)
        files = {name: digest for share in shares for name, digest in share.items()}
        self._together(writing.step, lambda: self._publish(writing.step, writing.tied, files))

    def close(self) -> None:
        """Give up the save in progress, if any: waits for this rank's thread alone.

        After an error, when other ranks may not be there any more.
        """
        if self._writing is not None:
            self._writing.files.exception()
            self._writing = None

    def _still(self, own: Part) -> Part:
        """Return what training does not change before it is written: a copy, if need be."""
        if own.numbers.device.type == "cpu" and not self.in_background:
            return own
        return own._replace(numbers=_copy_on_host(own.numbers))

    def _together(self, step: int, work: Callable[[], _T]) -> list[_T]:
        """Do `work` on every rank; return what each returned. If it fails on one, all raise."""
        result = problem = None
        try:
            result = work()
        except _CANNOT_WRITE as error:
            problem = str(error)
        outcomes = all_gather_object((result, problem), self.axis)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                if self.axis.rank == 0 and self.is_ours():
                    shutil.rmtree(self._unfinished(step), ignore_errors=True)
                who = f"rank {rank} of {self.axis.size}: " if self.axis.size > 1 else ""
                error = OSError(f"cannot write checkpoint {self._final(step)}: {who}{problem}")
                error.everywhere = True
                raise error
        return [result for result, _ in outcomes]

    def _check_ours(self) -> None:
        if not self.is_ours():
            raise OSError(f"{self.folder.parent} was removed, or is another run's by now")

    def _clear(self) -> None:
        """Remove what was left by processes that were killed."""
        if self.axis.rank == 0:
            self._check_ours()
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in (*self.folder.glob(".unfinished_*"), *self.folder.glob(".removed_*")):
                _delete(left)

    def _publish(self, step: int, tied: dict[str, str], files: Files) -> None:
        """Make the files of all ranks a checkpoint, and remove those that are then too many."""
        if self.axis.rank > 0:
            return
        self._check_ours()
        unfinished, final = self._unfinished(step), self._final(step)
        for name, digest in files.items():
            path = unfinished / name
            if not path.is_file() or path.stat().st_size != digest["num_bytes"]:
                raise OSError(f"{name}, which a rank has written, is not there; is it elsewhere?")
        layout = FORMATS[-1 if any("boxes" in digest for digest in files.values()) else 0]
        manifest = {"format": layout, "step": step, "tied": tied, "files": files}
        _write_manifest(unfinished, manifest | {"number": _next_number(self.folder)})
        _remove(final)
        os.replace(unfinished, final)
        _force_to_disk(self.folder)
        up_to_this = [path for path in available(self.folder) if step_of(path) <= step]
        up_to_this.sort(key=number_of)  # a higher step may be of an older story; else by steps
        for old in up_to_this[: -self.keep]:
            _remove(old)

    def _final(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".unfinished_{step:06d}"


def deal(num_bytes: dict[Any, int], size: int) -> list[list[Any]]:
    """Share out the keys among `size` ranks so that all get about as many bytes.

    The largest first, each to the rank that has the least so far: none gets more than the mean plus
    the largest. Source: Graham, "Bounds on Multiprocessing Timing Anomalies" (1969).
    """
    shares: list[list[Any]] = [[] for _ in range(size)]
    loads = [0] * size
    for key in sorted(num_bytes, key=lambda key: (-num_bytes[key], key)):
        lightest = loads.index(min(loads))
        shares[lightest].append(key)
        loads[lightest] += num_bytes[key]
    return shares


# ---------------------------------------------------------------------- tensors
def _take_tensors(state: Any, tensors: dict[str, Tensor]) -> Any:
    """Return `state` with meta tensors where it has tensors; these go into `tensors`, by name.

    Scalars stay where they are: they are many, and small.
    """

    def take(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor  # every rank has its part
        if tensor.ndim == 0:
            return _copy_on_host(tensor)
        assert name not in tensors, f"two tensors of the state are called {name}"
        tensors[name] = tensor
        return torch.empty_like(tensor, device="meta")

    return map_tensors(state, take)


def _ties(weights: dict[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is stored under an earlier name: {"lm_head.weight": "embed..."}."""
    first: dict[tuple, str] = {}
    ties = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(key, name) != name:
            ties[name] = first[key]
    return ties


def _copy_on_host(tensor: Tensor) -> Tensor:
    """A contiguous copy with a storage of its own: safetensors insists on both."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


# ---------------------------------------------------------------------- files
def _write_share(folder: Path, rank: int, share: Share, skeleton: Any) -> Files:
    """Write the files of one rank, down to the disk; return their digests."""
    folder.mkdir(exist_ok=True)
    written, boxes = [], {}
    for kind, own in share.items():
        if own:
            written.append(folder / f"{kind}_{rank:05d}.safetensors")
            tensors, told = _boxes(own)
            save_file(tensors, written[-1], told)
            if told:
                boxes[written[-1]] = {"boxes": len(told)}
    if skeleton is not None:
        written.append(folder / "state.pt")
        content = io.BytesIO()  # torch's own writer does not say why it could not write
        torch.save(skeleton, content)
        written[-1].write_bytes(content.getbuffer())
    for path in written:
        _force_to_disk(path)
    return {path.name: digest_of(path) | boxes.get(path, {}) for path in written}


def _boxes(own: Mapping[str, Tensor | Part]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, and what it tells of those that are not whole.

    By key: JSON of the name, the whole shape and the offset.
    """
    tensors, told = {}, {}
    for name, part in own.items():
        if isinstance(part, Tensor):
            tensors[name] = part
            continue
        shape = part.region.shape
        for i, (offset, box) in enumerate(part.region.boxes(part.numbers)):
            key = f"{name}#{i}" if i else name
            tensors[key] = box
            if tuple(box.shape) != shape:
                told[key] = json.dumps([name, shape, offset])
    return tensors, told


def save_file(tensors: Mapping[str, Tensor], path: Path, told: Mapping[str, str] = {}) -> None:
    """Write a safetensors file, as the library does, which holds all of it twice meanwhile.

    `told` are its metadata.
    """
    header, start = {"__metadata__": dict(told)} if told else {}, 0
    in_order = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # all aligned
    for name, tensor in in_order:
        place = [start, start := start + tensor.nbytes]
        kind = DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in in_order:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy())


def make_newest(checkpoint: Path) -> None:
    """Number `checkpoint` as if it was the latest save of its run."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    _write_manifest(checkpoint, manifest | {"number": _next_number(checkpoint.parent)})


def _next_number(folder: Path) -> int:
    return 1 + max(map(number_of, available(folder)), default=0)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write it down to the disk, or leave the one that is there."""
    fresh = folder / "manifest.json.new"
    write_json(fresh, manifest)
    _force_to_disk(fresh)
    os.replace(fresh, folder / "manifest.json")
    _force_to_disk(folder)


def _remove(checkpoint: Path) -> None:
    """Delete `checkpoint`, if there is one; under its name there is never a part of it."""
    if os.path.lexists(checkpoint):
        # What was removed before under that name may still be there, in part.
        removed = checkpoint.with_name(f".removed_{checkpoint.name}_{secrets.token_hex(4)}")
        os.replace(checkpoint, removed)
        _delete(removed)


def _delete(folder: Path) -> None:
    """Delete what can be deleted of `folder`, and of one that is a link elsewhere, the link.

    What stays, such as a file that someone on NFS has open, is no reason to end a run.
    """
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _force_to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
