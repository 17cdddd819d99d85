"""Saving: all ranks write their parts of a checkpoint at once, in the background if asked to.

Shares. One rank writes each tensor that all ranks have; every rank gets about as many bytes.
Where tensor or expert parallelism, stages or ZeRO have cut a tensor, each rank writes its own part,
as boxes of the whole tensor. Nothing is gathered.

Atomic. The ranks write their files into a folder with a temporary name and force them to disk. When
all ranks know that all have succeeded, rank 0 writes the manifest and renames the folder. A
checkpoint is renamed before it is deleted. So a checkpoint under its final name is complete, even
if a process was killed at any moment. The next save removes what a killed run left. A rank that
cannot write tells the others: all raise the same error, none waits.

In the background. Training waits while a rank copies its share to the host. Then a thread writes
the copy. The ranks agree in `finish`; the next save calls `finish` at the latest. Memory of the
host: 1/n of weights and optimizer state on each of n ranks.

checkpoint.py describes the layout of the files. All ranks must see their folder.
In torch: `torch.distributed.checkpoint`.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.model.hf import write_json
from minipar.parallel.base.shards import Region
from minipar.train.checkpoint import (
    ALONE,
    FORMAT,
    Files,
    available,
    digest_of,
    map_tensors,
    step_of,
)


class Part(NamedTuple):
    """A rank's part of a tensor: `numbers` [k], and their place in the tensor."""

    numbers: Tensor
    region: Region


Parts = Mapping[str, Mapping[str, Part]]  # by kind, "weights" or "state", and name


class Saver:
    """Writes the checkpoints of a run below `folder`; made and used alike on all ranks of `axis`.

    Of the checkpoints up to the latest step, the `keep` with the highest steps stay.
    """

    def __init__(
        self, folder: Path, axis: Axis = ALONE, *, keep: int = 2, in_background: bool = False
    ) -> None:
        self.folder, self.axis, self.keep, self.in_background = folder, axis, keep, in_background
        # The checkpoint that is being written: its step, its ties, and the files of this rank.
        self._writing: tuple[int, dict[str, str], Future[Files]] | None = None

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: dict[str, Any],
        own: Parts | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Finish the previous save; then write checkpoint `step`, or begin to in the background.

        `weights` are full tensors, of which each rank writes a share. `state` is what
        `torch.load(weights_only=True)` can read back, in nested dicts, lists and tuples; rank 0
        writes it. Both are equal on all ranks. A collective.

        `own` has the parts of "weights" and "state" that this rank alone writes. In `state`, meta
        tensors stand in the place of such parts. Over all ranks, each number is written once.
        `tied` says which weights are stored under another name.

        Raises `OSError` on every rank if any rank cannot write, such as on a full disk. Earlier
        checkpoints stay as they were.
        """
        self.finish()
        dealt = deal({name: t.nbytes for name, t in weights.items()}, self.axis.size)
        own = own or {}
        share = {"weights": dict(own.get("weights", {})), "state": dict(own.get("state", {}))}
        for name in dealt[self.axis.rank]:
            t = weights[name]
            # Copied, as safetensors refuses tied weights, which share their memory.
            share["weights"][name] = Part(_copy_on_host(t).flatten(), Region.whole(t.shape))
        for parts in share.values():
            for name, part in parts.items():
                if self.in_background or part.numbers.device.type != "cpu":
                    parts[name] = part._replace(numbers=_copy_on_host(part.numbers))
        if self.axis.rank == 0:
            state = map_tensors(state, lambda _, t: t if t.is_meta else _copy_on_host(t))
        self._together(step, self._clear)
        work = _write_share, self._unfinished(step), self.axis.rank, share
        executor = ThreadPoolExecutor(1)
        files = executor.submit(*work, state if self.axis.rank == 0 else None)
        executor.shutdown(wait=False)  # the thread ends with its task
        self._writing = step, dict(tied or {}), files
        if not self.in_background:
            self.finish()

    @property
    def is_writing(self) -> bool:
        """True if this rank still writes its share."""
        return self._writing is not None and not self._writing[2].done()

    def finish(self) -> None:
        """Wait for the save in progress, if any, and put its checkpoint in place.

        A collective. Raises `OSError` as `save`.
        """
        if self._writing is None:
            return
        (step, tied, written), self._writing = self._writing, None
        files = {}
        for share in self._together(step, written.result):
            files |= share
        self._together(step, lambda: self._publish(step, tied, files))

    def close(self) -> None:
        """Wait for this rank's thread alone, after an error: other ranks may be gone."""
        if self._writing is not None:
            self._writing[2].exception()
            self._writing = None

    def _together(self, step: int, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank; return what each returned. If it fails on one, all raise."""
        result = problem = None
        try:
            result = work()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch wraps OSError
            problem = str(error)
        outcomes = all_gather_object((result, problem), self.axis)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                if self.axis.rank == 0:
                    shutil.rmtree(self._unfinished(step), ignore_errors=True)
                who = f"rank {rank} of {self.axis.size}: " if self.axis.size > 1 else ""
                raise OSError(f"cannot write checkpoint {self._final(step)}: {who}{problem}")
        return [result for result, _ in outcomes]

    def _clear(self) -> None:
        """Remove what was left by processes that were killed."""
        if self.axis.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in (*self.folder.glob(".unfinished_*"), *self.folder.glob(".removed_*")):
                shutil.rmtree(left, ignore_errors=True)

    def _publish(self, step: int, tied: dict[str, str], files: Files) -> None:
        """Make the files of all ranks a checkpoint, and remove the oldest beyond `keep`."""
        if self.axis.rank > 0:
            return
        unfinished, final = self._unfinished(step), self._final(step)
        for name in files:
            if not (unfinished / name).is_file():
                raise OSError(f"{name}, which a rank has written, is not there; is it elsewhere?")
        manifest = {"format": FORMAT, "step": step, "tied": tied, "files": files}
        write_json(unfinished / "manifest.json", manifest)
        _force_to_disk(unfinished / "manifest.json")
        _force_to_disk(unfinished)
        _remove(final)
        os.replace(unfinished, final)
        _force_to_disk(self.folder)
        for old in [p for p in available(self.folder) if step_of(p) <= step][: -self.keep]:
            _remove(old)

    def _final(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".unfinished_{step:06d}"


def deal(num_bytes: dict[Any, int], size: int) -> list[list[Any]]:
    """Share out the keys among `size` ranks in turn, the largest first.

    No rank gets more bytes than the mean plus the largest.
    """
    in_order = sorted(num_bytes, key=lambda key: (-num_bytes[key], key))
    return [in_order[rank::size] for rank in range(size)]


def _copy_on_host(tensor: Tensor) -> Tensor:
    """Return a contiguous copy with a storage of its own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


# ---------------------------------------------------------------------- files
def _write_share(folder: Path, rank: int, share: Parts, state: Any) -> Files:
    """Write the files of one rank, down to the disk; return their digests."""
    folder.mkdir(exist_ok=True)
    written = []
    for kind, own in share.items():
        tensors, places = {}, {}
        for name, part in own.items():
            for i, (offset, box) in enumerate(part.region.boxes(part.numbers)):
                key = f"{name}#{i}" if i else name
                tensors[key] = box.contiguous()
                if tuple(box.shape) != part.region.shape:
                    places[key] = json.dumps([name, part.region.shape, offset])
        if tensors:
            written.append(folder / f"{kind}_{rank:05d}.safetensors")
            save_file(tensors, written[-1], places)
    if state is not None:
        written.append(folder / "state.pt")
        content = io.BytesIO()  # torch's own writer does not say why it could not write
        torch.save(state, content)
        written[-1].write_bytes(content.getbuffer())
    for path in written:
        _force_to_disk(path)
    return {path.name: digest_of(path) for path in written}


def _remove(checkpoint: Path) -> None:
    """Delete `checkpoint`, if there is one; rename it first, so that its name never has a part."""
    if checkpoint.exists():
        removed = checkpoint.with_name(f".removed_{checkpoint.name}")
        shutil.rmtree(removed, ignore_errors=True)  # what a killed process has left
        os.replace(checkpoint, removed)
        shutil.rmtree(removed, ignore_errors=True)  # the run goes on, even if a file stays


def _force_to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
