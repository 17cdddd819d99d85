"""The first difference as `minipar.tools.prove.causes` sees it: what every rank has."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from minipar.comm.mesh import coordinates, rank_at
from minipar.tools.prove.compare import Form, forms, is_close, whole
from minipar.tools.prove.job import DATA, WrongFile
from minipar.tools.prove.observe import Seen, Trial


@dataclass(frozen=True)
class Both:
    """A trial on one device, and on every rank of a mesh."""

    trial: Trial
    sizes: dict[str, int]
    device: Seen
    seen: list[Seen]  # by rank
    rtol: float

    def share_of(self, rank: int) -> int:
        """Return the number of the share of the batch that a rank has, in row-major order."""
        data = {axis: size for axis, size in self.sizes.items() if axis in self.device.data}
        return rank_at(coordinates(rank, self.sizes), data)

    def form_of(self, name: str) -> Form | None:
        """Return how ranks hold the output of a module; None where it is not one device's."""
        expected, pieces = self.device.outputs[name], [one.outputs.get(name) for one in self.seen]
        if any(piece is None for piece in pieces):
            return {}  # a module that is not run, or not there, on some rank
        for form, joined in forms(pieces, self.sizes, expected.shape, "sum"):
            if all(is_close(together, expected, self.rtol, 1e-13) for together in joined):
                return form
        return None

    def held(self, named: list[Tensor | None], expected: Tensor, what: str) -> list[Tensor | None]:
        """Return for each rank the tensor that it has a piece of; None where it holds none.

        A stage of a pipeline has it on some ranks alone: those of one part of the mesh. Raises
        `WrongFile` where pieces do not fit together: equal or not, nobody knows.
        """
        holders = [rank for rank, piece in enumerate(named) if piece is not None]
        pieces = [named[rank] for rank in holders]
        at = [coordinates(rank, self.sizes) for rank in holders]
        sizes = {axis: len({place[axis] for place in at}) for axis in self.sizes}
        if math.prod(sizes.values()) == len(holders):
            pieces = whole(pieces, sizes, expected)
        if odd := [list(piece.shape) for piece in pieces if piece.shape != expected.shape]:
            raise WrongFile(
                f"{what} cannot be compared: pieces of {odd[0]} make no {list(expected.shape)} in "
                f"rank order; a function gather(name, tensor, mesh) in the file can join them"
            )
        found = dict(zip(holders, pieces, strict=True))
        return [found.get(rank) for rank in range(len(named))]


@dataclass(frozen=True)
class Suspect(Both):
    """The first tensor, or number, that differs, as every rank has it."""

    stage: str
    step: int
    name: str
    found: list[Tensor]  # by rank, whole
    expected: Tensor
    ranks: list[int]  # those that are wrong
    wrong: int  # how many names of this stage are

    def are(self, values: list[Tensor] | Tensor, rtol: float = 0.0) -> bool:
        """Return True if the wrong ranks have `values`: one tensor for all, or one per rank."""
        own = values if isinstance(values, list) else [values] * len(self.found)
        return all(is_close(self.found[r], own[r], max(rtol, self.rtol)) for r in self.ranks)

    def axes(self) -> Iterator[tuple[str, int]]:
        """Yield axes of several ranks, and all together."""
        several = {axis: size for axis, size in self.sizes.items() if size > 1}
        yield from several.items()
        if len(several) > 1:
            yield " x ".join(several), math.prod(several.values())

    def over_data(self, *axes: str) -> bool:
        """Return True if ranks of one of the axes have samples of their own."""
        return any(axis in self.device.data or axis.startswith(DATA) for axis in axes)

    def chunks(self) -> Iterator[tuple[str, int, list[Tensor]]]:
        """Yield axis, dim, and the first wrong rank's tensor, in a piece for each rank."""
        found = self.found[self.ranks[0]]
        # First the axes on which ranks share their samples: tensors are cut for these.
        for axis, size in sorted(self.sizes.items(), key=lambda item: self.over_data(item[0])):
            for dim in range(found.ndim if size > 1 else 0):
                if found.shape[dim] and found.shape[dim] % size == 0:
                    yield axis, dim, list(found.chunk(size, dim))
