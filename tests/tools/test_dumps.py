"""Dumps that strangers hand over are read or refused by name, and nothing in them runs."""

import copy
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.lab.draw.hang import hang as picture
from minipar.observe.watchdog import Call
from minipar.tools import dumps, hang
from tests.tools.test_hang import call, dump, many, run, status, told, waits, write


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("nccl_trace_rank_container-node02_3", 3),
        ("nccl_trace_rank_10.0.0.5_3", 3),
        ("nccl_trace_rank_3.2026-08-11.pkl", 3),
        ("2026-08-11_12:30_rank3", 3),
        ("rank_0.json", 0),
        ("_dump_14", 14),
    ],
)
def test_the_rank_in_a_name(tmp_path, name, rank):
    (tmp_path / name).write_bytes(pickle.dumps(dump(call("all_reduce", 1)), 2))
    assert list(dumps.read([tmp_path])[0]) == [rank]


@pytest.mark.parametrize(
    "content", [b'{"step": 1}\n{"step": 2}\n', b"\x80\x02", b'{"entries": [0]}']
)
def test_what_cannot_be_read_is_skipped_beside_a_dump(tmp_path, content):
    """Mutants: one unreadable file hides all dumps of a folder; or none of them is named."""
    folder = write(tmp_path / "run", {0: dump(call("all_reduce", 1))})
    other = folder / "metrics_1.jsonl"
    other.write_bytes(content)
    recordings, (note,) = dumps.read([folder])
    assert list(recordings) == [0] and note.startswith(f"skipped: {other} is no")
    for named in (other, f"{folder}//{other.name}"):
        with pytest.raises(ValueError, match=r"metrics_1\.jsonl is no"):
            dumps.read([folder / "trace_0", named])
    (folder / "trace_0").unlink()
    with pytest.raises(ValueError, match=r"metrics_1\.jsonl is no"):
        dumps.read([folder])


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
            dumps.read([tmp_path / "rank_0"])
        assert why in str(error.value) and "\n" not in str(error.value)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert not (tmp_path / "made").exists()


def test_what_is_no_set_of_dumps_is_refused(tmp_path, capfd):
    """Mutant: no call recorded is told as no hang, with exit code 0."""
    with pytest.raises(ValueError, match=r"trace_0 and .*trace_1 are both of rank 0"):
        told(tmp_path, {0: dump(rank=0), 1: dump(rank=0)})
    for name, said in (("nameless", "of which rank"), ("rank_99999999999", "of which rank")):
        (tmp_path / name).write_bytes(pickle.dumps(dump(call("all_reduce", 1)), 2))
        with pytest.raises(ValueError, match=f"{name} .*{said}"):
            dumps.read([tmp_path / name])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no dump of a flight recorder"):
        dumps.read([tmp_path / "empty"])
    assert run(write(tmp_path / "none", many((0, 1)))) == 2
    said = capfd.readouterr().err
    assert "no call of ranks 0, 1 was recorded" in said and "TORCH_FR_BUFFER_SIZE must be" in said


def test_names_from_dumps_are_shown_and_nothing_more(tmp_path):
    one = dump(waits("all_reduce\x1b[2J", 1, group=("1", "$\\frac{\x07")))
    one["entries"][0]["frames"][0]["name"] = "\u202eevil\n"
    report = told(tmp_path, {0: one})
    assert all(line.isprintable() for line in str(report).splitlines())
    assert picture(report)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([10**30, -1, [], {}, [[]], [None], {"a": 1}, "send 0->9", "nccl:recv 9<-0"]),
)  # fmt: skip
GOOD = [
    dump(call("all_reduce", 1), waits("recv 1<-0", 2), waits("broadcast", 2), rank=1,
         pg_status=status(2, 1)),
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
    broken = copy.deepcopy(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(sorted(places(broken), key=str)))
        owner = broken
        for key in way:
            owner = owner[key]
        owner[last] = copy.deepcopy(data.draw(JUNK))
    file.write_bytes(
        pickle.dumps(broken, 2) if data.draw(st.booleans()) else json.dumps(broken).encode()
    )
    try:
        report = hang.explain(*dumps.read([file]))
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
