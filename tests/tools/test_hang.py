"""`minipar hang`: what dumps of jobs that hang tell; and dumps that strangers hand over.

`dumps/` was written by real jobs on gloo (torch 2.13): six ways to hang.
gloo records neither messages between ranks nor who is in a group: dumps with those, as NCCL writes
them, are made here after the format (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

import pickle
from pathlib import Path

import pytest

from minipar.cli import main
from minipar.lab.draw.hang import hang as picture
from minipar.observe import hang
from minipar.tools import dumps

DUMPS = Path(__file__).parent / "dumps"
TELLS = {  # way to hang -> findings, the ranks whose stacks are wanted, and a line of those
    "absent": (["rank 2 did not come to all_reduce #4 on default_pg."], [2], "in _rank"),
    "swapped": (
        ["rank 1 called all_gather where ranks 0, 2, 3 called all_reduce #4 on default_pg."],
        [0, 1],
        "in swapped",
    ),
    "sizes": (
        [
            "rank 3 gave 8 Float to broadcast #4 on default_pg, ranks 1, 2 gave 4 Float.",
            "rank 0 did not come to broadcast #4 on default_pg.",
        ],
        [0, 3],
        "in _rank",
    ),
    "one_more": (
        ["rank 0 called barrier where ranks 1, 2, 3 called all_reduce #4 on default_pg."],
        [0, 1],
        "in one_more",
    ),
    "circle": (
        [
            "They wait in a circle: rank 0, which waits for rank 1, which waits for rank 3, which "
            "waits for rank 2, which waits for rank 0.",
            "rank 1 did not come to all_reduce #2 on dp of ranks 0, 1.",
            "rank 0 did not come to all_reduce #2 on tp of ranks 0, 2.",
            "rank 3 did not come to all_reduce #2 on tp of ranks 1, 3.",
            "rank 2 did not come to all_reduce #2 on dp of ranks 2, 3.",
        ],
        [0, 1, 2, 3],
        "in circle",
    ),
    "frozen": (
        ["Whether rank 1 came to all_reduce #4 on default_pg is unknown."],
        [1],
        "rank 1: nothing is known.",
    ),
}


TELLS["absent_json"] = (*TELLS["absent"][:2], "rank 2: its last was all_reduce #1 on tp")


@pytest.mark.parametrize("way", TELLS)
def test_six_ways_to_hang_are_told_apart(way):
    report = hang.explain(dumps.read([DUMPS / way]))
    findings, culprits, line = TELLS[way]
    assert report.findings == findings and report.culprits == culprits
    assert line in str(report)
    waiting = set().union(*report.waits.values())
    assert waiting and not (way == "absent" and waiting & {*report.culprits})
    figure = picture(report)
    words = {text.get_text() for ax in figure.axes for text in ax.texts}
    assert {"rank 0", "#4" if way != "circle" else "#2"} <= words
    assert ("rank 1 · no dump" in words) == ("?" in words) == (way == "frozen")


def test_exit_codes_tell(tmp_path, capfd):
    """1 where a hang is found, 0 where none is. Folders are read with the folders in them."""
    for rank in (0, 1, 3):
        (tmp_path / f"node{rank // 2}").mkdir(exist_ok=True)
        file = tmp_path / f"node{rank // 2}" / f"nccl_trace_rank_{rank}"
        file.write_bytes((DUMPS / "absent" / file.name).read_bytes())
    assert run(tmp_path, "--out", tmp_path / "a.png") == 1
    said = capfd.readouterr().out
    assert "Whether rank 2 came to all_reduce #4" in said
    assert "-> perhaps rank 2\n" in said and "rank 2: nothing is known" in said
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert run(write(tmp_path / "done", many((0, 1), call("all_reduce", 1)))) == 0
    assert "no hang: every recorded call has ended; not recorded are" in capfd.readouterr().out


def run(*words):
    with pytest.raises(SystemExit) as stop:
        main.main(["hang", *map(str, words)])
    return stop.value.code or 0


# ---------------------------------------------------------------------- as NCCL writes them
def call(verb, number, state="completed", *, group=("0", "default_pg"), size=8, **more):
    """An entry of NCCL's recorder; "send 0->1" is a message."""
    is_message, done = "-" in verb, state == "completed"
    return {
        "record_id": 0,
        "pg_id": group[0],
        "process_group": group,
        "collective_seq_id": 1 if is_message else number,
        "p2p_seq_id": number if is_message else 0,
        "profiling_name": f"nccl:{verb}",
        "input_sizes": [[size // 2, 2]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_completed_ns": 5 if done else None,
        "retired": done,
        "frames": [{"name": "step", "filename": "train.py", "line": 10 + number}],
        **more,
    }


def waits(verb, number, state="started", **more):
    return call(verb, number, state, **more)


TP, DP = ("1", "tp"), ("2", "dp")


def dump(*entries, members=None, **more):
    """`members`: the ranks of each group in `entries`, all of them unless said."""
    groups = {tuple(entry["process_group"]) for entry in entries} | {*(members or {})}
    config = {
        name: {"name": name, "desc": desc, "ranks": str((members or {}).get((name, desc), []))}
        for name, desc in groups
    }
    return {"version": "2.10", "pg_config": config, "entries": [*entries], **more}


def write(folder, of_ranks):
    folder.mkdir()
    for rank, content in of_ranks.items():
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(content, 2))
    return folder


def told(tmp_path, of_ranks):
    return hang.explain(dumps.read([write(tmp_path / "dumps", of_ranks)]))


def status(enqueued, completed, pg_id="0"):
    told = {"last_enqueued_collective": enqueued, "last_started_collective": -1}
    return {pg_id: told | {"last_completed_collective": completed}}


def many(ranks, *entries, **more):
    return {rank: dump(*entries, **more) for rank in ranks}


def rows(rank):
    return {TP: [0, 1] if rank < 2 else [2, 3], ("0", "default_pg"): [0, 1, 2, 3]}


def busy(first, **more):
    """A ring that has turned, with calls of another group alone."""
    return dump(
        *(call("all_reduce", 100 + i, group=TP, record_id=first + i) for i in range(3)),
        members={DP: [0, 1], TP: [1, 2]},
        **more,
    )


IN_DP = dump(waits("all_reduce", 7, group=DP), members={DP: [0, 1]})
SPLITS = [{"input_split_sizes": a, "output_split_sizes": [1, 2]} for a in ([1, 3], [2, 2])]
UNEVEN = [call("_broadcast_oop", 2, "scheduled", size=size) for size in (16, 26, 20)]
MADE, HASHED = ("35", "tp"), ("a7f3", "tp")
WORLD = {("0", "default_pg"): [0, 1]}
QUEUED = waits("all_reduce", 1, "scheduled", group=DP)
WIDE = WORLD | {DP: [0, 1, 2]}
BOTH = WORLD | {MADE: [0, 1]}
NCCL = {  # dumps by rank -> what is said, and the ranks to look at
    "a rank is still in what others have ended": (
        many((0, 1, 3), call("all_reduce", 3)) | many((2,), waits("all_reduce", 3)),
        ["behind: rank 2, still in all_reduce #3 on default_pg, which ranks 0, 1, 3 ended."],
        [2],
    ),
    "a rank is in an older call than others, of which only open calls are in the dump": (
        many((0,), waits("all_reduce", 8, "scheduled"), pg_status=status(9, 7))
        | many((1,), waits("all_reduce", 6, "scheduled"), pg_status=status(9, 5)),
        ["behind: rank 1, still in all_reduce #6 on default_pg, which rank 0 ended."],
        [1],
    ),
    "a device has not begun": (
        many((0, 1), waits("all_reduce", 3)) | many((2,), waits("all_reduce", 3, "scheduled")),
        ["behind: rank 2, where all_reduce #3 on default_pg has not begun, as it has on ranks 0, "
         "1."],
        [2],
    ),
    "a root ends early, and who waits elsewhere is a victim": (
        many((0,), call("broadcast", 3, group=DP), members={DP: [0, 1]})
        | many((1,), waits("broadcast", 3, group=DP), waits("all_reduce", 1, group=TP),
               members={DP: [0, 1], TP: [1, 2]})
        | many((2,), members={TP: [1, 2]}),
        ["rank 2 did not come to all_reduce #1 on tp."],
        [2],
    ),
    "ids of groups count what this rank made, names what all did": (
        many((0,), waits("all_reduce", 8, group=MADE, pg_id=1), members=BOTH,
             pg_status=status(3, 3) | status(8, 7, "1"))
        | many((1,), members=BOTH, pg_status=status(3, 3) | status(8, 8, "1")),
        ["behind: rank 0, still in all_reduce #8 on tp, which rank 1 ended."],
        [0],
    ),
    "a call that timed out is retired, and has not ended": (
        many((0,), waits("all_reduce", 3, retired=True)) | many((1,), call("all_reduce", 2)),
        ["rank 1 did not come to all_reduce #3 on default_pg."],
        [1],
    ),
    "groups of one name and other members are two": (
        many((0, 1), call("all_reduce", 3, group=TP), members=rows(0))
        | many((2,), waits("all_reduce", 5, group=TP), members=rows(2))
        | many((3,), call("all_reduce", 4, group=TP), members=rows(2)),
        ["rank 3 did not come to all_reduce #5 on tp of ranks 2, 3."],
        [3],
    ),
    "the ring has turned: nothing is known": (
        {0: IN_DP, 1: busy(106), 2: busy(1)},
        ["Whether rank 1 came to all_reduce #7 on dp is unknown."],
        [1],
    ),
    "the ring has turned, and its status says that the rank came": (
        {0: IN_DP, 1: busy(106, pg_status=status(7, 6, "2") | status(102, 102, "1")), 2: busy(1)},
        ["All have called all_reduce #7 on dp, and it does not end."],
        [0, 1],
    ),
    "or that it did not": (
        {0: IN_DP, 1: busy(106, pg_status=status(6, 6, "2") | status(102, 102, "1")), 2: busy(1)},
        ["rank 1 did not come to all_reduce #7 on dp."],
        [1],
    ),
    "a rank whose calls have all ended has an empty dump": (
        many((0,), waits("all_reduce", 8, "scheduled"), members=WORLD, pg_status=status(8, 7))
        | many((1,), members=WORLD, pg_status=status(7, 7)),
        ["rank 1 did not come to all_reduce #8 on default_pg."],
        [1],
    ),
    "a status whose group is not known proves nothing": (
        many((0,), waits("all_reduce", 8, group=HASHED, pg_id=1), members={HASHED: [0, 1]})
        | many((1,), members={HASHED: [0, 1]}, pg_status=status(8, 8, "1")),
        ["Whether rank 1 came to all_reduce #8 on tp is unknown."],
        [1],
    ),
    "the second of several calls in one": (
        many((0,), UNEVEN[0], UNEVEN[1], waits("ALLGATHER_coalesced", 2))
        | many((1,), UNEVEN[0], UNEVEN[2], waits("ALLGATHER_coalesced", 2)),
        ["rank 1 gave 16 BFloat16 + 20 BFloat16 to 2 x _broadcast_oop #2 on default_pg, rank 0 "
         "gave 16 BFloat16 + 26 BFloat16."],
        [0, 1],
    ),
    "a status that counts messages as well": (
        many((0,), waits("all_reduce", 1), pg_status=status(1, 1))
        | many((1,), call("send 1->0", 20), pg_status=status(20, 20)),
        ["rank 1 did not come to all_reduce #1 on default_pg."],
        [1],
    ),
    "and of which no message is left": (
        many((0,), waits("all_reduce", 1), members=WORLD, pg_status=status(1, 20))
        | many((1,), members=WORLD, pg_status=status(20, 20)),
        ["Whether rank 1 came to all_reduce #1 on default_pg is unknown."],
        [1],
    ),
    "gloo retires a call that has timed out": (
        many((0, 1), call("all_reduce", 5, profiling_name="gloo:all_reduce"))
        | many((2,), call("all_reduce", 4, profiling_name="gloo:all_reduce")),
        ["rank 2 did not come to all_reduce #5 on default_pg, which ended on ranks 0, 1: by an "
         "error, or dumps are not of one moment."],
        [2],
    ),
    "a group that was made again": (
        many((0,), call("all_reduce", 1), call("barrier", 2), waits("all_reduce", 2, pg_id=1))
        | many((1,), call("all_reduce", 1), call("barrier", 2), call("all_reduce", 1, pg_id=1)),
        ["rank 1 did not come to all_reduce #2 on default_pg."],
        [1],
    ),
    "two groups in another order": (
        many((0,), waits("all_reduce", 3, group=DP), waits("all_reduce", 3, group=TP))
        | many((1,), waits("all_reduce", 3, group=TP), waits("all_reduce", 3, group=DP)),
        ["They wait in a circle: rank 0, which waits for rank 1, which waits for rank 0."],
        [0, 1],
    ),
    "a device that has not begun its oldest call, and what waits behind it": (
        many((0, 1), waits("all_reduce", 3, group=TP), members={TP: [0, 1, 2]})
        | many((2,), waits("all_reduce", 3, "scheduled", group=TP), waits("send 0->1", 4, group=DP),
               waits("all_reduce", 7, "scheduled", group=DP), members={TP: [0, 1, 2], DP: [2, 3]})
        | many((3,), waits("recv 1<-0", 4, group=DP), members={DP: [2, 3]}),
        ["behind: rank 2, where all_reduce #3 on tp has not begun, as it has on ranks 0, 1."],
        [2],
    ),
    "what queues up behind a call is no excuse": (
        many((0,), call("all_to_all", 1), QUEUED, members=WIDE)
        | many((1,), waits("all_to_all", 1, "scheduled"), QUEUED, members=WIDE),
        ["behind: rank 1, still in all_to_all #1 on default_pg, which rank 0 ended.",
         "Whether rank 2 came to all_reduce #1 on dp is unknown."],
        [1, 2],
    ),
    "two ranks of a group in which the others wait": (
        many((0,), waits("all_reduce", 7, group=DP), members={DP: [0, 1]})
        | many((1,), waits("all_reduce", 3, group=TP), waits("all_reduce", 7, group=DP),
               members={DP: [0, 1], TP: [1, 2]})
        | many((2,), waits("all_reduce", 3, group=TP), members={TP: [1, 2]}),
        ["All have called all_reduce #3 on tp, and it does not end."],
        [1, 2],
    ),
    "splits of an all-to-all": (
        {rank: dump(waits("all_to_all", 1, **SPLITS[rank])) for rank in (0, 1)},
        ["rank 0 sends 3 items to rank 1 in all_to_all #1 on default_pg, which expects 1."],
        [0, 1],
    ),
    "both send first; by numbers in the group": (
        {rank: dump(waits(f"send {i}->{1 - i}", 3, group=TP), waits(f"recv {i}<-{1 - i}", 4,
                    group=TP), members={TP: [4, 6]}) for i, rank in enumerate((4, 6))},
        ["They wait in a circle: rank 4, which waits for rank 6, which waits for rank 4."],
        [4, 6],
    ),
    "messages that go round in a batch are victims of one that is not called": (
        {r: dump(*(waits(verb, 1) for verb in verbs), members={("0", "default_pg"): [0, 1, 2]})
         for r, verbs in enumerate((
             ["send 0->1", "recv 0<-1"], ["recv 1<-0", "send 1->0", "send 1->2"], []))},
        ["rank 2 did not come to send #1 on default_pg of ranks 1, 2, or has left it."],
        [2],
    ),
    "a message to a rank that the dumps do not tell": (
        {0: dump(waits("send 0->5", 1))},
        ["All have called send #1 on default_pg of rank 0, and it does not end. Who else is in "
         "that group, the dumps do not say."],
        [0],
    ),
    "what queues up behind a call is no hang of its own": (
        {r: dump(*(waits("all_reduce", n) for n in range(10, 14 - r))) for r in (0, 1)},
        ["All have called all_reduce #10 on default_pg, and it does not end."],
        [0, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NCCL)
def test_who_is_to_blame(tmp_path, name):
    of_ranks, findings, culprits = NCCL[name]
    report = told(tmp_path, of_ranks)
    assert report.findings == findings and report.culprits == culprits
    assert picture(report)


def test_culprits_are_on_the_first_screen(tmp_path):
    """128 pairs, in 127 of which ranks wait for rank 255, directly or not."""
    pair, world = ("7", "pair"), {("0", "default_pg"): [*range(256)]}
    both = waits("all_reduce", 5), waits("all_gather", 9, group=pair)
    of_ranks = {
        r: dump(*both, members=world | {pair: [r // 2 * 2, r // 2 * 2 + 1]}) for r in range(255)
    }
    of_ranks[255] = dump(call("all_reduce", 4), members=world | {pair: [254, 255]})
    report = told(tmp_path, of_ranks)
    page = str(report).splitlines()
    assert report.culprits == [255] and page[1] == "look at rank 255 first"
    assert any(line.startswith("rank 255: its last was all_reduce #4") for line in page[:8])
    assert len(page) < 30


@pytest.mark.parametrize("end", ["coalesced", "ALLGATHER_coalesced"])
@pytest.mark.parametrize("done", [True, False])
def test_calls_of_one_group_end_with_its_last_entry(tmp_path, done, end):
    """Mutants: the state of each call counts; only one of the two names of the end is known."""
    state = "completed" if done else "started"
    inner = [waits("_reduce_scatter_base", 1, "scheduled") for _ in range(2)]
    report = told(tmp_path, many((0, 1), *inner, call(end, 1, state)))
    reached = "All have called 2 x _reduce_scatter_base #1 on default_pg, and it does not end."
    assert report.findings == ([] if done else [reached])
    batch = {0: waits("send 0->1", 1, "scheduled"), 1: waits("recv 1<-0", 1, "scheduled")}
    batch = {r: dump(e, call(end, 1, state, p2p_seq_id=1)) for r, e in batch.items()}
    report = told(tmp_path / "dumps", batch)
    reached = "All have called send #1 on default_pg of ranks 0, 1, and it does not end."
    assert report.findings == ([] if done else [reached])
