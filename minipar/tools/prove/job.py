"""A training to be proved: the file that describes it, by the names of the fields of `Job`."""

import contextlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from minipar.comm.mesh import Mesh

DATA = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "ep")
"""Names of axes on which ranks have samples of their own; dp2 or dp_shard is one, too, not dps."""
MODEL = ("tp", "cp", "pp", "sp", "mp", "tensor", "context", "seq", "sequence", "pipe", "pipeline")
MODEL += ("model", "stage")
"""Names of axes on which ranks have the same samples; tpu or cpu is none of them."""


def is_among(axis: str, words: tuple[str, ...]) -> bool:
    """True if the name of an axis begins with one of the words, as a word."""
    return re.match(rf"({'|'.join(words)})(?![a-zA-Z])", axis) is not None


class WrongFile(ValueError):
    """The training cannot be proved right or wrong; the message says why."""


@dataclass(frozen=True)
class Job:
    """A training, as its file describes it by these names; a file must have the first four.

    `mesh` is a `Mesh`: ``mesh.dp.group``, ``mesh.tp.rank``; ``mesh.device_mesh()`` is torch's own.
    All is in float64, whatever the model casts to or FSDP2 is told to.
    """

    build: Callable[[], nn.Module]  # as on one device
    batch: Callable[[int], Any]  # seed -> a global batch: tensors in tuples, lists, dicts
    loss: Callable[[nn.Module, Any], Tensor]  # model, batch -> a scalar, the mean over the samples
    parallelize: Callable[[nn.Module, Mesh], Any]
    """Return the model, or the model and what to call after backward: functions or strategies."""
    shares: str | list[str] | Callable[[Any, Mesh], Any] = "batch"
    """Each rank of dp, fsdp, ep ... gets its rows of every tensor; or the list of axes on which
    ranks get their own rows; or a function: batch, mesh -> this rank's part."""
    uneven: Callable[[int], Any] | None = None
    """As `batch`, of samples that weigh differently, as with padding."""
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    """Called after `parallelize`; AdamW by default."""
    clip: Callable[[nn.Module], Any] | None = None  # clips gradients, returns their norm before
    reduced_in_step: bool = False  # optimizer.step() reduces gradients: compare weights alone
    no_sync: Callable[[nn.Module], Any] | None = None
    """A context for all microbatches but the last; ``model.no_sync`` by default."""
    backward: Callable[[Tensor], Any] | None = None
    """Run backward on the loss divided by the number of microbatches; ``loss.backward()`` by
    default."""
    accumulate: Callable[[nn.Module, list], Tensor] | None = None
    """model, batches -> the loss; it runs all forwards and backwards of a step, and divides the
    loss itself."""
    gather: Callable[[str, Tensor | None, Mesh], Tensor | None] | None = None
    """name, tensor, mesh -> the whole of a parameter, gradient or buffer that is cut in a way of
    its own; the tensor is None on ranks without a piece. DTensors, our strategies, and pieces in
    rank order need no `gather`."""
    file: str = "the job"

    @staticmethod
    def load(path: str) -> "Job":
        """Run the file; return a job made of its objects with the names of fields.

        Raises `TypeError` where one of the first four is missing, and whatever the file raises.
        """
        real = Path(path).resolve()
        sys.path.insert(0, str(real.parent))  # as `python FILE` would
        try:
            objects = runpy.run_path(str(real))
        finally:
            sys.path.pop(0)
        names = [f.name for f in fields(Job) if f.name != "file"]
        given = {name: objects[name] for name in names if name in objects}
        shares = given.get("shares", [])
        if not (callable(shares) or shares == "batch" or type(shares) is list):
            words = '"batch", a list of axes, or a function'
            raise WrongFile(f"shares is {shares!r}; it must be {words}")
        return Job(**given, file=path)

    def on_one_device(self) -> "Job":
        """Return the training as one device does it, with the whole batch."""
        alone = dict(parallelize=lambda model, mesh: model, shares=[], gather=None)
        alone |= dict(no_sync=contextlib.nullcontext, backward=None, accumulate=None)
        return replace(self, **alone)

    def data_axes(self, sizes: Iterable[str]) -> list[str]:
        """Return the axes on which ranks get rows of their own.

        Raises `WrongFile` for an axis of an unknown name: a guess could pass anything as equal.
        """
        if callable(self.shares) or not self.shares:
            return []
        by_name = self.shares == "batch"
        own = [a for a in sizes if (is_among(a, DATA) if by_name else a in self.shares)]
        strange = [axis for axis in sizes if axis not in own and not is_among(axis, MODEL)]
        # A name in the list that is no axis of this mesh may be misspelt.
        if strange and (by_name or {*self.shares} - {*sizes}):
            raise WrongFile(
                f"do the ranks of axis {strange[0]!r} have samples of their own? Say so in the "
                f'file: shares = ["{strange[0]}"] if they do, shares = [] if all have all, or a '
                f"function (batch, mesh); known names begin with {', '.join(DATA + MODEL)}"
            )
        return own

    def share(self, batch: Any, mesh: Mesh) -> Any:
        """Return this rank's part of a global batch."""
        if callable(self.shares):
            return self.shares(batch, mesh)
        axis = mesh.joint(*self.data_axes(mesh.sizes))
        return rows(batch, axis.rank, axis.size)


def rows(batch: Any, index: int, count: int) -> Any:
    """Return part `index` of `count` of every tensor's rows.

    Raises `WrongFile` if rows do not divide, and if something would be whole on each rank.
    """
    if count == 1:
        return batch
    leaves = tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    odd = [leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)]
    if odd or not tensors:
        kind = type((odd or leaves)[0]).__name__
        raise WrongFile(f"batch(seed) holds {kind}, which has no rows to share out: set shares")
    if len(lengths := sorted({len(tensor) for tensor in tensors})) > 1:
        why = f"tensors of {lengths[0]} and of {lengths[-1]} rows: which are samples? Set shares"
        raise WrongFile(f"batch(seed) holds {why} = a function (batch, mesh)")
    if lengths[0] % count:
        why = f"has no equal shares for {count} ranks; return a multiple of them, or set shares"
        raise WrongFile(f"a batch of {lengths[0]} rows {why}")
    return tree_map_only(Tensor, lambda t: t.chunk(count)[index] if t.ndim else t, batch)


def joined(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of all."""

    def join(first: Any, *others: Any) -> Any:
        is_cut = isinstance(first, Tensor) and first.ndim
        return torch.cat([first, *others]) if is_cut else first

    return tree_map(join, *batches)


@contextlib.contextmanager
def blamed(file: str) -> Iterator[None]:
    """Give errors of the body a report of one line for the launcher, with the place in the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        folder, trace = Path(file).resolve().parent, traceback.extract_tb(error.__traceback__)
        own = [frame for frame in trace if Path(frame.filename).parent == folder]
        at = "" if isinstance(error, WrongFile) else f"{type(error).__name__}: "
        if at and own:
            at = f"line {own[-1].lineno} of {Path(own[-1].filename).name}, in {own[0].name}: {at}"
        wrong = WrongFile(str(error))
        wrong.report = at + next((line for line in str(error).splitlines() if line.strip()), "")
        raise wrong from error
