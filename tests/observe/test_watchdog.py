"""The watchdog: the conclusion from its notes, alone; then real ranks that keep others waiting."""

import threading
import time
from pathlib import Path

import pytest
import torch

from minipar.comm import calls
from minipar.comm import collectives as comm
from minipar.comm.mesh import Axis, Mesh
from minipar.observe import timeline, watchdog
from minipar.observe.hang import Entry, Recording, explain
from tests.on_ranks import on_ranks

# ---------------------------------------------------------------------- the conclusion
RANKS = 0, 1, 2, 3


def noted(rank, *entries) -> Recording:
    """Notes of a rank."""
    label = f"rank {rank} of 4 (dp={rank})"
    return Recording(rank, list(entries), {"dp": ("dp", RANKS)}, label=label, stack=("here",))


def waits(number, verb="all_reduce", peer=None):
    return Entry(verb, "dp", number, False, peer=peer)


def begun(number, verb="all_reduce", peer=None):
    return Entry(verb, "dp", number, None, peer=peer)


SAYS = {  # the notes of ranks -> what is said, and the ranks to look at
    "a rank has begun a later call, and waits in nothing; another one has begun none": (
        [noted(0, waits(3)), noted(1, begun(5)), noted(2), noted(3, begun(3))],
        ["rank 2 did not come to all_reduce #3 on dp."],
        [2],
    ),
    "messages are no collectives": (
        [noted(0, waits(1)), noted(1, begun(5, "send", 0)), *(noted(r, waits(1))
         for r in (2, 3))],
        ["rank 1 did not come to all_reduce #1 on dp."],
        [1],
    ),
    "all have begun it, and whether it has ended anywhere is unknown": (
        [noted(0, waits(1)), *(noted(r, begun(r)) for r in (1, 2, 3))],
        ["All have called all_reduce #1 on dp, and it does not end."],
        [0],
    ),
    "in a ring, rank 0 has begun its exchange, and rank 2 has not": (
        [noted(0, begun(4, "exchange", 3), begun(4, "exchange", 1)),
         noted(1, waits(4, "exchange", 0), waits(4, "exchange", 2)),
         noted(2, begun(3, "exchange", 1), begun(3, "exchange", 3)),
         noted(3, waits(4, "exchange", 2), waits(4, "exchange", 0))],
        [f"rank 2 did not come to exchange #4 on dp of ranks {ranks}, or has left it."
         for ranks in ("1, 2", "2, 3")],
        [2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_who_has_begun_a_call(name):
    recordings, findings, culprits = SAYS[name]
    report = explain({recording.rank: recording for recording in recordings})
    assert report.findings == findings and report.culprits == culprits
    assert all(f"rank {r} of 4 (dp={r})" in str(report) for r in culprits)


# ---------------------------------------------------------------------- real ranks
BOUND = 0.3  # seconds; a rank that is to be late is so by several times as much


def late_for_all_reduce(sign: Path) -> tuple[list[str], float]:
    """Rank 1 of a 2 x 2 mesh comes late; return what this rank's watchdog tells, and the sum.

    Who is told leaves the `sign` for which rank 1 waits, however busy the machine is.
    """
    mesh, told, x = Mesh(dp=2, tp=2), [], torch.ones(1000)
    with watchdog.watch(BOUND, lambda report: told.append(report) or sign.touch()):
        with timeline.record():  # another tap beside it
            for _ in range(3):
                comm.all_reduce(x, mesh.tp)
            while mesh.rank == 1 and not sign.exists():
                dawdle(BOUND)
            total = comm.all_reduce(x, mesh.tp)
        # Time for the others to have waited too, and for a second report: there must be none.
        dawdle(2 * BOUND if mesh.rank < 2 else 7 * BOUND)
    return told, total.sum().item()


def dawdle(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.slow
def test_a_late_rank_is_named_once_with_its_stack_and_then_all_go_on(ranks, tmp_path):
    results = ranks(4).run(late_for_all_reduce, tmp_path / "told")
    assert all(total == 2000 for _, total in results)
    (report,) = [report for told, _ in results for report in told]
    assert report.startswith("minipar: stalled for ")
    assert (
        "look at rank 1 first\nrank 1 did not come to all_reduce #4 on tp of ranks 0, 1" in report
    )
    assert "rank 1 of 4 (dp=0, tp=1): its last was all_reduce #3 on tp; it is here:" in report
    assert "in dawdle: time.sleep(seconds)" in report
    assert "rank 0 in all_reduce #4 on tp of ranks 0, 1 -> rank 1" in report


@on_ranks(2)
def test_computing_while_a_collective_is_in_flight_is_no_stall():
    """Nobody waits in it. Mutants: time counted from the call; a wait whose end is not noted; a
    thread that goes on after an error."""
    mesh, told, before = Mesh(dp=2), [], threading.active_count()
    with pytest.raises(ZeroDivisionError), watchdog.watch(BOUND, told.append):
        pending = comm.all_reduce(torch.ones(10), mesh.dp, async_op=True)
        dawdle(3 * BOUND)
        pending.wait()
        assert threading.active_count() == before + 1
        1 / 0  # noqa: B018
    assert told == [] and threading.active_count() == before and not calls.taps


# ---------------------------------------------------------------------- leaving, and notes
def test_the_notes_say_what_was_called():
    """Axes of one name count apart where their ranks differ, as dp of 2 x 2 ranks in either order.

    Mutant: the first rank and the size tell them apart, so that who is missing on one counts as
    present on the other.
    """
    watching = watchdog.Watchdog.__new__(watchdog.Watchdog)  # which only notes
    watching._begun, watching._awaited = {}, {}
    axis = Axis("dp", 1, 3, (4, 6, 8))
    for _ in range(3):
        watching.begin(call := calls.Call("all_reduce", axis, 12))
        watching.wait(call), watching.end(call)
    watching.begin(calls.Call("all_reduce", Axis("dp", 1, 3, (4, 5, 6)), 12))
    watching.begin(call := calls.Call("send", axis, 7, [0, 2]))
    watching.wait(call)
    watching.rank = 1
    told, (dp, other) = watching._recording(), map(str, [("dp", (4, 6, 8)), ("dp", (4, 5, 6))])
    assert told.groups == {dp: ("dp", (4, 6, 8)), other: ("dp", (4, 5, 6))}
    assert [(e.verb, e.group, e.number, e.done, e.peer) for e in told.entries] == [
        ("all_reduce", dp, 3, None, None),
        ("all_reduce", other, 1, None, None),
        ("send", dp, 1, False, 0),
        ("send", dp, 1, False, 2),
    ]
    watching.end(call)
    assert not watching._awaited
    watching.begin(call := calls.Call("exchange", axis, 0, []))
    assert not call.notes  # nobody at the other end
