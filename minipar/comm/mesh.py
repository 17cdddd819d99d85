"""A mesh gives every rank a coordinate along named axes, and every axis a process group.

Idea: number the ranks in row-major order of a grid, such as ``Mesh(dp=2, tp=2)``. The last axis
varies fastest, so its ranks are neighbours (on one node, where links are fast):

              tp=0     tp=1
    dp=0      rank 0   rank 1
    dp=1      rank 2   rank 3

Ranks that differ only in their ``tp`` coordinate form one *tp group*: {0, 1} and {2, 3} here.
A strategy gets the `Axis` that it works on and needs nothing else: no global manager, no
environment variable.

In torch: `torch.distributed.device_mesh.DeviceMesh`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from minipar.comm import threads

AXES = {
    "pp": "pipeline: layers apart",
    "dp": "data: batches apart",
    "cp": "context: tokens apart",
    "ep": "experts apart",
    "tp": "tensor: matrices apart",
}
"""The standard axes. An axis that a mesh does not name has size 1."""

RESERVED = ("world", "rank", "size", "sizes", "coords", "label", "joint", "device_mesh")
"""Attributes of a mesh, which cannot name axes."""

MOST_RANKS = 2**20  # on paper: more than any cluster has, and few enough to try all layouts


# ---------------------------------------------------------------------- arithmetic
def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of `rank` along each axis of a row-major grid."""
    coords = {}
    for name, size in reversed(sizes.items()):
        rank, coords[name] = divmod(rank, size)
    return {name: coords[name] for name in sizes}


def rank_at(coords: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the rank at `coords`; the inverse of `coordinates`."""
    rank = 0
    for name, size in sizes.items():
        rank = rank * size + coords[name]
    return rank


def groups_along(names: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return every group of ranks that differ only in their coordinates along `names`.

    The groups partition the ranks, and are sorted: the same list on every rank.
    """
    along = [at for at, name in enumerate(sizes) if name in names]
    size = math.prod(n for name, n in sizes.items() if name in names)
    grid = torch.arange(math.prod(sizes.values()), device="cpu").reshape((*sizes.values(),))
    groups = grid.movedim(along, [*range(-len(along), 0)]).reshape(-1, size)
    return [tuple(group) for group in groups.tolist()]


def whole_number(text: str) -> int | None:
    """Return the number that `text` spells in one to nine digits, else None."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def check_sizes(sizes: Mapping[str, int], world_size: int) -> None:
    """Raise `ValueError` unless the names are allowed and the sizes multiply to `world_size`."""
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"
    for name, size in sizes.items():
        if name in RESERVED:
            raise ValueError(f"mesh {asked}: {name!r} cannot name an axis; use {', '.join(AXES)}")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh {asked}: {name}={size!r} must be a whole number from 1 up")
    product = math.prod(sizes.values())
    if product != world_size:
        last = next(reversed(sizes), None)
        rest = product // sizes.get(last, 1)
        hint = f"; or use {last}={world_size // rest}" if last and world_size % rest == 0 else ""
        raise ValueError(f"mesh {asked} needs {product} ranks but there are {world_size}{hint}")


# ---------------------------------------------------------------------- process groups
@dataclass(frozen=True)
class Axis:
    """One axis of a mesh, as this rank sees it. `group` is None where `size` is 1.

    An axis with a `purpose` has a process group of its own, see `with_own_group`.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    purpose: str = field(default="", compare=False, repr=False)


class Mesh:
    """Ranks on a grid: ``Mesh(dp=2, tp=2).tp`` is the `Axis` of this rank along ``tp``.

    All ranks make the same mesh together; equal meshes share process groups. A mesh of one rank
    needs no `torch.distributed`.

    Raises `ValueError` on every rank when the sizes do not multiply to the number of ranks.
    """

    label = "rank 0 of 1"
    """The name of this rank in error messages, from the mesh that was made last."""

    def __init__(self, **sizes: int) -> None:
        initialised = dist.is_available() and dist.is_initialized()
        self.sizes = dict(sizes)
        self.rank = dist.get_rank() if initialised else 0
        self.size = dist.get_world_size() if initialised else 1
        check_sizes(self.sizes, self.size)
        self.coords = coordinates(self.rank, self.sizes)
        self.label = f"rank {self.rank} of {self.size}"
        if self.sizes:
            self.label += f" ({', '.join(f'{name}={c}' for name, c in self.coords.items())})"
        Mesh.label = self.label
        self._joint: dict[tuple[str, ...], Axis] = {}
        for name in self.sizes:
            self.joint(name)
        self.world = replace(self.joint(*self.sizes), name="world")

    def joint(self, *names: str) -> Axis:
        """Return the axis over several axes at once, such as ``mesh.joint("dp", "cp")``.

        Its ranks are numbered in row-major order of `names` *in the order of the mesh*. The first
        call for a set of names makes process groups, so all ranks make this call together.
        """
        for name in names:
            if name not in self.sizes and name not in AXES:
                raise ValueError(f"axis {name!r} is not of this mesh; it has {list(self.sizes)}")
        names = tuple(name for name in self.sizes if name in names)
        if names not in self._joint:
            groups = groups_along(names, self.sizes)
            mine = next(group for group in groups if self.rank in group)
            axis_name, group = "+".join(names) or "none", None
            if len(mine) > 1:
                is_world = len(groups) == 1
                group = dist.group.WORLD if is_world else _group(axis_name, groups, mine)
            self._joint[names] = Axis(axis_name, mine.index(self.rank), len(mine), mine, group)
        return self._joint[names]

    def device_mesh(self) -> dist.DeviceMesh:
        """Return torch's own mesh of the same ranks, names and groups; all ranks call it."""
        from torch.distributed.device_mesh import DeviceMesh  # takes long to import

        ones = [(rank,) for rank in range(self.size)]  # torch wants a group for one rank, too
        groups = [self[name].group or _group("one rank", ones, (self.rank,)) for name in self.sizes]
        kind = "cuda" if "cuda:nccl" in str(dist.get_backend_config()) else "cpu"
        grid = torch.arange(self.size).view(*self.sizes.values())
        return DeviceMesh.from_group(groups, kind, mesh=grid, mesh_dim_names=tuple(self.sizes))

    def __getattr__(self, name: str) -> Axis:
        # Python calls this only for names that are no attributes: the axes.
        sizes = self.__dict__.get("sizes", {})
        if name in sizes:
            return self._joint[name,]
        if name in AXES:
            return Axis(name, 0, 1, (self.rank,))
        raise AttributeError(f"{name!r} is not an axis of this mesh; it has {list(sizes)}")

    def __getitem__(self, name: str) -> Axis:
        return getattr(self, name)

    def __repr__(self) -> str:
        asked = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Mesh({asked})  # {self.label}"


_made: WeakKeyDictionary[dist.ProcessGroup, dict] = WeakKeyDictionary()
"""The process groups of axes, by name and ranks, for as long as the default group exists."""


def _group(
    name: str, groups: list[tuple[int, ...]], mine: tuple[int, ...], **options: Any
) -> dist.ProcessGroup:
    """Make all `groups`, in the same order on every rank; return the one of the ranks `mine`.

    A group costs threads and connections, so equal axes of several meshes share one.
    """
    made, key = _made.setdefault(dist.group.WORLD, {}), (name, *groups)
    if key not in made:
        made[key] = {ranks: make_group(name, ranks, **options) for ranks in groups}[mine]
    return made[key]


def with_own_group(axis: Axis, purpose: str) -> Axis:
    """Return the same axis with a process group of its own; all ranks of the axis call it together.

    Calls of one group run one after the other. With a second group, a short call need not wait
    behind long ones. Axes with the same ranks and `purpose` share a group.
    """
    if axis.group is None:
        return axis
    name, ranks = f"{axis.name} ({purpose})", axis.ranks
    group = _group(name, [ranks], ranks, use_local_synchronization=True)
    return replace(axis, group=group, purpose=purpose)


def make_group(name: str, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Make a process group of `ranks`; torch's recorders and errors call it by its `name`.

    The group has the timeout of the default group, which `dist.new_group` does not inherit. All
    ranks call this, or with ``use_local_synchronization=True`` those of the group. `options` go to
    `dist.new_group`.
    """
    world = dist.group.WORLD
    backend = world._get_backend(world._device_types[0])
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    with threads.patient():
        return dist.new_group(list(ranks), timeout=timeout, group_desc=name, **options)
