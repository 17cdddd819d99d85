"""Dumps that strangers hand over are read or refused by name, and nothing in them runs."""

import os
import pickle
from pathlib import Path

import pytest

from minipar.lab.draw.hang import hang as picture
from minipar.tools import dumps
from tests.tools.test_hang import call, dump, many, run, told, waits, write


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
    assert list(recordings) == [0] and note.startswith(f"skipped: {other} is not")
    for named in (other, f"{folder}//{other.name}"):
        with pytest.raises(ValueError, match=r"metrics_1\.jsonl is not"):
            dumps.read([folder / "trace_0", named])
    (folder / "trace_0").unlink()
    with pytest.raises(ValueError, match=r"metrics_1\.jsonl is not"):
        dumps.read([folder])


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["EVIL"])),)


def test_a_pickle_calls_nothing_and_what_is_no_dump_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "made"))
    for content, why in [
        (pickle.dumps({"entries": [Evil()]}, 2), "only plain data is read"),
        (b"\x80\x02\x82\x01.", "unregistered extension code"),
        (pickle.dumps({"entries": 5}), "TypeError"),
        (b"{" * 100_000, "Error"),
        (b"", "EOFError"),
        (b"{}", "'entries'"),
        (b'{"entries": [null]}', "TypeError"),
        (b'{"minipar_stall": [{}]}', "Error"),
    ]:
        (tmp_path / "rank_0").write_bytes(content)
        with pytest.raises(ValueError, match="rank_0 is not a dump of a flight recorder") as error:
            dumps.read([tmp_path / "rank_0"])
        assert why in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()


def test_what_is_no_set_of_dumps_is_refused(tmp_path, capfd):
    """Mutant: no call recorded is told as no hang, with exit code 0."""
    one = pickle.dumps(dump(call("all_reduce", 1)), 2)
    (tmp_path / "twice").mkdir()
    for name in ("rank_0", "rank_0.pkl"):
        (tmp_path / "twice" / name).write_bytes(one)
    with pytest.raises(ValueError, match=r"rank_0 and .*rank_0\.pkl are both of rank 0"):
        dumps.read([tmp_path / "twice"])
    for name in ("nameless", "rank_99999999999"):
        (tmp_path / name).write_bytes(one)
        with pytest.raises(ValueError, match=f"{name}.*which rank wrote"):
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
