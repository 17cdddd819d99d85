"""The mesh: arithmetic for grids of any shape, process groups on real ranks."""

import datetime
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minipar.comm import mesh as mesh_module
from minipar.comm.mesh import (
    Axis,
    Mesh,
    check_sizes,
    coordinates,
    groups_along,
    rank_at,
    with_own_group,
)
from tests.on_ranks import on_ranks

SIZES = st.lists(st.integers(1, 4), max_size=4).map(
    lambda sizes: dict(zip(["pp", "dp", "cp", "tp"], sizes, strict=False))
)


# ---------------------------------------------------------------------- arithmetic
@given(SIZES)
def test_coordinates_and_rank_at_are_inverse(sizes):
    seen = [coordinates(rank, sizes) for rank in range(math.prod(sizes.values()))]
    # The whole grid, each place once, in the order of nested loops: the last axis varies fastest.
    places = itertools.product(*(range(size) for size in sizes.values()))
    assert [tuple(coords.values()) for coords in seen] == list(places)
    assert all(list(coords) == list(sizes) for coords in seen)
    assert [rank_at(coords, sizes) for coords in seen] == list(range(len(seen)))


@given(SIZES, st.data())
def test_groups_partition_the_ranks(sizes, data):
    names = data.draw(st.lists(st.sampled_from(list(sizes)), unique=True)) if sizes else []
    groups = groups_along(names, sizes)
    world_size = math.prod(sizes.values())
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    assert {len(group) for group in groups} == {math.prod(sizes[name] for name in names)}
    assert groups == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        places = [coordinates(rank, sizes) for rank in group]
        assert len({tuple(c for name, c in at.items() if name not in names) for at in places}) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "tp": 3}, "mesh dp=2, tp=3 needs 6 ranks but there are 4; or use tp=2"),
        ({"dp": 3}, "mesh dp=3 needs 3 ranks but there are 4; or use dp=4"),
        ({"dp": 3, "tp": 2}, "mesh dp=3, tp=2 needs 6 ranks but there are 4$"),
        ({"dp": -2, "tp": -2}, "dp=-2 must be a whole number from 1 up"),
        ({"dp": 4.0}, "dp=4.0 must be a whole number"),
        ({"size": 4}, "'size' cannot name an axis; use pp, dp, cp, ep, tp"),
    ],
)
def test_check_sizes_says_what_is_wrong(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_sizes(sizes, 4)


def test_reserved_names_are_what_a_mesh_has():
    """An axis called like an attribute could not be reached: `Mesh(size=2).size` is a number."""
    public = {name for name in (*vars(Mesh()), *vars(Mesh)) if not name.startswith("_")}
    assert public == set(mesh_module.RESERVED)


# ---------------------------------------------------------------------- one device
def test_mesh_of_one_device_needs_no_torch_distributed():
    assert not dist.is_initialized()
    for mesh in Mesh(), Mesh(dp=1, tp=1):
        assert (mesh.rank, mesh.size) == (0, 1)
        for axis in mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.world, mesh.joint("dp", "cp"):
            assert (axis.rank, axis.size, axis.ranks, axis.group) == (0, 1, (0,), None)
        assert mesh.dp.name == "dp"
    assert not dist.is_initialized()
    assert Mesh().label == "rank 0 of 1"
    assert Mesh(dp=1).label == "rank 0 of 1 (dp=0)"
    with pytest.raises(ValueError, match="mesh dp=2 needs 2 ranks but there are 1"):
        Mesh(dp=2)


def test_unknown_axes_are_refused():
    mesh = Mesh(dp=1, mine=1)
    assert mesh.mine == Axis("mine", 0, 1, (0,))
    with pytest.raises(AttributeError, match=r"'dq' is not an axis.*\['dp', 'mine'\]"):
        _ = mesh.dq
    with pytest.raises(ValueError, match=r"axis 'dq' is not of this mesh; it has \['dp', 'mine'\]"):
        mesh.joint("dp", "dq")
    assert mesh["dp"] == mesh.dp
    assert not hasattr(mesh, "__deepcopy__")  # no axis: copying and pickling stay possible


# ---------------------------------------------------------------------- real groups
def total(axis: Axis) -> int:
    """Sum of the global ranks along the axis, by a real all-reduce."""
    tensor = torch.tensor([dist.get_rank()])
    if axis.group is not None:
        dist.all_reduce(tensor, group=axis.group)
    return tensor.item()


def check_groups(sizes: dict[str, int], joints: list[tuple[str, ...]]) -> bool:
    mesh = Mesh(**sizes)
    coords = coordinates(mesh.rank, sizes)
    asked = {(name,): mesh[name] for name in sizes} | {(): mesh.ep, tuple(sizes): mesh.world}
    for names, axis in (asked | {names: mesh.joint(*names) for names in joints}).items():
        expected = next(group for group in groups_along(names, sizes) if mesh.rank in group)
        assert (axis.ranks, axis.size) == (expected, len(expected))
        assert axis.rank == expected.index(mesh.rank) and total(axis) == sum(expected)
    for name in sizes:
        assert (mesh[name].name, mesh[name].rank) == (name, coords[name])
    assert mesh.joint(*sizes).group is dist.group.WORLD  # no second group for the same ranks
    where = ", ".join(f"{name}={coord}" for name, coord in coords.items())
    assert mesh.label == f"rank {dist.get_rank()} of {dist.get_world_size()} ({where})"
    assert repr(mesh).endswith(f"# {mesh.label}")
    return True


@pytest.mark.parametrize(
    ("sizes", "joints"),
    [
        ({"dp": 2, "tp": 2}, [("tp", "dp"), ("dp", "cp")]),
        ({"pp": 2, "dp": 1, "tp": 2}, [("pp", "tp"), ("pp", "dp"), ("cp",)]),
        ({"dp": 3}, [("dp", "cp")]),
    ],
)
def test_groups_of_real_ranks(ranks, sizes, joints):
    assert all(ranks(math.prod(sizes.values())).run(check_groups, sizes, joints))


@on_ranks(4)
def test_groups_have_names_the_timeout_of_the_world_and_a_purpose_each():
    """torch's flight recorder and NCCL's log show the names; `dist.new_group` alone would wait for
    30 minutes. Mutants: a group for each call; one for all purposes, which wait for each other."""
    mesh, two, other = Mesh(dp=2, cp=1, tp=2), Mesh(dp=2, tp=2), Mesh(tp=2, dp=2)
    counts, late = with_own_group(mesh.tp, "counts"), with_own_group(mesh.tp, "late")
    axes = mesh.dp, mesh.tp, mesh.joint("cp", "dp"), mesh.joint("tp", "dp"), late
    called = [(axis.name, axis.group.group_desc) for axis in axes]
    assert called == [
        *(("dp", "dp"), ("tp", "tp"), ("dp+cp", "dp+cp")),
        *(("dp+tp", "default_pg"), ("tp", "tp (late)")),
    ]
    for axis in axes:
        timeout = axis.group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == datetime.timedelta(seconds=20)
    assert mesh.device_mesh().get_group("cp").group_desc == "one rank"
    # Equal axes share a group.
    assert two.tp.group is mesh.tp.group is not other.tp.group and two.dp.group is mesh.dp.group
    assert with_own_group(two.tp, "counts").group is counts.group
    assert len({counts.group, late.group, mesh.tp.group}) == 3
    assert total(counts) == total(late) == total(two.tp) == sum(mesh.tp.ranks)
    assert counts == mesh.tp and with_own_group(mesh.cp, "counts").group is None


def test_torchs_mesh_has_the_same_names_ranks_and_groups(ranks):
    """Axes of one rank, too; what is waited for there has our timeout."""

    def found(**sizes: int) -> list:
        mesh = Mesh(**sizes)
        theirs = mesh.device_mesh()
        assert theirs.mesh_dim_names == tuple(sizes)
        ours = [mesh[name] for name in sizes]
        groups = [theirs.get_group(name) for name in sizes]
        assert all(a.group in (None, b) for a, b in zip(ours, groups, strict=True))
        assert list(theirs.get_coordinate()) == [axis.rank for axis in ours]
        return [dist.get_process_group_ranks(group) for group in groups]

    assert ranks(4).run(found, dp=2, tp=2)[1] == [[1, 3], [0, 1]]
    assert ranks(4).run(found, pp=1, dp=4)[2] == [[2], [0, 1, 2, 3]]
