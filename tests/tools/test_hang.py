"""`minipar hang`: what dumps of jobs that hang tell; and dumps that strangers hand over.

`dumps/` was written by real jobs on gloo (`tests/tools/hanging.py`, torch 2.13), six ways to hang.
gloo records neither messages between ranks nor who is in a group: dumps with those, as NCCL writes
them, are made here after the format (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

import copy
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.cli import main
from minipar.lab.draw.hang import hang as picture
from minipar.observe.stalls import Call, State
from minipar.tools import hang
from tests.tools import hanging

DUMPS = Path(__file__).parent / "dumps"
TELLS = {  # way to hang -> findings, the ranks whose stacks are wanted, and a line of those
    "absent": (["rank 2 did not come to all_reduce #4 on default_pg."], [2], "in _rank"),
    "swapped": (
        ["rank 1 called all_gather where ranks 0, 2, 3 called all_reduce #4 on default_pg."],
        [1, 0],
        "in swapped",
    ),
    "sizes": (
        [
            "rank 3 gave 8 Float to broadcast #4 on default_pg, ranks 1, 2 gave 4 Float.",
            "rank 0 did not come to broadcast #4 on default_pg.",
        ],
        [0],
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
        "rank 1: no dump.",
    ),
}


def check(folder, way):
    report = hang.explain(*hang.read([folder]))
    findings, culprits, line = TELLS[way]
    assert sorted(report.findings) == sorted(findings) and report.culprits == culprits
    assert line in str(report)
    return report


@pytest.mark.parametrize("way", TELLS)
def test_six_ways_to_hang_are_told_apart(way):
    report = check(DUMPS / way, way)
    assert report.findings[0] == TELLS[way][0][0]
    waiting = {rank for wait in report.waits for rank in wait.ranks}
    assert waiting and not waiting & {
        rank for rank in report.culprits if way in ("absent", "sizes")
    }
    figure = picture(report)
    words = {text.get_text() for ax in figure.axes for text in ax.texts}
    assert {"rank 0", "#4" if way != "circle" else "#2"} <= words
    assert ("rank 1 · no dump" in words) == ("?" in words) == (way == "frozen")


def test_json_tells_the_same_as_pickles():
    both = [hang.explain(*hang.read([DUMPS / way])) for way in ("absent", "absent_json")]
    assert both[0].findings == both[1].findings and both[0].culprits == both[1].culprits


@pytest.mark.exhaustive
def test_jobs_that_hang_now_tell_the_same(tmp_path):
    """The dumps in the repository, made anew."""
    command = [sys.executable, "-m", "tests.tools.hanging", str(tmp_path / "dumps")]
    subprocess.run(command, check=True, timeout=100)
    for way in hanging.WAYS:
        check(tmp_path / "dumps" / way.__name__, way.__name__)


def test_a_folder_of_hosts_names_them_and_exit_codes_tell(tmp_path, capfd):
    """1 where a hang is found, 0 where none is, 2 for bad input."""
    for rank in (0, 1, 3):
        (tmp_path / f"node{rank // 2}").mkdir(exist_ok=True)
        file = tmp_path / f"node{rank // 2}" / f"nccl_trace_rank_{rank}"
        file.write_bytes((DUMPS / "absent" / file.name).read_bytes())
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert run(tmp_path, "--out", tmp_path / "a.png") == 1
    said = capfd.readouterr().out
    assert "Whether rank 2 came to all_reduce #4" in said and "notes.txt" in said
    assert "-> perhaps rank 2\n" in said and "rank 2: no dump" in said
    assert (tmp_path / "a.png").stat().st_size > 5000
    done = [nccl(0, [("all_reduce", 1, True)]), nccl(1, [("all_reduce", 1, True)])]
    assert run(write(tmp_path / "done", done)) == 0
    assert "no hang: every recorded call has ended" in capfd.readouterr().out
    assert run(tmp_path / "nowhere") == 2
    assert "minipar: error: no such dump: " in capfd.readouterr().err


def run(*words):
    with pytest.raises(SystemExit) as stop:
        main.main(["hang", *map(str, words)])
    return stop.value.code or 0


# ---------------------------------------------------------------------- as NCCL writes them
def nccl(rank, calls, group=("0", "default_pg"), ranks="[0, 1]"):
    """A dump of `rank`: (verb, number, done), with "send 0->1" for a message."""
    entries = [
        {
            "record_id": i,
            "pg_id": 0,
            "process_group": group,
            "collective_seq_id": number,
            "p2p_seq_id": number if "-" in verb else 0,
            "profiling_name": f"nccl:{verb}",
            "time_created_ns": 10**18 + i,
            "input_sizes": [[4, 2]],
            "input_dtypes": ["BFloat16"],
            "state": "completed" if done else "started",
            "time_discovered_completed_ns": 5 if done else None,
            "retired": done,
            "is_p2p": "-" in verb,
            "frames": [{"name": "step", "filename": "train.py", "line": 10 + number}],
        }
        for i, (verb, number, done) in enumerate(calls)
    ]
    config = {group[0]: {"name": group[0], "desc": group[1], "ranks": ranks}}
    return {"version": "2.10", "rank": rank, "pg_config": config, "entries": entries}


def write(folder, dumps):
    folder.mkdir()
    for i, dump in enumerate(dumps):
        (folder / f"trace_{i}").write_bytes(pickle.dumps(dump, 2))
    return folder


def told(tmp_path, *dumps):
    return hang.explain(*hang.read([write(tmp_path / "dumps", dumps)]))


def test_two_that_both_receive_wait_for_each_other(tmp_path):
    """Peers are numbers in the group: 1 of ranks (4, 6) is rank 6."""
    group = ("7", "pp")
    report = told(
        tmp_path,
        nccl(4, [("recv 0<-1", 3, False)], group, "[4, 6]"),
        nccl(6, [("recv 1<-0", 3, False)], group, "[4, 6]"),
    )
    assert report.findings == [
        "They wait in a circle: rank 4, which waits for rank 6, which waits for rank 4.",
        "rank 4 waits in recv #3 from rank 6 on pp; rank 6 has no send for it open.",
        "rank 6 waits in recv #3 from rank 4 on pp; rank 4 has no send for it open.",
    ]


def test_both_ends_open_with_other_sizes_are_compared(tmp_path):
    dumps = [nccl(0, [("send 0->1", 1, False)]), nccl(1, [("recv 1<-0", 1, False)])]
    dumps[1]["entries"][0]["input_sizes"] = [[5]]
    (finding,) = told(tmp_path, *dumps).findings
    assert finding.endswith("of rank 0 are open: 8 BFloat16 meets 5 BFloat16.")


def test_another_order_is_seen_where_calls_do_not_block(tmp_path):
    """On a GPU a rank runs ahead. Catches the second difference told as a second fault."""
    a, b = [("all_gather", 5, False), ("all_reduce", 6, False)], []
    b = [("all_reduce", 5, False), ("all_gather", 6, False)]
    report = told(tmp_path, nccl(0, b), nccl(1, a))
    assert report.findings == [
        "rank 1 called all_gather where rank 0 called all_reduce #5 on default_pg; "
        "theirs comes at #6: another order."
    ]


def test_a_type_that_differs_and_a_call_that_all_have_reached(tmp_path):
    dumps = [nccl(rank, [("all_reduce", 2, False)], ranks="[0, 1, 2]") for rank in range(3)]
    dumps[2]["entries"][0]["input_dtypes"] = ["Float"]
    assert told(tmp_path, *dumps).findings == [
        "rank 2 gave 8 Float to all_reduce #2 on default_pg, ranks 0, 1 gave 8 BFloat16."
    ]
    dumps[2] = nccl(2, [("all_reduce", 2, False)])
    assert "does not end" in told(tmp_path / "dumps", *dumps).findings[0]


def test_what_queues_up_behind_a_call_is_no_hang_of_its_own(tmp_path):
    """On a GPU ranks run ahead, and not equally far. Mutant: who is less far is to blame."""
    ahead = ((rank, [("all_reduce", n, False) for n in range(10, 14 - rank)]) for rank in range(2))
    report = told(tmp_path, *(nccl(rank, calls) for rank, calls in ahead))
    assert report.findings == ["All have called all_reduce #10 on default_pg, and it does not end."]
    assert report.culprits == [0, 1]


def test_who_waits_in_turn_is_a_victim(tmp_path):
    """0 waits for 1 in dp, 1 for 3 in tp, and 3 waits for nobody: it is the one to look at."""
    dp, tp = (("1", "dp"), "[0, 1]"), (("2", "tp"), "[1, 3]")
    report = told(
        tmp_path,
        nccl(0, [("all_reduce", 1, False)], *dp),
        nccl(1, [("all_gather", 1, False)], *tp),
        nccl(3, [("all_gather", 0, True)], *tp),
    )
    assert report.culprits == [3]


def test_our_own_watchdog_is_read(tmp_path):
    calls = [Call("all_reduce", "dp", (0, 1), n, 64, 5.0) for n in (4, 3)]
    states = [
        State(0, "rank 0 of 2 (dp=0) on host a, process 1", (calls[0],), (calls[0],), "here"),
        State(
            1, "rank 1 of 2 (dp=1) on host b, process 2", (calls[1],), (), "File train.py\n  x()"
        ),
    ]
    content = json.dumps({"minipar_stall": [asdict(state) for state in states]})
    (tmp_path / "stalled.json").write_text(content, encoding="utf-8")
    report = hang.explain(*hang.read([tmp_path / "stalled.json"]))
    assert report.findings == ["rank 1 did not come to all_reduce #4 on dp."]
    assert "rank 1 on b, process 2: its last was all_reduce #3 on dp; it is here:" in str(report)


def stalled(tmp_path, *states):
    content = json.dumps({"minipar_stall": [asdict(state) for state in states]})
    (tmp_path / "stalled.json").write_text(content, encoding="utf-8")
    return hang.explain(*hang.read([tmp_path / "stalled.json"]))


def exchange(number, *peers, seconds=5.0):
    return Call("exchange", "cp", (0, 1, 2, 3), number, 64, seconds, peers)


def test_in_a_ring_the_rank_that_did_not_come_is_named(tmp_path):
    """Ranks 1 and 3 wait for rank 2; rank 0 has ended the call and computes.

    Mutants: an exchange never finds its other end; messages that have ended are not shown, so that
    rank 2 has called nothing, and rank 0 does not come either.
    """
    late, older = exchange(3, 1, 3), Call("all_reduce", "cp", (0, 1, 2, 3), 8, 64, 9.0)
    report = stalled(
        tmp_path,
        State(0, "rank 0 of 4", (exchange(4, 3, 1),), (), "computing"),
        State(1, "rank 1 of 4", (exchange(4, 0, 2),), (exchange(4, 0, 2),), "waiting"),
        State(2, "rank 2 of 4", (late, older), (), "sleeping"),
        State(3, "rank 3 of 4", (exchange(4, 2, 0),), (exchange(4, 2, 0),), "waiting"),
    )
    assert report.findings == [
        f"rank {rank} waits in exchange #4 with rank 2 on cp; rank 2 has no exchange for it open."
        for rank in (1, 3)
    ]
    assert report.culprits == [2]
    assert "rank 2: its last was exchange #3 on cp; it is here:" in str(report)
    drawn = {text.get_text() for ax in picture(report).axes for text in ax.texts}
    assert {"messages", "rank 1", "rank 3", "exchange #4 with rank 2 on cp"} <= drawn
    assert "rank 2" not in drawn  # in no call of a group does anyone wait


def test_ends_of_an_exchange_that_are_open_are_told_once(tmp_path):
    """Also where the other end is a receive, or has a name of its own. Mutants: both sides tell;
    what has ended at the other end is no finding, and nothing hangs."""
    calls = [exchange(1, 1), exchange(1, 0)]
    states = [State(r, f"rank {r} of 2", (c,), (c,), "here") for r, c in enumerate(calls)]
    open_ends = "Both ends of exchange #1 with rank 1 on cp of rank 0 are open."
    assert stalled(tmp_path, *states).findings == [open_ends]
    for verb in ("recv", "2F0"):
        other = Call(verb, "cp", (0, 1, 2, 3), 7, 64, 5.0, (0,))
        states[1] = State(1, "rank 1 of 2", (other,), (other,), "here")
        (finding,) = stalled(tmp_path, *states).findings
        assert finding.startswith("Both ends of ") and finding.endswith(" are open.")
    states[1] = State(1, "rank 1 of 2", (calls[1],), (), "here")
    assert stalled(tmp_path, *states).findings == [
        "rank 0 waits in exchange #1 with rank 1 on cp; that of rank 1 has ended."
    ]


# ---------------------------------------------------------------------- coalesced calls
def coalesced(dump, end, done, **numbers):
    """Make one group, which ends in `end`, of the calls that have not; their states stay."""
    group = [e for e in dump["entries"] if e["state"] == "started"]
    dump["entries"].append(copy.deepcopy(group[-1]))
    dump["entries"][-1] |= {"profiling_name": f"nccl:{end}", "input_sizes": [], "input_dtypes": []}
    if done:
        dump["entries"][-1] |= {"state": "completed", "retired": True}
    for entry in [*group, dump["entries"][-1]]:
        entry |= numbers
    return dump


@pytest.mark.parametrize("done", [True, False])
def test_messages_of_one_batch_end_with_its_last_entry(tmp_path, done):
    """Mutants: the state of each message counts; or every message in a batch has ended."""
    calls = {0: "send 0->1", 1: "recv 1<-0"}
    dumps = [nccl(rank, [("all_reduce", 1, True), (calls[rank], 1, False)]) for rank in calls]
    dumps = [coalesced(dump, "coalesced", done, collective_seq_id=1) for dump in dumps]
    report = told(tmp_path, *dumps)
    open_ends = "Both ends of send #1 to rank 1 on default_pg of rank 0 are open."
    assert report.findings == ([] if done else [open_ends])
    assert [len(recording.entries) for recording in report.recordings.values()] == [2, 2]


@pytest.mark.parametrize("end", ["coalesced", "ALLGATHER_coalesced"])
@pytest.mark.parametrize("done", [True, False])
def test_collectives_of_one_group_end_with_its_last_entry(tmp_path, done, end):
    """Mutants: the state of each call counts; only one of the two names of the end is known."""
    calls = [("_reduce_scatter_base", 1, False)] * 2
    dumps = [coalesced(nccl(rank, calls), end, done) for rank in range(2)]
    if done:
        for dump in dumps:
            dump["entries"] += nccl(0, [("all_reduce", 2, True)])["entries"]
    reached = "All have called _reduce_scatter_base #1 on default_pg, and it does not end."
    assert told(tmp_path, *dumps).findings == ([] if done else [reached])


def test_a_batch_says_nothing_of_other_calls(tmp_path):
    """Mutants: the end of a batch ends a collective that waits beside it, or, in old dumps, every
    call before it, as these have `seq_id` alone; allreduce_coalesced, a call, is taken for an end.
    """
    calls = [("all_reduce", 1, False), ("send 0->1", 1, False)]
    dump = coalesced(nccl(0, calls), "coalesced", True)
    dump["entries"][0]["p2p_seq_id"] = 0  # as of a call from before the batch
    (finding,) = told(tmp_path, dump).findings
    assert finding == "Whether rank 1 came to all_reduce #1 on default_pg is unknown."
    old = nccl(0, [("all_reduce", 3, False), ("coalesced", 4, True)])
    for entry in old["entries"]:
        entry["seq_id"] = entry.pop("collective_seq_id")
        del entry["p2p_seq_id"]
    assert "all_reduce #3" in told(tmp_path / "dumps", old).findings[0]
    twice = nccl(0, [("all_reduce", 1, False), ("allreduce_coalesced", 1, True)])
    assert "all_reduce #1" in told(tmp_path / "dumps" / "dumps", twice).findings[0]


# ---------------------------------------------------------------------- of whom nothing is known
def test_a_rank_that_the_watchdog_could_not_hear_is_not_said_to_be_missing(tmp_path):
    """Mutant: a state that is not known counts as that of a rank that has called nothing."""
    call = Call("all_reduce", "dp", (0, 1, 2), 7, 64, 5.0)
    late = Call("all_reduce", "dp", (0, 1, 2), 6, 64, 9.0)
    states = [
        State(0, "rank 0 of 3 on host a", (call,), (call,), "here"),
        State(1, "rank 1 of 3 on host a", (late,), (), "there"),
        State(2, "rank 2 of 3 on host b", silence="it does not answer", is_known=False),
    ]
    content = json.dumps({"minipar_stall": [asdict(state) for state in states]})
    (tmp_path / "stalled.json").write_text(content, encoding="utf-8")
    report = hang.explain(*hang.read([tmp_path]))
    assert report.findings == [
        "rank 1 did not come to all_reduce #7 on dp.",
        "Whether rank 2 came to all_reduce #7 on dp is unknown.",
    ]
    assert report.culprits == [1, 2]
    assert "rank 0 in all_reduce #7 on dp -> rank 1 and perhaps rank 2\n" in str(report)
    assert "rank 2 on b: nothing is heard of it; it does not answer" in str(report)


def test_dumps_of_one_of_two_hosts_say_nothing_of_the_other(tmp_path):
    """Mutant: a rank without a dump did not come, or has no message open."""
    calls = [("all_reduce", 1, False), ("send 0->2", 1, False)]
    dumps = [nccl(rank, calls[: 2 - rank], ranks="[0, 1, 2, 3]") for rank in range(2)]
    report = told(tmp_path, *dumps)
    assert report.findings == [
        "Whether ranks 2, 3 came to all_reduce #1 on default_pg is unknown.",
        "rank 0 waits in send #1 to rank 2 on default_pg; "
        "whether rank 2 has a recv for it open is unknown.",
    ]
    assert report.culprits == [2, 3]


def test_dumps_without_a_call_are_no_sign_that_nothing_hangs(tmp_path, capfd):
    """Mutant: no call recorded is told as no hang, with exit code 0."""
    assert run(write(tmp_path / "dumps", [nccl(0, []), nccl(1, [])])) == 2
    said = capfd.readouterr().err
    assert "no call of ranks 0, 1 was recorded" in said and "TORCH_FR_BUFFER_SIZE must be" in said


# ---------------------------------------------------------------------- from strangers
@pytest.mark.parametrize(
    "content", [b'{"step": 1}\n{"step": 2}\n', b"\x80\x02", b'{"entries": [0]}']
)
def test_what_cannot_be_read_is_skipped_beside_a_dump(tmp_path, content):
    """Mutants: one unreadable file hides all dumps of a folder; or none of them is named."""
    folder = write(tmp_path / "run", [nccl(0, [("all_reduce", 1, True)])])
    other = folder / "metrics_1.jsonl"
    other.write_bytes(content)
    recordings, (note,) = hang.read([folder])
    assert list(recordings) == [0] and note.startswith(f"skipped: {other} is no")
    for named in (other, f"{folder}//{other.name}"):
        with pytest.raises(ValueError, match=r"metrics_1\.jsonl is no"):
            hang.read([folder / "trace_0", named])
    (folder / "trace_0").unlink()
    with pytest.raises(ValueError, match=r"metrics_1\.jsonl is no"):
        hang.read([folder])


DEEP = b"\x80\x02}X\x07\0\0\0entries]}X\x05\0\0\0pg_id" + b"]" * 10**5 + b"a" * 99_999 + b"sas."


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["EVIL"])),)


def test_a_pickle_calls_nothing_and_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "made"))
    tracemalloc.start()
    for content, why in [
        (pickle.dumps({"entries": [Evil()]}, 2), "only plain data is read"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "no list `entries`"),  # a memo of 2**31 places
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.", "no readable dump"),
        (b"\x80\x02\x82\x01.", "no readable dump"),
        (pickle.dumps({"entries": 5}), "no list `entries`"),
        (b"{" * 100_000, "no readable dump"),
        (b'{"a":' * 100_000, "no readable dump"),
        (b"", "neither a pickle nor"),
        (b"{}", "no list `entries`"),
        (b'{"entries": [null]}', "not what a flight recorder writes"),
        (b'{"minipar_stall": [{}]}', "not what a flight recorder writes"),
        (DEEP, "not what a flight recorder writes"),
    ]:
        (tmp_path / "rank_0").write_bytes(content)
        with pytest.raises(ValueError, match="rank_0") as error:
            hang.read([tmp_path / "rank_0"])
        assert why in str(error.value) and "\n" not in str(error.value)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert not (tmp_path / "made").exists()


def test_two_of_one_rank_and_one_of_none_are_refused(tmp_path):
    two = [nccl(0, []), nccl(0, [])]
    with pytest.raises(ValueError, match=r"trace_0 and .*trace_1 are both of rank 0"):
        told(tmp_path, *two)
    (tmp_path / "dumps" / "trace_0").rename(tmp_path / "nameless")
    file = tmp_path / "nameless"
    file.write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(ValueError, match="nameless .*of which rank"):
        hang.read([file])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no dump of a flight recorder"):
        hang.read([tmp_path / "empty"])


def test_names_from_dumps_are_shown_and_nothing_more(tmp_path):
    dump = nccl(0, [("all_reduce\x1b[2J", 1, False)], ("1", "$\\frac{\x07"))
    dump["entries"][0]["frames"][0]["name"] = "\u202eevil\n"
    report = told(tmp_path, dump)
    assert all(line.isprintable() for line in str(report).splitlines())
    assert picture(report)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([10**30, -1, [], {}, [[]], [None], {"a": 1}, "send 0->9", "nccl:recv 9<-0"]),
)  # fmt: skip
GOOD = [
    nccl(1, [("all_reduce", 1, True), ("recv 1<-0", 2, False), ("broadcast", 2, False)]),
    {"minipar_stall": [json.loads(json.dumps({
        "rank": 0, "label": "rank 0", "stack": "", "silence": "", "is_known": True,
        "begun": [vars(Call("send", "pp", (0, 1), 1, 1, 1.0, (1,)))],
        "awaited": [vars(Call("send", "pp", (0, 1), 1, 1, 1.0, (1,)))],
    }))]},
]  # fmt: skip


def places(value, at=()):
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


def hand_over(file: Path, data: st.DataObject) -> None:
    """A dump with other things in up to three places, as pickle or JSON."""
    dump = copy.deepcopy(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(sorted(places(dump), key=str)))
        owner = dump
        for key in way:
            owner = owner[key]
        owner[last] = copy.deepcopy(data.draw(JUNK))
    file.write_bytes(
        pickle.dumps(dump, 2) if data.draw(st.booleans()) else json.dumps(dump).encode()
    )
    try:
        report = hang.explain(*hang.read([file]))
    except ValueError as error:
        assert "rank_1" in str(error)
    else:
        assert str(report)


@pytest.mark.parametrize(
    "count", [50, pytest.param(2000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)])]
)
def test_whatever_a_stranger_hands_over_is_shown_or_refused_by_name(tmp_path, count):
    """Catches every exception that is not our own."""
    once = given(st.data())(lambda data: hand_over(tmp_path / "rank_1", data))
    settings(max_examples=count, deadline=None)(once)()
