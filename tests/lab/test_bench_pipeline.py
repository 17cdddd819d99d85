"""The bench of pipelines: its arithmetic, that both contenders do the same work, and idle time."""

import json
import math
from dataclasses import replace

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.lab.bench import pipeline as bench
from minipar.lab.bench import pipeline_idle
from minipar.lab.bench.pipeline import RIVALS, Contender, PipelineConfig, batch
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.simulate import bubble, simulate

pytestmark = pytest.mark.trains

TOY = LlamaConfig(256, 32, 64, num_layers=5, num_heads=2, num_kv_heads=1)
SMALL = PipelineConfig(
    preset="tiny", layers=4, batch_size=2, seq_len=16, microbatches=4, rounds=2, links=("10gbe",)
)


# ---------------------------------------------------------------------- arithmetic
def test_check_refuses_what_cannot_work(tmp_path):
    SMALL.check()
    wrong = dict(ranks=1, rounds=0, batch_size=0, seq_len=0, preset="x", links=(), schedules=())
    wrong |= dict(microbatches=2, idle_ranks=3, idle_runs=0, json=str(tmp_path / "none/rows.json"))
    wrong |= dict(out=str(tmp_path / "none/pictures"))
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            replace(SMALL, **{name: value}).check()
    (tmp_path / "file").touch()
    for changes, says in [
        (dict(microbatches=5), "a multiple of --ranks 2, at least two for each; use 4 or 8"),
        (dict(ranks=3, microbatches=6), "--layers 4: --ranks 3 with .* use 6 or 12"),
        (dict(schedules=("naive",)), "--schedules .'naive'.: use some of gpipe"),
        (dict(out=str(tmp_path), idle_ranks=0), "--idle-ranks 0 leaves out"),
        (dict(out=str(tmp_path / "file")), "is a file"),
    ]:
        with pytest.raises(ValueError, match=says):
            replace(SMALL, **changes).check()


def test_idle_time_is_a_share_of_all_time():
    """1F1B of p=4, M=8: bubble 3/8, so 3/11 of the time. Mutant: the bubble itself."""
    timeline = simulate(make("1f1b", 4, 8))
    assert bubble(timeline) == pytest.approx(3 / 8)
    assert pipeline_idle.idle_share(timeline) == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe"])
def test_the_simulator_is_told_how_long_work_took_and_not_how_long_ranks_waited(name):
    """Work of a known length, with pauses between all of it. Mutant: costs from start to start."""
    schedule = make(name, 2, 4)
    seconds = {"F": 1.0, "B": 5.0, "I": 2.0, "W": 3.0}
    spans = []
    for rank, row in enumerate(schedule.actions):
        start = 0.0
        for action in row:
            end = start + seconds[action.kind]
            spans.append(Span("forward", str(action), rank, start, end))
            start = end + 10.0
    spans.append(Span("comm", "0SF0", 0, 1.0, 500.0, "pp"))
    costs = pipeline_idle.costs_of(schedule, Timeline(spans))
    parts = range(schedule.num_stages)
    assert [costs.seconds("F", part) for part in parts] == [1.0] * len(parts)
    assert [costs.seconds("B", part) for part in parts] == pytest.approx([5.0] * len(parts))
    if name == "zb_v":
        assert [costs.seconds("I", part) for part in parts] == [2.0] * len(parts)
    assert 0.009 < costs.message + costs.latency < 0.011  # as the docstring says


# ---------------------------------------------------------------------- the same work
def _steps(names: list[str], config: PipelineConfig) -> dict:
    """Losses of two steps, and the gradients of the first one, of this rank's layers."""
    mesh, found = Mesh(pp=config.ranks), {}
    for name in names:
        for who in ("ours", "torch"):
            contender = Contender(config, mesh.pp, name, who, TOY)
            losses = [contender.step().item()]
            gradients = {n: p.grad.clone() for n, p in contender.model.named_parameters()}
            losses.append(contender.step().item())
            found[name, who] = losses, gradients
    return found


@pytest.mark.slow
def test_both_contenders_take_the_same_steps(ranks):
    """Those of one device: losses, and gradients of every parameter, each on one rank.

    Mutants: a loss that is divided by the microbatches as well; a contender that leaves the weight
    gradients of a stage out; stages cut elsewhere.
    """
    model = Llama(TOY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = batch(SMALL, TOY)
    losses, gradients = [], []
    for _ in range(2):
        optimizer.zero_grad()
        loss = token_loss(model(inputs), targets) / targets.numel()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    assert losses[1] < losses[0] - 1e-4

    found = ranks(2).run(_steps, list(RIVALS), SMALL)
    for key in found[0]:
        told = [rank[key][0] for rank in found]
        assert pytest.approx(losses, rel=1e-5) in told, key  # torch tells the last stage only
        if key[1] == "ours":
            assert told[0] == told[1]
        own = [rank[key][1] for rank in found]
        assert sum(map(len, own)) == len(gradients[0]) and all(own), key
        for name, gradient in (own[0] | own[1]).items():
            torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-4, atol=1e-6)
    for name in RIVALS:
        for rank in found:
            assert rank[name, "ours"][1].keys() == rank[name, "torch"][1].keys()  # the same stages


# ---------------------------------------------------------------------- end to end
@pytest.mark.slow
def test_bench_writes_rows_and_pictures(tmp_path, capfd, monkeypatch):
    """All of it, but stages sleep for next to nothing: see test_pipeline.py for their idle time."""
    path, folder = tmp_path / "rows.json", tmp_path / "pictures"
    names = ["1f1b", "zb_h1", "dualpipe"]
    monkeypatch.setattr(pipeline_idle.run, "__defaults__", (0.001,))
    monkeypatch.setattr(pipeline_idle, "SCHEDULES", names)
    config = replace(
        SMALL,
        schedules=("gpipe", "zb_v"),
        idle_ranks=2,
        idle_runs=1,
        json=str(path),
        out=str(folder),
    )
    rows = bench.run(config)
    out, _ = capfd.readouterr()
    assert json.loads(path.read_text(encoding="utf-8")) == rows
    race, idle = rows[:2], rows[2:]
    assert [row["ours"] for row in race] == ["gpipe", "zb_v"]
    assert [row["torch"] for row in race] == ["ScheduleGPipe", "ScheduleZBVZeroBubble"]
    for row in race:
        for key in ("ratio", "ratio_low", "ratio_high", "ours_ms", "torch_ms"):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert f"{row['ratio']:.3f}" in out
    assert [row["schedule"] for row in idle] == names
    for row in idle:
        assert 0 < row["simulated"] < 1 and 0 < row["measured"] < 1
        assert f"{row['simulated']:.1%}" in out
    assert sorted(file.stem for file in folder.iterdir()) == sorted(names)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.iterdir())
