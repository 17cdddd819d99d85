"""The bench of sharding: its arithmetic, and that all contenders do the same work."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab.bench import fsdp as bench
from minipar.lab.bench import race
from minipar.lab.bench.ddp import ADAMW, TOY, Contender, memory
from minipar.lab.bench.fsdp import COLUMNS, METHODS, OURS, RIVALS, THEIRS, ShardingConfig
from minipar.lab.bench.race import ALONE, Measured, table
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.trains

SMALL = ShardingConfig(preset="tiny", batch_size=1, seq_len=16, rounds=1, links=("10gbe",))
MEASURED = Path(__file__).parents[2] / "notebooks/assets/measured/fsdp.json"

PREFETCH, ASYNC = "fully_shard, prefetch", "fully_shard, all asynchronous"
BUSY = [0.05] * 3  # seconds of the processor
TIMES = {
    ALONE: Measured([0.05] * 3, BUSY, [0.0] * 3, [0.0] * 3),
    "FSDP": Measured([0.10, 0.30, 0.12], [0.04] * 3, [3e6] * 3, [0.1] * 3),
    "fully_shard": Measured([0.20, 0.20, 0.20], BUSY, [3e6] * 3, [0.1] * 3),
    PREFETCH: Measured([0.16, 0.30, 0.24], BUSY, [3e6] * 3, [0.1] * 3),
    ASYNC: Measured([0.10, 0.60, 0.18], BUSY, [4e6] * 3, [0.2] * 3),
}
MEMORY = {"FSDP": 50e6, "fully_shard": 80e6, PREFETCH: 90e6, ASYNC: 100e6}


def test_a_row_compares_round_by_round_with_the_fastest_of_theirs():
    """Mutants: the ratio of medians to the slowest (0.5); to the first one always; the fastest
    one's memory beside another one's."""
    row = race.row(SMALL, "fsdp", "1gbe", "FSDP", RIVALS["FSDP"], TIMES, MEMORY)
    assert row["torch"] == ASYNC and row["torch_ms"] == pytest.approx(180)
    assert row["ratio"] == pytest.approx(12 / 18)  # of 1.0, 0.5 and 0.667
    assert row["ratio_low"] == pytest.approx((0.5 + 12 / 18) / 2)
    assert row["ratio_high"] == pytest.approx((1 + 12 / 18) / 2)
    assert row["rivals"] == pytest.approx({"fully_shard": 0.6, PREFETCH: 0.625, ASYNC: 12 / 18})
    assert row["memory_ratio"] == 0.5 and row["torch_peak_mb"] == pytest.approx(100)
    assert row["ours_hidden"] == pytest.approx(0.3)  # 0.07 s of 0.1 s show
    assert row["torch_hidden"] == pytest.approx(0.35) and row["torch_megabytes"] == 4.0
    assert row["link"] == "emulated 1 GbE" and row["compute_ms"] == pytest.approx(50)
    assert row["ours_megabytes"] == 3.0 and row["processor_ratio"] == pytest.approx(0.8)


def test_the_table_is_aligned_and_says_what_is_unknown():
    nowhere = {n: replace(m, communication=[0.0] * 3) for n, m in TIMES.items()}
    rows = [
        race.row(SMALL, "fsdp", name, "FSDP", RIVALS["FSDP"], times, MEMORY)
        for name, times in (("1gbe", TIMES), ("gloo", nowhere))
    ]
    head, wire, gloo = table(rows, COLUMNS).splitlines()
    column = head.index("ratio [quartiles]")
    assert wire[column:].startswith("0.667") and gloo[column:].startswith("0.667")
    assert wire[head.index("ratio to it") :].startswith("0.600")
    assert wire[head.index("hidden") :].split() == ["30%", "35%", "0.500"]
    assert gloo[head.index("hidden") :].split() == ["-", "-", "0.500"]
    head, wire, gloo = table(rows).splitlines()  # as of tensor, context and pipeline
    assert wire[head.index("processor") :].split() == ["0.800", "3.00", "4.00"]
    assert gloo[head.index("processor") :].split() == ["0.800", "-", "-"]


def test_what_was_sent_belongs_to_the_step_that_issued_it():
    """A step may end while its weights travel. Mutants: by the end on the wire, by its start."""
    sent = [(0.9, 1.0, 1.2), (1.1, 1.2, 1.5), (1.9, 2.1, 2.4), (2.0, 2.4, 3.0)]
    calls = [race.Sent(*moments, num_bytes=10**i) for i, moments in enumerate(sent)]
    seconds, busy, num_bytes = race._sums(calls, 1.0, 2.0)
    assert (seconds, num_bytes) == (1.0, 110) and busy == pytest.approx(0.3 + 0.3)


def test_everybody_has_rivals():
    """A method that nobody is compared with, or one of ours that is compared with nobody."""
    assert list(RIVALS) == list(OURS) and all(RIVALS.values())
    assert {rival for rivals in RIVALS.values() for rival in rivals} == set(THEIRS)
    assert set(METHODS) == {*OURS, *THEIRS, ALONE}


def test_check_refuses_what_cannot_work(tmp_path):
    SMALL.check()
    wrong = dict(ranks=1, rounds=0, batch_size=0, seq_len=0, preset="x", links=())
    wrong |= dict(json=str(tmp_path / "none/rows.json"))
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            replace(SMALL, **{name: value}).check()


@pytest.mark.slow
@on_ranks(2, "link")
def test_all_contenders_take_the_same_steps():
    """Mutants: a contender that does not communicate; one that divides by the ranks twice; a
    reduce-scatter that nobody waits for."""
    mesh = Mesh(dp=2)
    link.use("1gbe")  # slow enough that whoever does not wait is late
    losses = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAMW, "eps", 1.0)  # else a step does not see the size of gradients
        patch.setitem(ADAMW, "lr", 0.5)
        for name in METHODS:
            contender = Contender(SMALL, mesh, METHODS[name], TOY)
            losses[name] = [contender.step().item() for _ in range(4)]
    link.use("none")
    alone = losses.pop(ALONE)
    for name, values in losses.items():
        assert values == pytest.approx(losses["FSDP"], rel=1e-5), name
    assert alone[0] == pytest.approx(losses["FSDP"][0], rel=1e-5)
    assert abs(alone[-1] - losses["FSDP"][-1]) > 1e-4


@pytest.mark.slow
def test_bench_writes_rows_with_a_ratio(tmp_path, capfd, monkeypatch):
    """End to end, except for memory. The bytes are those of the docstrings of zero and fsdp."""
    path = tmp_path / "rows.json"
    monkeypatch.setattr(bench, "memory", lambda config, attach: 1e6)
    bench.run(replace(SMALL, json=str(path)))
    out, _ = capfd.readouterr()
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert [row["ours"] for row in rows] == list(OURS)
    for row in rows:
        for key in ("ratio", "ratio_low", "ratio_high", "ours_ms", "torch_ms", "memory_ratio"):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0 <= row["ours_hidden"] <= 1 and 0 <= row["torch_hidden"] <= 1
        assert f"{row['ratio']:.3f}" in out and row["torch"] in RIVALS[row["ours"]]
    parameters = 758_912 * 4 / 1e6  # megabytes; n = 2, so a collective sends half of them
    sent = {row["ours"]: row["ours_megabytes"] / parameters for row in rows}
    for name in ("ZeRO-1", "ZeRO-2", "FSDP, weights kept"):
        assert sent[name] == pytest.approx(1.0, abs=0.01), name
    assert 1.3 < sent["FSDP"] < 1.5 and rows[0]["torch_megabytes"] > 1.9 * parameters


@pytest.mark.slow
def test_memory_is_that_of_training():
    """In fresh processes: sharding takes less. Mutant: a peak that the toy model has reached."""
    config = replace(SMALL, preset="small")
    whole, shared = (memory(config, METHODS[name]) for name in (ALONE, "FSDP"))
    assert whole > 4 * 17e6 > 1.2 * shared and shared > 2 * 17e6  # 4 P; 4 P/2


def test_the_committed_numbers_are_of_all_methods():
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))
    links = list(dict.fromkeys(row["link"] for row in rows))
    assert len(links) == 3 and all("emulated" in link for link in links)
    assert [(row["link"], row["ours"]) for row in rows] == [(n, o) for n in links for o in OURS]
