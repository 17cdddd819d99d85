"""Dumps that strangers hand over are read or refused by name, and nothing in them runs."""

import json
import os
import pickle

import pytest

from minipar.lab.draw.hang import hang as picture
from minipar.observe import hang
from minipar.tools import dumps
from tests.tools.test_hang import WORLD, call, dump, many, run, told, waits, write


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("nccl_trace_rank_container-node02_3", 3),
        ("nccl_trace_rank_3.pkl", 3),
        ("2026-08-11_12:30_rank3", 3),
        ("_dump_14", 14),
    ],
)
def test_the_rank_in_a_name(tmp_path, name, rank):
    (tmp_path / name).write_bytes(pickle.dumps(dump(call("all_reduce", 1)), 2))
    assert list(dumps.read([tmp_path])) == [rank]


MADE = "made_by_a_pickle"


class Evil:
    def __reduce__(self):
        return os.mkdir, (MADE,)


REFUSED = [  # the content of a file, and what is said of it
    (pickle.dumps({"entries": [Evil()]}, 2), "only plain data is read"),
    (b"\x80\x02\x82\x01.", "unregistered extension code"),
    (pickle.dumps({"entries": 5}), "TypeError"),
    (b"{" * 100_000, "Error"),
    (b"{}", "'entries'"),
    (b'{"step": 1}\n{"step": 2}\n', "Error"),
]


@pytest.mark.parametrize("content, why", REFUSED)
def test_what_is_no_dump_is_named_and_calls_nothing(tmp_path, monkeypatch, content, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(ValueError, match="rank_0 is not a dump of a flight recorder") as error:
        dumps.read([tmp_path / "rank_0"])
    assert why in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / MADE).exists()


def test_json_of_a_rank_without_calls_has_no_list_of_calls(tmp_path):
    """torch leaves out what is empty: of the very rank that did not come."""
    (tmp_path / "rank_0").write_bytes(pickle.dumps(dump(waits("all_reduce", 1), members=WORLD), 2))
    (tmp_path / "rank_1").write_text(json.dumps({"version": "2.10", "pg_status": {"0": NOTHING}}))
    report = hang.explain(dumps.read([tmp_path]))
    assert report.findings == ["rank 1 did not come to all_reduce #1 on default_pg."]


NOTHING = {"last_enqueued_collective": "-1", "last_completed_collective": "-1"}


def test_what_is_no_set_of_dumps_is_refused(tmp_path, capfd):
    """Mutant: no call recorded is told as no hang, with exit code 0."""
    one = pickle.dumps(dump(call("all_reduce", 1)), 2)
    for name in ("twice", "empty"):
        (tmp_path / name).mkdir()
    dated = "rank_3.2026-08-11.pkl"
    for name in ("twice/rank_0", "twice/rank_0.pkl", "nameless", dated, "rank_99999999999"):
        (tmp_path / name).write_bytes(one)
    for name, said in {
        "twice": r"rank_0 and .*rank_0\.pkl are both of rank 0",
        "nameless": "nameless.*which rank wrote",
        dated: "which rank wrote",
        "rank_99999999999": "rank_99999999999.*which rank wrote",
        "empty": "no dump of a flight recorder",
        "nowhere": "nowhere is not a dump of a flight recorder: .*No such file",
    }.items():
        with pytest.raises(ValueError, match=said):
            dumps.read([tmp_path / name])
    assert run(write(tmp_path / "none", many((0, 1)))) == 2
    said = capfd.readouterr().err
    assert "no call of ranks 0, 1 was recorded" in said and "TORCH_FR_BUFFER_SIZE must be" in said


def test_a_dump_of_an_older_job_is_refused(tmp_path):
    """Times in minutes, and 10 to time out: rank 2 left no dump when the job was started again.
    Mutant: its old one tells that all others are behind."""
    began = {0: 100, 1: 100, 2: 80, 3: 95}
    calls = {2: call("all_reduce", 50), 3: call("all_reduce", 5)}
    of_ranks = {rank: calls.get(rank, waits("all_reduce", 6)) for rank in began}
    for rank, entry in of_ranks.items():
        entry |= {"time_created_ns": began[rank] * 60 * 10**9, "timeout_ms": 600_000}
    folder = write(tmp_path / "run", {rank: dump(entry) for rank, entry in of_ranks.items()})
    with pytest.raises(ValueError, match="trace_2 is of an older job"):
        dumps.read([folder])
    (folder / "trace_2").unlink()
    report = hang.explain(dumps.read([folder]))
    assert report.culprits == [3, 2] and "rank 3 did not come" in report.findings[0]
    (folder / "log_1.txt").write_text("step 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="log_1.txt is not a dump"):
        dumps.read([folder])


UNTOLD = {
    "Whether rank 1 came to send #1 on default_pg of ranks 0, 1 is unknown.": {
        0: dump(waits("send 0->1", 1), members=WORLD)
    },
}


@pytest.mark.parametrize("said", UNTOLD)
def test_what_dumps_do_not_tell_is_said(tmp_path, said):
    assert said in told(tmp_path, UNTOLD[said]).findings[0]


def test_names_from_dumps_are_shown_and_nothing_more(tmp_path):
    one = dump(waits("all_reduce\x1b[2J", 1, group=("1", "$\\frac{\x07")))
    one["entries"][0]["frames"][0]["name"] = "\u202eevil\n"
    report = told(tmp_path, {0: one})
    assert all(line.isprintable() for line in str(report).splitlines())
    assert picture(report)
