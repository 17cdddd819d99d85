"""The race detector by itself: what it sees, what it lets pass, and where it cannot look."""

import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from minipar.comm.background import Background
from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Mesh
from minipar.emulate import strict
from minipar.emulate.strict import Race
from minipar.ranks.launch import RankError


def watch(body) -> str:
    """What `Race` says of `body`; nothing where there is none."""
    try:
        with strict.watching():
            body(Mesh(dp=2).dp)
    except Race as race:
        return str(race)
    return ""


def waits(axis) -> None:
    pending = all_reduce(torch.ones(4), axis, async_op=True)
    assert pending.wait().tolist() == [2.0] * 4


def polls(axis) -> None:
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, group=axis.group, async_op=True)
    while not work.is_completed():
        time.sleep(1e-3)
    assert tensor.tolist() == [2.0] * 4


def writes(axis) -> None:
    tensor = torch.ones(4)
    pending = all_reduce(tensor, axis, out=tensor, async_op=True)
    tensor.zero_()
    pending.wait()


def frees(axis) -> None:
    tensor = torch.ones(4)
    pending = all_reduce(tensor, axis, out=tensor, async_op=True)
    tensor.untyped_storage().resize_(0)
    pending.wait()


def forgets(axis) -> None:
    all_reduce(torch.ones(4), axis, async_op=True)


def waits_beside(axis) -> None:
    Background(partial(waits, axis), None, torch.device("cpu"), "compression").wait()


def forgets_beside(axis) -> None:
    Background(lambda: None, None, torch.device("cpu"), "compression")


def fails(axis) -> None:
    with pytest.raises(RuntimeError, match="the ranks do not agree"):
        all_reduce(torch.ones(3 + axis.rank), axis)


def reads(axis) -> None:
    out = torch.zeros(4)
    pending = all_reduce(torch.ones(4), axis, out=out, async_op=True)
    assert out.isnan().all()  # and not yet the sum, as gloo may have it
    pending.wait()


@pytest.mark.parametrize(
    "body, says",
    [
        (waits, ""),
        (polls, ""),
        (reads, ""),
        (fails, ""),
        (waits_beside, ""),
        (writes, "its tensor of float32 \\(4,\\) was written to before `wait`"),
        (frees, "its tensor of float32 \\(4,\\) was freed before `wait`"),
        (forgets, "never waited for: all_reduce at .*, float32 \\(4,\\)"),
        (forgets_beside, "never waited for: compression at .*"),
    ],
)
def test_a_race_is_named_with_its_place(ranks, body, says):
    """Mutants: no copy travels; a tensor that was freed passes; one that has raised what went wrong
    counts as never waited for."""
    for said in ranks(2, "link").run(watch, body):
        if not says:
            assert said == ""
        else:
            assert re.search(says, said), said
            assert "emulate/test_strict.py:" in said


def test_over_other_backends_it_says_that_it_sees_nothing(ranks):
    """Mutant: no question asked, and all that runs over gloo counts as without a race."""
    with pytest.raises(RankError, match="sees the backend link, not gloo; use Ranks"):
        ranks(2).run(watch, waits)
    with pytest.raises(ValueError, match="link, not none"), strict.watching():
        pass
    tensor = torch.ones(3)
    assert strict.Handle("all_reduce", [tensor], (), [tensor]).travelling == [tensor]  # no copy
