"""A training to be proved: the file that describes it, read with care.

    def build() -> nn.Module                        # as on one device
    def batch(seed) -> tensors                      # a global batch: tuples, lists, dicts of them
    def loss(model, batch) -> Tensor                # a scalar, the mean over the samples
    def parallelize(model, mesh)                    # the model, or the model and what to call
                                                    # after backward: a function or our strategies

`mesh` is a `Mesh`: ``mesh.dp.group``, ``mesh.tp.rank``; ``mesh.device_mesh()`` is torch's own.
All is in float64, whatever the model casts to or FSDP2 is told to. The rest is optional:

    shares = "batch"         # each rank of dp, fsdp, ep ... gets its rows of every tensor; "whole":
                             # all get all; or a function (batch, mesh) -> this rank's part
    def uneven(seed)         # a batch whose samples weigh differently, as with padding
    def optimizer(model)     # called after `parallelize`; AdamW by default
    def clip(model)          # clips gradients, returns their norm from before
    def no_sync(model)       # a context for all microbatches but the last; model.no_sync by default
    def gather(name, tensor, mesh)  # the whole of a parameter or gradient that is cut in a way of
                             # its own. Known are DTensor, our strategies, and pieces in rank order
"""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from minipar.comm.mesh import RESERVED, Mesh, whole_number
from minipar.parallel.base.strategy import Strategy

DATA = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "ep")
"""How the names of axes begin whose ranks have samples of their own."""


class WrongFile(ValueError):
    """What was handed over cannot be proved, one way or the other; the message says why."""


@dataclass(frozen=True)
class Job:
    """A training to be proved; see the head of this module."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    parallelize: Callable[[nn.Module, Mesh], Any]
    shares: str | Callable[[Any, Mesh], Any] = "batch"
    uneven: Callable[[int], Any] | None = None
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    clip: Callable[[nn.Module], Any] | None = None
    no_sync: Callable[[nn.Module], Any] | None = None
    gather: Callable[[str, Tensor, Mesh], Tensor] | None = None
    file: str = "the job"

    @staticmethod
    def load(path: str) -> "Job":
        """Run the file and take out of it what has one of the names.

        Raises `WrongFile` where one is missing or no function, and whatever the file raises.
        """
        spec = importlib.util.spec_from_file_location("minipar_proved", path)
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(path).resolve().parent))  # as `python FILE` would
        sys.modules[spec.name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        names = [f.name for f in fields(Job) if f.name != "file"]
        given = {name: getattr(module, name) for name in names if hasattr(module, name)}
        if missing := [name for name in names[:4] if name not in given]:
            raise WrongFile(f"it has no {', '.join(missing)}; it needs {', '.join(names[:4])}")
        for name, value in given.items():
            if not callable(value) and (name, value) not in SHARES:
                more = ', "batch" or "whole"' if name == "shares" else ""
                raise WrongFile(f"{name} is {value!r}; it must be a function{more}")
        return Job(**given, file=path)

    def data_axes(self, sizes: Iterable[str]) -> list[str]:
        """The axes whose ranks get rows of their own."""
        return [axis for axis in sizes if self.shares == "batch" and axis.startswith(DATA)]

    def share(self, batch: Any, mesh: Mesh) -> Any:
        """This rank's part of a global batch."""
        if callable(self.shares):
            return self.shares(batch, mesh)
        axis = mesh.joint(*self.data_axes(mesh.sizes))
        return rows(batch, axis.rank, axis.size)


SHARES = ("shares", "batch"), ("shares", "whole")


def mapped(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`batch` with every tensor changed, in tuples, lists and dicts of them."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: mapped(change, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [mapped(change, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def rows(batch: Any, index: int, count: int) -> Any:
    """Part `index` of `count` of every tensor's rows. Raises `WrongFile` if they do not divide."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim and len(tensor) % count:
            raise WrongFile(
                f"a batch of {len(tensor)} rows has no equal shares for {count} ranks; let "
                f"batch(seed) return a multiple of {count}, or set shares"
            )
        return tensor.chunk(count)[index] if tensor.ndim else tensor

    return mapped(cut, batch)


def with_strategies(result: Any) -> tuple[nn.Module, Callable[[], Any], list[Strategy]]:
    """Take apart what `parallelize` has returned. Raises `WrongFile` for anything else."""
    model, after = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    strategies = list(after) if isinstance(after, Sequence) else [after]
    ours = all(isinstance(strategy, Strategy) for strategy in strategies)
    if not isinstance(model, nn.Module) or not (ours or after is None or callable(after)):
        raise WrongFile(
            f"parallelize() returned {type(result).__name__}; it must return the model, or the "
            f"model and a function to call after backward"
        )
    if ours:
        return model, lambda: [each.finish_backward() for each in strategies], strategies
    return model, after or (lambda: None), []


@contextlib.contextmanager
def blamed(file: str, doing: list[str]) -> Iterator[None]:
    """Errors of the body are told in one line: in whose file, where, and doing what (the last)."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).name == Path(file).name]
        if isinstance(error, SyntaxError):
            lines = [error.lineno] if error.lineno else []
        at = f", line {lines[-1]}" if lines else ""
        kind = "" if isinstance(error, WrongFile) else f"{type(error).__name__}: "
        said = next(iter(str(error).splitlines()), "")
        error.report = f"{file}{at}, in {doing[-1]}: {kind}{said}"  # which a rank hands on
        raise


def parse_mesh(text: str) -> dict[str, int]:
    """Return {"dp": 2, "tp": 2} for "dp=2,tp=2". Raises `ValueError` for what is no mesh."""
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, digits = part.partition("=")
        sizes[axis] = 0 if axis in (*sizes, *RESERVED) else whole_number(digits) or 0
        if not axis.isidentifier() or sizes[axis] < 1:
            raise ValueError(
                f"--mesh {text!r}: {part!r} is not axis=size, with a new name and a size from 1 "
                f"up; try dp=2,tp=2"
            )
    return sizes


def check_file(path: str) -> None:
    """Raise `WrongFile` for a path that is no Python file."""
    if not Path(path).is_file() or Path(path).suffix != ".py":
        raise WrongFile(f"{path} is no Python file; it must have build, batch, loss, parallelize")
