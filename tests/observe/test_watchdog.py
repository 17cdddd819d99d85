"""The watchdog: the conclusion that it draws, alone; then real ranks that keep others waiting."""

import json
import pickle
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from minipar.comm import calls
from minipar.comm import collectives as comm
from minipar.comm.mesh import Axis, Mesh
from minipar.observe import timeline, watchdog
from minipar.observe.watchdog import Call, State, explain
from minipar.tools import dumps, hang
from tests.on_ranks import on_ranks

EVERYONE = (0, 1, 2, 3)


def call(number: int = 1, verb: str = "all_reduce", axis: str = "dp", **more) -> Call:
    values = dict(ranks=EVERYONE, num_bytes=0, seconds=61.0)
    return Call(verb, axis, number=number, **{**values, **more})


def state(rank: int, begun=(), awaited=(), stack: str = "its stack") -> State:
    return State(rank, f"rank {rank} of 4 (dp={rank})", tuple(begun), tuple(awaited), stack)


def waiting(rank: int, *calls: Call) -> State:
    return state(rank, calls, calls, stack=f"stack of {rank}, which waits")


# ---------------------------------------------------------------------- the conclusion
def test_names_who_is_missing_and_not_who_waits():
    late = state(2, [call(117, seconds=63.0)], stack="  File here, line 1")
    here = call(118, num_bytes=4_000_000)
    assert explain([waiting(0, here), waiting(1, here), late, waiting(3, here)]) == (
        "minipar: stalled\n"
        "rank 2 of 4 (dp=2) has not reached all_reduce #118 on dp (4.0 MB on the wire), in which "
        "ranks 0, 1, 3 have waited for 61.0 s.\n"
        "rank 2 of 4 (dp=2): its last was all_reduce #117 on dp, begun 63.0 s ago. It is here:\n"
        "  File here, line 1"
    )


def test_a_chain_of_waits_leads_to_its_end():
    """0 and 1 wait for 2, which waits for 3 on another axis: the stack to see is that of 3."""
    first, second = call(5, axis="dp", ranks=(0, 1, 2)), call(9, axis="tp", ranks=(2, 3))
    text = explain([waiting(0, first), waiting(1, first), waiting(2, second), state(3)])
    assert "rank 2 of 4 (dp=2) has not reached all_reduce #5 on dp" in text
    assert "rank 3 of 4 (dp=3) has not reached all_reduce #9 on tp" in text
    assert "rank 3 of 4 (dp=3): it has called none. It is here:\nits stack" in text
    assert "which waits" not in text


def test_a_circle_shows_everybody():
    """Each waits for a message from the next."""
    messages = [call(verb="recv", peers=((rank + 1) % 4,)) for rank in EVERYONE]
    text = explain([waiting(rank, messages[rank]) for rank in EVERYONE])
    assert "rank 3 of 4 (dp=3) has waited for 61.0 s in recv on dp with rank 0." in text
    assert all(f"stack of {rank}, which waits" in text for rank in EVERYONE)


def test_different_collectives_are_told_apart():
    """Catches: by their numbers alone all are there."""
    reduce, barrier = call(3), call(3, verb="barrier")
    states = [waiting(0, reduce), waiting(1, barrier), waiting(2, reduce), waiting(3, reduce)]
    assert explain(states).splitlines()[1:3] == [
        "rank 1 of 4 (dp=1) has not reached all_reduce #3 on dp, in which ranks 0, 2, 3 have "
        "waited for 61.0 s.",
        "ranks 0, 2, 3 have not reached barrier #3 on dp, in which rank 1 of 4 (dp=1) has waited "
        "for 61.0 s.",
    ]


def test_who_is_further_on_is_not_missing():
    """Asynchronous calls: rank 1 has begun #5 and waits in nothing, rank 2 has not begun #3."""
    text = explain([waiting(0, call(3)), state(1, [call(5)]), state(2), state(3, [call(4)])])
    assert text.splitlines()[1].startswith("rank 2 of 4 (dp=2) has not reached all_reduce #3 on dp")


def test_messages_count_apart_from_collectives():
    """Rank 1 has sent five messages, and begun no collective: the first is what it misses."""
    message = call(5, "send", peers=(0,))
    text = explain(
        [waiting(0, call(1)), state(1, [message]), *(waiting(r, call(1)) for r in (2, 3))]
    )
    assert "rank 1 of 4 (dp=1) has not reached all_reduce #1 on dp" in text
    late = state(1, [call(1), call(1, "send", peers=(0,))])
    text = explain([waiting(0, call(1)), late, *(waiting(r, call(1)) for r in (2, 3))])
    assert "in all_reduce #1 on dp, which all have reached, and which does not end." in text


def test_of_a_rank_that_is_not_heard_of_nothing_is_claimed():
    """On another host, which is down. Mutant: "it has called none", after 825 calls."""
    gone = State(1, "rank 1 of 3 on host b, process 7", silence="it does not answer")
    here = call(3, ranks=(0, 1, 2))
    text = explain([waiting(0, here), gone, state(2, [here])])
    assert text.splitlines()[1:] == [
        "rank 0 of 4 (dp=0) has waited for 61.0 s in all_reduce #3 on dp. Whether rank 1 of 3 on "
        "host b, process 7 has reached it is unknown.",
        "rank 1 of 3 on host b, process 7: nothing is heard of it; it does not answer.",
    ]


def test_a_state_travels_as_json_and_nothing_else_is_believed():
    """Mutant: pickles, which whoever reaches the store could have run."""
    sent = waiting(2, call(7, num_bytes=12), call(verb="recv", peers=(1, 3)))
    assert State.from_json(json.dumps(asdict(sent))) == sent
    junk = [pickle.dumps(sent), b"", b"[]", b"null", b'{"rank": 1}', b'{"begun": [1]}', b"\xff"]
    for data in junk:
        with pytest.raises((ValueError, TypeError, KeyError)):
            State.from_json(data)


# ---------------------------------------------------------------------- real ranks
BOUND = 0.3  # seconds; a rank that is to be late is so by several times as much


def late_for_all_reduce() -> tuple[list[str], float]:
    """Rank 1 of a 2 x 2 mesh comes late; return what this rank's watchdog tells, and the sum."""
    mesh, told, x = Mesh(dp=2, tp=2), [], torch.ones(1000)
    with watchdog.watch(BOUND, told.append):
        with timeline.record():  # another tap beside it
            for _ in range(3):
                comm.all_reduce(x, mesh.tp)
            if mesh.rank == 1:
                dawdle(5 * BOUND)
            total = comm.all_reduce(x, mesh.tp)
        # Time for the others to have waited too, and for a second report: there must be none.
        dawdle(2 * BOUND if mesh.rank < 2 else 7 * BOUND)
    return told, total.sum().item()


def dawdle(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.slow
def test_a_late_rank_is_named_once_with_its_stack_and_then_all_go_on(ranks):
    results = ranks(4).run(late_for_all_reduce)
    assert all(total == 2000 for _, total in results)
    (report,) = [report for told, _ in results for report in told]
    assert (
        "rank 1 of 4 (dp=0, tp=1) has not reached all_reduce #4 on tp (4 kB on the wire), in which "
        "rank 0 of 4 (dp=0, tp=0) has waited for "
    ) in report
    assert "rank 1 of 4 (dp=0, tp=1): its last was all_reduce #3 on tp" in report
    assert "in dawdle\n    time.sleep(seconds)" in report


def late_for_a_message(dump: str) -> list[str]:
    mesh, told, x = Mesh(dp=4), [], torch.ones(1000)
    with watchdog.watch(BOUND, told.append, Path(dump)):
        if mesh.rank == 2:
            dawdle(5 * BOUND)
            comm.send(x, mesh.dp, 0)
        if mesh.rank == 0:
            comm.recv(x, mesh.dp, 2)
    return told


@pytest.mark.slow
def test_a_message_that_does_not_come_names_its_sender(ranks, tmp_path):
    dump = tmp_path / "stalled.json"
    (report,) = sum(ranks(4).run(late_for_a_message, str(dump)), [])
    page = hang.explain(*dumps.read([dump]))
    assert page.findings == [
        "rank 0 waits in recv #1 from rank 2 on dp; the other end is not open on rank 2."
    ]
    assert page.culprits == [2] and "in dawdle" in str(page)
    assert "rank 0 of 4 (dp=0) has waited for " in report
    assert " s in recv on dp with rank 2.\nrank 2 of 4 (dp=2): it has called none" in report
    assert "in dawdle" in report


@on_ranks(2)
def test_computing_while_a_collective_is_in_flight_is_no_stall():
    """Nobody waits in it. Mutants: time counted from the call; a wait whose end is not noted."""
    mesh, told = Mesh(dp=2), []
    with watchdog.watch(BOUND, told.append):
        pending = comm.all_reduce(torch.ones(10), mesh.dp, async_op=True)
        dawdle(3 * BOUND)
        pending.wait()
    assert told == []


# ---------------------------------------------------------------------- leaving, and costs
def many_watches() -> tuple[int, bool]:
    mesh = Mesh(dp=2)
    before = threading.active_count()
    for _ in range(5):
        with watchdog.watch(60):
            comm.barrier(mesh.dp)
            assert threading.active_count() == before + 1
    with pytest.raises(ZeroDivisionError), watchdog.watch(60):
        1 / 0  # noqa: B018
    return threading.active_count() - before, not calls.taps


def test_leaves_no_thread(ranks):
    assert ranks(2).run(many_watches) == [(0, True)] * 2


def test_alone_there_is_nobody_to_wait_for():
    with watchdog.watch(0.01), watchdog.watch(0):
        assert not calls.taps


@pytest.fixture
def watching():
    """A watchdog of one rank, which only notes what is called."""
    watching = watchdog.Watchdog.__new__(watchdog.Watchdog)
    watching._begun, watching._awaited = {}, {}
    return watching


def test_axes_of_one_name_count_apart_where_their_ranks_differ(watching):
    """As dp of 2 x 2 ranks in either order. Mutant: the first rank and the size tell them apart, so
    that who is missing on one counts as present on the other."""
    for _ in range(3):
        watching.begin(calls.Call("all_reduce", Axis("dp", 0, 2, (0, 2)), 12))
    watching.begin(calls.Call("all_reduce", Axis("dp", 0, 2, (0, 1)), 12))
    begun = watching._begun.values()
    assert [(call.ranks, call.number) for call in begun] == [((0, 2), 3), ((0, 1), 1)]


def test_the_notes_say_what_was_called(watching):
    axis = Axis("dp", 1, 3, (4, 6, 8))
    for _ in range(3):
        watching.begin(call := calls.Call("all_reduce", axis, 12))
        watching.wait(call), watching.end(call)
    watching.begin(call := calls.Call("send", axis, 7, [0, 2]))
    watching.wait(call)
    collective, message = watching._begun.values()
    (awaited,) = watching._awaited.values()
    assert str(collective) == "all_reduce #3 on dp (12 bytes on the wire)"
    assert str(message) == "send on dp with ranks 4, 8 (7 bytes on the wire)"
    assert awaited.key == message.key and awaited.peers == (4, 8)
    watching.end(call)
    assert not watching._awaited
    watching.begin(call := calls.Call("exchange", axis, 0, []))
    assert not call.notes  # nobody at the other end
