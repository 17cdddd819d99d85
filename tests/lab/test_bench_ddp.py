"""The bench: its arithmetic, and one small comparison from the command line."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from minipar.cli import main
from minipar.lab.bench import ddp as bench
from minipar.lab.bench import race
from minipar.lab.bench.ddp import COLUMNS, DdpConfig
from minipar.lab.bench.race import Measured, hidden_share, quartiles, table

SMALL = DdpConfig(preset="tiny", seq_len=32, rounds=2, links=("1gbe",), buckets=(25.0,))


def test_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    "step, compute, communication, share",
    [
        (1.0, 1.0, 0.5, 1.0),  # nothing shows
        (1.5, 1.0, 0.5, 0.0),  # all of it does
        (1.2, 1.0, 0.4, 0.5),
        (0.9, 1.0, 0.5, 1.0),  # noise: faster than computing alone
        (2.0, 1.0, 0.5, 0.0),  # slower than one after the other
    ],
)
def test_hidden_share(step, compute, communication, share):
    assert hidden_share(step, compute, communication) == pytest.approx(share)


def test_hidden_share_is_unknown_where_the_link_is():
    assert math.isnan(hidden_share(1.0, 1.0, 0.0))


def measured(*seconds, num_bytes=2_000_000):
    return Measured(list(seconds), [0.01] * 3, [num_bytes] * 3, [num_bytes / 1.2e8] * 3)


MEASURED = {
    "tuned": measured(0.010, 0.030, 0.012),
    "torch 25": measured(0.020, 0.060, 0.020, num_bytes=3_000_000),
    "torch 1": measured(0.016, 0.030, 0.024, num_bytes=3_000_000),
    "alone": measured(0.009, 0.009, 0.009, num_bytes=0),
}
MEMORY = {"tuned": 50e6, "torch 25": 100e6, "torch 1": 100e6}


def test_a_row_compares_round_by_round_with_the_best_of_theirs():
    """The mutant that divides medians would say 0.012 / 0.020 = 0.6 against "torch 25"."""
    rounds = replace(SMALL, buckets=(25.0, 1.0))
    times = {**MEASURED, "torch 1": measured(0.01, 0.06, 0.018, num_bytes=3_000_000)}
    row = bench._row(rounds, "tuned", "1gbe", times, MEMORY)
    assert row["torch_bucket_mb"] == 1.0 and row["torch_ms"] == pytest.approx(18)
    assert row["ratio"] == pytest.approx(12 / 18)  # of 1.0, 0.5 and 0.667
    assert row["ratio_low"] == pytest.approx((0.5 + 12 / 18) / 2)
    assert row["ratio_high"] == pytest.approx((1 + 12 / 18) / 2)
    assert row["memory_ratio"] == 0.5 and row["ranks"] == 2
    assert row["megabytes"] == pytest.approx(2.0)  # what ours sends
    assert row["communication_ms"] == pytest.approx(2e6 / 1.2e8 * 1e3)
    assert row["ours_hidden"] == pytest.approx(1 - 3 / (2e6 / 1.2e8 * 1e3))  # 12 of 9 ms
    on_gloo = bench._row(rounds, "tuned", "gloo", times, MEMORY)
    assert on_gloo["communication_ms"] is None and math.isnan(on_gloo["ours_hidden"])


def test_the_table_is_aligned_and_says_what_is_unknown():
    rows = [bench._row(SMALL, "tuned", name, MEASURED, MEMORY) for name in ("gloo", "1gbe")]
    head, gloo, wire = table(rows, COLUMNS).splitlines()
    column = head.index("ratio [quartiles]")
    assert gloo[column:].startswith("0.5") and wire[column:].startswith("0.5")
    assert gloo[head.index("on the wire") :].split()[:3] == ["-", "-", "-"]
    assert "%" in wire and "nan" not in head + gloo + wire


@pytest.mark.slow
def test_ranks_of_every_bench_see_no_gpu(monkeypatch):
    """Mutant: on a machine with GPUs, ranks on gloo compute there, beside others on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with race.pool(1, "gloo") as ranks:
        assert ranks.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    folder = Path(race.__file__).parent
    opening = {
        file.name for file in folder.glob("*.py") if "Ranks(" in file.read_text(encoding="utf-8")
    }
    assert opening == {"race.py"}


def test_memory_is_measured_of_each_who_is_told_of(monkeypatch):
    """Mutant: that of one size of buckets stands for all."""
    asked = []

    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(bench, "memory", lambda _, attach: asked.append(attach) or 1.0)
    monkeypatch.setattr(race, "pool", stop)
    config = replace(SMALL, buckets=(25.0, 1.0))
    with pytest.raises(Stopped):
        bench.run(config)
    options = [attach.keywords for attach in asked]
    versions = [{"version": "overlapped"}, {"version": "tuned"}]
    assert options == [*versions, {"bucket_mb": 25.0}, {"bucket_mb": 1.0}]


def test_check_refuses_what_cannot_work(tmp_path):
    SMALL.check()
    wrong = dict(ranks=0, rounds=0, batch_size=0, seq_len=0, preset="x", links=(), buckets=())
    wrong |= dict(versions=("tunde",))
    wrong |= dict(json=str(tmp_path / "none/rows.json"))
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            replace(SMALL, **{name: value}).check()
    with pytest.raises(ValueError, match="5gbe"):
        replace(SMALL, links=("gloo", "5gbe")).check()


@pytest.mark.slow
def test_bench_writes_rows_with_a_ratio(tmp_path, capfd):
    path = tmp_path / "rows.json"
    words = "bench ddp --preset tiny --seq-len 32 --rounds 2 --links 1gbe --buckets 25 --json"
    with pytest.raises(SystemExit) as stop:
        main.main([*words.split(), str(path)])
    out, err = capfd.readouterr()
    assert stop.value.code == 0, err
    overlapped, row = json.loads(path.read_text(encoding="utf-8"))
    assert (overlapped["ours"], row["ours"]) == ("overlapped", "tuned")
    for key in ("ratio", "ratio_low", "ratio_high", "ours_ms", "torch_ms", "memory_ratio"):
        assert math.isfinite(row[key]) and row[key] > 0, key
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert 0 <= row["ours_hidden"] <= 1 and 0 <= row["torch_hidden"] <= 1
    parameters = 758_912 * 4 / 1e6  # megabytes; 2 (n-1)/n of them is 1
    assert row["megabytes"] == pytest.approx(parameters, rel=1e-3)
    assert row["communication_ms"] > parameters / 125 * 1e3  # at 1 Gbit/s, and the latency
    assert row["bench"] == "ddp" and "1" in row["link"] and f"{row['ratio']:.3f}" in out
