"""`minipar bench`: the arithmetic of rows, and that all contenders do the same work."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch

from minipar.cli import main
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab.bench import pipeline_idle, race
from minipar.lab.bench.expert_overlap import skewed
from minipar.lab.bench.pipeline_idle import IdleConfig
from minipar.lab.bench.race import Measured, RaceConfig, table
from minipar.lab.bench.strategies import CONTESTS, Field, run
from minipar.model.llama import LlamaConfig
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.simulate import bubble, simulate

pytestmark = pytest.mark.trains

SMALL = RaceConfig("ddp", preset="tiny", batch_size=1, seq_len=16, rounds=2, links=("1gbe",))
TOY = LlamaConfig(256, 32, 64, num_layers=4, num_heads=4, num_kv_heads=2)


# ---------------------------------------------------------------------- arithmetic
def measured(*seconds: float, num_bytes: int = 2_000_000) -> Measured:
    return Measured(list(seconds), [num_bytes] * 3)


MEASURED = {"ours": measured(0.010, 0.030, 0.012), "torch": measured(0.010, 0.060, 0.018)}


def test_a_row_compares_two_contenders():
    """Mutant: a ratio of medians (12 of 20 would be 0.6)."""
    row = race.row(SMALL, "1gbe", "tuned", "DDP", MEASURED)
    assert row["torch"] == "DDP" and row["torch_ms"] == pytest.approx(18)
    assert row["ratio"] == pytest.approx(12 / 18)  # of 1.0, 0.5 and 0.667
    assert row["ratio_low"] == pytest.approx((0.5 + 12 / 18) / 2)
    assert row["ours_megabytes"] == 2.0
    unknown = race.row(SMALL, "gloo", "tuned", "DDP", MEASURED)
    head, wire, gloo = table([row, unknown]).splitlines()
    assert wire[head.index("MB sent") :].split() == ["2.00", "2.00"]
    assert gloo[head.index("MB sent") :].split() == ["-", "-"]


def test_bytes_belong_to_the_step_that_issued_them():
    """Mutant: a call counts for the step in which the call before it was issued."""
    sent = [(0.9, 1), (1.0, 10), (1.9, 100), (2.0, 1000)]
    assert race.bytes_of(sent, 1.0, 2.0) == 110


@pytest.mark.parametrize(
    "config, word",
    [
        (replace(SMALL, ranks=1), "--ranks needs 2"),
        (replace(SMALL, rounds=0), "--rounds 1"),
        (replace(SMALL, preset="x"), "--preset x is unknown; use one of"),
        (replace(SMALL, links=()), "--links at least one"),
        (replace(SMALL, links=("gloo", "5gbe")), "5gbe"),
    ],
)
def test_bad_values_are_refused(config, word):
    with pytest.raises(ValueError, match=word):
        run(config)


@pytest.mark.slow
def test_ranks_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with race.pool(1, "gloo") as ranks:
        assert ranks.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


# ---------------------------------------------------------------------- the same work
def _losses(strategy: str) -> dict[str, list[float]]:
    contest = CONTESTS[strategy]
    config = replace(SMALL, strategy=strategy)
    shape = replace(TOY, tie_embeddings=strategy not in ("tensor", "pipeline"))
    axis = getattr(Mesh(**{contest.axis: 2}), contest.axis)
    link.use("1gbe")  # slow enough for a step that does not wait to be wrong
    torch.manual_seed(axis.rank)
    found = {}
    everybody = {name: mine for name, (mine, *_) in contest.pairs.items()}
    everybody |= {torchs: rival for _, torchs, rival in contest.pairs.values()}
    for name, make_step in everybody.items():
        step = make_step(Field(config, axis, shape))
        found[name] = [step().item() for _ in range(3)]
    link.use("none")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CONTESTS)
def test_all_contenders_take_the_same_steps(ranks, strategy):
    """Of a pipeline, PyTorch tells the loss to the last stage alone.

    Mutants: a sum that is left out; gradients that are read before they have arrived.
    """
    by_rank = ranks(2, "link").run(_losses, strategy)
    join = max if strategy == "pipeline" else sum
    names = list(by_rank[0])
    whole = {n: [join(two) for two in zip(*(r[n] for r in by_rank), strict=True)] for n in names}
    first, *_, last = whole[names[0]]
    assert first - last > 1e-4
    for name, losses in whole.items():
        assert losses == pytest.approx(whole[names[0]], rel=1e-5), name


@pytest.mark.slow
def test_bench_writes_rows(tmp_path, capfd):
    path = tmp_path / "rows.json"
    words = "bench ddp --preset tiny --seq-len 32 --rounds 2 --links 1gbe --json"
    with pytest.raises(SystemExit) as stop:
        main.main([*words.split(), str(path)])
    out, err = capfd.readouterr()
    assert stop.value.code == 0, err
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert [row["ours"] for row in rows] == ["overlapped", "tuned"]
    for row in rows:
        for key in ("ratio", "ours_ms", "torch_ms"):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["ours_megabytes"] == pytest.approx(758_912 * 4 / 1e6, rel=1e-3)  # 2 (n-1)/n = 1
        assert f"{row['ratio']:.3f}" in out


# ---------------------------------------------------------------------- idle pipelines, experts
def test_idle_time_is_a_share_of_all_time():
    """1F1B of p=4, M=8: bubble 3/8, so 3/11 of the time. Mutant: the bubble itself."""
    timeline = simulate(make("1f1b", 4, 8))
    assert bubble(timeline) == pytest.approx(3 / 8)
    assert pipeline_idle.idle_share(timeline) == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_the_simulation_is_told_how_long_work_took_and_not_how_long_ranks_waited(name):
    """Work of a known length, with pauses between. Mutant: costs from start to start."""
    schedule, seconds = make(name, 2, 4), {"F": 1.0, "B": 5.0, "I": 2.0, "W": 3.0}
    spans = [Span("comm", "0SF0", 0, 1.0, 500.0, "pp")]
    for rank, row in enumerate(schedule.actions):
        for i, action in enumerate(row):
            start = 20.0 * i
            spans.append(Span("forward", str(action), rank, start, start + seconds[action.kind]))
    costs = pipeline_idle.costs_of(schedule, Timeline(spans))
    for part in range(schedule.num_stages):
        assert costs.seconds("F", part) == 1.0
        assert costs.seconds("B", part) == pytest.approx(5.0)
        assert name == "1f1b" or costs.seconds("I", part) == 2.0
    assert 0.009 < costs.message + costs.latency < 0.011  # as the docstring says


@pytest.mark.slow
def test_idle_writes_rows(tmp_path, capfd, monkeypatch):
    path = tmp_path / "rows.json"
    names = ["1f1b", "dualpipe"]
    monkeypatch.setattr(pipeline_idle, "SECONDS", 0.001)
    monkeypatch.setattr(pipeline_idle, "SCHEDULES", names)
    rows = pipeline_idle.run(IdleConfig(2, 4, str(path)))
    assert json.loads(path.read_text(encoding="utf-8")) == rows
    assert [row["schedule"] for row in rows] == names and names[0] in capfd.readouterr().out
    assert all(0 < row["simulated"] < 1 and 0 < row["measured"] < 1 for row in rows)


@pytest.mark.parametrize("imbalance", [1, 2, 4])
def test_routing_is_as_uneven_as_was_asked(imbalance):
    chosen = skewed(8, 2, imbalance, torch.zeros(800, 8))
    load = chosen.flatten().bincount(minlength=8)
    assert load[0] == load.sum() / 8 * imbalance and load[1:].max() < 1.3 * load[1:].min()
    assert (chosen[:, 0] != chosen[:, 1]).all()
