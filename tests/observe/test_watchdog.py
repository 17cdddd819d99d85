"""The watchdog: the conclusion that it draws, alone; then real ranks that keep others waiting."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minipar.comm import calls
from minipar.comm import collectives as comm
from minipar.comm.mesh import Axis, Mesh
from minipar.observe import timeline, watchdog
from minipar.observe.watchdog import Call, State, explain
from tests.on_ranks import on_ranks


def call(number: int = 1, verb: str = "all_reduce", axis: str = "dp", **more) -> Call:
    values = dict(ranks=(0, 1, 2), num_bytes=0, seconds=61.0)
    return Call(verb, axis, number=number, **{**values, **more})


def state(rank: int, *begun: Call, stack: str = "its stack") -> State:
    return State(rank, f"rank {rank} of 4 (dp={rank})", begun, stack=stack)


def waiting(rank: int, *calls: Call) -> State:
    label = f"rank {rank} of 4 (dp={rank})"
    return State(rank, label, calls, calls, stack=f"stack of {rank}, which waits")


# ---------------------------------------------------------------------- the conclusion
def test_follows_waits_to_their_end_and_shows_everybody_of_a_circle():
    """0 and 1 wait for 2, which waits for 3 on another axis: the stack to see is that of 3."""
    first, second = call(5), call(9, axis="tp", ranks=(2, 3))
    text = explain([waiting(0, first), waiting(1, first), waiting(2, second), state(3)])
    assert "rank 2 of 4 (dp=2) has not reached all_reduce #5 on dp" in text
    assert "rank 3 of 4 (dp=3) has not reached all_reduce #9 on tp" in text
    assert "rank 3 of 4 (dp=3): it has called none. It is here:\nits stack" in text
    assert "which waits" not in text
    text = explain([waiting(r, call(verb="recv", peers=((r + 1) % 4,))) for r in range(4)])
    assert "rank 3 of 4 (dp=3) has waited for 61.0 s in recv on dp with rank 0." in text
    assert all(f"stack of {rank}, which waits" in text for rank in range(4))


@pytest.mark.parametrize(
    "states, conclusion",
    [
        (  # Catches: by their numbers alone all are there.
            [waiting(0, call(3)), waiting(1, call(3, "barrier")), waiting(2, call(3))],
            "rank 1 of 4 (dp=1) has not reached all_reduce #3 on dp, in which ranks 0, 2 have ",
        ),
        (  # Asynchronous: rank 1 has begun #5 and waits in nothing.
            [waiting(0, call(3)), state(1, call(5)), state(2)],
            "rank 2 of 4 (dp=2) has not reached all_reduce #3 on dp",
        ),
        (  # Five messages of rank 1 are no collective.
            [waiting(0, call()), state(1, call(5, "send", peers=(0,))), waiting(2, call())],
            "rank 1 of 4 (dp=1) has not reached all_reduce #1 on dp",
        ),
        (
            [waiting(0, call()), state(1, call(), call(1, "send", peers=(0,))), state(2, call(2))],
            "rank 0 of 4 (dp=0) has waited for 61.0 s in all_reduce #1 on dp, which all have "
            "reached, and which does not end.",
        ),
        (  # Mutant: of a host that is down, "it has called none", after 825 calls.
            [waiting(0, call(3)), State(1, "rank 1", silence="it was stopped"), state(2, call(3))],
            "rank 0 of 4 (dp=0) has waited for 61.0 s in all_reduce #3 on dp. Whether rank 1 has "
            "reached it is unknown.\nrank 1: nothing is heard of it; it was stopped.",
        ),
    ],
)
def test_who_has_reached_a_call(states, conclusion):
    assert f"\n{conclusion}" in explain(states)


# ---------------------------------------------------------------------- real ranks
BOUND = 0.3  # seconds; a rank that is to be late is so by several times as much


def late_for_all_reduce(sign: str) -> tuple[list[str], float]:
    """Rank 1 of a 2 x 2 mesh comes late; return what this rank's watchdog tells, and the sum."""
    mesh, told, x = Mesh(dp=2, tp=2), [], torch.ones(1000)
    with watchdog.watch(BOUND, teller(told, sign)):
        with timeline.record():  # another tap beside it
            for _ in range(3):
                comm.all_reduce(x, mesh.tp)
            if mesh.rank == 1:
                come_late(sign)
            total = comm.all_reduce(x, mesh.tp)
        # Time for the others to have waited too, and for a second report: there must be none.
        dawdle(2 * BOUND if mesh.rank < 2 else 7 * BOUND)
    return told, total.sum().item()


def dawdle(seconds: float) -> None:
    time.sleep(seconds)


def teller(told: list[str], sign: str) -> Callable[[str], None]:
    """Keep what is told, and leave a file as a sign."""

    def tell(report: str) -> None:
        told.append(report)
        Path(sign).touch()

    return tell


def come_late(sign: str) -> None:
    """Dawdle until the others have told so, however busy the machine is."""
    while not Path(sign).exists():
        dawdle(BOUND)


@pytest.mark.slow
def test_a_late_rank_is_named_once_with_its_stack_and_then_all_go_on(ranks, tmp_path):
    results = ranks(4).run(late_for_all_reduce, str(tmp_path / "told"))
    assert all(total == 2000 for _, total in results)
    (report,) = [report for told, _ in results for report in told]
    assert (
        "rank 1 of 4 (dp=0, tp=1) has not reached all_reduce #4 on tp (4 kB on the wire), in which "
        "rank 0 of 4 (dp=0, tp=0) has waited for "
    ) in report
    assert "rank 1 of 4 (dp=0, tp=1): its last was all_reduce #3 on tp" in report
    assert "in dawdle\n    time.sleep(seconds)" in report


def late_for_a_message(sign: str) -> list[str]:
    mesh, told, x = Mesh(dp=4), [], torch.ones(1000)
    with watchdog.watch(BOUND, teller(told, sign)):
        if mesh.rank == 2:
            come_late(sign)
            comm.send(x, mesh.dp, 0)
        if mesh.rank == 0:
            comm.recv(x, mesh.dp, 2)
    return told


@pytest.mark.slow
def test_a_message_that_does_not_come_names_its_sender(ranks, tmp_path):
    (report,) = sum(ranks(4).run(late_for_a_message, str(tmp_path / "told")), [])
    assert "rank 0 of 4 (dp=0) has waited for " in report
    assert " s in recv on dp with rank 2.\nrank 2 of 4 (dp=2): it has called none" in report
    assert "in dawdle" in report


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
    assert list(map(str, watching._begun.values())) == [
        "all_reduce #3 on dp (12 bytes on the wire)",
        "all_reduce #1 on dp (12 bytes on the wire)",
        "send on dp with ranks 4, 8 (7 bytes on the wire)",
    ]
    (awaited,) = watching._awaited.values()
    assert awaited.peers == (4, 8)
    watching.end(call)
    assert not watching._awaited
    watching.begin(call := calls.Call("exchange", axis, 0, []))
    assert not call.notes  # nobody at the other end
