"""All-reduce from messages alone: the backend's results.

`test_plans.py` shows without processes that every plan is right for any number of ranks. Here the
plans run.
"""

from functools import partial
from unittest import mock

import pytest
import torch

from minipar.comm import algorithms, plans
from minipar.comm import collectives as comm
from minipar.comm.mesh import Axis, Mesh
from minipar.observe import timeline
from tests.comm.same import algorithms_for, equal, laid_out, numbers
from tests.on_ranks import on_ranks

SHAPES = [(), (0,), (1,), (13,), (7, 11)]


def chunks_of(numel: int):
    """In the body, messages of trees are cut into chunks of so many elements."""
    tree = partial(plans.double_tree, chunk=numel)
    return mock.patch.dict(plans.ALL_REDUCE, double_tree=tree)


def check(expected: torch.Tensor, verb, x: torch.Tensor, *args) -> None:
    """The result is as expected; the input stays, and shares no memory with the result."""
    kept = x.clone()
    result = verb(x, *args)
    equal(result, expected)
    equal(x, kept)
    assert not x.numel() or result.data_ptr() != x.data_ptr()


# ---------------------------------------------------------------------- against the backend
@pytest.mark.parametrize(
    "size", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
@on_ranks("size")
def test_all_reduce_equals_the_backends(size):
    """Catches: what arrives over elements that still leave, chunks ignored."""
    axis = Mesh(dp=size).dp
    with chunks_of(4):
        for shape in SHAPES:
            xs = numbers(axis, shape)
            x = laid_out(xs[axis.rank], axis.rank) if len(shape) > 1 else xs[axis.rank]
            for name in algorithms_for(axis.size):
                check(comm.all_reduce(x, axis), algorithms.all_reduce, x, axis, name)
    for dtype in torch.int64, torch.bfloat16:
        x = numbers(axis, (7, 11), dtype)[axis.rank]
        for name in algorithms_for(axis.size):
            equal(algorithms.all_reduce(x, axis, name), comm.all_reduce(x, axis))


@on_ranks(4)
def test_two_levels():
    """Inside, across, inside again: the sum over both axes, and few bytes across."""
    mesh, two_levels = Mesh(dp=2, tp=2), algorithms.hierarchical_all_reduce
    for shape in (), (1,), (13,), (8, 6):
        x = numbers(mesh.world, shape)[mesh.rank]
        check(comm.all_reduce(x, mesh.world), two_levels, x, mesh.tp, mesh.dp)
    with timeline.record() as ledger:
        two_levels(torch.ones(120), mesh.tp, mesh.dp)
    # 480 bytes: 2 x 480/2 inside; half of it across, of which again 2 x 1/2.
    assert ledger.bytes_by_axis() == {"dp": 240, "tp": 480} and len(ledger) == 4


@pytest.mark.parametrize("size", [3, 4])
@on_ranks("size")
def test_floats_end_with_the_same_bits_everywhere(size):
    """Catches: ranks that add in an order of their own, such as "what I have, then what comes"."""

    axis = Mesh(dp=size).dp
    torch.manual_seed(axis.rank)
    x = torch.randn(1001) * 10 ** torch.randn(1001)
    exact, scale = (comm.all_reduce(y.double(), axis) for y in (x, x.abs()))
    results = []
    for name in algorithms_for(axis.size):
        with chunks_of(100):
            result = algorithms.all_reduce(x, axis, name)
        assert ((result - exact).abs() / scale).max() < 1e-6, name
        results.append(result.numpy().tobytes())
    assert len(set(results)) > 1  # so the order does matter
    first, *others = comm.all_gather_object(results, axis)
    assert all(other == first for other in others)


def test_an_unknown_algorithm_is_refused_before_the_first_message():
    others = Axis("dp", 0, 3, (0, 1, 2))  # a group that would fail if it were used
    with pytest.raises(KeyError, match="rign"):
        algorithms.all_reduce(torch.ones(4), others, "rign")
