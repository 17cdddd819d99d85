"""The bench of collectives: its arithmetic, and one small comparison on real ranks."""

import json
import math
from dataclasses import replace

import pytest
import torch

from minipar.comm import plans
from minipar.comm.collectives import barrier
from minipar.comm.mesh import Mesh
from minipar.comm.tuning import Tuning
from minipar.emulate import link
from minipar.lab.bench import collectives as bench
from minipar.lab.bench.collectives import CollectivesConfig, table
from minipar.lab.bench.race import Measured

SMALL = CollectivesConfig(ranks=2, sizes=(1024, 4096), algorithms=("ring", "direct"), rounds=3)


def test_a_row_compares_round_by_round():
    """The mutant that divides medians would say 3 / 4 = 0.75."""
    seconds = {
        "backend": [2e-3, 4e-3, 8e-3],
        "ring": [3e-3, 2e-3, 8e-3],
        "direct": [4e-3, 12e-3, 16e-3],
        "messages of ring": [1e-3, 2e-3, 4e-3],
        "messages of direct": [2e-3, 8e-3, 8e-3],
    }
    measured = {1024: {name: Measured(times) for name, times in seconds.items()}}
    ring, direct = bench._rows(SMALL, "1gbe", 1024, measured, Tuning(2, 1e-3, 1e-6))
    assert (ring["algorithm"], direct["algorithm"]) == ("ring", "direct")
    assert ring["ratio"] == pytest.approx(1.0) and ring["ratio_low"] == pytest.approx(0.75)
    assert direct["ratio"] == pytest.approx(2.0) and direct["ratio_high"] == pytest.approx(2.5)
    assert ring["ours_mb_per_s"] == pytest.approx(1024 / 3e-3 / 1e6)  # 2 (n-1)/n of 1024 bytes
    assert ring["backend_mb_per_s"] == pytest.approx(1024 / 4e-3 / 1e6)
    four = bench._rows(replace(SMALL, ranks=4), "1gbe", 1024, measured, Tuning(4, 1e-3, 1e-6))
    assert four[0]["ours_mb_per_s"] == pytest.approx(1.5 * 1024 / 3e-3 / 1e6)
    assert ring["messages_ms"] == pytest.approx(2) and ring["messages_ratio"] == 0.5
    assert direct["messages_ratio"] == pytest.approx(1.0)  # of 1, 2 and 1
    assert direct["predicted_ms"] == pytest.approx(1 + 1.024)
    assert (ring["picked"], direct["picked"]) == (False, True)
    head, *lines = table([ring, direct]).splitlines()
    assert lines[0][head.index("ratio") :].startswith("1.00 [0.75")
    assert "direct *" in lines[1] and "*" not in lines[0] and "emulated 1 GbE" in lines[0]


def test_check_refuses_what_cannot_work(tmp_path):
    SMALL.check()
    wrong = dict(ranks=1, rounds=0, sizes=(1,), algorithms=("rign",), links=())
    wrong |= dict(json=str(tmp_path / "none/rows.json"))
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"--{name}"):
            replace(SMALL, **{name: value}).check()
    with pytest.raises(ValueError, match="5gbe"):
        replace(SMALL, links=("gloo", "5gbe")).check()


def test_measure_lets_everybody_take_every_turn(ranks):
    first, second = ranks(2).run(bench.measure, SMALL, "gloo")
    assert first[0] == second[0]  # of the slowest rank
    assert list(first[0]) == list(SMALL.sizes)
    for of_size in first[0].values():
        messages = [bench.messages_of(name) for name in SMALL.algorithms]
        assert list(of_size) == ["backend", *SMALL.algorithms, *messages]
        assert all(len(one.seconds) == 3 and min(one.seconds) > 0 for one in of_size.values())


@pytest.mark.slow
def test_bench_writes_rows_with_a_ratio(tmp_path, capfd):
    path = tmp_path / "rows.json"
    rows = bench.run(replace(SMALL, links=("gloo", "1gbe"), json=str(path)))
    out, _ = capfd.readouterr()
    assert json.loads(path.read_text(encoding="utf-8")) == rows and len(rows) == 2 * 2 * 2
    for row in rows:
        for key in ("ratio", "ratio_low", "ratio_high", "ours_ms", "backend_ms", "predicted_ms"):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert f"{row['ratio']:.2f} [" in out


@pytest.mark.parametrize("algorithm", plans.ALL_REDUCE)
def test_messages_alone_are_those_of_the_algorithm(ranks, algorithm):
    """Mutant: a bound that leaves messages out, below what any code could reach."""
    of_algorithm, alone = ranks(4, "link").run(bytes_sent, algorithm)[0]
    assert sorted(of_algorithm) == sorted(alone) != []


def bytes_sent(algorithm):
    axis, tensor, sent = Mesh(dp=4).dp, torch.ones(1000), ([], [])
    for call, sizes in zip((bench.call, bench.only_messages), sent, strict=True):
        note = lambda work, sizes=sizes: sizes.append(work.num_bytes)  # noqa: E731
        link.observers.append(note)
        call(algorithm, tensor, axis)
        barrier(axis)
        link.observers.remove(note)
    return [[size for size in sizes if size] for sizes in sent]
